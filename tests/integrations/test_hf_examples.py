"""The examples of Hugging Face's trainers run as their first lines say: all three in one pair of processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_script

for name in ("transformers", "trl", "accelerate"):
    pytest.importorskip(name, reason=f"{name} is not installed (extra: trainers)")

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("hf_trainer", "trl_sft", "accelerate_loop")
#: Not a whole line: two ranks may write into one.
LINE = re.compile(r"rank (\d) epoch 2.0 steps (\d+) loss (\d\.\d{3}) -> (\d\.\d{3})")


@pytest.mark.timeout(200)
def test_the_examples_run(tmp_path: Path) -> None:
    code = f"import runpy, sys; from accelerate import PartialState; sys.path.insert(0, {str(FOLDER)!r})\n"
    # They share one process group, which each would end.
    code += "end, PartialState.destroy_process_group = PartialState.destroy_process_group, lambda *_: None\n"
    code += "if __name__ == '__main__':\n"
    for name in NAMES:
        code += f"    runpy.run_path({str(FOLDER / f'{name}.py')!r}, run_name='__main__')\n"
    code += "    end(PartialState())\n"
    done = run_script(code, nproc=2, timeout=180.0, TMPDIR=str(tmp_path), ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.output
    lines = list(LINE.finditer("".join(done.stdout)))
    for rank in ("0", "1"):
        mine = [match for match in lines if match[1] == rank]
        assert len(mine) == len(NAMES), done.output
        assert all(float(match[4]) < float(match[3]) for match in mine), done.output
    assert "".join(done.stdout).count("resumed after 2 steps: the same losses") == 2, done.output
