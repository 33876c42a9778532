"""The packed layout online: what must hold for any lengths, shards and options; and how full rows get."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from driver import Epoch, drive_epoch, make_config, make_measures
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import check_ending, check_weights, quadratic, shards

from odb.plan import packed
from odb.plan import round as rounds
from odb.plan.cost import oversize, packed_size, row_capacity
from odb.plan.even_labels import even_labels
from odb.plan.types import Measures, PlanConfig
from odb.sim.world import simulate


@st.composite
def packed_configs(draw: Any, **fixed: Any) -> PlanConfig:
    """Any valid configuration of the packed layout, with small numbers."""
    rows = draw(st.sampled_from([1, 1, 2, 4]))
    options = {
        "layout": "packed",
        "rows_per_batch": rows,
        "cost_fn": draw(st.sampled_from([None, None, quadratic])) if rows == 1 else None,
        "balance": draw(st.sampled_from([None, None, "labels"])),
        "max_samples": draw(st.sampled_from([None, None, 1, 3])),
        "max_patches": draw(st.sampled_from([None, None, 20])),
        "pad_to_multiple_of": draw(st.sampled_from([1, 1, 4])),
        "tail": draw(st.sampled_from(["filler", "skip", "drop"])),
        "accum_tail": draw(st.sampled_from(["short", "fill"])),
        "grad_accum_steps": draw(st.sampled_from([1, 2, 4])),
        "window": draw(st.sampled_from([1, 4, 16, 64])),
        "max_held_tokens": draw(st.sampled_from([20, 200, 10_000])),
        "max_steps_per_round": draw(st.sampled_from([1, 3, 100])),
        "drop_last": draw(st.sampled_from([False, False, True])),
        "seed": draw(st.integers(0, 5)),
    } | fixed
    if options["cost_fn"] is not None or options["max_patches"] is not None:
        options["balance"] = None
    return make_config(draw(st.integers(40, 160)) * rows, **options)


def check_groups(config: PlanConfig, epoch: Epoch, parts: list[Measures]) -> None:
    """Equal step counts, the bounds of rows, the totals, and that nothing is lost or comes twice."""
    assert len({len(rank) for rank in epoch.steps}) == 1
    everything = sorted(int(i) for part in parts for i in part.ids)
    undrawn = [i for rank in epoch.undrawn for i in rank]
    assert sorted(epoch.emitted() + epoch.all_dropped() + undrawn) == everything
    all_measures = Measures.concat(parts)
    place = {int(i): k for k, i in enumerate(all_measures.ids)}
    for rank, steps in enumerate(epoch.steps):
        own = set(parts[rank].ids.tolist())
        for k, step in enumerate(steps):
            group = all_measures.take(np.array([place[i] for i in step.ids.tolist()], np.int64))
            assert set(step.ids.tolist()) <= own and step.step == k and step.idle == (not len(group))
            assert step.local_tokens == group.length.sum() and step.local_samples == len(group)
            if step.idle:
                assert (step.rows, step.padded_len, step.cost) == (0, 0, 0)
                continue
            check_rows(config, step, group)
    for together in zip(*epoch.steps, strict=True):
        assert len({(s.all_samples, s.all_tokens, s.all_loss_tokens, s.window_loss_tokens) for s in together}) == 1


def check_rows(config: PlanConfig, step: Any, group: Measures) -> None:
    sizes = packed_size(group.length, config)
    ends = packed.rows_of(sizes, config)
    assert step.rows == len(ends) <= config.rows_per_batch
    tokens = [int(group.length[a:b].sum()) for a, b in pairwise([0, *ends])]
    multiple = config.pad_to_multiple_of
    assert step.padded_len == -(-max(tokens) // multiple) * multiple
    assert step.rows * step.padded_len >= step.local_tokens
    if len(group) == 1:
        return
    assert step.cost <= config.token_budget
    assert config.max_patches is None or group.patches.sum() <= config.max_patches
    for a, b in pairwise([0, *ends]):
        assert sizes[a:b].sum() <= row_capacity(config)
        assert config.max_samples is None or b - a <= config.max_samples


def without_oversize(config: PlanConfig, parts: list[Measures]) -> list[Measures]:
    return [part.take(~oversize(config, part)) for part in parts]


@settings(max_examples=100)
@given(packed_configs(), shards(), st.booleans())
def test_any_packed_epoch(config: PlanConfig, parts: list[Measures], lookahead: bool) -> None:
    parts = without_oversize(config, parts)
    epoch = drive_epoch(config, parts, lookahead=lookahead)
    check_groups(config, epoch, parts)
    check_weights(config, epoch)
    check_ending(config, epoch, parts)
    for agreements in epoch.agreements[:-1]:
        assert agreements[0].num_steps % config.grad_accum_steps == 0


@settings(max_examples=60)
@given(packed_configs(rows_per_batch=1, tail="filler", drop_last=False), shards(), st.integers(1, 3))
def test_oversized_samples_may_go_alone(config: PlanConfig, parts: list[Measures], budget: int) -> None:
    config = replace(config, token_budget=config.pad_to_multiple_of * (budget + 3))
    epoch = drive_epoch(config, parts)
    check_groups(config, epoch, parts)
    assert epoch.emitted() == sorted(int(i) for part in parts for i in part.ids)


@settings(max_examples=60)
@given(packed_configs(join=False, tail="filler", drop_last=False), shards(), st.integers(1, 100))
def test_packed_non_join_epochs_end_at_the_quota(config: PlanConfig, parts: list[Measures], quota: int) -> None:
    config = replace(config, sample_quota=quota)
    parts = without_oversize(config, parts)
    epoch = drive_epoch(config, parts)
    check_groups(config, epoch, parts)
    check_weights(config, epoch)
    assert sum(epoch.num_idle()) == 0
    samples = np.cumsum([step.all_samples for step in epoch.steps[0]])
    closes = [k for k, step in enumerate(epoch.steps[0]) if step.sync_gradients]
    if len(samples) and samples[-1] >= quota:
        assert len(closes) < 2 or samples[closes[-2]] < quota


@settings(max_examples=60)
@given(packed_configs(drop_last=False, tail="filler", balance=None), shards(), st.integers(1, 3))
def test_overdue_samples_leave_before_all_others(config: PlanConfig, parts: list[Measures], max_age: int) -> None:
    epoch = drive_epoch(replace(config, max_age=max_age), without_oversize(config, parts))
    for plan in (plan for plans in epoch.plans for plan in plans):
        late = plan.proposal.age >= max_age
        if late[plan.carry].any():
            assert all(late[g].any() for g in plan.groups if len(g))


@settings(max_examples=60)
@given(packed_configs(), shards())
def test_a_group_is_the_same_when_it_is_planned_again(config: PlanConfig, parts: list[Measures]) -> None:
    """What a resumed epoch replays: identities in their order give the rows back."""
    window = Measures.concat(without_oversize(config, parts))
    groups = tuple(packed.propose(window, np.zeros(len(window), np.int64), config))
    kept, left, totals = rounds.refit(config, window, groups)
    assert [g.tolist() for g in kept] == [g.tolist() for g in groups] and not len(left)
    assert totals[:, 0].tolist() == [len(g) for g in groups]
    longer = replace(window, length=window.length + 3)
    kept, left, _ = rounds.refit(config, longer, groups)
    assert sorted([*chain.from_iterable(g.tolist() for g in kept), *left.tolist()]) == sorted(
        chain.from_iterable(g.tolist() for g in groups)
    )
    for group in kept:
        sizes = packed_size(longer.length[group], config)
        assert len(group) == 1 or len(packed.rows_of(sizes, config)) <= config.rows_per_batch


def lognormal(n: int, capacity: int, seed: int = 0) -> np.ndarray:
    s = np.sqrt(np.log(1 + 0.8**2))
    draws = np.random.default_rng(seed).lognormal(np.log(600) - s * s / 2, s, n)
    return np.clip(draws, 1, capacity).astype(np.int64)


@pytest.mark.parametrize(("capacity", "least"), [(16384, 0.998), (4096, 0.996)])
def test_rows_get_full_with_a_window_of_256(capacity: int, least: float) -> None:
    parts = [make_measures(lognormal(50_000, capacity))]
    epoch = drive_epoch(make_config(capacity, layout="packed", window=256, max_held_tokens=10**9), parts)
    tokens = sum(step.local_tokens for step in epoch.steps[0])
    assert tokens == parts[0].length.sum()
    assert tokens / (len(epoch.steps[0]) * capacity) >= least


def test_two_ranks_run_full_rows_together() -> None:
    lengths = lognormal(20_000, 16384)
    parts = [make_measures(lengths[r::4], range(r, 20_000, 4)) for r in range(4)]
    epoch = drive_epoch(make_config(16384, layout="packed"), parts)
    slowest = sum(max(step.cost for step in together) for together in zip(*epoch.steps, strict=True))
    assert lengths.sum() / (4 * slowest) >= 0.97


@pytest.mark.parametrize(("sharding", "least"), [("static", 0.97), ("elastic", 0.98)])
def test_many_ranks_run_full_rows_together(sharding: str, least: float) -> None:
    lengths = lognormal(60_000, 16384)
    config = make_config(16384, layout="packed", window=8192)
    trace = simulate(config, lengths, 8, sharding=sharding)
    assert (trace.step_of >= 0).all() and trace.tokens.sum() == lengths.sum()
    assert trace.costs.max() <= 16384 and trace.rows.max() == 1
    assert (trace.costs == trace.rows * trace.padded_len).all()
    assert lengths.sum() / (8 * trace.costs.max(axis=1).sum()) >= least


# ---- labels


def spread(window: Measures, groups: Any) -> float:
    return float(np.std([window.loss_tokens[g].sum() for g in groups]))


@settings(max_examples=80)
@given(packed_configs(balance="labels", cost_fn=None, max_patches=None), st.integers(0, 2**32), st.booleans())
def test_labels_are_evened_and_nothing_gets_worse(config: PlanConfig, seed: int, is_packed: bool) -> None:
    rng = np.random.default_rng(seed)
    config = config if is_packed else replace(config, layout="padded", rows_per_batch=1)
    length = rng.integers(1, 30, 40)
    window = make_measures(length, loss_tokens=rng.integers(0, length + 1))
    window = window.take(~oversize(config, window))
    groups, _ = rounds._formed(config, window, np.zeros(len(window), np.int64))
    out = even_labels(config, window, groups)
    assert sorted(np.concatenate([*out, np.empty(0, int)]).tolist()) == sorted(
        np.concatenate([*groups, np.empty(0, int)]).tolist()
    )
    if config.rows_per_batch == 1:  # else whole rows change places too
        assert [len(g) for g in out] == [len(g) for g in groups]
    assert spread(window, out) <= spread(window, groups) + 1e-9 if groups else not out
    before, after = rounds._costs(config, window, groups), rounds._costs(config, window, out)
    assert after.sum() <= before.sum() and after.max(initial=0) <= before.max(initial=0)


def test_c10_labels_of_the_window_come_out_even() -> None:
    window = make_measures([10] * 4, loss_tokens=[9, 9, 1, 1])
    config = make_config(20, balance="labels")
    groups = even_labels(config, window, (np.array([0, 1]), np.array([2, 3])))
    assert [int(window.loss_tokens[g].sum()) for g in groups] == [10, 10]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_labels_of_steps_vary_less(layout: str) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 200, 4000)
    labels = (lengths * rng.beta(0.8, 1.6, 4000)).astype(int)
    stds, costs, emitted = [], [], []
    for balance in (None, "labels"):
        config = make_config(2048, layout=layout, balance=balance)
        epoch = drive_epoch(config, [make_measures(lengths, loss_tokens=labels)])
        stds.append(np.std([step.local_loss_tokens for step in epoch.steps[0]]))
        costs.append(sum(step.cost for step in epoch.steps[0]))
        emitted.append(epoch.emitted())
    assert emitted[0] == emitted[1]
    assert costs[1] <= costs[0]
    assert stds[1] < (0.85 if layout == "packed" else 0.97) * stds[0]
