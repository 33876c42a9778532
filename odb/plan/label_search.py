"""Exchanges between a rich microbatch and all others of its window: of whole rows, then of samples.

Rows that are nearly full leave pairs of microbatches few samples to swap; among a whole window some sample of like length
and other labels is nearly always there. See `odb.plan.labels` for the words and for what stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb.plan.labels import (
    PASSES,
    WINDOW,
    Labelled,
    Microbatch,
    RowBounds,
    regrouped,
    row_labels,
    row_length,
    swap_pass,
)
from odb.plan.types import I64

_ENDLESS = np.iinfo(np.int64).max
_TWOS_OF = 20  # samples of a row of which pairs are made


def balance_windows(
    batches: Sequence[Microbatch], data: Labelled, bounds: RowBounds, rng: np.random.Generator, window: int = WINDOW
) -> list[Microbatch]:
    """The microbatches with their labels evened, `window` of them at a time, each window shuffled afterwards.

    Samples, rows, microbatches and the sum of labels stay the same; the sum of squared label totals never grows.
    """
    out: list[Microbatch] = []
    for start in range(0, len(batches), window):
        part = [[list(row) for row in batch] for batch in batches[start : start + window]]
        part = balanced(part, data, bounds)
        out += [part[i] for i in rng.permutation(len(part)).tolist()]
    return out


def balanced(batches: list[Microbatch], data: Labelled, bounds: RowBounds) -> list[Microbatch]:
    """One window with its labels evened, in its order; rows are regrouped, swapped and repacked in place."""
    batches = regrouped(batches, data, bounds)
    for _ in range(PASSES):
        if not swap_pass(batches, data, bounds):
            break
    for exchange in (exchange_rows, exchange_samples, exchange_twos):
        for _ in range(PASSES):
            if not exchange(batches, data, bounds):
                break
    return batches


@dataclass
class _Rows:
    """The rows of a window. Arrays of shape (rows,), but `sums` and `slots` of shape (microbatches,)."""

    batch: I64
    place: I64  # within the microbatch
    length: I64
    labels: I64
    others: I64  # the longest of the microbatch's other rows
    num_rows: I64  # of the row's microbatch
    sums: I64
    slots: I64

    @classmethod
    def of(cls, batches: list[Microbatch], data: Labelled, bounds: RowBounds) -> _Rows:
        batch = np.array([b for b, rows in enumerate(batches) for _ in rows], np.int64)
        place = np.array([r for rows in batches for r in range(len(rows))], np.int64)
        length = np.array([row_length(row, data) for rows in batches for row in rows], np.int64)
        labels = np.array([row_labels(row, data) for rows in batches for row in rows], np.int64)
        number = np.bincount(batch)
        out = cls(batch, place, length, labels, length * 0, number[batch], np.zeros_like(number), np.zeros_like(number))
        out.sums = np.bincount(batch, labels).astype(np.int64)
        for one in range(len(number)):
            out.refresh(one, bounds)
        return out

    def refresh(self, batch: int, bounds: RowBounds) -> None:
        """What follows from the lengths of a microbatch's rows."""
        rows = np.flatnonzero(self.batch == batch)
        length = self.length[rows]
        first = int(np.argmax(length))
        self.others[rows] = length[first]
        self.others[rows[first]] = np.delete(length, first).max(initial=0)
        self.slots[batch] = len(rows) * bounds.padded(int(length[first]))


def exchange_rows(batches: list[Microbatch], data: Labelled, bounds: RowBounds) -> bool:
    """Each microbatch, the richest first, exchanges one row where that evens labels most. In place; whether any did."""
    rows = _Rows.of(batches, data, bounds)
    done = [_exchange_row(batches, int(high), rows, bounds) for high in np.argsort(-rows.sums, kind="stable")]
    return any(done)


