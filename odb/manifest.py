"""What stands beside a checkpoint: where the data was, and by what it was planned, so that a resume can be checked.

A manifest is JSON. It holds the settings of every loader and offline sampler (hashes of planning inputs among them),
fingerprints of their datasets, the epoch's length where that is known, and the consumed position. On resume, settings
that differ are refused with both sides, other data is warned of. Writing it never stops a model from being saved: what
goes wrong becomes a marker in the manifest, and a resume that needs the position refuses it.

Offline samplers hold no position: their plan follows from seed and epoch, so the position is all that a resume needs.
An `ODBDataLoader` has a state of its own; `odb.checkpoint` keeps the two together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odb.errors import ConfigError

logger = logging.getLogger("odb")

#: Of the format. A manifest of another version is refused.
MANIFEST_VERSION = 1

#: Name of a manifest that stands alone in a checkpoint's folder.
MANIFEST_NAME = "odb_manifest.json"

#: Positions that a trainer computes as a fraction of an epoch may be off by this many batches.
_ROUNDING = 1e-5

_REMEDY = "restore_position=False goes on with the model alone and starts the data anew"

#: A manifest as JSON gives it back. Keys: see `describe`.
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """How far an epoch was trained.

    Attributes:
        epoch: the epoch that was under way.
        consumed_batches: how many of its batches (micro-batches) each rank had trained on.
        steps_in_epoch: batches of each rank in that epoch; None where that is not known before its end.
        extra: what the trainer had given to keep beside it.
    """

    epoch: int
    consumed_batches: int
    steps_in_epoch: int | None = None
    extra: Any = None

    @property
    def is_end(self) -> bool:
        """Whether the epoch was done."""
        return self.consumed_batches == self.steps_in_epoch

    @property
    def resume_epoch(self) -> int:
        """The epoch in which training goes on: what `set_epoch` has to be told before anything wraps the sampler."""
        return self.epoch + 1 if self.is_end else self.epoch

    @property
    def skip_batches(self) -> int:
        """How many batches of `resume_epoch` each rank leaves out."""
        return 0 if self.is_end else self.consumed_batches


def position_of(
    epoch: float, consumed_batches: float | None = None, steps_in_epoch: int | None = None, grad_accum_steps: int = 1
) -> Position:
    """A position from a trainer's numbers.

    Args:
        epoch: the epoch; with a fraction (a quarter through epoch 2: 2.25) where `consumed_batches` is not given.
        consumed_batches: batches (micro-batches) of this epoch that each rank has trained on.
        steps_in_epoch: batches of each rank in an epoch; needed where the position is the fraction of `epoch`.
        grad_accum_steps: batches of an optimizer step: a position inside one is refused, but for the epoch's end.

    Raises:
        ConfigError: no finite number, outside the epoch, no whole batch, or inside an optimizer step.
    """
    whole = _number("epoch", epoch)
    if consumed_batches is None:
        if steps_in_epoch is None:
            raise ConfigError("a position needs consumed_batches, or steps_in_epoch and an epoch with its fraction")
        whole, consumed = float(math.floor(whole)), math.fmod(whole, 1.0) * steps_in_epoch
    else:
        consumed = _number("consumed_batches", consumed_batches)
    offset = round(consumed)
    where = f"batch {consumed:.10g} of epoch {whole:.10g} ({steps_in_epoch or 'unknown'} batches) is no place to go on"
    if whole < 0 or whole != math.floor(whole):
        raise ConfigError(f"{where}: an epoch is a whole number >= 0 where consumed_batches is given")
    if abs(consumed - offset) > _ROUNDING:
        raise ConfigError(f"{where}: not a whole number of batches; was the epoch's length another one?")
    if offset < 0 or (steps_in_epoch is not None and offset > steps_in_epoch):
        raise ConfigError(f"{where}: outside the epoch")
    if offset % grad_accum_steps and offset != steps_in_epoch:
        raise ConfigError(f"{where}: inside an optimizer step of {grad_accum_steps} batches; save at its end")
    return Position(int(whole), offset, steps_in_epoch)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value!r}")
    return float(value)


def hash_of(**inputs: Any) -> str:
    """One hash of named planning inputs (lengths, label counts, weights), the same on every machine.

    Arrays of integers hash by value, whatever their width; names count, their order does not.

    Raises:
        ConfigError: an input is no array of numbers.
    """
    total = hashlib.sha256()
    for name in sorted(inputs):
        array = np.asarray(inputs[name])
        if array.dtype.kind not in "biuf":
            raise ConfigError(f"{name} must be an array of numbers, got dtype {array.dtype}")
        plain = array.astype("<f8" if array.dtype.kind == "f" else "<i8")
        total.update(f"{name} {plain.dtype.str} {plain.shape} ".encode())
        total.update(plain.tobytes())
    return total.hexdigest()


# ---- what sources say of themselves


def settings_of(source: Any) -> dict[str, Any]:
    """What must be equal before and after a resume of a loader or sampler, as plain JSON values.

    Args:
        source: an `ODBDataLoader`, a sampler of `odb.samplers` or another thing with `settings()` or
            `manifest_settings()`, or a mapping of settings.

    Raises:
        ConfigError: none of these, or a setting is no JSON value.
    """
    method = getattr(source, "manifest_settings", None) or getattr(source, "settings", None)
    if isinstance(source, Mapping):
        settings = {name: value for name, value in source.items() if name != "dataset_fingerprint"}
    elif callable(method):
        settings = {"class": type(source).__qualname__} | dict(method())
    elif (loader := loader_of(source)) is not None:
        settings = {"class": "ODBDataLoader"} | loader.state_dict()["settings"]
        settings.pop("sharding", None)  # a single rank shares with nobody; the loader compares it where it matters
    else:
        raise ConfigError(
            f"a {type(source).__name__} says nothing of its settings: give an ODBDataLoader, a sampler with settings() "
            "(those of odb.samplers have it), or a mapping"
        )
    try:
        plain: dict[str, Any] = json.loads(json.dumps(settings, sort_keys=True, default=_plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the settings of a {type(source).__name__} are no JSON: {error}") from None
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is neither a number, a text nor a list or mapping of them")


def loader_of(source: Any) -> Any:
    """The `ODBDataLoader` that a source is, or that `odb.apply` put into it; else None."""
    inner = getattr(source, "odb_loader", source)
    return inner if hasattr(inner, "load_state_dict") and hasattr(inner, "config") else None


def fingerprint_of(source: Any) -> str | None:
    """Of the data of a source, where that says it: a `dataset_fingerprint`, or the dataset's own; else None."""
    given = source.get("dataset_fingerprint") if isinstance(source, Mapping) else None
    own = given or getattr(source, "dataset_fingerprint", None)
    dataset = getattr(source, "dataset", None)
    # Hugging Face datasets document `_fingerprint` as the hash by which they cache.
    found = own or getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    return found if isinstance(found, str) else None


