"""Plain loops on two real ranks: equal steps, fillers at the tail, the gradient of the global token mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
import training_loops as loops
from scenarios import TokenModel, assert_exact_gradients

HERE = Path(__file__).parent
DEEPSPEED_REASON = "deepspeed is not installed: pip install deepspeed"


@pytest.mark.timeout(90)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_gradients_are_exact(kind: str, accumulation: int) -> None:
    spec = loops.uneven(accumulation)
    updates = ranks.values(2, loops.train, kind, spec)
    assert len(updates[0]) == len(updates[1]) >= 2
    assert [u.num_micro_steps for u in updates[0]] == [u.num_micro_steps for u in updates[1]]
    assert sum(u.num_idle for rank in updates for u in rank) > 0, "the scenario must leave a rank idle at the tail"
    assert sorted(i for rank in updates for u in rank for i in u.ids) == list(range(30))
    assert_exact_gradients(spec, updates)
    initial = list(TokenModel().parameters())
    for together in zip(*updates, strict=True):
        _, mean = loops.reference_step(initial, spec.dataset(), [i for update in together for i in update.ids])
        assert sum(sum(update.losses) for update in together) / 2 == pytest.approx(mean, rel=1e-12)


def run_deepspeed(*, stages: list[int], accumulation: list[int], timeout: float, **config: object) -> list[dict]:
    wanted = json.dumps({"stages": stages, "accumulation": accumulation, "config": config})
    code = f"import runpy, sys; sys.argv = ['training_loops.py', 'deepspeed', {wanted!r}]\n"
    code += f"if __name__ == '__main__': runpy.run_path({str(HERE / 'training_loops.py')!r}, run_name='__main__')\n"
    done = ranks.run_script(code, nproc=2, timeout=timeout, DS_ACCELERATOR="cpu", DS_LOG_LEVEL="error")
    assert done.returncode == 0, done.output
    runs = [json.loads(line.split("RUN ", 1)[1]) for line in done.stdout if "RUN " in line]
    assert [(r["stage"], r["accumulation"]) for r in runs] == [(s, a) for s in stages for a in accumulation]
    return runs


def check_deepspeed(runs: list[dict]) -> None:
    for run in runs:
        assert run["error"] < 1e-5, run  # float32 rounding
        assert run["loss"] < 1e-5, run
        assert all(len(set(counts)) == 1 for counts in run["micro"]), run
        assert run["idle"] > 0, run
        steps = sum(-(-counts[0] // run["accumulation"]) for counts in run["micro"])
        assert run["updates"] == run["steps"] == steps, run  # the short last window stepped


@pytest.mark.timeout(200)
def test_deepspeed_is_exact() -> None:
    pytest.importorskip("deepspeed", reason=DEEPSPEED_REASON)
    check_deepspeed(run_deepspeed(stages=[1, 2, 3], accumulation=[4], timeout=180))


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("op", "stages"), [("mean", [0, 1, 2, 3]), ("sum", [0, 1, 2])])  # stage 3 refuses "sum"
def test_deepspeed_reduces_as_configured(op: str, stages: list[int]) -> None:
    pytest.importorskip("deepspeed", reason=DEEPSPEED_REASON)
    check_deepspeed(run_deepspeed(stages=stages, accumulation=[1, 3], timeout=180, gradient_allreduce_op=op))
