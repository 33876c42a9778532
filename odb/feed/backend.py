"""The training process's side: where the loader's batches come from.

`ProcessBackend` talks to a collate process; `InlineBackend` runs the same node in the training process, where the
user asked for no workers. Both have four verbs: `begin`, `next`, `end`, `close`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from odb.errors import ChannelClosed, ConfigError, ExchangeError, PeerClosedError, ProcessDied, SampleError
from odb.feed import supervise
from odb.feed.assemble import Delivery
from odb.feed.channel import Channel, NotInTime, channel_pair
from odb.feed.collator import REASON_S, publish_failure_at, run
from odb.feed.engine import PeersClosed, ResumePoint
from odb.feed.messages import Begin, Counts, Delivered, End, Failed, Finished, PeersLeft, Shutdown, Taken, rebuilt
from odb.feed.node import Node, NodeSpec
from odb.feed.source import Order

_SLICE_S = 1.0
_EXIT_GRACE_S = 4.0
_EXIT_S = 0.5  # from the end of a link to the exit of the process that died; in less than `_REASON_OF_OWN_S`

OnCounts = Callable[[Counts], None]


class Backend(Protocol):
    """Where a loader's batches come from. Not thread-safe."""

    def begin(self, order: Order, base_seed: int, resume: ResumePoint | None = None) -> int:
        """Starts an epoch, ending the one before; returns its generation."""

    def next(self, generation: int, on_counts: OnCounts) -> Delivery | None:
        """The next batch of an epoch, None when it is over on all ranks."""

    def end(self, generation: int) -> None:
        """The training loop left this epoch. Returns at once."""

    def close(self, failure: str = "") -> None:
        """Ends everything; the other ranks are told of a `failure` of the training loop. Idempotent."""

    def close_at_exit(self) -> None:
        """Closes at the interpreter's exit, which may be due to an exception of the training loop."""


def close_collected(backend: Backend) -> None:
    """Closes the backend of a loader that was collected as garbage, which may happen in any thread.

    Also in one of the backend's own, which can't wait for itself, or in another daemon, for which the interpreter's exit
    would not wait: a thread that is in PyTorch's code by then makes the process abort (see docs/failures.md).
    """
    if threading.current_thread().daemon:
        with contextlib.suppress(RuntimeError):  # the interpreter is ending and starts no thread any more
            threading.Thread(target=backend.close, name="odb-collected", daemon=False).start()
            return
    backend.close()


def failure_text(error: BaseException | None) -> str:
    """What the other ranks are told where this exception ends the training loop; "" where it is none of theirs.

    None, an exit that was asked for, and what this rank itself was told by the others.
    """
    if error is None or isinstance(error, (SystemExit, GeneratorExit, ExchangeError)):
        return ""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def what_ends_the_program() -> BaseException | None:
    """At the interpreter's exit: the exception that it is due to, if there is one."""
    if hasattr(sys, "ps1"):  # interactive: the last exception is an old one
        return None
    return sys.exc_info()[1] or getattr(sys, "last_value", None)


def peers_closed_error(ranks: tuple[int, ...]) -> PeerClosedError:
    """Why there is no further batch."""
    who = ", ".join(map(str, ranks))
    return PeerClosedError(
        f"rank {who} left this epoch (broke out of the loop, or began another epoch) while this rank asks for more of "
        "it: no further step can be planned for all ranks. Leave the loop at the same step on every rank",
        ranks,
    )


def check_owner(pid: int) -> None:
    """An open epoch can't be shared by two processes.

    Raises:
        RuntimeError: the calling process is another one than `pid`, a fork of it.
    """
    if pid != os.getpid():
        raise RuntimeError(
            f"this epoch was begun in process {pid} and can't be continued in its forked child {os.getpid()}: begin a "
            "new epoch there (iter(loader)), or make the loader after the fork"
        )


