"""What the DeepSpeed adapter computes by itself; its training is in test_loops.py."""

from __future__ import annotations

from typing import Any

import pytest
from scenarios import raises_with

import odb
from odb.errors import ConfigError
from odb.integrations.deepspeed import batch_config, lr_factor
from odb.testing import LengthsDataset


def loader(accumulation: int = 3) -> odb.ODBDataLoader:
    options: dict[str, Any] = {"grad_accum_steps": accumulation, "dp_rank": 0, "dp_world_size": 2}
    return odb.ODBDataLoader(LengthsDataset([3] * 9), token_budget=6, **options)


def test_case_i_08_batch_numbers_are_consistent() -> None:
    given = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
    config = batch_config(loader(), given)
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] * 3 * 2 == 6
    assert config["gradient_accumulation_steps"] == 3
    assert config["zero_optimization"] == {"stage": 2}
    assert given["train_batch_size"] == "auto", "the caller's own stays as it was"


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("gradient_accumulation_steps", 4, "grad_accum_steps"),
        ("train_batch_size", 64, "token_budget"),
        ("train_micro_batch_size_per_gpu", 8, "token_budget"),
    ],
)
def test_other_batch_numbers_are_refused(name: str, value: int, remedy: str) -> None:
    with raises_with(ConfigError, f"{name}={value}", remedy):
        batch_config(loader(), {name: value})


def test_case_i_08_learning_rate_follows_the_tokens() -> None:
    assert 0.1 * lr_factor(500, 1000) == pytest.approx(0.05)
    assert 0.1 * lr_factor(500, 1000, "sqrt") == pytest.approx(0.0707107, abs=1e-7)
    assert lr_factor(500, 1000, "none") == 1.0


@pytest.mark.parametrize("arguments", [(1, 0), (-1, 5), (float("nan"), 5), (1, 5, "cubic")])
def test_wrong_learning_rate_arguments(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError):
        lr_factor(*arguments)
