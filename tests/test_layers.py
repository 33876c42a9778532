"""Imports point downwards only. The table below is the rule; a file that isn't in it fails until it is put there."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import odb

PACKAGE = Path(odb.__file__).parent


@dataclass(frozen=True)
class Layer:
    """What the modules that match a pattern may import: modules of `odb`, and packages of others."""

    modules: str
    odb: tuple[str, ...]
    others: tuple[str, ...] = ()


# The first pattern that matches a module counts. A pattern in `odb` allows a module and everything below it.
PLAN_BASE = ("odb.errors", "odb.plan.types")
PLAN_RULES = (*PLAN_BASE, "odb.plan.cost")
BESIDE_THE_LOADER = ("odb.config", "odb.step", "odb.collators", "odb.metrics")
ADAPTER = ("odb.errors", "odb.loader", "odb.resume", "odb.integrations", *BESIDE_THE_LOADER)
LAYERS = (
    Layer("odb", ("odb.config", "odb.collators", "odb.loader", "odb.metrics", "odb.step")),
    Layer("odb.errors", ()),
    Layer("odb.plan", PLAN_BASE, ("numpy",)),
    Layer("odb.plan.types", ("odb.errors",), ("numpy",)),
    Layer("odb.plan.cost", PLAN_BASE, ("numpy",)),
    Layer("odb.plan.group", PLAN_RULES, ("numpy",)),
    Layer("odb.plan.order", PLAN_RULES, ("numpy",)),
    Layer("odb.plan.pack", PLAN_BASE, ("numpy",)),
    Layer("odb.plan.labels", PLAN_BASE, ("numpy",)),
    Layer("odb.plan.label_search", (*PLAN_BASE, "odb.plan.labels"), ("numpy",)),
    Layer("odb.plan.packed", (*PLAN_RULES, "odb.plan.pack"), ("numpy",)),
    Layer(
        "odb.plan.even_labels", (*PLAN_BASE, "odb.plan.labels", "odb.plan.label_search", "odb.plan.packed"), ("numpy",)
    ),
    Layer("odb.plan.refine", (*PLAN_BASE, "odb.plan.labels"), ("numpy",)),
    Layer("odb.plan.fixed_count", (*PLAN_BASE, "odb.plan.labels"), ("numpy",)),
    Layer("odb.plan.accumulate", PLAN_BASE, ("numpy",)),
    Layer("odb.plan.rebalance", PLAN_BASE, ("numpy",)),
    Layer("odb.plan.weights", PLAN_RULES, ("numpy",)),
    Layer("odb.plan.wire", PLAN_RULES, ("numpy",)),
    Layer("odb.plan.grants", PLAN_RULES, ("numpy",)),
    Layer("odb.plan.align", (*PLAN_RULES, "odb.plan.wire", "odb.plan.weights", "odb.plan.grants"), ("numpy",)),
    Layer("odb.plan.round", ("odb.errors", "odb.plan"), ("numpy",)),
    Layer("odb.exchange.gloo", ("odb.errors", "odb.plan.types", "odb.exchange"), ("numpy", "torch")),
    Layer("odb.cli", ("odb.errors", "odb.plan", "odb.config", "odb.sim"), ("numpy", "rich")),
    Layer("odb.sim.plots", ("odb.errors", "odb.sim"), ("numpy", "matplotlib")),
    Layer("odb.sim*", ("odb.errors", "odb.plan", "odb.sim"), ("numpy",)),
    Layer("odb.exchange.rendezvous", ("odb.errors", "odb.plan.types", "odb.exchange"), ("numpy", "torch")),
    Layer("odb.exchange._private", (), ("torch",)),
    Layer("odb.exchange*", ("odb.errors", "odb.plan.types", "odb.exchange"), ("numpy",)),
    Layer("odb.mesh", ("odb.errors",)),
    Layer("odb.config", ("odb.errors", "odb.mesh", "odb.plan"), ("numpy",)),
    Layer("odb.metrics", ("odb.errors",)),
    Layer("odb.step", ("odb.errors", "odb.plan"), ("torch",)),
    Layer("odb.collators", ("odb.errors", "odb.plan.pack"), ("numpy", "torch")),
    Layer("odb.samplers*", ("odb.errors", "odb.plan", "odb.samplers"), ("numpy", "torch")),
    Layer(
        "odb.feed*",
        ("odb.errors", "odb.plan", "odb.exchange", "odb.feed", "odb.config", "odb.step"),
        ("numpy", "torch"),
    ),
    # The loader is the type of an argument there, and nothing is imported of it at run time.
    Layer("odb.resume", ("odb.errors", "odb.plan", "odb.exchange", "odb.feed", "odb.loader"), ("numpy",)),
    Layer(
        "odb.loader",
        ("odb.errors", "odb.plan", "odb.exchange", "odb.feed", "odb.resume", *BESIDE_THE_LOADER),
        ("numpy", "torch"),
    ),
    Layer("odb.manifest", ("odb.errors",), ("numpy",)),
    Layer("odb.checkpoint", ("odb.errors", "odb.exchange.rendezvous", "odb.manifest", "odb.resume")),
    Layer("odb.seeding", ("odb.errors",), ("numpy",)),
    Layer("odb.testing", ("odb.errors", "odb.loader", *BESIDE_THE_LOADER), ("numpy", "torch")),
    Layer("odb.integrations", ("odb.integrations",)),
    Layer(
        "odb.integrations.common",
        ("odb.errors", "odb.loader", "odb.resume", "odb.manifest", "odb.checkpoint", *BESIDE_THE_LOADER),
        ("torch",),
    ),
    Layer("odb.integrations.schedule", ("odb.errors",), ("torch",)),
    Layer("odb.integrations.source", ADAPTER, ("torch", "accelerate")),
    Layer("odb.integrations.hf_loader", ADAPTER, ("transformers",)),
    Layer("odb.integrations.hf", ADAPTER, ("torch", "transformers")),
    Layer("odb.integrations.accelerate", ADAPTER, ("torch", "accelerate")),
    Layer("odb.integrations.deepspeed", ADAPTER, ("torch",)),
    Layer("odb.integrations.telemetry", ADAPTER),
    Layer("odb.integrations.lightning", (*ADAPTER, "odb.integrations.telemetry"), ("torch", "lightning")),
    Layer("odb.integrations.llamafactory", ADAPTER, ("llamafactory",)),
)

#: Who may import `torch.distributed`; everybody else asks `odb.exchange`.
TORCH_DISTRIBUTED = ("odb.exchange.gloo", "odb.exchange.rendezvous", "odb.exchange._private")
#: Names that torch does not promise stand in files of these names only, each with the test that notices a change.
PRIVATE_NAMES = ("*._private", "*.compat")


def layer_of(module: str) -> Layer | None:
    return next((layer for layer in LAYERS if fnmatch.fnmatchcase(module, layer.modules)), None)


def below(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


@dataclass(frozen=True)
class Import:
    line: int
    module: str  # as written after `import` or `from`, relative ones resolved
    name: str | None = None  # the imported name of a `from`
    bound: str = ""  # the local name
    typing_only: bool = False  # below `if TYPE_CHECKING`

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def imports_of(module: str, tree: ast.AST, is_package: bool) -> Iterator[Import]:
    """All imports wherever they stand: those inside functions and under TYPE_CHECKING are arrows too."""
    package = module if is_package else module.rpartition(".")[0]
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    typing_only = {id(node) for block in blocks for line in block.body for node in ast.walk(line)}
    for node in ast.walk(tree):
        later = id(node) in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, None, alias.asname or alias.name.partition(".")[0], later)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(node.lineno, base, alias.name, alias.asname or alias.name, later)


def modules_meant(item: Import, known: frozenset[str]) -> Iterator[str]:
    """`from odb.plan import align` means odb.plan.align where that is a module, else odb.plan."""
    yield item.path if item.path in known else item.module


def dotted(node: ast.AST, bindings: dict[str, str]) -> str | None:
    """`dist.x._y` -> "torch.distributed.x._y", where the first name is bound by an import of torch."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bindings:
        return None
    return ".".join([bindings[node.id], *reversed(parts)])


