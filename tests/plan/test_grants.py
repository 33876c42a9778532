"""The ledger of the shared order: from reports alone, every key granted once, windows of equal tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from driver import make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from odb.plan import grants
from odb.plan.align import settle
from odb.plan.types import I64, Report, ReportTable, Status
from odb.sim.lengths import draw
from odb.sim.world import simulate


def report(**other: Any) -> Report:
    facts: dict[str, Any] = dict.fromkeys(
        ("epoch", "round", "num_held", "num_groups", "held_tokens", "observed_samples", "observed_tokens",
         "emitted_samples", "config_digest", "agreement_digest"), 0,
    )  # fmt: skip
    return Report(**(facts | {"status": Status.RUNNING, "round": 9} | other))


def decide(reports: list[Report], target: int = 1000) -> I64:
    return grants.decide(make_config(100, window=10**5), ReportTable.of(reports), target)


def seen(tokens: int, samples: int = 100, granted: int = 100, next_key: int = 200, num_keys: int = 10**6) -> Report:
    """A rank that has used all of its keys and holds half of what they gave."""
    return report(
        held_tokens=tokens // 2, num_held=samples // 2, observed_samples=samples, observed_tokens=tokens,
        num_granted=granted, num_drawn=samples, next_key=next_key, num_keys=num_keys,
    )  # fmt: skip


def test_first_blocks_lie_behind_each_other() -> None:
    for num_keys, world in ((0, 3), (1, 4), (7, 2), (1000, 3), (10**6, 64)):
        blocks = [grants.first_block(num_keys, r, world) for r in range(world)]
        assert blocks[0].start == 0 and all(a.stop == b.start for a, b in pairwise(blocks))
        assert blocks[-1].stop <= num_keys
        states = [grants.start(0, num_keys, r, world) for r in range(world)]
        assert {s.next_key for s in states} == {blocks[-1].stop} and [s.num_granted for s in states] == list(
            map(len, blocks)
        )


def test_a_rank_of_short_samples_is_granted_more_of_them() -> None:
    short, long = decide([seen(400), seen(1600)])
    assert short > long
    mean = 2000 / 200
    assert 200 + short * mean == pytest.approx(800 + long * mean, abs=mean)  # both up to one level
    assert 200 + short * mean == pytest.approx(2 * 1000, abs=mean)  # the next window, and as much ahead


def test_look_ahead_follows_the_lengths() -> None:
    assert decide([seen(1000)] * 2)[0] >= 3 * decide([seen(4000)] * 2, target=1000)[0]


def test_rejected_keys_count_as_short_ones() -> None:
    half = replace(seen(1000), observed_samples=50, num_held=25)
    assert decide([half] * 2)[0] == decide([seen(1000)] * 2)[0]


def test_the_end_makes_windows_equal() -> None:
    few = {"next_key": 999_990, "num_keys": 10**6}
    granted = decide([seen(400, **few), seen(1600, **few)], target=10**6)
    assert granted.sum() == 10 and granted[0] == 10  # 10 tokens each on average: the poorer rank gets all
    assert decide([seen(400, next_key=5, num_keys=5)] * 2).tolist() == [0, 0]


def test_the_last_keys_are_not_given_away_at_once() -> None:
    assert decide([seen(1000, num_keys=10_200)] * 2, target=10**6).sum() == 7500
    assert decide([seen(1000, num_keys=10_200)] * 9, target=10**6).sum() == 5000
    assert decide([seen(1000, num_keys=210)] * 2, target=10**6).sum() == 10


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_heavy_tail_does_not_make_the_end_uneven(seed: int) -> None:
    """What is left is planned at once, in as many steps as the fullest rank needs: ranks must be equally full."""
    trace = simulate(make_config(16384, window=8192, max_held_tokens=500_000), draw("cv2", 100_000, seed), 32)
    tokens, costs = trace.tokens[-10:], trace.costs[-10:]
    assert tokens.sum() / (32 * costs.max(axis=1).sum()) > 0.87


def test_where_all_was_rejected_so_far_counts_are_granted() -> None:
    nothing = report(num_granted=50, num_drawn=50, next_key=100, num_keys=10**5)
    assert decide([nothing, nothing]).tolist() == [grants.FIRST_KEYS] * 2


def test_the_window_bounds_what_is_ahead() -> None:
    config = make_config(100, window=60)
    granted = grants.decide(config, ReportTable.of([seen(1000), seen(1000)]), 10**6)
    assert granted.tolist() == [2 * 60 - 50] * 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 3000)), min_size=1, max_size=9),
    st.integers(0, 4000),
    st.integers(1, 20_000),
)
def test_nothing_is_granted_twice_or_beyond_the_end(rows: list[tuple[int, int, int]], left: int, target: int) -> None:
    reports = [
        report(
            num_granted=drawn + ahead, num_drawn=drawn, observed_samples=drawn, observed_tokens=tokens if drawn else 0,
            held_tokens=tokens if drawn else 0, num_held=drawn, next_key=500, num_keys=500 + left,
        )
        for drawn, ahead, tokens in rows
    ]  # fmt: skip
    config = make_config(100)
    agreement = settle(config, reports)
    blocks = [grants.block(agreement.grants, agreement.first_key, r) for r in range(len(rows))]
    keys = [k for one in blocks for k in one]
    assert keys == list(range(500, 500 + len(keys))) and len(keys) <= left
    idle = all(drawn + ahead == 0 or (not ahead and not tokens) for drawn, ahead, tokens in rows)
    assert keys or not left or not idle  # where nobody has anything, something is granted
    assert grants.decide(config, ReportTable.of(reports), target).sum() <= left
