"""TRL's SFTTrainer, installed and real, on two ranks in one program."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ranks import run_script
from tiny_chats import told

pytest.importorskip("trl", reason="TRL is not installed (extra: trainers)")

PROGRAM = Path(__file__).with_name("program_trl.py").read_text()
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = run_script(PROGRAM, nproc=2, timeout=240.0, ODB_TEST_FOLDER=str(tmp_path_factory.mktemp("trl")))
    assert done.returncode == 0, done.output
    return told("".join(done.stdout))


@pytest.mark.parametrize("case", ["1-30", "4-30", "4-5"])
def test_an_optimizer_step_is_that_of_one_process(seen: dict[str, Any], case: str) -> None:
    values = seen["exactness"][case]
    assert values["error"] < 1e-5
    assert values["logged"] == pytest.approx(values["loss"], rel=1e-6)


def test_epochs_and_resume(seen: dict[str, Any]) -> None:
    whole = seen["whole"]
    assert Counter(whole["given"]) == Counter({i: 2 for i in range(30)})
    assert whole["epoch"] == 2.0
    assert whole["same_batches"] and whole["same_logs"]
    assert {"mean_token_accuracy", "num_tokens", "odb/padding"} <= set(whole["metrics"])
