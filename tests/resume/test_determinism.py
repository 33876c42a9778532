"""The same seed gives the same batches, whatever workers, start methods and clocks do; random numbers with an address."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.multiprocessing
from interrupted import chain, prints, through_json
from scenarios import Spec, log_normal, raises_with
from torch.utils.data import Dataset

import odb
from odb.errors import ConfigError
from odb.seeding import sample_rng, sample_seed
from odb.sim.world import simulate
from odb.testing import LengthsDataset, assert_each_once, assert_resumable, collate, make_sample, record

pytestmark = pytest.mark.timeout(120)

SPEC = Spec(log_normal(70, 20, 0.6, 3, 90, seed=3), 160, num_workers=0, options={"shuffle": True, "window": 12})


@pytest.fixture(scope="module")
def whole() -> Any:
    return chain(0, 1, SPEC, ())


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_number_of_workers_and_their_speed(whole: Any, num_workers: int) -> None:
    spec = SPEC.but(num_workers=num_workers, data={"sleep": 0.01}, options={"prefetch_factor": 3 * num_workers})
    assert chain(0, 1, spec, ()) == whole


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.soak), "spawn"])
def test_start_methods_also_after_a_resume(whole: Any, method: str) -> None:
    with SPEC.loader(0, 1) as loader:
        head = prints(loader, 7)
        state = through_json(loader.state_dict())
    spec = SPEC.but(num_workers=1, options={"multiprocessing_context": method, "persistent_workers": True})
    with spec.loader(0, 1) as loader:
        loader.load_state_dict(state)
        assert [head + prints(loader)] == whole
        loader.set_epoch(0)
        assert [prints(loader)] == whole


def with_sharing(rank: int, world_size: int, strategy: str) -> Any:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        return chain(rank, world_size, SPEC.but(num_workers=2), (5,))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.parametrize("strategy", sorted(torch.multiprocessing.get_all_sharing_strategies()))
def test_sharing_strategies(whole: Any, strategy: str) -> None:
    assert ranks.values(1, with_sharing, strategy) == [whole]


def test_two_ranks_of_which_one_is_slow() -> None:
    reference = ranks.values(2, chain, SPEC, ())
    slow = SPEC.but(num_workers=2, data={"sleep": {i: 0.02 for i in range(0, 70, 7)}})
    assert ranks.values(2, chain, slow, (4,)) == reference


# ---- the simulator


def emitted(rank: int, world_size: int, spec: Spec) -> list[tuple[int, ...]]:
    """This rank's sample identities, step by step; none where it is idle."""
    with spec.loader(rank, world_size) as loader:
        return [() if step.idle else tuple(sorted(step.info.sample_ids)) for step in record(loader)]


#: Ways to shard that the simulator knows.
SHARDINGS = ["static"]


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(("world_size", "num_workers", "accum"), [(1, 0, 1), (2, 2, 1), (3, 0, 2)])
def test_the_simulator_gives_the_same_batches(world_size: int, num_workers: int, accum: int, sharding: str) -> None:
    lengths = log_normal(150, 20, 0.6, 3, 90, seed=3)
    options = {"window": 12, "grad_accum_steps": accum, "sharding": sharding}
    spec = Spec(lengths, 160, num_workers=num_workers, options=options)
    trace = simulate(spec.loader(0, 1).config.plan_config(), np.array(lengths), world_size, sharding=sharding)
    per_rank = ranks.values(world_size, emitted, spec)
    found = np.full(len(lengths), -1, np.int64)
    for steps in per_rank:
        for number, ids in enumerate(steps):
            found[list(ids)] = number
    assert found.tolist() == trace.step_of.tolist()
    assert [[len(ids) for ids in slot] for slot in zip(*per_rank, strict=True)] == trace.samples.tolist()
    assert len(trace.samples) > 10


# ---- random numbers with an address


def test_sample_seeds_are_numbers_of_their_address_alone() -> None:
    seeds = {sample_seed(s, e, i) for s in range(4) for e in range(10) for i in range(250)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 0, 0) != sample_seed(0, 1, 0) != sample_seed(0, 0, 1)
    assert sample_seed(2**32, 0, 0) != sample_seed(0, 1, 0)  # words do not run into each other
    assert sample_seed(7, 2, 123) == sample_seed(np.int64(7), 2, np.int64(123)) == 4169301961103962694  # on any machine
    assert sample_rng(7, 2, 123).integers(1 << 40) == sample_rng(7, 2, 123).integers(1 << 40)


