"""What resuming refuses, and what it makes the best of: changed lengths, streams, samplers, broken states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from interrupted import broken, prints, saved_at, through_json
from scenarios import Spec, log_normal, raises_with
from torch.utils.data import RandomSampler

import odb
from odb import resume
from odb.errors import ConfigError, DisagreementError
from odb.testing import (
    IterableLengthsDataset,
    LengthsDataset,
    assert_each_once,
    assert_steps_aligned,
    assert_within_budget,
    collate,
    record,
)

pytestmark = pytest.mark.timeout(120)

LENGTHS = log_normal(80, 20, 0.6, 3, 90, seed=3)
SPEC = Spec(LENGTHS, 160, num_workers=0, options={"shuffle": True, "window": 16})


# ---- lengths that differ between runs


def other_lengths(seed: int) -> list[int]:
    return (
        (np.array(LENGTHS) * np.random.default_rng(seed).uniform(0.5, 2.5, len(LENGTHS))).astype(int).clip(1).tolist()
    )


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("stop", [0, 1, 4, 7, 10, 13, 16])
def test_other_lengths_after_a_resume(stop: int, accum: int) -> None:
    spec = SPEC.but(options={"grad_accum_steps": accum})
    head, state = saved_at(0, 1, spec, stop)
    tail, _ = saved_at(0, 1, spec.but(lengths=other_lengths(stop)), -1, state)
    assert_each_once([head + tail], range(80))
    assert_within_budget([tail], 160)
    assert [step.info.step for step in head + tail] == list(range(len(head + tail)))


@pytest.mark.parametrize("accum", [1, 2])
def test_other_lengths_on_ranks(accum: int) -> None:
    spec = SPEC.but(lengths=LENGTHS, options={"grad_accum_steps": accum, "window": 10})
    for stop in (1, 4, 7, 9):
        heads, states = zip(*ranks.values(2, saved_at, spec, stop), strict=True)
        tails = [steps for steps, _ in ranks.values(2, saved_at, spec.but(lengths=other_lengths(stop)), -1, states[0])]
        assert_each_once([*heads, *tails], range(80))
        assert_within_budget(tails, 160)
        assert_steps_aligned(tails)


def test_other_lengths_and_a_quota() -> None:
    spec = SPEC.but(options={"join": False, "sample_quota": 70})
    for stop in range(1, 14):
        head, state = saved_at(0, 1, spec, stop)
        tail, _ = saved_at(0, 1, spec.but(lengths=[3 * n for n in LENGTHS]), -1, state)
        counts = np.cumsum([step.info.local_samples for step in head + tail])
        assert counts[-2] < 70 <= counts[-1], stop
        assert_within_budget([tail], 160)


def test_samples_that_are_refused_only_after_the_resume() -> None:
    spec = SPEC.but(options={"on_oversize": "skip"})
    head, state = saved_at(0, 1, spec, 2)
    with spec.but(lengths=[500 if n == max(LENGTHS) else n for n in LENGTHS]).loader(0, 1) as loader:
        loader.load_state_dict(state)
        tail = record(loader)
        rejected = loader.stats().rejected["oversize"]
    lost = {i for i, n in enumerate(LENGTHS) if n == max(LENGTHS)} - {i for step in head for i in step.ids}
    assert_each_once([head + tail], set(range(80)) - lost)
    assert rejected == len(lost) > 0


# ---- streams


def stream(num_workers: int, prefetch_factor: int | None = None) -> odb.ODBDataLoader:
    options: dict[str, Any] = {"token_budget": 160, "window": 16, "collate_fn": collate}
    return odb.ODBDataLoader(
        IterableLengthsDataset(LENGTHS), num_workers=num_workers, prefetch_factor=prefetch_factor, **options
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_read_again_without_what_was_emitted(num_workers: int) -> None:
    with stream(num_workers) as loader:
        whole = prints(loader)
    for stop in (0, 1, 6, 9, len(whole)):
        with stream(num_workers) as loader:
            head = prints(loader, stop)
            state = through_json(loader.state_dict())
        with stream(num_workers) as loader:
            loader.load_state_dict(state)
            assert head + prints(loader) == whole


def test_a_stream_depends_on_its_workers() -> None:
    with stream(2) as loader:
        record(loader, 2)
        state = loader.state_dict()
    with raises_with(ConfigError, "stream: saved 2 workers, 32 samples a task, now 1 workers"):
        stream(1).load_state_dict(state)


def uneven_streams(rank: int, world_size: int, stop: int | None) -> Any:
    out, state = [], None
    for end in (None,) if stop is None else (stop, None):
        dataset = IterableLengthsDataset([70] * 12 if rank == 0 else [8, 4, 6])
        with odb.ODBDataLoader(dataset, token_budget=140, window=4, collate_fn=collate) as loader:
            if state is not None:
                loader.load_state_dict(state)
            out += prints(loader, end)
            state = through_json(loader.state_dict())
    return out


def test_a_streams_filler_is_the_same_after_a_resume() -> None:
    whole = ranks.values(2, uneven_streams, None)
    assert "idle=True" in whole[1][-1]["info"]
    for stop in range(len(whole[0])):
        assert ranks.values(2, uneven_streams, stop) == whole, stop


# ---- refusals


def test_a_sampler_without_a_fixed_seed_is_refused() -> None:
    def loader() -> odb.ODBDataLoader:
        dataset = LengthsDataset(LENGTHS)
        return odb.ODBDataLoader(dataset, sampler=RandomSampler(dataset), token_budget=160, collate_fn=collate)

    first, second = loader(), loader()
    record(first, 3)
    second.load_state_dict(first.state_dict())
    with raises_with(ConfigError, "another order", "digest", "DistributedSampler", "set_epoch"):
        next(iter(second))


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (SPEC.but(options={"seed": 1}), ("seed: saved 0, now 1",)),
        (SPEC.but(lengths=LENGTHS[:-1]), ("num_samples: saved 80, now 79",)),
        (SPEC.but(options={"window": 17}), ("window: saved 16, now 17",)),
        (SPEC.but(options={"grad_accum_steps": 2}), ("grad_accum_steps: saved 1, now 2",)),
        (SPEC.but(options={"shuffle": False}), ("shuffle: saved True, now False",)),
        (SPEC.but(share="strided", options={"shuffle": None}), ("shares: saved own, now sampler",)),
    ],
)
def test_what_changes_plans_is_refused(other: Spec, parts: tuple[str, ...]) -> None:
    (_, state) = saved_at(0, 1, SPEC, 3)
    with raises_with(ConfigError, *parts, "start the epoch anew (set_epoch)"):
        other.loader(0, 1).load_state_dict(state)


def test_what_is_no_state_is_refused() -> None:
    loader = SPEC.loader(0, 1)
    state = loader.state_dict()
    for wrong, parts in (
        ([], ("got list",)),
        ({}, ("no state of an odb loader",)),
        (state | {"version": 9}, ("version 9", "version 2")),
        (state | {"more": 1}, ("unknown keys ['more']",)),
        ({k: v for k, v in state.items() if k != "carry"}, ("missing keys ['carry']",)),
        ({"version": resume.STATE_VERSION, "ranks": []}, ("got none",)),
        ({"version": resume.STATE_VERSION, "ranks": [state | {"world_size": 2}]}, ("ranks 0 to 1", "[0]")),
    ):
        with raises_with(ConfigError, *parts):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]
    assert len(record(loader)) > 5  # none of them did any harm


def test_states_of_different_steps_are_not_merged() -> None:
    states = []
    for stop in (2, 3):
        _, merged = saved_at(0, 1, SPEC, stop)
        states.append(merged["ranks"][0] | {"world_size": 2, "rank": stop - 2})
    with raises_with(ConfigError, "not saved after the same step", "[2, 3]"):
        resume.merge(states)


def from_different_places(rank: int, world_size: int, states: Any) -> None:
    with SPEC.loader(rank, world_size) as loader:
        if states[rank] is not None:
            loader.load_state_dict(states[rank])
        record(loader)


@pytest.mark.parametrize("case", ["another step", "one without", "resized, one without"])
def test_ranks_that_resume_from_different_places_all_stop(case: str) -> None:
    world_size = 3 if case.startswith("resized") else 2
    (_, early), _ = ranks.values(2, saved_at, SPEC, 1)
    (_, late), _ = ranks.values(2, saved_at, SPEC, 2)
    states = [early, late if case == "another step" else None, early][:world_size]
    for result in ranks.run_ranks(world_size, from_different_places, states):
        assert result.error is not None and result.error.type_name == DisagreementError.__name__
        assert "resume" in result.error.text or "drifted" in result.error.text or "rounds" in result.error.text


def test_skipped_steps_have_no_common_place() -> None:
    spec = SPEC.but(options={"tail": "skip"})
    (_, state), _ = ranks.values(2, saved_at, spec, 2)
    for result in ranks.run_ranks(2, saved_at, spec, -1, state):
        assert result.error is not None and "tail='skip'" in result.error.text


# ---- the protocol


def test_keys_never_change_and_loading_leaves_its_argument_alone() -> None:
    loader = SPEC.loader(0, 1)
    keys = set(loader.state_dict())
    iterator = iter(loader)
    states = [through_json(loader.state_dict())]
    for _ in iterator:
        states.append(through_json(loader.state_dict()))
        assert loader.state_dict() == states[-1]
    states.append(loader.state_dict())
    assert {frozenset(state) for state in states} == {frozenset(keys)}
    before = copy.deepcopy(states[3])
    loader.load_state_dict(states[3])
    assert loader.state_dict() == before == states[3]
    assert [step.info.step for step in record(loader)] == list(range(states[3]["step"], len(states) - 2))


def test_loading_takes_effect_at_the_next_iter() -> None:
    loader = SPEC.loader(0, 1)
    whole = prints(loader)
    loader.set_epoch(0)
    steps = loader.steps()
    next(steps)
    state = loader.state_dict()
    next(steps)
    loader.load_state_dict(state)
    next(steps)
    assert loader.state_dict() == state
    assert prints(loader) == whole[1:]


def test_set_epoch_keeps_a_loaded_state_of_that_epoch_and_gives_up_another(caplog: pytest.LogCaptureFixture) -> None:
    _, state = saved_at(0, 1, SPEC, 4, None, 2)
    loader = SPEC.loader(0, 1)
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert record(loader)[0].info.step == 4 and not caplog.records
    loader.load_state_dict(state)
    loader.set_epoch(3)
    assert record(loader)[0].info.step == 0
    assert "gives up the loaded state of epoch 2" in caplog.text


def test_through_a_distributed_checkpoint(tmp_path: Path) -> None:
    whole = prints(SPEC.loader(0, 1))
    loader, fresh = SPEC.loader(0, 1), SPEC.loader(0, 1)
    prints(loader, 5)
    dcp.save({"loader": loader.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    target = {"loader": fresh.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    fresh.load_state_dict(target["loader"])
    assert prints(fresh) == whole[5:]


def test_through_torch_save(tmp_path: Path) -> None:
    loader = SPEC.loader(0, 1)
    record(loader, 5)
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


def test_rejected_samples_are_not_made_again() -> None:
    spec = SPEC.but(data={"none_at": range(0, 80, 5)}, options={"on_empty": "skip"})
    assert broken(0, 1, spec, [(k,) for k in (0, 1, 5, 9)])[2] == []
