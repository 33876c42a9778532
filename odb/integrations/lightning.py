"""Lightning: one call makes a `Trainer` and a loader fit together; the module stays as it is.

    loader = odb.ODBDataLoader(dataset, token_budget=16384, grad_accum_steps=4)
    trainer = L.Trainer(strategy="ddp", accumulate_grad_batches=4)
    trainer.fit(module, attach(trainer, loader))

`training_step` gets plain batches and returns the mean loss over the batch, as ever. What `attach` adds:

- the gradient of each batch is weighed by `ODBStepInfo.loss_scale` while it flows back from the loss (and not divided by
  `accumulate_grad_batches`), so that it is exact; the mean over all tokens of an optimizer step is logged as `train_loss`;
- samples seen by all ranks, in the progress bar and the logs; the loader's counts in the loggers (see `telemetry`);
- one state of all ranks' loaders in every checkpoint, of the batch that was trained on last: Lightning looks a batch ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from odb.errors import ConfigError
from odb.integrations.common import Progress, loader_of
from odb.integrations.telemetry import Telemetry
from odb.loader import ODBDataLoader
from odb.resume import State, gather
from odb.step import ODBStepInfo

_PROGRESS = ("samples", "tokens")


def attach(trainer: Trainer, loader: Any, *, log_loss: str | None = "train_loss", **options: Any) -> TrainLoader:
    """What to give to `trainer.fit` as `train_dataloaders`, or to return from `train_dataloader()`.

    Adds an `ODBCallback` to the trainer (in place of an earlier one).

    Args:
        trainer: a Trainer, or `self.trainer` in a hook.
        loader: an `ODBDataLoader`, a `DataLoader` after `odb.apply`, or a plain `DataLoader`, which is wrapped.
        log_loss: the name under which the token mean of each optimizer step is logged; None: it is not.
        **options: for a plain `DataLoader`, see `odb.ODBConfig`; `grad_accum_steps` is the trainer's.

    Raises:
        ConfigError: the loader accumulates over another number of micro-steps than the trainer, or the trainer has an
            option that contradicts a loader of unknown length.
    """
    if options:
        options.setdefault("grad_accum_steps", trainer.accumulate_grad_batches)
    feed = TrainLoader(loader_of(loader, **options), lambda: trainer.fit_loop.epoch_progress.current.processed)
    callbacks: list[Any] = [c for c in trainer.callbacks if not isinstance(c, ODBCallback)]
    trainer.callbacks = [ODBCallback(feed, log_loss=log_loss), *callbacks]  # those that save checkpoints stay last
    return feed


@dataclass
class _Handed:
    """A batch that Lightning has taken: its info, and the loader's state behind it."""

    info: ODBStepInfo
    state: State


class TrainLoader:
    """What Lightning iterates: a plain iterable, of which it replaces no sampler and asks no length.

    Attributes:
        loader: the `ODBDataLoader` behind it.
    """

    def __init__(self, loader: ODBDataLoader, next_epoch: Callable[[], int]) -> None:
        self.loader = loader
        self._next_epoch = next_epoch
        self._is_loaded = False  # a state says where the next pass starts
        self._ahead: deque[_Handed] = deque()  # taken, and not yet trained on
        self._current: _Handed | None = None  # trained on last
        self._before: State | None = None  # of the pass, before its first batch

    def __iter__(self) -> Iterator[Any]:
        """One epoch of batches, without infos. It starts with the first batch: Lightning also asks for iterators in vain."""
        if not self._is_loaded:
            self.loader.set_epoch(self._next_epoch())
        steps = self.loader.steps()
        self._is_loaded = False
        self._ahead.clear()
        self._current, self._before = None, self.loader.state_dict()
        handed = None
        for batch, info in steps:
            handed = _Handed(info, self.loader.state_dict())
            self._ahead.append(handed)
            yield batch
        if handed is not None:
            handed.state = self.loader.state_dict()  # behind the last batch the next epoch comes

    def begin_step(self) -> ODBStepInfo:
        """The info of the batch that is trained on now.

        Raises:
            ConfigError: Lightning has not taken a batch by itself.
        """
        if not self._ahead:
            raise ConfigError(
                "no batch was taken from odb's loader for this step: training_step(dataloader_iter) can't be used with "
                "it; take (batch, batch_idx)"
            )
        self._current = self._ahead.popleft()
        return self._current.info

    def own_state(self) -> State:
        """This rank's state behind the batch that was trained on last. Local."""
        if self._current is not None:
            return self._current.state
        return self._before if self._before is not None else self.loader.state_dict()

    def state_dict(self) -> State:
        """One state of all ranks' loaders, since Lightning keeps rank 0's alone. Collective: Lightning asks all ranks."""
        return gather(_AtStep(self))

    def load_state_dict(self, state: State) -> None:
        """Goes on where the state says, each rank at its own place; also on another number of ranks."""
        self.loader.load_state_dict(state)
        self._is_loaded = True
        self._current = self._before = None


