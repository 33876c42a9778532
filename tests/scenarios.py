"""What the rank processes of the loader tests run: module-level, so that it can be sent by reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import odb
from odb.metrics import LoaderStats
from odb.testing import LengthsDataset, Seen, collate, fingerprint, record, seen

VOCABULARY = 97
Prints = list[dict[str, str]]


def prints(loader: odb.ODBDataLoader, num_steps: int | None = None) -> Prints:
    """Every bit of a pass, or of its first steps."""
    out: Prints = []
    if num_steps == 0:
        return out
    for batch, info in loader.steps():
        out.append(fingerprint(batch) | {"info": repr(info)})
        if len(out) == num_steps:
            break
    return out


@dataclass(frozen=True)
class Spec:
    """A dataset and a loader over it.

    `share`: None (the loader shards by itself), "strided", "contiguous" (blocks of ceil(N / W)), or each rank's ids.
    """

    lengths: Sequence[int]
    token_budget: int
    share: Any = None
    num_workers: int = 1
    data: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Spec:
        """The same with other fields; `options` and `data` are merged."""
        merged = {k: getattr(self, k) | v if k in ("options", "data") else v for k, v in changes.items()}
        return replace(self, **merged)

    def dataset(self) -> LengthsDataset:
        return LengthsDataset(self.lengths, **self.data)

    def sampler(self, rank: int, world_size: int) -> list[int] | None:
        total = len(self.lengths)
        if self.share is None:
            return None
        if self.share == "strided":
            return list(range(rank, total, world_size))
        if self.share == "contiguous":
            block = -(-total // world_size)
            return list(range(rank * block, min(total, (rank + 1) * block)))
        return list(self.share[rank])

    def loader(self, rank: int, world_size: int) -> odb.ODBDataLoader:
        kwargs: dict[str, Any] = {"collate_fn": collate, "num_workers": self.num_workers} | self.options
        if (sampler := self.sampler(rank, world_size)) is not None:
            kwargs["sampler"] = sampler
        return odb.ODBDataLoader(self.dataset(), token_budget=self.token_budget, **kwargs)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of some epochs, and what its loader counted."""

    epochs: list[list[Seen]]
    stats: LoaderStats

    @property
    def steps(self) -> list[Seen]:
        """The only epoch's steps."""
        (steps,) = self.epochs
        return steps


def iterate(rank: int, world_size: int, spec: Spec, num_epochs: int = 1) -> Outcome:
    """Some epochs of a loader."""
    with spec.loader(rank, world_size) as loader:
        return Outcome([record(loader) for _ in range(num_epochs)], loader.stats())


def iterate_all(rank: int, world_size: int, specs: list[Spec]) -> list[Outcome]:
    """One epoch of each of several loaders, one after the other."""
    return [iterate(rank, world_size, spec) for spec in specs]


def iterate_with_collective(rank: int, world_size: int, spec: Spec) -> Outcome:
    """One epoch with an all-reduce of the default group in every step, as training has it."""
    steps = []
    with spec.loader(rank, world_size) as loader:
        for batch in loader:
            ranks_here = torch.ones(())
            dist.all_reduce(ranks_here)
            assert int(ranks_here) == world_size
            steps.append(seen(batch))
        return Outcome([steps], loader.stats())


# ---- gradients


class TokenModel(nn.Module):
    """Next-token model in float64, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embed = nn.Parameter(torch.randn(VOCABULARY, 4, generator=generator, dtype=torch.float64))
        self.head = nn.Parameter(torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embed[input_ids]) @ self.head


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy of the next token over labels that are not -100; NaN as a mean over none."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), reduction=reduction)


def flat_grad(model: nn.Module) -> np.ndarray[Any, Any]:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).numpy().copy()


@dataclass(frozen=True)
class Update:
    """One optimizer step as one rank saw it."""

    ids: tuple[int, ...]  # real samples of this rank, over its micro-steps
    num_micro_steps: int
    num_idle: int
    losses: tuple[float, ...]  # scaled, of each micro-step
    grad: np.ndarray[Any, Any]


def train(rank: int, world_size: int, spec: Spec) -> list[Update]:
    """One epoch of DistributedDataParallel as a user writes it; `sync_gradients` says when gradients are reduced."""
    model = DistributedDataParallel(TokenModel())
    return updates_of(rank, world_size, spec, model, ddp_sync(model), flat_grad)


def ddp_sync(model: DistributedDataParallel) -> Callable[[bool], contextlib.AbstractContextManager[Any]]:
    """A context for each micro-step, told whether it is the last one of its optimizer step."""
    return lambda last: contextlib.nullcontext() if last else model.no_sync()


def updates_of(
    rank: int,
    world_size: int,
    spec: Spec,
    model: torch.nn.Module,
    syncing: Callable[[bool], contextlib.AbstractContextManager[Any]],
    grad_of: Callable[[torch.nn.Module], Any],
) -> list[Update]:
    """One epoch of a model that is wrapped already; what each optimizer step saw, and its gradient."""
    updates: list[Update] = []
    ids, losses, num_idle = [], [], 0
    with spec.loader(rank, world_size) as loader:
        for batch in loader:
            info = odb.pop_step_info(batch)
            with syncing(info.sync_gradients):
                loss = odb.scale_loss(causal_loss(model(batch["input_ids"]), batch["labels"]), info)
                loss.backward()
            losses.append(loss.item())
            num_idle += info.idle
            ids += [] if info.idle else batch["id"].tolist()
            if info.sync_gradients:
                updates.append(Update(tuple(ids), len(losses), num_idle, tuple(losses), grad_of(model)))
                model.zero_grad()
                ids, losses, num_idle = [], [], 0
    assert not losses, "the epoch ended inside an optimizer step"
    return updates


def reference_grad(dataset: LengthsDataset, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Gradient of the mean over all loss-bearing tokens of these samples, one sample at a time in one process."""
    model = TokenModel()
    num_tokens = sum(dataset.num_loss_tokens(i) for i in ids)
    for sample in (dataset[i] for i in ids):
        assert sample is not None
        total = causal_loss(model(sample["input_ids"][None]), sample["labels"][None], reduction="sum")
        (total / max(1, num_tokens)).backward()
    return flat_grad(model)


def relative_error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Distance of two gradients as a share of the expected one's length; of nothing expected, the distance."""
    distance, size = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected))
    return distance / size if size else distance


def assert_exact_gradients(spec: Spec, updates_per_rank: list[list[Update]], tolerance: float = 1e-12) -> None:
    """Every update's gradient is that of one process over the tokens of all ranks and micro-steps, on every rank."""
    dataset = spec.dataset()
    assert len({len(updates) for updates in updates_per_rank}) == 1
    for number, together in enumerate(zip(*updates_per_rank, strict=True)):
        expected = reference_grad(dataset, [i for update in together for i in update.ids])
        for rank, update in enumerate(together):
            error = relative_error(update.grad, expected)
            assert error <= tolerance, f"update {number}, rank {rank}: relative error {error:.2e}"


def log_normal(count: int, mean: float, spread: float, low: int, high: int, seed: int) -> list[int]:
    """Lengths of the shape that text has."""
    raw = np.random.default_rng(seed).lognormal(np.log(mean), spread, count)
    return [int(x) for x in np.clip(raw, low, high)]


@contextlib.contextmanager
def raises_with(kind: type[BaseException], *parts: str) -> Iterator[None]:
    """The body raises `kind` with all parts in its text."""
    try:
        yield
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} not in: {error}"
    else:
        raise AssertionError(f"did not raise {kind.__name__}")
