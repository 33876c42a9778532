"""The packed layout: whole samples in rows of fixed capacity (multipack), rows in groups.

First-fit decreasing: the samples, longest first, each go into the first row with room. Filled row by row, that is: as
long as anything fits, take the longest sample that does. With the samples in buckets by size, each step is a look-up in
a sorted list, so a million samples take seconds. Its bound, 11/9 of the fewest rows, is far from what real lengths give
(docs/packing.md); what a window fills badly waits for the next one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from odb.errors import ConfigError
from odb.plan.types import I64

Bools = npt.NDArray[np.bool_]

_ENDLESS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a row may hold. `weights` in the functions below are a second resource, vision patches say."""

    capacity: int  # sum of sizes
    max_items: int | None = None
    max_weight: int | None = None

    def __post_init__(self) -> None:
        for name in ("capacity", "max_items", "max_weight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")


def first_fit_decreasing(
    sizes: I64, bounds: Bounds, weights: I64 | None = None, urgent: Bools | None = None
) -> list[I64]:
    """Rows that hold every sample once, in the order in which they are opened.

    Args:
        sizes: (n,) tokens (or cost) of each sample, >= 1.
        bounds: of a row. A sample that breaks one by itself gets a row of its own.
        weights: (n,) the second resource; only looked at where `bounds.max_weight` is given.
        urgent: (n,) bool: samples that open the first rows; the others fill up what room these leave.

    Returns:
        Positions in `sizes` of each row's samples, the longest first (urgent ones before others); of equal ones the
        earlier first.
    """
    if urgent is not None and urgent.any() and not urgent.all():
        first, rest = np.flatnonzero(urgent), np.flatnonzero(~urgent)
        begun = [first[row] for row in _rows(sizes[first], bounds, weights if weights is None else weights[first], [])]
        return _continued(begun, rest, sizes, bounds, weights)
    return _rows(sizes, bounds, weights, [])


def _continued(begun: list[I64], rest: I64, sizes: I64, bounds: Bounds, weights: I64 | None) -> list[I64]:
    """`begun` rows filled up with samples of `rest`, then rows of what is left of them."""
    loads = [0 if weights is None else int(weights[row].sum()) for row in begun]
    left = [
        _Left(
            bounds.capacity - int(sizes[row].sum()),
            (bounds.max_items or _ENDLESS) - len(row),
            (bounds.max_weight or _ENDLESS) - load,
        )
        for row, load in zip(begun, loads, strict=True)
    ]
    rows = [rest[row] for row in _rows(sizes[rest], bounds, weights if weights is None else weights[rest], left)]
    filled = [np.concatenate([row, more]) for row, more in zip(begun, rows, strict=False)]
    return filled + rows[len(begun) :]


class _Left(NamedTuple):
    """What a row can still take."""

    room: int
    slots: int
    load: int


def _rows(sizes: I64, bounds: Bounds, weights: I64 | None, begun: list[_Left]) -> list[I64]:
    """What `begun` rows take more (each may take nothing), followed by new rows; positions in `sizes`."""
    order = np.argsort(-sizes, kind="stable")
    if bounds.max_weight is not None and weights is not None:
        flat, ends = _fill_scanning(sizes[order].tolist(), weights[order].tolist(), bounds, begun)
    else:
        flat, ends = _fill_by_size(sizes[order], bounds, begun)
    placed = order[np.array(flat, np.int64)]
    return [placed[a:b] for a, b in pairwise([0, *ends])]


