"""The exchanges without a network keep the contract that the Gloo exchange keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from odb.errors import DisagreementError, ExchangeError, ExchangeTimeout, PeerClosedError, PeerFailedError
from odb.exchange.base import Exchange
from odb.exchange.memory import SoloExchange, ThreadExchange, thread_exchanges

pytestmark = pytest.mark.timeout(30)


def run_all(exchanges: list[ThreadExchange], body: Callable[[ThreadExchange], Any]) -> list[Any]:
    """What `body` gives or raises, for every rank in a thread of its own."""
    results: list[Any] = [None] * len(exchanges)

    def work(rank: int) -> None:
        try:
            results[rank] = body(exchanges[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def one() -> Any:
    return np.ones(1, np.int64)


def test_all_are_exchanges() -> None:
    assert isinstance(SoloExchange(), Exchange)
    assert isinstance(thread_exchanges(2)[0], Exchange)


def test_solo_gives_back_what_it_gets_until_it_is_closed() -> None:
    exchange = SoloExchange()
    with exchange.waiting_for_consumer():
        assert exchange.all_gather(np.array([3, 4])).tolist() == [[3, 4]]
    values = np.array([[1], [2]])
    total = exchange.all_reduce_sum(values)
    values[0, 0] = 9
    assert total.tolist() == [[1], [2]]
    exchange.close()
    with pytest.raises(ExchangeError, match="closed"):
        exchange.all_gather(one())


def test_threads_agree_over_many_rounds() -> None:
    exchanges = thread_exchanges(4)

    def four(exchange: ThreadExchange) -> int:
        for i in range(100):
            assert exchange.all_gather(np.array([exchange.rank, i])).tolist() == [[rank, i] for rank in range(4)]
            assert exchange.all_reduce_sum(np.array([[exchange.rank], [2**60]])).tolist() == [[6], [2**62]]
        return i

    assert run_all(exchanges, four) == [99] * 4
    assert exchanges[0]._hub.rows == {}, "nothing is kept of a collective that is over"


def test_failure_reaches_every_thread_at_once() -> None:
    def body(exchange: ThreadExchange) -> Any:
        exchange.all_gather(one())
        if exchange.rank == 1:
            exchange.publish_failure("ValueError: broken")
            return exchange.linger(1.0)
        began = time.monotonic()
        with pytest.raises(PeerFailedError, match=r"rank 1 failed:\nValueError: broken") as caught:
            exchange.all_gather(one())
        assert caught.value.ranks == (1,)
        with pytest.raises(PeerFailedError) as again:
            exchange.all_reduce_sum(one())
        assert again.value is caught.value
        assert time.monotonic() - began < 1.0
        return True

    assert run_all(thread_exchanges(3), body) == [True] * 3


def test_closed_rank_is_an_error_only_for_whoever_waits_for_it() -> None:
    def body(exchange: ThreadExchange) -> Any:
        exchange.all_gather(one())
        if exchange.rank == 0:
            return exchange.close()
        return exchange.all_gather(one())

    results = run_all(thread_exchanges(2), body)
    assert results[0] is None
    assert isinstance(results[1], PeerClosedError)
    assert results[1].ranks == (0,)


def test_late_rank_is_named_with_the_limit_on_all_ranks() -> None:
    def body(exchange: ThreadExchange) -> Any:
        if exchange.rank == 2:
            time.sleep(1.2)
        return exchange.all_gather(one())

    for result in run_all(thread_exchanges(3, timeout_s=0.4), body):
        assert isinstance(result, ExchangeTimeout)
        assert result.ranks == (2,)
        assert "rank 2 did not come to exchange 1 within 0.4 s" in str(result)


def test_busy_rank_is_waited_for() -> None:
    def body(exchange: ThreadExchange) -> Any:
        if exchange.rank == 1:
            with exchange.waiting_for_consumer():
                time.sleep(1.2)
        return exchange.all_gather(one()).ravel().tolist()

    assert run_all(thread_exchanges(2, timeout_s=0.4), body) == [[1, 1], [1, 1]]


def test_poll_runs_while_waiting_and_may_leave_the_wait() -> None:
    class ParentGone(Exception):
        pass

    def poll() -> None:
        raise ParentGone

    exchange = thread_exchanges(2)[0]
    with pytest.raises(ParentGone):
        exchange.all_gather(one(), poll)
    with pytest.raises(ParentGone):
        exchange.all_gather(one())


def test_arrays_of_different_shapes_are_a_disagreement() -> None:
    def body(exchange: ThreadExchange) -> Any:
        return exchange.all_reduce_sum(np.ones(exchange.rank + 1, np.int64))

    for result in run_all(thread_exchanges(2), body):
        assert isinstance(result, DisagreementError)
        assert "rank 0: (1,), rank 1: (2,)" in str(result)
