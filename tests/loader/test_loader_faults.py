"""What went wrong in a published implementation of the idea, line by line: here the right thing happens.

The situations and what happened in them were measured with `online-dynamic-batching` 0.1.2; see docs/protocol.md.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import ranks
from scenarios import Outcome, Spec, assert_exact_gradients, iterate, iterate_all, log_normal, train
from torch.utils.data import DataLoader

import odb
from odb.testing import (
    IterableLengthsDataset,
    LengthsDataset,
    Seen,
    assert_each_once,
    assert_steps_aligned,
    assert_within_budget,
    collate,
    record,
)

pytestmark = pytest.mark.timeout(120)


def shards(sizes: list[int], mean: float, seed: int, **changes: Any) -> Spec:
    """Shards of these sizes, lengths as text has them, four to twelve samples a batch."""
    total, ends = sum(sizes), np.cumsum([0, *sizes]).tolist()
    share = [range(a, b) for a, b in itertools.pairwise(ends)]
    lengths = log_normal(total, mean, 0.6, 2, int(mean * 6), seed)
    return Spec(lengths, int(mean * 8), share=share).but(**changes)


def checked(outcomes: list[Outcome], spec: Spec) -> list[list[Seen]]:
    steps = [outcome.steps for outcome in outcomes]
    assert_steps_aligned(steps)
    assert_each_once(steps, range(len(spec.lengths)))
    assert_within_budget(steps, spec.token_budget)
    return steps


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_shards_run_equal_steps(world_size: int) -> None:
    spec = shards([100] * world_size, 20, seed=1, options={"window": 64})
    checked(ranks.values(world_size, iterate, spec), spec)


SIZES = [1000, 700, 400, 1000]


@pytest.mark.parametrize("loss_scaling", ["exact", "approx"])
def test_unequal_shards_with_join_lose_nothing(loss_scaling: str) -> None:
    spec = shards(SIZES, 12, seed=2, options={"window": 128, "loss_scaling": loss_scaling})
    steps = checked(ranks.values(4, iterate, spec), spec)
    for slot in zip(*steps, strict=True):
        for step in slot:
            expected = 4 * step.info.local_loss_tokens / step.info.window_loss_tokens
            assert step.info.loss_scale == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("loss_scaling", ["exact", "approx"])
def test_unequal_shards_without_join_end_together(loss_scaling: str) -> None:
    options = {"window": 128, "loss_scaling": loss_scaling, "join": False}
    outcomes = ranks.values(4, iterate, shards(SIZES, 12, seed=2, options=options), timeout=30)
    steps = [outcome.steps for outcome in outcomes]
    assert_steps_aligned(steps)
    ids = [i for rank_steps in steps for step in rank_steps if not step.idle for i in step.ids]
    assert len(ids) == len(set(ids))
    assert all(outcome.stats.idle_steps == 0 for outcome in outcomes)
    assert sum(len(step.ids) for step in steps[2]) == 400, "the smallest shard is used up"


@pytest.mark.parametrize("quota", [500, 5000])
def test_a_sample_quota_is_reached_and_not_overshot_by_a_step(quota: int) -> None:
    options = {"window": 128, "join": False, "sample_quota": quota, "grad_accum_steps": 2}
    steps = [o.steps for o in ranks.values(4, iterate, shards(SIZES, 12, seed=2, options=options), timeout=30)]
    assert_steps_aligned(steps)
    totals = np.cumsum([step.info.all_samples_this_step for step in steps[0]]).tolist()
    assert totals[-1] >= quota
    assert totals[-3] < quota, "the epoch ends with the first optimizer step that reaches the quota"
    assert steps[0][-1].info.sync_gradients


def test_random_unequal_shards_lose_nothing() -> None:
    rng = np.random.default_rng(3)
    specs = []
    for seed in range(25):
        options = {"window": int(rng.integers(3, 30)), "max_steps_per_round": int(rng.integers(1, 12))}
        specs.append(shards(rng.integers(0, 60, 3).tolist(), 12, seed, num_workers=0, options=options))
    for spec, *outcomes in zip(specs, *ranks.values(3, iterate_all, specs), strict=True):
        checked(outcomes, spec)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.soak)])
def test_every_start_method_aligns_the_ranks(method: str, world_size: int) -> None:
    spec = shards([39, 71][:world_size], 12, seed=4, options={"multiprocessing_context": method, "window": 16})
    started = checked(ranks.values(world_size, iterate, spec), spec)
    inline = checked(ranks.values(world_size, iterate, spec.but(num_workers=0)), spec)
    assert started == inline


@pytest.mark.parametrize("masked", [0.0, 0.6])
@pytest.mark.parametrize("accum", [1, 4])
def test_loss_is_exact_in_every_step_and_window(masked: float, accum: int) -> None:
    spec = shards([30, 18], 12, seed=5, data={"prompt_fraction": masked}, options={"grad_accum_steps": accum})
    assert_exact_gradients(spec, ranks.values(2, train, spec))


def test_loss_of_the_approximate_mode_is_exact_too() -> None:
    spec = shards([30, 18], 12, seed=5, data={"prompt_fraction": 0.6}, options={"loss_scaling": "approx"})
    assert_exact_gradients(spec, ranks.values(2, train, spec))


def test_loss_is_exact_after_a_start_by_spawn() -> None:
    spec = shards([30, 18], 12, seed=5, options={"multiprocessing_context": "spawn"})
    assert_exact_gradients(spec, ranks.values(2, train, spec))


def own_dict(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function that keeps nothing that it does not know."""
    batch = collate(samples)
    return {name: batch[name] for name in ("id", "input_ids", "labels")}


