"""A loader's counts in real loggers, and what is said when a share is high."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import odb
from odb.integrations import common, telemetry
from odb.testing import LengthsDataset, collate


def make_loader(lengths: list[int], token_budget: int, **options: Any) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(LengthsDataset(lengths), token_budget=token_budget, collate_fn=collate, **options)


def drive(loader: odb.ODBDataLoader, *sinks: telemetry.Sink, **options: Any) -> list[dict[str, float]]:
    reporter = telemetry.Telemetry(loader, *sinks, **options)
    return [values for _ in loader if (values := reporter.step()) is not None]


@pytest.fixture
def loader() -> Iterator[odb.ODBDataLoader]:
    with make_loader([10, 10, 8, 4] * 10, 20) as one:
        yield one


def test_values_are_the_loaders_counts(loader: odb.ODBDataLoader) -> None:
    seen: list[tuple[dict[str, float], int]] = []
    reports = drive(loader, lambda values, step: seen.append((values, step)), every=5)
    stats = loader.stats()
    assert [step for _, step in seen] == list(range(5, stats.steps + 1, 5)) and len(seen) >= 2
    assert reports == [values for values, _ in seen]
    last = seen[-1][0]
    covered = sum(values["odb/interval/samples_per_batch"] * 5 for values, _ in seen)
    assert last["odb/emitted_samples"] == pytest.approx(covered)
    tokens = sum(values["odb/interval/real_tokens_per_batch"] * 5 for values, _ in seen)
    assert last["odb/real_tokens"] == pytest.approx(tokens)
    assert last["odb/padding"] == 1 - last["odb/real_tokens"] / last["odb/padded_tokens"]
    assert all(isinstance(value, float) for value in last.values())


def test_interval_is_what_came_in_between() -> None:
    before = odb.LoaderStats(
        steps=4, real_tokens=10, padded_tokens=20, wait_s=1.0, first_batch_s=0.5, bound_by=Counter(window=4)
    )
    now = odb.LoaderStats(
        steps=10,
        idle_steps=3,
        real_tokens=40,
        padded_tokens=60,
        emitted_samples=6,
        wait_s=3.0,
        first_batch_s=0.75,
        max_held_tokens=9,
        bound_by=Counter(window=5, token_budget=5),
    )
    between = telemetry.difference(now, before)
    assert (between.steps, between.real_tokens, between.padded_tokens, between.wait_s) == (6, 30, 40, 2.0)
    assert between.max_held_tokens == 9 and between.bound_by == Counter(window=1, token_budget=5)
    values = telemetry.Interval(between, elapsed_s=10.0, wait_s=1.25).values("")
    assert values["padding"] == 0.25 and values["idle_share"] == 0.5 and values["wait_share"] == 0.125
    assert (values["samples_per_batch"], values["real_tokens_per_s"], values["samples_per_s"]) == (2.0, 3.0, 0.6)


def test_tensorboard(loader: odb.ODBDataLoader, tmp_path: Path) -> None:
    reason = "tensorboard is not installed: pip install tensorboard"
    pytest.importorskip("tensorboard", reason=reason)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        reports = drive(loader, telemetry.tensorboard(writer), every=4)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    events = read.Scalars("odb/emitted_samples")
    assert [e.step for e in events] == [4 * (i + 1) for i in range(len(reports))]
    assert [e.value for e in events] == [values["odb/emitted_samples"] for values in reports]
    assert set(read.Tags()["scalars"]) == set(reports[-1])


@pytest.mark.timeout(100)
def test_wandb_offline(loader: odb.ODBDataLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="odb") as run:
        reports = drive(loader, telemetry.wandb(run, step_name="micro_step"), every=4)
        summary = {k: v for k, v in dict(run.summary).items() if not k.startswith("_")}
    assert summary == pytest.approx(reports[-1] | {"micro_step": 4 * len(reports)})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb")), "an offline run leaves a file to upload later"


def test_prometheus_reads_the_text(loader: odb.ODBDataLoader, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    file = tmp_path / "odb.prom"
    reports = drive(loader, telemetry.prometheus_file(file, loader, rank="0", job='a "b"\n\\'), every=1)
    families = {one.name: one for one in parser.text_string_to_metric_families(file.read_text())}
    (samples,) = families["odb_samples"].samples
    assert (samples.name, samples.value) == ("odb_samples_total", reports[-1]["odb/emitted_samples"])
    assert samples.labels == {"rank": "0", "job": 'a "b"\n\\'}
    assert families["odb_samples"].type == "counter" and families["odb_padding_ratio"].type == "gauge"
    bounds = {s.labels["bound"]: s.value for s in families["odb_batches"].samples}
    assert bounds == dict(loader.stats().bound_by)
    assert [f.name for f in tmp_path.iterdir()] == ["odb.prom"], "no half-written file stays"


def test_a_logger_is_enough(caplog: pytest.LogCaptureFixture, loader: odb.ODBDataLoader) -> None:
    with caplog.at_level(logging.INFO, logger="mine"):
        drive(
            loader, lambda values, step: logging.getLogger("mine").info("%d %s", step, values["odb/padding"]), every=8
        )
    assert [record.message.split()[0] for record in caplog.records if record.name == "mine"][:2] == ["8", "16"]


# ---- advice


def warnings_of(caplog: pytest.LogCaptureFixture, loader: odb.ODBDataLoader) -> list[str]:
    caplog.clear()
    reporter = telemetry.Telemetry(loader, every=25)
    with caplog.at_level(logging.WARNING, logger="odb"):
        for _ in loader:
            reporter.step()
    return [record.message for record in caplog.records if record.name == "odb"]


def test_high_padding_names_the_window_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [4 if i % 2 else 60 for i in range(200)]
    with make_loader(lengths, 128, window=2, max_held_tokens=64) as loader:
        said = [text for text in warnings_of(caplog, loader) if "padding" in text]
        assert loader.stats().padding > common.PADDING_HIGH
    assert len(said) == 1 and "window" in said[0] and "max_held_tokens" in said[0]


def test_slow_samples_name_num_workers(caplog: pytest.LogCaptureFixture) -> None:
    dataset = LengthsDataset([10] * 120, sleep=0.004)
    with odb.ODBDataLoader(dataset, token_budget=20, collate_fn=collate, max_held_tokens=20) as loader:
        said = warnings_of(caplog, loader)
    assert len(said) == 1 and "waited" in said[0] and "num_workers" in said[0]


def test_an_epochs_first_batch_is_no_waiting() -> None:
    dataset = LengthsDataset([10] * 60, sleep={0: 0.5})
    with odb.ODBDataLoader(dataset, token_budget=20, collate_fn=collate) as loader:
        (report,) = drive(loader, every=30)
    assert report["odb/wait_s"] > 0.5
    assert report["odb/interval/wait_share"] < 0.5  # of a time that was nearly all waiting for the first batch


def test_nothing_is_said_where_nothing_is_high(caplog: pytest.LogCaptureFixture) -> None:
    fair = odb.LoaderStats(steps=100, idle_steps=4, real_tokens=80, padded_tokens=100, wait_s=1.5)
    few = odb.LoaderStats(steps=5, idle_steps=4, real_tokens=10, padded_tokens=100, wait_s=9.0)
    with caplog.at_level(logging.WARNING, logger="odb"):
        assert [common.Advisor().check(stats, elapsed_s=10.0, num_workers=0) for stats in (fair, few)] == [[], []]
    assert not caplog.records


def test_fillers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    stats = odb.LoaderStats(steps=40, idle_steps=4, real_tokens=10, padded_tokens=10)
    with caplog.at_level(logging.WARNING, logger="odb"):
        said = common.Advisor().check(stats, elapsed_s=1.0, num_workers=2)
    assert len(said) == 1 and "fillers" in said[0] and "token_budget" in said[0]


@pytest.mark.parametrize("every", [0, -1, True, 2.5])
def test_a_wrong_interval_is_refused(loader: odb.ODBDataLoader, every: Any) -> None:
    with pytest.raises(odb.errors.ConfigError, match="every must be an integer >= 1"):
        telemetry.Telemetry(loader, every=every)


def test_a_wrong_sink_is_refused(loader: odb.ODBDataLoader) -> None:
    with pytest.raises(odb.errors.ConfigError, match="tensorboard"):
        telemetry.Telemetry(loader, "runs/1")  # type: ignore[arg-type]


def test_documented_thresholds_are_the_codes() -> None:
    text = (Path(odb.__file__).parents[1] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")
    ]
    said = {row[0]: int(row[1].split(" %")[0]) / 100 for row in rows if len(row) == 3 and " %" in row[1]}
    known = {"padding is high": common.PADDING_HIGH, "many steps are fillers": common.IDLE_HIGH}
    assert said == known | {"the loop waits": common.WAIT_HIGH}
    assert f"at least {common.MIN_STEPS_FOR_ADVICE} steps" in text
