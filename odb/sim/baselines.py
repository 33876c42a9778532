"""What an epoch comes to where batches are formed otherwise: fixed, sorted, and by an oracle that knows all lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from odb.plan import group
from odb.plan.cost import padded_length
from odb.plan.group import Sorted
from odb.plan.types import I64, Measures, PlanConfig


@dataclass(frozen=True, slots=True)
class Steps:
    """An epoch's batches: rows and padded row length of each rank's in each step, shapes (S, W); 0 where it is idle."""

    rows: I64
    padded_len: I64


def fixed(config: PlanConfig, lengths: I64, num_ranks: int) -> Steps:
    """Batches of the one size that never exceeds the budget, in the order of the epoch."""
    return _of_one_size(config, lengths, num_ranks)


def by_length(config: PlanConfig, lengths: I64, num_ranks: int) -> Steps:
    """The same size, but all samples sorted by length first: hardly any padding, and an order that is not random."""
    return _of_one_size(config, np.sort(lengths)[::-1], num_ranks)


def _of_one_size(config: PlanConfig, lengths: I64, num_ranks: int) -> Steps:
    padded = padded_length(lengths, config)
    longest = Sorted.of(_measures(padded.max(keepdims=True)), config)
    size = max(
        1, min(int(group.most_rows(longest, config, config.token_budget)[0]), config.max_samples or len(lengths))
    )
    starts = np.arange(0, len(lengths), size)
    rows = np.diff(np.append(starts, len(lengths)))
    return _dealt(rows, np.maximum.reduceat(padded, starts), num_ranks)


def oracle(config: PlanConfig, lengths: I64, num_ranks: int) -> Steps:
    """Groups of the whole set sorted by length, as few as possible, `num_ranks` of similar cost at a time."""
    samples = Sorted.of(_measures(lengths), config)
    ends = group.greedy(samples, config)
    starts = np.array([0, *ends[:-1]], np.int64)
    by_cost = np.argsort(-group.slice_costs(samples, ends, config), kind="stable")
    return _dealt(np.diff([0, *ends])[by_cost], samples.padded[starts][by_cost], num_ranks)


def _measures(lengths: I64) -> Measures:
    nothing = np.zeros_like(lengths)
    return Measures(np.arange(len(lengths)), lengths, nothing, nothing, nothing)


def _dealt(rows: I64, padded: I64, num_ranks: int) -> Steps:
    """Batch `k` runs on rank `k % num_ranks`."""
    missing = -len(rows) % num_ranks
    shape = (-1, num_ranks)
    return Steps(np.pad(rows, (0, missing)).reshape(shape), np.pad(padded, (0, missing)).reshape(shape))
