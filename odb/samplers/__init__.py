"""Batch samplers for sets whose lengths are known beforehand, on the planning code of the online loader.

    loader = DataLoader(dataset, batch_sampler=MultipackBatchSampler(lengths, 16384, rank=rank, world_size=world_size))

Every one of them plans a whole epoch on every rank alike, from lengths, seed and epoch; rank `r` of `W` takes the plan's
batches `r, r + W, ...`. Ranks don't talk, run the same number of steps, and `len()` is exact. Call `set_epoch` before each
epoch. See docs/packing.md.
"""

from __future__ import annotations

from odb.samplers.batch_rebalance import BatchRebalanceSampler
from odb.samplers.label_balanced import LabelBalancedBatchSampler
from odb.samplers.length_grouped import LengthGroupedSampler
from odb.samplers.metadata import label_counts_of, lengths_of
from odb.samplers.multipack import MultipackBatchSampler

__all__ = [
    "BatchRebalanceSampler",
    "LabelBalancedBatchSampler",
    "LengthGroupedSampler",
    "MultipackBatchSampler",
    "label_counts_of",
    "lengths_of",
]
