"""Step counts, coverage, hangs: small inputs on which systems of this kind failed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from scenarios import (
    Outcome,
    Spec,
    TokenModel,
    causal_loss,
    flat_grad,
    iterate,
    iterate_all,
    iterate_with_collective,
    log_normal,
    reference_grad,
    relative_error,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import odb
from odb.testing import Seen, assert_each_once, assert_steps_aligned, assert_within_budget, record, seen

pytestmark = pytest.mark.timeout(120)

#: Within about a second on a free machine, start included; what failed in the reports took a minute to half an hour.
SOON_S = 15


def steps_of(outcomes: list[Outcome]) -> list[list[Seen]]:
    return [outcome.steps for outcome in outcomes]


def check(outcomes: list[Outcome], spec: Spec, expected: range | list[int] | None = None) -> list[list[Seen]]:
    """The standard checks: every sample once, equal step counts that agree on their totals, budget."""
    steps = steps_of(outcomes)
    assert_steps_aligned(steps)
    assert_each_once(steps, range(len(spec.lengths)) if expected is None else expected)
    assert_within_budget(steps, spec.token_budget)
    return steps


def num_idle(steps: list[Seen]) -> int:
    return sum(step.idle for step in steps)


def test_a01_long_and_short_shards_run_the_same_steps() -> None:
    spec = Spec([90, 10] * 8, token_budget=100, share="strided")
    steps = check(ranks.values(2, iterate_with_collective, spec, timeout=20), spec)
    assert [len(s) for s in steps] == [8, 8]
    assert [num_idle(s) for s in steps] == [0, 0]


# ----


def filler_training(rank: int, world_size: int, spec: Spec) -> list[tuple[tuple[int, ...], bool, float, Any, int]]:
    """DistributedDataParallel without any option; counts how often the backward hook ran."""
    model = DistributedDataParallel(TokenModel())
    calls = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    out = []
    with spec.loader(rank, world_size) as loader:
        for batch in loader:
            info = odb.pop_step_info(batch)
            loss = odb.scale_loss(causal_loss(model(batch["input_ids"]), batch["labels"]), info)
            loss.backward()
            ids = () if info.idle else tuple(batch["id"].tolist())
            out.append((ids, info.idle, loss.item(), flat_grad(model), len(calls)))
            model.zero_grad()
    return out


def test_a03_a_filler_takes_part_in_backward_with_weight_zero() -> None:
    spec = Spec([10] * 4, token_budget=10, share=[[0, 1, 2], [3]])
    first, second = ranks.values(2, filler_training, spec)
    num_parameters = len(list(TokenModel().parameters()))
    assert [len(first), len(second)] == [3, 3]
    assert first[-1][4] == second[-1][4] == 3 * num_parameters
    assert [step[1] for step in first] == [False] * 3
    assert sorted(step[1] for step in second) == [False, True, True]
    for (ids, _, _, grad, _), (other_ids, idle, loss, other_grad, _) in zip(first, second, strict=True):
        assert relative_error(grad, reference_grad(spec.dataset(), ids + other_ids)) <= 1e-12
        assert (grad == other_grad).all()
        assert not idle or loss == 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_a05_evaluation_counts_every_sample_once(world_size: int) -> None:
    spec = Spec([6] * 10, token_budget=12)
    steps = check(ranks.values(world_size, iterate, spec), spec)
    ids = [i for rank_steps in steps for step in rank_steps if not step.idle for i in step.ids]
    assert (len(ids), sum(ids) / len(ids)) == (10, 4.5)
    assert sum(step.info.local_samples for rank_steps in steps for step in rank_steps) == 10


def test_a06_a_short_last_block_is_split_instead_of_missing_a_step() -> None:
    spec = Spec([10] * 17, token_budget=1000, share="contiguous", options={"max_samples": 4})
    steps = check(ranks.values(4, iterate, spec), spec)
    assert [len(s) for s in steps] == [2, 2, 2, 2]
    assert [num_idle(s) for s in steps] == [0, 0, 0, 0]


def test_a06_dropping_reports_what_it_drops() -> None:
    dropping = Spec([10] * 145, 10_000, share="contiguous", options={"max_samples": 16, "drop_last": True})
    covering = dropping.but(options={"drop_last": False})
    per_rank = ranks.values(3, iterate_all, [dropping, covering])
    dropped, covered = [[outcomes[k] for outcomes in per_rank] for k in (0, 1)]
    steps = steps_of(dropped)
    assert_steps_aligned(steps)
    assert [len(s) for s in steps] == [2, 2, 2]
    delivered = [i for rank_steps in steps for step in rank_steps for i in step.ids]
    assert len(delivered) == len(set(delivered)) == 96
    assert sum(outcome.stats.num_dropped for outcome in dropped) == 49
    assert [len(s) for s in check(covered, covering)] == [4, 4, 4]
    assert sum(outcome.stats.num_dropped for outcome in covered) == 0


# ----


REJECTING = Spec([10] * 12, 10, num_workers=2, data={"none_at": (3, 7)}, options={"sharding": "static"})


def test_a08_rejected_samples_are_skipped_and_counted() -> None:
    spec = REJECTING.but(options={"on_empty": "skip"})
    outcomes = ranks.values(2, iterate, spec)
    steps = check(outcomes, spec, expected=[i for i in range(12) if i not in (3, 7)])
    assert [len(s) for s in steps] == [6, 6]
    assert [num_idle(s) for s in steps] == [0, 2]
    assert [outcome.stats.num_rejected for outcome in outcomes] == [0, 2]
    assert outcomes[1].stats.rejected["empty"] == 2


def test_a08_by_default_a_rejected_sample_is_an_error_on_all_ranks() -> None:
    first, second = ranks.run_ranks(2, iterate, REJECTING, timeout=20)
    assert first.error is not None and second.error is not None
    assert second.error.type_name == "MeasureError" and "index 3" in second.error.text
    assert first.error.type_name == "PeerFailedError" and "index 3" in first.error.text
    assert "rank 1" in first.error.text and first.error.ranks == (1,)


def test_a08_a_window_of_nothing_but_rejected_samples_yields_no_batch() -> None:
    spec = Spec(
        [10] * 12, 10, data={"none_at": range(12)}, options={"on_empty": "skip", "window": 2, "sharding": "static"}
    )
    outcomes = ranks.values(2, iterate, spec)
    assert [outcome.steps for outcome in outcomes] == [[], []]
    assert [outcome.stats.num_rejected for outcome in outcomes] == [6, 6]


def test_a08_a_rank_with_nothing_but_rejected_samples_runs_fillers() -> None:
    spec = Spec([10] * 12, 10, data={"none_at": range(1, 12, 2)}, options={"on_empty": "skip", "sharding": "static"})
    outcomes = ranks.values(2, iterate, spec)
    steps = check(outcomes, spec, expected=range(0, 12, 2))
    assert [num_idle(s) for s in steps] == [0, 6]


def test_a09_an_exception_on_one_rank_ends_all_and_names_it() -> None:
    spec = Spec([10] * 12, 10, num_workers=2, data={"fail_at": (5,)}, options={"sharding": "static"})
    first, second = ranks.run_ranks(2, iterate, spec, timeout=20)
    assert first.error is not None and second.error is not None
    assert "ValueError" in second.error.bases
    assert "bad sample 5" in second.error.text
    assert "in __getitem__" in second.error.traceback  # the worker's own traceback
    assert first.error.type_name == "PeerFailedError" and first.error.ranks == (1,)
    assert "rank 1" in first.error.text and "bad sample 5" in first.error.text
    assert first.seconds < SOON_S


# ----


def ask_without_iterating(rank: int, world_size: int, spec: Spec) -> tuple[float, Outcome]:
    """Rank 0 asks everything that can be asked while rank 1 does nothing, twice: before and within an epoch."""
    slowest, steps = 0.0, []
    with spec.loader(rank, world_size) as loader:
        slowest = max(slowest, ask(loader) if rank == 0 else 0.0)
        dist.barrier()
        for batch in loader:
            steps.append(seen(batch))
            if len(steps) == 2:
                slowest = max(slowest, ask(loader) if rank == 0 else 0.0)
                dist.barrier()
        return slowest, Outcome([steps], loader.stats())


def ask(loader: Any) -> float:
    slowest = 0.0
    for call in (lambda: len(loader), lambda: repr(loader), loader.stats, lambda: loader.batch_size):
        start = time.monotonic()
        with contextlib.suppress(TypeError):
            call()
        slowest = max(slowest, time.monotonic() - start)
    return slowest


def test_a11_nothing_but_iteration_communicates() -> None:
    spec = Spec([10] * 12, token_budget=10)
    answers = ranks.values(2, ask_without_iterating, spec, timeout=20)
    assert answers[0][0] < 1
    check([outcome for _, outcome in answers], spec)


# ----


def break_and_go_on(rank: int, world_size: int, spec: Spec) -> list[tuple[list[Seen], list[Seen], int]]:
    """Three times: epoch 0 broken off after step 3, epoch 1 whole; with the number of open files after each."""
    out = []
    for _ in range(3):
        with spec.loader(rank, world_size) as loader:
            broken = record(loader, num_steps=3)
            out.append((broken, record(loader), 0))
        out[-1] = (*out[-1][:2], len(os.listdir("/proc/self/fd")))
    return out


def fresh_epoch(rank: int, world_size: int, spec: Spec, epoch: int) -> list[Seen]:
    with spec.loader(rank, world_size) as loader:
        loader.set_epoch(epoch)
        return record(loader)


BREAKING = Spec([10] * 20, 10, num_workers=2, options={"persistent_workers": True, "shuffle": True, "window": 4})


def test_a12_the_epoch_after_a_broken_one_is_whole_and_fresh() -> None:
    per_rank = ranks.values(2, break_and_go_on, BREAKING)
    fresh = ranks.values(2, fresh_epoch, BREAKING, 1)
    for attempt in range(3):
        assert [len(out[attempt][0]) for out in per_rank] == [3, 3]
        whole = [out[attempt][1] for out in per_rank]
        assert_each_once(whole, range(20))
        assert_steps_aligned(whole)
        assert [[step.ids for step in steps] for steps in whole] == [[step.ids for step in steps] for steps in fresh]
    for out in per_rank:
        assert out[2][2] <= out[0][2] + 1, "open files grew with every round"


def leave_alone(rank: int, world_size: int, spec: Spec) -> tuple[Any, float, list[Seen]]:
    """Rank 0 leaves after three steps, rank 1 goes on; then both run the next epoch."""
    start, error = time.monotonic(), None
    with spec.loader(rank, world_size) as loader:
        try:
            record(loader, num_steps=3 if rank == 0 else None)
        except odb.errors.PeerClosedError as raised:
            error = (str(raised), raised.ranks)
        seconds = time.monotonic() - start
        dist.barrier()
        return error, seconds, record(loader)


def test_a12_a_rank_that_leaves_alone_is_named_to_the_others() -> None:
    spec = BREAKING.but(options={"max_steps_per_round": 2})
    first, second = ranks.values(2, leave_alone, spec, timeout=30)
    assert first[0] is None
    text, culprits = second[0]
    assert culprits == (0,) and "rank 0" in text
    assert second[1] < SOON_S
    assert_each_once([first[2], second[2]], range(20))
    assert_steps_aligned([first[2], second[2]])


# ----


def model_parallel(rank: int, world_size: int, spec: Spec) -> Outcome:
    """Two data-parallel ranks of two model-parallel partners each: (0, 1) and (2, 3)."""
    return iterate(rank, world_size, spec.but(options={"dp_rank": rank // 2, "dp_world_size": 2}))


def model_parallel_mesh(rank: int, world_size: int, spec: Spec) -> Outcome:
    """The same, said by a device mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return iterate(rank, world_size, spec.but(options={"device_mesh": mesh}))


