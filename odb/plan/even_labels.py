"""Label balancing of the groups that a rank emits in one round: samples and rows change places, costs never rise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from odb.plan.label_search import exchange_rows, exchange_samples, exchange_twos
from odb.plan.labels import PASSES, Labelled, Microbatch, RowBounds
from odb.plan.packed import rows_of
from odb.plan.types import I64, Measures, PlanConfig


def even_labels(config: PlanConfig, window: Measures, groups: tuple[I64, ...]) -> tuple[I64, ...]:
    """The same groups with their samples exchanged so that loss-bearing tokens are spread as evenly as it goes.

    Every group keeps its number of samples and rows, every row its capacity; of two groups that exchange neither becomes
    dearer than the dearer one was, nor do both together.
    """
    if len(groups) < 2:
        return groups
    is_packed = config.layout == "packed"
    batches = [_rows(config, window, group) if is_packed else [[int(i)] for i in group] for group in groups]
    data = Labelled(window.length, window.loss_tokens, np.zeros(len(window), np.int64))
    capacity = config.token_budget // config.rows_per_batch
    bounds = RowBounds(
        capacity=capacity - capacity % config.pad_to_multiple_of if is_packed else None,
        multiple=config.pad_to_multiple_of,
        keeps_peak=True,
    )
    exchanges = (exchange_samples, exchange_twos) if is_packed else (exchange_samples,)
    for exchange in (exchange_rows, *exchanges) if config.rows_per_batch > 1 else exchanges:
        for _ in range(PASSES):
            if not exchange(batches, data, bounds):
                break
    return tuple(np.array([i for row in batch for i in row], np.int64) for batch in batches)


def _rows(config: PlanConfig, window: Measures, group: I64) -> Microbatch:
    ends = rows_of(window.length[group], config)
    return [group[a:b].tolist() for a, b in pairwise([0, *ends])]
