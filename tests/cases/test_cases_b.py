"""Token budget and length: small inputs on which systems of this kind failed."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import ranks
from scenarios import Spec, iterate, log_normal

import odb
from odb.testing import LengthsDataset, assert_each_once, assert_steps_aligned, assert_within_budget, collate, record

pytestmark = pytest.mark.timeout(120)


def inline(spec: Spec) -> list:
    return iterate(0, 1, spec.but(num_workers=0)).steps


def test_b01_the_number_of_batches_is_not_total_over_budget() -> None:
    steps = inline(Spec([7] * 8, token_budget=8))
    assert [step.shape for step in steps] == [(1, 7)] * 8
    assert_each_once([steps], range(8))


def test_b01_no_batch_exceeds_the_budget_whatever_the_lengths() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 40, int(rng.integers(1, 30))).tolist()
        budget = int(rng.integers(1, 120))
        steps = inline(Spec(lengths, budget, options={"window": int(rng.integers(1, 40))}))
        assert_each_once([steps], range(len(lengths)))
        assert_within_budget([steps], budget)
        for step in steps:
            assert step.shape[1] == max(lengths[i] for i in step.ids)


OVERSIZED = Spec([100, 513, 100, 100], token_budget=512, options={"sharding": "static"})


def test_b02_a_sample_over_the_budget_can_be_an_error_on_all_ranks() -> None:
    first, second = ranks.run_ranks(2, iterate, OVERSIZED.but(options={"on_oversize": "error"}), timeout=20)
    assert first.error is not None and second.error is not None
    assert "ValueError" in second.error.bases
    assert first.error.type_name == "PeerFailedError" and first.error.ranks == (1,)
    for error in (first.error, second.error):
        assert all(part in error.text for part in ("513", "512")), error.text
        assert "sample 1" in error.text


def test_b02_a_sample_over_the_budget_goes_alone_by_default_and_is_counted() -> None:
    outcomes = ranks.values(2, iterate, OVERSIZED)
    steps = [outcome.steps for outcome in outcomes]
    assert_each_once(steps, range(4))
    assert_steps_aligned(steps)
    assert [step.shape for step in steps[1] if 1 in step.ids] == [(1, 513)]
    assert outcomes[1].stats.bound_by["oversize"] == 1


def test_b02_a_sample_over_the_budget_can_be_skipped_and_is_counted() -> None:
    outcomes = ranks.values(2, iterate, OVERSIZED.but(options={"on_oversize": "skip"}))
    steps = [outcome.steps for outcome in outcomes]
    assert_each_once(steps, [0, 2, 3])
    assert_steps_aligned(steps)
    assert [outcome.stats.rejected["oversize"] for outcome in outcomes] == [0, 1]


def test_b03_the_smallest_budget_still_delivers() -> None:
    steps = inline(Spec([1] * 5, token_budget=1))
    assert [step.shape for step in steps] == [(1, 1)] * 5


@pytest.mark.parametrize("budget", [0, -1])
def test_b03_a_budget_of_nothing_is_refused_by_name(budget: int) -> None:
    with pytest.raises(ValueError, match=f"token_budget.*{budget}"):
        odb.ODBDataLoader(LengthsDataset([1]), token_budget=budget)


def test_b03_a_row_multiple_never_swallows_samples() -> None:
    steps = inline(Spec([5] * 3, token_budget=1000, options={"rows_multiple": 8}))
    assert_each_once([steps], range(3))
    assert all(step.shape[0] > 0 for step in steps)


def test_b03_a_row_multiple_is_kept_where_there_are_rows_enough() -> None:
    steps = inline(Spec([5] * 43, token_budget=100, options={"rows_multiple": 8}))
    assert_each_once([steps], range(43))
    assert sorted(step.shape[0] % 8 for step in steps)[:-1] == [0] * (len(steps) - 1)


@pytest.mark.parametrize(("budget", "num_steps"), [(64, 16), (128, 8)])
def test_b04_twice_the_budget_halves_the_steps(budget: int, num_steps: int) -> None:
    outcome = iterate(0, 1, Spec([16] * 64, budget, num_workers=0))
    assert len(outcome.steps) == num_steps
    assert outcome.stats.binding_limit == "token_budget"


def test_b04_the_report_names_the_row_cap_where_that_binds() -> None:
    for budget in (64, 128):
        outcome = iterate(0, 1, Spec([16] * 64, budget, num_workers=0, options={"max_samples": 4}))
        assert len(outcome.steps) == 16
    assert outcome.stats.binding_limit == "max_samples"


def test_b05_ranks_do_not_pad_to_each_other() -> None:
    spec = Spec([2048] + [2] * 1024, 2048, share=[[0], range(1, 1025)])
    first, second = (outcome.steps for outcome in ranks.values(2, iterate, spec))
    assert [step.shape for step in first] == [(1, 2048)]
    assert [step.shape for step in second] == [(1024, 2)]


@pytest.mark.parametrize("world_size", [1, 4])
def test_b07_a_probe_of_the_full_budget_comes_first(world_size: int) -> None:
    lengths = log_normal(2000, 120, 0.8, 16, 1024, seed=3)
    spec = Spec(lengths, 4096, num_workers=1, options={"warmup_probe": True})
    outcomes = ranks.values(world_size, iterate, spec, 2)
    for epoch in range(2):
        steps = [outcome.epochs[epoch] for outcome in outcomes]
        if epoch == 0:
            for rank_steps in steps:
                probe = rank_steps.pop(0)
                assert probe.padded_tokens == 4096
                assert (probe.info.loss_scale, probe.info.local_samples) == (0.0, 0)
        assert_each_once(steps, range(2000))
        assert_within_budget(steps, 4096)
        assert_steps_aligned(steps)
    assert sum(outcome.stats.emitted_samples for outcome in outcomes) == 4000


def squared(rows: np.ndarray, padded_len: np.ndarray) -> np.ndarray:
    return rows * padded_len * padded_len


def test_b08_the_budget_bounds_the_cost_that_the_user_gives() -> None:
    spec = Spec([8] + [1] * 64, 64, share=[[0], range(1, 65)], options={"cost_fn": squared})
    first, second = (outcome.steps for outcome in ranks.values(2, iterate, spec))
    assert [step.shape for step in first] == [(1, 8)]  # cost 64
    assert [step.shape for step in second] == [(64, 1)]  # cost 64


def test_b08_a_polynomial_cost_is_given_by_its_coefficients() -> None:
    lengths = log_normal(100, 30, 0.7, 2, 90, seed=4)
    steps = inline(Spec(lengths, 8200, options={"cost_fn": (10, 1, 0.5)}))
    assert_each_once([steps], range(100))
    assert_within_budget([steps], 8200, lambda rows, width: 10 + rows * width + 0.5 * rows * width * width)


def test_padding_to_a_multiple_counts_against_the_budget() -> None:
    from functools import partial

    lengths = log_normal(100, 30, 0.7, 2, 90, seed=4)
    options = {"pad_to_multiple_of": 16, "collate_fn": partial(collate, pad_to_multiple_of=16)}
    steps = inline(Spec(lengths, 320, options=options))
    assert_each_once([steps], range(100))
    assert_within_budget([steps], 320)
    assert all(step.shape[1] % 16 == 0 for step in steps)
    assert all(step.info.padded_tokens == step.padded_tokens for step in steps)


def test_a_sample_over_the_budget_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="odb"):
        record(odb.ODBDataLoader(LengthsDataset([5, 600, 5]), token_budget=512, collate_fn=collate))
    assert any("600" in line and "512" in line for line in caplog.messages), caplog.messages
