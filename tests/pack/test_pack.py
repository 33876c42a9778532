"""Rows of fixed capacity: nothing lost, no bound broken, and as full as the figures in docs/packing.md say."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb.errors import ConfigError
from odb.plan import pack
from odb.plan.pack import Bounds


def lognormal(n: int, mean: float = 600, cv: float = 0.8, seed: int = 0) -> np.ndarray:
    s = np.sqrt(np.log(1 + cv * cv))
    return np.maximum(1, np.random.default_rng(seed).lognormal(np.log(mean) - s * s / 2, s, n)).astype(np.int64)


def check(rows: list, sizes: np.ndarray, bounds: Bounds, weights: np.ndarray | None = None) -> None:
    flat = np.concatenate(rows).tolist() if rows else []
    assert sorted(flat) == list(range(len(sizes)))
    for row in rows:
        assert len(row)
        if len(row) > 1:
            assert sizes[row].sum() <= bounds.capacity
            assert bounds.max_items is None or len(row) <= bounds.max_items
            assert bounds.max_weight is None or weights is None or weights[row].sum() <= bounds.max_weight


def slow_first_fit(order: list[int], sizes: np.ndarray, bounds: Bounds, weights: np.ndarray) -> list[list[int]]:
    """The definition: each sample into the first row that can take it."""
    rows: list[list[int]] = []
    for one in order:
        for row in rows:
            too_many = bounds.max_items is not None and len(row) >= bounds.max_items
            heavy = bounds.max_weight is not None and weights[row].sum() + weights[one] > bounds.max_weight
            if not too_many and not heavy and sizes[row].sum() + sizes[one] <= bounds.capacity:
                row.append(one)
                break
        else:
            rows.append([one])
    return rows


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=40),
    st.integers(1, 60),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 1, 9]),
)
def test_first_fit_decreasing_is_what_its_name_says(
    items: list[tuple[int, int]], capacity: int, most: int | None, heaviest: int | None
) -> None:
    sizes, weights = (np.array(column) for column in zip(*items, strict=True))
    bounds = Bounds(capacity, most, heaviest)
    rows = pack.first_fit_decreasing(sizes, bounds, weights)
    check(rows, sizes, bounds, weights)
    order = np.argsort(-sizes, kind="stable").tolist()
    assert [row.tolist() for row in rows] == slow_first_fit(order, sizes, bounds, weights)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 60),
    st.sampled_from([None, 3]),
    st.sampled_from([None, 9]),
)
def test_urgent_samples_lie_in_the_first_rows(
    items: list[tuple[int, int, bool]], capacity: int, most: int | None, heaviest: int | None
) -> None:
    sizes, weights, urgent = (np.array(column) for column in zip(*items, strict=True))
    bounds = Bounds(capacity, most, heaviest)
    rows = pack.first_fit_decreasing(sizes, bounds, weights, urgent)
    check(rows, sizes, bounds, weights)
    with_urgent = [bool(urgent[row].any()) for row in rows]
    assert with_urgent == sorted(with_urgent, reverse=True)
    alone = pack.first_fit_decreasing(sizes[urgent], bounds, weights[urgent])
    assert sum(with_urgent) == len(alone)


@pytest.mark.parametrize(("capacity", "rows"), [(8, 2), (9, 2), (16, 1), (17, 1)])
def test_odd_capacities_pack_like_even_ones(capacity: int, rows: int) -> None:
    assert len(pack.first_fit_decreasing(np.full(4, 4), Bounds(capacity))) == rows


@pytest.mark.parametrize(("capacity", "offline", "online"), [(16384, 0.999, 0.998), (4096, 0.999, 0.996)])
def test_fill_of_50_000_lognormal_lengths(capacity: int, offline: float, online: float) -> None:
    sizes = np.minimum(lognormal(50_000), capacity)
    bounds = Bounds(capacity)
    for least, rows in (
        (offline, pack.first_fit_decreasing(sizes, bounds)),
        (online, list(pack.windowed(sizes, bounds, 256))),
    ):
        check(rows, sizes, bounds)
        assert sizes.sum() / (len(rows) * capacity) >= least


def test_a_million_lengths_take_seconds() -> None:
    sizes = np.minimum(lognormal(1_000_000), 16384)
    start = time.process_time()
    rows = pack.first_fit_decreasing(sizes, Bounds(16384))
    assert time.process_time() - start < 10
    assert sum(map(len, rows)) == len(sizes)


@settings(max_examples=80)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(1, 60), st.integers(1, 20), st.integers(1, 4))
def test_windows_lose_nothing_and_nobody_waits_for_ever(
    items: list[int], capacity: int, window: int, max_age: int
) -> None:
    sizes, bounds = np.array(items), Bounds(capacity)
    rows = list(pack.windowed(sizes, bounds, window, max_age=max_age))
    check(rows, sizes, bounds)
    # What is held never exceeds the window by more than the one sample that keeps it moving.
    held, drawn, waited = set(), 0, 0
    for row in rows:
        while not set(row.tolist()) <= held:
            held.add(drawn)
            drawn += 1
        assert len(held) <= window
        held -= set(row.tolist())
        waited = max(waited, drawn - int(row.min()))
    assert waited <= (max_age + 1) * window


def test_a_hard_window_still_lets_the_odd_sample_go() -> None:
    sizes = np.array([51] + [50] * 400)  # 51 never shares a row of 100 with 50: it would wait for ever
    rows = list(pack.windowed(sizes, Bounds(100), window=8, max_age=3))
    place = next(number for number, row in enumerate(rows) if 0 in row.tolist())
    assert place <= 4 * 4


@settings(max_examples=80)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 60), st.sampled_from([None, 2, 5]))
def test_next_fit_keeps_the_order_and_cuts_least(items: list[int], capacity: int, most: int | None) -> None:
    sizes, bounds = np.array(items), Bounds(capacity, most)
    ends = pack.next_fit(sizes, bounds)
    starts = [0, *ends[:-1]]
    check([np.arange(a, b) for a, b in zip(starts, ends, strict=True)], sizes, bounds)
    fewest = [0] + [10**9] * len(items)
    for end in range(1, len(items) + 1):
        for start in range(end):
            fits = sizes[start:end].sum() <= capacity and (most is None or end - start <= most)
            if fits or end - start == 1:
                fewest[end] = min(fewest[end], fewest[start] + 1)
    assert len(ends) == fewest[-1]


def test_rows_survive_being_written_as_a_flat_list() -> None:
    sizes, bounds = lognormal(400, mean=60), Bounds(512)
    rows = pack.first_fit_decreasing(sizes, bounds)
    for start in range(0, len(rows), 3):
        group = rows[start : start + 3]
        assert len(pack.next_fit(sizes[np.concatenate(group)], bounds)) <= len(group)


@settings(max_examples=120)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=30),
    st.integers(1, 60),
    st.sampled_from([None, 3]),
    st.sampled_from([None, 9]),
    st.data(),
)
def test_exactly_as_many_rows_as_asked_for(
    items: list[tuple[int, int]], capacity: int, most: int | None, heaviest: int | None, data: st.DataObject
) -> None:
    sizes, weights = (np.array(column) for column in zip(*items, strict=True))
    bounds = Bounds(capacity, most, heaviest)
    least = len(pack.first_fit_decreasing(sizes, bounds, weights))
    number = data.draw(st.integers(least, len(items)))
    rows = pack.exactly(sizes, number, bounds, weights)
    assert len(rows) == number
    check(rows, sizes, bounds, weights)


def test_exactly_shares_out_evenly() -> None:
    sizes = lognormal(300, mean=100)
    rows = pack.exactly(sizes, 40, Bounds(4096))
    sums = np.array([sizes[row].sum() for row in rows])
    assert sums.max() <= 1.01 * sums.mean()


def test_only_the_last_row_may_be_incomplete() -> None:
    sizes = np.array([10] * 5)
    rows = pack.first_fit_decreasing(sizes, Bounds(20))
    assert [len(row) for row in rows] == [2, 2, 1]
    assert pack.num_complete(rows, sizes, Bounds(20)) == 2
    assert pack.num_complete(rows, sizes, Bounds(19)) == 3
    assert pack.num_complete([], sizes, Bounds(20)) == 0
    assert pack.num_complete([np.array([0])], sizes, Bounds(20, max_items=1)) == 1


@pytest.mark.parametrize(
    "bounds", [{"capacity": 0}, {"capacity": 4, "max_items": 0}, {"capacity": 4, "max_weight": -1}]
)
def test_bounds_below_one_are_refused(bounds: dict) -> None:
    with pytest.raises(ConfigError, match=r"must be >= 1"):
        Bounds(**bounds)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"window and max_age must be >= 1, got window=0"):
        list(pack.windowed(np.array([1]), Bounds(4), 0))
