"""Rendezvous and Gloo: small inputs on which systems of this kind failed."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import numpy as np
import pytest
import ranks
from scenarios import Spec, iterate

import odb
from odb.plan import round as protocol
from odb.plan.types import Measures, RoundState
from odb.testing import LengthsDataset, assert_each_once, assert_steps_aligned, collate, record

pytestmark = pytest.mark.timeout(120)


# ---- H-01; hosts that can't be reached: tests/exchange/test_hosts.py, tests/exchange/test_rendezvous.py


def with_interface(rank: int, world_size: int, value: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = value
    try:
        iterate(rank, world_size, Spec([10] * 8, token_budget=10))
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.parametrize("value", ["^lo", "nope0"])
def test_h01_a_wrong_interface_names_variable_value_and_what_there_is(value: str) -> None:
    for result in ranks.run_ranks(2, with_interface, value, timeout=30):
        assert result.error is not None and result.seconds < 10
        assert f"GLOO_SOCKET_IFNAME={value!r}" in result.error.text
        assert all(name in result.error.text for _, name in socket.if_nameindex())


def without_hostname(rank: int, world_size: int, spec: Spec) -> Any:
    known, socket.gethostname = socket.gethostname, lambda: "does-not-resolve.invalid"
    try:
        return iterate(rank, world_size, spec)
    finally:
        socket.gethostname = known


def test_h01_a_hostname_that_does_not_resolve_is_no_matter_on_one_host() -> None:
    steps = [outcome.steps for outcome in ranks.values(2, without_hostname, Spec([10] * 8, token_budget=10))]
    assert_each_once(steps, range(8))
    assert_steps_aligned(steps)


# ---- H-02


def slow(num_samples: int, timeout_s: float, **options: Any) -> Spec:
    """Rank 1 needs six seconds for its sample 5; no rank has more to do in the meantime than a few steps."""
    return Spec(
        [10] * num_samples, 10, data={"sleep": {5: 6.0}}, options={"timeout_s": timeout_s, "window": 2} | options
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_h02_a_slow_rank_beyond_the_limit_is_named_with_it(num_workers: int) -> None:
    first, second = ranks.run_ranks(2, iterate, slow(40, 3.0).but(num_workers=num_workers), timeout=30)
    assert first.error is not None and first.error.type_name == "ExchangeTimeout"
    assert first.error.ranks == (1,) and "rank 1" in first.error.text and "3 s" in first.error.text
    assert 3 <= first.seconds < 8
    assert second.error is not None and second.error.ranks == (1,), "rank 1 stops too"


def test_h02_a_slow_rank_within_the_limit_is_waited_for() -> None:
    steps = [outcome.steps for outcome in ranks.values(2, iterate, slow(40, 30.0), timeout=40)]
    assert_each_once(steps, range(40))
    assert_steps_aligned(steps)


# ---- H-05


def drawn(num_samples: int, rank: int) -> Measures:
    length = np.random.default_rng(rank % 8).integers(10, 400, num_samples)
    ids = np.arange(num_samples) + rank * num_samples
    return Measures(ids, length, length, np.zeros_like(length), length * 8)


def planning_time(world_size: int) -> float:
    """Seconds per step that one rank of so many spends on planning a round: the best of several."""
    config = odb.ODBConfig(token_budget=4096).plan_config()
    state, num_samples = RoundState.start(0), 256
    rows = [
        protocol.encode(protocol.propose(config, state, drawn(num_samples, r), exhausted=True).report) for r in range(8)
    ]
    reports, best = np.stack([rows[r % 8] for r in range(world_size)]), float("inf")
    for _ in range(5):
        began = time.perf_counter()
        proposal = protocol.propose(config, state, drawn(num_samples, 0), exhausted=True)
        agreement = protocol.settle(config, protocol.decode_table(reports))
        plan = protocol.form(config, proposal, agreement, 0)
        protocol.conclude(config, plan, plan.totals * world_size, world_size, 0)
        best = min(best, (time.perf_counter() - began) / agreement.num_steps)
    return best


def test_h05_planning_grows_little_with_the_number_of_ranks() -> None:
    few, many = planning_time(8), planning_time(600)
    assert many <= 10 * few, f"{many * 1e6:.0f} us per step with 600 ranks, {few * 1e6:.0f} with 8"


class Counting(LengthsDataset):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def num_reads(rank: int, world_size: int) -> int:
    dataset = Counting([10] * 60 * world_size)
    with odb.ODBDataLoader(dataset, token_budget=40, collate_fn=collate) as loader:
        record(loader)
    return dataset.reads


def test_h05_a_rank_reads_its_own_samples_alone_however_many_ranks_there_are() -> None:
    for world_size in (1, 2, 4):
        reads = ranks.values(world_size, num_reads)
        assert sum(reads) == 60 * world_size
        assert max(reads) <= 60 + 8
