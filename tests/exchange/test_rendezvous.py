"""How ranks find each other, from training processes with a default group of their own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from worlds import Rank, World, connected, free_port

from odb.errors import ConfigError, ExchangeError, ExchangeTimeout, PeerFailedError, PeerLostError
from odb.exchange import _private
from odb.exchange.gloo import GlooAddress, GlooExchange
from odb.exchange.rendezvous import (
    Record,
    admit_peers,
    exchange_members,
    exchange_texts,
    next_loader_number,
    refuse,
    refuse_at_exit,
    rendezvous,
    resolve,
)

pytestmark = pytest.mark.timeout(60)


def init(port: int, rank: int, num_ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)


def trainers(world: World, body: Callable[..., Any], num_ranks: int, *args: Any) -> list[Rank]:
    """Training processes: `body(pipe, port, rank, num_ranks, *args)`."""
    port = free_port()
    return world.run([(body, port, rank, num_ranks, *args) for rank in range(num_ranks)])


def gather_ranks(exchange: GlooExchange, pipe: Any, num_rounds: int) -> list[int]:
    for i in range(num_rounds):
        rows = exchange.all_gather(np.array([exchange.rank, i], np.int64))
        assert rows.tolist() == [[rank, i] for rank in range(exchange.world_size)]
        assert exchange.all_reduce_sum(np.array([i], np.int64)).tolist() == [i * exchange.world_size]
    return list(rows[:, 0])


def start_collate(address: GlooAddress, method: str, num_rounds: int) -> Rank:
    """A process of its own for the exchange, as a loader starts it."""
    child = Rank(connected, address, gather_ranks, num_rounds, method=method)
    admit_peers(address)
    return child.say("start")


def train(pipe: Any, port: int, rank: int, num_ranks: int, method: str, num_loaders: int) -> list[Any]:
    """Children exchange while their parents run collectives of their own."""
    init(port, rank, num_ranks)
    gradient = torch.ones(100_000)
    children = []
    for _ in range(num_loaders):
        address = rendezvous(timeout_s=30.0, forks=method == "fork")
        assert address is not None
        children.append(start_collate(address, method, 200))
    for _ in range(60):
        gradient.fill_(1.0)
        dist.all_reduce(gradient)
        assert gradient[0].item() == num_ranks
    results = [child.result(40.0) for child in children]
    dist.barrier()
    dist.destroy_process_group()
    return [result.error or result.value for result in results]


@pytest.mark.parametrize(("num_ranks", "method", "num_loaders"), [(2, "fork", 2), (4, "fork", 1), (2, "spawn", 1)])
def test_children_exchange_while_their_parents_train(num_ranks: int, method: str, num_loaders: int) -> None:
    with World(1) as world:
        results = [rank.result(50.0) for rank in trainers(world, train, num_ranks, method, num_loaders)]
    expected = [list(range(num_ranks))] * num_loaders
    assert [result.error or result.value for result in results] == [expected] * num_ranks


def train_twice(pipe: Any, port: int, rank: int, num_ranks: int) -> list[Any]:
    """Inline, with the default group destroyed and made again between two loaders.

    On another port: on the same one, PyTorch's own store of the second group may meet a rest of the first one's.
    """
    found = []
    for _ in range(2):
        init(port, rank, num_ranks)
        address = rendezvous(timeout_s=20.0)
        assert address is not None
        exchange = GlooExchange.connect(address)
        found.append((address.loader_number, gather_ranks(exchange, pipe, 3)))
        dist.barrier()
        exchange.close()
        next_port = torch.tensor(free_port() if rank == 0 else 0)
        dist.broadcast(next_port, 0)
        port = int(next_port)
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_default_group_may_be_made_again() -> None:
    with World(1) as world:
        results = [rank.result() for rank in trainers(world, train_twice, 2)]
    assert [result.error or result.value for result in results] == [[(0, [0, 1]), (1, [0, 1])]] * 2


def train_on_file_store(pipe: Any, path: str, rank: int) -> list[int]:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    address = rendezvous(timeout_s=20.0)
    assert address is not None
    exchange = GlooExchange.connect(address)
    ranks = gather_ranks(exchange, pipe, 2)
    exchange.close()
    return ranks


def test_default_store_need_not_be_a_tcp_store(tmp_path: Path) -> None:
    with World(1) as world:
        ranks = world.run([(train_on_file_store, str(tmp_path / "store"), rank) for rank in range(2)])
        results = [rank.result() for rank in ranks]
    assert [result.error or result.value for result in results] == [[0, 1]] * 2


def never_start_on_1(pipe: Any, port: int, rank: int, num_ranks: int) -> None:
    init(port, rank, num_ranks)
    if rank == 1:
        pipe.recv()
    else:
        rendezvous(timeout_s=1.0)


def test_rank_that_does_not_start_its_loader_is_named() -> None:
    with World(1) as world:
        ranks = trainers(world, never_start_on_1, 3)
        # Rank 0 hosts the default store: its end is the others' end, so its word comes last.
        errors = [ranks[i].result().error for i in (2, 0)]
        ranks[1].say("end")
    for error in errors:
        assert isinstance(error, (ExchangeTimeout, ExchangeError))
    assert any(isinstance(error, ExchangeTimeout) and error.ranks == (1,) for error in errors)
    assert any("rank 1 has not started its loader number 0 within 1 s" in str(error) for error in errors)


def model_parallel(pipe: Any, port: int, rank: int, num_ranks: int) -> Any:
    init(port, rank, num_ranks)
    address = rendezvous(dp_rank=rank // 2, dp_world_size=2, timeout_s=20.0, fingerprint={"seed": str(rank)})
    assert address is not None
    exchange = GlooExchange.connect(address)
    ranks = gather_ranks(exchange, pipe, 3)
    text = exchange.explain_disagreement()
    total = int(exchange.all_reduce_sum(np.array([10**rank], np.int64))[0])
    exchange.close()
    dist.barrier()
    return ranks, total, text


def test_model_parallel_partners_are_in_exchanges_of_their_own() -> None:
    with World(1) as world:
        results = [rank.result() for rank in trainers(world, model_parallel, 4)]
    evens = ([0, 1], 101, "seed: 0 on rank 0; 2 on rank 1")
    odds = ([0, 1], 1010, "seed: 1 on rank 0; 3 on rank 1")
    assert [result.error or result.value for result in results] == [evens, odds, evens, odds]


def wrong_interface(pipe: Any, port: int, rank: int, num_ranks: int, value: str, wrong: tuple[int, ...]) -> None:
    init(port, rank, num_ranks)
    if rank in wrong:
        os.environ["GLOO_SOCKET_IFNAME"] = value
    try:
        rendezvous(timeout_s=20.0)
    finally:
        dist.barrier()  # rank 0 keeps the default store until all have seen it


@pytest.mark.parametrize(("value", "wrong"), [("^lo", (0, 1)), ("nope0", (0, 1)), ("nope0", (1,))])
def test_wrong_interface_is_an_error_on_every_rank(value: str, wrong: tuple[int, ...]) -> None:
    with World(1) as world:
        results = [rank.result() for rank in trainers(world, wrong_interface, 2, value, wrong)]
    for rank, result in enumerate(results):
        assert isinstance(result.error, ConfigError if rank in wrong else PeerFailedError)
        assert result.seconds < 10.0
        text = str(result.error)
        assert f"GLOO_SOCKET_IFNAME={value!r}" in text
        assert all(name in text for _, name in socket.if_nameindex())


def unresolvable(pipe: Any, port: int, rank: int, num_ranks: int) -> list[int]:
    init(port, rank, num_ranks)
    socket.gethostname = lambda: "does-not-resolve.invalid"
    address = rendezvous(timeout_s=20.0)
    assert address is not None
    exchange = GlooExchange.connect(address)
    ranks = gather_ranks(exchange, pipe, 2)
    exchange.close()
    dist.barrier()
    return ranks


def test_hostname_that_does_not_resolve_is_no_matter_on_one_host() -> None:
    with World(1) as world:
        results = [rank.result() for rank in trainers(world, unresolvable, 2)]
    assert [result.error or result.value for result in results] == [[0, 1]] * 2


def test_nobody_to_meet_without_a_default_group() -> None:
    assert rendezvous() is None
    assert rendezvous(dp_rank=0, dp_world_size=1) is None
    with pytest.raises(ConfigError, match="not initialised"):
        rendezvous(dp_rank=0, dp_world_size=2)
    with pytest.raises(ConfigError, match="both or neither"):
        rendezvous(dp_rank=0)


class GoneStore:
    """What is left of the default store when its host is."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            raise dist.DistNetworkError("Broken pipe")

        return call


