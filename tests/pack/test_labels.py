"""Balancing of supervised tokens: like totals, and nothing else gets worse."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb.errors import ConfigError
from odb.plan import labels, pack
from odb.plan.accumulate import order_by_rank, order_updates
from odb.plan.fixed_count import balance_flattened, balance_padded
from odb.plan.label_search import balance_windows
from odb.plan.labels import Labelled, RowBounds, count_labels, summary, totals
from odb.plan.refine import refine

Plan = list[list[list[int]]]


def samples_of(plan: Plan) -> list[int]:
    return sorted(chain.from_iterable(chain.from_iterable(plan)))


def squares(values: Any) -> int:
    return int((np.asarray(values) ** 2).sum())


def variance(values: Any) -> float:
    return float(np.var(np.asarray(values, np.float64))) if len(values) else 0.0


def balanced(plan: Plan, data: Labelled, bounds: RowBounds, seed: int = 0) -> Plan:
    return balance_windows(plan, data, bounds, np.random.default_rng(seed))


def test_swapping_two_samples_evens_two_rows() -> None:
    data = Labelled.of([4] * 4, [3, 3, 1, 1])
    out = balanced([[[0, 1]], [[2, 3]]], data, RowBounds(8))
    assert totals(out, data).tolist() == [4, 4]


def test_whole_rows_are_regrouped() -> None:
    data = Labelled.of([8] * 4, [7, 7, 1, 1])
    out = balanced([[[0], [1]], [[2], [3]]], data, RowBounds(8))
    assert totals(out, data).tolist() == [8, 8]


@pytest.mark.parametrize(("most", "sums", "sizes"), [(8, [3, 4], [2, 4]), (3, None, [3, 3])])
def test_a_pair_is_repacked_where_no_swap_helps(most: int, sums: list[int] | None, sizes: list[int]) -> None:
    data = Labelled.of([2, 1, 3, 5, 1, 1], [1, 1, 3, 0, 1, 1])
    plan = [[[0, 1, 2]], [[3, 4, 5]]]
    out = balanced(plan, data, RowBounds(8, max_samples=most))
    assert samples_of(out) == list(range(6))
    assert sorted(len(row) for batch in out for row in batch) == sizes
    assert sums is None or sorted(totals(out, data).tolist()) == sums


@pytest.mark.parametrize(("multiple", "sums", "lengths"), [(4, [0, 8], [4, 8]), (None, None, [6, 6])])
def test_padding_never_grows_where_it_counts(multiple: int | None, sums: list[int] | None, lengths: list[int]) -> None:
    data = Labelled.of([6, 2, 4], [6, 2, 0])
    out = balanced([[[0, 1]], [[2]]], data, RowBounds(8, multiple=multiple))
    assert sorted(labels.tokens(batch, data) for batch in out) == lengths
    assert sums is None or sorted(totals(out, data).tolist()) == sums


def test_labels_are_counted_with_their_start() -> None:
    assert [count_labels(one) for one in ([1, -100, 2], [-100, 3], [4, 5], [])] == [(2, 1), (1, 0), (2, 1), (0, 0)]
    assert count_labels([1, -100, 2], label_shift=False) == (2, 0)
    with pytest.raises(ConfigError, match=r"one list of numbers"):
        count_labels([[1, 2], [3, 4]])  # type: ignore[list-item]


def test_c10_labels_come_out_even() -> None:
    data = Labelled.of([10] * 4, [9, 1, 9, 1])
    for batches in (np.array([[0, 2], [1, 3]]),):
        padded = balance_padded(batches, data.lengths, data.counts)
        assert sorted(padded.ravel().tolist()) == [0, 1, 2, 3]
        assert data.counts[padded].sum(axis=1).tolist() == [10, 10]
        flat = balance_flattened(batches, data.lengths, data.counts)
        assert data.counts[flat].sum(axis=1).tolist() == [10, 10]


@st.composite
def plans(draw: Any) -> tuple[Plan, Labelled, RowBounds]:
    """Packed rows of random samples, one to three a microbatch."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    capacity = draw(st.integers(10, 60))
    number = draw(st.integers(1, 90))
    lengths = rng.integers(1, capacity // 2 + 1, number)
    counts = rng.integers(0, lengths + 1)
    starts = np.minimum(rng.integers(0, 2, number), counts) * draw(st.integers(0, 1))
    most = draw(st.sampled_from([None, 4]))
    rows = [row.tolist() for row in pack.first_fit_decreasing(lengths, pack.Bounds(capacity, most))]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    size = draw(st.integers(1, 3))
    plan = [rows[i : i + size] for i in range(0, len(rows) // size * size, size)]
    multiple = draw(st.sampled_from([None, 1, 4]))
    return plan, Labelled.of(lengths, counts, starts), RowBounds(capacity, most, multiple)


def check_rows(plan: Plan, data: Labelled, bounds: RowBounds) -> None:
    for row in chain.from_iterable(plan):
        assert row and data.lengths[row].sum() <= bounds.capacity
        assert bounds.max_samples is None or len(row) <= bounds.max_samples


def all_slots(plan: Plan, data: Labelled, bounds: RowBounds) -> int:
    return sum(labels.slots(batch, data, bounds) for batch in plan)


@settings(max_examples=120)
@given(plans(), st.integers(2, 12))
def test_windows_improve_labels_and_worsen_nothing(case: tuple[Plan, Labelled, RowBounds], window: int) -> None:
    plan, data, bounds = case
    out = balance_windows(plan, data, bounds, np.random.default_rng(0), window)
    assert samples_of(out) == samples_of(plan)
    assert sorted(map(len, out)) == sorted(map(len, plan))
    check_rows(out, data, bounds)
    assert totals(out, data).sum() == totals(plan, data).sum()
    for start in range(0, len(plan), window):
        part = slice(start, start + window)
        assert samples_of(out[part]) == samples_of(plan[part])
        assert squares(totals(out[part], data)) <= squares(totals(plan[part], data))
        if bounds.multiple is not None:
            assert all_slots(out[part], data, bounds) <= all_slots(plan[part], data, bounds)
    assert out == balance_windows(plan, data, bounds, np.random.default_rng(0), window)


@settings(max_examples=120)
@given(plans(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]))
def test_refinement_keeps_updates_and_worsens_nothing(
    case: tuple[Plan, Labelled, RowBounds], width: int, window: int
) -> None:
    plan, data, bounds = case
    out = refine(plan, data, bounds, width, window)
    size = width * window
    covered = len(plan) // size * size if size > 1 else 0
    assert out[covered:] == plan[covered:]
    check_rows(out, data, bounds)
    assert [[len(row) for row in batch] for batch in out] == [[len(row) for row in batch] for batch in plan]
    cost = [[labels.slots(batch, data, bounds) for batch in p] for p in (plan, out)]
    token = [[labels.tokens(batch, data) for batch in p] for p in (plan, out)]
    label = [totals(p, data).tolist() for p in (plan, out)]
    assert variance(cost[1][:covered]) <= variance(cost[0][:covered]) + 1e-9
    assert sum(cost[1]) <= sum(cost[0])
    for start in range(0, covered, size):
        part = slice(start, start + size)
        assert samples_of(out[part]) == samples_of(plan[part])
        assert sum(label[1][part]) == sum(label[0][part])
        assert max(cost[1][part]) <= max(cost[0][part])
        for one in (cost, token, label):
            by_update = [np.array(values[part]).reshape(window, width).sum(axis=1) for values in one]
            assert one is cost or variance(by_update[1]) <= variance(by_update[0]) + 1e-9
            assert variance(one[1][part]) <= variance(one[0][part]) + 1e-9


def test_a_wider_window_exchanges_across_updates() -> None:
    data = Labelled.of([9, 9, 1, 1, 8], [9, 9, 1, 1, 8])
    plan = [[[0, 1]], [[2, 3]], [[4]]]
    bounds = RowBounds(18, multiple=1)
    assert refine(plan, data, bounds, 1, 1) == plan
    out = refine(plan, data, bounds, 1, 2)
    assert totals(out, data).tolist() == [10, 10, 8]
    assert out[2] == [[4]]


@settings(max_examples=80)
@given(st.lists(st.integers(0, 50), max_size=90), st.integers(1, 5))
def test_updates_hold_like_labels(items: list[int], width: int) -> None:
    label = np.array(items, np.int64)
    order = order_updates(label, width)
    assert sorted(order.tolist()) == list(range(len(items)))
    covered = len(items) // width * width
    assert order[covered:].tolist() == list(range(covered, len(items)))
    for start in range(0, covered, 16 * width):
        part = slice(start, min(covered, start + 16 * width))
        before, after = label[part].reshape(-1, width).sum(axis=1), label[order[part]].reshape(-1, width).sum(axis=1)
        assert squares(after) <= squares(before)
        assert (squares(after) < squares(before)) or (order[part] == np.arange(part.start, part.stop)).all()


def test_updates_are_evened_exactly_where_they_can_be() -> None:
    label = np.array([9, 9, 1, 1])
    order = order_updates(label, 2)
    assert label[order].reshape(2, 2).sum(axis=1).tolist() == [10, 10]


def jumps(costs: np.ndarray) -> float:
    """The worst rank's squared size changes; `costs` (steps, ranks)."""
    return float((np.diff(costs, axis=0) ** 2).sum(axis=0).max(initial=0.0))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rank_order_keeps_updates_and_what_runs_together(data: st.DataObject) -> None:
    world, accum = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    number = data.draw(st.integers(0, 6))
    width = world * accum
    costs = np.array(data.draw(st.lists(st.integers(0, 100), min_size=number * width, max_size=number * width)), float)
    order = order_by_rank(costs, world, accum)
    assert (order == order_by_rank(costs, world, accum)).all()
    for start in range(0, len(costs), width):
        part = slice(start, start + width)
        assert sorted(order[part].tolist()) == list(range(start, start + width))
        before, after = (values[part].reshape(accum, world) for values in (costs, costs[order]))
        assert after.max(axis=1).sum() <= before.max(axis=1).sum() + 1e-5
        spread = [((one - one.mean(axis=1, keepdims=True)) ** 2).sum() for one in (before, after)]
        assert spread[1] <= spread[0] + 1e-5


def test_rank_order_smooths_the_sizes_of_each_rank() -> None:
    rng = np.random.default_rng(0)
    costs = rng.integers(100, 1000, 4 * 2 * 40).astype(float)
    order = order_by_rank(costs, 4, 2)
    assert jumps(costs[order].reshape(-1, 4)) < 0.7 * jumps(costs.reshape(-1, 4))


def test_many_ranks_are_searched_in_bounded_time() -> None:
    costs = np.random.default_rng(0).integers(1, 1000, 64 * 2 * 20).astype(float)
    order = order_by_rank(costs, 64, 2)
    assert jumps(costs[order].reshape(-1, 64)) < jumps(costs.reshape(-1, 64))


@pytest.mark.parametrize(
    ("costs", "world", "accum"),
    [([1.0], 0, 1), ([1.0], True, 1), ([1.0, 2.0, 3.0], 2, 1), ([[1.0, 2.0]], 1, 1), ([np.nan], 1, 1), ([-1.0], 1, 1)],
)
def test_rank_order_refuses_what_makes_no_sense(costs: Any, world: int, accum: int) -> None:
    with pytest.raises(ConfigError):
        order_by_rank(costs, world, accum)
    assert order_by_rank([], 2, 2).tolist() == []


@settings(max_examples=80)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 70), st.sampled_from([1, 8]))
def test_fixed_counts_worsen_nothing(seed: int, size: int, number: int, multiple: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(4, 0.8, size * number)).astype(np.int64)
    counts = rng.integers(0, lengths + 1)
    batches = rng.permutation(size * number).reshape(number, size)
    padded = balance_padded(batches, lengths, counts, multiple)
    flat = balance_flattened(batches, lengths, counts)
    rounded = -(-lengths // multiple) * multiple
    costs = {"padded": lambda b: size * rounded[b].max(axis=1), "flat": lambda b: lengths[b].sum(axis=1)}
    for name, out in (("padded", padded), ("flat", flat)):
        cost = costs[name]
        assert sorted(out.ravel().tolist()) == list(range(size * number))
        assert out.shape == batches.shape
        assert squares(counts[out].sum(axis=1)) <= squares(counts[batches].sum(axis=1))
        assert variance(cost(out)) <= variance(cost(batches)) + 1e-9
        assert cost(out).sum() <= cost(batches).sum()
        assert cost(out).max() <= cost(batches).max()


def test_fixed_counts_improve_labels_and_sizes() -> None:
    rng = np.random.default_rng(1)
    lengths = np.maximum(1, rng.lognormal(6, 0.8, 256)).astype(np.int64)
    counts = (lengths * rng.beta(0.8, 1.6, 256)).astype(np.int64)
    batches = np.arange(256).reshape(64, 4)
    padded = balance_padded(batches, lengths, counts)
    assert counts[padded].sum(axis=1).std() < 0.7 * counts[batches].sum(axis=1).std()
    assert lengths[padded].max(axis=1).sum() < lengths[batches].max(axis=1).sum()
    flat = balance_flattened(batches, lengths, counts)
    # Four samples a batch, one of them often longer than three others: more passes would not get much further.
    assert counts[flat].sum(axis=1).std() < 0.55 * counts[batches].sum(axis=1).std()
    assert lengths[flat].sum(axis=1).std() < 0.55 * lengths[batches].sum(axis=1).std()


@pytest.mark.parametrize(
    ("lengths", "counts", "starts", "text"),
    [
        ([4, 4], [1], None, "one length, label count and start per sample"),
        ([4, 0], [1, 0], None, "lengths must be >= 1; sample 1 has 0"),
        ([4, 4], [1, 5], None, "label counts must be from 0 to the length; sample 1 has 5"),
        ([4, 4], [1, -1], None, "label counts must be from 0"),
        ([4, 4], [1.0, 2.0], None, "label counts must be a list of integers"),
        ([4, 4], [0, 2], [1, 0], "starts must be 0 or 1 and at most the label count; sample 0 has 1"),
        ([4, 4], [1, 2], [2, 0], "starts must be 0 or 1"),
        ([4, 99], [1, 2], None, "at most the capacity 8"),
    ],
)
def test_wrong_metadata_is_named(lengths: Any, counts: Any, starts: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Labelled.of(lengths, counts, starts, capacity=8)


def test_the_summary_says_what_the_plan_is_like() -> None:
    data = Labelled.of([4, 4, 2, 6, 3], [3, 1, 2, 6, 0])
    plan = [[[0, 1]], [[2]], [[3]], [[4]]]
    out = summary(plan, data, RowBounds(8, multiple=4), width=2, num_full=3)
    assert out["batches"] == out["packed_rows"] == 4
    assert out["total_label_count"] == 12 and out["mean_label_count"] == 3
    assert out["std_label_count"] == pytest.approx(np.std([4, 2, 6, 0]))
    assert out["mean_packed_length"] == 19 / 4 and out["max_unpadded_length"] == 8
    assert out["total_batch_cost"] == 8 + 4 + 8 + 4 and out["padding_tokens"] == 24 - 19
    assert out["updates"] == 1 and out["mean_global_update_labels"] == 6 and out["std_global_update_labels"] == 0
    assert out["excluded_tail_microbatches"] == 2
