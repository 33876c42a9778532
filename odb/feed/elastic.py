"""Where elastic sharding can be used, and the one order that all ranks share then."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from odb.config import ODBConfig
from odb.plan.types import I64

#: Keys of an order that begins anew until a quota is met.
ENDLESS = 1 << 48


def why_static(config: ODBConfig, dataset: Any, sampler: Any, batch_sampler: Any, world_size: int) -> str:
    """Why shares are fixed, in words; nothing where they are granted round by round."""
    if config.sharding == "static":
        return "sharding='static' was given"
    if world_size == 1:
        return "there is one rank"
    if isinstance(dataset, IterableDataset):
        return "an iterable dataset decides itself who reads what"
    if config.policy != "odb":
        return f"policy={config.policy!r} knows fixed shares alone"
    if batch_sampler is not None:
        return "a batch sampler is taken as this rank's own share"
    if sampler is None:
        return ""
    if type(sampler) is not DistributedSampler:
        return (
            f"a {type(sampler).__name__} is taken as this rank's own share (DistributedSampler and no sampler are not)"
        )
    sharded: Any = sampler.dataset
    if sampler.num_replicas != world_size or len(sharded) != len(dataset):
        return (
            f"the DistributedSampler shards {len(sharded)} samples over {sampler.num_replicas} ranks, this loader has "
            f"{len(dataset)} and {world_size}"
        )
    return ""


def shared_order(sampler: Any) -> I64:
    """Dataset indices in the order that all ranks' `DistributedSampler`s cut into shares, without its duplicates.

    Its seed, epoch and shuffle are respected; `drop_last` leaves out what it would leave out.
    """
    num_samples = len(sampler.dataset)
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        indices = torch.randperm(num_samples, generator=generator).numpy()
    else:
        indices = np.arange(num_samples)
    kept = num_samples - num_samples % sampler.num_replicas if sampler.drop_last else num_samples
    return np.ascontiguousarray(indices[:kept], np.int64)
