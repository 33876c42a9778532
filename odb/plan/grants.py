"""Elastic sharding: who reads which keys of the one order that all ranks share, decided round by round.

The ledger is spread over the reports: each rank says how many keys it was granted and how many of them it has used,
and all say which key comes next. New grants follow from the reports alone, so every rank books the same: the ranks'
blocks lie one behind the other in the order (an exclusive prefix sum). Windows are to hold equal *tokens*: a rank that
drew short samples is granted more of them.

A grant is made a round before it is drawn from, since what a rank emits in a round is known to the others only in the
next; and as much again is granted ahead, so that workers have something to read while the ranks agree.

An order that begins anew until a quota is met has keys without end. Ranks that held more of them than will still leave
would emit samples of later passes while some of the first are unread, so they are granted for the quota's rest alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from odb.plan.types import I64, PlanConfig, ReportTable, RoundState

#: The most keys of a rank's first grant, which is made before any length is known.
FIRST_KEYS = 256

#: Of the keys that nobody was granted yet, half at most go out in one round: the last ones make windows equal. With 3/4
#: too few are left for that where lengths have a heavy tail; but that is enough for few ranks, and fewer rounds.
_PART, _PART_FEW = 1 / 2, 3 / 4
_FEW_RANKS = 8

#: Below this many keys a rank the rest goes out at once. Smaller grants would only add rounds.
_LAST_KEYS = 8


def start(epoch: int, num_keys: int, rank: int, world_size: int, quota: int | None = None) -> RoundState:
    """The state before the first round of an epoch of `num_keys` keys that all ranks share, first grants included.

    Rank `r`'s first block is `first_block(num_keys, r, world_size, quota)`.
    """
    block = first_block(num_keys, rank, world_size, quota)
    last = first_block(num_keys, world_size - 1, world_size, quota)
    return replace(RoundState.start(epoch), num_keys=num_keys, next_key=last.stop, num_granted=len(block))


def first_block(num_keys: int, rank: int, world_size: int, quota: int | None = None) -> range:
    """Positions in the shared order that a rank has before the first round: equal counts, as no length is known."""
    expected = num_keys if quota is None else min(num_keys, quota)
    each = min(FIRST_KEYS, -(-expected // (4 * world_size)))
    bounds = np.minimum(np.arange(rank, rank + 2) * each, num_keys)
    return range(int(bounds[0]), int(bounds[1]))


def block(grants: I64, first_key: int, rank: int) -> range:
    """The positions that a rank is granted by an agreement."""
    if not len(grants):
        return range(0)
    begin = first_key + int(grants[:rank].sum())
    return range(begin, begin + int(grants[rank]))


def decide(config: PlanConfig, table: ReportTable, next_target: int) -> I64:
    """(W,) keys that each rank is granted behind `table.next_key[0]`.

    Args:
        config: `window` bounds what a rank may hold and have before it.
        table: all ranks' reports.
        next_target: tokens that a window holds in the next round.
    """
    left = int(table.num_keys[0] - table.next_key[0])
    if config.sample_quota is not None:
        left = min(left, max(len(table), config.sample_quota - int(table.emitted_samples.sum())))
    outstanding = table.num_granted - table.num_drawn
    used = int(table.num_drawn.sum())
    if left <= 0:
        return np.zeros(len(table), np.int64)
    if not table.observed_tokens.any():
        return _shared_out(np.full(len(table), FIRST_KEYS) - outstanding, _part_of(left, len(table)))
    mean = table.observed_tokens.sum() / used  # of a key: those that gave no sample count as 0
    load = table.held_tokens + outstanding * mean
    # Where limits gave way because what is held makes no step, as much again as is held.
    room = 2 * np.maximum(config.window, table.num_held) - table.num_held - outstanding
    total = _part_of(left, len(table))
    level = np.minimum(2.0 * np.maximum(next_target, table.held_tokens), _water_level(load, total * mean))
    if config.sample_quota is not None:
        level = np.minimum(level, _level_of_the_rest(config, table))
    wanted = np.minimum(np.ceil((level - load) / mean).astype(np.int64), room)
    return _shared_out(wanted, total)


def _level_of_the_rest(config: PlanConfig, table: ReportTable) -> npt.NDArray[np.float64]:
    """(W,) tokens of which each rank needs no more: an equal part of what the quota misses, and enough for a step."""
    assert config.sample_quota is not None
    step = config.grad_accum_steps * config.token_budget
    mean = table.observed_tokens.sum() / table.observed_samples.sum()
    # What leaves in this very round is not known yet: a quarter of what is held, or more.
    emitted = int(table.emitted_samples.sum()) + int(table.num_held.sum()) // 4
    rest = max(0, config.sample_quota - emitted) * mean / len(table)
    can_step = table.num_groups >= config.grad_accum_steps
    return np.maximum(max(step, rest), np.where(can_step, 0, table.held_tokens + step))


def _part_of(left: int, world_size: int) -> int:
    if left <= _LAST_KEYS * world_size:
        return left
    return int(left * (_PART_FEW if world_size <= _FEW_RANKS else _PART))


def _water_level(load: npt.NDArray[np.float64], amount: float) -> float:
    """The level to which `amount` fills up the lowest of the loads."""
    ordered = np.sort(load)
    counts = np.arange(1, len(load) + 1)
    levels = (np.cumsum(ordered) + amount) / counts  # if it went to the lowest 1, 2, ... W of them
    above = np.append(ordered[1:], np.inf)
    return float(levels[int(np.argmax(levels <= above))])


def _shared_out(wanted: I64, total: int) -> I64:
    """`wanted`, cut to `total` from behind where it is more."""
    wanted = np.maximum(wanted, 0)
    return np.diff(np.minimum(np.cumsum(wanted), total), prepend=0)
