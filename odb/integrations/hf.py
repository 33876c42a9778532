"""Hugging Face `Trainer`, and what derives from it (TRL's `SFTTrainer`): one call, or one mixin.

    trainer = Trainer(model=model, args=args, train_dataset=dataset, data_collator=collator)
    enable_odb(trainer, token_budget=8192)
    trainer.train()

Everything here stands on public methods of the Trainer. What it decides from a number of steps that nobody knows
(epochs, the last step, the schedule, `TrainerState.epoch`) is decided from samples instead; what it does by itself
(normalising the loss by tokens) is recognised and left to it.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, ProgressCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from odb.errors import ConfigError
from odb.integrations.common import (
    Advisor,
    Progress,
    flat_stats,
    loader_of,
    read_state,
    restore_loader,
    save_state,
    take_info,
)
from odb.integrations.hf_loader import TrainerLoader, collator_of
from odb.integrations.schedule import Position, follow
from odb.integrations.source import place_of, rebuilt
from odb.loader import ODBDataLoader
from odb.metrics import LoaderStats
from odb.step import ODBStepInfo, scale_loss

logger = logging.getLogger("odb")

__all__ = ["ODBTrainer", "ODBTrainerBridge", "ODBTrainerMixin", "configure_trainer", "enable_odb"]

SCHEDULER_PROGRESS = ("samples", "tokens", "optimizer_steps")
TRAINER_LOSS = ("auto", "global", "local", "mean")
#: Arguments of the paper's package that have nothing to switch here, with the only value that makes sense.
_ALWAYS = {"replace_train_dataloader": True}
_WITHOUT_EFFECT = ("max_steps_policy", "require_batch_size_one", "require_workers", "validate_pipeline")
_REMEDY = "With TrainingArguments(ignore_data_skip=True) it goes on with model and optimizer, at the start of an epoch"
#: Of `LoaderStats`: what goes into the Trainer's own logs.
_LOGGED = ("padding", "idle_share", "wait_s", "emitted_samples", "real_tokens")


@dataclass
class ODBTrainerBridge:
    """What `enable_odb` adds to a Trainer, as `trainer.odb`.

    Attributes:
        trainer: the Trainer.
        options: of the loader.
        dataloader: the user's own loader; None: made from what the Trainer would use.
        dataset_size: samples of one epoch over all ranks; None: of the training dataset.
        sample_budget: samples over all ranks that end the run; None: the Trainer's epochs or steps do.
        max_optimizer_steps: optimizer steps that end the run, without changing its schedule.
        scheduler_progress: what the learning rate goes by: "samples", "tokens" or "optimizer_steps".
        scheduler_total: samples or tokens of the whole schedule; None: of the run.
        trainer_loss: what the Trainer's `compute_loss` returns; "auto": recognised.
        loss_scaling: "none" leaves the loss alone in every case.
        state: how far the run is.
        handle: the loader, from the first call of `train` on.
    """

    trainer: Any
    options: dict[str, Any]
    dataloader: Any = None
    dataset_size: int | None = None
    sample_budget: int | None = None
    max_optimizer_steps: int | None = None
    scheduler_progress: str | None = None
    scheduler_total: int | None = None
    trainer_loss: str = "auto"
    loss_scaling: str = "exact"
    state: Progress = field(default_factory=Progress)
    handle: ODBDataLoader | None = None
    _resume: dict[str, Any] | None = None
    _done_steps: int = 0
    _first_epoch: int = 0
    _is_exhausted: bool = False
    _is_checked: bool = False
    _saved_at: int = -1
    _samples_before: int = 0
    _begun: float = 0.0
    _position: Position | None = None
    _advisor: Advisor = field(default_factory=Advisor)

    # ---- the loader

    def make_dataloader(self, plain: Any) -> TrainerLoader:
        """The Trainer's training loader.

        Args:
            plain: what the Trainer's own `get_train_dataloader` gave; None where the user gave a loader.
        """
        options = self._all_options()
        if self.dataloader is not None:
            self.handle = loader_of(self.dataloader, **({} if _is_ours(self.dataloader) else options))
            _check_accumulation(self.handle, self.args.gradient_accumulation_steps)
        else:
            self.close()
            rank, world_size = place_of(options, self.args.process_index, self.args.world_size)
            options = {"collate_fn": collator_of(plain.collate_fn, options)} | options
            self.handle = rebuilt(plain, rank=rank, world_size=world_size, seed=_seed(self.args), options=options)
        self.state = Progress(samples_per_epoch=self._samples_per_epoch())
        self._first_epoch, self._samples_before = 0, 0
        if self._resume is not None:
            self._restore(self._resume)
        return TrainerLoader(self.handle, self.state, self._first_epoch)

    def _all_options(self) -> dict[str, Any]:
        accumulation = {"grad_accum_steps": self.args.gradient_accumulation_steps, "accum_tail": "fill"}
        if isinstance(self.trainer.model, PreTrainedModel) and "label_shift" not in self.options:
            accumulation["label_shift"] = _shifts_labels(self.trainer)
        return accumulation | self.options

    @property
    def _world_size(self) -> int:
        assert self.handle is not None
        return self.handle.world_size

    def _samples_per_epoch(self) -> int | None:
        assert self.handle is not None
        if self.dataset_size is not None:
            return self.dataset_size
        quota = self.handle.config.sample_quota
        if quota is not None:
            return quota
        dataset = self.handle.dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return None
        return len(dataset)

    def close(self) -> None:
        """Ends the loader's processes, where the loader was made here. Its counts stay readable."""
        if self.handle is not None and self.dataloader is None:
            self.handle.close()

    def stats(self) -> LoaderStats:
        """Of this rank's loader."""
        return self.handle.stats() if self.handle is not None else LoaderStats()

    @property
    def args(self) -> Any:
        """The Trainer's arguments."""
        return self.trainer.args

    # ---- how long

    @property
    def by_epochs(self) -> bool:
        """Whether the Trainer counts epochs (`max_steps` is not set)."""
        return bool(self.args.max_steps <= 0)

    @property
    def num_epochs(self) -> float:
        """Epochs of the whole run, as given."""
        return float(self.args.num_train_epochs)

    def training_values(self) -> tuple[int, int, int, int, int, int, int]:
        """What `Trainer.set_initial_training_values` returns, with bounds where numbers are unknown.

        The number of steps per epoch is one that is never reached: an epoch ends when the loader does.
        """
        accumulation, done_steps = self.args.gradient_accumulation_steps, self._done_steps
        if self.by_epochs:
            per_epoch = self._known_samples()
            most_steps = per_epoch  # a step of all ranks holds at least one sample
            num_examples, max_steps = per_epoch, max(1, math.ceil(per_epoch * self.num_epochs))
            epochs = max(0, math.ceil(self.num_epochs) - self._first_epoch)
            num_samples = math.ceil(per_epoch * self.num_epochs)
        else:
            max_steps = most_steps = self.args.max_steps
            epochs = sys.maxsize if done_steps < max_steps else 0
            num_examples = num_samples = self.state.samples_per_epoch or 0
        bound = done_steps + most_steps + 1  # above the steps done, so that a resumed Trainer starts at its epoch 0
        return epochs, bound, num_examples, num_samples, 1, bound * accumulation, max_steps

    def _known_samples(self) -> int:
        if not self.state.samples_per_epoch:
            raise ConfigError(
                "num_train_epochs needs the number of samples of an epoch, and the dataset does not say it: give "
                "enable_odb(..., dataset_size=samples of one epoch over all ranks), or set max_steps. "
                "sum(1 for _ in dataset) counts them"
            )
        return self.state.samples_per_epoch

    def is_over(self, global_step: int) -> bool:
        """Whether the run is over after this optimizer step."""
        state = self.state
        if self.sample_budget is not None and state.samples >= self.sample_budget:
            return True
        if self.max_optimizer_steps is not None and global_step >= self.max_optimizer_steps:
            return True
        return self.by_epochs and state.epochs >= self.num_epochs

    def expected_steps(self, global_step: int) -> int:
        """Optimizer steps of the whole run, by the share that is done; above `global_step` until the run is over."""
        share = self.state.epochs / self.num_epochs if self.by_epochs else 0.0
        if self.sample_budget is not None:
            share = max(share, self.state.samples / self.sample_budget)
        return max(global_step + 1, math.ceil(global_step / share) if share else 0)

    # ---- the learning rate

    def follow_progress(self, scheduler: Any, create: Any) -> None:
        """Creates the Trainer's scheduler over samples or tokens.

        Args:
            scheduler: the user's own one, which stays as it is; None: none.
            create: (units) -> the scheduler that the Trainer would make for so many steps.
        """
        warmup = self.args.warmup_steps
        position = Position(self._units_done, self._units_total(), int(warmup) if warmup >= 1 else 0)
        made = create(position.units)
        if scheduler is not None or not isinstance(made, LambdaLR):
            logger.info("%s goes by optimizer steps: it is not a schedule that can follow samples", type(made).__name__)
            return
        if self._resume is not None:
            position.start = self._resume.get("schedule_start")
        self._position = position
        follow(made, position)

    @property
    def goes_by_progress(self) -> bool:
        """Whether the learning rate goes by samples or tokens."""
        return self._unit() != "optimizer_steps"

    def _unit(self) -> str:
        if self.scheduler_progress is not None:
            return self.scheduler_progress
        return "samples" if self.by_epochs or self.sample_budget is not None else "optimizer_steps"

    def _units_done(self) -> float:
        if self._unit() == "tokens":
            return float(self.state.tokens)
        return float(self.state.samples if self._counts_plainly() else self.state.scheduled_samples)

    def _counts_plainly(self) -> bool:
        """Whether a schedule ends at a number of samples and not with an epoch."""
        return self.sample_budget is not None or self.scheduler_total is not None or not self.by_epochs

    def _units_total(self) -> int:
        if self.scheduler_total is not None:
            return self.scheduler_total
        if self._unit() == "samples" and self.sample_budget is not None:
            return self.sample_budget
        if self._unit() == "tokens" or not self.by_epochs:
            raise ConfigError(
                f"scheduler_progress={self._unit()!r} needs scheduler_total: the {self._unit()} of the whole schedule, "
                "over all ranks"
            )
        return max(1, math.ceil(self._known_samples() * self.num_epochs))

    # ---- the loss

    def weighed(self, loss: torch.Tensor, info: ODBStepInfo, num_items: Any) -> torch.Tensor:
        """The loss, so that what the Trainer then does to it gives the mean over all tokens of the optimizer step."""
        kind = self._loss_kind(num_items)
        if not self._is_checked:
            self._is_checked = True
            self._say_loss(kind, info, num_items)
        if kind == "as it is":
            return loss
        if info.idle or info.window_loss_tokens == 0 or (kind == "mean" and info.loss_scale == 0.0):
            return scale_loss(loss, 0, 0, 1)  # nothing, with its graph
        factor: Any = self.trainer.current_gradient_accumulation_steps if self._is_divided(num_items) else 1
        if kind == "mean":
            factor = factor * info.loss_scale
        elif kind == "local":
            factor = factor * num_items * self._world_size / info.window_loss_tokens
        weighed: torch.Tensor = loss * factor
        return weighed

    def _loss_kind(self, num_items: Any) -> str:
        """What the Trainer's `compute_loss` normalised by: "global", "local" tokens, or nothing but its batch's mean."""
        trainer = self.trainer
        if self.loss_scaling == "none":
            return "as it is"
        if self.trainer_loss != "auto":
            return self.trainer_loss
        normalises = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        if num_items is None or not normalises or getattr(trainer, "loss_is_scaled_for_ga", None) is False:
            return "mean"
        return "global" if self.args.average_tokens_across_devices or self._world_size == 1 else "local"

    def _is_divided(self, num_items: Any) -> bool:
        """Whether `training_step` will divide what `compute_loss` returned by the number of micro-steps."""
        trainer = self.trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func
        return not is_scaled

    def _say_loss(self, kind: str, info: ODBStepInfo, num_items: Any) -> None:
        what = {
            "global": "the Trainer normalises it by tokens over all ranks and micro-steps: odb leaves it alone",
            "local": "the Trainer normalises it by this rank's tokens: odb weighs ranks",
            "mean": "it is a mean per batch: odb weighs batches",
            "as it is": 'loss_scaling="none": odb leaves it alone',
        }
        logger.info("loss: %s", what[kind])
        counted = int(torch.as_tensor(num_items).flatten()[0]) if kind == "global" and num_items is not None else None
        if counted is not None and counted != max(1, info.window_loss_tokens):
            logger.warning(
                "the Trainer counted %d loss-bearing labels in an optimizer step, odb %d: look at label_shift and "
                "loss_tokens_fn. The Trainer's number is used",
                *(counted, info.window_loss_tokens),
            )

    # ---- checkpoints

    def load(self, checkpoint: str | None) -> None:
        """Reads what `save` wrote, before the Trainer starts.

        Raises:
            ConfigError: the checkpoint has no state of a loader, and `ignore_data_skip` does not say to go on without.
        """
        self._resume, self._done_steps = None, 0
        if checkpoint is None:
            return
        if not self.args.ignore_data_skip:
            self._resume = read_state(checkpoint, _REMEDY)
        trainer_state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        self._done_steps = trainer_state.global_step
        if self._resume is not None:
            return
        saved: dict[str, Any] = {"progress": {"optimizer_steps": self._done_steps}}
        with suppress(ConfigError):
            saved = read_state(checkpoint, _REMEDY)
        epoch = int(trainer_state.epoch)
        saved["progress"] |= {"epoch": epoch, "epoch_samples": 0}
        self._resume = saved | {"first_epoch": epoch}

    def _restore(self, saved: dict[str, Any]) -> None:
        assert self.handle is not None
        self.state.load_state_dict(saved["progress"])
        self._samples_before = self.state.samples
        if "first_epoch" in saved:  # without the place in the epoch
            self._first_epoch = saved["first_epoch"]
        else:
            self._first_epoch = restore_loader(self.handle, saved)

    def save(self, folder: str) -> None:
        """Writes the loader's state into a checkpoint. On all ranks."""
        assert self.handle is not None
        extra = {"schedule_start": self._position.start} if self._position is not None else {}
        save_state(folder, self.handle, self.state, write=self.args.should_save, extra=extra)

    # ---- logs

    def add_to_logs(self, logs: dict[str, float]) -> None:
        """Progress and the loader's numbers, and right ones where the Trainer counts rows of a fixed batch size."""
        if "train_runtime" in logs:
            samples = self.state.samples - self._samples_before
            logs["train_samples_per_second"] = round(samples / max(logs["train_runtime"], 1e-9), 3)
        if "loss" not in logs:
            return
        stats = self.stats()
        numbers = flat_stats(stats)
        logs |= {f"odb/{name}": numbers[f"odb/{name}"] for name in _LOGGED}
        logs |= {"odb/all_samples": self.state.samples, "odb/all_tokens": self.state.tokens}
        assert self.handle is not None
        self._advisor.check(stats, time.monotonic() - self._begun, self.handle.num_workers)


