"""What a round draws: never more than the limits on what is held, and the same however records arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from odb.config import ODBConfig
from odb.exchange.memory import SoloExchange
from odb.feed.chunk import Record
from odb.feed.engine import Emission, EpochJob
from odb.feed.measure import Measure

LENGTHS = np.random.default_rng(5).integers(1, 260, 900).tolist()


def measured(sample: dict[str, Any]) -> Measure:
    num = len(sample["input_ids"])
    return Measure(num, num, 0, 8 * num)


class Feed:
    """Records in chunks of a size; every 7th sample is one that can't be planned, in runs of up to three."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.next = chunk, 0

    def take(self, poll: Callable[[], None]) -> list[Record] | None:
        first, self.next = self.next, min(self.next + self.chunk, len(LENGTHS))
        return [self.record(i) for i in range(first, self.next)] or None

    def record(self, i: int) -> Record:
        if i % 21 < 3:
            return Record(i, None, None, "empty")
        sample = {"input_ids": np.full(LENGTHS[i], i)}
        return Record(i, sample, measured(sample))

    def grant(self, block: range, is_complete: bool) -> None:
        raise AssertionError("shares are fixed here")


def epoch(chunk: int, **options: Any) -> tuple[list[list[int]], list[int], EpochJob]:
    """Identities of each step, keys used up behind each round, and the job with its counts."""
    config = ODBConfig(token_budget=200, on_empty="skip", **options).plan_config()
    job = EpochJob(config, 0, Feed(chunk), SoloExchange(), 7, lambda: False, lambda: None, on_empty="skip",
                   measure=measured, num_keys=len(LENGTHS))  # fmt: skip
    steps, cursors = [], []
    for item in job.steps():
        assert isinstance(item, Emission)
        steps.append(item.plan.ids.tolist())
        cursors += [] if cursors and cursors[-1] == job.cursor else [job.cursor]
    return steps, cursors, job


@pytest.mark.parametrize("options", [
    {"on_oversize": "alone"},
    {"on_oversize": "skip"},
    {"layout": "packed", "on_oversize": "truncate"},
    {"layout": "packed", "on_oversize": "split"},
    {"drop_last": True, "grad_accum_steps": 2},
])  # fmt: skip
def test_held_tokens_stay_within_the_limit(options: dict[str, Any]) -> None:
    steps, cursors, job = epoch(16, max_held_tokens=1600, **options)
    assert 1500 < job.max_held_tokens <= 1600
    assert cursors[-1] == len(LENGTHS)
    for chunk in (1, 7, 900):
        assert epoch(chunk, max_held_tokens=1600, **options)[:2] == (steps, cursors)


def test_held_bytes_stay_within_the_limit() -> None:
    _, _, job = epoch(16, max_held_bytes=8 * 900, max_held_tokens=10**6)
    assert 800 < job.max_held_tokens <= 900


def test_a_sample_above_the_limit_comes_through_an_empty_window() -> None:
    steps, _, job = epoch(16, max_held_tokens=100)
    assert job.max_held_tokens == max(LENGTHS[i] for i in range(900) if i % 21 >= 3)
    assert sorted(i for ids in steps for i in ids) == [i for i in range(900) if i % 21 >= 3]
    assert all(sum(LENGTHS[i] for i in ids) <= 100 or len(ids) == 1 for ids in steps)
