"""The data position in a checkpoint, for the ways in which trainers save: each with a manifest that is checked on resume.

| how the trainer saves | use |
| --- | --- |
| a folder that all ranks see, or a folder on each node | `save(folder, loader)` on every rank, `restore(folder, loader)` |
| one file for all ranks (`torch.save` on rank 0, Accelerate, Lightning) | `OneState(loader)`, which communicates |
| `torch.distributed.checkpoint` | `ShardedState(loader)` |
| offline samplers alone | `odb.manifest.save` and `load` on one rank, or any of the above |

All of them take several sources, `ODBDataLoader`s and offline samplers mixed. Saving never raises: what goes wrong is
marked, and refused on resume. `restore_position=False` resumes the model alone. A state of another number of ranks is
resized where the loader can.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from odb import manifest as manifests
from odb import resume
from odb.errors import ConfigError
from odb.exchange.rendezvous import exchange_texts, global_rank_and_size
from odb.manifest import Manifest, Position, loader_of

#: A rank's file in a checkpoint's folder.
_FILE = re.compile(r"odb_rank_(\d+)_of_(\d+)\.json")


def _loaders(sources: Sequence[Any]) -> list[Any]:
    return [loader for loader in map(loader_of, sources) if loader is not None]


def _place(sources: Sequence[Any]) -> tuple[int, int]:
    """Rank and number of ranks: data-parallel ones where a loader knows them."""
    for loader in _loaders(sources):
        return loader.rank, loader.world_size
    return global_rank_and_size()


# ---- one file for each rank


def save(folder: str | os.PathLike[str], *sources: Any, **position: Any) -> Manifest:
    """Writes this rank's file into a checkpoint's folder. Call it on every rank, after the same step; no communication.

    Args:
        folder: the checkpoint's; made where it does not exist.
        *sources: `ODBDataLoader`s and offline samplers, in an order that `restore` repeats.
        **position: see `odb.manifest.describe`; not needed where one of the sources is an `ODBDataLoader`.

    Returns:
        what was written. Never raises an error: its `replay_error` says what went wrong, if something did.
    """
    try:
        rank, world_size = _place(sources)
        path = Path(folder, f"odb_rank_{rank:05d}_of_{world_size:05d}.json")
    except Exception as error:
        return manifests.marked(f"{type(error).__name__}: {error}")
    written = manifests.save_as(path, manifests.describe(sources, **position))
    if rank == 0:
        _remove_others(path.parent, world_size)
    return written


def _remove_others(folder: Path, world_size: int) -> None:
    """An earlier checkpoint in the same folder, of another number of ranks, must not be taken for this one."""
    with suppress(OSError):
        for other, size in _files(folder):
            if size != world_size:
                Path(folder, f"odb_rank_{other:05d}_of_{size:05d}.json").unlink()


def _files(folder: Path) -> list[tuple[int, int]]:
    """(rank, number of ranks) of each file of `save` in a folder."""
    if not folder.is_dir():
        return []
    found = (_FILE.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def restore(
    folder: str | os.PathLike[str],
    *sources: Any,
    restore_position: bool = True,
    dataset_fingerprint: str | None = None,
) -> Position | None:
    """Puts loaders where a checkpoint's folder says, and tells samplers their epoch. Call it on every rank.

    On the number of ranks that saved it only this rank's file is read, so that a folder on each node will do; on another
    number all files are.

    Args:
        folder: as given to `save`.
        *sources: as given to `save`.
        restore_position: False resumes without the data's position: nothing is read, checked or restored.
        dataset_fingerprint: as given to `save`.

    Returns:
        the position: `skip_batches` and `resume_epoch` are for offline samplers, whose plan the trainer goes through; a
        loader has it already. None with `restore_position=False`.

    Raises:
        ConfigError: a file is missing, damaged or marked, or settings differ; shows both sides and the remedy. The
            other ranks stop too.
    """
    if not restore_position:
        return None
    return _take(lambda: _read_all(Path(folder), *_place(sources)), sources, dataset_fingerprint)


def _read_all(folder: Path, rank: int, world_size: int) -> list[Manifest]:
    """This rank's manifest, or those of all ranks of another number."""
    files = _files(folder)
    sizes = sorted({size for _, size in files})
    if len(sizes) != 1:
        found = f"files of {' and '.join(map(str, sizes))} ranks" if sizes else "no file of odb.checkpoint.save"
        raise ConfigError(
            f"{folder} holds {found}, expected one checkpoint's; restore_position=False resumes the model alone"
        )
    (saved,) = sizes
    ranks = [rank] if saved == world_size else list(range(saved))
    return [manifests.read(folder / f"odb_rank_{one:05d}_of_{saved:05d}.json") for one in ranks]


def _take(get: Callable[[], Sequence[Manifest]], sources: Sequence[Any], dataset_fingerprint: str | None) -> Position:
    """Checks manifests of one rank or of all, and puts the sources where they say."""
    with _Telling(sources):
        found = get()
        for manifest in found:
            manifests.check_whole(manifest)
        position = manifests.check(found[0], sources, dataset_fingerprint)
        states = [_merged([one["states"][number] for one in found]) for number in range(len(sources))]
    for source, state in zip(sources, states, strict=True):
        if (loader := loader_of(source)) is not None:
            loader.load_state_dict(state)  # tells the other ranks by itself
        elif callable(getattr(source, "set_epoch", None)):
            source.set_epoch(position.resume_epoch)
    return position


def _merged(states: list[Any]) -> Any:
    """All ranks' states of one source as one; a single one, and what a sampler has in place of a state, as it is."""
    return states[0] if len(states) == 1 or states[0] is None else resume.merge(states)