def _exchange_row(batches: list[Microbatch], high: int, rows: _Rows, bounds: RowBounds) -> bool:
    mine, theirs = np.flatnonzero(rows.batch == high)[:, None], np.flatnonzero(rows.batch != high)[None, :]
    moved = rows.labels[mine] - rows.labels[theirs]
    gain = 2 * moved * (rows.sums[high] - rows.sums[rows.batch[theirs]] - moved)
    good = gain > 0
    if bounds.multiple is not None:
        good &= _no_dearer(rows, mine, theirs, rows.length[theirs], rows.length[mine], bounds)
    if not good.any():
        return False
    i, j = divmod(int(np.argmax(np.where(good, gain, -1))), gain.shape[1])
    a, b = int(mine[i, 0]), int(theirs[0, j])
    low = int(rows.batch[b])
    one, other = batches[high], batches[low]
    one[rows.place[a]], other[rows.place[b]] = other[rows.place[b]], one[rows.place[a]]
    rows.sums[high] -= moved[i, j]
    rows.sums[low] += moved[i, j]
    for values in (rows.length, rows.labels):
        values[[a, b]] = values[[b, a]]
    rows.refresh(high, bounds)
    rows.refresh(low, bounds)
    return True


def _no_dearer(
    rows: _Rows, my_row: I64, their_row: I64, my_length: I64, their_length: I64, bounds: RowBounds
) -> npt.NDArray[np.bool_]:
    """(a, b) whether two microbatches need no more padded slots if those rows get these lengths."""
    here, there = _slots(rows, my_row, my_length, bounds), _slots(rows, their_row, their_length, bounds)
    mine, theirs = rows.slots[rows.batch[my_row]], rows.slots[rows.batch[their_row]]
    good: npt.NDArray[np.bool_] = here + there <= mine + theirs
    if bounds.keeps_peak:
        good &= np.maximum(here, there) <= np.maximum(mine, theirs)
    return good


