"""What the documentation says is true: its examples run, its tables are the code's, its links and file names exist.

A fenced python block below `<!-- run -->` is run as a program of its own by docs_runner.py, one below `<!-- run: 2 -->`
on two ranks. Every other python block must at least compile.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import pytest

import odb
import odb.errors

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"(?:<!-- run(?:: (?P<ranks>\d+))? -->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Example:
    page: Path
    line: int
    code: str
    ranks: int  # 0: not run

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def examples() -> list[Example]:
    out = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            marked = match[0].startswith("<!--")
            ranks = int(match["ranks"] or 1) if marked else 0
            out.append(Example(page, text.count("\n", 0, match.start()) + 1, match["code"], ranks))
    return out


EXAMPLES = examples()


def test_every_marked_block_is_found() -> None:
    marks = sum(page.read_text(encoding="utf-8").count("\n<!-- run") for page in PAGES)
    assert marks == sum(e.ranks > 0 for e in EXAMPLES) > 0


SOLO = [e for e in EXAMPLES if e.ranks == 1]
RUNNER = str(Path(__file__).parent / "docs_runner.py")
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example of one process printed, its exit status at the end."""
    folder = tmp_path_factory.mktemp("examples")
    files = {str(e): folder / str(number) / "example.py" for number, e in enumerate(SOLO)}
    for example in SOLO:
        files[str(example)].parent.mkdir()
        files[str(example)].write_text(example.code, encoding="utf-8")
    command = [sys.executable, RUNNER, *map(str, files.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRON)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return {name: file.with_suffix(".py.out").read_text(encoding="utf-8") for name, file in files.items()}


@pytest.mark.timeout(320)  # the first one waits for all
@pytest.mark.parametrize("example", SOLO, ids=str)
def test_example_runs(example: Example, solo: dict[str, str]) -> None:
    out = solo[str(example)]
    assert out.endswith("\nexit status 0\n"), f"{example} failed:\n{out}"


@pytest.mark.timeout(100)
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.ranks > 1], ids=str)
def test_example_runs_on_several_ranks(example: Example, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(example.code, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(example.ranks)]
    command = [sys.executable, *launcher, RUNNER, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=ENVIRON, cwd=tmp_path)
    assert done.returncode == 0, f"{example} failed:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_example_spells_real_names(example: Example) -> None:
    tree = ast.parse(example.code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "odb":
            assert hasattr(odb, node.attr), f"{example} uses odb.{node.attr}, which does not exist"


def rows(page: str, heading: str | None = None) -> list[list[str]]:
    """Cells of the body rows of a page's tables, below one heading if given."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading is not None:
        text = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("| ---")]


def documented_options() -> dict[str, str]:
    return {row[0].strip("`"): row[1] for row in rows("docs/options.md") if len(row) == 3 and row[0].startswith("`")}


def test_option_table_is_complete() -> None:
    assert set(documented_options()) == {f.name for f in fields(odb.ODBConfig)}


@pytest.mark.parametrize("field", fields(odb.ODBConfig), ids=lambda f: f.name)
def test_option_default_is_true(field: object) -> None:
    said = documented_options()[field.name]
    if field.default is MISSING:
        assert said == "required"
    else:
        assert said == f"`{field.default!r}`".replace("'", '"'), f"options.md says {said} of {field.name}"


def test_loader_arguments_are_documented() -> None:
    text = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    names = set(inspect.signature(odb.ODBDataLoader).parameters) - {"options", "pin_memory_device"}
    assert names <= set(re.findall(r"`(\w+)`", text)), "arguments of ODBDataLoader that docs/options.md does not name"


def test_step_info_table_is_complete() -> None:
    said = {name for row in rows("docs/quickstart.md", "What a step tells") for name in re.findall(r"`(\w+)`", row[0])}
    assert said - {"ODBStepInfo"} == {f.name for f in fields(odb.ODBStepInfo)}


def test_exception_tree_is_drawn() -> None:
    names = {n for n, value in vars(odb.errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    text = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
    assert {name for name in names if name not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:odb|tests|examples|benchmarks|docker|docs)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}, which does not exist"


@pytest.mark.parametrize("page", ["protocol.md", "guarantees.md"])
def test_named_tests_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 8, "each guarantee names a test"
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"docs/{page} names {file}::{name}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    for page in PAGES:
        for words in re.findall(r"(?:`|\$ |^    )make ([a-z ]+)", page.read_text(encoding="utf-8"), re.M):
            assert set(words.split()) <= targets, f"{page.name} says `make {words}`"
