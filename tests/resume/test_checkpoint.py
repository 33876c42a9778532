"""Checkpoints as trainers write them, on real ranks: a file for each rank, one state for all, a distributed checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interrupted import prints, saved_at
from scenarios import Spec, log_normal, raises_with

from odb import checkpoint, manifest
from odb.checkpoint import OneState, ShardedState
from odb.errors import ConfigError
from odb.testing import Seen, assert_each_once, assert_steps_aligned, record, seen

pytestmark = pytest.mark.timeout(120)

SPEC = Spec(log_normal(90, 20, 0.6, 3, 60, seed=4), 120, num_workers=0, options={"shuffle": True, "window": 12})
KINDS = ["folder", "one file", "distributed"]
STOP = 4


def write(kind: str, folder: Path, loader: Any) -> None:
    if kind == "folder":
        checkpoint.save(folder, loader)
    elif kind == "one file":
        state = OneState(loader).state_dict()
        if loader.rank == 0:
            torch.save({"model": torch.ones(3), "data": state}, folder / "checkpoint.pt")
    else:
        whole = {"model": {"weight": torch.ones(3)}, "data": ShardedState(loader)}
        dcp.save(whole, storage_writer=dcp.FileSystemWriter(folder), no_dist=not dist.is_initialized())
    if dist.is_initialized():
        dist.barrier()


def read(kind: str, folder: Path, loader: Any, **options: Any) -> Any:
    if kind == "folder":
        return checkpoint.restore(folder, loader, **options)
    if kind == "one file":
        one = OneState(loader, **options)
        one.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["data"])
        return one.position
    reader = dcp.FileSystemReader(folder)
    sharded = ShardedState(loader, **options).for_loading(reader, "data")
    model = {"weight": torch.zeros(3)}
    dcp.load({"model": model, "data": sharded}, storage_reader=reader, no_dist=not dist.is_initialized())
    assert bool((model["weight"] == 1).all())
    return sharded.position


def written(rank: int, world_size: int, kind: str, folder: str, spec: Spec, stop: int = STOP) -> list[Seen]:
    steps = []
    with spec.loader(rank, world_size) as loader:
        loader.set_epoch(1)
        for batch in loader:
            steps.append(seen(batch))
            if len(steps) == stop:
                break
        write(kind, Path(folder), loader)
    return steps


def resumed(rank: int, world_size: int, kind: str, folder: str, spec: Spec, again: str = "") -> list[Seen]:
    with spec.loader(rank, world_size) as loader:
        position = read(kind, Path(folder), loader)
        assert (position.epoch, position.consumed_batches) == (1, STOP)
        if again:  # what was restored is saved once more before anything was trained on
            write(kind, Path(again), loader)
        return record(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_on_as_many_ranks_the_rest_is_the_same(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    wholes = ranks.values(2, written, "folder", str(tmp_path / "other"), SPEC, 10_000)
    heads = ranks.values(2, written, kind, str(first), SPEC)
    tails = ranks.values(2, resumed, kind, str(first), SPEC, str(second))
    assert [head + tail for head, tail in zip(heads, tails, strict=True)] == wholes
    assert ranks.values(2, resumed, kind, str(second), SPEC) == tails


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_on_other_numbers_of_ranks_each_sample_comes_once(kind: str, world_size: int, tmp_path: Path) -> None:
    heads = ranks.values(2, written, kind, str(tmp_path), SPEC)
    tails = ranks.values(world_size, resized, kind, str(tmp_path))
    assert_steps_aligned(tails)
    assert_each_once([*heads, *tails], range(90))


def resized(rank: int, world_size: int, kind: str, folder: str) -> list[Seen]:
    with SPEC.loader(rank, world_size) as loader:
        assert read(kind, Path(folder), loader).epoch == 1
        return record(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_differ_are_refused_and_the_position_can_be_given_up(kind: str, tmp_path: Path) -> None:
    written(0, 1, kind, str(tmp_path), SPEC)
    other = SPEC.but(token_budget=140)
    loader = other.loader(0, 1)
    with raises_with(ConfigError, "changed settings", "token_budget: saved 120, now 140", "restore_position=False"):
        read(kind, tmp_path, loader)
    assert read(kind, tmp_path, loader, restore_position=False) is None
    assert prints(loader) == prints(other.loader(0, 1))


def refused_on_one(rank: int, world_size: int, kind: str, folder: str) -> str:
    """Rank 1 alone runs with another budget."""
    with SPEC.but(token_budget=120 + 20 * rank).loader(rank, world_size) as loader:
        try:
            read(kind, Path(folder), loader)
            prints(loader)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("kind", ["folder", "one file"])
def test_what_one_rank_refuses_stops_all(kind: str, tmp_path: Path) -> None:
    ranks.values(2, written, kind, str(tmp_path), SPEC)
    first, second = ranks.run_ranks(2, refused_on_one, kind, str(tmp_path))
    assert second.value.startswith("ConfigError: ") and "token_budget: saved 120, now 140" in second.value
    assert first.value.startswith("PeerFailedError: ") and "token_budget: saved 120, now 140" in first.value
    assert first.seconds < 5 + second.seconds


# ---- what goes wrong while saving


class Broken(type(SPEC.loader(0, 1))):  # type: ignore[misc]
    """A loader whose state can't be told."""

    def state_dict(self) -> Any:
        raise RuntimeError("the disk is on fire")