class ProcessBackend:
    """Batches from a collate process, which lives as long as this object."""

    def __init__(self, spec: NodeSpec, start_method: str | None, pin: Callable[[Any], Any] | None = None) -> None:
        self._context: Any = multiprocessing.get_context(start_method)
        self._pin = pin
        self._generation = 0
        self._open = -1  # generation of an epoch that has not been seen to end
        self._error: BaseException | None = None
        self._owner_pid = os.getpid()
        self._spec = spec
        self._timeout_s = spec.options.timeout_s
        self._is_closed = False
        use_signal = supervise.can_use_signal(self._context)
        ends: tuple[Channel, ...] = ()
        try:
            ends = self._channel, remote = channel_pair(num_blocks=spec.ready_batches + 2)
            self._process = supervise.start(self._context, run, (spec, remote, os.getpid(), use_signal), "odb-collate")
        except Exception as error:
            for end in ends:
                end.close()
            failure = unpicklable_error(spec, self._context.get_start_method(), error)
            publish_failure_at(spec, f"{type(failure).__name__}: {failure}")
            raise failure from error

    def begin(self, order: Order, base_seed: int, resume: ResumePoint | None = None) -> int:
        """Starts an epoch."""
        self._raise_if_dead()
        self._generation += 1
        self._open = self._generation
        self._send(Begin(self._generation, order, base_seed, resume))
        return self._generation

    def next(self, generation: int, on_counts: OnCounts) -> Delivery | None:
        """The next batch; waits as long as the collate process lives."""
        self._raise_if_dead()
        if generation != self._open:
            return None
        while True:
            message = self._receive()
            if isinstance(message, Failed):
                self._fail(rebuilt(message))
            if getattr(message, "generation", generation) != generation:
                continue  # of an epoch that was left
            if isinstance(message, Delivered):
                self._send(Taken(generation))
                if message.counts is not None:
                    on_counts(message.counts)
                return message.delivery
            if isinstance(message, Finished):
                self._open = -1
                on_counts(message.counts)
                return None
            if isinstance(message, PeersLeft):
                self.end(generation)
                raise peers_closed_error(message.ranks)

    def end(self, generation: int) -> None:
        """Tells the collate process that nobody wants more of this epoch."""
        if generation == self._open and self._error is None and os.getpid() == self._owner_pid:
            self._open = -1
            with contextlib.suppress(ChannelClosed):
                self._channel.send(End(generation))

    def close(self, failure: str = "") -> None:
        """Asks the collate process to end, and ends it if it does not."""
        if self._is_closed or os.getpid() != self._owner_pid:  # a forked child holds a copy of this object
            return
        self._is_closed = True
        with contextlib.suppress(ChannelClosed, TimeoutError, OSError):
            self._channel.send(Shutdown(failure), timeout=1.0)
        supervise.stop(self._process, _EXIT_GRACE_S)
        self._channel.close()
        if self._error is None:
            self._error = RuntimeError("this loader is closed; make a new one")

    def close_at_exit(self) -> None:
        """See `Backend.close_at_exit`."""
        self.close(failure_text(what_ends_the_program()))

    @property
    def pid(self) -> int:
        """Of the collate process."""
        return int(self._process.pid or -1)

    def _send(self, message: Any) -> None:
        # A collate process that is gone is noticed when we receive: what it said before it went comes first.
        with contextlib.suppress(ChannelClosed):
            self._channel.send(message)

    def _receive(self) -> Any:
        began = time.monotonic()
        while True:
            try:
                return self._channel.recv(_SLICE_S, place=self._pin)
            except NotInTime:
                if self._process.is_alive():
                    self._check_not_stopped(time.monotonic() - began)
                    continue
                if self._channel.poll(0):
                    continue
                self._fail(self._died())
            except ChannelClosed as broken:
                self._channel.close()  # its descriptors may be what is missing to tell the others
                self._process.join(_EXIT_S)
                by_itself = self._process.exitcode not in (None, supervise.ORPHANED)
                self._fail(self._died() if by_itself else self._broken(broken))

    def _check_not_stopped(self, waited_s: float) -> None:
        """A stopped process (SIGSTOP) says nothing and does not die; its peers give up after the time limit, so do we."""
        if waited_s > self._timeout_s and supervise.is_stopped(int(self._process.pid or 0)):
            self._fail(
                ProcessDied(
                    f"the collate process (pid {self._process.pid}) of this rank is stopped (SIGSTOP, or a debugger) and "
                    f"has not answered for {waited_s:.0f} s (timeout_s={self._timeout_s:g}): kill -CONT it, or start anew"
                )
            )

    def _died(self) -> ProcessDied:
        error = ProcessDied(
            f"the collate process (pid {self._process.pid}) of this rank died: {supervise.describe_exit(self._process)}"
        )
        publish_failure_at(self._spec, f"ProcessDied: {error}")  # it can't tell its peers any more
        return error

    def _broken(self, why: ChannelClosed) -> ChannelClosed:
        """The link ended, and not because the process at its other end died."""
        error = ChannelClosed(f"the link to the collate process (pid {self._process.pid}) of this rank broke: {why}")
        publish_failure_at(self._spec, f"ChannelClosed: {error}")
        return error

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self.close()
        raise error

    def _raise_if_dead(self) -> None:
        check_owner(self._owner_pid)
        if self._error is not None:
            raise self._error


