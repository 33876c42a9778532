"""The exchange over Gloo: a group of its own, in a collate process or the training process, never the training group.

What Gloo lacks is added beside it, through a store that rank 0's training process hosts: who failed and why, who is
late, who is busy, who left (see `watch` and `monitor`). Gloo's own time limit is practically infinite, since a peer may
be busy for hours; the limits that count are kept here.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed

from odb.errors import ExchangeError, ExchangeTimeout, PeerLostError
from odb.exchange import _private, descriptors
from odb.exchange.base import Poll
from odb.exchange.monitor import SILENT_S, Monitor, first_line
from odb.exchange.watch import CLOSED, FAILED, bounded
from odb.plan.types import I64

dist: Any = torch.distributed  # its stubs leave out the stores and the options

#: Longest time between two looks at the caller's `poll` and at what the monitor found.
SLICE_S = 0.2
#: A wait that is longer than this makes the monitor look who is late.
SLOW_S = 0.5
#: Gloo's own limit of one collective.
_FOREVER = timedelta(days=30)
#: How long the store may take for one answer before a call gives up on it.
_STORE_LIMIT_S = 5.0
#: How long connecting to the store may take, where `timeout_s` allows as much.
_CONNECT_LIMIT_S = 30.0


@dataclass(frozen=True)
class GlooAddress:
    """How one rank finds its exchange. Picklable; good for one `GlooExchange.connect` (make another for another)."""

    host: str  # of the store, in rank 0's training process
    port: int
    prefix: str  # of this exchange's keys
    rank: int
    world_size: int
    timeout_s: float  # bounds silence and lack of work of a peer, seconds
    own_address: str  # under which the peers reach this rank
    interfaces: tuple[str, ...] = ()  # GLOO_SOCKET_IFNAME, if set
    host_rank: int = 0  # the data-parallel rank of the process that hosts the store
    global_ranks: tuple[int, ...] = ()  # of the exchange's ranks, for messages
    loader_number: int = 0
    fingerprint: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # settings, for `explain_disagreement`


class GlooExchange:
    """An `odb.exchange.base.Exchange` among processes. One thread may call it. After its first error it is dead."""

    def __init__(self, address: GlooAddress, monitor: Monitor, group: Any, sockets: dict[int, str]) -> None:
        """Use `connect`."""
        self.rank = address.rank
        self.world_size = address.world_size
        self._address = address
        self._monitor = monitor
        self._group: Any = group
        self._sockets = sockets
        self._work: Any = None  # the collective in flight
        self._error: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._allreduce, self._allgather = dist.AllreduceOptions(), dist.distributed_c10d.AllgatherOptions()
        self._allreduce.timeout = self._allgather.timeout = _FOREVER

    @classmethod
    def connect(cls, address: GlooAddress, poll: Poll | None = None) -> GlooExchange:
        """Meets the other ranks and builds the group.

        Raises:
            ExchangeTimeout: ranks didn't come within `address.timeout_s`; names them.
            PeerFailedError, PeerClosedError, PeerLostError: as in a collective.
        """
        poll = poll or _no_poll
        client, break_off = _open_store(address, poll)
        store = dist.PrefixStore(address.prefix, client)
        monitor = Monitor(
            store,
            address.rank,
            address.world_size,
            address.timeout_s,
            address.host_rank,
            address.global_ranks,
            break_off=break_off,
        )

        def tick() -> None:
            monitor.check(call=1)
            poll()

        try:
            _join(store, monitor, address, tick)
            before = descriptors.open_sockets()
            group = _build_group(address, tick)
        except BaseException as error:
            if isinstance(error, ExchangeError) and error is not monitor.error:
                _tell_those_who_come_later(monitor, error)
            monitor.stop(_STORE_LIMIT_S)
            del store, client
            _forget_frames(error)  # whoever keeps the error would keep the connection
            raise
        return cls(address, monitor, group, descriptors.opened_since(before))

    def all_gather(self, row: I64, poll: Poll | None = None) -> I64:
        """See `Exchange.all_gather`."""
        assert row.ndim == 1 and row.dtype == np.int64, "a row is one-dimensional int64"
        mine = torch.from_numpy(np.ascontiguousarray(row))
        rows = torch.empty((self.world_size, len(row)), dtype=torch.int64)
        self._run(lambda: self._group.allgather([list(rows.unbind(0))], [mine], self._allgather), poll)
        return rows.numpy()

    def all_reduce_sum(self, values: I64, poll: Poll | None = None) -> I64:
        """See `Exchange.all_reduce_sum`."""
        assert values.dtype == np.int64, "only int64 is summed"
        total = torch.from_numpy(np.array(values, order="C"))
        self._run(lambda: self._group.allreduce([total], self._allreduce), poll)
        return total.numpy()

    @contextmanager
    def waiting_for_consumer(self) -> Iterator[None]:
        """While inside, this rank's beats say that it is busy. Costs nothing."""
        self._monitor.busy += 1
        try:
            yield
        finally:
            self._monitor.busy -= 1

    def publish_failure(self, text: str) -> None:
        """Tells all ranks, once, why this one can't go on. Nothing when a peer's failure was first. Never raises."""
        if isinstance(self._error, ExchangeError):
            return
        self._error = self._error or ExchangeError(f"this rank failed:\n{bounded(text)}", (self.rank,))
        with suppress(ExchangeError):
            self._monitor.publish(FAILED, text, (self.rank,), _STORE_LIMIT_S)

    def linger(self, seconds: float) -> bool:
        """Waits until every peer has read all that was published, or until the time is over.

        For a rank that failed and whose process hosts the store: what isn't read dies with it. Never raises.
        """
        deadline = time.monotonic() + seconds
        try:
            num_events = self._monitor.submit(lambda: self._monitor.num_events(), seconds)
            while not self._all_read(num_events, seconds):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
        except ExchangeError:
            return False
        return True

    def _all_read(self, num_events: int, limit_s: float) -> bool:
        beats = self._monitor.beats(limit_s)
        known = self._error or self._monitor.error  # whom it names need not, or can't, read it
        gone = {self.rank, *self._monitor.left, *(known.ranks if isinstance(known, ExchangeError) else ())}
        return all(beat.seen >= num_events for rank, beat in enumerate(beats) if rank not in gone)

    def explain_disagreement(self) -> str:
        """Which settings differ between which ranks, as a bounded text for a `DisagreementError`. Never raises."""
        try:
            raw = self._monitor.texts("settings", _STORE_LIMIT_S)
            return bounded(describe_differences([json.loads(one) for one in raw]))
        except (ExchangeError, ValueError) as error:
            return f"the ranks' settings could not be compared: {error}"

    def close(self) -> None:
        """Leaves; peers that still wait for this rank learn it. Idempotent, never raises; at most about 10 s.

        Ends its thread and its connections, also with a collective in flight. Does nothing in a forked child.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._error = self._error or ExchangeError("this exchange is closed", (self.rank,))
        with suppress(ExchangeError):
            self._monitor.publish(CLOSED, "", (self.rank,), 2.0)
        self._monitor.stop(_STORE_LIMIT_S)
        self._drop_group()

    def check(self) -> None:
        """Raises what a peer has published; local, for waits outside of a collective."""
        if self._error is None and self._monitor.error is not None:
            raise self._monitor.error

    # ---- one collective ----

    def _run(self, start: Callable[[], Any], poll: Poll | None) -> None:
        if self._error is not None:
            raise self._error
        monitor = self._monitor
        try:
            monitor.call += 1
            monitor.check(monitor.call)
            self._work = self._start(start, poll)
            self._wait(poll)
            self._work = None
        except BaseException as error:
            self._error = error
            raise
        finally:
            monitor.waiting = None

    def _start(self, start: Callable[[], Any], poll: Poll | None) -> Any:
        try:
            return start()
        except RuntimeError as error:  # a connection that broke before the call
            raise self._diagnose(first_line(error), poll) from None

    def _wait(self, poll: Poll | None) -> None:
        # No local name for the work: the frames of a kept error would keep it, and with it the group's connections.
        began = time.monotonic()
        while True:
            over = self._work.is_completed()
            try:
                self._work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError as error:  # the slice is over, or the collective is
                if over:
                    raise self._diagnose(first_line(error), poll) from None
            if self._work.is_completed():
                continue
            self._monitor.check(self._monitor.call)
            if time.monotonic() - began > SLOW_S:
                self._monitor.waiting = began
            if poll is not None:
                poll()

    def _diagnose(self, gloo_says: str, poll: Poll | None) -> ExchangeError:
        """Gloo broke a collective off and does not say who: the peer's own words, or whoever has fallen silent."""
        try:
            before = self._monitor.beats(_STORE_LIMIT_S)
            until = time.monotonic() + SILENT_S
            while time.monotonic() < until:
                self._monitor.check(self._monitor.call)
                if poll is not None:
                    poll()
                time.sleep(0.05)
            after = self._monitor.beats(_STORE_LIMIT_S)
        except ExchangeError as known:
            return known
        silent = tuple(rank for rank, beat in enumerate(after) if beat.counter == before[rank].counter)
        error = self._lost(silent, gloo_says)
        with suppress(ExchangeError):
            self._monitor.submit(lambda: self._monitor.pass_on(error), _STORE_LIMIT_S)
        return self._monitor.error or error

    def _lost(self, silent: tuple[int, ...], gloo_says: str) -> PeerLostError:
        cause = gloo_says[:300]
        if not silent:
            return PeerLostError(
                f"a connection between ranks broke, yet all ranks are alive: check the network ({cause})"
            )
        who = self._monitor.name_of(silent)
        return PeerLostError(
            f"{who} vanished without a word: killed (out of memory?) or crashed; see the log there ({cause})", silent
        )

    def _drop_group(self) -> None:
        """Destroys the group. Its destructor waits for a collective in flight, so that one is broken off first."""
        work, group = self._work, self._group
        self._work = self._group = None
        if work is not None and not work.is_completed():
            descriptors.shut_down(self._sockets, own_address=self._address.own_address)
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=2))
        if work is not None and not work.is_completed():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # stays until the process ends, rather than hang in it


