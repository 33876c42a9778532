"""Cases of groups I and J that need no trainer: one layer of sharding, divisible micro-step counts, unknown lengths."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
from scenarios import Spec, iterate, log_normal, raises_with
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import odb
from odb.errors import ConfigError
from odb.testing import LengthsDataset, assert_each_once, assert_steps_aligned, collate, make_sample, record, seen

# ---- I-03


class StridedStream(IterableDataset):
    """A stream that every rank reads its own part of."""

    def __init__(self, rank: int, world_size: int, num_samples: int) -> None:
        self.ids = range(rank, num_samples, world_size)

    def __iter__(self) -> Any:
        return (make_sample(i, 5 + i % 7) for i in self.ids)


def sharded_once(rank: int, world_size: int, is_stream: bool) -> list[Any]:
    if is_stream:
        plain: Any = DataLoader(StridedStream(rank, world_size, 40), batch_size=4, collate_fn=collate)
    else:
        dataset = LengthsDataset([5 + i % 7 for i in range(40)])
        plain = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset), collate_fn=collate)
    with odb.wrap(plain, token_budget=30, timeout_s=30.0) as loader:
        return record(loader)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_stream", [False, True])
def test_i03_each_rank_reads_its_share_once(is_stream: bool) -> None:
    per_rank = ranks.values(2, sharded_once, is_stream)
    assert_each_once(per_rank, range(40))
    assert [sum(len(step.ids) for step in steps if not step.idle) for steps in per_rank] == [20, 20]


def test_i03_two_layers_are_refused() -> None:
    plain = DataLoader(LengthsDataset([5] * 8), batch_size=2, collate_fn=collate)
    with odb.apply(plain, token_budget=10) as handle:
        for twice in (handle, plain):
            for layer in (odb.wrap, odb.apply):
                with raises_with(ConfigError, "odb batches already"):
                    layer(twice, token_budget=10)  # type: ignore[operator]


def test_i07_made_anew_says_what_to_do() -> None:
    """What frameworks do that replace samplers: a loader of the same class, with another sampler."""
    plain = DataLoader(LengthsDataset([5] * 8), batch_size=2, collate_fn=collate)
    with odb.apply(plain, token_budget=10), raises_with(ConfigError, "odb.wrap", "use_distributed_sampler=False"):
        type(plain)(plain.dataset, batch_size=2, sampler=range(4))


# ---- I-10


@pytest.mark.parametrize(("num_samples", "num_steps", "num_fillers"), [(10, 8, 0), (3, 4, 1)])
def test_i10_micro_steps_are_a_multiple(num_samples: int, num_steps: int, num_fillers: int) -> None:
    options = {"grad_accum_steps": 4, "accum_tail": "fill"}
    steps = iterate(0, 1, Spec([10] * num_samples, 20, num_workers=0, options=options)).steps
    assert len(steps) == num_steps
    assert sum(step.idle for step in steps) == num_fillers
    assert all(len(step.ids) > 0 for step in steps)
    assert_each_once([steps], range(num_samples))


# ---- J-01


def lengths_asked(rank: int, world_size: int) -> tuple[list[str], list[Any]]:
    """What `len` says before, within and after an epoch, and the epoch."""
    said = []

    def ask() -> None:
        try:
            said.append(str(len(loader)))
        except TypeError as error:
            said.append(f"TypeError: {error}")

    dataset = LengthsDataset(log_normal(100, 40, 0.8, 3, 400, seed=5))
    with odb.ODBDataLoader(dataset, token_budget=800, collate_fn=collate, timeout_s=30.0) as loader:
        ask()
        steps = []
        for step in record_live(loader):
            steps.append(step)
            if len(steps) == 2:
                ask()
        ask()
    return said, steps


def record_live(loader: odb.ODBDataLoader) -> Any:
    return (seen(batch) for batch in loader)


@pytest.mark.timeout(60)
def test_j01_a_length_is_never_a_guess() -> None:
    found = ranks.values(2, lengths_asked)
    assert all(text.startswith("TypeError") and "max_steps" in text for said, _ in found for text in said)
    assert [len(said) for said, _ in found] == [3, 3]
    assert_steps_aligned([steps for _, steps in found])