# ---- making and checking


def describe(
    sources: Sequence[Any],
    *,
    epoch: float | None = None,
    consumed_batches: float | None = None,
    steps_in_epoch: int | None = None,
    grad_accum_steps: int = 1,
    dataset_fingerprint: str | None = None,
    extra: Any = None,
) -> Manifest:
    """The manifest of some loaders and samplers. Never raises an error: what goes wrong is marked in it and logged.

    Args:
        sources: see `settings_of`. Nothing here communicates.
        epoch, consumed_batches, steps_in_epoch, grad_accum_steps: see `position_of`; without an epoch the position is
            that of the first `ODBDataLoader`.
        dataset_fingerprint: of the data, in place of what the sources say.
        extra: anything that JSON can hold, for the trainer's own counters; `Position.extra` gives it back.

    Returns:
        `{"version", "settings": one mapping for each source, "states": the state of each loader and None for a
        sampler, "dataset_fingerprints", "steps_in_epoch", "epoch", "resume_epoch", "consumed_batches", "extra",
        "replay_error": None or what went wrong}`.
    """
    try:
        states = [None if (loader := loader_of(one)) is None else loader.state_dict() for one in sources]
        if epoch is None:
            position = position_of(*_first_position(states), steps_in_epoch)
        else:
            position = position_of(epoch, consumed_batches, steps_in_epoch, grad_accum_steps)
        return _blank() | {
            "settings": [settings_of(one) for one in sources],
            "states": states,
            "dataset_fingerprints": [dataset_fingerprint or fingerprint_of(one) for one in sources],
            "steps_in_epoch": position.steps_in_epoch,
            "epoch": position.epoch,
            "resume_epoch": position.resume_epoch,
            "consumed_batches": position.consumed_batches,
            "extra": json.loads(json.dumps(extra)),
        }
    except Exception as error:
        return marked(f"{type(error).__name__}: {error}")


def _first_position(states: Sequence[Mapping[str, Any] | None]) -> tuple[int, int]:
    for state in states:
        if state is not None:
            return state["epoch"], state["step"]
    raise ConfigError("samplers hold no position: give epoch and consumed_batches")


def _blank() -> Manifest:
    names = ("steps_in_epoch", "epoch", "resume_epoch", "consumed_batches", "extra", "replay_error")
    lists: Manifest = {"settings": [], "states": [], "dataset_fingerprints": []}
    return {"version": MANIFEST_VERSION} | lists | dict.fromkeys(names)