class _Follower(TrainerCallback):
    """Stands first among the Trainer's callbacks, so that the others see the right epoch and number of steps."""

    def __init__(self, bridge: ODBTrainerBridge) -> None:
        self.bridge = bridge

    def on_train_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """The run as a whole, which a resumed Trainer was told only the rest of."""
        bridge = self.bridge
        bridge._begun = time.monotonic()
        if bridge.by_epochs:
            state.num_train_epochs = math.ceil(bridge.num_epochs)
        state.epoch = bridge.state.epochs

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Another pass."""
        self.bridge._is_exhausted = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Counts by samples; tells the last step as soon as it is known."""
        bridge = self.bridge
        state.epoch = bridge.state.epochs
        if args.include_num_input_tokens_seen == "non_padding":
            state.num_input_tokens_seen = bridge.state.tokens  # without fillers
        is_over = bridge.is_over(state.global_step)
        if is_over:
            state.max_steps = state.global_step
            control.should_training_stop = True
        elif bridge.by_epochs or bridge.sample_budget is not None:
            state.max_steps = bridge.expected_steps(state.global_step)
        self._show_total(state)
        return control

    def _show_total(self, state: Any) -> None:
        for callback in self.bridge.trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.total = state.max_steps

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> Any:
        """A pass that was drained is a whole epoch, rejected samples or not."""
        bridge = self.bridge
        if not bridge._is_exhausted:
            return control
        state.epoch = float(bridge.state.epoch + 1)
        is_last = bridge.by_epochs and state.epoch >= bridge.num_epochs
        if is_last and args.save_strategy == "steps" and bridge._saved_at != state.global_step:
            control.should_save = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """The processes go."""
        self.bridge.close()


