"""The law: what came before the interruption and what comes after it are the uninterrupted epoch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
from interrupted import broken, chain, prints, saved_at, through_json
from scenarios import Spec, log_normal
from torch.utils.data import DistributedSampler

import odb
from odb.testing import LengthsDataset, assert_each_once, assert_steps_aligned, collate

pytestmark = pytest.mark.timeout(120)

LENGTHS = log_normal(90, 20, 0.6, 3, 90, seed=3)
SPEC = Spec(LENGTHS, 160, num_workers=0, data={"prompt_fraction": 0.3}, options={"shuffle": True, "window": 16})
#: Rank 0 has many long samples, the others next to none: fillers stand in for them, on rank 2 without ever a real group.
SKEWED = Spec([80] * 24 + [4, 9, 6, 5], 160, share=[range(24), (24, 25, 26), (), (27,)], num_workers=0)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"grad_accum_steps": 3},
    "accumulation filled": {"grad_accum_steps": 4, "accum_tail": "fill"},
    "drop_last": {"drop_last": True},
    "published": {"policy": "published"},
    "quota over several passes": {"join": False, "sample_quota": 120},
    "samples": {"loss_scaling": "samples", "pad_to_multiple_of": 8, "max_samples": 6},
    "probe": {"on_oversize": "skip", "token_budget": 70},
    "packed": {"layout": "packed"},
    "packed in rows, cut and balanced": {
        "layout": "packed",
        "rows_per_batch": 2,
        "on_oversize": "split",
        "balance": "labels",
        "grad_accum_steps": 2,
    },
    "balanced": {"balance": "labels"},
}


def spec_of(name: str) -> Spec:
    options = dict(OPTIONS[name])
    return SPEC.but(token_budget=options.pop("token_budget", 160), options=options)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_step_of_every_kind_of_epoch(name: str) -> None:
    num_steps, _, bad = broken(0, 1, spec_of(name), None)
    assert num_steps > 12
    assert bad == []


@pytest.mark.parametrize("accum", [1, 3])
def test_resumed_twice_in_the_replayed_part_and_behind_it(accum: int) -> None:
    spec = SPEC.but(options={"grad_accum_steps": accum})
    pairs = [(k, n) for k in (0, 1, 4, 5, 11) for n in (0, 1, 2, 3, 9)]
    assert broken(0, 1, spec, [*pairs, (2, 1, 1, 1), (1, 0, 0, 8)])[2] == []


def test_second_epoch_and_the_epochs_behind_it() -> None:
    (whole, *more), found = chain(0, 1, SPEC, (), 1, 2), [chain(0, 1, SPEC, (k,), 1, 2) for k in (0, 7, 16)]
    assert whole not in more and more[0] != more[1]
    assert all(one == [whole, *more] for one in found)
    assert chain(0, 1, SPEC, (), 0) != [whole]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_with_workers(num_workers: int) -> None:
    spec = SPEC.but(num_workers=num_workers, options={"grad_accum_steps": 2})
    num_steps = len(chain(0, 1, spec, ())[0])
    assert broken(0, 1, spec, [(k,) for k in (0, 1, 6, 9, num_steps)])[2] == []


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (3, {}), (4, {}), (2, {"sharding": "static"}), (2, {"layout": "packed"})],
    ids=["2", "3", "4", "2-static", "2-packed"],
)
def test_on_real_ranks(world_size: int, options: dict[str, Any]) -> None:
    """With the order shared (elastic), unless the options say otherwise."""
    spec = SPEC.but(lengths=LENGTHS * 2, options={"grad_accum_steps": 2, "window": 10} | options)
    stops = [(0,), (1,), (5,), (6, 3)]
    for num_steps, _, bad in ranks.values(world_size, broken, spec, stops):
        assert num_steps > 10
        assert bad == []


@pytest.mark.parametrize(("world_size", "accum"), [(2, 1), (4, 3)])
def test_fillers_are_the_same_after_a_resume(world_size: int, accum: int) -> None:
    spec = SKEWED.but(options={"grad_accum_steps": accum, "window": 8})
    found = ranks.values(world_size, broken, spec, [(2,), (5,), (8, 2)])
    assert [bad for _, _, bad in found] == [[]] * world_size
    assert max(num_idle for _, num_idle, _ in found) > 5


def test_on_two_ranks_with_workers() -> None:
    spec = SPEC.but(num_workers=2, options={"grad_accum_steps": 2, "persistent_workers": True})
    for _, _, bad in ranks.values(2, broken, spec, [(3,), (4, 2)], 1):
        assert bad == []


def sampled(rank: int, world_size: int, drop_last: bool) -> list[int]:
    """Stops after which a resume with `DistributedSampler` does not give the uninterrupted epochs."""
    dataset = LengthsDataset(LENGTHS)

    def parts(stop: int | None, tells: bool) -> list[Any]:
        out, state = [], None
        for end in (None,) if stop is None else (stop, None):
            sampler = DistributedSampler(dataset, shuffle=True, seed=5, drop_last=drop_last)
            options: dict[str, Any] = {"token_budget": 160, "window": 12, "collate_fn": collate}
            with odb.ODBDataLoader(dataset, sampler=sampler, **options) as loader:
                if tells:
                    loader.set_epoch(3)
                if state is not None:
                    loader.load_state_dict(state)
                out += prints(loader, end)
                state = through_json(loader.state_dict())
                if end is None:
                    out += prints(loader)  # untold, the sampler gives the same order once more
        return out

    return [k for tells in (False, True) for k in (1, 5, 8) if parts(k, tells) != parts(None, tells)]


def test_with_a_distributed_sampler() -> None:
    assert ranks.values(2, sampled, True) == [[], []]


# ---- the whole grid

#: Kinds of epochs that the grid goes through; a further way to shard or to lay out batches is one more line.
GRID: dict[str, dict[str, Any]] = {
    "static": {"sharding": "static"},
    "elastic": {},  # what "auto" is on several ranks, also below
    "packed": {"layout": "packed"},
    "packed static": {"layout": "packed", "sharding": "static"},
    "accumulation 2": {"grad_accum_steps": 2},
    "accumulation 3": {"grad_accum_steps": 3},
    "accumulation 2 filled": {"grad_accum_steps": 2, "accum_tail": "fill"},
    "drop_last": {"drop_last": True},
    "dropped tail": {"tail": "drop", "grad_accum_steps": 2},
    "quota": {"join": False, "sample_quota": 120, "grad_accum_steps": 2},
    "published": {"policy": "published"},
}
#: Starting processes is what takes the time: those kinds in which feeding differs.
WITH_WORKERS = [(num, name) for num in (1, 3) for name in ("static", "elastic", "accumulation 3", "quota")]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("num_workers", "name"), [*((0, name) for name in GRID), *WITH_WORKERS])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_whole_grid(world_size: int, num_workers: int, name: str) -> None:
    """Every step of the first and of the second epoch is a place to stop, at optimizer steps and between them."""
    spec = SPEC.but(num_workers=num_workers, options={"window": 12} | GRID[name])
    for epoch in (0, 1):
        found = ranks.values(world_size, broken, spec, None, epoch, timeout=1000)
        assert [bad for _, _, bad in found] == [[]] * world_size
        assert found[0][0] >= 4


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["static", "accumulation 2", "drop_last", "quota"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_grid_of_interrupted_twice(world_size: int, name: str) -> None:
    spec = SPEC.but(options={"window": 12} | GRID[name])
    stops = [(k, n) for k in range(0, 12, 2) for n in (0, 1, 3)]
    found = ranks.values(world_size, broken, spec, stops, 1, timeout=1000)
    assert [bad for _, _, bad in found] == [[]] * world_size


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("accum", [1, 2])
def test_grid_of_other_numbers_of_ranks(before: int, after: int, accum: int) -> None:
    """From every number of ranks to every other, wherever it stopped: what was left comes once, on all ranks alike."""
    spec = SPEC.but(options={"window": 8, "grad_accum_steps": accum})
    for stop in (0, 1, 2, 3, 5, 6, 100):
        heads, states = zip(*ranks.values(before, saved_at, spec, stop, None, 1), strict=True)
        tails = [steps for steps, _ in ranks.values(after, saved_at, spec, -1, states[0], 1)]
        assert_steps_aligned(tails)
        # Stopped behind the end, what comes is the next epoch.
        for parts in ([*heads, *tails],) if stop < 100 else (heads, tails):
            assert_each_once(parts, range(90))
