"""From a loader that Accelerate shards, or would shard, to odb's: the same dataset, collator and workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from odb.config import make_config
from odb.errors import ConfigError
from odb.loader import LOADER_NAMES, ODBDataLoader

logger = logging.getLogger("odb")

_MIN_PREFETCH = 64
#: Samplers of transformers that sort by length beforehand: what odb does better afterwards.
_BY_LENGTH = ("LengthGroupedSampler", "DistributedLengthGroupedSampler", "BatchRebalanceSampler")


class RankShare(Sampler[Any]):
    """Every n-th key of a sampler that goes over the whole dataset, in the same order on every rank."""

    def __init__(self, sampler: Any, rank: int, world_size: int, seed: int) -> None:
        self.sampler = sampler
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """The order of the next pass; a sampler that draws from a generator gets one that says the same everywhere."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        elif hasattr(self.sampler, "generator"):
            self.sampler.generator = torch.Generator().manual_seed(self.seed + epoch)

    def __iter__(self) -> Iterator[Any]:
        """This rank's keys."""
        return iter(list(self.sampler)[self.rank :: self.world_size])

    def __len__(self) -> int:
        """How many there are."""
        return len(range(self.rank, len(self.sampler), self.world_size))


class RankStream(IterableDataset[Any]):
    """Every n-th sample of a stream that every rank reads whole."""

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.rank, self.world_size = rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Passed on."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """This rank's samples."""
        for number, sample in enumerate(self.dataset):
            if number % self.world_size == self.rank:
                yield sample


def place_of(options: dict[str, Any], rank: int, world_size: int) -> tuple[int, int]:
    """This process's place among the data-parallel ranks, as options say or else as given; refuses wrong options.

    Raises:
        ConfigError: an option that is unknown or wrong.
    """
    config = make_config({name: value for name, value in options.items() if name not in LOADER_NAMES})
    if config.dp_rank is None or config.dp_world_size is None:
        return rank, world_size
    return config.dp_rank, config.dp_world_size


def rebuilt(
    plain: Any, *, rank: int, world_size: int, seed: int, options: dict[str, Any], keep_collator: bool = True
) -> ODBDataLoader:
    """The loader of `odb` over what a loader reads that Accelerate shards, or would shard: each rank its share, once.

    Args:
        plain: a `DataLoader` over the whole dataset, prepared by Accelerate or not; or with a `DistributedSampler`.
        rank: among the data-parallel ones.
        world_size: number of data-parallel ranks.
        seed: of the order.
        options: of `ODBDataLoader`; `collate_fn` may be among them.
        keep_collator: whether to take the loader's `collate_fn`.

    Raises:
        ConfigError: no `DataLoader`, or one whose batches are decided by a batch sampler.
    """
    if not isinstance(plain, DataLoader):
        raise ConfigError(f"odb needs a torch DataLoader to take over, got a {type(plain).__name__}")
    dataset = plain.dataset
    if isinstance(dataset, IterableDatasetShard):  # Accelerate's share repeats samples to fill its last batch
        dataset = dataset.dataset
    arguments: dict[str, Any] = {
        "dataset": dataset,
        "num_workers": plain.num_workers,
        "collate_fn": plain.collate_fn if keep_collator and plain.collate_fn is not default_collate else None,
        "pin_memory": plain.pin_memory,
        "worker_init_fn": plain.worker_init_fn,
        "multiprocessing_context": plain.multiprocessing_context,
        "persistent_workers": plain.persistent_workers,
        # Of its own, so that making an iterator draws nothing from the generator that dropout draws from.
        "generator": torch.Generator().manual_seed(seed),
    }
    if plain.num_workers:
        arguments["prefetch_factor"] = max(_MIN_PREFETCH, (plain.prefetch_factor or 2) * (plain.batch_size or 1))
    if isinstance(dataset, IterableDataset):
        arguments["dataset"] = _share_of_stream(dataset, rank, world_size)
    else:
        arguments |= _order(_sampler(plain), rank, world_size, seed)
    return ODBDataLoader(**(arguments | {"seed": seed} | options))


def _share_of_stream(dataset: Any, rank: int, world_size: int) -> Any:
    if world_size == 1:
        return dataset
    if getattr(dataset, "_distributed", None) is not None:  # datasets.distributed.split_dataset_by_node was here
        logger.info("the stream is split by node already: every rank reads its own part")
        return dataset
    return RankStream(dataset, rank, world_size)


def _sampler(plain: Any) -> Any:
    """The sampler behind all that Accelerate put around it."""
    batches = plain.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if batches is None:
        return plain.sampler
    if not hasattr(batches, "sampler") and type(batches).__name__ not in _BY_LENGTH:
        raise ConfigError(
            f"{type(batches).__name__} decides which samples make a batch, and so would odb: give a sampler, which decides "
            "their order, or none"
        )
    return getattr(batches, "sampler", batches)


def _order(sampler: Any, rank: int, world_size: int, seed: int) -> dict[str, Any]:
    """Who decides the order: odb where the loader shuffles, sorts by length or reads in order; else the sampler."""
    name = type(sampler).__name__
    if isinstance(sampler, SequentialSampler):
        return {"shuffle": False}
    if isinstance(sampler, RandomSampler):
        return {"shuffle": True}
    if isinstance(sampler, DistributedSampler):  # a share already
        return {"sampler": sampler}
    if name in _BY_LENGTH:
        logger.info("%s is not used: odb shuffles, and makes batches of like lengths itself", name)
        return {"shuffle": True}
    return {"sampler": RankShare(sampler, rank, world_size, seed)}
