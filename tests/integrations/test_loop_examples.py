"""The examples of plain loops, DeepSpeed and Lightning run as their first lines say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Not a whole line: two ranks may write into one.
LINE = re.compile(r"rank (\d) epoch (\d) steps (\d+) [^\n]*?loss [^\n]*?(\d+\.\d+)")


def check(name: str, timeout: float = 80, **env: str) -> None:
    """Two epochs, equal steps on both ranks, a loss that falls."""
    code = f"import runpy, sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
    code += f"if __name__ == '__main__': runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')\n"
    done = ranks.run_script(code, nproc=2, timeout=timeout, **env)
    assert done.returncode == 0, done.output
    found = {(m[1], m[2]): (int(m[3]), float(m[4])) for m in LINE.finditer("".join(done.stdout))}
    assert sorted(found) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")], done.output
    for epoch in ("0", "1"):
        assert found["0", epoch] == found["1", epoch], done.output
    assert found["0", "1"][1] < found["0", "0"][1], done.output


@pytest.mark.timeout(100)
def test_fsdp2_loop() -> None:
    check("fsdp2_loop.py")


@pytest.mark.timeout(100)
def test_lightning_fit() -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    check("lightning_fit.py")


@pytest.mark.soak  # DeepSpeed compiles at its first start on a machine
@pytest.mark.timeout(200)
def test_deepspeed_loop() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install deepspeed")
    check("deepspeed_loop.py", timeout=180, DS_ACCELERATOR="cpu")