class _AtStep:
    """What `odb.resume.gather` asks, answered for the batch that was trained on last."""

    def __init__(self, feed: TrainLoader) -> None:
        self.config = feed.loader.config
        self.rank, self.world_size = feed.loader.rank, feed.loader.world_size
        self.state_dict = feed.own_state


class ODBCallback(Callback):
    """Weighs gradients, counts and logs; `attach` adds it.

    Attributes:
        progress: `odb.integrations.common.Progress` of the whole run, over all ranks; kept in checkpoints.
        info: of the batch that is trained on now.
    """

    def __init__(self, feed: TrainLoader, log_loss: str | None = "train_loss") -> None:
        self.feed = feed
        self.progress = Progress()
        self._log_loss = log_loss
        self._telemetry: Telemetry | None = None
        self.info: ODBStepInfo | None = None
        self._factor = 1.0
        self._mean: Tensor | float = 0.0  # of this optimizer step so far, this rank's part

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_trainer(trainer, pl_module, self.feed.loader)
        self._telemetry = Telemetry(self.feed.loader, every=1)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.progress.begin_epoch(trainer.current_epoch)
        self._mean = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        info = self.feed.begin_step()
        self.info = info
        if info.step == 0:
            _restart_count(trainer)
        self._factor = info.loss_scale * _divisor(trainer, pl_module, self.feed.loader)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        factor = self._factor
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad * factor)  # type: ignore[no-untyped-call]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        info = self.info
        assert info is not None, "on_train_batch_start comes first"
        self.progress.add(info)
        self._mean = self._mean + self._share(trainer, pl_module, outputs)
        for name in _PROGRESS:
            value = float(getattr(self.progress, name))
            pl_module.log(name, value, prog_bar=name == "samples", on_step=True, on_epoch=False, batch_size=1)
        if info.sync_gradients:
            if self._log_loss is not None:
                pl_module.log(
                    self._log_loss,
                    torch.as_tensor(self._mean, dtype=torch.float32, device=pl_module.device),
                    prog_bar=True,
                    on_step=True,
                    on_epoch=False,
                    sync_dist=True,
                    batch_size=1,
                )
            self._mean = 0.0
            self._report(trainer)

    def _share(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> Tensor | float:
        """This batch's part of the token mean; Lightning hands the loss back divided by what it accumulates."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        assert self.info is not None
        if not isinstance(loss, Tensor) or self.info.loss_scale == 0.0:
            return 0.0
        accumulated = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        return loss.detach().float() * (self.info.loss_scale * accumulated)

    def _report(self, trainer: Trainer) -> None:
        if self._telemetry is None or not trainer.loggers or trainer.global_step % max(1, trainer.log_every_n_steps):
            return
        values = self._telemetry.report(trainer.global_step)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """The run's counts, the same on every rank."""
        return self.progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.progress.load_state_dict(state_dict)


def _restart_count(trainer: Trainer) -> None:
    """An epoch's first batch is its first.

    Lightning resumes a checkpoint of an epoch's last batch in the next epoch and, without a length, goes on counting
    batches where the last epoch ended: optimizer steps would come at the wrong batches from there on, where their number
    is no multiple of what is accumulated.
    """
    count = trainer.fit_loop.epoch_loop.batch_progress.current
    if count.ready > 1:
        count.reset()
        count.ready = 1


def _divisor(trainer: Trainer, module: LightningModule, loader: ODBDataLoader) -> int:
    """What Lightning, and a strategy's engine below it, will divide this loss by."""
    if not module.automatic_optimization:
        return 1
    steps = int(trainer.accumulate_grad_batches)
    if steps != loader.config.grad_accum_steps:
        raise ConfigError(
            f"Trainer(accumulate_grad_batches={steps}) and grad_accum_steps={loader.config.grad_accum_steps} of the "
            "loader must be the same number; it can't change during a run either"
        )
    # DeepSpeed's engine divides by the number that it was given too.
    return steps * steps if trainer.strategy.handles_gradient_accumulation else steps


def _check_trainer(trainer: Trainer, module: LightningModule, loader: ODBDataLoader) -> None:
    steps = _divisor(trainer, module, loader)
    limit = trainer.limit_train_batches
    if steps > 1 and isinstance(limit, int) and limit % loader.config.grad_accum_steps:
        raise ConfigError(
            f"Trainer(limit_train_batches={limit}) ends an epoch inside an optimizer step of {steps} batches, whose loss "
            "scales count on all of them: give a multiple of accumulate_grad_batches"
        )
    if steps > 1 and trainer.strategy.handles_gradient_accumulation and loader.config.accum_tail != "fill":
        raise ConfigError(
            f"{type(trainer.strategy).__name__} never steps on fewer than accumulate_grad_batches={steps} batches, so that "
            "the gradients of a short last window would leak into the next epoch: give accum_tail='fill' to the loader"
        )