def private(path: str) -> bool:
    return any(p.startswith("_") and not (p.startswith("__") and p.endswith("__")) for p in path.split("."))


def torch_names(tree: ast.AST, imports: list[Import]) -> Iterator[tuple[int, str]]:
    """Every name of torch that the file spells: imported, reached by dots, or by getattr with a literal."""
    ours = [i for i in imports if below(i.module, ("torch",))]
    # `import torch.a.b` binds `torch`; `import torch.a.b as x` and `from torch.a import b` bind the whole path.
    bindings = {i.bound: ("torch" if i.bound == "torch" else i.path) for i in ours}
    for item in ours:
        yield item.line, item.path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := dotted(node, bindings)):
            yield node.lineno, path
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            base = dotted(node.args[0], bindings)
            if base and isinstance(node.args[1], ast.Constant):
                yield node.lineno, f"{base}.{node.args[1].value}"


def violations(file: str, source: str, known: frozenset[str]) -> list[str]:
    """What is wrong with one file's imports, one sentence each."""
    is_package = file.endswith("/__init__.py")
    module = file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    layer = layer_of(module)
    if layer is None:
        return [f"{file} stands in no layer: say in LAYERS of tests/test_layers.py what it may import"]
    tree = ast.parse(source)
    imports = list(imports_of(module, tree, is_package))
    found = []
    for item in imports:
        for name in modules_meant(item, known):
            root = name.partition(".")[0]
            allowed = layer.odb if root == "odb" else layer.others
            if root not in sys.stdlib_module_names and not below(name, allowed):
                may = ", ".join((*layer.odb, *layer.others)) or "nothing but the standard library"
                found.append(f"{file}:{item.line} imports {name}: {layer.modules} may import only {may}")
    names = list(torch_names(tree, imports))
    if module not in TORCH_DISTRIBUTED:
        lines = sorted({line for line, name in names if below(name, ("torch.distributed",))})
        found += [f"{file}:{n} uses torch.distributed: only {', '.join(TORCH_DISTRIBUTED)} may" for n in lines]
    if not any(fnmatch.fnmatchcase(module, pattern) for pattern in PRIVATE_NAMES):
        spelt = sorted({(line, name) for line, name in names if private(name)})
        found += [
            f"{file}:{n} uses {name}, which torch does not promise: move it to a _private.py" for n, name in spelt
        ]
    return found