class ODBTrainerMixin:
    """Put before a Trainer class: `class MyTrainer(ODBTrainerMixin, Trainer)`, made with `odb={"token_budget": ...}`.

    `odb` takes the arguments of `enable_odb`. Without it the Trainer is what it was.
    """

    odb: ODBTrainerBridge | None = None

    def __init__(self, *args: Any, odb: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if odb is not None:
            enable_odb(self, **odb)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; from a checkpoint, at the batch behind the last one that was trained on."""
        bridge, parent = self.odb, _behind(self)
        if bridge is None:
            return parent.train(resume_from_checkpoint, *args, **kwargs)
        arguments = bridge.args
        _check_arguments(self, bridge)
        path = get_last_checkpoint(arguments.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        bridge.load(path or None)
        skips, arguments.ignore_data_skip = arguments.ignore_data_skip, True  # the loader stands where it stopped
        try:
            return parent.train(resume_from_checkpoint, *args, **kwargs)
        finally:
            arguments.ignore_data_skip = skips
            bridge.close()

    def get_train_dataloader(self) -> Any:
        """The loader of `odb` over what the Trainer's own one would read."""
        bridge, parent = self.odb, _behind(self)
        if bridge is None:
            return parent.get_train_dataloader()
        return bridge.make_dataloader(None if bridge.dataloader is not None else parent.get_train_dataloader())

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Epochs without a number of steps."""
        if self.odb is None:
            return _behind(self).set_initial_training_values(args, dataloader)
        return self.odb.training_values()

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule, over samples where the number of steps is unknown."""
        bridge, parent, trainer = self.odb, _behind(self), _any(self)
        if bridge is None or not bridge.goes_by_progress:
            return parent.create_scheduler(num_training_steps, optimizer)
        bridge.follow_progress(trainer.lr_scheduler, lambda units: parent.create_scheduler(units, optimizer))
        return trainer.lr_scheduler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The micro-batches of an optimizer step; none: the epoch is over."""
        batches, num_items = _behind(self).get_batch_samples(epoch_iterator, num_batches, device)
        if self.odb is None:
            return batches, num_items
        if not batches:
            self.odb._is_exhausted = True
            _any(self).control.should_epoch_stop = True
        if num_items is not None:
            num_items = torch.as_tensor(num_items).clamp(min=1)  # a step without any label: 0 / 0 has no gradient
        return batches, num_items

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's loss, weighed by odb where the Trainer does not normalise it over the optimizer step."""
        info = take_info(inputs)
        result = _behind(self).compute_loss(model, inputs, *args, **kwargs)
        if info is None or self.odb is None:
            return result
        num_items = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
        if isinstance(result, tuple):
            return (self.odb.weighed(result[0], info, num_items), *result[1:])
        return self.odb.weighed(result, info, num_items)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's logs, with odb's numbers."""
        if self.odb is not None:
            self.odb.add_to_logs(logs)
        _behind(self).log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model; in a checkpoint of a running training also the loader's state."""
        _behind(self).save_model(output_dir, _internal_call=_internal_call)
        in_training = _internal_call and output_dir is not None and _any(self).is_in_train
        if self.odb is not None and in_training and os.path.basename(str(output_dir)).startswith("checkpoint-"):
            self.odb.save(str(output_dir))
            self.odb._saved_at = _any(self).state.global_step


def _behind(mixin: ODBTrainerMixin) -> Any:
    """The Trainer's own methods."""
    return super(ODBTrainerMixin, mixin)


def _any(mixin: ODBTrainerMixin) -> Any:
    """The same object as the Trainer that it is too."""
    return mixin


class ODBTrainer(ODBTrainerMixin, Trainer):
    """`Trainer` with the mixin."""


def enable_odb(
    trainer: Any,
    *,
    token_budget: int | None = None,
    dataloader: Any = None,
    train_dataloader: Any = None,
    train_dataset: Any = None,
    dataset_size: int | None = None,
    num_train_epochs: float | None = None,
    sample_budget: int | None = None,
    max_optimizer_steps: int | None = None,
    scheduler_progress: str | None = None,
    scheduler_total: int | None = None,
    loss_scaling: bool | str | None = "exact",
    trainer_loss: str = "auto",
    **options: Any,
) -> ODBTrainerBridge:
    """Makes a Trainer train on batches under a token budget. Evaluation and prediction stay as they are.

    Args:
        trainer: a `transformers.Trainer` or one that derives from it; its class gets the mixin if it has it not.
        token_budget: see `odb.ODBConfig`; None: `trainer.args.odb_token_budget`.
        dataloader: a loader to use, `odb`'s or any `DataLoader`, in place of the one that the Trainer would make.
        train_dataloader: the same.
        train_dataset: in place of the Trainer's, which may have been made without one.
        dataset_size: samples of one epoch over all ranks, where the dataset can't tell.
        num_train_epochs: in place of the Trainer's.
        sample_budget: samples over all ranks after which the run ends.
        max_optimizer_steps: optimizer steps after which the run ends; `args.max_steps` also makes the schedule.
        scheduler_progress: what the learning rate goes by: "samples" (with epochs), "tokens", "optimizer_steps" (with
            `max_steps`).
        scheduler_total: samples or tokens over all ranks at which the schedule is at its end.
        loss_scaling: "none" or False: leave the loss alone.
        trainer_loss: what `compute_loss` of a Trainer of your own returns: "global" (normalised by the tokens of all
            ranks' optimizer step, times the ranks), "local" (by this rank's) or "mean" (per batch). "auto": as the
            Trainer's attributes say.
        **options: see `odb.ODBConfig`. Those of the paper's package are taken, see docs/switching.md.

    Raises:
        ConfigError: an option that contradicts the Trainer's arguments, or is unknown.
    """
    if dataloader is not None and train_dataloader is not None and dataloader is not train_dataloader:
        raise ConfigError("dataloader and train_dataloader are one argument: give one")
    _check_choice("scheduler_progress", scheduler_progress, (None, *SCHEDULER_PROGRESS))
    _check_choice("trainer_loss", trainer_loss, TRAINER_LOSS)
    loader = dataloader if dataloader is not None else train_dataloader
    scaling = loss_scaling if isinstance(loss_scaling, str) else "none" if loss_scaling is False else "exact"
    options = _without_paper_arguments(options)
    if options.pop("wrap_compute_loss", True) is False:
        scaling = "none"
    budget = token_budget if token_budget is not None else getattr(trainer.args, "odb_token_budget", None)
    if not _is_ours(loader):
        options |= {"token_budget": budget, "loss_scaling": scaling}
    elif token_budget is not None or options:
        given = sorted([*options, *(["token_budget"] if token_budget is not None else [])])
        raise ConfigError(f"the dataloader is odb's already and has its options: {', '.join(given)} given again")
    if budget is None and not _is_ours(loader):
        raise ConfigError(
            "enable_odb needs token_budget: the most tokens (rows x padded length) that one batch may cost"
        )
    if train_dataset is not None:
        trainer.train_dataset = train_dataset
    if num_train_epochs is not None:
        trainer.args.num_train_epochs = num_train_epochs
    bridge = ODBTrainerBridge(
        trainer=trainer,
        options=options,
        dataloader=loader,
        dataset_size=dataset_size,
        sample_budget=_positive("sample_budget", sample_budget),
        max_optimizer_steps=_positive("max_optimizer_steps", max_optimizer_steps),
        scheduler_progress=scheduler_progress,
        scheduler_total=_positive("scheduler_total", scheduler_total),
        trainer_loss=trainer_loss,
        loss_scaling=scaling,
    )
    _check_arguments(trainer, bridge)
    _attach(trainer, bridge)
    return bridge


def configure_trainer(
    trainer: Any, *, dataloader: Any = None, handle: ODBDataLoader | None = None, **arguments: Any
) -> ODBTrainerBridge:
    """`enable_odb` in the paper package's second form.

    Args:
        trainer: as there.
        dataloader: as there.
        handle: what `odb.apply(dataloader)` returned.
        **arguments: as there.
    """
    if handle is None and dataloader is None:
        raise ConfigError("configure_trainer needs handle=odb.apply(loader, ...), or dataloader=...")
    return enable_odb(trainer, dataloader=handle if handle is not None else dataloader, **arguments)


def _attach(trainer: Any, bridge: ODBTrainerBridge) -> None:
    if not isinstance(trainer, ODBTrainerMixin):
        cls = type(trainer)
        trainer.__class__ = type(f"ODB{cls.__name__}", (ODBTrainerMixin, cls), {"__module__": cls.__module__})
    trainer.odb = bridge
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, _Follower)]
    callbacks.insert(0, _Follower(bridge))


