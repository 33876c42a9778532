"""Costs and groups on small inputs with known answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import make_config, make_measures

from odb.errors import ConfigError
from odb.plan import group
from odb.plan.cost import group_cost, oversize, padded_length, validate_cost_fn
from odb.plan.types import I64, PlanConfig


def lengths_of(lengths: list[int], config: PlanConfig, **measures: Any) -> list[list[int]]:
    """The groups that greedy forms, as lists of lengths."""
    window = make_measures(lengths, **measures)
    samples = group.Sorted.of(window, config)
    return [window.length[g].tolist() for g in group.slices(samples, group.greedy(samples, config))]


def flags(lengths: list[int], config: PlanConfig, **measures: Any) -> list[bool]:
    samples = group.Sorted.of(make_measures(lengths, **measures), config)
    return group.complete(samples, group.greedy(samples, config), config).tolist()


def test_twenty_samples_of_a_tenth_of_the_budget_are_two_groups_of_ten() -> None:
    assert [len(g) for g in lengths_of([100] * 20, make_config(1000))] == [10, 10]


def test_longest_first_as_many_as_fit() -> None:
    assert lengths_of([3, 9, 5, 4, 1, 2], make_config(12)) == [[9], [5, 4], [3, 2, 1]]


def test_ties_are_broken_by_id() -> None:
    config = make_config(10)
    samples = group.Sorted.of(make_measures([5, 5, 5], ids=[8, 2, 5]), config)
    assert samples.position.tolist() == [1, 2, 0]


def test_padding_counts() -> None:
    config = make_config(16, pad_to_multiple_of=8)
    assert padded_length(np.array([1, 8, 9]), config).tolist() == [8, 8, 16]
    assert lengths_of([5, 5, 5], config) == [[5, 5], [5]]


def test_every_bound_closes_a_group() -> None:
    assert [len(g) for g in lengths_of([1] * 7, make_config(100, max_samples=3))] == [3, 3, 1]
    patches = [4, 4, 4, 9, 1]
    assert [len(g) for g in lengths_of([1] * 5, make_config(100, max_patches=8), patches=patches)] == [2, 1, 1, 1]
    assert [len(g) for g in lengths_of([1] * 7, make_config(5, rows_multiple=2))] == [4, 2, 1]
    assert [len(g) for g in lengths_of([1] * 3, make_config(100, rows_multiple=8))] == [3]


def test_a_window_larger_than_the_data() -> None:
    assert lengths_of([5, 9, 7], make_config(10)) == [[9], [7], [5]]
    assert lengths_of([], make_config(10)) == []


def test_complete_groups_are_closed_by_a_bound() -> None:
    assert flags([10] * 5, make_config(20)) == [True, True, False]
    assert flags([10] * 4, make_config(20)) == [True, True]
    assert flags([10] * 4, make_config(1000, max_samples=4)) == [True]
    assert flags([10] * 3, make_config(1000, max_samples=4)) == [False]
    assert flags([1] * 3, make_config(1000, max_patches=6), patches=[2, 2, 2]) == [True]
    assert flags([1] * 3, make_config(1000, max_patches=8), patches=[2, 2, 2]) == [False]
    assert flags([50], make_config(20)) == [True]  # oversized: alone for good
    assert flags([1] * 13, make_config(20, rows_multiple=8)) == [False, False]
    assert flags([1] * 16, make_config(20, rows_multiple=8)) == [True]
    assert flags([], make_config(20)) == []


def partition(lengths: list[int], num_groups: int, **options: Any) -> list[int]:
    config = make_config(100, **options)
    samples = group.Sorted.of(make_measures(lengths), config)
    return np.diff([0, *group.exactly(samples, num_groups, config)]).tolist()


def test_exactly_t_is_even() -> None:
    assert partition([10] * 8, 4) == [2, 2, 2, 2]
    assert partition([10] * 8, 8) == [1] * 8
    assert sorted(partition([10] * 8, 3)) == [2, 3, 3]
    assert partition([60, 10, 10, 10], 2) == [1, 3]


def test_the_published_split_peels_single_samples() -> None:
    assert sorted(partition([10] * 8, 4, split_policy="published")) == [1, 1, 1, 5]
    assert sorted(partition([10] * 15, 4, split_policy="published")) == [1, 1, 5, 8]


def test_splits_keep_row_multiples_where_they_can() -> None:
    assert partition([10] * 8, 2, rows_multiple=4) == [4, 4]
    assert sorted(partition([10] * 8, 3, rows_multiple=4)) == [2, 2, 4]


def test_oversize_is_about_single_samples() -> None:
    config = make_config(16, pad_to_multiple_of=8, max_patches=5)
    assert oversize(config, make_measures([16, 17, 8, 1], patches=[5, 0, 6, 0])).tolist() == [False, True, True, False]


def quadratic(rows: I64, padded: I64) -> Any:
    return rows * (padded + padded**2 / 100)


def test_a_cost_model_replaces_padded_tokens() -> None:
    config = make_config(64, cost_fn=lambda rows, padded: rows * padded**2)
    assert lengths_of([8] + [1] * 64, config) == [[8], [1] * 64]
    assert group_cost(np.array([3]), np.array([5]), make_config(64, cost_fn=quadratic)).tolist() == [16]  # 15.75


@pytest.mark.parametrize(
    ("cost_fn", "text"),
    [
        (lambda rows, padded: rows[:1], "shape"),
        (lambda rows, padded: 7, "shape"),
        (lambda rows, padded: rows * -1.0, "-1"),
        (lambda rows, padded: rows * np.nan, "nan"),
        (lambda rows, padded: rows * np.inf, "inf"),
        (lambda rows, padded: rows.astype(str), "dtype"),
        (lambda rows, padded: padded, None),
        (lambda rows, padded: rows * padded, None),
        (lambda rows, padded: 1e6 / rows + padded, "rows"),
        (lambda rows, padded: rows * (padded % 64), "padded_len"),
    ],
)
def test_cost_models_are_tried_before_they_are_used(cost_fn: Any, text: str | None) -> None:
    config = make_config(100, cost_fn=cost_fn)
    if text is None:
        validate_cost_fn(config)
        return
    with pytest.raises(ConfigError, match=text):
        validate_cost_fn(config)


def test_no_cost_model_is_fine() -> None:
    validate_cost_fn(make_config(100))