def _tell_those_who_come_later(monitor: Monitor, error: ExchangeError) -> None:
    """They must not wait for a rank that gave up. What names no other rank is this one's own failure."""
    with suppress(ExchangeError):
        if error.ranks:
            monitor.submit(partial(monitor.pass_on, error), _STORE_LIMIT_S)
        else:
            monitor.publish(FAILED, f"{type(error).__name__}: {error}", (), _STORE_LIMIT_S)


def _forget_frames(error: BaseException) -> None:
    """Lets go what the frames of an error hold, and of those that came before it."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


_Opened = tuple[Any, Callable[[], object]]


def _no_poll() -> None:
    """Nothing to react to."""


_hosted: tuple[int, weakref.ref[Any]] | None = None  # pid of the process that hosts a store, and the store


def note_hosted(store: Any) -> None:
    """This process hosts the ranks' store: what it reports needs no further connection, which may be what it lacks."""
    global _hosted
    _hosted = os.getpid(), weakref.ref(store)


def _hosted_here(address: GlooAddress) -> Any:
    """The store of an address, where this very process hosts it."""
    if _hosted is None or _hosted[0] != os.getpid():
        return None
    store = _hosted[1]()
    return store if store is not None and store.port == address.port else None


def report_failure(address: GlooAddress, text: str) -> None:
    """Tells all ranks, from outside of its exchange, that `address.rank` failed: its collate process died.

    Never raises; takes at most about 10 s, where the store is gone.
    """
    with suppress(RuntimeError, ExchangeError):
        client = _hosted_here(address) or _open_store(address, _no_poll, _STORE_LIMIT_S)[0]
        store = dist.PrefixStore(address.prefix, client)
        monitor = Monitor(
            store, address.rank, address.world_size, address.timeout_s, address.host_rank, address.global_ranks
        )
        monitor.append_now(FAILED, text, (address.rank,))


