"""The manifest beside a checkpoint: positions, settings, hashes, what is refused and what only warned of."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scenarios import Spec, raises_with

import odb
from odb import checkpoint, manifest
from odb.errors import ConfigError
from odb.manifest import Position, hash_of, position_of
from odb.samplers import LabelBalancedBatchSampler, MultipackBatchSampler
from odb.testing import LengthsDataset, collate, record

SETTINGS = {"class": "Multipack", "width": 4, "metadata_sha256": hash_of(lengths=[4, 8, 2])}
SPEC = Spec([5, 9, 7, 3] * 10, 40, num_workers=0)

# ---- positions


@pytest.mark.parametrize(
    ("offset", "steps", "expected"),
    [(0, 16, 0), (4, 16, 4), (4 + 1e-10, 16, 4), (8.0, 16, 8), (16, 16, 16), (15, 15, 15), (np.int64(12), 16, 12)],
)
def test_positions_at_the_end_of_an_optimizer_step(offset: float, steps: int, expected: int) -> None:
    assert position_of(3, offset, steps, 4) == Position(3, expected, steps)


@pytest.mark.parametrize("offset", [1, 3.99, 4.1, -4, 17, math.nan, math.inf, "4", True])
def test_positions_elsewhere_are_refused(offset: Any) -> None:
    with raises_with(ConfigError):
        position_of(3, offset, 16, 4)


@pytest.mark.parametrize(
    ("epoch", "steps", "expected"),
    [
        (2.25, 16, Position(2, 4, 16)),
        (2.0, 16, Position(2, 0, 16)),
        (0.9999999999, 16, Position(0, 16, 16)),
        (1000 + 4 / 3e6, 3_000_000, Position(1000, 4, 3_000_000)),
        (7 + 8 / 15, 15, Position(7, 8, 15)),
    ],
)
def test_positions_that_are_fractions_of_an_epoch(epoch: float, steps: int, expected: Position) -> None:
    assert position_of(epoch, None, steps, 4) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2.5, 4, 16), "an epoch is a whole number"),
        ((-1, 4, 16), "an epoch is a whole number"),
        ((math.nan, None, 16), "epoch must be finite"),
        (("2", None, 16), "epoch must be a number, got '2'"),
        ((2.5,), "steps_in_epoch"),
        ((2.51, None, 16), "not a whole number of batches"),
        ((2, 17, 16), "outside the epoch"),
        ((2 + 3 / 16, None, 16, 4), "inside an optimizer step of 4"),
    ],
)
def test_wrong_positions_say_why(arguments: Any, text: str) -> None:
    with raises_with(ConfigError, text):
        position_of(*arguments)


def test_where_training_goes_on() -> None:
    middle, end, unknown = Position(3, 8, 16), Position(3, 16, 16), Position(3, 16)
    assert (middle.resume_epoch, middle.skip_batches) == (3, 8)
    assert (end.resume_epoch, end.skip_batches) == (4, 0)
    assert (unknown.resume_epoch, unknown.skip_batches) == (3, 16)


# ---- hashes


def test_a_hash_is_of_values_and_names() -> None:
    one = hash_of(lengths=[4, 8], labels=[1, 2])
    assert one == hash_of(labels=np.array([1, 2], np.int32), lengths=np.array([4, 8], np.uint16))
    others = [
        hash_of(lengths=[4, 8], labels=[2, 1]),
        hash_of(lengths=[4, 8]),
        hash_of(lengths=[1, 2], labels=[4, 8]),
        hash_of(lengths=[4, 8], labels=[1.0, 2.0]),
        hash_of(lengths=[[4, 8]], labels=[1, 2]),
        hash_of(lengths=[4], labels=[8, 1, 2]),
    ]
    assert len({one, *others}) == 7
    assert one == "7a49fdb1ff00f4de402c3607e8a3119b1782fcae6e8a79a3df98da10ff900cd1"  # on any machine
    with raises_with(ConfigError, "lengths must be an array of numbers"):
        hash_of(lengths=["a"])


# ---- saving and loading


def test_what_a_sampler_resumes_from(tmp_path: Path) -> None:
    written = manifest.save(tmp_path, [SETTINGS], epoch=0, consumed_batches=8, steps_in_epoch=16, grad_accum_steps=4)
    assert json.loads((tmp_path / manifest.MANIFEST_NAME).read_text()) == written
    assert {k: written[k] for k in ("version", "epoch", "resume_epoch", "consumed_batches", "replay_error")} == {
        "version": 1,
        "epoch": 0,
        "resume_epoch": 0,
        "consumed_batches": 8,
        "replay_error": None,
    }
    assert written["settings"] == [SETTINGS] and written["states"] == [None]
    assert manifest.load(tmp_path, [dict(SETTINGS)]) == Position(0, 8, 16)
    assert [file.name for file in tmp_path.iterdir()] == [manifest.MANIFEST_NAME]
    end = manifest.save(tmp_path, [SETTINGS], epoch=2, consumed_batches=15, steps_in_epoch=15, grad_accum_steps=4)
    assert (end["resume_epoch"], end["epoch"]) == (3, 2)


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (SETTINGS | {"width": 8}, "Multipack: width: saved 4, now 8"),
        (SETTINGS | {"metadata_sha256": hash_of(lengths=[4, 8, 3])}, "metadata_sha256: saved "),
        (SETTINGS | {"window": 3}, "window: saved nothing, now 3"),
        ({k: v for k, v in SETTINGS.items() if k != "width"}, "width: saved 4, now nothing"),
    ],
)
def test_other_settings_and_hashes_are_refused(now: Any, text: str, tmp_path: Path) -> None:
    manifest.save(tmp_path, [SETTINGS], epoch=0, consumed_batches=8, steps_in_epoch=16)
    with raises_with(ConfigError, "changed settings", text, "Use the saved settings", "restore_position=False"):
        manifest.load(tmp_path, [now])
    assert manifest.load(tmp_path, [now], restore_position=False) is None


# ---- offline samplers

LENGTHS = [int(n) for n in np.random.default_rng(3).integers(2, 40, 400)]
COUNTS = [n // 2 for n in LENGTHS]


def sampler(kind: str, world_size: int, lengths: list[int] = LENGTHS) -> Any:
    common: dict[str, Any] = {"world_size": world_size, "seed": 5, "grad_accum_steps": 4 if world_size == 1 else 1}
    if kind == "packed":
        return MultipackBatchSampler(lengths, 64, label_counts=COUNTS, **common)
    return LabelBalancedBatchSampler(lengths, COUNTS, 4, mode=kind, **common)


@pytest.mark.parametrize("skip", [0, 4, 12])
@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("kind", ["packed", "padded", "flattened"])
def test_a_samplers_epoch_goes_on_behind_what_was_consumed(
    kind: str, world_size: int, epoch: int, skip: int, tmp_path: Path
) -> None:
    interrupted = sampler(kind, world_size)
    interrupted.set_epoch(epoch)
    whole = list(interrupted)
    assert len(whole) > 12
    progress = {"epoch": epoch, "consumed_batches": skip, "steps_in_epoch": len(whole)}
    checkpoint.save(tmp_path, interrupted, grad_accum_steps=interrupted.grad_accum_steps, **progress)
    resumed = sampler(kind, world_size)
    list(resumed)  # a plan of another epoch is there already
    position = checkpoint.restore(tmp_path, resumed)
    assert position is not None
    assert list(resumed)[position.skip_batches :] == whole[skip:]


def test_samplers_of_other_inputs_are_refused(tmp_path: Path) -> None:
    manifest.save(tmp_path, [sampler("packed", 4)], epoch=0, consumed_batches=4)
    for other, text in (
        (sampler("packed", 2), "world_size: saved 4, now 2"),
        (sampler("padded", 4), "sampler: saved MultipackBatchSampler, now LabelBalancedBatchSampler"),
        (sampler("packed", 4, [LENGTHS[0] + 1, *LENGTHS[1:]]), "data: saved "),
    ):
        with raises_with(ConfigError, "changed settings", text):
            manifest.load(tmp_path, [other])


class Fingerprinted(LengthsDataset):
    fingerprint = "one"


def test_other_data_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def loader(fingerprint: Any) -> odb.ODBDataLoader:
        dataset = Fingerprinted([5] * 20)
        dataset.fingerprint = fingerprint
        return odb.ODBDataLoader(dataset, token_budget=20, collate_fn=collate)

    saved = manifest.describe([loader("one")])
    assert saved["dataset_fingerprints"] == ["one"]
    with caplog.at_level(logging.WARNING):
        for same in ("one", None, 3):
            manifest.check(saved, [loader(same)])
        assert not caplog.records
        manifest.check(saved, [loader("two")])
    assert "fingerprint one, now two" in caplog.text
    assert manifest.describe([loader("one")], dataset_fingerprint="given")["dataset_fingerprints"] == ["given"]
    assert manifest.fingerprint_of(SETTINGS | {"dataset_fingerprint": "x"}) == "x"
    assert manifest.settings_of(SETTINGS | {"dataset_fingerprint": "x"}) == SETTINGS


def test_a_hugging_face_dataset_brings_its_fingerprint() -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    one, two = (datasets.Dataset.from_dict({"input_ids": [[i]]}) for i in (1, 2))
    loaders = [odb.ODBDataLoader(data, token_budget=4) for data in (one, one, two)]
    first, same, other = map(manifest.fingerprint_of, loaders)
    assert isinstance(first, str) and first == same != other


@pytest.mark.parametrize(
    ("position", "text"),
    [
        ({"epoch": math.nan, "consumed_batches": 4}, "epoch must be finite"),
        ({"epoch": math.inf, "consumed_batches": 4}, "epoch must be finite"),
        ({"epoch": None, "consumed_batches": 4}, "samplers hold no position"),
        ({"epoch": "soon", "consumed_batches": 4}, "epoch must be a number"),
        ({"epoch": 0, "consumed_batches": 3, "steps_in_epoch": 16, "grad_accum_steps": 4}, "inside an optimizer step"),
        ({"epoch": 0, "consumed_batches": 4, "extra": object()}, "not JSON serializable"),
    ],
)
def test_a_position_that_can_not_be_saved_is_marked_and_refused(
    position: Any, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = manifest.save(tmp_path, [SETTINGS], **position)  # raises nothing: the model is saved all the same
    assert text in written["replay_error"]
    assert text in caplog.text and "resumes without the position" in caplog.text
    with raises_with(ConfigError, "an exact resume is not possible", text, "restore_position=False"):
        manifest.load(tmp_path, [SETTINGS])
    assert manifest.load(tmp_path, [SETTINGS], restore_position=False) is None


def test_wrong_sources_are_marked_and_refused(tmp_path: Path) -> None:
    for wrong, text in ((object(), "says nothing of its settings"), ({"scale": math.nan}, "are no JSON")):
        assert text in manifest.describe([wrong], epoch=0, consumed_batches=0)["replay_error"]
        with raises_with(ConfigError, text):
            manifest.settings_of(wrong)
    assert manifest.settings_of({"width": np.int64(4), "shape": (1, 2)}) == {"width": 4, "shape": [1, 2]}


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    with raises_with(ConfigError, "there is no manifest", str(tmp_path), "restore_position=False"):
        manifest.load(tmp_path, [SETTINGS])
    good = manifest.describe([SETTINGS], epoch=0, consumed_batches=0)
    for wrong, text in (
        ([], "got list"),
        ({}, "no manifest of odb"),
        (good | {"version": 2}, "version 2, this package reads version 1"),
        (good | {"more": 1}, "unknown keys ['more']"),
        ({k: v for k, v in good.items() if k != "epoch"}, "missing keys ['epoch']"),
    ):
        (tmp_path / manifest.MANIFEST_NAME).write_text(json.dumps(wrong))
        with raises_with(ConfigError, text, "restore_position=False"):
            manifest.load(tmp_path, [SETTINGS])
    (tmp_path / manifest.MANIFEST_NAME).write_text('{"version": 1, "set')
    with raises_with(ConfigError, "can't be read", "restore_position=False"):
        manifest.load(tmp_path, [SETTINGS])


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "value.json"
    manifest.write_json(path, [1])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manifest.os, "replace", interrupted)
        with raises_with(KeyboardInterrupt):
            manifest.write_json(path, [2])
    assert json.loads(path.read_text()) == [1] and list(tmp_path.iterdir()) == [path]
    manifest.write_json(path, [2])
    assert json.loads(path.read_text()) == [2]


def test_a_loader_says_its_place_and_settings() -> None:
    loader = SPEC.loader(0, 1)
    loader.set_epoch(3)
    record(loader, 2)
    saved = json.loads(json.dumps(manifest.describe([loader], extra={"seen_tokens": 7})))
    assert saved["settings"][0]["token_budget"] == "40" and saved["settings"][0]["num_samples"] == "40"
    assert saved["states"] == [loader.state_dict()]
    assert manifest.check(saved, [SPEC.loader(0, 1)]) == Position(3, 2, None, {"seen_tokens": 7})
    with raises_with(ConfigError, "ODBDataLoader: num_samples: saved 40, now 36"):
        manifest.check(saved, [SPEC.but(lengths=SPEC.lengths[4:]).loader(0, 1)])


def test_an_applied_loader_is_a_source_too() -> None:
    loader = torch_loader()
    odb.apply(loader, token_budget=40)
    saved = manifest.describe([loader])
    assert saved["replay_error"] is None
    manifest.check(saved, [odb.wrap(torch_loader(), token_budget=40)])


def torch_loader() -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(LengthsDataset([5] * 20), collate_fn=collate)