@pytest.mark.parametrize("way", [model_parallel, model_parallel_mesh])
def test_a13_model_parallel_partners_share_their_batches(way: Callable[[int, int, Spec], Outcome]) -> None:
    spec = Spec([10] * 12, token_budget=10)
    outcomes = ranks.values(4, way, spec)
    steps = steps_of(outcomes)
    assert [[step.ids for step in s] for s in steps[::2]] == [[step.ids for step in s] for s in steps[1::2]]
    check([outcomes[0], outcomes[2]], spec)
    for rank_steps in steps:
        assert len(rank_steps) == 6
        assert {step.info.all_tokens for step in rank_steps} == {20}
        assert {step.info.all_loss_tokens for step in rank_steps} == {18}
        assert {step.info.loss_scale for step in rank_steps} == {1.0}


def test_a14_fewer_samples_than_window_and_workers() -> None:
    spec = Spec([5, 9, 7], token_budget=10, num_workers=4, options={"window": 1024})
    steps = check(ranks.values(2, iterate, spec), spec)
    assert [len(s) for s in steps] == [2, 2]
    assert sum(map(num_idle, steps)) == 1


def test_a14_fewer_samples_than_ranks() -> None:
    spec = Spec([5, 9], token_budget=10)
    steps = check(ranks.values(4, iterate, spec), spec)
    assert [len(s) for s in steps] == [1, 1, 1, 1]
    assert sum(map(num_idle, steps)) == 2