def _fill_by_size(descending: I64, bounds: Bounds, begun: list[_Left]) -> tuple[list[int], list[int]]:
    """Rows as (flat places in `descending`, ends): takes the largest size that fits, as often as it does."""
    # Buckets in ascending order; bucket b's samples are at [start[b], start[b] + left[b]).
    values, first, number = np.unique(descending, return_index=True, return_counts=True)
    size, start, left = values.tolist(), first.tolist(), number.tolist()
    below = list(range(len(size)))  # below[b]: a bucket <= b; followed to a fixed point, the next one with samples
    fresh = _Left(bounds.capacity, bounds.max_items or _ENDLESS, 0)
    flat: list[int] = []
    ends: list[int] = []
    top = len(size) - 1
    while top >= 0 or len(ends) < len(begun):
        is_fresh = len(ends) >= len(begun)
        room, slots, _ = fresh if is_fresh else begun[len(ends)]
        if is_fresh:
            room = max(room, size[top])  # what is too large for any row has one to itself
        bucket = _with_samples(below, min(top, bisect_right(size, room) - 1))
        while bucket >= 0 and slots:
            take = min(left[bucket], slots, room // size[bucket])
            flat.extend(range(start[bucket], start[bucket] + take))
            start[bucket] += take
            left[bucket] -= take
            room -= take * size[bucket]
            slots -= take
            if not left[bucket]:
                below[bucket] = bucket - 1
            bucket = _with_samples(below, min(bucket, bisect_right(size, room) - 1))
        ends.append(len(flat))
        top = _with_samples(below, top)
    return flat, ends


def _with_samples(below: list[int], bucket: int) -> int:
    """The largest bucket up to `bucket` that holds samples, -1 if none; shortens the way for the next search."""
    root = bucket
    while root >= 0 and below[root] != root:
        root = below[root]
    while bucket >= 0 and bucket != root:
        below[bucket], bucket = root, below[bucket]
    return root


def _fill_scanning(
    sizes: list[int], weights: list[int], bounds: Bounds, begun: list[_Left]
) -> tuple[list[int], list[int]]:
    """The same with two resources: each row looks through all that is left, so time grows with samples x rows."""
    waiting = list(range(len(sizes)))
    fresh = _Left(bounds.capacity, bounds.max_items or _ENDLESS, bounds.max_weight or _ENDLESS)
    flat: list[int] = []
    ends: list[int] = []
    while waiting or len(ends) < len(begun):
        is_empty = len(ends) >= len(begun)
        room, slots, load = fresh if is_empty else begun[len(ends)]
        rest = []
        for place in waiting:
            if is_empty or (sizes[place] <= room and weights[place] <= load and slots):
                flat.append(place)
                room, load, slots, is_empty = room - sizes[place], load - weights[place], slots - 1, False
            else:
                rest.append(place)
        ends.append(len(flat))
        waiting = rest
    return flat, ends


def next_fit(sizes: I64, bounds: Bounds) -> list[int]:
    """Ends of rows that keep the order: a row closes when the next sample does not fit. No order-keeping cut needs fewer.

    This is how a flat list of samples stands for rows: whatever rows it was made of, cutting it again gives no more.
    """
    ends: list[int] = []
    room, slots = 0, 0
    for place, size in enumerate(sizes.tolist()):
        if place and (size > room or not slots):
            ends.append(place)
        if not place or size > room or not slots:
            room, slots = bounds.capacity, bounds.max_items or _ENDLESS
        room, slots = room - size, slots - 1
    return [*ends, len(sizes)] if len(sizes) else []


def evenly(sizes: I64, num_bins: int, max_items: int | None = None) -> list[I64]:
    """`num_bins` non-empty bins of about equal sums: the longest first, each to the lightest bin with a free place.

    Needs `num_bins` <= n (<= num_bins * max_items). The largest sum is at most 4/3 of the smallest possible without
    `max_items` (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    assert num_bins <= len(sizes) <= num_bins * (max_items or _ENDLESS), (num_bins, len(sizes), max_items)
    heap = [(0, number) for number in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    order = np.argsort(-sizes, kind="stable").tolist()
    size = sizes.tolist()
    for place in order:
        total, number = heapq.heappop(heap)
        bins[number].append(place)
        if max_items is None or len(bins[number]) < max_items:
            heapq.heappush(heap, (total + size[place], number))
    return [np.array(one, np.int64) for one in bins]


def halved(bins: list[I64], sizes: I64, num_bins: int) -> list[I64]:
    """More bins of the same samples: the fullest with two or more is cut in two of about equal sums, until there are enough.

    Needs `num_bins` <= n. Keeps every bound, as a part of a row never holds more than the row.
    """
    heap = [(-int(sizes[one].sum()), number, one) for number, one in enumerate(bins) if len(one) > 1]
    heapq.heapify(heap)
    out = {number: one for number, one in enumerate(bins)}
    while len(out) < num_bins:
        _, number, one = heapq.heappop(heap)
        halves = [one[half] for half in evenly(sizes[one], 2)]
        for key, half in zip((number, len(out)), halves, strict=True):
            out[key] = half
            if len(half) > 1:
                heapq.heappush(heap, (-int(sizes[half].sum()), key, half))
    return list(out.values())


def exactly(sizes: I64, num_bins: int, bounds: Bounds, weights: I64 | None = None) -> list[I64]:
    """Exactly `num_bins` non-empty rows of about equal sums; needs rows of `first_fit_decreasing` <= `num_bins` <= n."""
    rows = first_fit_decreasing(sizes, bounds, weights)
    assert len(rows) <= num_bins <= len(sizes), (len(rows), num_bins, len(sizes))
    if len(rows) == num_bins:
        return rows
    return evenly_within(sizes, num_bins, bounds, weights) or halved(rows, sizes, num_bins)


def evenly_within(sizes: I64, num_bins: int, bounds: Bounds, weights: I64 | None = None) -> list[I64] | None:
    """`evenly`, None where that breaks a bound."""
    if bounds.max_items is not None and len(sizes) > num_bins * bounds.max_items:
        return None
    even = evenly(sizes, num_bins, bounds.max_items)
    return even if all(_keeps(one, sizes, bounds, weights) for one in even) else None


def _keeps(one: I64, sizes: I64, bounds: Bounds, weights: I64 | None) -> bool:
    if len(one) < 2:
        return True
    light = bounds.max_weight is None or weights is None or int(weights[one].sum()) <= bounds.max_weight
    return light and int(sizes[one].sum()) <= bounds.capacity


def num_complete(rows: list[I64], sizes: I64, bounds: Bounds) -> int:
    """How many of the rows of `first_fit_decreasing` are closed by a bound: all but the last, and that one if it is full.

    What opened a later row did not fit into any before. The last one is full if it can't take its shortest sample again.
    """
    if not rows:
        return 0
    last = sizes[rows[-1]]
    is_full = last.sum() + last.min() > bounds.capacity or len(last) == bounds.max_items
    return len(rows) - (not is_full)


def windowed(sizes: I64, bounds: Bounds, window: int, least_fill: float = 0.995, max_age: int = 4) -> Iterator[I64]:
    """Rows of samples that arrive in order, of which `window` are seen at a time. Yields positions of each row.

    Of a window the rows filled to `least_fill` leave, at least one; the other samples wait in the next window. Samples
    that have waited `max_age` times are placed first and their rows leave in any case, so that none waits for ever.
    """
    if window < 1 or max_age < 1:
        raise ConfigError(f"window and max_age must be >= 1, got window={window}, max_age={max_age}")
    held, age, drawn = np.empty(0, np.int64), np.empty(0, np.int64), 0
    while drawn < len(sizes) or len(held):
        new = np.arange(drawn, min(len(sizes), drawn + max(1, window - len(held))))
        drawn += len(new)
        held, age = np.concatenate([held, new]), np.concatenate([age, np.zeros(len(new), np.int64)])
        late = age >= max_age
        rows = first_fit_decreasing(sizes[held], bounds, urgent=late)
        leaving = rows if drawn == len(sizes) else _worth_emitting(rows, sizes[held], late, bounds, least_fill)
        yield from (held[row] for row in leaving)
        stays = np.ones(len(held), np.bool_)
        stays[np.concatenate(leaving)] = False
        held, age = held[stays], age[stays] + 1


def _worth_emitting(rows: list[I64], sizes: I64, late: Bools, bounds: Bounds, least_fill: float) -> list[I64]:
    """The rows that leave: those with an overdue sample and the well filled ones; else the fullest."""
    fill = np.array([sizes[row].sum() for row in rows]) / bounds.capacity
    goes = fill >= min(least_fill, fill.max())
    if bounds.max_items is not None:
        goes |= np.array([len(row) == bounds.max_items for row in rows])
    goes |= np.array([late[row].any() for row in rows])
    return [row for row, one in zip(rows, goes, strict=True) if one]
