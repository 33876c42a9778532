"""Online dynamic batching: batches decided after preprocessing, under a token budget, aligned over all ranks.

Names load on first use, so that `import odb.plan` needs no torch.
"""

from __future__ import annotations

import importlib
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

__all__ = ["LoaderStats", "ODBConfig", "ODBDataLoader", "ODBStepInfo", "apply", "pop_step_info", "scale_loss", "wrap"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'odb' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
