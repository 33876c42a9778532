"""Hugging Face Trainer, installed and real: two ranks in one program."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ranks import run_script
from tiny_chats import told

pytest.importorskip("transformers", reason="the Trainer is not installed (extra: trainers)")
pytest.importorskip("accelerate", reason="the Trainer needs Accelerate (extra: trainers)")

PROGRAM = Path(__file__).with_name("program_hf.py").read_text()
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = run_script(PROGRAM, nproc=2, timeout=240.0, ODB_TEST_FOLDER=str(tmp_path_factory.mktemp("hf")))
    assert done.returncode == 0, done.output
    return told("".join(done.stdout)) | {"output": done.output}


@pytest.mark.parametrize(("accumulation", "num_samples", "num_fillers"), [(1, 60, 0), (4, 60, 0), (4, 5, 3)])
@pytest.mark.parametrize("kind", ["global", "local", "mean", "function", "packed"])
def test_an_optimizer_step_is_that_of_one_process(
    seen: dict[str, Any], kind: str, accumulation: int, num_samples: int, num_fillers: int
) -> None:
    case = seen["exactness"][f"{kind}-{accumulation}-{num_samples}"]
    assert case["fillers"] == num_fillers
    assert case["error"] < 1e-5
    assert case["logged"] == pytest.approx(case["loss"], rel=1e-6)


def test_the_log_says_who_normalises_the_loss(seen: dict[str, Any]) -> None:
    assert "tokens over all ranks and micro-steps: odb leaves it alone" in seen["output"]
    assert "by this rank's tokens: odb weighs ranks" in seen["output"]
    assert "mean per batch: odb weighs batches" in seen["output"]
    assert "look at label_shift" not in seen["output"]


def test_epochs_end_with_the_data(seen: dict[str, Any]) -> None:
    run = seen["whole"]
    assert Counter(run["given"]) == Counter({i: 2 for i in range(61)})
    steps = len(run["samples"])
    assert run["state"] == [2.0, steps, steps, 2]
    assert run["samples"][-1] == 122
    assert run["epochs"] == pytest.approx([n / 61 for n in run["samples"]])
    assert run["tokens"] == run["all_tokens"]
    assert run["per_second"] == pytest.approx(122, rel=0.01)


def test_learning_rate_goes_by_samples(seen: dict[str, Any]) -> None:
    run = seen["whole"]
    before = [0, *run["samples"][:-1]]
    warmup, total = 31, 122  # a quarter, rounded up

    def rate(samples: int) -> float:
        return 0.5 * (samples / warmup if samples < warmup else (total - samples) / (total - warmup))

    assert run["rates"] == pytest.approx([rate(n) for n in before])


def test_evaluation_is_the_trainers(seen: dict[str, Any]) -> None:
    assert seen["whole"]["evaluated"] == pytest.approx(seen["whole"]["evaluated_plainly"])
    assert seen["whole"]["eval_loader"] == "DataLoaderShard"


def test_resume_is_the_uninterrupted_run(seen: dict[str, Any]) -> None:
    steps = len(seen["whole"]["samples"])
    boundary = 1 + seen["whole"]["samples"].index(61)
    assert set(seen["resumed"]) == {"from 2", f"from {boundary}"}
    assert 2 < boundary < steps
    for start, case in seen["resumed"].items():
        assert case["same_batches"] and case["same_weights"] and case["same_logs"], start
        assert case["steps"] == steps - int(start.split()[1])
        assert case["epochs"] == [2.0, 2]


def test_resume_on_another_number_of_ranks(seen: dict[str, Any]) -> None:
    rest, num_done = seen["one_rank"], seen["whole"]["samples"][1]
    assert len(rest["given"]) == len(set(rest["given"])) == 61 - num_done
    assert rest["epoch"] == 1.0


def test_a_position_that_could_not_be_saved(seen: dict[str, Any]) -> None:
    unsaved = seen["unsaved"]
    assert {"model.safetensors", "optimizer.pt", "odb_state.json"} <= set(unsaved["files"])
    assert "rank 1: RuntimeError: no state today" in unsaved["error"]
    assert "ignore_data_skip=True" in unsaved["error"]
    assert (unsaved["steps"], unsaved["batches"]) == (3, 1)


def test_lengths_that_nobody_knows(seen: dict[str, Any]) -> None:
    lengths = seen["lengths"]
    assert Counter(lengths["stream"]["given"]) == Counter({i: 2 for i in range(30)})
    assert lengths["stream"]["epoch"] == 2.0
    assert "dataset_size" in lengths["unknown"] and "max_steps" in lengths["unknown"]
    assert lengths["max_steps"]["steps"] == 9
    assert lengths["max_steps"]["rates"] == pytest.approx([1 - i / 9 for i in range(9)])


def test_a_budget_of_samples_ends_the_run_and_its_schedule(seen: dict[str, Any]) -> None:
    budget = seen["lengths"]["budget"]
    *before, last = budget["samples"]
    assert last >= 40 > before[-1]
    assert budget["rates"][:3] == pytest.approx([0.0, 0.5, 1.0])  # a warm-up of two steps, whatever their samples
    start = before[1]
    assert budget["rates"][3:] == pytest.approx([1 - (n - start) / (40 - start) for n in before[2:]])


def test_samples_left_out_make_no_epoch_shorter(seen: dict[str, Any]) -> None:
    holes = seen["lengths"]["holes"]
    assert Counter(holes["given"]) == Counter({i: 2 for i in range(60) if i % 10})
    assert holes["state"][0] == 2.0
    assert holes["saved"] == [f"checkpoint-{holes['state'][1]}"]


def test_the_papers_calls(seen: dict[str, Any]) -> None:
    paper = seen["paper"]
    assert Counter(paper["given"]) == Counter({i: 2 for i in range(40)})
    assert paper["mine"] == 40  # sharded once
    assert paper["emitted"] == 80
    assert "ignore_data_skip" in paper["no_state"]


def test_refusals_name_what_they_refuse(seen: dict[str, Any]) -> None:
    refused = seen["refused"]
    expected = [
        "auto_find_batch_size",
        "eval_steps",
        "token_budget",
        "max_sample",
        "grad_accum_steps",
        "scheduler_total",
    ]
    assert set(refused) == {*expected, "replace_train_dataloader"}
    for name, text in refused.items():
        assert name in text
    assert "max_samples" in refused["max_sample"]
