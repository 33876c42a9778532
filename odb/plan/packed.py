"""Groups of the packed layout: rows of whole samples (`odb.plan.pack`), one or several a group.

A group is written as positions in a window, row by row; `pack.next_fit` over their sizes gives the rows back, wherever
they are needed. What a sample takes of a row is its length, or what the user's cost model says of it alone: with
attention over varying lengths the costs of a row's samples add up.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from odb.plan import pack
from odb.plan.cost import packed_size, padded_length, row_capacity
from odb.plan.types import I64, Agreement, Measures, PlanConfig, Proposal, Status

Groups = list[I64]

#: A round of waiting counts like 2 % of a row better filled.
_WORTH_OF_WAITING = 0.02


def bounds(config: PlanConfig) -> pack.Bounds:
    """What a row may hold. Patches are bounded per group; a group of several rows shares them out evenly."""
    patches = None if config.max_patches is None else max(1, config.max_patches // config.rows_per_batch)
    return pack.Bounds(row_capacity(config), config.max_samples, patches)


def rows_of(sizes: I64, config: PlanConfig) -> list[int]:
    """Ends of the rows of a group whose samples have these sizes, in the group's order."""
    return pack.next_fit(sizes, bounds(config))


def shape(length: I64, config: PlanConfig) -> tuple[int, int]:
    """Rows and padded row length of a group with these lengths, in its order."""
    if not len(length):
        return 0, 0
    if config.rows_per_batch == 1:
        return 1, int(padded_length(length.sum(keepdims=True), config)[0])
    ends = rows_of(length, config)
    totals = np.add.reduceat(length, [0, *ends[:-1]])
    return len(ends), int(padded_length(totals.max(keepdims=True), config)[0])


def cost(length: I64, config: PlanConfig) -> int:
    """Of a group with these lengths, in its order: padded tokens, or the sum of what the cost model says of each."""
    if config.cost_fn is not None:
        return int(packed_size(length, config).sum())
    rows, width = shape(length, config)
    return rows * width


def costs(window: Measures, groups: Groups | tuple[I64, ...], config: PlanConfig) -> I64:
    """(groups,) of each."""
    return np.array([cost(window.length[group], config) for group in groups], np.int64)