def dict_like(samples: list[dict[str, Any]]) -> UserDict[str, Any]:
    """A mapping that is no dict, as tokenizers return."""
    return UserDict(collate(samples))


@pytest.mark.parametrize("collate_fn", [own_dict, dict_like])
def test_the_scale_survives_any_collate_function(collate_fn: Any) -> None:
    spec = shards([30, 18], 12, seed=5, data={"prompt_fraction": 0.6}, options={"collate_fn": collate_fn})
    assert_exact_gradients(spec, ranks.values(2, train, spec))


def first_batches(rank: int, world_size: int, spec: Spec) -> list[float]:
    out = []
    for _ in range(5):
        with spec.loader(rank, world_size) as loader:
            record(loader, num_steps=1)
            out.append(loader.stats().first_batch_s)
    return out


def test_the_first_batch_comes_without_a_random_wait() -> None:
    per_rank = ranks.values(2, first_batches, Spec([10] * 100, 40))
    assert np.median(per_rank) < 1.0


def test_samples_without_tokens_are_an_error_or_counted() -> None:
    spec = Spec([5, 0, 7], 10)
    with pytest.raises(odb.errors.MeasureError, match=r"index 1.*no tokens.*on_empty"):
        iterate(0, 1, spec)
    outcome = iterate(0, 1, spec.but(options={"on_empty": "skip"}))
    assert_each_once([outcome.steps], [0, 2])
    assert outcome.stats.rejected["empty"] == 1


def strings(index: int) -> str:
    return "text" * (index + 1)


class Raw:
    """Samples that become tokens in the collate function."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": strings(index)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_cannot_be_measured_are_an_error_with_a_way_out(num_workers: int) -> None:
    with pytest.raises(odb.errors.MeasureError, match=r"input_ids(?s:.*)per_sample"):
        list(odb.ODBDataLoader(Raw(), token_budget=10, num_workers=num_workers))


def characters(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A processor in a collate function: one sample in, a batch of one row out."""
    import torch

    (sample,) = samples
    row = torch.tensor([ord(letter) for letter in sample["text"]])
    return {"input_ids": row[None], "labels": row[None].clone()}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_processor_in_the_collate_function_can_run_per_sample(num_workers: int) -> None:
    collate_fn = odb.collators.per_sample(characters)
    with odb.ODBDataLoader(Raw(), token_budget=24, num_workers=num_workers, collate_fn=collate_fn) as loader:
        shapes = [(tuple(batch["input_ids"].shape), info.local_tokens) for batch, info in loader.steps()]
    assert sum(shape[0] for shape, _ in shapes) == 6
    assert sum(tokens for _, tokens in shapes) == 4 * (1 + 2 + 3 + 4 + 5 + 6)
    assert all(shape[0] == 1 or shape[0] * shape[1] <= 24 for shape, _ in shapes)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_iterable_datasets_work(num_workers: int) -> None:
    lengths = log_normal(60, 12, 0.6, 2, 60, seed=6)
    with odb.ODBDataLoader(
        IterableLengthsDataset(lengths), token_budget=100, num_workers=num_workers, collate_fn=collate
    ) as loader:
        for _ in range(2):
            steps = record(loader)
            assert_each_once([steps], range(60))
            assert_within_budget([steps], 100)


