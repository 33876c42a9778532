"""Accelerate, for training loops of your own.

    bridge = configure_accelerator(accelerator, dataloader, token_budget=8192)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in bridge.dataloader:
        with accelerator.accumulate(model):
            info = bridge.consume_batch(batch)
            bridge.backward(model(**batch).loss, info)
            optimizer.step()
            optimizer.zero_grad()

`accelerator.prepare(bridge.dataloader)` gives it back as it is: nothing is sharded again, dispatched or evened out.
`accelerator.save_state` and `load_state` carry the loader's place with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

from odb.errors import ConfigError
from odb.integrations.common import Progress, flat_stats, loader_of, read_state, restore_loader, save_state, take_info
from odb.integrations.schedule import Position, follow
from odb.integrations.source import place_of, rebuilt
from odb.loader import ODBDataLoader
from odb.metrics import LoaderStats
from odb.step import STEP_INFO_KEY, ODBStepInfo, scale_loss

__all__ = ["ODBAccelerateBridge", "configure_accelerator"]


class AcceleratedLoader(DataLoaderStateMixin):
    """What the loop iterates: batches on the accelerator's device, and Accelerate knows when to synchronise.

    Accelerate synchronises gradients at every n-th batch and at what a loader calls its end. Here every last
    micro-step of an optimizer step is called so, by which the short last one of an epoch is synchronised too.
    """

    def __init__(self, loader: ODBDataLoader, progress: Progress, accelerator: Any) -> None:
        self.loader = loader
        self.progress = progress
        self.accelerator = accelerator
        self.dataset = loader.dataset
        self.batch_size = None
        self.sampler = loader.sampler
        self.gradient_state = GradientState()
        self.next_epoch = 0
        self.end_of_dataloader = False
        self.remainder = -1

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch `epoch` (a pass, finished or broken off, advances it by one)."""
        self.next_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """One epoch; each batch carries its info."""
        self.progress.begin_epoch(self.next_epoch)
        self.loader.set_epoch(self.next_epoch)
        self.next_epoch += 1
        self.begin()
        try:
            for batch in self.loader:
                info = batch.get(STEP_INFO_KEY) if isinstance(batch, dict) else None
                if info is None:
                    raise ConfigError(
                        f"this loop needs batches that are dicts, collate_fn gave a {type(batch).__name__}"
                    )
                self.progress.add(info)
                self.end_of_dataloader = info.sync_gradients
                yield send_to_device(batch, self.accelerator.device) if self.accelerator.device_placement else batch
        finally:
            self.end()

    def __len__(self) -> int:
        """Unknown: raises `TypeError`."""
        return len(self.loader)


