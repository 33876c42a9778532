"""Three ways of making batches from the same samples, behind one interface.

All keep the same memory bound: no rank ever computes more than `token_budget` padded tokens at once.

- `fixed`: the largest number of rows whose worst case, all of `max_length`, fits the budget;
- `sorted`: as many rows, but of similar length; it must know all lengths beforehand, so it runs the whole input
  pipeline once more, in the workers, before every epoch;
- `odb`: decides after the workers have run; as many rows as fit.

The first two accumulate gradients so that an optimizer step sees about as many samples as one of `odb`. The loss of an
optimizer step is for all three the mean over all its loss-bearing labels, over ranks and accumulation, so what
differs is the batching alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import odb

from .encoding import ChatDataset, Sample, collate
from .model import num_loss_tokens
from .ranks import Ranks

Batch: TypeAlias = dict[str, Tensor]
TYPICAL_FILL = 0.9  # of the token budget, that real tokens take up in a batch of `odb`


class Step(Protocol):
    """What the training loop must know of a batch; `odb.ODBStepInfo` says it under these names."""

    @property
    def all_samples_this_step(self) -> int: ...
    @property
    def idle(self) -> bool: ...
    @property
    def sync_gradients(self) -> bool: ...


class Method(ABC):
    """A way of making batches."""

    name: str
    prepass_seconds: float = 0.0

    def prepare(self, epoch: int) -> None:  # noqa: B027  (most need nothing beforehand)
        """Finds out what must be known before an epoch; its seconds are counted apart, in `prepass_seconds`."""

    @abstractmethod
    def steps(self, epoch: int) -> Iterator[tuple[Batch, Step]]:
        """This rank's batches of one epoch; the same number on every rank."""

    @abstractmethod
    def scale(self, loss: Tensor, step: Step) -> Tensor:
        """The batch's mean loss, weighted so that DDP's average over ranks is the mean over all labels."""

    def close(self) -> None:  # noqa: B027
        """Ends what still runs."""


@dataclass(frozen=True)
class Settings:
    """What all methods share."""

    dataset: ChatDataset
    ranks: Ranks
    token_budget: int
    num_workers: int
    seed: int
    accumulation: int  # batches per optimizer step, of the methods with a fixed number of rows

    @property
    def rows(self) -> int:
        """Rows of a fixed batch: as many as fit if all are as long as can be."""
        return self.token_budget // self.dataset.max_length


class OnlineBatches(Method):
    """`odb`: the batch size follows the lengths that came out of the workers."""

    name = "odb"

    def __init__(self, settings: Settings) -> None:
        self.dataset = settings.dataset
        self.loader = odb.ODBDataLoader(
            settings.dataset,
            token_budget=settings.token_budget,
            num_workers=settings.num_workers,
            shuffle=True,
            collate_fn=collate,
            loss_scaling="exact",
            seed=settings.seed,
        )

    def steps(self, epoch: int) -> Iterator[tuple[Batch, Step]]:
        self.dataset.set_epoch(epoch)
        self.loader.set_epoch(epoch)
        for batch in self.loader:
            yield batch, odb.pop_step_info(batch)

    def scale(self, loss: Tensor, step: Step) -> Tensor:
        return odb.scale_loss(loss, step)

    def close(self) -> None:
        self.loader.close()


@dataclass(frozen=True)
class RowStep:
    """A batch of a fixed number of rows, as `Step` has it, and its exact loss scale."""

    all_samples_this_step: int
    idle: bool
    sync_gradients: bool
    loss_scale: float


