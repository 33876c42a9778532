"""What processes see of a round: how much to draw, what a report says, what happens when somebody leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from driver import Source, drive_epoch, make_config, make_measures

from odb.plan import round as rounds
from odb.plan.types import Measures, Outcome, PlanConfig, RoundState, Status, Verdict


def state_with(lengths: list[int], rnd: int = 0) -> RoundState:
    return replace(RoundState.start(0), round=rnd, window=make_measures(lengths), age=np.zeros(len(lengths), np.int64))


def test_the_token_target_starts_small_and_doubles() -> None:
    config = make_config(100, grad_accum_steps=3, max_held_tokens=4000)
    targets = [rounds.fill_target(config, state_with([], rnd))[1] for rnd in range(5)]
    assert targets == [600, 1200, 2400, 4000, 4000]
    assert rounds.fill_target(config, state_with([], 10**6))[1] == 4000


def test_what_is_carried_counts() -> None:
    config = make_config(100, window=10, max_held_tokens=150, max_held_bytes=900)
    assert rounds.fill_target(config, state_with([10, 20])) == (8, 120, 660)
    assert rounds.fill_target(config, state_with([100, 60])) == (0, 0, 0)
    assert rounds.fill_target(config, state_with([1] * 10)) == (0, 0, 0)


def test_limits_give_way_where_no_step_could_be_made() -> None:
    config = make_config(100, window=4, drop_last=True)
    assert min(rounds.fill_target(config, state_with([1] * 4))) > 0
    config = make_config(100, window=1, grad_accum_steps=2)
    assert min(rounds.fill_target(config, state_with([1]))) > 0
    assert rounds.fill_target(config, state_with([1] * 2)) == (0, 0, 0)


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
