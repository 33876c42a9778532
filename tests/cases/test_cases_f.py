"""Order, epochs, random numbers: small inputs on which systems of this kind failed."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from scenarios import Spec, iterate, log_normal
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import odb
from odb.testing import Seen, assert_each_once, collate, make_sample, record

pytestmark = pytest.mark.timeout(120)


def batches(steps: list[Seen]) -> list[tuple[int, ...]]:
    return [step.ids for step in steps]


# ---- F-01


class EpochStream(IterableDataset):
    """A stream whose order depends on the epoch that it is told."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        info = get_worker_info()
        order = np.random.default_rng(self.epoch).permutation(self.count).tolist()
        for i in order[info.id :: info.num_workers] if info else order:
            yield make_sample(i, 5 + i % 7)


class EpochDataset(Dataset):
    """A map-style dataset that notes in its samples which epoch it was told."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return make_sample(index, 5 + index % 7) | {"epoch": self.epoch}


def orders(rank: int, world_size: int, dataset: Any, options: dict[str, Any]) -> list[list[Seen]]:
    """Epochs 0, 1, 0 of one loader, then epoch 1 of a fresh one."""
    out = []
    with odb.ODBDataLoader(dataset, token_budget=40, collate_fn=collate, num_workers=2, **options) as loader:
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            out.append(record(loader))
    with odb.ODBDataLoader(dataset, token_budget=40, collate_fn=collate, num_workers=2, **options) as loader:
        loader.set_epoch(1)
        out.append(record(loader))
    return out


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", [EpochDataset, EpochStream])
def test_f01_set_epoch_reaches_workers_that_persist(kind: Any, persistent: bool) -> None:
    options = {"persistent_workers": persistent, "window": 16} | ({} if kind is EpochStream else {"shuffle": True})
    ((zero, one, zero_again, fresh_one),) = ranks.values(1, orders, kind(64), options)
    for steps in (zero, one, zero_again, fresh_one):
        assert_each_once([steps], range(64))
    assert batches(zero) == batches(zero_again)
    assert batches(one) == batches(fresh_one)
    # Not only in another order in time, but of other samples: the order in which they were read differs.
    assert set(map(frozenset, batches(zero))) != set(map(frozenset, batches(one)))


def told_epochs(rank: int, world_size: int) -> list[set[int]]:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    with odb.ODBDataLoader(EpochDataset(20), token_budget=40, **options) as loader:
        return [{int(e) for batch in loader for e in batch["epoch"]} for _ in range(2)]


def test_f01_a_dataset_is_told_the_epoch() -> None:
    assert ranks.values(1, told_epochs) == [[{0}, {1}]]


def test_f01_epochs_advance_by_themselves() -> None:
    loader = odb.ODBDataLoader(EpochDataset(64), token_budget=40, collate_fn=collate, shuffle=True)
    passes = [batches(record(loader)) for _ in range(2)]
    loader.set_epoch(0)
    assert batches(record(loader)) == passes[0] != passes[1] == batches(record(loader))


# ---- F-02


class RandomNumbers(Dataset):
    """Samples drawn from the generators that augmentations use."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = {"numpy": np.random.randint(2**31), "python": random.random(), "torch": torch.rand(1).item()}
        return make_sample(index, 5) | drawn


def draw(rank: int, world_size: int, num_workers: int, seed: int) -> dict[str, list[Any]]:
    torch.manual_seed(seed)
    drawn: dict[str, list[Any]] = {"numpy": [], "python": [], "torch": []}
    with odb.ODBDataLoader(RandomNumbers(), token_budget=20, num_workers=num_workers, sharding="static") as loader:
        for _ in range(2):
            for batch in loader:
                for name, values in drawn.items():
                    values += batch[name].tolist()
    return drawn


def test_f02_random_numbers_differ_between_workers_ranks_and_epochs() -> None:
    first, second = ranks.values(2, draw, 4, 1)
    for name in first:
        both = first[name] + second[name]
        assert len(both) == len(set(both)) == 128, name
    assert ranks.values(2, draw, 4, 1) == [first, second]
    assert ranks.values(2, draw, 4, 2)[0] != first


# ---- F-04


SLEEPY = Spec(
    log_normal(200, 40, 0.6, 4, 200, seed=1), 500, data={"sleep": 0.005}, options={"shuffle": True, "window": 32}
)


@pytest.mark.parametrize("world_size", [1, 2])
def test_f04_batches_do_not_depend_on_the_number_of_workers(world_size: int) -> None:
    reference: list[Any] | None = None
    for num_workers in (0, 1, 2, 4):
        spec = SLEEPY.but(num_workers=num_workers)
        found = [batches(outcome.steps) for outcome in ranks.values(world_size, iterate, spec)]
        assert reference is None or found == reference, f"{num_workers} workers batch differently"
        reference = found


def test_f04_batches_do_not_depend_on_time() -> None:
    found: list[list[Any]] = []
    for delay in (0.0, 0.02):
        found.append([])
        with SLEEPY.but(num_workers=2).loader(0, 1) as loader:
            for batch in loader:
                found[-1].append(batch["id"].tolist())
                time.sleep(delay)  # a slow consumer
    assert found[0] == found[1]


def test_another_seed_gives_another_order_and_the_same_seed_the_same() -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        return batches(iterate(0, 1, SLEEPY.but(num_workers=0, data={"sleep": 0.0}, options={"seed": seed})).steps)

    assert run(1) == run(1) != run(2)


# ---- F-05


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_f05_order_in_time_does_not_follow_length(seed: int) -> None:
    lengths = log_normal(4096, 120, 0.6, 16, 1024, seed=10)
    options = {"shuffle": True, "window": 256, "seed": seed}
    steps = iterate(0, 1, Spec(lengths, 4096, num_workers=0, options=options)).steps
    means = np.array([np.mean([lengths[i] for i in step.ids]) for step in steps])
    correlation = float(np.corrcoef(means[:-1], means[1:])[0, 1])
    assert abs(correlation) <= 0.2
    in_order = [lengths[i] for step in steps for i in step.ids]
    first, last = np.mean(in_order[:1024]), np.mean(in_order[-1024:])
    assert abs(first - last) <= 0.1 * max(first, last)
