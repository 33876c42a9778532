"""The Gloo exchange among real processes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds import World, connected

from odb.errors import ExchangeError, ExchangeTimeout, PeerClosedError, PeerFailedError, PeerLostError
from odb.exchange import _private, descriptors, gloo
from odb.exchange.base import Exchange
from odb.exchange.gloo import GlooExchange, describe_differences, report_failure

pytestmark = pytest.mark.timeout(60)


def rounds(exchange: GlooExchange, pipe: Any, num_rounds: int) -> float:
    """Checks every result; gives the median time of a round in seconds."""
    rank, world_size = exchange.rank, exchange.world_size
    times = []
    for i in range(num_rounds):
        began = time.monotonic()
        rows = exchange.all_gather(np.array([rank, i, -(2**62) + rank], np.int64))
        total = exchange.all_reduce_sum(np.array([[rank, i], [2**60, 1]], np.int64))
        times.append(time.monotonic() - began)
        assert rows.tolist() == [[r, i, -(2**62) + r] for r in range(world_size)]
        assert total.tolist() == [[sum(range(world_size)), i * world_size], [2**60 * world_size, world_size]]
    return float(np.median(times))


def one_more(exchange: GlooExchange, pipe: Any) -> Any:
    """One collective, after word that the rank is up."""
    pipe.send("up")
    return exchange.all_gather(np.array([exchange.rank], np.int64)).ravel().tolist()


@pytest.mark.parametrize(("num_ranks", "method"), [(2, "fork"), (4, "fork"), (2, "forkserver")])
def test_results_are_exact_over_many_rounds(num_ranks: int, method: str) -> None:
    with World(num_ranks) as world:
        results = [rank.result() for rank in world.start(rounds, 50, method=method)]
    assert [result.error for result in results] == [None] * num_ranks


def test_fast_path_adds_no_latency() -> None:
    with World(2) as world:
        medians = [rank.result().value for rank in world.start(rounds, 300)]
    assert max(medians) < 0.05, "two collectives must take about a millisecond, far below one waiting slice"


def test_connecting_is_quick() -> None:
    def body(exchange: GlooExchange, pipe: Any) -> bool:
        return isinstance(exchange, Exchange)

    with World(2) as world:
        results = [rank.result() for rank in world.start(body)]
    assert [result.value for result in results] == [True, True]
    assert max(result.seconds for result in results) < 3.0


def two_at_once(pipe: Any, first: Any, second: Any) -> None:
    """Two exchanges in one process, used in turn and in different orders by the ranks' threads."""
    exchanges = [GlooExchange.connect(first), GlooExchange.connect(second)]
    threads = [threading.Thread(target=rounds, args=(exchange, pipe, 40)) for exchange in exchanges]
    for thread in threads[:: 1 if first.rank else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    for exchange in exchanges:
        exchange.all_gather(np.zeros(1, np.int64))
        exchange.close()


def test_two_exchanges_do_not_meet() -> None:
    with World(2) as world:
        pairs = zip(world.addresses(), world.addresses(), strict=True)
        ranks = world.run([(two_at_once, *pair) for pair in pairs])
        assert [rank.result().error for rank in ranks] == [None, None]


def fail_on_one(exchange: GlooExchange, pipe: Any, failing: int) -> Any:
    exchange.all_gather(np.zeros(1, np.int64))
    if exchange.rank == failing:
        time.sleep(0.7)
        pipe.send(time.time())
        exchange.publish_failure("ValueError: sample 17 is broken\n" + "x" * 40_000 + "\nline 3 in dataset.py")
        assert exchange.linger(5.0)
        return None
    try:
        exchange.all_gather(np.zeros(1, np.int64))
    finally:
        pipe.send(time.time())


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_text_reaches_every_peer_within_two_seconds(failing: int) -> None:
    with World(4) as world:
        ranks = world.start(fail_on_one, failing)
        times = [rank.hear() for rank in ranks]
        results = [rank.result() for rank in ranks]
    assert results[failing].error is None
    for rank, result in enumerate(results):
        if rank != failing:
            assert isinstance(result.error, PeerFailedError)
            assert result.error.ranks == (failing,)
            text = str(result.error)
            assert f"rank {failing}" in text
            assert "sample 17 is broken" in text
            assert text.endswith("line 3 in dataset.py"), "the end of a long text is kept"
            assert len(text) < 17_000
            assert times[rank] - times[failing] < 2.0


def dead_after(exchange: GlooExchange, pipe: Any) -> list[str]:
    """The errors of three calls in a row."""
    found = []
    for call in (exchange.all_gather, exchange.all_reduce_sum, exchange.all_gather):
        pipe.send("up")
        try:
            call(np.zeros(1, np.int64))
        except ExchangeError as error:
            found.append(error)
    assert found[0] is found[1] is found[2], "the exchange stays dead, with its first error"
    raise found[0]


def killed_or_dead(exchange: GlooExchange, pipe: Any) -> Any:
    exchange.all_gather(np.zeros(1, np.int64))
    if exchange.rank == 1:
        pipe.send("up")
        time.sleep(30)
    return dead_after(exchange, pipe)


def test_killed_rank_is_named_on_all_others() -> None:
    with World(4) as world:
        ranks = world.start(killed_or_dead)
        for rank in ranks:
            assert rank.hear() == "up"
        ranks[1].signal(signal.SIGKILL)
        began = time.monotonic()
        errors = [rank.result().error for i, rank in enumerate(ranks) if i != 1]
    assert time.monotonic() - began < 10
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert error.ranks == (1,)
        assert "rank 1" in str(error)


def test_stopped_rank_is_named_when_its_time_is_up() -> None:
    with World(3, timeout_s=2.0) as world:
        ranks = world.start(killed_or_dead)
        for rank in ranks:
            assert rank.hear() == "up"
        ranks[1].signal(signal.SIGSTOP)
        errors = [ranks[i].result().error for i in (0, 2)]
        ranks[1].signal(signal.SIGKILL)
    for error in errors:
        assert isinstance(error, ExchangeTimeout)
        assert isinstance(error, TimeoutError)
        assert error.ranks == (1,)
        assert "rank 1" in str(error)
        assert "2 s" in str(error)


def sleeps(exchange: GlooExchange, pipe: Any, who: int, seconds: float, busy: bool) -> Any:
    exchange.all_gather(np.zeros(1, np.int64))
    if exchange.rank == who:
        if busy:
            with exchange.waiting_for_consumer():
                time.sleep(seconds)
        else:
            time.sleep(seconds)
    return exchange.all_gather(np.array([exchange.rank], np.int64)).ravel().tolist()


def test_slow_preprocessing_beyond_the_limit_names_the_rank_and_the_limit() -> None:
    with World(2, timeout_s=3.0) as world:
        first, second = (rank.result() for rank in world.start(sleeps, 1, 6.0, False))
    assert isinstance(first.error, ExchangeTimeout)
    assert first.error.ranks == (1,)
    assert "rank 1" in str(first.error)
    assert "3 s" in str(first.error)
    assert 3.0 < first.seconds < 6.0
    assert isinstance(second.error, ExchangeTimeout), "the late rank learns why its peer left"
    assert "rank 1" in str(second.error)


def test_slow_preprocessing_within_the_limit_is_no_error() -> None:
    with World(2, timeout_s=30.0) as world:
        results = [rank.result() for rank in world.start(sleeps, 1, 1.0, False)]
    assert [result.value for result in results] == [[0, 1], [0, 1]]


def test_busy_rank_is_waited_for_three_times_the_limit() -> None:
    with World(2, timeout_s=1.2) as world:
        results = [rank.result() for rank in world.start(sleeps, 0, 3.6, True)]
    assert [result.value for result in results] == [[0, 1], [0, 1]]


def wait_for_word(exchange: GlooExchange, pipe: Any) -> Any:
    exchange.all_gather(np.zeros(1, np.int64))
    pipe.send("up")
    if exchange.rank == 1:
        pipe.recv()
    return exchange.all_gather(np.array([exchange.rank], np.int64)).ravel().tolist()


def test_job_that_is_suspended_as_a_whole_goes_on_when_it_is_resumed() -> None:
    with World(2, timeout_s=3.0) as world:
        ranks = world.start(wait_for_word)
        for rank in ranks:
            assert rank.hear() == "up"
        for rank in ranks:
            rank.signal(signal.SIGSTOP)
        time.sleep(6.0)
        for rank in ranks:
            rank.signal(signal.SIGCONT)
        ranks[1].say("go on")
        results = [rank.result() for rank in ranks]
    assert [result.value for result in results] == [[0, 1], [0, 1]]


def failing_poll(exchange: GlooExchange, pipe: Any) -> Any:
    def poll() -> None:
        raise KeyError("the parent is gone")

    exchange.all_gather(np.zeros(1, np.int64))
    if exchange.rank == 1:
        try:
            exchange.all_gather(np.zeros(1, np.int64), poll)
        except KeyError as error:
            exchange.publish_failure(repr(error))
            raise
    time.sleep(0.5)
    return exchange.all_gather(np.zeros(1, np.int64))


def test_poll_may_leave_a_wait_and_the_rank_can_still_say_why() -> None:
    with World(2) as world:
        first, second = (rank.result() for rank in world.start(failing_poll))
    assert isinstance(second.error, KeyError)
    assert isinstance(first.error, PeerFailedError)
    assert "the parent is gone" in str(first.error)


def leave_early(exchange: GlooExchange, pipe: Any) -> Any:
    exchange.all_gather(np.zeros(1, np.int64))
    if exchange.rank == 1:
        return None
    return exchange.all_gather(np.zeros(1, np.int64))


def test_peers_of_a_rank_that_closed_are_told_so() -> None:
    with World(3) as world:
        results = [rank.result() for rank in world.start(leave_early)]
    assert results[1].error is None
    for result in (results[0], results[2]):
        assert isinstance(result.error, PeerClosedError)
        assert result.error.ranks == (1,)
        assert result.seconds < 5.0


def test_closing_right_after_the_last_collective_disturbs_nobody() -> None:
    with World(4) as world:
        for _ in range(5):
            assert [rank.result().error for rank in world.start(rounds, 1)] == [None] * 4


def resources() -> tuple[list[str], int]:
    """Open descriptors and the number of threads of this process."""
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    return sorted(links), len(os.listdir("/proc/self/task"))


def close_with_pending(pipe: Any, address: Any) -> Any:
    """Leaves while a collective is in flight that the peer never joins."""

    class Left(Exception):
        pass

    def leave() -> None:
        raise Left

    warm = np.zeros(1, np.int64)
    before = resources()
    exchange = GlooExchange.connect(address)
    exchange.all_gather(warm)
    if address.rank == 1:
        pipe.send("up")
        pipe.recv()
    else:
        with pytest.raises(Left):
            exchange.all_gather(warm, poll=leave)
    began = time.monotonic()
    exchange.close()
    exchange.close()
    with pytest.raises((ExchangeError, Left)):
        exchange.all_gather(warm)
    pipe.send(time.monotonic() - began)
    return before, resources()


def test_nothing_is_left_after_close_even_with_a_collective_in_flight() -> None:
    with World(2) as world:
        ranks = world.run([(close_with_pending, address) for address in world.addresses()])
        assert ranks[1].hear() == "up"
        assert ranks[0].hear() < 5.0
        before, after = ranks[0].result().value
        assert after == before
        ranks[1].say("go on")
        before, after = ranks[1].result().value
        assert after == before


def test_missing_rank_is_named_when_it_never_joins() -> None:
    with World(3, timeout_s=1.0) as world:
        addresses = world.addresses()
        ranks = world.run([(connected, addresses[i], one_more) for i in (0, 2)])
        for rank in ranks:
            error = rank.result().error
            assert isinstance(error, ExchangeError)
            assert "rank 1" in str(error)


def test_rank_that_comes_after_the_others_gave_up_learns_it_at_once() -> None:
    with World(2, timeout_s=1.0) as world:
        addresses = world.addresses()
        for i in (0, 1):
            (rank,) = world.run([(connected, addresses[i], one_more)])
            result = rank.result()
            assert isinstance(result.error, ExchangeTimeout) and result.error.ranks == (1,)
            assert result.seconds < 4


def test_nothing_is_left_where_the_group_can_not_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("no file may be opened any more")

    monkeypatch.setattr(_private, "gloo_group", refused)
    with World(1) as world:
        before = descriptors.open_sockets()
        with pytest.raises(PeerLostError, match="no file may be opened") as kept:
            GlooExchange.connect(world.addresses()[0])
        while descriptors.opened_since(before):  # the store's side of a connection ends a moment later
            time.sleep(0.01)
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("odb")]
        assert kept.value.__traceback__ is not None


