"""The guarantees in every small world, and that the explorer notices when the protocol is broken."""

from __future__ import annotations

from typing import Any

import pytest
from breaks import BREAKS
from combined import FreelyCombined
from loops import Loops, small_worlds
from memo import each_input_once
from predicates import Broken
from statespace import Bounds, Explorer, small_config
from tally import count

from odb.plan.types import PlanConfig

LENGTHS = (1, 2, 3)

#: Options by name. Windows and budgets are varied beside them.
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulate": {"grad_accum_steps": 2},
    "accumulate-fill": {"grad_accum_steps": 2, "accum_tail": "fill"},
    "drop-tail": {"tail": "drop"},
    "drop-tail-accumulate": {"tail": "drop", "grad_accum_steps": 2},
    "drop-tail-accumulate-fill": {"tail": "drop", "grad_accum_steps": 2, "accum_tail": "fill"},
    "drop-last": {"drop_last": True},
    "drop-last-accumulate": {"drop_last": True, "grad_accum_steps": 2},
    "drop-last-accumulate-fill": {"drop_last": True, "grad_accum_steps": 2, "accum_tail": "fill"},
    "published": {"policy": "published"},
    "published-split": {"policy": "published", "split_policy": "published"},
    "published-accumulate": {"policy": "published", "grad_accum_steps": 2},
    "non-join": {"join": False},
    "non-join-accumulate": {"join": False, "grad_accum_steps": 2},
    "quota": {"join": False, "sample_quota": 7},
    "quota-accumulate": {"join": False, "sample_quota": 7, "grad_accum_steps": 2},
    "few-tokens": {"max_held_tokens": 4},
    "few-tokens-accumulate": {"max_held_tokens": 4, "grad_accum_steps": 2},
    "one-step-a-round": {"max_steps_per_round": 1, "max_age": 1},
    "two-rows": {"max_samples": 2, "max_age": 2},
    "packed": {"layout": "packed"},
    "packed-accumulate-fill": {"layout": "packed", "grad_accum_steps": 2, "accum_tail": "fill"},
    "packed-drop-last": {"layout": "packed", "drop_last": True},
    "packed-drop-tail": {"layout": "packed", "tail": "drop"},
    "packed-two-rows": {"layout": "packed", "rows_per_batch": 2, "max_samples": 2},
}
NAMES = sorted(OPTIONS)


def lengths_of(config: PlanConfig) -> tuple[int, ...]:
    """Batches of several packed rows take none that is longer than a row (`ODBConfig` sees to it)."""
    capacity = config.token_budget // config.rows_per_batch
    return tuple(n for n in LENGTHS if n <= capacity or config.rows_per_batch == 1)


def explore(
    name: str,
    world_size: int,
    most_samples: int,
    token_budget: int,
    window: int,
    *,
    endings: bool = False,
    by: type[Explorer] = Explorer,
) -> Explorer:
    config = small_config(token_budget, window, **OPTIONS[name])
    explorer = by(config, Bounds(world_size, most_samples, lengths_of(config)), endings=endings).run()
    what = "freely combined" if isinstance(explorer, FreelyCombined) else "reachable"
    count(f"{what} states", explorer.num_states)
    count("configurations", 1)
    return explorer


@pytest.mark.parametrize("name", NAMES)
def test_guarantees_hold_in_every_state_of_two_ranks(name: str) -> None:
    explore(name, 2, 3, token_budget=4, window=2, endings=True)


@pytest.mark.parametrize("name", NAMES)
def test_guarantees_hold_in_every_state_of_three_ranks(name: str) -> None:
    explore(name, 3, 3, token_budget=4, window=2, by=FreelyCombined)


@pytest.mark.parametrize("name", ["accumulate", "defaults", "quota"])
def test_free_combinations_leave_out_nothing_that_happens(name: str) -> None:
    every, reached = (explore(name, 2, 3, token_budget=4, window=3, by=by) for by in (FreelyCombined, Explorer))
    assert reached.windows() and reached.windows() <= every.windows()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("token_budget", [2, 4, 6])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_one_and_two_ranks_of_five_samples(name: str, window: int, token_budget: int) -> None:
    for world_size in (1, 2):
        explore(name, world_size, 5, token_budget, window, by=FreelyCombined)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("window", "token_budget"), [(1, 2), (2, 3), (3, 4), (5, 6)])
@pytest.mark.parametrize("name", NAMES)
def test_three_ranks_of_five_samples(name: str, window: int, token_budget: int) -> None:
    explore(name, 3, 5, token_budget, window, by=FreelyCombined)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_what_two_ranks_of_five_samples_reach(name: str) -> None:
    explore(name, 2, 5, token_budget=4, window=3)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_what_three_ranks_of_three_samples_reach(name: str) -> None:
    explore(name, 3, 3, token_budget=4, window=2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_endings_from_every_state_of_three_ranks(name: str) -> None:
    explore(name, 3, 4, token_budget=4, window=3, endings=True, by=FreelyCombined)


def explore_loops(name: str, world_size: int, most: int, lengths: tuple[int, ...], window: int, **options: Any) -> None:
    every = Loops()
    config = small_config(3, window, **OPTIONS[name])
    for world in small_worlds(config, world_size, most, lengths, **options):
        every.explore(world)
    count("loop worlds", every.worlds)
    count("loop interleavings", every.interleavings)


#: Without a quota: there a loop's source starts over, which the state space covers. And rows must hold the lengths.
LOOP_NAMES = [name for name in NAMES if "quota" not in name and "rows_per_batch" not in OPTIONS[name]]


@pytest.mark.parametrize("name", ["defaults", "accumulate-fill", "drop-last", "non-join"])
def test_the_loop_in_every_interleaving_of_two_ranks(name: str) -> None:
    explore_loops(name, 2, 2, (1, 3), window=1)


def test_what_was_drawn_in_an_epoch_that_was_left_is_counted() -> None:
    every = Loops(counts_what_was_left=True)
    for world in small_worlds(small_config(3, 2), 2, 1, (1, 3)):
        every.explore(world, failing=False)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("window", "chunk", "tells_length"), [(1, 2, True), (2, 1, False)])
@pytest.mark.parametrize("name", LOOP_NAMES)
def test_the_loop_of_two_ranks_of_three_samples(name: str, window: int, chunk: int, tells_length: bool) -> None:
    with each_input_once():
        explore_loops(name, 2, 3, (1, 3), window, chunk=chunk, tells_length=tells_length)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LOOP_NAMES)
def test_the_loop_of_three_ranks_of_two_samples(name: str) -> None:
    with each_input_once():
        explore_loops(name, 3, 2, (1, 2), window=1)


#: Those that show in what is planned.
PLANNED = sorted(name for name, one in BREAKS.items() if one.driver == "space")


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_a_broken_protocol_is_noticed(name: str) -> None:
    with pytest.raises((Broken, AssertionError)):
        BREAKS[name].explore(is_broken=True)
    count("breaks noticed", 1)


@pytest.mark.soak
@pytest.mark.parametrize("name", PLANNED)
def test_a_broken_protocol_is_noticed_where_ranks_combine_freely(name: str) -> None:
    with pytest.raises((Broken, AssertionError)):
        BREAKS[name].explore(is_broken=True, explorer=FreelyCombined)
    count("breaks noticed", 1)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(BREAKS))
def test_the_slice_of_a_break_is_sound_without_it(name: str) -> None:
    BREAKS[name].explore(is_broken=False)