def unpicklable_error(spec: NodeSpec, start_method: str, error: Exception) -> Exception:
    """Names the argument that kept the collate process from starting, if one did."""
    if not isinstance(error, (ConfigError, SampleError)) or start_method == "fork":
        return error
    options = spec.options
    parts = {
        "collate_fn": spec.collate_fn,
        "worker_init_fn": spec.source.worker_init_fn,
        "length_fn": options.length_fn,
        "loss_tokens_fn": options.loss_tokens_fn,
        "patches_fn": options.patches_fn,
        "filler_fn": options.filler_fn,
        "cost_fn": options.cost_fn,
        "dataset": spec.source.dataset,
    }
    for name, value in parts.items():
        try:
            pickle.dumps(value)
        except Exception as reason:  # the user's object may refuse in any way
            return ConfigError(
                f"{name}={value!r} can't be sent to another process ({type(reason).__name__}: {reason}), which start "
                f"method {start_method!r} needs: use a function or class defined at the top of a module instead of a "
                "lambda or a local function, or multiprocessing_context='fork'"
            )
    return error


class _Shut(BaseException):
    """Ends the thread that answers the other ranks. No error, and nothing that they are told."""


class InlineBackend:
    """The same node in the training process itself: no worker, no collate process, no channel."""

    def __init__(self, spec: NodeSpec) -> None:
        self._owner_pid = os.getpid()
        self._is_left = False
        self._is_shut = False
        self._generation = 0
        self._items: Iterator[Any] | None = None
        self._error: BaseException | None = None
        self._closer: threading.Thread | None = None
        self._away = contextlib.ExitStack()
        try:
            self._node = Node(spec, os.getpid(), use_signal=False, poll=self._poll)
            self._exchange = self._node.connect()
        except Exception as error:
            publish_failure_at(spec, f"{type(error).__name__}: {error}")
            raise
        self._leave()

    def _poll(self) -> None:
        if self._is_shut:
            raise _Shut

    def _leave(self) -> None:
        """From here on the training loop is at work: peers wait without limit."""
        self._away.enter_context(self._exchange.waiting_for_consumer())

    def begin(self, order: Order, base_seed: int, resume: ResumePoint | None = None) -> int:
        """Starts an epoch, once the one before is over on all ranks."""
        self._raise_if_dead()
        self.end(self._generation)
        if self._closer is not None:
            self._closer.join()
            self._closer = None
            self._raise_if_dead()
        self._generation += 1
        self._is_left = False
        with self._failing():
            self._items = self._node.begin(order, base_seed, lambda: self._is_left, resume)
        return self._generation

    def next(self, generation: int, on_counts: OnCounts) -> Delivery | None:
        """The next batch, made here and now."""
        self._raise_if_dead()
        if generation != self._generation or self._items is None or self._is_left:
            return None
        self._away.close()
        try:
            with self._failing():
                item = next(self._items, None)
                if isinstance(item, PeersClosed):
                    self._wait_for_reason()
            on_counts(self._node.counts())
            self._leave()
        except BaseException:
            if self._error is not None:
                self.close()
            raise
        if item is None:
            self._items = None
            self._node.finish()
        elif isinstance(item, PeersClosed):
            self.end(generation)
            raise peers_closed_error(item.ranks)
        return item

    def _wait_for_reason(self) -> None:
        """Raises what ended the loop of a rank that left the epoch, if it says so soon."""
        soon = time.monotonic() + REASON_S
        while time.monotonic() < soon:
            self._exchange.check()
            time.sleep(0.02)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except _Shut:
            raise
        except BaseException as error:
            self._error = error
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            if not isinstance(error, ExchangeError):
                self._exchange.publish_failure(text)
            raise

    def end(self, generation: int) -> None:
        """Leaves the epoch: a thread keeps answering the other ranks until all have left it."""
        if generation != self._generation or self._items is None or self._is_left or self._error is not None:
            return
        if os.getpid() != self._owner_pid:  # a forked child holds a copy of this object
            return
        self._is_left = True
        self._closer = threading.Thread(target=self._finish_epoch, name="odb-close", daemon=True)
        self._closer.start()

    def _finish_epoch(self) -> None:
        try:
            with self._failing():
                for _ in self._items or ():
                    pass
        except BaseException:  # kept in self._error, raised where the next batch is asked for
            return
        self._items = None
        self._node.finish()

    def close(self, failure: str = "") -> None:
        """Leaves the exchange."""
        if self._is_shut or os.getpid() != self._owner_pid:
            return
        self._is_shut = True
        if failure and self._error is None:
            self._error = RuntimeError("this loader was closed by an exception of the training loop; make a new one")
            self._exchange.publish_failure(failure)
        if self._error is not None:  # also what this rank found out about others must be read before its store goes
            self._exchange.linger(_EXIT_GRACE_S)
        if self._closer is not None:
            self._closer.join(_EXIT_GRACE_S)
        self._away.close()
        self._node.close(_EXIT_GRACE_S)
        if self._error is None:
            self._error = RuntimeError("this loader is closed; make a new one")

    def close_at_exit(self) -> None:
        """See `Backend.close_at_exit`."""
        self.close(failure_text(what_ends_the_program()))

    def _raise_if_dead(self) -> None:
        check_owner(self._owner_pid)
        if self._error is not None:
            raise self._error
