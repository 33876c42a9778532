"""What processes see of a round: how much to draw, what a report says, what happens when somebody leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from driver import Source, drive_epoch, make_config, make_measures
from hypothesis import given
from hypothesis import strategies as st

from odb.plan import round as rounds
from odb.plan.types import Measures, Outcome, PlanConfig, Room, RoundState, Status, Verdict


def state_with(lengths: list[int], rnd: int = 0) -> RoundState:
    return replace(RoundState.start(0), round=rnd, window=make_measures(lengths), age=np.zeros(len(lengths), np.int64))


def test_the_token_target_starts_small_and_doubles() -> None:
    config = make_config(100, grad_accum_steps=3, max_held_tokens=4000)
    targets = [rounds.fill_target(config, state_with([], rnd)).tokens for rnd in range(5)]
    assert targets == [300, 600, 1200, 2400, 4000]
    assert rounds.fill_target(config, state_with([], 10**6)).tokens == 4000


def test_what_is_carried_counts() -> None:
    config = make_config(100, window=10, max_held_tokens=150, max_held_bytes=900)
    assert rounds.fill_target(config, state_with([10, 20], 1)) == Room(8, 120, 660)
    assert rounds.fill_target(config, state_with([100, 60])).is_full
    assert rounds.fill_target(config, state_with([1] * 10)).is_full


def test_limits_give_way_where_no_step_could_be_made() -> None:
    config = make_config(100, window=4, drop_last=True)
    assert (
        rounds.fill_target(config, state_with([1] * 4)).must == 4
        and rounds.fill_target(config, state_with([1])).must == 1
    )
    config = make_config(100, window=1, grad_accum_steps=2)
    assert rounds.fill_target(config, state_with([1])).takes(10**6, 10**9)
    assert rounds.fill_target(config, state_with([1] * 2)).is_full


def test_a_window_closes_before_the_sample_that_does_not_fit() -> None:
    room = Room(3, 100, 1000)
    assert room.takes(100, 1000) and not room.takes(101, 1) and not room.takes(1, 1001)
    assert room.less(60, 8) == Room(2, 40, 992, -1) and room.less(100, 8).is_full
    one = np.ones(6, np.int64)
    assert room.num_taken(60 * one, one) == 1 and room.num_taken(one, 400 * one) == 2 and room.num_taken(one, one) == 3
    assert room.num_taken(np.array([101, 1]), one[:2]) == 0
    assert replace(room, must=2).num_taken(200 * one, one) == 2 and Room(-1, -5, 0, 4).num_taken(one[:3], one[:3]) == 3


@given(
    st.lists(st.integers(1, 12), max_size=9),
    st.integers(0, 5),
    st.integers(0, 20),
    st.integers(0, 60),
    st.integers(0, 3),
)
def test_one_by_one_and_all_at_once_draw_the_same(
    lengths: list[int], num: int, tokens: int, size: int, must: int
) -> None:
    room = left = Room(num, tokens, size, must)
    taken = 0
    for length in lengths:
        if not left.takes(length, 8 * length):
            break
        taken, left = taken + 1, left.less(length, 8 * length)
    array = np.array(lengths, np.int64)
    assert room.num_taken(array, 8 * array) == taken


def test_held_tokens_never_exceed_the_limit() -> None:
    """However long samples are, unless one alone is longer: that one is alone in its window."""
    lengths = np.random.default_rng(1).integers(1, 300, 4000)
    for options in ({}, {"policy": "published"}, {"layout": "packed"}, {"drop_last": True}, {"grad_accum_steps": 2}):
        shards = [make_measures(lengths[r::3], range(r, 4000, 3)) for r in range(3)]
        epoch = drive_epoch(make_config(300, max_held_tokens=1500, **options), shards)
        held = [p.proposal.report.held_tokens for plans in epoch.plans for p in plans]
        assert 1400 < max(held) <= 1500, options
        assert len(epoch.emitted()) + len(epoch.all_dropped()) + sum(map(len, epoch.undrawn)) == 4000
    long = make_measures([50] * 9 + [700] + [50] * 9)
    epoch = drive_epoch(make_config(100, max_held_tokens=400), [long])
    windows = [plans[0].proposal.window.length.tolist() for plans in epoch.plans]
    assert [w for w in windows if sum(w) > 400] == [[700]]
    assert len(epoch.emitted()) == 19


def test_a_window_smaller_than_a_group_still_makes_complete_groups() -> None:
    epoch = drive_epoch(make_config(100, window=4, drop_last=True), [make_measures([1] * 250)])
    assert [step.rows for step in epoch.steps[0]] == [100, 100]
    assert len(epoch.all_dropped()) == 50


def test_a_report_describes_the_window() -> None:
    config = make_config(100)
    old = replace(state_with([30, 40]), observed_samples=7, observed_tokens=300, emitted_samples=5, agreement_digest=9)
    report = rounds.propose(config, old, make_measures([80, 90], [5, 6]), exhausted=False, config_digest=8).report
    assert (report.num_held, report.num_groups, report.held_tokens) == (4, 3, 240)
    assert (report.observed_samples, report.observed_tokens, report.emitted_samples) == (9, 470, 5)
    assert (report.config_digest, report.agreement_digest, report.status) == (8, 9, Status.RUNNING)
    assert list(report.cost_quantiles) == sorted(report.cost_quantiles)
    assert (report.cost_quantiles[0], report.cost_quantiles[-1]) == (80, 90)


@pytest.mark.parametrize(
    ("lengths", "exhausted", "closed", "status"),
    [
        ([5], False, False, Status.RUNNING),
        ([], False, False, Status.RUNNING),
        ([5], True, False, Status.EXHAUSTED),
        ([], True, False, Status.DRAINED),
        ([5], True, True, Status.CLOSED),
    ],
)
def test_status(lengths: list[int], exhausted: bool, closed: bool, status: Status) -> None:
    proposal = rounds.propose(
        make_config(10), RoundState.start(0), make_measures(lengths), exhausted=exhausted, closed=closed
    )
    assert proposal.report.status == status


def run_round(config: PlanConfig, states: list[RoundState], closed: list[bool]) -> list[Outcome]:
    none = Measures.empty()
    proposals = [
        rounds.propose(config, s, none, exhausted=False, closed=c) for s, c in zip(states, closed, strict=True)
    ]
    agreement = rounds.settle(config, tuple(p.report for p in proposals))
    plans = [rounds.form(config, p, agreement, r) for r, p in enumerate(proposals)]
    totals = np.sum([p.totals for p in plans], axis=0)
    return [rounds.conclude(config, p, totals, len(states), r) for r, p in enumerate(plans)]


def test_nothing_is_planned_once_a_rank_left_until_all_have() -> None:
    config = make_config(10)
    states = [state_with([5, 6]), state_with([7])]
    outcomes = run_round(config, states, [False, True])
    assert [(o.steps, o.ended) for o in outcomes] == [((), False)] * 2
    assert outcomes[0].state.window.length.tolist() == [5, 6]
    outcomes = run_round(config, [o.state for o in outcomes], [True, True])
    assert [(o.steps, o.ended, len(o.dropped_ids)) for o in outcomes] == [((), True, 0)] * 2


def test_states_count_what_left() -> None:
    epoch = drive_epoch(make_config(10), [make_measures([5] * 9), make_measures([4] * 3, range(9, 12))])
    for rank in range(2):
        for before, after, plans in zip(epoch.states, epoch.states[1:], epoch.plans, strict=False):
            left = sum(len(g) for g in plans[rank].groups)
            everywhere = sum(len(g) for plan in plans for g in plan.groups)
            assert after[rank].round == before[rank].round + 1
            assert after[rank].emitted_samples == before[rank].emitted_samples + left
            assert after[rank].all_emitted_samples == before[rank].all_emitted_samples + everywhere
            assert after[rank].step == before[rank].step + plans[rank].agreement.num_steps
            assert after[rank].observed_samples == after[rank].emitted_samples + len(after[rank].window)
            assert after[rank].agreement_digest == plans[rank].agreement.digest


def test_a_round_can_be_planned_again_from_its_state() -> None:
    config = make_config(50, max_held_tokens=400)
    shard = make_measures(np.random.default_rng(0).integers(1, 40, 200))
    whole = drive_epoch(config, [shard])
    for begin in whole.states:
        source = Source(shard, position=begin[0].observed_samples)
        state, steps = begin[0], []
        while True:
            new = source.draw(rounds.fill_target(config, state))
            proposal = rounds.propose(config, state, new, exhausted=source.exhausted)
            agreement = rounds.settle(config, (proposal.report,))
            plan = rounds.form(config, proposal, agreement, 0)
            outcome = rounds.conclude(config, plan, plan.totals, 1, 0)
            steps += outcome.steps
            state = outcome.state
            if outcome.ended:
                break
        expected = whole.steps[0][begin[0].step :]
        assert [s.ids.tolist() for s in steps] == [s.ids.tolist() for s in expected]


def test_loss_scaling_by_samples_and_none() -> None:
    shards = [make_measures([10], [0], [3]), make_measures([5, 5, 5], [1, 2, 3], [1, 1, 0])]
    scales = {
        scaling: [rank[0].loss_scale for rank in drive_epoch(make_config(100, loss_scaling=scaling), shards).steps]
        for scaling in ("exact", "samples", "none")
    }
    assert scales["exact"] == pytest.approx([2 * 3 / 5, 2 * 2 / 5])
    assert scales["samples"] == pytest.approx([2 * 1 / 4, 2 * 3 / 4])
    assert scales["none"] == [1.0, 1.0]


def test_no_loss_tokens_at_all_weigh_nothing() -> None:
    epoch = drive_epoch(make_config(100), [make_measures([10], [0], [0]), make_measures([5], [1], [0])])
    assert [rank[0].loss_scale for rank in epoch.steps] == [0.0, 0.0]


def test_the_verdict_end_takes_no_step() -> None:
    epoch = drive_epoch(make_config(10), [Measures.empty(), Measures.empty()])
    assert epoch.steps == [[], []]
    assert [a[0].verdict for a in epoch.agreements] == [Verdict.END]
