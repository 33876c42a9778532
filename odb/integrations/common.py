"""What the adapters share: progress, fillers, numbers for loggers, advice, and the state beside a checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from odb import manifest as manifests
from odb.checkpoint import OneState
from odb.errors import ConfigError
from odb.loader import AppliedLoader, ODBDataLoader, wrap
from odb.metrics import LoaderStats
from odb.resume import State
from odb.step import STEP_INFO_KEY, ODBStepInfo

logger = logging.getLogger("odb")

#: The file that a checkpoint holds beside the trainer's own.
STATE_FILE = "odb_state.json"
_STATE_FORMAT = 1

#: Shares above which advice is given, and how many steps must have run before it means something.
PADDING_HIGH = 0.25
IDLE_HIGH = 0.05
WAIT_HIGH = 0.20
MIN_STEPS_FOR_ADVICE = 20


# ---- loaders and batches


def loader_of(loader: Any, **options: Any) -> ODBDataLoader:
    """The `ODBDataLoader` that is, is behind, or is made of what a user has.

    Args:
        loader: an `ODBDataLoader`, a `DataLoader` that `odb.apply` changed, or a plain `DataLoader`.
        options: for a plain `DataLoader`, see `odb.wrap`; with the others there may be none.

    Raises:
        ConfigError: options for a loader that has its own, or nothing that can be used.
    """
    handle = loader.odb_loader if isinstance(loader, AppliedLoader) else loader
    if not isinstance(handle, ODBDataLoader):
        return wrap(loader, **options)
    if options:
        raise ConfigError(f"this loader is odb's already and has its options: {', '.join(sorted(options))} given again")
    return handle


def peek_info(batch: Any) -> ODBStepInfo | None:
    """The info that a batch carries, left where it is; None where there is none (an evaluation's batch, say)."""
    info = batch.get(STEP_INFO_KEY) if isinstance(batch, Mapping) else None
    return info if isinstance(info, ODBStepInfo) else None


def take_info(batch: Any) -> ODBStepInfo | None:
    """The info that a batch carries, taken out of it; None where there is none."""
    info = peek_info(batch)
    if info is not None and isinstance(batch, MutableMapping):
        del batch[STEP_INFO_KEY]
    return info


def mask_filler(batch: Any, info: ODBStepInfo, ignore_index: int = -100) -> None:
    """Makes a filler bear no label, for trainers that count labels themselves. Other batches stay as they are."""
    if not info.idle or not isinstance(batch, MutableMapping):
        return
    for key in ("labels", "shift_labels"):
        labels = batch.get(key)
        if labels is not None and hasattr(labels, "new_full"):
            batch[key] = labels.new_full(labels.shape, ignore_index)


# ---- progress


@dataclass
class Progress:
    """How far a run is, counted over all data-parallel ranks, whatever the sizes of its batches.

    Attributes:
        samples_per_epoch: sample views of one epoch over all ranks; None: unknown.
        epoch: the epoch that runs, or comes next.
        epoch_samples: sample views of this epoch so far, over all ranks.
        samples: sample views of the whole run.
        tokens: their tokens, without padding.
        loss_tokens: their loss-bearing labels.
        micro_steps: batches per rank, fillers included.
        optimizer_steps: windows that were completed.
    """

    samples_per_epoch: int | None = None
    epoch: int = 0
    epoch_samples: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    micro_steps: int = 0
    optimizer_steps: int = 0

    def add(self, info: ODBStepInfo) -> None:
        """Counts one batch of the loop."""
        self.epoch_samples += info.all_samples_this_step
        self.samples += info.all_samples_this_step
        self.tokens += info.all_tokens
        self.loss_tokens += info.all_loss_tokens
        self.micro_steps += 1
        self.optimizer_steps += info.sync_gradients

    def begin_epoch(self, epoch: int) -> None:
        """Epoch `epoch` starts, or goes on if it is the one that runs."""
        if epoch != self.epoch:
            self.epoch, self.epoch_samples = epoch, 0

    @property
    def epochs(self) -> float:
        """Epochs done, fractions included. Samples that were rejected make no difference at an epoch's end."""
        if not self.samples_per_epoch:
            return float(self.epoch)
        return self.epoch + min(1.0, self.epoch_samples / self.samples_per_epoch)

    @property
    def scheduled_samples(self) -> int:
        """`epochs` in samples: what a schedule over whole epochs goes by."""
        if not self.samples_per_epoch:
            return self.samples
        return self.epoch * self.samples_per_epoch + min(self.samples_per_epoch, self.epoch_samples)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the counts that are there, but for `samples_per_epoch`, which belongs to the dataset at hand."""
        for f in fields(self):
            if f.name != "samples_per_epoch" and f.name in state:
                setattr(self, f.name, state[f.name])


# ---- numbers and advice


def flat_stats(stats: LoaderStats, prefix: str = "odb/") -> dict[str, float]:
    """Every number of a loader's stats under one name each, shares included: what loggers of scalars take."""
    out: dict[str, float] = {}
    for name, value in stats.as_dict().items():
        if isinstance(value, (dict, Counter)):
            out |= {f"{prefix}{name}/{key}": float(number) for key, number in value.items()}
        elif isinstance(value, (int, float)):
            out[prefix + name] = float(value)
    out[f"{prefix}idle_share"] = stats.idle_steps / stats.steps if stats.steps else 0.0
    return out


def advice(stats: LoaderStats, elapsed_s: float, num_workers: int) -> dict[str, str]:
    """What is high and which option changes it, by kind ("padding", "idle", "wait"). Empty: nothing to say.

    Args:
        stats: of the loader, of at least `MIN_STEPS_FOR_ADVICE` steps; fewer give no advice.
        elapsed_s: seconds in which they came about, training included.
        num_workers: as the loader has them.
    """
    if stats.steps < MIN_STEPS_FOR_ADVICE:
        return {}
    out = {}
    if stats.padding > PADDING_HIGH:
        out["padding"] = f"{stats.padding:.0%} of the tokens in batches are padding: {_padding_remedy(stats)}"
    idle = stats.idle_steps / stats.steps
    if idle > IDLE_HIGH:
        out["idle"] = (
            f"{idle:.0%} of this rank's steps were fillers: a lower token_budget gives more, smaller steps to share; a "
            "lower grad_accum_steps leaves less to fill at an epoch's end; without a sampler odb shares samples evenly"
        )
    if elapsed_s > 0 and stats.wait_s / elapsed_s > WAIT_HIGH:
        remedy = "raise num_workers" if num_workers else "give num_workers, so that samples are read beside training"
        out["wait"] = (
            f"training waited {stats.wait_s / elapsed_s:.0%} of the time for batches: {remedy}, or make the dataset faster"
        )
    return out


def _padding_remedy(stats: LoaderStats) -> str:
    if stats.binding_limit in ("max_samples", "max_patches"):
        return f"{stats.binding_limit} closes most batches; raise it"
    if stats.binding_limit == "window":
        return "most batches end because the window holds no other sample; raise window or max_held_tokens"
    return "a larger window (and max_held_tokens) lets samples of like lengths meet; pad_to_multiple_of pads too"


class Advisor:
    """Says each kind of advice once in the log."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def check(self, stats: LoaderStats, elapsed_s: float, num_workers: int) -> list[str]:
        """Logs what is new, as warnings, and returns it."""
        new = {k: v for k, v in advice(stats, elapsed_s, num_workers).items() if k not in self._said}
        self._said |= new.keys()
        for text in new.values():
            logger.warning("%s", text)
        return list(new.values())


# ---- the state beside a checkpoint


def save_state(
    folder: str | os.PathLike[str],
    loader: ODBDataLoader,
    progress: Progress,
    *,
    write: bool,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes one state of all ranks' loaders into a checkpoint's folder. Call it on all ranks, after the same step.

    Never raises an error, so that the model's checkpoint is saved in any case: what goes wrong is marked in the file, and
    `restore_loader` refuses it.

    Args:
        folder: of the checkpoint; made where it is missing.
        loader: this rank's.
        progress: the run's counts.
        write: whether this process writes (one per folder: the main process, or one of each node).
        extra: further JSON values, which `read_state` gives back beside the others.
    """
    own = {"format": _STATE_FORMAT, "data": OneState(loader).state_dict(), "progress": progress.state_dict()}
    if not write:
        return
    path = Path(folder, STATE_FILE)
    try:
        manifests.write_json(path, dict(extra or {}) | own)
    except Exception as error:
        with suppress(Exception):
            path.unlink()  # no older one in its place
        with suppress(Exception):
            manifests.write_json(path, own | {"data": manifests.marked(f"{type(error).__name__}: {error}")})


def read_state(folder: str | os.PathLike[str], remedy: str) -> dict[str, Any]:
    """What `save_state` wrote: {"data": the manifest with the loaders' states, "progress": counts, ...}.

    Args:
        folder: of the checkpoint.
        remedy: how this trainer is told to go on without the data's position; part of the errors.

    Raises:
        ConfigError: there is none, it can't be read, or it is marked.
    """
    path = Path(folder, STATE_FILE)
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no odb state, so training can't go on at the batch where it stopped. {remedy}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read ({error}). {remedy}") from None
    if state.get("format") != _STATE_FORMAT:
        raise ConfigError(f"{path} has format {state.get('format')!r}, this package reads {_STATE_FORMAT}. {remedy}")
    reason = state["data"].get("replay_error")
    if reason:
        raise ConfigError(f"when {folder} was saved, the data's position could not be ({reason}). {remedy}")
    return state


def restore_loader(loader: ODBDataLoader, state: Mapping[str, Any]) -> int:
    """Puts a loader where a read state says, after comparing settings.

    Returns:
        the epoch to go on with: the interrupted one, or the next where that was done.

    Raises:
        ConfigError: the loader's settings, or the number of samples, are others than when it was saved.
    """
    (position,) = state["data"]["states"]
    epoch = epoch_of(position)
    if is_finished(position):
        manifests.check(state["data"], [loader])
        loader.set_epoch(epoch + 1)
        return epoch + 1
    OneState(loader).load_state_dict(state["data"])
    return epoch


def is_finished(state: State) -> bool:
    """Whether a loader's state stands behind the last batch of its epoch, so that the rest of it is empty."""
    return all(one["is_last"] and not one["pending"] for one in state.get("ranks", [state]))


def epoch_of(state: State) -> int:
    """The epoch that a loader's state belongs to."""
    return int(state.get("ranks", [state])[0]["epoch"])