@pytest.mark.parametrize(
    "call", [rendezvous, lambda: exchange_texts("", 1, 2, 5.0)], ids=["rendezvous", "exchange_texts"]
)
@pytest.mark.parametrize(("agent", "who"), [("", "rank 0"), ("True", "torchrun")])
def test_default_store_that_is_gone_names_its_host(
    call: Callable[[], Any], agent: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(_private, "default_store", GoneStore)
    with pytest.raises(PeerLostError, match=f"Broken pipe.*{who}, which hosts it, is gone") as caught:
        call()
    assert caught.value.ranks == (() if agent else (0,))
    refuse("a reason that nobody can read any more")
    refuse_at_exit("another one")


def fail_before_meeting(pipe: Any, port: int, rank: int, num_ranks: int, meet: str) -> None:
    init(port, rank, num_ranks)
    if rank == 1:
        refuse_at_exit("ValueError: \udcff the model does not fit")
    elif meet == "rendezvous":
        rendezvous(timeout_s=30.0)
    else:
        exchange_texts("state", 0, 2, 30.0)


@pytest.mark.parametrize("meet", ["rendezvous", "exchange_texts"])
def test_who_waits_for_a_rank_whose_program_failed_learns_it_at_once(meet: str) -> None:
    with World(1) as world:
        waiting, failed = [rank.result() for rank in trainers(world, fail_before_meeting, 2, meet)]
    assert failed.error is None
    assert isinstance(waiting.error, PeerFailedError) and waiting.error.ranks == (1,)
    assert "rank 1 failed and will not come" in str(waiting.error) and "the model does not fit" in str(waiting.error)
    assert waiting.seconds < 8


def test_numbers_of_loaders_count_up() -> None:
    first = next_loader_number()
    assert next_loader_number() == first + 1


@pytest.mark.parametrize("rank", range(8))
def test_groups_by_data_parallel_rank_partition_the_ranks(rank: int) -> None:
    claims = [(r // 2 % 2, 2) for r in range(8)]
    members = exchange_members(claims, rank)
    assert rank in members
    assert [claims[member][0] for member in members] == [0, 1]
    assert all(exchange_members(claims, member) == members for member in members)
    assert exchange_members([(r, 8) for r in range(8)], rank) == tuple(range(8))


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ([(0, 2), (1, 2), (0, 2), (2, 2)], r"dp_rank must lie in \[0, dp_world_size=2\): rank 3 gave 2"),
        ([(0, 2), (1, 2), (0, 2), (0, 2)], "dp_rank 0: ranks 0, 2, 3; dp_rank 1: rank 1"),
        ([(0, 2), (0, 2), (0, 2), (0, 2)], "dp_rank 0: ranks 0, 1, 2, 3; dp_rank 1: no rank"),
        ([(0, 2), (1, 2), (0, 4), (1, 2)], "do not agree on dp_world_size: 2 on ranks 0, 1, 3; 4 on rank 2"),
        ([(0, 3), (1, 3), (2, 3), (0, 3)], "dp_rank 0: ranks 0, 3"),
    ],
)
def test_contradicting_claims_name_the_ranks(claims: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        exchange_members(claims, 0)


def record(rank: int, host: str, *addresses: str, name: str = "") -> Record:
    return Record(rank, 2, host, addresses, port=4000, store_name=name)


def test_ranks_on_two_hosts_meet_where_all_can_reach() -> None:
    records = [record(0, "a/1", "127.0.1.1", "10.0.0.1", name="node-a"), record(1, "b/1", "10.0.0.2")]
    address = resolve(records, 1, number=3, timeout_s=9.0, fingerprint={"b": "1", "a": "2"})
    assert (address.host, address.port, address.own_address) == ("node-a", 4000, "10.0.0.2")
    assert (address.rank, address.world_size, address.timeout_s) == (1, 2, 9.0)
    assert address.fingerprint == (("a", "2"), ("b", "1"))
    assert resolve(records, 0, 3, 9.0, {}).own_address == "10.0.0.1"
    assert Record.decode(records[0].encode().encode()) == records[0]


def test_loopback_on_two_hosts_is_refused_on_every_rank() -> None:
    records = [record(0, "a/1", "127.0.0.1"), record(1, "b/1", "127.0.0.1")]
    for rank in range(2):
        with pytest.raises(ConfigError, match="loopback"):
            resolve(records, rank, 0, 9.0, {})