def broken_on_one(rank: int, world_size: int, kind: str, folder: str) -> list[Seen]:
    with SPEC.loader(rank, world_size) as loader:
        steps = record(loader, STOP)
        if rank == 1:
            loader.__class__ = Broken
        write(kind, Path(folder), loader)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_on_one_rank_lets_all_save_and_marks(kind: str, tmp_path: Path) -> None:
    ranks.values(2, broken_on_one, kind, str(tmp_path))
    results = ranks.run_ranks(2, refused_on_one, kind, str(tmp_path))
    assert "the disk is on fire" in results[1].value and "restore_position=False" in results[1].value
    assert all("the disk is on fire" in result.value for result in results)


def test_a_full_disk_does_not_stop_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loader = SPEC.loader(0, 1)
    assert checkpoint.save(tmp_path, loader)["replay_error"] is None
    (file,) = tmp_path.iterdir()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest.os, "fsync", full)
        assert "No space left" in checkpoint.save(tmp_path, loader)["replay_error"]
    assert "No space left" in caplog.text
    assert not list(tmp_path.iterdir())  # the older one would be taken for this one
    with raises_with(ConfigError, "no file of odb.checkpoint.save", "restore_position=False"):
        checkpoint.restore(tmp_path, loader)
    for text in ("", "[]", '{"version": 9}', '{"version": 1}'):
        file.write_text(text)
        with raises_with(ConfigError, "restore_position=False"):
            checkpoint.restore(tmp_path, loader)


