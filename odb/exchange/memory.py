"""Exchanges without a network: one rank alone, and ranks as threads of one process (tests, simulators).

They fail, close, time out and wait for busy peers as the Gloo exchange does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from odb.errors import DisagreementError, ExchangeError
from odb.exchange.base import Poll
from odb.exchange.watch import CLOSED, FAILED, Beat, Event, Lateness, bounded, name_ranks
from odb.plan.types import I64

#: Longest time between two polls of a waiting thread.
SLICE_S = 0.1


class SoloExchange:
    """The exchange of a rank that is alone: every collective is over at once."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._error: ExchangeError | None = None

    def all_gather(self, row: I64, poll: Poll | None = None) -> I64:
        """This rank's row, shape (K,), as the only row of a (1, K) array."""
        self._check()
        return np.array(row, np.int64)[None, :]

    def all_reduce_sum(self, values: I64, poll: Poll | None = None) -> I64:
        """A copy of `values`."""
        self._check()
        return np.array(values, np.int64)

    @contextmanager
    def waiting_for_consumer(self) -> Iterator[None]:
        """Nobody waits for this rank: nothing to tell."""
        yield

    def publish_failure(self, text: str) -> None:
        """Nobody to tell; the exchange is dead all the same."""
        self._error = self._error or ExchangeError(f"this rank failed:\n{text}", (0,))

    def linger(self, seconds: float) -> bool:
        """Nobody to wait for."""
        return True

    def explain_disagreement(self) -> str:
        """Nobody to disagree with."""
        return ""

    def check(self) -> None:
        """No peer can fail."""

    def close(self) -> None:
        """Later calls raise."""
        self._error = self._error or ExchangeError("this exchange is closed", (0,))

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class _Hub:
    """What the threads of one world share. Every field is guarded by `cond`."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.cond = threading.Condition()
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.calls = [0] * world_size
        self.busy = [0] * world_size  # depth of `waiting_for_consumer`
        self.rows: dict[int, dict[int, I64]] = {}
        self.taken: dict[int, int] = {}
        self.events: list[tuple[Event, str]] = []
        self._counter = 0

    def beats(self) -> list[Beat]:
        """A thread of this process always beats."""
        self._counter += 1
        return [Beat(self._counter, call, bool(busy), 0) for call, busy in zip(self.calls, self.busy, strict=True)]

    def bad_news(self, rank: int) -> ExchangeError | None:
        """The first event that keeps `rank` from going on."""
        for event, text in self.events:
            if event.rank != rank and (event.kind != CLOSED or event.call < self.calls[rank]):
                return event.error(text, name_ranks([event.rank]))
        return None

    def take(self, call: int) -> list[I64]:
        """All rows of a complete collective, in rank order; the last one to ask clears it away."""
        rows = self.rows[call]
        self.taken[call] = self.taken.get(call, 0) + 1
        if self.taken[call] == self.world_size:
            del self.rows[call], self.taken[call]
        return [rows[rank] for rank in range(self.world_size)]


class ThreadExchange:
    """One rank of a world whose ranks are threads. Made by `thread_exchanges`."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.rank = rank
        self.world_size = hub.world_size
        self._hub = hub
        self._error: BaseException | None = None
        self._closed = False

    def all_gather(self, row: I64, poll: Poll | None = None) -> I64:
        """See `Exchange.all_gather`."""
        return np.stack(self._exchange(np.array(row, np.int64), poll))

    def all_reduce_sum(self, values: I64, poll: Poll | None = None) -> I64:
        """See `Exchange.all_reduce_sum`."""
        total: I64 = np.stack(self._exchange(np.array(values, np.int64), poll)).sum(axis=0, dtype=np.int64)
        return total

    @contextmanager
    def waiting_for_consumer(self) -> Iterator[None]:
        """While inside, peers wait on without limit."""
        self._shift_busy(1)
        try:
            yield
        finally:
            self._shift_busy(-1)

    def publish_failure(self, text: str) -> None:
        """Tells the other threads. Nothing is published when a peer's failure killed this exchange already."""
        if not isinstance(self._error, ExchangeError):
            self._error = self._error or ExchangeError(f"this rank failed:\n{text}", (self.rank,))
            self._publish(FAILED, bounded(text))

    def linger(self, seconds: float) -> bool:
        """Threads share their memory: what was published is there."""
        return True

    def explain_disagreement(self) -> str:
        """Threads of one process carry no fingerprints."""
        return "the ranks' settings were not published: they run as threads of one process"

    def close(self) -> None:
        """Leaves; idempotent."""
        if not self._closed:
            self._closed = True
            self._error = self._error or ExchangeError("this exchange is closed", (self.rank,))
            self._publish(CLOSED, "")

    def check(self) -> None:
        """Raises what a peer has published."""
        with self._hub.cond:
            news = self._hub.bad_news(self.rank)
        if news is not None:
            raise news

    def _shift_busy(self, by: int) -> None:
        with self._hub.cond:
            self._hub.busy[self.rank] += by

    def _publish(self, kind: str, text: str) -> None:
        with self._hub.cond:
            event = Event(self.rank, kind, self._hub.calls[self.rank], (self.rank,))
            self._hub.events.append((event, text))
            self._hub.cond.notify_all()

    def _exchange(self, row: I64, poll: Poll | None) -> list[I64]:
        if self._error is not None:
            raise self._error
        try:
            rows = self._rendezvous(row, poll)
            if any(other.shape != row.shape for other in rows):
                shapes = ", ".join(f"rank {rank}: {other.shape}" for rank, other in enumerate(rows))
                raise DisagreementError(f"ranks give arrays of different shapes to one exchange: {shapes}")
        except BaseException as error:
            self._error = error
            raise
        return rows

    def _rendezvous(self, row: I64, poll: Poll | None) -> list[I64]:
        call = self._enter(row)
        late = Lateness(self.world_size, self._hub.timeout_s)
        late.begin(call, time.monotonic())
        while True:
            with self._hub.cond:
                complete = self._hub.cond.wait_for(lambda: self._is_over(call), SLICE_S)
                if len(self._hub.rows[call]) == self.world_size:
                    return self._hub.take(call)
                if complete and (news := self._hub.bad_news(self.rank)) is not None:
                    raise news
                self._judge(late)
            if poll is not None:
                poll()

    def _enter(self, row: I64) -> int:
        with self._hub.cond:
            news = self._hub.bad_news(self.rank)
            if news is not None:
                raise news
            self._hub.calls[self.rank] += 1
            call = self._hub.calls[self.rank]
            self._hub.rows.setdefault(call, {})[self.rank] = row
            self._hub.cond.notify_all()
            return call

    def _is_over(self, call: int) -> bool:
        return len(self._hub.rows[call]) == self.world_size or self._hub.bad_news(self.rank) is not None

    def _judge(self, late: Lateness) -> None:
        now = time.monotonic()
        late.observe(self._hub.beats(), now)
        ranks = late.overdue(now)
        if ranks is not None:
            error = late.error(ranks)
            event = Event(self.rank, "timeout", self._hub.calls[self.rank], ranks)
            self._hub.events.append((event, str(error)))
            self._hub.cond.notify_all()
            raise error


def thread_exchanges(world_size: int, timeout_s: float = 600.0) -> list[ThreadExchange]:
    """One exchange per rank, to be used by one thread each."""
    hub = _Hub(world_size, timeout_s)
    return [ThreadExchange(hub, rank) for rank in range(world_size)]
