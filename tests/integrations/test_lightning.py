"""Lightning on two real ranks: exact gradients and logged loss, steps, samples, resuming, untouched samplers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks

pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")

PROGRAM = Path(__file__).with_name("lightning_runs.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found, by the name of a run; one pair of processes for all."""
    folder, timeout = tmp_path_factory.mktemp("lightning"), 150
    code = f"import runpy, sys; sys.argv = ['lightning_runs.py', {str(folder)!r}]\n"
    code += f"if __name__ == '__main__': runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    done = ranks.run_script(code, nproc=2, timeout=timeout)
    assert done.returncode == 0, done.output
    return json.loads((folder / "result.json").read_text())


@pytest.mark.timeout(170)
def test_gradients_and_logged_loss_are_exact(found: list[Any]) -> None:
    for accumulation in ("1", "4"):
        first, second = (one["exact"][accumulation] for one in found)
        assert first["micro"] == second["micro"]
        assert first["idle"] + second["idle"] > 0, "the scenario must leave a rank idle at the tail"
        assert sorted(first["ids"] + second["ids"]) == sorted([*range(30), *range(30)])
        assert max(first["errors"] + second["errors"]) < 1e-12  # float64
        assert first["global_step"] == len(first["errors"]) >= 4
        assert first["logged"] == pytest.approx(first["means"], rel=1e-6)  # logged as float32
        assert first["samples"] == second["samples"] == 60
        assert {"odb/padding", "odb/interval/wait_share"} <= set(first["telemetry"])


@pytest.mark.timeout(170)
def test_every_checkpoint_resumes_where_training_was(found: list[Any]) -> None:
    """Lightning takes a batch ahead: the state must be that of the batch before."""
    for one in (both["resumed"] for both in found):
        whole = one["whole"]
        assert len(one["rest"]) == whole["global_step"] - 1 >= 5
        for step, rest in [*one["rest"].items(), ("epoch", one["epoch"])]:
            assert rest["real"] == whole["real"][len(whole["real"]) - len(rest["real"]) :], step
            assert rest["weights"] == pytest.approx(whole["weights"], rel=1e-12), step
            assert (rest["global_step"], rest["samples"]) == (whole["global_step"], 60), step
            if step != "epoch":
                done = len(whole["real"]) - len(rest["real"])
                assert done >= 2 * int(step) - 1, step


@pytest.mark.timeout(170)
def test_case_i_04_i_07_samplers_and_fields_stay(found: list[Any]) -> None:
    ids = sorted(i for one in found for row in one["cases"]["hook"] for i in row[0])
    assert ids == list(range(20))
    for one in (both["cases"] for both in found):
        assert all(
            names == [f"s{i}" for i in ids] and kinds == ["list", "bool", "dict"] and n == len(ids)
            for ids, names, kinds, n in one["hook"]
        )
        assert "accumulate_grad_batches=2" in one["mismatch"] and "grad_accum_steps=3" in one["mismatch"]
        assert "ConfigError" in one["applied"] and "odb.integrations.lightning.attach" in one["applied"]


@pytest.mark.timeout(170)
def test_case_j_02_epochs_of_a_stream(found: list[Any]) -> None:
    assert sorted(i for both in found for i in both["cases"]["stream"][0]) == list(range(30))
    assert [both["cases"]["stream"][1:] for both in found] == [[60, 2], [60, 2]]  # sample visits of all ranks, epochs