def _slots(rows: _Rows, row: I64, length: I64, bounds: RowBounds) -> I64:
    """Padded slots of the microbatch of `row` if that row were `length` long."""
    assert bounds.multiple is not None
    longest = np.maximum(rows.others[row], length)
    out: I64 = rows.num_rows[row] * (-(-longest // bounds.multiple) * bounds.multiple)
    return out


@dataclass
class _Members:
    """The samples of a window. Arrays of shape (samples,)."""

    sample: I64
    row: I64  # number in `_Rows`
    index: I64  # within the row
    length: I64
    count: I64
    start: I64

    @classmethod
    def of(cls, batches: list[Microbatch], data: Labelled) -> _Members:
        rows = [row for batch in batches for row in batch]
        sample = np.array([s for row in rows for s in row], np.int64)
        number = np.array([r for r, row in enumerate(rows) for _ in row], np.int64)
        index = np.array([i for row in rows for i in range(len(row))], np.int64)
        return cls(sample, number, index, data.lengths[sample], data.counts[sample], data.starts[sample])


def exchange_samples(batches: list[Microbatch], data: Labelled, bounds: RowBounds) -> bool:
    """Each microbatch, the richest first, exchanges one sample where that evens labels most. In place; whether any did."""
    rows, members = _Rows.of(batches, data, bounds), _Members.of(batches, data)
    done = [
        _exchange_sample(batches, int(high), rows, members, bounds) for high in np.argsort(-rows.sums, kind="stable")
    ]
    return any(done)


def _exchange_sample(batches: list[Microbatch], high: int, rows: _Rows, members: _Members, bounds: RowBounds) -> bool:
    of_batch = rows.batch[members.row]
    mine = np.flatnonzero(of_batch == high)[:, None]
    theirs = np.flatnonzero((of_batch != high) & (rows.sums[of_batch] < rows.sums[high]))[None, :]
    if not theirs.size:
        return False
    moved, good = _label_moves(members, mine, theirs)
    gain = 2 * moved * (rows.sums[high] - rows.sums[of_batch[theirs]] - moved)
    good &= (gain > 0) & _fits(rows, members, mine, theirs, high, bounds)
    if not good.any():
        return False
    i, j = divmod(int(np.argmax(np.where(good, gain, -1))), gain.shape[1])
    a, b = int(mine[i, 0]), int(theirs[0, j])
    _swap_samples(batches, a, b, rows, members)
    low = int(of_batch[b])
    rows.sums[high] -= moved[i, j]
    rows.sums[low] += moved[i, j]
    rows.refresh(high, bounds)
    rows.refresh(low, bounds)
    return True


def _label_moves(members: _Members, mine: I64, theirs: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
    """(a, b) labels that the rich one loses, and whether the other gains just as many."""
    start = members.start[mine] - members.start[theirs]
    leads, they_lead = members.index[mine] == 0, members.index[theirs] == 0
    moved = members.count[mine] - members.count[theirs] - start * leads
    return moved, (start == 0) | (leads == they_lead)


def _fits(
    rows: _Rows, members: _Members, mine: I64, theirs: I64, high: int, bounds: RowBounds
) -> npt.NDArray[np.bool_]:
    """(a, b) whether both rows keep the capacity, and padding does not grow."""
    shift = members.length[mine] - members.length[theirs]
    my_row, their_row = members.row[mine], members.row[theirs]
    here, there = rows.length[my_row] - shift, rows.length[their_row] + shift
    longest = _ENDLESS if bounds.capacity is None else bounds.capacity
    good: npt.NDArray[np.bool_] = (here <= longest) & (there <= longest)
    if bounds.multiple is not None:
        good &= _no_dearer(rows, my_row, their_row, here, there, bounds)
    return good


def _swap_samples(batches: list[Microbatch], a: int, b: int, rows: _Rows, members: _Members) -> None:
    shift = int(members.length[a] - members.length[b])
    for place, number, sign in ((a, b, -1), (b, a, 1)):
        row = int(members.row[place])
        batches[rows.batch[row]][rows.place[row]][members.index[place]] = int(members.sample[number])
        rows.length[row] += sign * shift
    for values in (members.sample, members.length, members.count, members.start):
        values[[a, b]] = values[[b, a]]


def exchange_twos(batches: list[Microbatch], data: Labelled, bounds: RowBounds) -> bool:
    """Poor and rich microbatches, pair by pair inwards, exchange two samples for two. In place; whether any did.

    In rows that are full to the last token two lengths rarely match; of two sums of two there are many more.
    """
    rows = _Rows.of(batches, data, bounds)
    order = np.argsort(rows.sums, kind="stable").tolist()
    pairs = zip(order[: len(order) // 2], order[::-1], strict=False)
    return any([_exchange_twos(batches, low, high, rows, data, bounds) for low, high in pairs])


def _exchange_twos(
    batches: list[Microbatch], low: int, high: int, rows: _Rows, data: Labelled, bounds: RowBounds
) -> bool:
    mine = np.flatnonzero(rows.batch == high)
    theirs = np.flatnonzero(rows.batch == low)
    a, b = int(mine[np.argmax(rows.labels[mine])]), int(theirs[np.argmin(rows.labels[theirs])])
    one, other = batches[high][rows.place[a]], batches[low][rows.place[b]]
    first, second = _twos(one, -data.counts, data), _twos(other, data.counts, data)
    moved = data.counts[first].sum(axis=0)[:, None] - data.counts[second].sum(axis=0)[None, :]
    shift = data.lengths[first].sum(axis=0)[:, None] - data.lengths[second].sum(axis=0)[None, :]
    gain = 2 * moved * (rows.sums[high] - rows.sums[low] - moved)
    here, there = rows.length[a] - shift, rows.length[b] + shift
    longest = _ENDLESS if bounds.capacity is None else bounds.capacity
    good = (gain > 0) & (here <= longest) & (there <= longest)
    if bounds.multiple is not None:
        good &= _no_dearer(rows, np.array(a), np.array(b), here, there, bounds)
    if not good.any():
        return False
    i, j = divmod(int(np.argmax(np.where(good, gain, -1))), gain.shape[1])
    for x, y in zip(first[:, i].tolist(), second[:, j].tolist(), strict=True):
        at, to = one.index(x), other.index(y)
        one[at], other[to] = other[to], one[at]
    for row, batch, sign in ((a, high, -1), (b, low, 1)):
        rows.sums[batch] += sign * moved[i, j]
        rows.labels[row] += sign * moved[i, j]
        rows.length[row] += sign * shift[i, j]
        rows.refresh(batch, bounds)
    return True


def _twos(row: list[int], key: I64, data: Labelled) -> I64:
    """(2, k) all pairs of up to 20 samples of a row. Only samples without a start: their place in a row is free."""
    samples = np.array(row, np.int64)
    movable = samples[data.starts[samples] == 0]
    movable = movable[np.argsort(key[movable], kind="stable")[:_TWOS_OF]]
    pairs: I64 = movable[np.array(np.triu_indices(len(movable), 1))]
    return pairs