def propose(window: Measures, age: I64, config: PlanConfig) -> Groups:
    """The groups that a window forms: those with overdue samples first; with `drop_last` only complete ones."""
    rows = _rows(window, np.arange(len(window)), config, age >= config.max_age)
    groups = _chunks(rows, config.rows_per_batch)
    if not config.drop_last or not groups:
        return groups
    complete = pack.num_complete(rows, packed_size(window.length, config), bounds(config))
    return groups[: complete // config.rows_per_batch]


def _rows(window: Measures, positions: I64, config: PlanConfig, urgent: npt.NDArray[np.bool_] | None = None) -> Groups:
    """Rows of some of a window's samples; equal sizes in the order of identities, so that arrival decides nothing."""
    part = positions[np.argsort(window.ids[positions], kind="stable")]
    late = None if urgent is None else urgent[part]
    found = pack.first_fit_decreasing(
        packed_size(window.length[part], config), bounds(config), window.patches[part], late
    )
    return [part[row] for row in found]


def _chunks(rows: Groups, size: int) -> Groups:
    return [np.concatenate(rows[i : i + size]) for i in range(0, len(rows), size)]


def choose(config: PlanConfig, proposal: Proposal, agreement: Agreement, num_groups: int) -> Groups:
    """Exactly `num_groups` groups of the window: all of it where that many can hold it and nothing may stay."""
    if not num_groups:
        return []
    window, groups = proposal.window, list(proposal.groups)
    if len(groups) > num_groups or config.drop_last:
        return _overflow(config, proposal, groups, num_groups)
    rows = _rows(window, np.arange(len(window)), config, proposal.age >= config.max_age)
    if not agreement.last:
        fewer = _rows(window, _without_reserve(config, proposal, num_groups), config)
        rows = fewer if -(-len(fewer) // config.rows_per_batch) <= num_groups else rows
    return _exactly(config, window, rows, num_groups)


def _overflow(config: PlanConfig, proposal: Proposal, groups: Groups, num_groups: int) -> Groups:
    """More groups than steps: those with overdue samples leave, the oldest first, then the fullest; the rest waits.

    Long samples make the fullest rows. That waiting counts, too, keeps the order in which lengths leave random.
    """
    oldest = np.array([proposal.age[group].max() for group in groups])
    oldest = np.where(oldest >= config.max_age, oldest, 0)
    tokens = np.array([proposal.window.length[group].sum() for group in groups])
    waited = np.array([proposal.age[group].mean() for group in groups])
    value = tokens / tokens.max() + _WORTH_OF_WAITING * waited
    return [groups[i] for i in np.lexsort((-value, -oldest))[:num_groups]]


def _without_reserve(config: PlanConfig, proposal: Proposal, num_groups: int) -> I64:
    """Positions of what leaves where all could; a dry rank keeps one row's worth of short samples while others run.

    It costs no step, as the others have at least one to come, and saves fillers. With `accum_tail="fill"` a rank keeps as
    many as fill an optimizer step.
    """
    window = proposal.window
    order = np.lexsort((window.ids, -window.length))
    spare = len(window) - num_groups
    if proposal.report.status == Status.EXHAUSTED:
        sizes = packed_size(window.length[order[::-1]], config)
        keep = int(np.searchsorted(np.cumsum(sizes), row_capacity(config), side="right"))
        keep = min(keep, config.max_samples or keep)
    else:
        keep = config.grad_accum_steps if config.grad_accum_steps > 1 and config.accum_tail == "fill" else 0
    late = np.flatnonzero(proposal.age[order] >= config.max_age)
    young = len(order) - 1 - int(late[-1]) if len(late) else len(order)
    return order[: len(order) - max(0, min(spare, keep, young))]


def _exactly(config: PlanConfig, window: Measures, rows: Groups, num_groups: int) -> Groups:
    """`num_groups` non-empty groups of the samples in these rows, of about equal cost. Needs no more groups of rows."""
    if len(rows) > num_groups:
        per_group, more = divmod(len(rows), num_groups)
        assert per_group + (more > 0) <= config.rows_per_batch, (len(rows), num_groups)
        ends = np.cumsum([per_group + (number < more) for number in range(num_groups)]).tolist()
        return [np.concatenate(rows[a:b]) for a, b in pairwise([0, *ends])]
    part = np.concatenate(rows)
    part = part[np.argsort(window.ids[part], kind="stable")]
    sizes, patches = packed_size(window.length[part], config), window.patches[part]
    even = pack.evenly_within(sizes, num_groups, bounds(config), patches)
    if even is not None:
        return [part[one] for one in even]
    return pack.halved(rows, packed_size(window.length, config), num_groups)


def within_bounds(config: PlanConfig, window: Measures, group: I64) -> I64:
    """A group that was planned with other lengths: as it is where it keeps the bounds, else its part with most samples."""
    if len(group) < 2:
        return group
    ends = rows_of(packed_size(window.length[group], config), config)
    is_light = config.max_patches is None or int(window.patches[group].sum()) <= config.max_patches
    alone = packed_size(window.length[group], config) > row_capacity(config)
    if len(ends) <= config.rows_per_batch and is_light and not alone.any():
        return group
    parts = _chunks(_rows(window, group, config), config.rows_per_batch)
    return heapq.nlargest(1, parts, key=len)[0]


def can_make(config: PlanConfig, window: Measures, num_groups: int) -> bool:
    """Whether a window forms that many complete groups."""
    return len(propose(window, np.zeros(len(window), np.int64), config)) >= num_groups