class RowBatches(Method):
    """Batches of a fixed number of rows: the plain `DataLoader` over a list of batches, with gradient accumulation."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.world_size = settings.ranks.world_size

    @abstractmethod
    def order(self, epoch: int) -> list[list[int]]:
        """All ranks' batches together: each entry is one step's samples, to be dealt to the ranks."""

    def steps(self, epoch: int) -> Iterator[tuple[Batch, Step]]:
        self.settings.dataset.set_epoch(epoch)
        mine = deal(self.order(epoch), self.settings.ranks.rank, self.world_size)
        filler = [0]  # where the last step has fewer samples than ranks; weighs nothing
        batches = iter(loader(self.settings, [rows or filler for rows in mine]))
        for first in range(0, len(mine), self.settings.accumulation):
            rows = [len(r) for r in mine[first : first + self.settings.accumulation]]
            yield from self._window(list(islice(batches, len(rows))), rows)

    def _window(self, batches: list[Batch], rows: list[int]) -> Iterator[tuple[Batch, Step]]:
        """One optimizer step's batches, weighted by the labels of all of them on all ranks."""
        local = [int(num_loss_tokens(b["labels"])) if n else 0 for b, n in zip(batches, rows, strict=True)]
        totals = self.settings.ranks.sum(torch.tensor([sum(local), *rows])).tolist()
        for i, batch in enumerate(batches):
            scale = self.world_size * local[i] / max(1, totals[0])
            yield batch, RowStep(totals[1 + i], rows[i] == 0, i == len(batches) - 1, scale)

    def scale(self, loss: Tensor, step: Step) -> Tensor:
        assert isinstance(step, RowStep)
        return loss * step.loss_scale


class FixedBatches(RowBatches):
    """A random order, cut into batches of equal numbers of rows."""

    name = "fixed"

    def order(self, epoch: int) -> list[list[int]]:
        shuffled = rng(self.settings, epoch).permutation(len(self.settings.dataset))
        return chunks(shuffled, self.settings.rows * self.world_size)


class SortedBatches(RowBatches):
    """Sorted by length over all ranks, cut into batches of equal numbers of rows; the batches come in random order."""

    name = "sorted"

    def prepare(self, epoch: int) -> None:
        start = time.perf_counter()
        self.settings.dataset.set_epoch(epoch)  # random truncation: other lengths in every epoch
        self.lengths = self._all_lengths()
        self.prepass_seconds += time.perf_counter() - start

    def order(self, epoch: int) -> list[list[int]]:
        by_length = np.argsort(self.lengths, kind="stable")
        batches = chunks(by_length, self.settings.rows * self.world_size)
        return [batches[i] for i in rng(self.settings, epoch).permutation(len(batches))]

    def _all_lengths(self) -> list[int]:
        """Runs the input pipeline once for nothing but the lengths, each rank its share."""
        ranks, num_samples = self.settings.ranks, len(self.settings.dataset)
        mine = list(range(ranks.rank, num_samples, ranks.world_size))
        parts = chunks(np.array(mine), 64)
        found = torch.zeros(num_samples, dtype=torch.int64)
        for indices, lengths in zip(parts, loader(self.settings, parts, only_lengths), strict=True):
            found[indices] = lengths
        return [int(n) for n in ranks.sum(found)]


def loader(
    settings: Settings, batches: list[list[int]], collate_fn: Callable[[list[Sample]], Any] = collate
) -> DataLoader[Any]:
    """The plain `DataLoader` over the given batches."""
    return DataLoader(settings.dataset, batch_sampler=batches, num_workers=settings.num_workers, collate_fn=collate_fn)


def only_lengths(samples: list[Sample]) -> Tensor:
    """A collate function that keeps nothing but the lengths."""
    return torch.tensor([len(s["input_ids"]) for s in samples])


def rng(settings: Settings, epoch: int) -> np.random.Generator:
    """The same stream on every rank."""
    return np.random.default_rng((settings.seed, epoch))


def chunks(values: npt.NDArray[Any], size: int) -> list[list[int]]:
    """Consecutive parts of `size`; the last one may be shorter."""
    return [values[i : i + size].tolist() for i in range(0, len(values), size)]


def deal(steps: list[list[int]], rank: int, world_size: int) -> list[list[int]]:
    """One rank's share of every step, one sample after the other in turn; nothing lost, nothing twice."""
    return [samples[rank::world_size] for samples in steps]


METHODS: dict[str, type[FixedBatches] | type[SortedBatches] | type[OnlineBatches]] = {
    method.name: method for method in (FixedBatches, SortedBatches, OnlineBatches)
}


def accumulation_to_match(token_budget: int, rows: int, mean_length: float) -> int:
    """Fixed batches per optimizer step so that it sees about as many samples as fill the token budget."""
    return max(1, round(TYPICAL_FILL * token_budget / mean_length / rows))
