"""Groups of about equal cost: the best there are, checked against brute force; no sample lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odb.errors import ConfigError
from odb.plan.rebalance import Groups, Quadratic, additive, assign, contiguous


def best_peak(lengths: np.ndarray, num: int, cost: Any, tokens: float = np.inf, least: int = 1) -> float:
    """Peak of the best contiguous partition by dynamic programming over all of them."""
    longest_first = -np.sort(-lengths)
    n = len(lengths)
    best = [0.0] + [np.inf] * n
    for _ in range(num):
        now = [np.inf] * (n + 1)
        for end in range(1, n + 1):
            for start in range(max(0, end - n), end - least + 1):
                if (end - start) * longest_first[start] <= tokens:
                    now[end] = min(now[end], max(best[start], float(cost(end - start, longest_first[start]))))
        best = now
    return best[n]


def check_slices(groups: Groups, lengths: np.ndarray) -> None:
    """Every sample once, and each group's samples at most as long as those of the group before."""
    assert sorted(np.concatenate(groups.members).tolist()) == list(range(len(lengths)))
    ordered = lengths[np.concatenate(groups.members)]
    assert (np.diff(ordered) <= 0).all()
    expected = [Quadratic()(len(one), lengths[one].max()) for one in groups.members]
    assert groups.costs == pytest.approx(expected)


def test_the_documented_example() -> None:
    lengths = np.array([128, 256, 512, 768, 1024, 1536, 2048, 4096])
    groups = contiguous(lengths, 2)
    assert [lengths[one].tolist() for one in groups.members] == [[4096, 2048], [1536, 1024, 768, 512, 256, 128]]


@pytest.mark.parametrize("seed", range(10))
def test_1000_random_global_batches_equal_the_best_partition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        num = int(rng.integers(1, 6))
        lengths = np.maximum(1, rng.lognormal(6, rng.uniform(0.2, 1.5), int(rng.integers(num, 22)))).astype(np.int64)
        groups = contiguous(lengths, num)
        check_slices(groups, lengths)
        assert groups.peak == pytest.approx(best_peak(lengths, num, Quadratic()), rel=1e-11)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=4, max_size=14), st.integers(1, 4), st.integers(1, 3), st.integers(1, 400))
def test_with_bounds_it_is_the_best_that_keeps_them(items: list[int], num: int, least: int, tokens: int) -> None:
    lengths = np.array(items)
    if len(items) < num * least:
        with pytest.raises(ConfigError, match=r"can't fill"):
            contiguous(lengths, num, min_per_group=least)
        return
    groups = contiguous(lengths, num, max_tokens=tokens, min_per_group=least)
    check_slices(groups, lengths)
    assert all(len(one) >= least for one in groups.members)
    best = best_peak(lengths, num, Quadratic(), tokens, least)
    used = [len(one) * lengths[one].max() for one in groups.members]
    assert groups.exceeding == tuple(k for k, total in enumerate(used) if total > tokens)
    if np.isfinite(best):
        assert not groups.exceeding
        assert groups.peak == pytest.approx(best, rel=1e-11)
    else:  # the bound that stands in is the smallest that can be kept
        assert groups.exceeding
        assert not np.isfinite(best_peak(lengths, num, Quadratic(), max(used) - 1, least))


def test_many_samples_in_two_skewed_groups() -> None:
    rng = np.random.default_rng(3)
    for _ in range(3):
        lengths = np.maximum(1, rng.lognormal(5, 1.6, 246)).astype(np.int64)
        groups = contiguous(lengths, 2)
        check_slices(groups, lengths)
        longest_first = -np.sort(-lengths)
        cuts = [max(Quadratic()(k, longest_first[0]), Quadratic()(246 - k, longest_first[k])) for k in range(1, 246)]
        assert groups.peak == pytest.approx(min(cuts))


