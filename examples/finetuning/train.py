"""The training loop, the same for every method, and the held-out loss."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .encoding import ChatDataset, collate, row_lengths
from .methods import Batch, Method, Step
from .metrics import LossPoint, RankLog, Run, summarize
from .model import ModelConfig, Transformer, num_loss_tokens, sum_loss
from .progress import Reporter
from .ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True)
class TrainConfig:
    """What all methods share besides the data."""

    model: ModelConfig
    epochs: int
    seed: int
    learning_rate: float
    num_evaluations: int


class Clock:
    """Seconds of training: stands still during evaluations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited = 0.0
        self._paused = 0.0
        self._start = self._now()

    def seconds(self) -> float:
        """Since the start, pauses excluded."""
        return self._now() - self._start - self._paused

    def pause(self, work: Callable[[], T]) -> T:
        """Does some work that doesn't count."""
        start = self._now()
        result = work()
        self._paused += self._now() - start
        return result

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """The items; counts the time that each one made us wait."""
        iterator = iter(items)
        while True:
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.waited += time.perf_counter() - start
            yield item

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def train(
    method: Method, num_samples: int, heldout: HeldOut, config: TrainConfig, ranks: Ranks, reporter: Reporter
) -> Run:
    """Trains a new model, with the same initial weights for every method, on all samples of all epochs."""
    torch.manual_seed(config.seed)
    model = ranks.wrap(Transformer(config.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01)
    total, samples = num_samples * config.epochs, 0
    log, curve = RankLog(), [LossPoint(0, 0.0, heldout.loss(model))]
    clock = Clock(ranks.device)
    for batch, step in clock.waiting(all_steps(method, config.epochs, clock)):
        set_learning_rate(optimizer, config.learning_rate, samples / total)
        loss = backward(model, method, batch, step, ranks.device)
        if step.sync_gradients:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        samples += step.all_samples_this_step
        record(log, batch, step)
        reporter.step(samples, loss, clock.seconds())
        if step.sync_gradients and samples * config.num_evaluations >= len(curve) * total:
            curve.append(LossPoint(samples, clock.seconds(), clock.pause(lambda: heldout.loss(model))))
            reporter.heldout_loss(curve[-1])
    log.wait_seconds = clock.waited - method.prepass_seconds
    logs = ranks.gather(log)
    return Run(summarize(method.name, logs, curve, method.prepass_seconds), curve, logs)


def all_steps(method: Method, epochs: int, clock: Clock) -> Iterator[tuple[Batch, Step]]:
    """All epochs' batches; what a method must know beforehand is found out while the clock stands still."""
    for epoch in range(epochs):
        clock.pause(partial(method.prepare, epoch))
        yield from method.steps(epoch)


def backward(model: nn.Module, method: Method, batch: Batch, step: Step, device: torch.device) -> float:
    """Forward and backward; gradients are exchanged on the last batch of an optimizer step only. Returns the loss."""
    with gradient_exchange(model, step.sync_gradients), autocast(device):
        loss = model(**to_device(batch, device)).loss
        weighted: Tensor = method.scale(loss, step)
        torch.autograd.backward(weighted)
    return float(loss.detach())


def record(log: RankLog, batch: Batch, step: Step) -> None:
    """Measures a batch by itself, whatever the method says of it."""
    ids = batch["input_ids"]
    lengths = [] if step.idle else row_lengths(ids).tolist()
    log.padded_tokens.append(0 if step.idle else ids.numel())
    log.lengths.append(lengths)
    log.optimizer_steps += step.sync_gradients
    log.checksum += sum(zlib.crc32(row[:n].numpy().tobytes()) for row, n in zip(ids, lengths, strict=False))


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, progress: float) -> None:
    """Linear warm-up over a tenth of the samples, then a cosine down to a tenth of the peak.

    A function of the samples seen, not of steps: methods that cut the samples into other steps get the same schedule.
    """
    warm = min(1.0, (progress + 0.01) / 0.1)
    rate = peak * warm * (0.55 + 0.45 * math.cos(math.pi * progress))
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_exchange(model: nn.Module, sync: bool) -> AbstractContextManager[None]:
    """Lets DDP exchange gradients on the last batch of an optimizer step only."""
    return nullcontext() if sync or not isinstance(model, DistributedDataParallel) else model.no_sync()


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on CUDA, float32 on the CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch's tensors on the device."""
    return {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}


class HeldOut:
    """The held-out samples, encoded once, without augmentation; each rank computes its share."""

    def __init__(self, dataset: ChatDataset, ranks: Ranks, token_budget: int) -> None:
        samples = sorted((dataset[i] for i in range(len(dataset))), key=lambda s: len(s["input_ids"]))
        mine = samples[ranks.rank :: ranks.world_size]
        rows = max(1, token_budget // dataset.max_length)
        self.batches = [collate(mine[i : i + rows]) for i in range(0, len(mine), rows)]
        self.ranks = ranks

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Mean loss over all held-out labels of all ranks."""
        module = model.module if isinstance(model, DistributedDataParallel) else model
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in self.batches:
            on_device = to_device(batch, self.ranks.device)
            with autocast(self.ranks.device):
                logits: Tensor = module(on_device["input_ids"]).logits
            loss = sum_loss(logits, on_device["labels"])
            totals += torch.tensor([float(loss), float(num_loss_tokens(batch["labels"]))])
        loss_sum, count = self.ranks.sum(totals).tolist()
        return float(loss_sum / max(1.0, count))