def describe_differences(settings: list[dict[str, str]], max_keys: int = 20) -> str:
    """One line for each key whose value isn't the same on all ranks: the values, and the ranks that have them."""
    lines = []
    for key in sorted({key for one in settings for key in one}):
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(settings):
            values.setdefault(one.get(key, "<not set>")[:200], []).append(rank)
        if len(values) > 1:
            lines.append(f"{key}: " + "; ".join(f"{value} on {_ranges(ranks)}" for value, ranks in values.items()))
    if not lines:
        return "the settings that the ranks published are equal: their data or their plans differ"
    more = [f"... and {len(lines) - max_keys} more"] if len(lines) > max_keys else []
    return "\n".join(lines[:max_keys] + more)


def _ranges(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return ("rank " if len(ranks) == 1 else "ranks ") + text


def _open_store(address: GlooAddress, tick: Callable[[], None], most_s: float = _CONNECT_LIMIT_S) -> _Opened:
    """Our own connection to the store. Tried with a plain socket first: the store's own retries are slow and loud.

    Returns:
        the store, and a function that ends a call which waits for it in another thread, with an error.
    """
    limit_s = min(most_s, address.timeout_s)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=2.0).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(address, str(error)) from None
        tick()
        time.sleep(0.1)
    limit = timedelta(seconds=limit_s)
    before = descriptors.open_sockets()
    try:
        store = _patiently(
            lambda: dist.TCPStore(address.host, address.port, None, False, limit, wait_for_workers=False), limit_s, tick
        )
        return store, partial(descriptors.shut_down, descriptors.opened_since(before), peer_port=address.port)
    except dist.DistError as error:
        raise _unreachable(address, first_line(error)) from None
    except TimeoutError:
        raise ExchangeTimeout(
            f"connecting to rank {address.host_rank} under {address.host}:{address.port} hangs for more than {limit_s:g} s: "
            f"its training process, which hosts the ranks' meeting point, is stopped or may open no further file, or name "
            f"resolution is slow, or this process was forked while a thread of its parent held a lock of the system's name "
            f"resolver (see odb.exchange.rendezvous), which another start method (spawn, forkserver) rules out",
            (address.host_rank,),
        ) from None


