"""Adapters for trainers. Each submodule needs its trainer installed; nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

_SUBMODULES = frozenset({"accelerate", "common", "deepspeed", "hf", "lightning", "llamafactory", "telemetry"})

__all__ = sorted(_SUBMODULES)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"odb.integrations.{name}")
    raise AttributeError(f"module 'odb.integrations' has no attribute {name!r}; adapters: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