def test_failure_reported_from_outside_reaches_ranks_that_still_join() -> None:
    with World(2) as world:
        addresses = world.addresses()
        (waiting,) = world.run([(connected, addresses[0], one_more)])
        report_failure(addresses[1], "the collate process was ended by SIGKILL")
        error = waiting.result().error
    assert isinstance(error, PeerFailedError)
    assert error.ranks == (1,)
    assert "SIGKILL" in str(error)


def host_store(pipe: Any) -> None:
    world = World(2)
    pipe.send(world.store.port)
    time.sleep(30)


def wait_for_ever(exchange: GlooExchange, pipe: Any) -> Any:
    exchange.all_gather(np.zeros(1, np.int64))
    if exchange.rank == 0:
        with exchange.waiting_for_consumer():
            pipe.send("up")
            time.sleep(2)
    else:
        pipe.send("up")
    return exchange.all_gather(np.zeros(1, np.int64))


def test_death_of_the_process_that_hosts_the_store_names_rank_0() -> None:
    with World(2) as world:
        (host,) = world.run([(host_store,)])
        port = host.hear()
        ranks = world.run([(connected, replace(a, port=port), wait_for_ever) for a in world.addresses()])
        for rank in ranks:
            assert rank.hear() == "up"
        host.signal(signal.SIGKILL)
        errors = [rank.result().error for rank in ranks]
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert error.ranks == (0,)
        assert "rank 0" in str(error)


