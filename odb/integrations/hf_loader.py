"""From the loader that a Hugging Face Trainer would use to odb's: the same dataset, columns, collator and workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from transformers import default_data_collator

from odb.collators import PerSample
from odb.errors import ConfigError
from odb.integrations.common import Progress, mask_filler
from odb.loader import ODBDataLoader
from odb.resume import State
from odb.step import STEP_INFO_KEY

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


def rebuilt(plain: Any, rank: int, world_size: int, seed: int, options: dict[str, Any]) -> ODBDataLoader:
    """The loader of `odb` over what a Trainer's own loader reads.

    Args:
        plain: what `Trainer.get_train_dataloader` gave, prepared by Accelerate or not.
        rank: among the data-parallel ones.
        world_size: number of data-parallel ranks.
        seed: of the order.
        options: of `ODBDataLoader`.
    """
    if not isinstance(plain, DataLoader):
        raise ConfigError(
            f"get_train_dataloader gave a {type(plain).__name__}: odb needs a torch DataLoader there, or give it the loader "
            "to use: enable_odb(trainer, dataloader=...)"
        )
    dataset = plain.dataset
    if isinstance(dataset, IterableDatasetShard):  # Accelerate's share repeats samples to fill its last batch
        dataset = dataset.dataset
    arguments: dict[str, Any] = {
        "dataset": dataset,
        "num_workers": plain.num_workers,
        "collate_fn": _collator(plain.collate_fn),
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
    return ODBDataLoader(**arguments, **({"seed": seed} | options))


def _collator(collate_fn: Any) -> Any:
    """The Trainer's collator. Its default stacks samples of one length only: odb's pads instead."""
    inner = getattr(collate_fn, "data_collator", collate_fn)  # inside transformers' RemoveColumnsCollator
    if isinstance(inner, PerSample):
        return inner
    return None if inner is default_data_collator else collate_fn


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
    return getattr(batches, "sampler", plain.sampler) if batches is not None else plain.sampler


def _order(sampler: Any, rank: int, world_size: int, seed: int) -> dict[str, Any]:
    """Who decides the order: odb where the Trainer would shuffle, sort by length or read in order; else the sampler."""
    name = type(sampler).__name__
    if isinstance(sampler, SequentialSampler):
        return {"shuffle": False}
    if isinstance(sampler, RandomSampler) or sampler is None:
        return {"shuffle": True}
    if name in _BY_LENGTH or name == "BatchSampler":
        logger.info("%s is not used: odb shuffles, and makes batches of like lengths itself", name)
        return {"shuffle": True}
    return {"sampler": RankShare(sampler, rank, world_size, seed)}


class TrainerLoader:
    """What the Trainer iterates: odb's loader, counted; fillers without labels; epochs as the run has them."""

    def __init__(self, loader: ODBDataLoader, progress: Progress, first_epoch: int) -> None:
        self.loader = loader
        self.progress = progress
        self.first_epoch = first_epoch  # a resumed Trainer counts its epochs from 0 again
        self.dataset = loader.dataset
        self.batch_size = None
        self.sampler = None
        self.batch_sampler = None

    def set_epoch(self, epoch: int) -> None:
        """The next pass is the Trainer's epoch `epoch`."""
        self.progress.begin_epoch(self.first_epoch + epoch)
        self.loader.set_epoch(self.first_epoch + epoch)

    def __iter__(self) -> Iterator[Any]:
        """One epoch; each batch carries its info."""
        for batch, info in self.loader.steps():
            if not isinstance(batch, dict) and not hasattr(batch, "keys"):
                raise ConfigError(
                    f"a Trainer needs batches that are mappings, collate_fn gave a {type(batch).__name__}"
                )
            mask_filler(batch, info)
            self.progress.add(info)
            batch[STEP_INFO_KEY] = info
            yield batch

    def __len__(self) -> int:
        """Unknown: raises `TypeError`."""
        return len(self.loader)

    def state_dict(self) -> State:
        """See `ODBDataLoader.state_dict`."""
        return self.loader.state_dict()