def stream(rank: int, world_size: int, lengths: list[int]) -> list[Seen]:
    dataset = IterableLengthsDataset(lengths, rank=rank, world_size=world_size)
    with odb.ODBDataLoader(dataset, token_budget=100, num_workers=2, collate_fn=collate) as loader:
        return record(loader)


def test_iterable_datasets_split_by_hand_align_the_ranks() -> None:
    lengths = log_normal(61, 12, 0.6, 2, 60, seed=6)
    steps = ranks.values(2, stream, lengths)
    assert_each_once(steps, range(61))
    assert_steps_aligned(steps)


def test_persistent_workers_work() -> None:
    options = {"persistent_workers": True, "shuffle": True}
    ((outcome),) = ranks.values(1, iterate, Spec([10] * 40, 40, num_workers=2, options=options), 3)
    for steps in outcome.epochs:
        assert_each_once([steps], range(40))


def processes_inline(rank: int, world_size: int) -> tuple[int, int]:
    with odb.ODBDataLoader(LengthsDataset([10] * 40), token_budget=40, num_workers=0, collate_fn=collate) as loader:
        batches = iter(loader)
        next(batches)
        during = len(ranks.children_of(os.getpid()))
        return during, loader.num_workers


def test_no_workers_means_no_processes() -> None:
    assert ranks.values(2, processes_inline) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_len_is_unknown_and_says_what_to_use(num_workers: int) -> None:
    loader = odb.ODBDataLoader(LengthsDataset([10] * 40), token_budget=40, num_workers=num_workers)
    with pytest.raises(TypeError, match=r"max_steps.*len\(loader.dataset\)"):
        len(loader)
    assert loader  # a trainer that asks whether there is a loader does not ask for its length


def break_often(rank: int, world_size: int, spec: Spec) -> list[int]:
    """How many processes there are after each of several broken epochs."""
    out = []
    with spec.loader(rank, world_size) as loader:
        for _ in range(5):
            record(loader, num_steps=2)
            out.append(len(ranks.children_of(os.getpid())))
        assert len(record(loader)) > 2
    return out


@pytest.mark.parametrize("persistent", [True, False])
def test_broken_epochs_leave_no_processes(persistent: bool) -> None:
    options = {"persistent_workers": persistent, "window": 8}
    spec = Spec([10] * 200, 20, num_workers=2, options=options)
    for counts in ranks.values(2, break_often, spec):
        assert max(counts) <= 3  # the collate process and its two workers


def throughput(loader: Any, count: int) -> float:
    start = time.perf_counter()
    for _ in loader:
        pass
    return count / (time.perf_counter() - start)


def triples(count: int) -> LengthsDataset:
    return LengthsDataset(log_normal(count, 600, 0.4, 16, 2400, seed=7))


@pytest.mark.soak
def test_throughput_is_that_of_a_plain_loader_of_fixed_batches() -> None:
    dataset, ratios = triples(4000), []
    for _ in range(5):
        plain = throughput(DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate), 4000)
        with odb.ODBDataLoader(dataset, token_budget=8 * 700, num_workers=2, collate_fn=collate) as loader:
            ratios.append(throughput(loader, 4000) / plain)
    assert np.median(ratios) > 0.6, ratios