def explain(exchange: GlooExchange, pipe: Any) -> str:
    text = exchange.explain_disagreement()
    exchange.all_gather(np.zeros(1, np.int64))
    return text


def test_disagreement_is_explained_on_both_sides() -> None:
    settings = [{"token_budget": "4096", "seed": "0"}, {"token_budget": "8192", "seed": "0"}]
    with World(2, fingerprints=settings) as world:
        texts = [rank.result().value for rank in world.start(explain)]
    assert texts[0] == texts[1] == "token_budget: 4096 on rank 0; 8192 on rank 1"


def test_differences_are_listed_by_value_with_their_ranks() -> None:
    settings = [{"a": "1", "b": "x"}, {"a": "1"}, {"a": "1", "b": "x"}, {"a": "2", "b": "x"}]
    assert describe_differences(settings).splitlines() == [
        "a: 1 on ranks 0-2; 2 on rank 3",
        "b: x on ranks 0, 2-3; <not set> on rank 1",
    ]
    assert "equal" in describe_differences([{"a": "1"}] * 2)
    many = describe_differences([{f"k{i:03}": "0" for i in range(50)}, {}])
    assert many.endswith("... and 30 more")


def use_twice(pipe: Any, address: Any) -> None:
    with pytest.raises(ExchangeTimeout):
        GlooExchange.connect(address)
    GlooExchange.connect(address)


def test_an_address_is_good_for_one_exchange_only() -> None:
    with World(2, timeout_s=1.0) as world:
        (rank,) = world.run([(use_twice, world.addresses()[0])])
        error = rank.result().error
    assert isinstance(error, ExchangeError)
    assert "used this address before" in str(error)


class Held:
    """Stands for a store's client, whose socket is open as long as it lives."""


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_call_in_a_thread_that_ends_with_an_error_keeps_nothing(is_given_up: bool) -> None:
    """Not even until garbage is collected: what it used goes with its error."""
    held = [Held()]
    seen, go_on = weakref.ref(held[0]), threading.Event()

    def make() -> None:
        mine = held.pop()
        assert not is_given_up or go_on.wait(5)
        raise RuntimeError(f"{mine} broke")

    def tick() -> None:
        if is_given_up:
            raise KeyError("enough")

    gc.disable()
    try:
        with pytest.raises(KeyError if is_given_up else RuntimeError):
            gloo._patiently(make, 5, tick, go_on.set)
        assert seen() is None
    finally:
        gc.enable()
