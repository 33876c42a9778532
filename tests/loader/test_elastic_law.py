"""Elastic epochs that are interrupted: resumed on the same ranks bit for bit, on others without loss."""

from __future__ import annotations

from typing import Any

import pytest
from scenarios import log_normal, prints
from threads import together
from torch.utils.data import DistributedSampler

import odb
from odb import resume
from odb.errors import ConfigError
from odb.testing import Seen, assert_each_once, assert_steps_aligned, seen

pytestmark = pytest.mark.timeout(120)

LENGTHS = log_normal(150, 20, 0.8, 3, 90, seed=3)
COMMON: dict[str, Any] = {"token_budget": 100, "max_held_tokens": 600, "seed": 3}

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"grad_accum_steps": 3},
    "filled": {"grad_accum_steps": 4, "accum_tail": "fill"},
    "drop_last": {"drop_last": True},
    "quota": {"join": False, "sample_quota": 220},
    "skips": {"on_oversize": "skip", "token_budget": 70},
    "small window": {"window": 5},
}


def in_parts(world_size: int, stops: tuple[int | None, ...], options: dict[str, Any], make_sampler: Any = None) -> Any:
    """What each rank got, over all parts of the epoch."""
    parts: list[list[dict[str, str]]] = [[] for _ in range(world_size)]
    states: list[Any] = [None] * world_size
    for stop in stops:

        def body(loader: odb.ODBDataLoader, rank: int, stop: int | None = stop) -> Any:
            loader.set_epoch(1)
            if states[rank] is not None:
                loader.load_state_dict(states[rank])
            return prints(loader, stop), loader.state_dict()

        found = together(
            world_size, body, LENGTHS, make_sampler, **({"shuffle": True} if not make_sampler else {}), **options
        )
        for rank, (part, state) in enumerate(found):
            parts[rank] += part
            states[rank] = state
    return parts


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_epoch_is_the_uninterrupted_one(kind: str) -> None:
    options = COMMON | KINDS[kind]
    whole = in_parts(3, (None,), options)
    assert len({len(rank) for rank in whole}) == 1 and len(whole[0]) > 8
    for stop in range(0, len(whole[0]), 1 if kind == "plain" else 4):
        assert in_parts(3, (stop, None), options) == whole, stop
    assert in_parts(3, (2, 1, 0, 3, None), options) == whole


def test_a_resumed_epoch_of_a_distributed_sampler() -> None:
    def sampler(dataset: Any, rank: int) -> DistributedSampler[Any]:
        return DistributedSampler(dataset, 2, rank, seed=5)

    whole = in_parts(2, (None,), COMMON, sampler)
    for stop in (1, 4, 9):
        assert in_parts(2, (stop, None), COMMON, sampler) == whole


@pytest.mark.parametrize("sizes", [(3, 2, 4), (2, 1, 3), (1, 4)])
def test_on_other_numbers_of_ranks_every_sample_comes_once(sizes: tuple[int, ...]) -> None:
    state, everything = None, []
    for number, world_size in enumerate(sizes):
        stop = 3 if number < len(sizes) - 1 else None

        def body(loader: odb.ODBDataLoader, rank: int, state: Any = state, stop: int | None = stop) -> Any:
            if state is not None:
                loader.load_state_dict(state)
            steps: list[Seen] = []
            for batch in loader:
                steps.append(seen(batch))
                if len(steps) == stop:
                    break
            return steps, loader.state_dict()

        found = together(world_size, body, LENGTHS, shuffle=True, **COMMON)
        assert_steps_aligned([steps for steps, _ in found])
        everything += [steps for steps, _ in found]
        state = resume.merge([state for _, state in found])
    assert_each_once(everything, range(len(LENGTHS)))


def test_the_other_sharding_is_refused() -> None:
    def run(sharding: str, states: Any) -> Any:
        def body(loader: odb.ODBDataLoader, rank: int) -> Any:
            if states is not None:
                loader.load_state_dict(states[rank])
            return prints(loader, 2), loader.state_dict()

        return together(2, body, LENGTHS, shuffle=True, sharding=sharding, **COMMON)

    states = [state for _, state in run("elastic", None)]
    with pytest.raises(ConfigError, match="saved with elastic sharding, this loader's is static"):
        run("static", states)


def test_states_stay_small() -> None:
    def body(loader: odb.ODBDataLoader, rank: int) -> Any:
        prints(loader, 3)
        return loader.state_dict()

    for state in together(2, body, LENGTHS, shuffle=True, **COMMON):
        ledger = state["ledger"]
        assert ledger["num_keys"] == 150 and len(ledger["waiting"]) <= 4
        assert ledger["num_granted"] - ledger["num_drawn"] == sum(end - first for first, end in ledger["waiting"])
