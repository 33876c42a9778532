"""The thread that speaks for a rank in the store while its main thread works, waits or hangs.

It alone uses the store once the exchange is up: whatever the store does, the main thread keeps its time limits.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

from odb.errors import ExchangeError, ExchangeTimeout, PeerLostError
from odb.exchange.watch import CLOSED, Beat, Event, Lateness, bounded, kind_of, name_ranks

#: Seconds between two beats of a rank.
BEAT_S = 0.5
#: By how much a beat that is read may be out of date: two beats and the reading.
STALE_S = 1.2
#: A rank whose counter stands still this long, while we look, is not running.
SILENT_S = 2.2
#: When this process itself did nothing for so long, it was stopped (a suspended job): its clocks say nothing of others.
PAUSE_S = 5.0


class Store(Protocol):
    """What is used of a key-value store. Its methods raise RuntimeError when its host is gone."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def append(self, key: str, value: str, /) -> Any: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class Monitor(threading.Thread):
    """Publishes this rank's beats and events, reads those of the others.

    The main thread writes `call`, `busy` and `waiting`, and reads `error`, `left` and `last_contact`: plain attributes,
    each written by one thread only.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        host_rank: int,
        global_ranks: Sequence[int],
        break_off: Callable[[], object] | None = None,
    ) -> None:
        """`break_off` ends a call of the store that hangs."""
        super().__init__(name=f"odb-exchange-{rank}", daemon=True)
        self.call = 0  # collectives entered
        self.busy = 0  # depth of waiting for the consumer
        self.waiting: float | None = (
            None  # when the main thread began to wait, once that is worth a look at who is late
        )
        self.error: ExchangeError | None = None  # why this rank can't go on
        self.left: dict[int, Event] = {}  # ranks that closed their loader
        self.last_contact = time.monotonic()  # when the store last answered
        self._store = store
        self._break_off = break_off
        self._rank, self._world_size, self._host_rank = rank, world_size, host_rank
        self._global_ranks = tuple(global_ranks)
        self._timeout_s = timeout_s
        self._counter = 0
        self._seen = 0
        self._late = Lateness(world_size, timeout_s, STALE_S, SILENT_S)
        self._look_every_s = min(max(timeout_s / 10, BEAT_S), 5.0)  # reading all beats costs one key per rank
        self._looked_at = 0.0
        self._checked_at = self._trust_from = self._looped_at = time.monotonic()
        self._watched_call = 0
        self._wait_from = 0.0
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False

    def name_of(self, ranks: Sequence[int]) -> str:
        """How errors call these ranks."""
        return name_ranks(ranks, self._global_ranks)

    # ---- for the main thread ----

    def check(self, call: int) -> None:
        """Raises what keeps this rank from finishing collective number `call`.

        Raises:
            ExchangeError: found by this thread; a rank that left; or the store has been silent beyond the time limit.
        """
        if self.error is not None:
            raise self.error
        for event in list(self.left.values()):
            if event.call < call:
                raise event.error("", self.name_of([event.rank]))
        now = time.monotonic()
        if now - self._checked_at > PAUSE_S:
            self._trust_from = now
        self._checked_at = now
        if now - max(self.last_contact, self._trust_from) > max(self._timeout_s, PAUSE_S):
            raise ExchangeTimeout(
                f"{self.name_of([self._host_rank])}, whose training process hosts the ranks' meeting point, has not "
                f"answered for {self._timeout_s:g} s (timeout_s)",
                (self._host_rank,),
            )

    def submit(self, job: Callable[[], Any], limit_s: float) -> Any:
        """Runs a job in this thread and gives its result.

        Raises:
            ExchangeError: the store is gone or did not answer within `limit_s`.
        """
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        self._wake.set()
        limit_s = self._patience(limit_s)
        deadline = time.monotonic() + limit_s
        while (future.done() or self.is_alive()) and time.monotonic() < deadline:
            try:
                return future.result(min(0.2, limit_s))
            except FutureTimeout:
                continue
            except (RuntimeError, ValueError) as gone:
                raise self._host_gone(first_line(gone)) from None
        raise self.error or self._host_gone(f"it did not answer within {limit_s:g} s")

    def publish(self, kind: str, text: str, ranks: tuple[int, ...], limit_s: float) -> int:
        """Appends an event to the common log; gives the number of events in it."""
        return int(self.submit(lambda: self._append(kind, text, ranks), limit_s))

    def beats(self, limit_s: float) -> list[Beat]:
        """All ranks' last beats."""
        beats: list[Beat] = self.submit(self._read_beats, limit_s)
        return beats

    def texts(self, key: str, limit_s: float) -> list[str]:
        """The texts under `key/<rank>` of all ranks."""
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        return [raw.decode() for raw in self.submit(lambda: self._store.multi_get(keys), limit_s)]

    def stop(self, limit_s: float) -> None:
        """Runs what was submitted, then ends the thread; within `limit_s`, and a little more where the store hangs."""
        self._stopping = True
        self._wake.set()
        if self.ident is not None:  # it was started
            self.join(self._patience(limit_s))
            if self.is_alive() and self._break_off is not None:
                self._break_off()
                self.join(1.0)
        if not self.is_alive():
            del self._store  # its connection ends with it

    def _patience(self, limit_s: float) -> float:
        """How long to wait for the store: not again for one that has been silent for long."""
        is_silent = self.ident is not None and time.monotonic() - self.last_contact > PAUSE_S
        return min(limit_s, 0.5) if is_silent else limit_s

    # ---- in the thread ----

    def run(self) -> None:
        """Beats until stopped, or until the store is gone."""
        try:
            while not self._stopping:
                self._wake.clear()
                self._beat()
                self._read_events()
                self._judge()
                self._run_jobs()
                self._wake.wait(BEAT_S)
            self._run_jobs()
        except (RuntimeError, ValueError) as gone:
            self._fail(self._host_gone(first_line(gone)))

    def publish_first(self, fingerprint: dict[str, str]) -> None:
        """What peers must find before the first collective. Called before `start`, in the main thread."""
        self._store.set(f"settings/{self._rank}", json.dumps(fingerprint))
        self._beat()

    def _beat(self) -> None:
        self._counter += 1
        beat = Beat(self._counter, self.call, self.busy > 0, self._seen)
        self._store.set(f"beat/{self._rank}", beat.encode())

    def _read_events(self) -> None:
        count = self._store.add("events", 0)
        self.last_contact = time.monotonic()
        if count == self._seen:
            return
        events = Event.decode_all(self._store.get("log"))
        for event in events[self._seen :]:
            self._take(event)
        self._seen = len(events)
        self._beat()  # whoever lingers until its failure was read learns it now

    def _take(self, event: Event) -> None:
        if event.rank == self._rank:
            return
        if event.kind == CLOSED:
            self.left[event.rank] = event
        else:
            self._fail(event.error(self._store.get(f"text/{event.rank}").decode(), self.name_of([event.rank])))

    def _judge(self) -> None:
        now, waiting = time.monotonic(), self.waiting
        paused = now - self._looped_at > PAUSE_S
        self._looped_at = now
        if waiting is None or paused:
            self._watched_call = 0
            self._wait_from = now if paused else 0.0
            return
        if self.error is not None or (self._watched_call == self.call and now - self._looked_at < self._look_every_s):
            return
        if self._watched_call != self.call:
            self._watched_call = self.call
            self._late.begin(self.call, max(waiting, self._wait_from))
        self._late.observe(self._read_beats(), now)
        self._looked_at = now
        ranks = self._late.overdue(now)
        if ranks is not None:
            self.pass_on(self._late.error(ranks, self._global_ranks))

    def num_events(self) -> int:
        """Events in the common log."""
        return self._store.add("events", 0)

    def append_now(self, kind: str, text: str, ranks: tuple[int, ...]) -> None:
        """Appends an event from the calling thread: for whoever speaks in place of a rank that can't any more."""
        self._append(kind, text, ranks)

    def pass_on(self, error: ExchangeError) -> None:
        """An error that this rank found by itself: peers shall raise the same one."""
        self._append(kind_of(error), str(error), error.ranks)
        self._fail(error)

    def _append(self, kind: str, text: str, ranks: tuple[int, ...]) -> int:
        if text:
            self._store.set(f"text/{self._rank}", bounded(text))
        self._store.append("log", Event(self._rank, kind, self.call, ranks).encode())
        return self._store.add("events", 1)

    def _read_beats(self) -> list[Beat]:
        raw = self._store.multi_get([f"beat/{rank}" for rank in range(self._world_size)])
        return [Beat.decode(one) for one in raw]

    def _run_jobs(self) -> None:
        while True:
            try:
                job, future = self._jobs.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
                raise

    def _fail(self, error: ExchangeError) -> None:
        self.error = self.error or error

    def _host_gone(self, why: str) -> PeerLostError:
        text = (
            f"{self.name_of([self._host_rank])} is gone: its training process keeps the ranks' meeting point, which "
            f"can't be reached any more ({why})"
        )
        return PeerLostError(text, (self._host_rank,))


def first_line(error: BaseException) -> str:
    """PyTorch's messages carry stack traces of C++: their first line says it."""
    return (str(error).splitlines() or [type(error).__name__])[0]
