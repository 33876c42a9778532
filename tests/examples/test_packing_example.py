"""The packing example trains: on two ranks, through the command that its docstring gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(110)
def test_the_loss_falls_and_every_sample_comes_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(ROOT / "examples/packing.py")], capture_output=True, text=True, timeout=100, env=environ
    )
    assert done.returncode == 0, done.stderr
    losses = [float(one) for one in re.findall(r"mean loss ([\d.]+)", done.stdout)]
    assert losses[-1] < 0.7 * losses[0]
    assert sum(int(one) for one in re.findall(r"(\d+) samples in", done.stdout)) == 2000
    assert len(set(re.findall(r"in (\d+) steps", done.stdout))) == 1
