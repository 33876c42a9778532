"""What must hold for any lengths, shards and options, on randomly drawn ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from driver import Epoch, drive_epoch, make_config, make_measures
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odb.plan import group, wire
from odb.plan.order import by_cost, in_time
from odb.plan.types import NUM_QUANTILES, Measures, PlanConfig, Report, Status

Strategy = st.SearchStrategy


def few(num: int) -> Callable[[Any], Any]:
    """Examples without a time limit for each, as machines differ."""
    return settings(max_examples=num, deadline=None, suppress_health_check=[HealthCheck.too_slow])


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def partitions(items: list[int]) -> Any:
    """All set partitions."""
    if not items:
        yield []
        return
    head, *tail = items
    for smaller in partitions(tail):
        yield [[head], *smaller]
        for i, part in enumerate(smaller):
            yield [*smaller[:i], [head, *part], *smaller[i + 1 :]]


def cost(part: list[int]) -> int:
    return len(part) * max(part)


@few(40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 40))
def test_greedy_uses_the_fewest_groups(items: list[int], budget: int) -> None:
    config = make_config(budget)
    ends = group.greedy(group.Sorted.of(make_measures(items), config), config)
    fewest = min(len(p) for p in partitions(items) if all(len(g) == 1 or cost(g) <= budget for g in p))
    assert len(ends) == fewest


@few(40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 40), st.data())
def test_exactly_t_groups_under_the_smallest_cap(items: list[int], budget: int, data: st.DataObject) -> None:
    config = make_config(budget)
    samples = group.Sorted.of(make_measures(items), config)
    target = data.draw(st.integers(len(group.greedy(samples, config)), len(items)))
    ends = group.exactly(samples, target, config)
    costs = group.slice_costs(samples, ends, config)
    valid = [p for p in partitions(items) if len(p) == target and all(len(g) == 1 or cost(g) <= budget for g in p)]
    assert len(ends) == target and ends[-1] == len(items) and all(a < b for a, b in pairwise([0, *ends]))
    assert costs.max() == min(max(cost(g) for g in p) for p in valid)


def quadratic(rows: np.ndarray, padded: np.ndarray) -> np.ndarray:
    return 3 + rows * (padded + 0.01 * padded**2)


@st.composite
def configs(draw: Any, **fixed: Any) -> PlanConfig:
    """Any valid configuration of the padded layout, with small numbers."""
    options = {
        "max_samples": draw(st.sampled_from([None, None, 1, 3, 8])),
        "max_patches": draw(st.sampled_from([None, None, 5, 20])),
        "pad_to_multiple_of": draw(st.sampled_from([1, 1, 4])),
        "rows_multiple": draw(st.sampled_from([1, 1, 2, 3])),
        "cost_fn": draw(st.sampled_from([None, None, quadratic])),
        "policy": draw(st.sampled_from(["odb", "odb", "published"])),
        "split_policy": draw(st.sampled_from(["even", "even", "published"])),
        "tail": draw(st.sampled_from(["filler", "skip", "drop"])),
        "accum_tail": draw(st.sampled_from(["short", "fill"])),
        "grad_accum_steps": draw(st.sampled_from([1, 2, 4])),
        "window": draw(st.sampled_from([1, 4, 16, 64])),
        "max_held_tokens": draw(st.sampled_from([20, 200, 10_000])),
        "max_held_bytes": draw(st.sampled_from([300, 10**9])),
        "max_steps_per_round": draw(st.sampled_from([1, 3, 100])),
        "drop_last": draw(st.sampled_from([False, False, True])),
        "seed": draw(st.integers(0, 5)),
    }
    return make_config(draw(st.integers(1, 120)), **(options | fixed))


@st.composite
def shards(draw: Any, most: int = 6) -> list[Measures]:
    """Unequal shards of 1 to 6 ranks, some of them empty."""
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shortest = rng.integers(1, 20, len(sizes))
    parts, start = [], 0
    for size, low in zip(sizes, shortest, strict=True):
        length = rng.integers(low, low + 15, size)
        parts.append(
            make_measures(length, np.arange(start, start + size), rng.integers(0, length + 1), rng.integers(0, 6, size))
        )
        start += size
    return parts


def check_steps(config: PlanConfig, epoch: Epoch, parts: list[Measures]) -> None:
    """Equal step counts, the budget, the totals, and that nothing is lost or comes twice."""
    assert len({len(rank) for rank in epoch.steps}) == 1
    everything = sorted(int(i) for part in parts for i in part.ids)
    undrawn = [i for rank in epoch.undrawn for i in rank]
    assert sorted(epoch.emitted() + epoch.all_dropped() + undrawn) == everything
    length = {int(i): int(n) for part in parts for i, n in zip(part.ids, part.length, strict=True)}
    patches = {int(i): int(n) for part in parts for i, n in zip(part.ids, part.patches, strict=True)}
    for rank, steps in enumerate(epoch.steps):
        own = set(parts[rank].ids.tolist())
        for k, step in enumerate(steps):
            ids = step.ids.tolist()
            assert step.step == k and step.rows == len(ids) and step.idle == (not ids) and set(ids) <= own
            assert step.local_tokens == sum(length[i] for i in ids)
            if step.rows > 1:
                assert step.cost <= config.token_budget
                assert config.max_patches is None or sum(patches[i] for i in ids) <= config.max_patches
                assert config.max_samples is None or step.rows <= config.max_samples
    for together in zip(*epoch.steps, strict=True):
        assert len({(s.all_samples, s.all_tokens, s.all_loss_tokens, s.window_loss_tokens) for s in together}) == 1
        assert sum(s.local_loss_tokens for s in together) == together[0].all_loss_tokens
        assert together[0].all_samples > 0 or config.accum_tail == "fill" or config.grad_accum_steps > 1


def check_weights(config: PlanConfig, epoch: Epoch) -> None:
    """Over each optimizer step the scales sum to W, or to 0 where nothing bears loss."""
    world = len(epoch.steps)
    scales, start = np.array([[s.loss_scale for s in rank] for rank in epoch.steps]), 0
    for k, step in enumerate(epoch.steps[0]):
        if step.sync_gradients:
            window = scales[:, start : k + 1]
            assert k + 1 - start <= config.grad_accum_steps
            assert window.sum() == pytest.approx(world if step.window_loss_tokens else 0.0, abs=1e-9)
            start = k + 1
    assert start == len(epoch.steps[0])


def check_ending(config: PlanConfig, epoch: Epoch, parts: list[Measures]) -> None:
    """Steps that are said to be emitted are; all leaves, or no rank is idle; whole optimizer steps where asked for."""
    for rank, plan in ((rank, plan) for plans in epoch.plans for rank, plan in enumerate(plans)):
        assert sum(len(g) > 0 for g in plan.groups) == plan.agreement.num_emitting[rank]
    if config.tail != "drop" and not config.drop_last:
        assert epoch.emitted() == sorted(int(i) for part in parts for i in part.ids)
    if config.tail == "drop" or config.drop_last:
        assert sum(epoch.num_idle()) == 0
    if config.accum_tail == "fill":
        assert len(epoch.steps[0]) % config.grad_accum_steps == 0


@few(100)
@given(configs(), shards(), st.booleans())
def test_any_epoch(config: PlanConfig, parts: list[Measures], lookahead: bool) -> None:
    epoch = drive_epoch(config, parts, lookahead=lookahead)
    check_steps(config, epoch, parts)
    check_weights(config, epoch)
    check_ending(config, epoch, parts)


@few(40)
@given(configs(tail="filler", drop_last=False), shards())
def test_something_leaves_in_every_round(config: PlanConfig, parts: list[Measures]) -> None:
    epoch = drive_epoch(config, parts)
    for plans in epoch.plans:
        if any(len(plan.proposal.window) for plan in plans):
            assert sum(int(plan.totals[:, 0].sum()) for plan in plans) > 0


@few(40)
@given(configs(), shards())
def test_accumulation_windows_never_cross_a_round(config: PlanConfig, parts: list[Measures]) -> None:
    epoch = drive_epoch(config, parts)
    for agreements in epoch.agreements[:-1]:
        assert agreements[0].num_steps % config.grad_accum_steps == 0


@few(40)
@given(configs(drop_last=False, tail="filler"), shards(), st.integers(1, 3))
def test_overdue_samples_leave_before_all_others(config: PlanConfig, parts: list[Measures], max_age: int) -> None:
    epoch = drive_epoch(replace(config, max_age=max_age), parts)
    for plan in (plan for plans in epoch.plans for plan in plans):
        late = plan.proposal.age >= max_age
        if late[plan.carry].any():
            assert all(late[g].any() for g in plan.groups if len(g))


@pytest.mark.parametrize("grad_accum_steps", [1, 4])
def test_hardly_a_sample_is_carried_longer_than_allowed_where_shards_are_alike(grad_accum_steps: int) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        parts = [make_measures(rng.integers(1, 100, 600), range(r * 600, r * 600 + 600)) for r in range(3)]
        config = make_config(400, max_age=2, max_held_tokens=16 * 400, grad_accum_steps=grad_accum_steps)
        ages = [state.age for states in drive_epoch(config, parts).states for state in states]
        # Two fifths of a window leave in a round, so that overdue samples need up to three rounds more to leave.
        assert max(int(age.max(initial=0)) for age in ages) in (2, 3, 4, 5)


@few(40)
@given(configs(), shards())
def test_all_ranks_agree_on_everything_shared(config: PlanConfig, parts: list[Measures]) -> None:
    for agreements in drive_epoch(config, parts).agreements:
        first = agreements[0]
        for other in agreements[1:]:
            assert (other.verdict, other.num_steps, other.last, other.digest) == (
                first.verdict,
                first.num_steps,
                first.last,
                first.digest,
            )
            assert (other.num_emitting == first.num_emitting).all()


@few(40)
@given(configs(), shards())
def test_an_epoch_is_a_function_of_its_inputs(config: PlanConfig, parts: list[Measures]) -> None:
    one, two = drive_epoch(config, parts), drive_epoch(config, parts)
    ids = [[[s.ids.tolist() for s in rank] for rank in epoch.steps] for epoch in (one, two)]
    assert ids[0] == ids[1]


@few(40)
@given(configs(join=False), shards(), st.integers(1, 150), st.booleans())
def test_a_quota_is_met_within_one_optimizer_step(
    config: PlanConfig, parts: list[Measures], quota: int, with_quota: bool
) -> None:
    config = make_config(
        config.token_budget, join=False, sample_quota=quota if with_quota else None, window=config.window, seed=1,
        grad_accum_steps=config.grad_accum_steps,
    )  # fmt: skip
    epoch = drive_epoch(config, parts)
    check_steps(config, epoch, parts)
    check_weights(config, epoch)
    assert sum(epoch.num_idle()) == 0
    samples = np.cumsum([step.all_samples for step in epoch.steps[0]])
    closes = [k for k, step in enumerate(epoch.steps[0]) if step.sync_gradients]
    if with_quota and len(samples) and samples[-1] >= quota:
        assert len(closes) < 2 or samples[closes[-2]] < quota


@few(40)
@given(st.integers(0, 60), st.integers(0, 10), st.integers(0, 100), st.integers(0, 100))
def test_the_order_in_time_is_a_permutation_that_all_ranks_share(num: int, seed: int, epoch: int, rnd: int) -> None:
    config = make_config(10, seed=seed)
    order = in_time(num, config, epoch, rnd)
    assert sorted(order.tolist()) == list(range(num))
    assert (order == in_time(num, make_config(999, seed=seed, window=3), epoch, rnd)).all()


def test_order_changes_with_seed_epoch_and_round() -> None:
    base = in_time(50, make_config(10), 0, 0).tolist()
    assert base != in_time(50, make_config(10, seed=1), 0, 0).tolist()
    assert base != in_time(50, make_config(10), 1, 0).tolist()
    assert base != in_time(50, make_config(10), 0, 1).tolist()


def test_groups_of_similar_cost_meet() -> None:
    rng = np.random.default_rng(0)
    parts = [make_measures(rng.integers(1, 100, 60), range(r * 60, r * 60 + 60)) for r in range(3)]
    plans = drive_epoch(make_config(300, max_held_tokens=10**6), parts).plans
    for per_rank in plans:
        costs = np.array(
            [[0 if not len(g) else len(g) * p.proposal.window.length[g].max() for g in p.groups] for p in per_rank]
        )
        if costs.shape[1]:
            shared = np.argsort(-costs[0], kind="stable")
            assert all((np.diff(row[shared]) <= 0).all() or len(set(costs[0])) < len(costs[0]) for row in costs)


def test_by_cost_breaks_ties_by_id() -> None:
    assert by_cost(np.array([5, 9, 5, 9]), np.array([7, 3, 2, 8])).tolist() == [1, 3, 2, 0]


@few(40)
@given(st.data())
def test_reports_survive_the_wire(data: st.DataObject) -> None:
    number = st.integers(0, 2**63 - 1)
    names = [f for f in Report.__dataclass_fields__ if f not in ("status", "cost_quantiles")]
    report = Report(
        status=data.draw(st.sampled_from(list(Status))),
        cost_quantiles=tuple(data.draw(st.lists(number, min_size=NUM_QUANTILES, max_size=NUM_QUANTILES))),
        **{name: data.draw(number) for name in names},
    )
    row = wire.encode(report)
    assert row.dtype == np.int64 and row.shape == (wire.ROW_WIDTH,)
    assert wire.decode(row, 0) == report