def _check_arguments(trainer: Any, bridge: ODBTrainerBridge) -> None:
    """What the Trainer was told that can't be done, named."""
    args = trainer.args
    if args.auto_find_batch_size:
        raise ConfigError("auto_find_batch_size changes a batch size, which odb has not: lower token_budget instead")
    if args.n_gpu > 1:
        raise ConfigError("nn.DataParallel splits a batch by rows: start one process per device with torchrun")
    fractions = [f"{k}_steps" for k in ("logging", "eval", "save") if 0 < (getattr(args, f"{k}_steps") or 1) < 1]
    if fractions and bridge.by_epochs:
        raise ConfigError(
            f"{', '.join(fractions)} below 1 is a share of the steps of the run, which are not known with "
            "num_train_epochs: give a number of steps, or set max_steps"
        )
    others = [n for n in ("tp", "cp", "sp") if getattr(trainer, f"get_{n}_size", lambda: 1)() > 1]
    if others and not {"dp_rank", "device_mesh"} & bridge.options.keys():
        raise ConfigError(
            f"ranks that share a batch ({', '.join(others)}) must be told to odb: give device_mesh, or dp_rank and "
            "dp_world_size"
        )
    if not _is_ours(bridge.dataloader):
        place_of(bridge.options, 0, 1)