class _Telling:
    """What one rank refuses must stop the others too: a loader tells its peers what it refuses to load."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self.loaders = _loaders(sources)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ConfigError) and self.loaders:
            with suppress(ConfigError):
                self.loaders[0].load_state_dict(resume.refused(str(error)))


# ---- one state for all ranks


class OneState:
    """One state for all ranks, in the `state_dict` protocol: the same on every rank, so that a trainer may keep any.

        accelerator.register_for_checkpointing(OneState(loader))
        torch.save({"model": ..., "data": OneState(loader).state_dict()}, path)      # state_dict() on all ranks

    Args:
        *sources: `ODBDataLoader`s and offline samplers.
        position: without arguments -> what `odb.manifest.describe` takes; needed where all sources are samplers.
        restore_position: False makes `load_state_dict` do nothing.
        dataset_fingerprint: of the data, in place of what the sources say.

    Attributes:
        position: what `load_state_dict` restored; None before.
    """

    def __init__(
        self,
        *sources: Any,
        position: Callable[[], Mapping[str, Any]] | None = None,
        restore_position: bool = True,
        dataset_fingerprint: str | None = None,
    ) -> None:
        self.sources = sources
        self._where = position
        self.restores = restore_position
        self._fingerprint = dataset_fingerprint
        self.position: Position | None = None

    def describe(self) -> Manifest:
        """This rank's manifest; never raises an error."""
        try:
            position = {} if self._where is None else dict(self._where())
        except Exception as error:
            return manifests.marked(f"{type(error).__name__}: {error}")
        return manifests.describe(self.sources, dataset_fingerprint=self._fingerprint, **position)

    def state_dict(self) -> Manifest:
        """The manifest with all ranks' states. A collective: call it on all ranks, after the same step.

        Never raises an error: what goes wrong on any rank is marked in it.
        """
        own = self.describe()
        loaders = _loaders(self.sources)
        if not loaders:
            return own
        rank, world_size, timeout_s = loaders[0].rank, loaders[0].world_size, loaders[0].config.timeout_s
        try:
            texts = exchange_texts(json.dumps(own), rank, world_size, timeout_s)
            return _together([json.loads(text) for text in texts])
        except Exception as error:
            return manifests.marked(f"{type(error).__name__}: {error}")

    def load_state_dict(self, state: Manifest) -> None:
        """Puts the sources where the state says; raises what `restore` raises."""
        if self.restores:
            self.load_all(lambda: [state])

    def load_all(self, get: Callable[[], Sequence[Manifest]]) -> None:
        """The same from one manifest of all ranks, from this rank's own, or from those of all ranks."""
        self.position = _take(get, self.sources, self._fingerprint)


def _together(found: list[Manifest]) -> Manifest:
    """One manifest of all ranks': states merged, a mark of any rank kept."""
    for rank, manifest in enumerate(found):
        if manifest["replay_error"]:
            return manifests.marked(f"rank {rank}: {manifest['replay_error']}")
    merged = [resume.merge(list(s)) if s[0] else None for s in zip(*(one["states"] for one in found), strict=True)]
    return found[0] | {"states": merged}


# ---- torch.distributed.checkpoint


class ShardedState:
    """Each rank's state under a key of its own, for `torch.distributed.checkpoint`; resumes on any number of ranks.

        dcp.save({"model": ..., "data": ShardedState(loader)}, storage_writer=FileSystemWriter(path))

        reader = FileSystemReader(path)
        dcp.load({"model": ..., "data": ShardedState(loader).for_loading(reader, "data")}, storage_reader=reader)

    Saving communicates nothing of its own. `for_loading` asks the checkpoint which ranks saved it; without it the number
    of ranks must be the same. Arguments and `position` as for `OneState`.
    """

    def __init__(self, *sources: Any, **options: Any) -> None:
        self._one = OneState(*sources, **options)
        self._target: list[str] | None = None  # keys of a checkpoint that is about to be loaded

    @property
    def position(self) -> Position | None:
        """What `load_state_dict` restored; None before."""
        return self._one.position

    def for_loading(self, storage_reader: Any, key: str) -> ShardedState:
        """Asks for the states of all ranks that saved a checkpoint.

        Args:
            storage_reader: the reader that the load will use (its `read_metadata()` is called).
            key: under which this object stands in the dictionary that is loaded; nested keys joined by dots.

        Raises:
            ConfigError: the checkpoint holds no such states.
        """
        names = storage_reader.read_metadata().state_dict_metadata
        prefix = f"{key}."
        found = sorted(n.removeprefix(prefix) for n in names if re.fullmatch(re.escape(prefix) + r"rank_\d+", n))
        self._target = found if self._one.restores else []
        if not found and self._one.restores:
            with _Telling(self._one.sources):
                raise ConfigError(
                    f"the checkpoint holds no data position under {key!r} (it has {', '.join(sorted(names)[:8])}); "
                    "restore_position=False resumes the model alone"
                )
        return self

    def state_dict(self) -> dict[str, str]:
        """This rank's manifest as text, under a key that names the rank; on loading, what is to be filled in."""
        if self._target is not None:
            return dict.fromkeys(self._target, "")
        rank, _ = _place(self._one.sources)
        return {f"rank_{rank:05d}": json.dumps(self._one.describe())}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Puts the sources where the states say; raises what `restore` raises."""
        self._target = None
        if self._one.restores:
            rank, world_size = _place(self._one.sources)
            own = f"rank_{rank:05d}"
            names = [own] if len(state) == world_size and own in state else sorted(state)
            self._one.load_all(lambda: [json.loads(state[name]) for name in names])