def test_a_folder_that_is_none_does_not_stop_the_checkpoint(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    assert checkpoint.save(blocked, SPEC.loader(0, 1))["replay_error"]
    assert checkpoint.save(tmp_path, object())["replay_error"]


def test_an_older_checkpoint_of_more_ranks_is_not_mixed_up(tmp_path: Path) -> None:
    for rank in (0, 1):
        checkpoint.save(tmp_path, SPEC.but(options={"dp_rank": rank, "dp_world_size": 2}).loader(0, 1))
    assert len(list(tmp_path.iterdir())) == 2
    checkpoint.save(tmp_path, SPEC.loader(0, 1))
    assert [file.name for file in tmp_path.iterdir()] == ["odb_rank_00000_of_00001.json"]
    file = tmp_path / "odb_rank_00001_of_00002.json"
    file.write_text("{}")
    with raises_with(ConfigError, "files of 1 and 2 ranks"):
        checkpoint.restore(tmp_path, SPEC.loader(0, 1))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    ranks.values(2, written, "folder", str(tmp_path), SPEC)
    (tmp_path / "odb_rank_00001_of_00002.json").unlink()
    with raises_with(ConfigError, "odb_rank_00001_of_00002.json"):
        checkpoint.restore(tmp_path, SPEC.loader(0, 1))


def test_a_distributed_checkpoint_without_a_position_says_so(tmp_path: Path) -> None:
    dcp.save({"model": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    reader = dcp.FileSystemReader(tmp_path)
    with raises_with(ConfigError, "no data position under 'data'", "model", "restore_position=False"):
        ShardedState(SPEC.loader(0, 1)).for_loading(reader, "data")
    sharded = ShardedState(SPEC.loader(0, 1), restore_position=False).for_loading(reader, "data")
    dcp.load({"model": torch.ones(2), "data": sharded}, storage_reader=reader, no_dist=True)
    assert sharded.position is None
    assert list(sharded.state_dict()) == ["rank_00000"]  # the next checkpoint holds one again


# ---- samplers beside a loader


class Sampler:
    """An offline sampler as the manifest sees it."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.epochs: list[int] = []

    def manifest_settings(self) -> dict[str, Any]:
        return self.settings

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_a_loader_and_a_sampler_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader, whole = SPEC.loader(0, 1), prints(SPEC.loader(0, 1))
    head = prints(loader, 3)
    checkpoint.save(tmp_path, loader, Sampler(width=4), dataset_fingerprint="a")
    fresh, sampler = SPEC.loader(0, 1), Sampler(width=4)
    with caplog.at_level(logging.WARNING):
        checkpoint.restore(tmp_path, fresh, sampler, dataset_fingerprint="b")
    assert "fingerprint a, now b" in caplog.text
    assert sampler.epochs == [0] and head + prints(fresh) == whole
    with raises_with(ConfigError, "Sampler: width: saved 4, now 8"):
        checkpoint.restore(tmp_path, fresh, Sampler(width=8))
    with raises_with(ConfigError, "describes 2 loaders or samplers, now there are 1"):
        checkpoint.restore(tmp_path, fresh)


@pytest.mark.parametrize("epoch", [7.0, float("nan")])
def test_one_state_of_a_sampler_alone(epoch: float) -> None:
    one = OneState(Sampler(), position=lambda: {"epoch": epoch, "consumed_batches": 8, "steps_in_epoch": 8})
    state = json.loads(json.dumps(one.state_dict()))
    other = Sampler()
    again = OneState(other)
    if epoch == 7.0:
        again.load_state_dict(state)
        assert again.position == manifest.Position(7, 8, 8) and other.epochs == [8]
    else:
        with raises_with(ConfigError, "epoch must be finite", "restore_position=False"):
            again.load_state_dict(state)


def test_a_failing_position_is_marked() -> None:
    assert "ZeroDivisionError" in OneState(Sampler(), position=lambda: {"epoch": 1 // 0}).state_dict()["replay_error"]


def test_states_of_different_steps_are_marked_or_refused(tmp_path: Path) -> None:
    _, merged = saved_at(0, 1, SPEC, 3)
    assert merged["ranks"][0]["step"] == 3
    for rank, stop in ((0, 3), (1, 4)):
        spec = SPEC.but(options={"dp_rank": rank, "dp_world_size": 2, "join": True})
        loader = spec.loader(0, 1)
        saved = checkpoint.save(tmp_path, loader)
        file = tmp_path / f"odb_rank_{rank:05d}_of_00002.json"
        saved["states"][0]["step"] = stop
        file.write_text(json.dumps(saved))
    with raises_with(ConfigError, "not saved after the same step", "[3, 4]"):
        checkpoint.restore(tmp_path, SPEC.loader(0, 1))
