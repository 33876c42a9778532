"""Batch samplers: every sample once over all ranks, equal steps, exact lengths, resumable, the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from odb.collators import BlockMaskCollator, FlattenCollator
from odb.errors import ConfigError
from odb.plan.rebalance import Quadratic
from odb.samplers import (
    BatchRebalanceSampler,
    LabelBalancedBatchSampler,
    LengthGroupedSampler,
    MultipackBatchSampler,
    label_counts_of,
    lengths_of,
)

RNG = np.random.default_rng(0)
LENGTHS = np.clip(RNG.lognormal(4, 0.8, 333), 1, 512).astype(np.int64)
COUNTS = (LENGTHS * RNG.beta(0.8, 1.6, 333)).astype(np.int64)

Make = Callable[..., Any]

MAKERS: dict[str, Make] = {
    "multipack": lambda **k: MultipackBatchSampler(LENGTHS, 512, **k),
    "multipack rows": lambda **k: MultipackBatchSampler(LENGTHS, 512, rows_per_batch=3, max_samples=9, **k),
    "multipack window": lambda **k: MultipackBatchSampler(LENGTHS, 512, window=64, **k),
    "multipack whole": lambda **k: MultipackBatchSampler(LENGTHS, 512, window=None, **k),
    "multipack sequential": lambda **k: MultipackBatchSampler(LENGTHS, 512, sequential=True, **k),
    "multipack labels": lambda **k: MultipackBatchSampler(LENGTHS, 512, label_counts=COUNTS, **k),
    "labels padded": lambda **k: LabelBalancedBatchSampler(LENGTHS, COUNTS, 4, **k),
    "labels flattened": lambda **k: LabelBalancedBatchSampler(LENGTHS, COUNTS, 4, mode="flattened", **k),
    "rebalance": lambda **k: BatchRebalanceSampler(LENGTHS, 32, **k),
    "length grouped": lambda **k: LengthGroupedSampler(LENGTHS, batch_size=4, window=100, **k),
    "token budget": lambda **k: LengthGroupedSampler(LENGTHS, token_budget=2048, window=None, **k),
}

every_sampler = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


class Samples(torch.utils.data.Dataset):
    def __init__(self, lengths: Any = LENGTHS) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict:
        ids = torch.full((int(self.lengths[index]),), index)
        return {"input_ids": ids, "labels": ids.clone(), "id": index}


def all_ranks(make: Make, world: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    out = []
    for rank in range(world):
        sampler = make(rank=rank, world_size=world, **options)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        out.append(batches)
    return out


def seen(ranks: list[list[list[int]]]) -> list[int]:
    return sorted(chain.from_iterable(chain.from_iterable(ranks)))


@every_sampler
@pytest.mark.parametrize("world", [1, 3, 8])
def test_every_sample_once_and_equal_steps(make: Make, world: int) -> None:
    for epoch in (0, 2):
        ranks = all_ranks(make, world, epoch, drop_last=False)
        assert len({len(one) for one in ranks}) == 1
        assert all(batch for one in ranks for batch in one)
        assert seen(ranks) == list(range(len(LENGTHS)))


@every_sampler
def test_what_is_dropped_is_counted(make: Make) -> None:
    ranks = all_ranks(make, 4, drop_last=True)
    stats = make(world_size=4, drop_last=True).stats()
    used = seen(ranks)
    assert len(set(used)) == len(used)
    assert len(used) + stats["dropped"] == len(LENGTHS)
    assert stats["repeated"] == 0


@every_sampler
def test_with_fewer_samples_than_ranks_the_first_come_again(make: Make) -> None:
    few = {name: value for name, value in MAKERS.items() if value is make}
    name = next(iter(few))
    lengths, counts = LENGTHS[:3], COUNTS[:3]
    makers: dict[str, Make] = {
        "multipack labels": lambda **k: MultipackBatchSampler(lengths, 512, label_counts=counts, **k),
        "labels padded": lambda **k: LabelBalancedBatchSampler(lengths, counts, 4, **k),
        "rebalance": lambda **k: BatchRebalanceSampler(lengths, 5, **k),
        "length grouped": lambda **k: LengthGroupedSampler(lengths, batch_size=4, **k),
    }
    small = makers.get(name, lambda **k: MultipackBatchSampler(lengths, 512, **k))
    ranks = all_ranks(small, 5, drop_last=False)
    assert [len(one) for one in ranks] == [1] * 5
    assert set(seen(ranks)) == {0, 1, 2}
    assert small(world_size=5, drop_last=False).stats()["repeated"] == 2


@every_sampler
def test_the_plan_is_a_function_of_seed_and_epoch(make: Make) -> None:
    sampler, again = make(seed=3), make(seed=3)
    torch.manual_seed(1)
    first = list(sampler)
    torch.manual_seed(2)
    assert list(sampler) == first == list(again)
    sampler.set_epoch(1)
    assert list(sampler) != first or "sequential" in sampler.settings()
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(make(seed=4)) != first


@every_sampler
@pytest.mark.parametrize("skip", [0, 4, 11])
def test_a_pass_goes_on_where_the_state_says(make: Make, skip: int) -> None:
    options = {"rank": 1, "world_size": 2, "grad_accum_steps": 2}
    whole = make(**options)
    whole.set_epoch(2)
    batches = list(whole)
    skip = min(skip, len(batches))
    interrupted = make(**options)
    interrupted.set_epoch(2)
    iterator = iter(interrupted)
    assert [next(iterator) for _ in range(skip)] == batches[:skip]
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = make(**options)
    list(resumed)  # a plan of another epoch is cached
    resumed.load_state_dict(state)
    resumed.set_epoch(2)  # a trainer says it again
    assert len(resumed) == len(batches)
    assert list(resumed) == batches[skip:]
    assert list(resumed) == batches
    resumed.load_state_dict(whole.state_dict(num_consumed=len(batches)))
    assert list(resumed) == []


def test_a_state_of_something_else_is_refused() -> None:
    state = MultipackBatchSampler(LENGTHS, 512).state_dict()
    changes: list[tuple[Any, str]] = [
        (MultipackBatchSampler(LENGTHS, 513), "capacity: saved 512, now 513"),
        (MultipackBatchSampler(LENGTHS, 512, world_size=2), "world_size: saved 1, now 2"),
        (MultipackBatchSampler(LENGTHS[::-1].copy(), 512), "data: saved"),
        (MultipackBatchSampler(LENGTHS, 512, label_counts=COUNTS), "label_window_updates: saved None, now 1"),
        (LengthGroupedSampler(LENGTHS, batch_size=2), "sampler: saved 'MultipackBatchSampler'"),
    ]
    for other, text in changes:
        with pytest.raises(ConfigError, match=text):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match="no state of version 1"):
        MultipackBatchSampler(LENGTHS, 512).load_state_dict({"step": 3})
    with pytest.raises(ConfigError, match="num_consumed must be an integer from 0 to"):
        MultipackBatchSampler(LENGTHS, 512).state_dict(num_consumed=10**6)


@every_sampler
def test_inside_a_dataloader(make: Make) -> None:
    loader = DataLoader(Samples(), batch_sampler=make(drop_last=False), num_workers=2, collate_fn=FlattenCollator())
    ids = [i for batch in loader for i in batch["id"].tolist()]
    assert sorted(ids) == list(range(len(LENGTHS)))
    assert isinstance(make(), Sampler)


@every_sampler
def test_whole_plans_are_for_frameworks_that_shard(make: Make) -> None:
    """Every W-th batch of the unsharded plan is what a rank of W gets otherwise."""
    whole = list(make(world_size=4, shard=False))
    assert len(whole) % 4 == 0 and len(make(world_size=4, shard=False)) == len(whole)
    for rank in range(4):
        assert whole[rank::4] == list(make(world_size=4, rank=rank))


def test_accelerate_deals_out_a_whole_plan() -> None:
    data_loader = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed")
    whole = MultipackBatchSampler(LENGTHS, 512, world_size=2, shard=False)
    for even_batches in (True, False):
        shards = [data_loader.BatchSamplerShard(whole, 2, rank, even_batches=even_batches) for rank in range(2)]
        ranks = [list(one) for one in shards]
        assert [len(one) for one in shards] == [len(one) for one in ranks]
        assert ranks == [list(MultipackBatchSampler(LENGTHS, 512, world_size=2, rank=rank)) for rank in range(2)]


# ---- multipack


def rows_of(sampler: MultipackBatchSampler) -> list[list[int]]:
    return [row for batch in sampler.plan().batches for row in batch]


@pytest.mark.parametrize(
    "options", [{}, {"rows_per_batch": 3}, {"window": 64}, {"sequential": True}, {"max_samples": 4}]
)
def test_rows_keep_their_bounds(options: dict) -> None:
    sampler = MultipackBatchSampler(LENGTHS, 512, **options)
    for row in rows_of(sampler):
        assert LENGTHS[row].sum() <= 512
        assert len(row) <= options.get("max_samples", 10**9)
    assert all(len(batch) == options.get("rows_per_batch", 1) for batch in sampler.plan().batches)


def test_sequential_rows_keep_the_order() -> None:
    sampler = MultipackBatchSampler(LENGTHS, 512, sequential=True, shuffle=False, drop_last=False)
    assert list(chain.from_iterable(sampler)) == list(range(len(LENGTHS)))


def test_d13_statistics_are_those_of_what_is_kept() -> None:
    sampler = MultipackBatchSampler(np.full(5, 10), 10, rows_per_batch=2)
    stats = sampler.stats()
    assert (stats["batches"], stats["rows"], stats["token_slots"]) == (2, 4, 40)
    assert stats["fill"] == 1.0 and stats["dropped"] == 1


def test_the_capacity_of_the_effective_batch_and_multiples() -> None:
    sampler = MultipackBatchSampler(np.array([8, 8, 8, 7]), 3 * 8, drop_last=False)
    assert sorted(map(len, sampler)) == [1, 3]
    padded = MultipackBatchSampler(np.full(9, 5), 17, pad_to_multiple_of=8)  # 3 x 5 = 15 pads to 16, never to 24
    assert {len(batch) for batch in padded} == {3}


def test_more_than_a_row_is_refused_or_left_out() -> None:
    lengths = np.array([4, 2, 3, 1])
    with pytest.raises(ConfigError, match=r"sample 0 has 4 tokens, more than a row's capacity 3 \(1 such samples\)"):
        MultipackBatchSampler(lengths, 3)
    sampler = MultipackBatchSampler(lengths, 3, on_oversize="skip", drop_last=False)
    assert sorted(chain.from_iterable(sampler)) == [1, 2, 3]
    assert sampler.stats()["oversize"] == 1


@pytest.mark.parametrize("rows_per_batch", [1, 4])
def test_labels_of_batches_and_updates_come_out_even(rows_per_batch: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.2, 0.7, 4000), 1, 4096).astype(np.int64)
    counts = (lengths * rng.beta(0.8, 1.6, 4000)).astype(np.int64)
    plain = MultipackBatchSampler(lengths, 4096, rows_per_batch=rows_per_batch, world_size=4)
    sampler = MultipackBatchSampler(
        lengths, 4096, rows_per_batch=rows_per_batch, world_size=4, grad_accum_steps=2, label_counts=counts
    )
    metrics = sampler.label_metrics
    assert list(metrics) == ["before", "before_accumulation", "before_microbatch", "before_rank", "after"]
    before, after = metrics["before"], metrics["after"]
    for name in ("batches", "packed_rows", "total_label_count", "excluded_tail_microbatches", "updates"):
        assert before[name] == after[name]
    assert after["std_label_count"] < (0.85 if rows_per_batch == 1 else 0.4) * before["std_label_count"]
    assert after["std_global_update_labels"] < 0.6 * before["std_global_update_labels"]
    assert after["total_batch_cost"] <= before["total_batch_cost"]
    same = ("std_label_count", "std_global_update_labels", "total_batch_cost")
    assert [metrics["before_rank"][name] for name in same] == pytest.approx([after[name] for name in same])
    assert sampler.stats()["fill"] == pytest.approx(plain.stats()["fill"], abs=0.01)


def test_labels_and_their_neighbours_options() -> None:
    with pytest.raises(ConfigError, match=r"sequential=True keeps the order, label_counts ask to change it"):
        MultipackBatchSampler(LENGTHS, 512, sequential=True, label_counts=COUNTS)
    with pytest.raises(ConfigError, match=r"label_starts belong to label_counts"):
        MultipackBatchSampler(LENGTHS, 512, label_starts=COUNTS)
    for width in (0, True, 1.5):
        with pytest.raises(ConfigError, match="label_window_updates must be an integer >= 1"):
            MultipackBatchSampler(LENGTHS, 512, label_counts=COUNTS, label_window_updates=width)


# ---- fixed counts


@pytest.mark.parametrize("mode", ["padded", "flattened"])
def test_fixed_counts_stay_fixed(mode: str) -> None:
    sampler = LabelBalancedBatchSampler(LENGTHS, COUNTS, 4, mode=mode, grad_accum_steps=3, world_size=2)
    assert {len(batch) for batch in sampler} == {4}
    before, after = sampler.label_metrics["before"], sampler.label_metrics["after"]
    for name in ("std_label_count", "std_batch_cost", "total_batch_cost", "max_batch_cost", "padding_tokens"):
        assert after[name] <= before[name] + 1e-9, name
    assert after["std_label_count"] < before["std_label_count"]
    assert after["std_global_update_labels"] < before["std_global_update_labels"]
    assert after["total_label_count"] == before["total_label_count"] == COUNTS.sum()


def test_an_incomplete_tail_keeps_its_random_content() -> None:
    sampler = LabelBalancedBatchSampler(LENGTHS, COUNTS, 4, grad_accum_steps=2, drop_last=False)
    order = np.random.default_rng([0, 0]).permutation(len(LENGTHS)).tolist()
    flat = list(sampler.indices())
    covered = len(LENGTHS) // 8 * 8
    assert flat[covered:] == order[covered:] and len(flat) == len(sampler.indices()) == len(LENGTHS)
    assert sorted(flat) == list(range(len(LENGTHS)))
    sampler.indices().set_epoch(1)
    assert list(sampler.indices()) != flat


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "packed"}, r"mode must be 'padded' or 'flattened', got 'packed'"),
        ({"batch_size": 0}, r"batch_size must be an integer >= 1, got 0"),
        ({"label_counts": LENGTHS + 1}, r"label counts must be from 0 to the length"),
        ({"label_counts": COUNTS[:-1]}, r"one length, label count and start per sample"),
        ({"lengths": LENGTHS * 0}, r"lengths must be >= 1, sample 0 has 0"),
        ({"lengths": LENGTHS * 1.0}, r"lengths must be a list of integers, got float64"),
        ({"lengths": []}, r"lengths is empty"),
        ({"rank": 2, "world_size": 2}, r"rank must be an integer from 0 to world_size - 1 = 1, got 2"),
        ({"seed": -1}, r"seed must be an integer >= 0"),
        ({"world_size": 0}, r"world_size must be an integer >= 1"),
    ],
)
def test_wrong_options_are_named(options: dict, text: str) -> None:
    arguments = {"lengths": LENGTHS, "label_counts": COUNTS, "batch_size": 4} | options
    with pytest.raises(ConfigError, match=text):
        LabelBalancedBatchSampler(**arguments)
    with pytest.raises(ConfigError, match="set_epoch needs an integer >= 0"):
        LabelBalancedBatchSampler(LENGTHS, COUNTS, 4).set_epoch(-1)


# ---- rebalance


def test_global_batches_are_shared_out_whole() -> None:
    world, accum = 4, 2
    order = np.random.default_rng([0, 0]).permutation(len(LENGTHS))
    ranks = all_ranks(MAKERS["rebalance"], world, grad_accum_steps=accum)
    assert all(len(one) == len(LENGTHS) // 32 * accum for one in ranks)
    for number in range(len(LENGTHS) // 32):
        steps = [one[number * accum : (number + 1) * accum] for one in ranks]
        assert seen(steps) == sorted(order[number * 32 : number * 32 + 32].tolist())


def test_the_documented_example_of_batch_rebalance() -> None:
    lengths = np.array([128, 256, 512, 768, 1024, 1536, 2048, 4096])
    ranks = [list(BatchRebalanceSampler(lengths, 8, rank=rank, world_size=2)) for rank in range(2)]
    groups = sorted(sorted(lengths[batch].tolist()) for one in ranks for batch in one)
    assert groups == [[128, 256, 512, 768, 1024, 1536], [2048, 4096]]


def test_work_is_even_where_random_batches_are_not() -> None:
    sampler = BatchRebalanceSampler(LENGTHS, 64, world_size=8, grad_accum_steps=1)
    cost = Quadratic()
    random = LENGTHS[: 64 * 5].reshape(5, 8, 8).max(axis=2)
    naive = np.array([[float(cost(8, m)) for m in step] for step in random])
    assert sampler.stats()["straggler_ratio"] < 1.35 < (naive.max(axis=1) / naive.mean(axis=1)).mean()
    assert sampler.stats()["max_padded_tokens"] < 8 * LENGTHS.max()


def test_a_bound_that_cannot_be_kept_is_counted_and_no_sample_lost(caplog: pytest.LogCaptureFixture) -> None:
    sampler = BatchRebalanceSampler(np.full(64, 100), 16, world_size=2, max_tokens=500, drop_last=False)
    assert seen([list(sampler), list(BatchRebalanceSampler(np.full(64, 100), 16, world_size=2, rank=1))]) == list(
        range(64)
    )
    assert sampler.stats()["above_max_tokens"] == 8
    assert "8 batches are above max_tokens=500" in caplog.text
    kept = BatchRebalanceSampler(np.full(64, 100), 16, world_size=2, max_tokens=800)
    assert kept.stats()["above_max_tokens"] == 0 and kept.stats()["max_padded_tokens"] == 800


def test_too_few_samples_for_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=6 can't fill 8 batches"):
        BatchRebalanceSampler(LENGTHS, 6, world_size=4, grad_accum_steps=2)
    with pytest.raises(ConfigError, match=r"3 samples don't make one global_batch_size=8"):
        BatchRebalanceSampler(LENGTHS[:3], 8)
    with pytest.raises(ConfigError, match=r"alpha and intercept must be finite and >= 0"):
        BatchRebalanceSampler(LENGTHS, 8, alpha=-1.0)


def test_the_users_cost_decides() -> None:
    def only_rows(rows: Any, longest: Any) -> Any:
        return rows * 1.0

    batches = list(BatchRebalanceSampler(LENGTHS, 32, world_size=4, cost_fn=only_rows))
    assert {len(batch) for batch in batches} == {8}


# ---- length groups


def test_token_budgets_hold_and_beat_random_batches() -> None:
    sampler = LengthGroupedSampler(LENGTHS, token_budget=2048, window=None, world_size=4)
    for batch in chain.from_iterable(all_ranks(MAKERS["token budget"], 4)):
        assert len(batch) * LENGTHS[batch].max() <= 2048
    assert sampler.stats()["step_efficiency"] > 0.85
    first = [next(iter(one)) for one in all_ranks(MAKERS["token budget"], 4)]
    assert LENGTHS.max() in [LENGTHS[batch].max() for batch in first]


def test_one_of_two_sizes_is_asked_for() -> None:
    for options in ({}, {"batch_size": 4, "token_budget": 100}):
        with pytest.raises(ConfigError, match="give batch_size or token_budget"):
            LengthGroupedSampler(LENGTHS, **options)


# ---- metadata


class Columns:
    """What a Hugging Face dataset looks like from here."""

    def __init__(self, **columns: list) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}


def test_lengths_are_read_off_the_dataset() -> None:
    assert lengths_of(Columns(length=[3, 4], input_ids=[[1], [2]])).tolist() == [3, 4]
    assert lengths_of(Columns(position_ids=[[0, 1, 2], [0, 1]])).tolist() == [3, 2]
    assert lengths_of(Columns(input_ids=[[1, 2], [1]])).tolist() == [2, 1]
    assert lengths_of(Samples()).tolist() == LENGTHS.tolist()
    with pytest.raises(ConfigError, match="sample 0 has no length, position_ids or input_ids"):
        lengths_of(Columns(text=["a"]))


def test_label_counts_are_read_off_the_dataset() -> None:
    labels = [[1, -100, 2], [-100, 3], [4, 5], []]
    counts, starts = label_counts_of(Columns(labels=labels), masks_first=False)
    assert (counts.tolist(), starts.tolist()) == ([2, 1, 2, 0], [1, 0, 1, 0])
    assert [one.tolist() for one in label_counts_of(Columns(labels=labels))] == [[1, 1, 1, 0], [0, 0, 0, 0]]
    shifted = Columns(shift_labels=labels, labels=labels)
    assert [one.tolist() for one in label_counts_of(shifted, masks_first=False)] == [[2, 1, 2, 0], [0] * 4]
    assert label_counts_of(Columns(input_ids=[[1, 2, 3], [4]]))[0].tolist() == [2, 0]
    with pytest.raises(ConfigError, match="neither labels nor input_ids"):
        label_counts_of(Columns(text=["a"]))


def test_rows_reach_the_collator_as_they_were_planned() -> None:
    sampler = MultipackBatchSampler(LENGTHS, 512, rows_per_batch=3, max_samples=9, drop_last=False)
    collate = BlockMaskCollator(row_capacity=512, max_samples=9)
    for batch in DataLoader(Samples(), batch_sampler=sampler, collate_fn=collate):
        assert batch["input_ids"].shape[0] <= 3 and batch["input_ids"].shape[1] <= 512
