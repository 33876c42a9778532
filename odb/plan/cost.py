"""What samples cost: in the padded layout rows x padded row length, in the packed one the sum of lengths; or what the
user's cost model says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from odb.errors import ConfigError
from odb.plan.types import I64, Measures, PlanConfig

#: Rows and lengths on which `validate_cost_fn` tries a cost model: small, and dense enough to see a dip.
_PROBE_ROWS = np.array([1, 2, 3, 4, 7, 8, 16, 64, 256, 1024], np.int64)
_PROBE_LENGTHS = np.array([1, 2, 3, 8, 16, 63, 64, 128, 512, 1000, 2048, 4096, 8192, 32768], np.int64)


def padded_length(length: I64, config: PlanConfig) -> I64:
    """Row lengths after padding: `length` rounded up to a multiple of `config.pad_to_multiple_of`. Same shape."""
    multiple = config.pad_to_multiple_of
    return length if multiple == 1 else -(-length // multiple) * multiple


def group_cost(rows: I64, padded_len: I64, config: PlanConfig) -> I64:
    """Costs of groups of `rows` rows padded to `padded_len` tokens, elementwise, in units of the token budget.

    Raises:
        ConfigError: `config.cost_fn` gave something else than one finite, non-negative number per element.
    """
    if config.cost_fn is None:
        return rows * padded_len
    rows, padded_len = (array.copy() for array in np.broadcast_arrays(rows, padded_len))
    raw = np.asarray(config.cost_fn(rows, padded_len))
    _check_costs(raw, rows.shape)
    return raw.astype(np.int64) if raw.dtype.kind in "iu" else np.ceil(raw).astype(np.int64)


def _check_costs(raw: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    hint = "cost_fn(rows, padded_len) gets two int64 arrays and returns one cost per element"
    if raw.shape != shape:
        raise ConfigError(f"cost_fn returned shape {raw.shape} for inputs of shape {shape}; {hint}")
    if raw.dtype.kind not in "iuf":
        raise ConfigError(f"cost_fn returned dtype {raw.dtype}, expected integers or floats; {hint}")
    # 2**62 leaves room for sums; a float beyond it would wrap when converted to int64.
    good = np.isfinite(raw) & (raw >= 0) & (raw < 2**62)
    if not good.all():
        bad = raw[~good].flat[0]
        raise ConfigError(f"cost_fn returned {bad}, expected finite costs in 0..2**62; {hint}")


def sample_cost(measures: Measures, config: PlanConfig) -> I64:
    """(n,) what each sample costs as a group of its own."""
    return group_cost(np.ones(len(measures), np.int64), padded_length(measures.length, config), config)


def row_cost(length: I64, config: PlanConfig) -> I64:
    """(n,) what one more row of each length adds to a group of that length: tokens unless there is a cost model."""
    if config.cost_fn is None:
        return length
    one = np.ones_like(length)
    return group_cost(2 * one, length, config) - group_cost(one, length, config)


def row_capacity(config: PlanConfig) -> int:
    """Packed layout: tokens (or cost) that a row is filled with, so that its padded length keeps the bound."""
    if config.cost_fn is not None:
        return config.token_budget
    capacity = config.token_budget // config.rows_per_batch
    return capacity - capacity % config.pad_to_multiple_of


def packed_size(length: I64, config: PlanConfig) -> I64:
    """Packed layout: (n,) what a sample takes of its row: its length, or its cost alone."""
    if config.cost_fn is None:
        return length
    return np.maximum(1, group_cost(np.ones(len(length), np.int64), length, config))


def oversize(config: PlanConfig, measures: Measures) -> npt.NDArray[np.bool_]:
    """(n,) bool: samples that break a bound all by themselves (cost over the budget, or patches over `max_patches`)."""
    if config.layout == "packed":
        over = packed_size(measures.length, config) > row_capacity(config)
    else:
        over = sample_cost(measures, config) > config.token_budget
    if config.max_patches is not None:
        over |= measures.patches > config.max_patches
    return over


def validate_cost_fn(config: PlanConfig) -> None:
    """Tries the cost model on a small grid.

    Raises:
        ConfigError: a cost falls when rows or length grow (groups found by bisection would break the budget), or is
            no valid cost.
    """
    if config.cost_fn is None:
        return
    rows, lengths = np.meshgrid(_PROBE_ROWS, padded_length(_PROBE_LENGTHS, config), indexing="ij")
    costs = group_cost(rows, lengths, config)
    for axis, name in ((0, "rows"), (1, "padded_len")):
        falls = np.argwhere(np.diff(costs, axis=axis) < 0)
        if len(falls):
            before = tuple(int(i) for i in falls[0])
            after = (before[0] + (axis == 0), before[1] + (axis == 1))
            raise ConfigError(
                f"cost_fn falls when {name} grows: cost({rows[before]}, {lengths[before]}) = {costs[before]} but "
                f"cost({rows[after]}, {lengths[after]}) = {costs[after]}; give a cost that never falls in either argument"
            )
