"""Every small world whose ranks share one order; and that breaks of the ledger are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from elastic import drive, run, worlds
from memo import each_input_once
from predicates import Broken
from statespace import small_config
from tally import count
from test_explorer import NAMES, OPTIONS, lengths_of

from odb.errors import DisagreementError
from odb.plan import align, grants
from odb.plan import round as rounds

#: The paper's rule knows fixed shares alone.
ELASTIC = [name for name in NAMES if not name.startswith("published")]


def explore(name: str, world_size: int, most: int, token_budget: int, window: int) -> None:
    options = dict(OPTIONS[name])
    if "sample_quota" in options:
        options["sample_quota"] = 3  # passes are the source's business
    config = small_config(token_budget, window, **options)
    for lengths in worlds(most, lengths_of(config)):
        count("elastic rounds", drive(config, lengths, world_size))
        count("elastic worlds", 1)


@pytest.mark.parametrize("name", ELASTIC)
def test_guarantees_hold_in_every_world_of_two_ranks(name: str) -> None:
    explore(name, 2, 4, token_budget=4, window=2)


def test_guarantees_hold_in_every_world_of_three_ranks() -> None:
    explore("defaults", 3, 4, token_budget=4, window=2)


@pytest.mark.parametrize(("num_samples", "world_size", "least"), [(300, 2, 0.9), (1000, 8, 0.9), (10_000, 8, 0.95)])
def test_an_epoch_by_quota_repeats_few_samples(num_samples: int, world_size: int, least: float) -> None:
    """The order begins anew until the quota is met; what is held of a later pass must not leave instead of the first."""
    config = small_config(16_384, 1024, join=False, sample_quota=num_samples, max_held_tokens=1 << 20)
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, num_samples), 1, 4096).astype(np.int64)
    ranks, _ = run(config, np.tile(lengths, 20), world_size)
    first = {sample % num_samples for rank in ranks for sample in rank.emitted}
    assert len(first) > least * num_samples


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("window", "token_budget"), [(1, 2), (3, 6), (6, 2)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ELASTIC)
def test_worlds_of_seven_samples(name: str, world_size: int, window: int, token_budget: int) -> None:
    with each_input_once():
        explore(name, world_size, 7, token_budget, window)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 7, 64])
@pytest.mark.parametrize("name", ELASTIC)
def test_drawn_worlds_of_many_ranks(name: str, world_size: int) -> None:
    config = small_config(500, 64, **(OPTIONS[name] | {"sample_quota": 900} if "quota" in name else OPTIONS[name]))
    longest = 700 if config.rows_per_batch == 1 else 250
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(4, 1.2, int(rng.integers(1, 4000))), 1, longest).astype(np.int64)
        count("elastic rounds", drive(config, lengths, world_size))


def _after(change: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: lambda *args, **kw: change(original(*args, **kw), *args)


def _rank_1_books_more(state: Any, plan: Any, carry: Any, steps: Any, totals: Any, rank: int) -> Any:
    return replace(state, next_key=state.next_key + (rank == 1 and state.round == 1))


#: What is broken -> owner, name, the replacement of the original.
BREAKS: dict[str, tuple[Any, str, Callable[[Any], Callable[..., Any]]]] = {
    "a key is granted twice": (grants, "block", _after(lambda b, *_: range(max(0, b.start - 1), b.stop))),
    "a key is left out": (grants, "block", _after(lambda b, *_: b[1:])),
    "first blocks overlap": (grants, "first_block", _after(lambda b, n, *_: range(b.start, min(n, b.stop + 1)))),
    "first blocks leave a gap": (grants, "first_block", _after(lambda b, *_: b if b.start else b[:-1])),
    "nothing is granted": (grants, "decide", _after(lambda g, *_: g * 0)),
    "more is granted than there is": (grants, "decide", _after(lambda g, *_: g + 1)),
    "grants are not booked": (rounds, "_next_state", _after(lambda s, p, *_: replace(s, next_key=0))),
    "a rank's ledger differs": (rounds, "_next_state", _after(_rank_1_books_more)),
    "the end does not wait for the order": (
        align,
        "_Windows",
        lambda o: mock.Mock(of=lambda *args: replace(o.of(*args), running=o.of(*args).running & False)),
    ),
    "what was rejected or used is not counted": (
        rounds, "_next_state", _after(lambda s, *_: replace(s, num_granted=s.num_granted + 1)),
    ),
}  # fmt: skip


def slice_of_worlds() -> None:
    for window in (1, 2):
        config = small_config(3, window)
        for lengths in worlds(5, (1, 3)):
            drive(config, lengths, 2)


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_a_broken_ledger_is_noticed(name: str) -> None:
    owner, attribute, by = BREAKS[name]
    with (
        mock.patch.object(owner, attribute, by(getattr(owner, attribute))),
        pytest.raises((Broken, AssertionError, DisagreementError)),
    ):
        slice_of_worlds()
    count("breaks noticed", 1)


def test_the_slice_is_sound_without_a_break() -> None:
    slice_of_worlds()