def _check_accumulation(loader: ODBDataLoader, num_steps: int) -> None:
    config = loader.config
    if config.grad_accum_steps != num_steps:
        raise ConfigError(
            f"the loader was made with grad_accum_steps={config.grad_accum_steps}, the Trainer has "
            f"gradient_accumulation_steps={num_steps}: give the same to both"
        )
    if num_steps > 1 and config.accum_tail != "fill":
        raise ConfigError(
            f"a Trainer accumulates exactly {num_steps} micro-steps: make the loader with accum_tail='fill', so that an "
            "epoch's last step has as many"
        )


def _without_paper_arguments(options: dict[str, Any]) -> dict[str, Any]:
    out = {name: value for name, value in options.items() if name not in _ALWAYS and name not in _WITHOUT_EFFECT}
    for name, value in _ALWAYS.items():
        if options.get(name, value) != value:
            raise ConfigError(f"{name}={options[name]!r} has no meaning: the Trainer must use the loader given to it")
    said = [name for name in _WITHOUT_EFFECT if name in options]
    if said:
        logger.info("%s: nothing to choose here, see docs/switching.md", ", ".join(said))
    return out


def _shifts_labels(trainer: Any) -> bool:
    """Whether the model's loss shifts labels, as the Trainer found out for its own count."""
    return bool(getattr(trainer, "_loss_shifts_labels", True))


def _is_ours(loader: Any) -> bool:
    return isinstance(loader, ODBDataLoader) or hasattr(loader, "odb_loader")


def _seed(args: Any) -> int:
    return int(args.data_seed if args.data_seed is not None else args.seed)


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or int(value) < 1):
        raise ConfigError(f"{name} must be an integer >= 1 or None, got {value!r}")
    return value


def _check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
