"""Resume: small inputs on which systems of this kind failed."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import ranks
import torch
from interrupted import broken, chain, prints, refused_on_one, saved_at, through_json
from scenarios import Spec, iterate, log_normal, raises_with

import odb
from odb import resume
from odb.errors import ConfigError
from odb.testing import LengthsDataset, assert_each_once, assert_steps_aligned, collate, record

pytestmark = pytest.mark.timeout(120)


def test_e01_the_state_is_about_what_was_used() -> None:
    spec = Spec([9, 4, 7, 12, 5, 10] * 5, 36, num_workers=2, options={"prefetch_factor": 4, "shuffle": True})
    num_steps, _, bad = broken(0, 1, spec, None)
    assert num_steps >= 8
    assert bad == []


def test_e03_later_epochs_are_whole() -> None:
    spec = Spec([10] * 128, 20, num_workers=2, options={"persistent_workers": True, "shuffle": True})
    (whole, *more), (parts, *found) = chain(0, 1, spec, (), 1, 2), chain(0, 1, spec, (61,), 1, 2)
    assert (len(whole), [len(one) for one in found]) == (64, [64, 64])
    assert parts == whole and found == more
    with spec.loader(0, 1) as loader:
        loader.set_epoch(1)
        record(loader, 61)
        state = loader.state_dict()
    with spec.loader(0, 1) as loader:
        loader.load_state_dict(state)
        assert len(record(loader)) == 3
        for _ in range(2):
            assert_each_once([record(loader)], range(128))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_e04_behind_the_end_comes_the_next_epoch(num_workers: int) -> None:
    spec = Spec(range(3, 13), 25, num_workers=num_workers, options={"shuffle": True})
    first, second = iterate(0, 1, spec, 2).epochs
    with spec.loader(0, 1) as loader:
        assert record(loader) == first
        state = through_json(loader.state_dict())
    with spec.loader(0, 1) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert record(loader) == second
    assert_each_once([second], range(10))


def test_e04_behind_the_last_batch_the_rest_is_empty() -> None:
    """Inside the loop the epoch is not over: a trainer that resumes it must not run it once more."""
    spec = Spec(range(3, 13), 25, num_workers=0, options={"shuffle": True})
    first, second = iterate(0, 1, spec, 2).epochs
    with spec.loader(0, 1) as loader:
        record(loader, len(first))
        state = loader.state_dict()
    with spec.loader(0, 1) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)  # as trainers do
        assert [record(loader), record(loader)] == [[], second]


E07 = Spec(log_normal(48, 20, 0.6, 3, 60, seed=4), 100, num_workers=2, options={"shuffle": True, "window": 8})


def test_e07_the_number_of_workers_does_not_matter() -> None:
    whole = ranks.values(2, iterate, E07)
    heads, states = zip(*ranks.values(2, saved_at, E07, 3), strict=True)
    for num_workers in (0, 4):
        tails = ranks.values(2, saved_at, E07.but(num_workers=num_workers), -1, states[0])
        assert [head + tail for head, (tail, _) in zip(heads, tails, strict=True)] == [one.steps for one in whole]


@pytest.mark.parametrize("world_size", [1, 4])
def test_e07_another_number_of_ranks(world_size: int) -> None:
    heads, states = zip(*ranks.values(2, saved_at, E07.but(num_workers=0), 3), strict=True)
    assert states[0] == states[1]
    tails = [steps for steps, _ in ranks.values(world_size, saved_at, E07.but(num_workers=0), -1, states[0])]
    assert_steps_aligned(tails)
    assert_each_once([*heads, *tails], range(48))


def test_e07_resized_twice_in_one_epoch() -> None:
    spec = E07.but(lengths=E07.lengths * 3, num_workers=0)
    seen, state = [], None
    for world_size, stop in ((2, 5), (3, 4), (3, 2), (4, 3), (1, 6), (2, -1)):
        parts = ranks.values(world_size, saved_at, spec, stop, state, 1)
        assert_steps_aligned([steps for steps, _ in parts])
        seen += [steps for steps, _ in parts]
        state = parts[0][1]
    assert_each_once(seen, range(144))
    assert len(json.dumps(state)) < 20_000


def test_e07_a_local_state_names_both_numbers_of_ranks() -> None:
    (_, state), _ = ranks.values(2, saved_at, E07.but(num_workers=0), 3)
    with raises_with(ConfigError, "2 data-parallel ranks", "this run has 1", "odb.resume.gather"):
        E07.loader(0, 1).load_state_dict(state["ranks"][0])


class Counted(LengthsDataset):
    """Counts how often each sample was made, in all processes."""

    def __init__(self, lengths: Any, **options: Any) -> None:
        super().__init__(lengths, **options)
        self.calls = torch.zeros(len(self.lengths), dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.calls[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_e08_what_was_consumed_is_not_made_again(num_workers: int, share: float) -> None:
    dataset = Counted(log_normal(2000, 8, 0.4, 2, 30, seed=2))
    options: dict[str, Any] = {"token_budget": 400, "shuffle": True, "window": 64, "collate_fn": collate}
    consumed: list[int] = []
    with odb.ODBDataLoader(dataset, **options) as loader:
        for batch in loader:
            consumed += batch["id"].tolist()
            if len(consumed) >= share * len(dataset):
                break
        state = loader.state_dict()
    dataset.calls.zero_()
    with odb.ODBDataLoader(dataset, num_workers=num_workers, **options) as loader:
        loader.load_state_dict(state)
        assert len(record(loader, 1)) == (share < 1)
    assert int(dataset.calls[consumed].sum()) == 0
    assert bool((dataset.calls <= 1).all())


def test_e09_progress_is_not_mistaken_for_settings(caplog: pytest.LogCaptureFixture) -> None:
    spec = Spec(log_normal(120, 20, 0.6, 3, 60, seed=4), 100, num_workers=0, options={"window": 24})
    with spec.loader(0, 1) as loader:
        record(loader, 4)
        state = loader.state_dict()
    assert state["pending"] and state["carry"]
    with caplog.at_level(logging.WARNING):
        spec.loader(0, 1).load_state_dict(state)
    assert not caplog.records
    with raises_with(ConfigError, "token_budget", "saved 100", "now 120"):
        spec.but(token_budget=120).loader(0, 1).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("iterates_first", [False, True])
def test_e10_another_ranks_state_is_refused_and_all_stop(iterates_first: bool, num_workers: int) -> None:
    spec = Spec([10] * 40, 40, share="strided", num_workers=num_workers)
    (_, state), _ = ranks.values(2, saved_at, spec, 3)
    first, second = ranks.run_ranks(2, refused_on_one, spec, state["ranks"][0], iterates_first)
    assert second.value.startswith("ConfigError: ")
    assert "the state of rank 0, loaded on rank 1" in second.value and "odb.resume.gather" in second.value
    assert first.value.startswith("PeerFailedError: ") and "loaded on rank 1" in first.value
    assert first.seconds < 5 + second.seconds


def test_e10_the_gathered_state_is_every_ranks() -> None:
    spec = Spec([10] * 40, 40, share="strided", num_workers=0)
    heads, states = zip(*ranks.values(2, saved_at, spec, 3), strict=True)
    tails = [steps for steps, _ in ranks.values(2, saved_at, spec, -1, states[1])]
    assert_each_once([*heads, *tails], range(40))
    with raises_with(ConfigError, "2 ranks can go on with 3", "no sampler"):
        odb.ODBDataLoader(
            LengthsDataset([10] * 40), token_budget=40, sampler=range(20), dp_rank=0, dp_world_size=3
        ).load_state_dict(states[0])


def test_prints_tell_batches_apart() -> None:
    """The comparison that all of this rests on sees a changed label, a changed order and a changed weight."""
    spec = Spec([5, 6, 7], 8, num_workers=0)
    one = prints(spec.loader(0, 1))
    assert one == prints(spec.loader(0, 1))
    for other in (spec.but(data={"prompt_fraction": 0.5}), spec.but(options={"loss_scaling": "none"})):
        assert prints(other.loader(0, 1)) != one
    assert resume.STATE_VERSION == 2
