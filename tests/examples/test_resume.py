"""The example that is stopped and goes on: the same lines and the same weights as without the stop."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "resume.py"


def run(nproc: int, folder: Path, *options: str, expect: int = 0) -> list[str]:
    """Lines of all ranks, in order of rank and then of time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={nproc}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(SCRIPT), "--folder", str(folder), *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert (done.returncode == 0) == (expect == 0), done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("epoch ", "done "))]
    return sorted(lines, key=lambda line: int(line.split("rank ")[1].split()[0]))


def updates(lines: list[str]) -> dict[tuple[int, int], str]:
    """(update, rank) -> line."""
    found = (re.match(r"epoch \d+ update (\d+) rank (\d+) ", line) for line in lines)
    return {(int(match[1]), int(match[2])): match.string for match in found if match}


def samples(lines: list[str], epoch: int) -> Counter[int]:
    """How often each sample of an epoch came."""
    rows = [line.rpartition("samples ")[2] for line in lines if line.startswith(f"epoch {epoch} ")]
    return Counter(int(index) for row in rows for index in re.findall(r"\d+", row))


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run(2, tmp_path / "whole", "--workers", "0")
    assert samples(whole, 0) == samples(whole, 1) == Counter(range(200))
    stop = max(update for update, _ in updates(run(2, tmp_path / "run", "--stop-after", "9", expect=1)))
    assert stop == 9
    shutil.copytree(tmp_path / "run", tmp_path / "other")

    rest = run(2, tmp_path / "run", "--workers", "0")
    first = min(update for update, _ in updates(rest))
    assert first == 9  # the newest checkpoint is that of update 8
    expected = {key: line for key, line in updates(whole).items() if key[0] >= first}
    assert updates(rest) == expected
    assert [line for line in rest if "done" in line] == [line for line in whole if "done" in line]

    # Three ranks in place of two: what update 8 had left of its epoch comes once.
    before = [line for (update, _), line in updates(whole).items() if update <= 8]
    other = run(3, tmp_path / "other", "--workers", "0")
    assert 0 < len(samples(before, 1)) < 200
    assert samples(before, 1) + samples(other, 1) == Counter(range(200))
