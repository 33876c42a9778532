"""The collate process: its body, from the first line it runs to the last.

It serves one loader: connects to the other ranks, hosts the inner `DataLoader`, and runs one epoch after another as
its training process asks for them (see `odb.feed.messages`). It ends when told to, when its training process is gone,
or when something fails, and takes its workers with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from typing import Any

import torch

from odb.errors import ChannelClosed, ExchangeError
from odb.exchange.base import Exchange
from odb.exchange.gloo import report_failure
from odb.feed import supervise
from odb.feed.channel import Channel, close_inherited
from odb.feed.engine import PeersClosed
from odb.feed.messages import Begin, Counts, Delivered, End, Failed, Finished, PeersLeft, Shutdown, Taken, pickled
from odb.feed.node import Node, NodeSpec

_SLICE_S = 0.2
_LONG_SLICE_S = 0.5  # between epochs
_LINGER_S = 3.0
#: How long a training process that broke its link may take to say why.
_REASON_OF_OWN_S = 1.5
#: How long a rank that left an epoch may take to say that it failed, before the others are told that it just left.
REASON_S = 1.0
_GRACE_S = 2.0
#: A window holds tens of thousands of objects, none of them in a cycle: looked through less often than by default.
_GC_THRESHOLDS = (20_000, 20, 20)


class _Stop(BaseException):
    """The training process wants this one to end, or is gone. No error: it passes through everything."""

    def __init__(self, failure: str = "") -> None:
        super().__init__(failure)
        self.failure = failure  # of the training loop, for the other ranks


def run(spec: NodeSpec, channel: Channel, parent_pid: int, use_signal: bool) -> None:
    """Body of the collate process. Never returns by an exception."""
    supervise.guard_against_orphaning(parent_pid, use_signal=use_signal)
    supervise.ignore_interrupts()
    close_inherited(keep=(channel,))
    torch.set_num_threads(1)
    gc.freeze()  # what was imported or inherited is not looked through again and again
    gc.set_threshold(*_GC_THRESHOLDS)
    server = _Server(spec, channel, parent_pid)
    code = 0
    try:
        server.serve(use_signal)
    except _Stop as stop:
        server.pass_on(stop.failure)
    except ChannelClosed as error:  # nobody said goodbye
        code = supervise.ORPHANED
        time.sleep(_REASON_OF_OWN_S)  # a training process that lives says itself what went wrong: that comes first
        server.pass_on(f"the training process of this rank is gone, or broke its link without a word: {error}")
    except BaseException as error:  # whatever it is, all ranks must learn of it
        code = 1
        server.report(error)
    if not server.close():
        os._exit(code)  # a worker is stuck in the user's code; it is tied to this process and goes with it
    if code:
        raise SystemExit(code)


class _Server:
    def __init__(self, spec: NodeSpec, channel: Channel, parent_pid: int) -> None:
        self.spec = spec
        self.channel = channel
        self.parent_pid = parent_pid
        self.node: Node | None = None
        self.credits = 0
        self.current: Begin | None = None
        self.pending: Begin | None = None
        self.is_left = False
        self._last_counts: Counts | None = None

    def serve(self, use_signal: bool) -> None:
        """Epoch after epoch, until told to stop."""
        self.node = Node(
            self.spec, os.getpid(), use_signal=use_signal, poll=self.poll, is_awaited=lambda: self.has_all_credits
        )
        while True:
            while self.pending is None:
                with self.being_busy():
                    if self.channel.poll(_LONG_SLICE_S):
                        self.handle(self.channel.recv(_SLICE_S))
            self.run_epoch()

    @property
    def has_all_credits(self) -> bool:
        """Whether the training process has taken every batch that was sent."""
        return self.credits >= self.spec.ready_batches

    @property
    def exchange(self) -> Exchange | None:
        """The exchange, once there is one."""
        return self.node.exchange if self.node is not None else None

    def poll(self) -> None:
        """Reads what the training process has said meanwhile. Cheap; called in every slice of every wait."""
        if self.node is not None:
            self.node.source.children.check()
        while self.channel.poll(0):
            self.handle(self.channel.recv(_SLICE_S))

    def handle(self, message: Any) -> None:
        """Notes one message."""
        generation = self.current.generation if self.current is not None else -1
        if isinstance(message, Taken):
            self.credits += message.generation == generation
        elif isinstance(message, End):
            self.is_left = self.is_left or message.generation == generation
        elif isinstance(message, Begin):
            self.pending = message
            self.is_left = True
        elif isinstance(message, Shutdown):
            raise _Stop(message.failure)
        else:
            raise AssertionError(f"unexpected message {type(message).__name__}")

    def run_epoch(self) -> None:
        """One epoch, until it is over on all ranks."""
        assert self.node is not None and self.pending is not None
        begin, self.pending = self.pending, None
        self.current, self.is_left, self.credits = begin, False, self.spec.ready_batches
        self._last_counts = None
        for item in self.node.begin(begin.order, begin.base_seed, lambda: self.is_left, begin.resume):
            if isinstance(item, PeersClosed):
                # A rank whose loop fails leaves the epoch first, and says why a moment later, when its program ends.
                soon = time.monotonic() + REASON_S
                self.wait_until(lambda soon=soon: self.is_left or time.monotonic() > soon)
                self.channel.send(PeersLeft(begin.generation, item.ranks))
                self.wait_until(lambda: self.is_left)
            elif self.wait_until(lambda: self.credits > 0 or self.is_left) and not self.is_left:
                self.credits -= 1
                self.channel.send(Delivered(begin.generation, item, self.new_counts()))
        self.channel.send(Finished(begin.generation, self.node.counts()))
        self.node.finish()

    def wait_until(self, condition: Any) -> bool:
        """Waits for the training loop, as long as that takes; peers are told, and a peer's failure ends the wait."""
        self.poll()
        if condition():
            return True
        assert self.exchange is not None
        while not condition():
            with self.being_busy():
                if not self.channel.poll(_SLICE_S):
                    self.exchange.check()
                self.poll()
        return True

    def being_busy(self) -> contextlib.AbstractContextManager[None]:
        """Peers wait on while the training loop is at work, or in a debugger; not for one that was stopped (SIGSTOP)."""
        if self.exchange is None or supervise.is_stopped(self.parent_pid):
            return contextlib.nullcontext()
        return self.exchange.waiting_for_consumer()

    def new_counts(self) -> Counts | None:
        """The epoch's running counts where they changed since the last batch."""
        assert self.node is not None
        counts = self.node.counts()
        if counts == self._last_counts:
            return None
        self._last_counts = counts
        return counts

    def report(self, error: BaseException) -> None:
        """Tells the other ranks and the training process what happened. Never raises."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        is_own = not isinstance(error, ExchangeError)
        if self.exchange is not None and is_own:
            self.exchange.publish_failure(text)
        elif self.spec.address is not None and is_own:
            publish_failure_at(self.spec, text)
        with contextlib.suppress(Exception):
            self.channel.send(Failed(pickled(error), text))
        if self.exchange is not None:  # what this rank found out about others, too, must be read before its store goes
            self.exchange.linger(_LINGER_S)

    def pass_on(self, failure: str) -> None:
        """Tells the other ranks what ended the training loop, if it failed. Never raises."""
        if failure and self.exchange is not None:
            self.exchange.publish_failure(failure)
            self.exchange.linger(_LINGER_S)
        elif failure:
            publish_failure_at(self.spec, failure)

    def close(self) -> bool:
        """Lets everything go; False if that takes too long."""
        if self.node is None:
            return True
        with contextlib.suppress(Exception):
            return self.node.close(_GRACE_S)
        return False


def publish_failure_at(spec: NodeSpec, text: str) -> None:
    """Tells the other ranks of a failure where this rank's exchange could not be made. Never raises."""
    if spec.address is not None:
        report_failure(spec.address, text)
