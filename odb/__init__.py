"""Online dynamic batching: batches decided after preprocessing, under a token budget, aligned over all ranks.

Names load on first use, so that `import odb.plan` needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odb.config import ODBConfig
    from odb.loader import ODBDataLoader, apply, wrap
    from odb.metrics import LoaderStats
    from odb.step import ODBStepInfo, pop_step_info, scale_loss

__version__ = "0.1.0"

_HOME = {
    "LoaderStats": "odb.metrics",
    "ODBConfig": "odb.config",
    "ODBDataLoader": "odb.loader",
    "ODBStepInfo": "odb.step",
    "apply": "odb.loader",
    "pop_step_info": "odb.step",
    "scale_loss": "odb.step",
    "wrap": "odb.loader",
}

_SUBMODULES = frozenset(
    {
        "checkpoint",
        "collators",
        "config",
        "errors",
        "manifest",
        "metrics",
        "plan",
        "resume",
        "seeding",
        "step",
        "testing",
    }
)

__all__ = ["LoaderStats", "ODBConfig", "ODBDataLoader", "ODBStepInfo", "apply", "pop_step_info", "scale_loss", "wrap"]


def _warn_of_name_clash() -> None:
    """The paper's reference package is imported as `odb` too: installed side by side, one hides the other."""
    try:
        version = importlib.metadata.version("online-dynamic-batching")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"online-dynamic-batching {version} is installed beside this package and is imported as `odb` too: files of "
        f"the two mix. This is odb {__version__}, from {__file__}. Uninstall one, or keep them in two environments",
        stacklevel=3,
    )


_warn_of_name_clash()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"odb.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'odb' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