def _unreachable(address: GlooAddress, why: str) -> PeerLostError:
    return PeerLostError(
        f"rank {address.host_rank} can't be reached under {address.host}:{address.port} ({why}): its training process, "
        f"which hosts the ranks' meeting point, is gone, or a firewall is between the hosts",
        (address.host_rank,),
    )


def _patiently(
    make: Callable[[], Any], limit_s: float, tick: Callable[[], None], break_off: Callable[[], object] | None = None
) -> Any:
    """The result of a call that may block for long, made in a thread so that `tick` runs meanwhile and may raise.

    `break_off` ends the call where nobody waits for it any more.

    Raises:
        TimeoutError: it took longer than `limit_s`. (The thread, a daemon, stays with it.)
    """
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            # `future` and this frame hold each other: what other frames hold would stay until garbage is collected.
            _forget_frames(error)
            future.set_exception(error)

    thread = threading.Thread(target=work, name="odb-exchange-connect", daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s
    try:
        while not wait([future], timeout=SLICE_S).done:
            tick()
            if time.monotonic() > deadline:
                raise TimeoutError(f"still blocked after {limit_s:g} s")
    except BaseException:
        if break_off is not None:
            break_off()
            thread.join(_STORE_LIMIT_S)
        raise
    return future.result()


def _join(store: Any, monitor: Monitor, address: GlooAddress, tick: Callable[[], None]) -> None:
    """Says that this rank is here, and waits until all are."""
    if store.add(f"joined/{address.rank}", 1) > 1:
        raise ExchangeError(f"rank {address.rank} has used this address before: each exchange needs one of its own")
    monitor.publish_first(dict(address.fingerprint))
    num_here = store.add("here", 1)
    monitor.start()
    began, pause = time.monotonic(), 0.001
    while num_here < address.world_size:
        tick()
        if time.monotonic() - began > address.timeout_s:
            missing = [rank for rank in range(address.world_size) if not store.check([f"joined/{rank}"])]
            raise ExchangeTimeout(
                f"{monitor.name_of(missing)} did not join the exchange within {address.timeout_s:g} s (timeout_s)",
                tuple(missing),
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
        num_here = store.add("here", 0)


def _build_group(address: GlooAddress, tick: Callable[[], None]) -> Any:
    """All ranks are there, so this takes milliseconds, or until a peer's death is noticed.

    Over a connection of its own: one that waits for a peer would keep the monitor from the store, and with it the news.
    """
    limit_s = min(max(address.timeout_s, 30.0), 300.0)
    client, break_off = _open_store(address, tick)
    clients = [client]
    del client

    def make() -> Any:
        # Taken, not shared: the frames of an error keep this function, and what it refers to.
        keys = dist.PrefixStore("gloo", dist.PrefixStore(address.prefix, clients.pop()))
        if address.interfaces:
            devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in address.interfaces]
        else:
            devices = [dist.ProcessGroupGloo.create_device(hostname=address.own_address)]
        return _private.gloo_group(keys, address.rank, address.world_size, devices, timedelta(seconds=limit_s))

    try:
        return _patiently(make, limit_s + 5, tick, break_off)
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, ExchangeError):
            raise
        tick()
        raise PeerLostError(
            f"the ranks can't connect to each other from {address.own_address} within {limit_s:g} s: "
            f"{first_line(error)}"
        ) from None
