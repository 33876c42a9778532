"""`odb simulate`: options, files, output."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odb.cli import main

KEYS = {
    "samples", "steps", "step_efficiency", "padding", "budget_fill", "straggler_ratio", "idle_share",
    "max_held_tokens", "rounds", "seconds",
}  # fmt: skip


def simulate(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["simulate", "--json", *args]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_json_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--distribution", "cv2", "--samples", "2000", "--ranks", "4", "--seed", "3")
    result = simulate(capsys, *args)
    assert result.keys() >= KEYS and result["samples"] == 2000 and result["ranks"] == 4
    assert [one["name"] for one in result["compared"]] == ["fixed", "sorted", "oracle"]
    assert simulate(capsys, *args) | {"seconds": 0} == result | {"seconds": 0}


@pytest.mark.parametrize("kind", ["npy", "plain.jsonl", "objects.jsonl"])
def test_lengths_come_from_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = np.random.default_rng(0).integers(1, 900, 500)
    path = tmp_path / f"lengths.{kind}"
    if kind == "npy":
        np.save(path, given)
    else:
        lines = [json.dumps({"length": int(n)} if "objects" in kind else int(n)) for n in given]
        path.write_text("\n".join(lines) + "\n")
    result = simulate(capsys, "--lengths", str(path), "--ranks", "2", "--budget", "4096")
    assert result["samples"] == 500 and result["tokens"] == given.sum()


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    base = ("--distribution", "llava", "--samples", "4000", "--ranks", "4")
    small = simulate(capsys, *base, "--window", "64")
    held = simulate(capsys, *base, "--max-held-tokens", "100000")
    assert small["max_held_tokens"] < held["max_held_tokens"] <= 100_000
    assert (
        small["memory_bound_tokens"] <= 3 * 64 * 8192 + 5 * 16384 and held["memory_bound_tokens"] == 300_000 + 5 * 16384
    )
    assert simulate(capsys, *base, "--policy", "published")["sharding"] == "static"
    static = simulate(capsys, *base, "--sharding", "static", "--policy", "published", "--grad-accum-steps", "2")
    assert (static["sharding"], static["policy"]) == ("static", "published")
    assert static["optimizer_steps"] == -(-static["steps"] // 2)
    assert static["step_efficiency"] < simulate(capsys, *base)["step_efficiency"]


def test_measured_steps_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.jsonl"
    rows = [{"rows": r, "padded_len": n, "seconds": 1.0 + 1e-9 * r * n} for r in (1, 5, 9) for n in (10, 500)]
    path.write_text("\n".join(map(json.dumps, rows)))
    args = ("--distribution", "cv2", "--samples", "2000", "--step-times", str(path))
    fixed = simulate(capsys, *args)["compared"][0]
    assert fixed["predicted_speedup"] == pytest.approx(fixed["steps"] / simulate(capsys, *args)["steps"], rel=0.01)


@pytest.mark.parametrize("has_rich", [True, False])
def test_tables(has_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rich") and not has_rich:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert main(["simulate", "--distribution", "llava", "--samples", "500", "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert "step efficiency" in out and "oracle" in out and ("┃" in out) == has_rich


def test_plots_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    simulate(capsys, "--distribution", "llava", "--samples", "500", "--ranks", "2", "--plots", str(tmp_path))
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["fill.png", "step-cost.png", "waits.png"]
    (tmp_path / "file").write_text("")
    assert main(["simulate", "--distribution", "llava", "--samples", "9", "--plots", str(tmp_path / "file" / "a")]) == 2
    assert "can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--lengths", "nowhere.npy"], "no file"),
        (["--distribution", "llava", "--ranks", "0"], "--ranks"),
        (["--distribution", "llava", "--budget", "0"], "token_budget"),
        (["--distribution", "llava", "--samples", "0"], "--samples"),
        (["--distribution", "llava", "--window", "0"], "window"),
        (["--distribution", "llava", "--max-held-tokens", "-1"], "max_held_tokens"),
        (["--distribution", "llava", "--layout", "loose"], "layout"),
        (["--distribution", "llava", "--step-times", "nowhere"], "rows, padded_len and seconds"),
    ],
)
def test_what_is_wrong_is_said(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *args]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "no lengths"),
        ([5, 0, 3], "sample 1"),
        ([5, -2], "sample 1"),
        ([1.5, 2.0], "float64"),
        ([[1, 2]], "one-dimensional"),
        (7, "one-dimensional"),
        ([True], "bool"),
        ([{"length": 3}], "no .npy file of integers"),
    ],
)
def test_what_is_no_array_of_lengths(
    values: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(values, np.int64 if values == [] else None))
    assert main(["simulate", "--lengths", str(path), "--json"]) == 2
    said = capsys.readouterr()
    assert text in said.err and not said.out


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("lengths.npy", b"no array", "no .npy file"),
        ("lengths.jsonl", b"", "no lengths"),
        ("lengths.jsonl", b"\xff\xfe", "can't be read"),
        ("lengths.jsonl", b"3\n0\n", "sample 1"),
        ("lengths.jsonl", b"1" * 40, "can't be read"),
        ("lengths.txt", b"3", ".npy or .jsonl"),
    ],
)
def test_what_is_no_file_of_lengths(
    name: str, content: bytes, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["simulate", "--lengths", str(path)]) == 2
    assert text in capsys.readouterr().err


def test_few_samples_and_long_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("77\n\n")  # an empty line is none
    one = simulate(capsys, "--lengths", str(path), "--ranks", "8")
    assert (one["samples"], one["steps"], one["idle_share"]) == (1, 1, 7 / 8)
    path.write_text("50000\n20\n99999\n30\n")
    long = simulate(capsys, "--lengths", str(path), "--ranks", "2", "--max-held-tokens", "1000")
    assert long["samples"] == 4 and long["max_held_tokens"] == 99_999


@pytest.mark.parametrize("line", ['{"tokens": 3}', "x", "1.5", "true"])
def test_a_bad_line_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(f"7\n{line}\n")
    assert main(["simulate", "--lengths", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_tune_sweeps_budgets_and_depths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.jsonl"
    rows = [(1, 512), (4, 512), (16, 512), (4, 4096), (64, 128)]  # 20 ms a step and 1 us a token
    path.write_text(
        "\n".join(json.dumps({"rows": b, "padded_len": n, "seconds": 0.02 + 1e-6 * b * n}) for b, n in rows)
    )
    args = ["tune", "--distribution", "mmmix", "--samples", "3000", "--ranks", "2", "--budgets", "2048..8192"]
    assert main([*args, "--depths", "4,16", "--step-times", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(r["budget"], r["depth"]) for r in result["rows"]] == [
        (budget, depth) for budget in (2048, 4096, 8192) for depth in (4, 16)
    ]
    times = {(r["budget"], r["depth"]): r["epoch_time"] for r in result["rows"]}
    assert times[8192, 16] < times[4096, 16] < times[2048, 16]  # the fixed part of a step wants large budgets
    for r in result["rows"]:
        assert times[r["budget"], 16] <= times[r["budget"], 4] * 1.001
    fastest = min(times.values())
    best = result["advice"]
    assert best["epoch_time"] <= 1.01 * fastest
    assert all(
        b * d >= best["budget"] * best["depth"] for (b, d), seconds in times.items() if seconds <= 1.01 * fastest
    )
    assert 0.6 < result["lengths"]["short_share"] < 0.8 and result["lengths"]["coefficient_of_variation"] > 1
    assert main([*args[:-1], "4096", "--depths", "8"]) == 0
    assert "token_budget=4096, max_held_tokens=32768" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["0", "a", "9..8", "4,-1"])
def test_tune_refuses_what_is_no_list_of_numbers(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--distribution", "llava", "--budgets", given]) == 2
    assert "--budgets and --depths" in capsys.readouterr().err