@dataclass
class ODBAccelerateBridge:
    """A loop's side of the loader.

    Attributes:
        accelerator: the `Accelerator`.
        dataloader: what to iterate.
        handle: the loader of `odb` behind it.
        sample_budget: samples over all ranks after which `should_stop` is true.
        loss_scaling: "none" leaves the loss alone.
        state: how far the run is; `state.epoch` is the epoch to go on with after `load_state`.
    """

    accelerator: Any
    dataloader: AcceleratedLoader
    handle: ODBDataLoader
    sample_budget: int | None = None
    loss_scaling: str = "exact"
    state: Progress = field(default_factory=Progress)
    last_step_info: ODBStepInfo | None = None
    number: int = 0  # among the loaders of this accelerator, whose states lie apart in a checkpoint

    def consume_batch(self, batch: Any) -> ODBStepInfo:
        """Takes the info out of a batch, so that the batch can go to the model."""
        info = take_info(batch)
        if info is None:
            raise ConfigError("this batch carries no step info: iterate bridge.dataloader, and take it out once")
        self.last_step_info = info
        return info

    def scale_loss(self, loss: torch.Tensor, info: ODBStepInfo | None = None) -> torch.Tensor:
        """The loss to give to `accelerator.backward`, which divides by the number of micro-steps: that is made up for.

        Args:
            loss: the mean over this rank's loss-bearing labels.
            info: of the batch; None: of the last one consumed.
        """
        num_micro_steps: int = self.accelerator.gradient_accumulation_steps
        return self._weighed(loss, info) * num_micro_steps

    def backward(self, loss: torch.Tensor, info: ODBStepInfo | None = None, **kwargs: Any) -> torch.Tensor:
        """`accelerator.backward` of the scaled loss.

        Returns:
            This rank's part of the loss, detached: its sum over micro-steps, averaged over ranks, is the mean over all
            tokens of the optimizer step.
        """
        self.accelerator.backward(self.scale_loss(loss, info), **kwargs)
        return self._weighed(loss, info).detach()

    def _weighed(self, loss: torch.Tensor, info: ODBStepInfo | None) -> torch.Tensor:
        info = info if info is not None else self.last_step_info
        if info is None:
            raise ConfigError("there is no step info: call consume_batch(batch) before the loss is scaled")
        if self.loss_scaling == "none":
            num_micro_steps: int = self.accelerator.gradient_accumulation_steps
            return loss / num_micro_steps
        return scale_loss(loss, info)

    def follow(self, scheduler: LambdaLR, *, total: int | None = None, unit: str = "samples") -> LambdaLR:
        """Makes a schedule over `total` samples or tokens go by what was consumed. Step it once per optimizer step.

        Args:
            scheduler: made with `num_training_steps=total` (and its warm-up in the same unit).
            total: None: the sample budget.
            unit: "samples" or "tokens", over all ranks.
        """
        if unit not in ("samples", "tokens"):
            raise ConfigError(f"unit must be 'samples' or 'tokens', got {unit!r}")
        total = total if total is not None or unit == "tokens" else self.sample_budget
        if total is None:
            raise ConfigError(f"follow needs total: the {unit} of the whole schedule, over all ranks")
        state = self.state
        follow(scheduler, Position(lambda: float(state.samples if unit == "samples" else state.tokens), total))
        return scheduler

    @property
    def should_stop(self) -> bool:
        """Whether the sample budget is used up; the same on all ranks."""
        return self.sample_budget is not None and self.state.samples >= self.sample_budget

    def stats(self) -> LoaderStats:
        """Of this rank's loader."""
        return self.handle.stats()

    def logs(self) -> dict[str, float]:
        """Numbers for `accelerator.log`."""
        totals = {
            "odb/all_samples": self.state.samples,
            "odb/all_tokens": self.state.tokens,
            "odb/epochs": self.state.epochs,
        }
        return flat_stats(self.stats()) | totals

    def join_uneven_inputs(self, *_joinables: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """Nothing to do: every rank has the same number of batches."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Ends the loader's processes."""
        self.handle.close()

    def _save(self, _models: Any, _weights: Any, folder: str) -> None:
        save_state(self._part_of(folder), self.handle, self.state, write=self.accelerator.is_main_process)

    def _part_of(self, folder: str) -> str:
        return folder if not self.number else str(Path(folder, f"odb_{self.number}"))

    def _load(self, _models: Any, folder: str) -> None:
        saved = read_state(
            self._part_of(folder), "configure_accelerator(..., resume_data=False) loads model and optimizer alone"
        )
        epoch = restore_loader(self.handle, saved)
        self.state.load_state_dict(saved["progress"])
        self.state.begin_epoch(epoch)
        self.dataloader.set_epoch(epoch)


def configure_accelerator(
    accelerator: Any,
    dataloader: Any,
    *,
    handle: ODBDataLoader | None = None,
    sample_budget: int | None = None,
    dataset_size: int | None = None,
    loss_scaling: bool | str | None = "exact",
    resume_data: bool = True,
    prepare_dataloader: bool = True,
    seed: int = 0,
    **options: Any,
) -> ODBAccelerateBridge:
    """Makes an Accelerate loop run on batches under a token budget.

    Args:
        accelerator: the `Accelerator`.
        dataloader: a `DataLoader` over the whole dataset, as `accelerator.prepare` would take it; or an `ODBDataLoader`;
            or one that `odb.apply` changed.
        handle: what `odb.apply(dataloader)` returned.
        sample_budget: samples over all ranks after which `bridge.should_stop` is true.
        dataset_size: samples of one epoch over all ranks, where the dataset can't tell.
        loss_scaling: "none" or False: leave the loss alone.
        resume_data: whether `accelerator.load_state` puts the loader where it was.
        prepare_dataloader: no difference.
        seed: of the order, where `odb` makes it.
        **options: see `odb.ODBConfig`; none for a loader that is odb's already.

    Raises:
        ConfigError: `dispatch_batches=True`, another number of micro-steps than the accelerator's, an unknown option.
    """
    _check_accelerator(accelerator)
    scaling = loss_scaling if isinstance(loss_scaling, str) else "none" if loss_scaling is False else "exact"
    given = handle if handle is not None else dataloader
    if isinstance(given, ODBDataLoader) or hasattr(given, "odb_loader"):
        loader = loader_of(given, **options)
        _check_accumulation(loader, accelerator)
    else:
        all_options = _accumulation(accelerator) | {"loss_scaling": scaling} | options
        rank, world_size = place_of(all_options, accelerator.process_index, accelerator.num_processes)
        loader = rebuilt(given, rank=rank, world_size=world_size, seed=seed, options=all_options)
    if loader.generator is None:  # so that beginning an epoch draws nothing from the generator that dropout draws from
        loader.generator = torch.Generator().manual_seed(seed)
    progress = Progress(samples_per_epoch=dataset_size if dataset_size is not None else _samples_per_epoch(loader))
    view = AcceleratedLoader(loader, progress, accelerator)
    number = getattr(accelerator, "num_odb_loaders", 0)
    accelerator.num_odb_loaders = number + 1
    bridge = ODBAccelerateBridge(accelerator, view, loader, sample_budget, scaling, progress, number=number)
    accelerator.register_save_state_pre_hook(bridge._save)
    if resume_data:
        accelerator.register_load_state_pre_hook(bridge._load)
    return bridge


def _check_accelerator(accelerator: Any) -> None:
    if accelerator.dispatch_batches:
        raise ConfigError(
            "dispatch_batches=True has the main process cut batches for all ranks, and odb's ranks make their own: use "
            "DataLoaderConfiguration(dispatch_batches=False)"
        )


def _needs_full_windows(accelerator: Any) -> bool:
    """Whether something counts micro-steps on its own, so that an epoch's last optimizer step must have all of them."""
    is_deepspeed = str(accelerator.distributed_type).endswith("DEEPSPEED")
    return is_deepspeed or not accelerator.gradient_state.sync_with_dataloader


def _accumulation(accelerator: Any) -> dict[str, Any]:
    tail = "fill" if _needs_full_windows(accelerator) else "short"
    return {"grad_accum_steps": accelerator.gradient_accumulation_steps, "accum_tail": tail}


def _check_accumulation(loader: ODBDataLoader, accelerator: Any) -> None:
    steps, config = accelerator.gradient_accumulation_steps, loader.config
    if config.grad_accum_steps != steps:
        raise ConfigError(
            f"the loader was made with grad_accum_steps={config.grad_accum_steps}, the Accelerator with "
            f"gradient_accumulation_steps={steps}: give the same to both"
        )
    if steps > 1 and config.accum_tail != "fill" and _needs_full_windows(accelerator):
        raise ConfigError(
            "this Accelerator counts micro-steps without the loader (DeepSpeed, or sync_with_dataloader=False): make the "
            "loader with accum_tail='fill'"
        )


def _samples_per_epoch(loader: ODBDataLoader) -> int | None:
    if loader.config.sample_quota is not None:
        return loader.config.sample_quota
    dataset = loader.dataset
    return None if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") else len(dataset)