def test_sample_seeds_are_evenly_spread() -> None:
    seeds = np.array([sample_seed(0, 0, i) for i in range(2000)], np.uint64)
    bits = (seeds[:, None] >> np.arange(63, dtype=np.uint64) & np.uint64(1)).astype(np.int64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.06  # five standard deviations
    assert np.abs(np.corrcoef(bits[:-1].ravel(), bits[1:].ravel())[0, 1]) < 0.015


@pytest.mark.parametrize(("arguments", "name"), [((-1, 0, 0), "seed"), ((0, 0.5, 0), "epoch"), ((0, 0, "a"), "index")])
def test_wrong_addresses_are_refused(arguments: Any, name: str) -> None:
    with raises_with(ConfigError, name, ">= 0"):
        sample_seed(*arguments)


class Augmented(Dataset):
    """Lengths and contents are random: with an address, or from the state of whichever worker comes."""

    def __init__(self, addressed: bool) -> None:
        self.addressed = addressed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.addressed:
            rng = sample_rng(11, self.epoch, index)
            length, noise = int(rng.integers(3, 60)), float(rng.random())
        else:
            length, noise = random.randint(3, 59), random.random()
        return make_sample(index, length) | {"noise": torch.tensor(noise)}


def collate_noisy(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return collate(samples) | {"noise": torch.stack([sample["noise"] for sample in samples])}


def noisy(addressed: bool, num_workers: int = 0) -> odb.ODBDataLoader:
    options: dict[str, Any] = {"token_budget": 120, "window": 10, "shuffle": True, "collate_fn": collate_noisy}
    return odb.ODBDataLoader(Augmented(addressed), num_workers=num_workers, **options)


def test_addressed_augmentation_is_resumable_and_changes_with_the_epoch() -> None:
    assert_resumable(lambda: noisy(True), 6, epoch=1)
    one, two, other = (noisy(True, n) for n in (0, 2, 0))
    other.set_epoch(1)
    with two:
        first = prints(one)
        assert first == prints(two) != prints(other)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_augmentation_still_gives_each_sample_once(num_workers: int) -> None:
    for stop in (1, 4, 8):
        with noisy(False, num_workers) as loader:
            head = record(loader, stop)
            state = loader.state_dict()
        with noisy(False, num_workers) as loader:
            loader.load_state_dict(state)
            tail = record(loader)
        assert_each_once([head + tail], range(60))
        assert all(step.padded_tokens <= 120 for step in head + tail)


# ---- assert_resumable


def test_assert_resumable_passes_and_tries_what_it_was_told_to() -> None:
    made = []

    def make() -> odb.ODBDataLoader:
        made.append(SPEC.loader(0, 1))
        return made[-1]

    assert_resumable(make, 4)
    assert len(made) == 2 + 2 * 4
    with raises_with(RuntimeError, "closed"):
        iter(made[0])
    with raises_with(ValueError, "num_positions"):
        assert_resumable(make, 0)


def test_assert_resumable_explains_what_differs_between_runs() -> None:
    with raises_with(AssertionError, "two runs without interruption differ", "odb.seeding"):
        assert_resumable(lambda: noisy(False))


class Remembering(LengthsDataset):
    """Its labels depend on how many samples it has made: the same in every run, another after a resume."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return make_sample(index, self.lengths[index]) | {"id": self.calls}


def test_assert_resumable_finds_what_depends_on_the_past() -> None:
    def make() -> odb.ODBDataLoader:
        return odb.ODBDataLoader(Remembering([5] * 30), token_budget=20, window=6, collate_fn=collate)

    with raises_with(AssertionError, "resumed behind batch", "batch['id']", "what its worker read before"):
        assert_resumable(make)


class Forgetful(odb.ODBDataLoader):
    """A loader that resumes one batch too late."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state | {"pending": state["pending"][1:], "step": state["step"] + 1})


def test_assert_resumable_finds_a_missing_batch() -> None:
    dataset = LengthsDataset([5] * 30)
    with raises_with(AssertionError, "batch"):
        assert_resumable(lambda: Forgetful(dataset, token_budget=20, collate_fn=collate))