def test_a14_no_sample_at_all_is_an_epoch_without_batches() -> None:
    assert [outcome.steps for outcome in ranks.values(2, iterate, Spec([], token_budget=10))] == [[], []]


def test_a16_fillers_count_nowhere() -> None:
    spec = Spec([50] * 7 + [30] * 2, token_budget=50, share=[range(7), [7, 8]])
    outcomes = ranks.values(2, iterate, spec)
    steps = check(outcomes, spec)
    assert sum(outcome.stats.emitted_samples for outcome in outcomes) == 9
    assert sum(outcome.stats.real_tokens for outcome in outcomes) == 410
    assert sum(outcome.stats.loss_tokens for outcome in outcomes) == 410 - 9
    assert outcomes[1].stats.idle_steps == num_idle(steps[1]) == 5
    rows = [step.shape[0] for rank_steps in steps for step in rank_steps if not step.idle]
    assert sum(rows) == 9
    for slot in zip(*steps, strict=True):  # a loss of 1.0 for every token
        assert sum(step.info.loss_scale * 1.0 for step in slot) / 2 == pytest.approx(1.0, abs=1e-15)


def test_a16_a_filler_looks_like_a_real_batch() -> None:
    for idle, shapes in ranks.values(2, batch_makeup, Spec([50] * 7 + [30], 50, share=[range(7), [7]])):
        assert len(shapes) == 1, f"fillers differ in keys or types (idle: {idle})"


