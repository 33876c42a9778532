"""Lengths to simulate with: from a file, or drawn from one of five distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb.errors import ConfigError
from odb.plan.types import I64

#: Shapes after the published length statistics of the data sets that they are called after; `cv2` has a heavy tail.
DISTRIBUTIONS = ("ultrachat", "llava", "sharegpt4o", "mmmix", "cv2")

_SHORTEST, _LONGEST = 16, 8192
_MEAN_AND_CV = {"ultrachat": (1200, 0.48), "llava": (700, 0.29), "sharegpt4o": (2500, 1.0), "cv2": (800, 2.0)}


def draw(name: str, num_samples: int, seed: int) -> I64:
    """(n,) lengths in tokens, clipped to 16..8192: lognormal, but for `mmmix` (short answers and images).

    Raises:
        ConfigError: no such distribution.
    """
    generator = np.random.default_rng(seed)
    if name == "mmmix":
        is_short = generator.random(num_samples) < 0.7
        short = generator.uniform(80, 200, num_samples)
        values: npt.NDArray[Any] = np.where(is_short, short, generator.normal(1500, 300, num_samples))
    elif name in _MEAN_AND_CV:
        mean, variation = _MEAN_AND_CV[name]
        sigma = np.sqrt(np.log(1 + variation * variation))
        values = generator.lognormal(np.log(mean) - sigma * sigma / 2, sigma, num_samples)
    else:
        raise ConfigError(f"unknown distribution {name!r}; known: {', '.join(DISTRIBUTIONS)}")
    lengths: I64 = np.clip(values, _SHORTEST, _LONGEST).astype(np.int64)
    return lengths


def load(path: str | Path) -> I64:
    """(n,) lengths of a file: `.npy` with one integer per sample, or `.jsonl` with an integer, or `{"length": ...}`, a line.

    Raises:
        ConfigError: another kind of file, or something else than lengths >= 1 in it; the text says where.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no file {path}")
    if path.suffix not in (".npy", ".jsonl"):
        raise ConfigError(f"lengths must be in a .npy or .jsonl file, got {path}")
    try:
        values = _array(path) if path.suffix == ".npy" else _lines(path)
    except (OSError, UnicodeDecodeError, OverflowError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ConfigError(f"{path} must hold a one-dimensional array of integers, got {values.dtype}{values.shape}")
    if not len(values):
        raise ConfigError(f"{path} holds no lengths")
    if values.min() < 1:
        worst = int(values.argmin())
        raise ConfigError(f"lengths must be at least 1; sample {worst} of {path} has {values[worst]}")
    lengths: I64 = values.astype(np.int64)
    return lengths


def _array(path: Path) -> npt.NDArray[Any]:
    try:
        values: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except ValueError:  # numpy's text is about pickles
        raise ConfigError(f"{path} is no .npy file of integers") from None
    return values


def _lines(path: Path) -> I64:
    lines = path.read_text(encoding="utf-8").splitlines()
    return np.array([_length(line, number, path) for number, line in enumerate(lines, 1) if line.strip()], np.int64)


def _length(line: str, number: int, path: Path) -> int:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None
    if isinstance(value, dict):
        value = value.get("length")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{path}, line {number}: expected an integer or an object with 'length', got {line[:80]!r}")
    return value
