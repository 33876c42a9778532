"""The guarantees on drawn worlds of up to 128 ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from many import check_epoch
from statespace import small_config
from tally import count

from odb.plan.types import I64, PlanConfig

MILLIONS = 2_000_000


@st.composite
def configs(draw: Any) -> PlanConfig:
    token_budget = draw(st.sampled_from([64, 500, 4096]))
    return small_config(
        token_budget,
        draw(st.sampled_from([8, 64, 512])),
        max_held_tokens=token_budget * draw(st.sampled_from([2, 16, 64])),
        max_steps_per_round=draw(st.sampled_from([4, 64, 1000])),
        max_samples=draw(st.sampled_from([None, None, 16])),
        **draw(st.sampled_from([{}, {}, {"policy": "published"}, {"layout": "packed"}])),
        tail=draw(st.sampled_from(["filler", "skip", "drop"])),
        accum_tail=draw(st.sampled_from(["short", "fill"])),
        grad_accum_steps=draw(st.sampled_from([1, 2, 4])),
        drop_last=draw(st.sampled_from([False, False, True])),
        join=draw(st.sampled_from([True, True, False])),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def shards(draw: Any, most_ranks: int, most_samples: int) -> list[I64]:
    """Ranks with unlike numbers and lengths of samples, heavy tails among them."""
    num_ranks = draw(st.integers(1, most_ranks) | st.just(most_ranks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, most_samples))
    spread, unlike = draw(st.sampled_from([0.2, 1.0, 2.0])), draw(st.sampled_from([0.0, 0.5]))
    mean = draw(st.sampled_from([1.0, 4.0, 6.0]))
    parts = []
    for _ in range(num_ranks):
        num = max(0, size - int(rng.integers(0, size + 1) * unlike))
        parts.append(np.clip(rng.lognormal(mean + unlike * rng.normal(), spread, num), 1, 10_000).astype(np.int64))
    return parts


def few(num: int) -> Any:
    return settings(
        max_examples=num,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # an epoch of many ranks is slow to shrink; the smaller ones of few ranks shrink below
    )


@few(25)
@given(configs(), shards(128, 30), st.integers(0, 5))
def test_many_ranks_with_few_samples(config: PlanConfig, parts: list[I64], epoch: int) -> None:
    count("drawn sample views", check_epoch(config, parts, epoch))


@settings(max_examples=60, deadline=None)
@given(configs(), shards(6, 40), st.integers(0, 5))
def test_few_ranks(config: PlanConfig, parts: list[I64], epoch: int) -> None:
    count("drawn sample views", check_epoch(config, parts, epoch))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_ranks_with_millions_of_samples() -> None:
    """Draws epochs until there were enough samples."""
    done = 0

    @few(400)
    @given(configs(), shards(128, 400), st.integers(0, 5))
    def more(config: PlanConfig, parts: list[I64], epoch: int) -> None:
        nonlocal done
        if done < MILLIONS:
            num = check_epoch(config, parts, epoch)
            done += num
            count("drawn sample views", num)

    more()
    assert done >= MILLIONS