def batch_makeup(rank: int, world_size: int, spec: Spec) -> tuple[int, set[Any]]:
    """How many fillers came, and which sets of (key, type, number of dimensions) batches have."""
    kinds, idle = set(), 0
    with spec.loader(rank, world_size) as loader:
        for batch in loader:
            idle += odb.pop_step_info(batch).idle
            kinds.add(tuple((k, v.dtype, v.ndim) for k, v in batch.items()))
    return idle, kinds


# ---- the sum of it: guarantees over worlds


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_guarantee_equal_steps_and_every_sample_once(world_size: int) -> None:
    short, long = log_normal(120, 60, 0.6, 4, 400, seed=1), log_normal(120, 180, 0.6, 4, 400, seed=2)
    shares = [list(range(r * 60, (r + 1) * 60)) for r in range(world_size)]  # the token totals differ by three
    spec = Spec((short[:60] + long[:60] + short[60:] + long[60:])[: 60 * world_size], 1000, share=shares)
    spec = spec.but(num_workers=2, options={"window": 24})
    outcomes = ranks.values(world_size, iterate, spec, 2)
    for epoch in range(2):
        steps = [outcome.epochs[epoch] for outcome in outcomes]
        assert_steps_aligned(steps)
        assert_each_once(steps, range(len(spec.lengths)))
        assert_within_budget(steps, 1000)
