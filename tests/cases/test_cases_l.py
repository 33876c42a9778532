"""Rebalancing: partition quality and conservation, without talking. The brute-force comparisons: tests/pack."""

from __future__ import annotations

import numpy as np
import ranks

from odb.plan.rebalance import additive, contiguous
from odb.samplers import BatchRebalanceSampler


def shares(rank: int, world_size: int, lengths: list[int]) -> tuple[list, list]:
    """What this rank plans by itself: the parts of all ranks, and its own batches."""
    parts = [one.tolist() for one in additive(np.array(lengths), world_size).members]
    return parts, list(BatchRebalanceSampler(lengths, 8, rank=rank, world_size=world_size))


def test_l01_ranks_agree_without_talking() -> None:
    lengths = [8, 7, 6, 5, 4, 9, 3, 2] * 4
    (parts, first), (again, second) = ranks.values(2, shares, lengths)
    assert parts == again
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert sorted(i for batch in first + second for i in batch) == list(range(len(lengths)))
    assert len(first) == len(second)


def test_l01_the_small_example() -> None:
    groups = additive(np.array([8, 7, 6, 5, 4]), 2)
    assert sorted(groups.costs.tolist()) == [15, 15]


def test_equal_samples_give_equal_groups() -> None:
    groups = contiguous(np.full(12, 50), 4)
    assert [len(one) for one in groups.members] == [3] * 4