def marked(reason: str) -> Manifest:
    """A manifest that an exact resume refuses, because the position could not be saved. Says so in the log."""
    logger.error(
        "the data position could not be saved (%s): the checkpoint holds the model, and resumes without the position",
        reason,
    )
    return _blank() | {"replay_error": reason}


def check(manifest: Any, sources: Sequence[Any], dataset_fingerprint: str | None = None) -> Position:
    """Where training goes on, if the sources are those that the manifest was saved with.

    Args:
        manifest: as `describe` made it.
        sources: the loaders and samplers of now, in the same order.
        dataset_fingerprint: as given to `describe`.

    Raises:
        ConfigError: no manifest, another version, a marked one, or settings that differ; shows both sides and the
            remedy. Data that differs is only warned of: the order is the same, what stands in it is not.
    """
    check_whole(manifest)
    saved = manifest["settings"]
    if len(saved) != len(sources):
        raise ConfigError(f"the manifest describes {len(saved)} loaders or samplers, now there are {len(sources)}")
    sides = [side for pair in zip(saved, map(settings_of, sources), strict=True) for side in _differences(*pair)]
    if sides:
        raise ConfigError(
            f"the resumed run has changed settings ({'; '.join(sides)}): the rest of the epoch would not be the one that "
            f"was interrupted. Use the saved settings; or {_REMEDY}"
        )
    _warn_of_other_data(manifest["dataset_fingerprints"], [dataset_fingerprint or fingerprint_of(s) for s in sources])
    return Position(*(manifest[name] for name in ("epoch", "consumed_batches", "steps_in_epoch", "extra")))


def check_whole(manifest: Any) -> None:
    """Refuses what is no manifest, one of another version, and one that is marked.

    Raises:
        ConfigError: says what was found and the remedy.
    """
    if not isinstance(manifest, dict) or "version" not in manifest:
        raise ConfigError(f"this is no manifest of odb: got {type(manifest).__name__}; {_REMEDY}")
    if manifest["version"] != MANIFEST_VERSION:
        raise ConfigError(
            f"this manifest has version {manifest['version']!r}, this package reads version {MANIFEST_VERSION}: resume "
            f"with the version of odb that saved it; or {_REMEDY}"
        )
    if manifest.get("replay_error"):
        raise ConfigError(
            f"when this checkpoint was saved, the data position could not be ({manifest['replay_error']}): an exact "
            f"resume is not possible; {_REMEDY}"
        )
    missing, unknown = sorted(_blank().keys() - manifest.keys()), sorted(manifest.keys() - _blank().keys())
    if missing or unknown:
        raise ConfigError(f"this manifest is damaged: missing keys {missing}, unknown keys {unknown}; {_REMEDY}")


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    name = now.get("class", saved.get("class", "sampler"))
    return [
        f"{name}: {key}: saved {saved.get(key, 'nothing')}, now {now.get(key, 'nothing')}"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]


def _warn_of_other_data(saved: Sequence[str | None], now: Sequence[str | None]) -> None:
    for before, after in zip(saved, now, strict=True):
        if before is not None and after is not None and before != after:
            logger.warning(
                "the dataset is another one than when the checkpoint was saved (fingerprint %s, now %s): settings and "
                "planning inputs agree, so the position is restored, but samples may hold other text",
                before,
                after,
            )


# ---- files


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is either the old or the new one, never a part: through a second file in the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def save(folder: str | os.PathLike[str], sources: Sequence[Any], **position: Any) -> Manifest:
    """Writes `describe(sources, **position)` into a checkpoint's folder; one rank does it. Never raises an error.

    Returns:
        what was written; its `replay_error` says what went wrong, if something did.
    """
    return save_as(Path(folder, MANIFEST_NAME), describe(sources, **position))


def save_as(path: Path, manifest: Manifest) -> Manifest:
    """Writes a manifest. Never raises an error; where it can't be written, no older one is left in its place."""
    try:
        write_json(path, manifest)
    except Exception as error:
        manifest = marked(f"{type(error).__name__}: {error}")
        with suppress(OSError):
            path.unlink()
        with suppress(Exception):
            write_json(path, manifest)
    return manifest


def read(path: Path) -> Manifest:
    """A manifest's file.

    Raises:
        ConfigError: there is none, or it is no JSON.
    """
    try:
        manifest: Manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no manifest at {path}: this checkpoint holds no data position; {_REMEDY}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the manifest at {path} can't be read ({error}); {_REMEDY}") from None
    return manifest


def load(
    folder: str | os.PathLike[str],
    sources: Sequence[Any],
    *,
    restore_position: bool = True,
    dataset_fingerprint: str | None = None,
) -> Position | None:
    """Reads a folder's manifest and checks it (see `check`); None with `restore_position=False`, which reads nothing."""
    if not restore_position:
        return None
    return check(read(Path(folder, MANIFEST_NAME)), sources, dataset_fingerprint)
