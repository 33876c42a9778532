"""LLaMA-Factory on two real ranks, from its own arguments. Its pins keep it out of an environment of other trainers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import ranks

if find_spec("llamafactory") is None:
    pytest.skip(
        "llamafactory is not installed (it pins older transformers, trl and datasets): use an environment of its own, "
        "pip install llamafactory",
        allow_module_level=True,
    )

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llamafactory")
    make = f"import sys; sys.path.insert(0, {str(HERE)!r}); import pathlib, llamafactory_run as run; "
    make += f"run.make_inputs(pathlib.Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", make], check=True, timeout=100)
    return folder


@pytest.mark.soak
@pytest.mark.timeout(250)
@pytest.mark.parametrize("kind", ["global", "mean"])
def test_a_step_is_exact(inputs: Path, kind: str) -> None:
    program = str(HERE / "llamafactory_run.py")
    code = f"import runpy, sys; sys.argv = [{program!r}, {str(inputs)!r}, {kind!r}]\n"
    code += f"if __name__ == '__main__': runpy.run_path({program!r}, run_name='__main__')\n"
    done = ranks.run_script(code, nproc=2, timeout=200)
    assert done.returncode == 0, done.output
    found = json.loads((inputs / "result.json").read_text())
    assert found["error"] < 1e-5, found  # float32 rounding
    assert found["loss"] == pytest.approx(found["mean"], rel=1e-3), found  # logged with four digits
    assert (found["steps"], found["epoch"], found["samples"]) == (1, 1.0, 24), found
    assert found["collator"] == "SFTDataCollatorWith4DAttentionMask", found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stage": "sft"}, "token_budget"),
        ({"stage": "sft", "odb": {"window": 5}}, "token_budget"),
        ({"stage": "dpo", "odb": {"token_budget": 9}}, "dpo"),
        ({"stage": "sft", "packing": True, "odb": {"token_budget": 9}}, "packing"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict, text: str) -> None:
    from odb.errors import ConfigError
    from odb.integrations.llamafactory import run_exp

    with pytest.raises(ConfigError, match=text):
        run_exp(arguments)
