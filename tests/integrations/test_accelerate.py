"""Accelerate, installed and real: loops on two ranks in one program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_script
from tiny_chats import told

pytest.importorskip("accelerate", reason="Accelerate is not installed (extra: trainers)")
pytest.importorskip("transformers", reason="the model is one of transformers' (extra: trainers)")

PROGRAM = Path(__file__).with_name("program_accelerate.py").read_text()
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("accelerate")
    done = run_script(PROGRAM, nproc=2, timeout=240.0, ODB_TEST_FOLDER=str(folder), ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.output
    return told("".join(done.stdout))


@pytest.mark.parametrize(
    ("case", "micro_steps"), [("1-60-True", 1), ("4-60-True", 4), ("4-5-True", 1), ("4-5-False", 4)]
)
def test_an_optimizer_step_is_that_of_one_process(seen: dict[str, Any], case: str, micro_steps: int) -> None:
    values = seen["exactness"][case]
    assert values["error"] < 1e-5
    assert values["logged"] == pytest.approx(values["loss"], rel=1e-6)
    assert values["micro_steps"] == micro_steps


@pytest.mark.parametrize("settings", ["default", "split", "uneven"])
def test_prepare_changes_nothing(seen: dict[str, Any], settings: str) -> None:
    values = seen["prepared"][settings]
    assert values["same"]
    assert values["given"] == list(range(20))
    assert len(set(values["steps"])) == 1


def test_nothing_is_sharded_twice(seen: dict[str, Any]) -> None:
    for name in ("applied", "prepared_before"):
        assert seen["prepared"][name]["all"] == list(range(40)), name
    assert seen["prepared"]["applied"]["mine"] == 20
    assert seen["prepared"]["stream"]["all"] == list(range(30))


def test_dispatching_is_refused_by_name(seen: dict[str, Any]) -> None:
    assert "dispatch_batches" in seen["prepared"]["dispatch"]


def test_values_that_are_no_tensors_arrive(seen: dict[str, Any]) -> None:
    assert seen["fields"]["same"] == [True, True]
    assert seen["fields"]["meta"] == {"n": 1}
    assert seen["fields"]["keys"] == ["attention_mask", "flag", "ids", "input_ids", "labels", "meta"]


def test_a_loaded_state_goes_on_bit_for_bit(seen: dict[str, Any]) -> None:
    values = seen["resumed"]
    assert values["given"] == sorted([*range(31)] * 2)
    assert values["epochs"] == 2.0
    assert values["rate"] == 0.0
    for name in ("middle", "boundary"):
        case = values[name]
        assert case["same_losses"] and case["same_batches"] and case["same_weights"], name
        assert case["rate"] == 0.0