FILES = sorted(p.relative_to(PACKAGE.parent).as_posix() for p in PACKAGE.rglob("*.py"))
KNOWN = frozenset(f.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") for f in FILES)


@pytest.mark.parametrize("file", FILES)
def test_imports_point_downwards(file: str) -> None:
    found = violations(file, (PACKAGE.parent / file).read_text(encoding="utf-8"), KNOWN)
    assert not found, "\n".join(found)


def graph() -> dict[str, set[str]]:
    out: dict[str, set[str]] = {}
    for file in FILES:
        module = file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        tree = ast.parse((PACKAGE.parent / file).read_text(encoding="utf-8"))
        imports = imports_of(module, tree, file.endswith("/__init__.py"))
        names = {name for i in imports if not i.typing_only for name in modules_meant(i, KNOWN)}
        out[module] = (names & KNOWN) - {module}
    return out


def test_no_import_cycles() -> None:
    arrows = graph()
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(arrows[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in arrows:
        visit(module, ())


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("odb/plan/group.py", "import torch", "imports torch: odb.plan.group may import only"),
        ("odb/plan/group.py", "def f():\n    from odb.plan.round import x", "imports odb.plan.round"),
        ("odb/plan/group.py", "from . import align", "imports odb.plan.align"),
        ("odb/plan/group.py", "from ..feed import measure", "imports odb.feed"),
        ("odb/plan/cost.py", "import scipy.stats", "imports scipy.stats"),
        ("odb/errors.py", "import numpy", "may import only nothing but the standard library"),
        ("odb/exchange/memory.py", "import torch.distributed as dist", "imports torch.distributed"),
        ("odb/exchange/base.py", "from odb.plan import align", "imports odb.plan.align"),
        ("odb/feed/source.py", "from odb.loader import ODBDataLoader", "imports odb.loader"),
        ("odb/feed/source.py", "import torch\ntorch.distributed.get_rank()", "source.py:2 uses torch.distributed"),
        ("odb/feed/source.py", "from torch import distributed", "uses torch.distributed"),
        ("odb/feed/source.py", "if TYPE_CHECKING:\n    from odb.loader import wrap", "imports odb.loader"),
        ("odb/loader.py", "import torch\nx = torch.utils.data._utils.pin_memory", "uses torch.utils.data._utils"),
        ("odb/loader.py", "from torch.utils.data import _utils as u", "uses torch.utils.data._utils"),
        ("odb/loader.py", "import torch as t\ngetattr(t.cuda, '_lazy_init')", "uses torch.cuda._lazy_init"),
        ("odb/somewhere.py", "", "stands in no layer"),
    ],
)
def test_the_check_sees(file: str, source: str, complaint: str) -> None:
    found = violations(file, source, KNOWN | {"odb.plan.align", "odb.plan.round"})
    assert any(complaint in text for text in found), found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "odb/plan/group.py",
            "import heapq\nimport numpy as np\nfrom odb.plan.types import I64\nfrom ..errors import ODBError",
        ),
        ("odb/plan/round.py", "from odb.plan import align\nfrom odb.plan.align import settle"),
        ("odb/exchange/gloo.py", "import torch.distributed as dist\ndist.get_rank()\ndist.__name__"),
        ("odb/exchange/_private.py", "from torch.distributed import distributed_c10d\ndistributed_c10d._world"),
        ("odb/loader.py", "from odb.config import ODBConfig\nimport torch\nself._x = torch.utils.data.DataLoader"),
    ],
)
def test_the_check_lets_pass(file: str, source: str) -> None:
    assert violations(file, source, KNOWN | {"odb.plan.align"}) == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", sorted(m for m in KNOWN if m in ("odb", "odb.errors", "odb.config") or below(m, ("odb.plan",)))
)
def test_import_loads_no_torch(module: str) -> None:
    loaded = run_python(f"import {module}, sys; print('torch' in sys.modules)")
    assert loaded == "False", f"import {module} loads torch; it must stay possible to plan and configure without it"


def test_public_names_are_sorted_and_visible() -> None:
    names = run_python("import odb; print(*odb.__all__)").split()
    assert names == sorted(names)
    assert len(names) == len(set(names))
    own = "str(getattr(getattr(odb, n), '__module__', '')).startswith('odb')"
    visible = run_python(f"import odb; print(*(n for n in dir(odb) if not n.startswith('_') and {own}))").split()
    assert sorted(visible) == names, "what dir(odb) shows of odb's own and odb.__all__ differ"
    missing = run_python("import odb; print(*(n for n in odb.__all__ if getattr(odb, n, None) is None))")
    assert missing == "", f"odb.__all__ names what odb does not have: {missing}"


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = odb.no_such_name