def test_any_cost_model_that_never_falls() -> None:
    rng = np.random.default_rng(0)

    def steps(rows: Any, longest: Any) -> Any:  # memory in blocks
        return -(-rows // 4) * longest * longest

    lengths = rng.integers(1, 50, 18)
    groups = contiguous(lengths, 4, cost=steps)
    assert groups.peak == best_peak(lengths, 4, steps)


def test_no_group_has_nothing_to_give() -> None:
    """One sample dearer than all others together: its group can't shrink, the others still share evenly."""
    lengths = np.array([5000] + [100] * 30)
    groups = contiguous(lengths, 4)
    assert len(groups.members[0]) == 1
    assert sum(map(len, groups.members)) == 31


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"3 samples can't fill 4 groups"):
        contiguous(np.array([1, 2, 3]), 4)
    assert [len(one) for one in contiguous(np.array([1, 2, 3]), 3).members] == [1, 1, 1]


def test_the_token_bound_counts_every_group_between_donor_and_receiver() -> None:
    """Moving a boundary raises the longest sample of each slice behind it; all slices of the result keep the bound."""
    lengths = np.array([100, 90, 80, 30, 20, 10, 10, 10, 10, 10])
    for bound in range(100, 400):
        groups = contiguous(lengths, 3, max_tokens=bound)
        tokens = [len(one) * int(lengths[one].max()) for one in groups.members]
        assert groups.exceeding == tuple(k for k, total in enumerate(tokens) if total > bound)
        assert bool(groups.exceeding) == (not np.isfinite(best_peak(lengths, 3, Quadratic(), bound)))


def test_l01_partition_quality_and_conservation() -> None:
    groups = additive(np.array([8, 7, 6, 5, 4]), 2)
    assert sorted(np.concatenate(groups.members).tolist()) == [0, 1, 2, 3, 4]
    assert groups.costs.sum() == 30 and groups.peak == 15


def best_parts(costs: list[int], num: int) -> int:
    """The largest sum of the best of all partitions."""
    reached = {(0,) * num}
    for cost in costs:
        reached = {tuple(sorted((*sums[:k], sums[k] + cost, *sums[k + 1 :]))) for sums in reached for k in range(num)}
    return min(sums[-1] for sums in reached)


def test_l01_500_random_lists_against_brute_force() -> None:
    rng = np.random.default_rng(1)
    for _ in range(500):
        num = int(rng.integers(1, 4))
        costs = rng.integers(1, 30, int(rng.integers(num, 11)))
        groups = additive(costs, num)
        assert sorted(np.concatenate(groups.members).tolist()) == list(range(len(costs)))
        assert all(len(one) for one in groups.members)
        assert groups.costs.tolist() == [costs[one].sum() for one in groups.members]
        best = best_parts(costs.tolist(), num)
        assert groups.peak <= (4 / 3 - 1 / (3 * num)) * best + 1e-9


def test_b08_quadratic_work_is_balanced_as_such() -> None:
    lengths = np.array([8] + [1] * 64)
    quadratic = additive(lengths**2, 2)
    assert quadratic.costs.tolist() == [64, 64]
    assert sorted(map(len, quadratic.members)) == [1, 64]
    assert additive(lengths, 2).costs.tolist() == [36, 36]


@pytest.mark.parametrize("by", ["slots", "totals"])
def test_every_rank_runs_one_group_a_slot(by: str) -> None:
    rng = np.random.default_rng(0)
    costs = rng.lognormal(3, 1, 32)
    table = assign(costs, 8, by)
    assert table.shape == (4, 8) and sorted(table.ravel().tolist()) == list(range(32))
    totals = costs[table].sum(axis=0)
    costliest_first = costs[np.argsort(-costs).reshape(4, 8)]
    assert totals.max() < costliest_first.sum(axis=0).max()
    if by == "slots":  # what runs at the same time is as alike as it can be
        assert costs[table].max(axis=1) == pytest.approx(costliest_first.max(axis=1))
    else:
        assert totals.max() <= assign_totals(costs, "slots")


def assign_totals(costs: np.ndarray, by: str) -> float:
    return float(costs[assign(costs, 8, by)].sum(axis=0).max())


def test_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError, match=r"num_groups must be >= 1, got 0"):
        contiguous(np.array([1]), 0)
    with pytest.raises(ConfigError, match=r"by must be 'slots' or 'totals', got 'rows'"):
        assign(np.array([1.0]), 1, "rows")
    with pytest.raises(ConfigError, match=r"finite"):
        additive(np.array([1.0, np.nan]), 2)
