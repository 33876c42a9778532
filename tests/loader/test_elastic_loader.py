"""Elastic sharding in the loader: who reads what is granted round by round."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from scenarios import Outcome, Spec, iterate_all, log_normal, raises_with
from torch.utils.data import DistributedSampler, RandomSampler

import odb
from odb.errors import ConfigError
from odb.feed.chunk import pack, unpack
from odb.feed.elastic import shared_order, why_static
from odb.feed.granted import GrantedKeys
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

LENGTHS = log_normal(301, 20, 0.8, 3, 120, seed=3)
SPEC = Spec(LENGTHS, 200, num_workers=0, options={"shuffle": True, "sharding": "elastic", "max_held_tokens": 2000})

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"grad_accum_steps": 3},
    "filled": {"grad_accum_steps": 4, "accum_tail": "fill"},
    "small window": {"window": 5},
    "drop_last": {"drop_last": True},
    "drop tail": {"tail": "drop"},
    "quota": {"join": False, "sample_quota": 700},
}


def ids_of(outcome: Outcome) -> list[tuple[int, ...]]:
    return [step.ids for step in outcome.steps]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_epoch(world_size: int) -> None:
    specs = [SPEC.but(options=options) for options in KINDS.values()]
    everyone = ranks.values(world_size, iterate_all, specs)
    for k, (name, options) in enumerate(KINDS.items()):
        outcomes = [rank[k] for rank in everyone]
        steps = [outcome.steps for outcome in outcomes]
        assert_steps_aligned(steps)
        assert_within_budget(steps, 200)
        emitted = [i for rank in steps for step in rank for i in step.ids]
        num_dropped = sum(sum(outcome.stats.dropped.values()) for outcome in outcomes)
        if name == "quota":
            assert 700 <= len(emitted) < 700 + 100 and len(set(emitted)) > 250  # what is held at the end is not emitted
        elif options.get("drop_last") or options.get("tail"):
            assert len(set(emitted)) == len(emitted) == 301 - num_dropped
        else:
            assert_each_once(steps, range(301))
            assert num_dropped == 0
        most_held = max(outcome.stats.max_held_tokens for outcome in outcomes)
        assert (600 if "window" not in options else 60) < most_held <= 2000
        accum = options.get("grad_accum_steps", 1)
        if options.get("accum_tail") == "fill":
            assert len(steps[0]) % accum == 0


def test_few_equal_samples_take_no_step_more() -> None:
    specs = [Spec([10] * 20, 10 * rows, num_workers=0, options=SPEC.options) for rows in (1, 2, 5, 20)]
    for rank in ranks.values(2, iterate_all, specs):
        assert [len(outcome.steps) for outcome in rank] == [10, 5, 2, 1]
        assert not any(step.idle for outcome in rank for step in outcome.steps)


def test_workers_and_their_speed_change_nothing() -> None:
    specs = [
        SPEC.but(num_workers=n, options={"prefetch_factor": prefetch, "persistent_workers": n > 1})
        for n, prefetch in ((0, None), (1, 64), (3, 2))
    ]
    for rank in ranks.values(2, iterate_all, specs):
        first, *others = map(ids_of, rank)
        assert all(other == first for other in others)


def sampled(rank: int, world_size: int, drop_last: bool) -> dict[str, list[list[Seen]]]:
    dataset = LengthsDataset(LENGTHS)
    out = {}
    for name, sharding in (("auto", "auto"), ("static", "static")):
        sampler = DistributedSampler(dataset, world_size, rank, seed=4, drop_last=drop_last)
        options: dict[str, Any] = {"sampler": sampler, "collate_fn": collate, "sharding": sharding}
        with odb.ODBDataLoader(dataset, token_budget=200, **options) as loader:
            loader.set_epoch(2)
            out[name] = [record(loader), record(loader)]
    return out


def test_a_distributed_sampler_is_taken_without_its_duplicates() -> None:
    """301 samples on two ranks: the sampler repeats one of them."""
    found = ranks.values(2, sampled, False)
    for epoch in (0, 1):
        assert_each_once([rank["auto"][epoch] for rank in found], range(301))
        static = [i for rank in found for step in rank["static"][epoch] for i in step.ids]
        assert len(static) == 302
    assert found[0]["auto"][0] != found[0]["auto"][1]
    kept = [i for rank in ranks.values(2, sampled, True) for step in rank["auto"][0] for i in step.ids]
    assert len(set(kept)) == len(kept) == 300


def test_the_shared_order_is_the_samplers() -> None:
    for shuffle in (True, False):
        samplers = [DistributedSampler(LENGTHS, 2, rank, shuffle=shuffle, seed=7, drop_last=True) for rank in (0, 1)]
        for sampler in samplers:
            sampler.set_epoch(3)
        order = shared_order(samplers[0])
        assert [order[rank::2].tolist() for rank in (0, 1)] == [list(sampler) for sampler in samplers]


def left_early(rank: int, world_size: int) -> list[list[Seen]]:
    spec = SPEC.but(num_workers=2, options={"persistent_workers": True})
    with spec.loader(rank, world_size) as loader:
        return [record(loader, 3), record(loader), record(loader, 1), record(loader)]


def test_an_epoch_that_was_left_is_followed_by_whole_ones() -> None:
    found = ranks.values(2, left_early)
    for epoch in (1, 3):
        assert_each_once([rank[epoch] for rank in found], range(301))
        assert_steps_aligned([rank[epoch] for rank in found])


def tokens_of(rank: int, world_size: int, spec: Spec) -> dict[str, tuple[int, int]]:
    """Real tokens that this rank emitted, and steps."""
    out = {}
    for sharding in ("elastic", "static"):
        with spec.but(options={"sharding": sharding}).loader(rank, world_size) as loader:
            steps = record(loader)
            out[sharding] = (loader.stats().real_tokens, len(steps))
    return out


def test_ranks_drain_together_where_every_second_sample_is_long() -> None:
    spec = Spec([100 if k % 2 else 10 for k in range(400)], 400, num_workers=0, options={"shuffle": False})
    zero, one = ranks.values(2, tokens_of, spec)
    assert abs(zero["static"][0] - one["static"][0]) == 18_000
    assert abs(zero["elastic"][0] - one["elastic"][0]) < 2_000
    assert zero["elastic"][1] < 0.7 * zero["static"][1]


def other_data(rank: int, world_size: int) -> str:
    spec = SPEC.but(lengths=LENGTHS[: 300 + rank])
    with spec.loader(rank, world_size) as loader:
        try:
            record(loader)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_data_sets_that_differ_are_an_error_on_all_ranks() -> None:
    for text in ranks.values(2, other_data):
        assert "num_samples" in text


@pytest.mark.parametrize(
    ("sampler", "dataset", "text"),
    [
        (RandomSampler(LENGTHS), LengthsDataset(LENGTHS), "RandomSampler is taken as this rank's own share"),
        (None, IterableLengthsDataset(LENGTHS), "an iterable dataset decides itself"),
        (DistributedSampler(LENGTHS, 4, 0), LengthsDataset(LENGTHS), "301 samples over 4 ranks"),
    ],
)
def test_where_it_can_not_be_had(sampler: Any, dataset: Any, text: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"token_budget": 200, "dp_rank": 0, "dp_world_size": 2, "sampler": sampler}
    with raises_with(ConfigError, text):
        odb.ODBDataLoader(dataset, sharding="elastic", **options)._is_elastic()
    loader = odb.ODBDataLoader(dataset, **options)
    with caplog.at_level(logging.INFO, logger="odb"):
        assert not loader._is_elastic() and not loader._is_elastic()
    assert caplog.text.count("sharding is static") == 1 and text in caplog.text


def test_what_is_static_for_a_reason() -> None:
    def why(**options: Any) -> str:
        return why_static(odb.ODBConfig(token_budget=9, **options), LENGTHS, None, None, 2)

    assert why() == why(sharding="elastic") == ""
    assert "sharding='static'" in why(sharding="static")
    assert "published" in why(policy="published")
    assert "one rank" in why_static(odb.ODBConfig(token_budget=9), LENGTHS, None, None, 1)


def test_the_index_source_never_waits() -> None:
    keys = GrantedKeys()
    keys.start((range(3), range(0)), head=0, is_complete=False)
    assert keys.take(2) == [0, 1]
    assert keys.take(2) == [2]
    assert keys.take(2) == []
    keys.wait()  # samples are under way
    keys.came_back(3)
    keys.add(range(7, 9), is_complete=True)
    keys.wait()
    assert keys.take(5) == [7, 8]
    assert keys.take(5) is None
    keys.start((), head=0, is_complete=False)
    keys.release()
    keys.wait()
    assert keys.is_released


def test_torch_is_seeded_as_the_sampler_does() -> None:
    """Notices a DistributedSampler that shuffles otherwise."""
    sampler = DistributedSampler(range(50), 1, 0, seed=3)
    sampler.set_epoch(5)
    generator = torch.Generator().manual_seed(8)
    assert list(sampler) == torch.randperm(50, generator=generator).tolist() == shared_order(sampler).tolist()
    assert np.array_equal(np.sort(shared_order(sampler)), np.arange(50))


def test_an_empty_chunk_travels() -> None:
    """The index source gives one where nothing is granted yet."""
    body = pack([])
    block = bytearray(b"".join(body.pieces()))
    assert unpack(memoryview(block), len(body.head), len(body.sizes)) == []
