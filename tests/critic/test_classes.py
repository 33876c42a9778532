"""One label a sample, a class, with the default collator and the default label_shift."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import odb

SHAPES: dict[str, Any] = {
    "int": lambda i: i % 3,
    "scalar tensor": lambda i: torch.tensor(i % 3),
    "tensor of one": lambda i: torch.tensor([i % 3]),
    "list of one": lambda i: [i % 3],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_class_per_sample_counts_once_whatever_its_shape(shape: str) -> None:
    dataset = [{"input_ids": torch.arange(3 + i % 5), "labels": SHAPES[shape](i)} for i in range(21)]
    with odb.ODBDataLoader(dataset, token_budget=20) as loader:
        infos = [odb.pop_step_info(batch) for batch in loader]
    assert sum(info.local_loss_tokens for info in infos) == 21
    assert all(info.loss_scale == 1.0 for info in infos)


def test_a_single_row_is_no_exception() -> None:
    with odb.ODBDataLoader([{"input_ids": [1, 2, 3], "labels": 2}], token_budget=20) as loader:
        (info,) = [odb.pop_step_info(batch) for batch in loader]
    assert info.local_loss_tokens == 1
