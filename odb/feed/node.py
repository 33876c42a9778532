"""One rank's planning node: its source, its exchange, its epoch jobs. The same in a collate process and inline."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from odb.config import ODBConfig
from odb.exchange.base import Exchange
from odb.exchange.gloo import GlooAddress, GlooExchange
from odb.exchange.memory import SoloExchange
from odb.feed.assemble import Assembler, deliveries
from odb.feed.chunk import Record
from odb.feed.cut import PIECE, sample_of
from odb.feed.engine import EpochJob, ResumePoint
from odb.feed.measure import Measurer
from odb.feed.messages import Counts
from odb.feed.pool import CollatePool
from odb.feed.source import Inbox, Order, Source, SourceConfig, seeded
from odb.plan.types import PlanConfig
from odb.plan.wire import digest

_SLICE_S = 0.2
_SHM = "/dev/shm"


@dataclass(frozen=True)
class NodeSpec:
    """Everything a node is made of; picklable where the user's parts are."""

    options: ODBConfig
    source: SourceConfig
    collate_fn: Callable[[list[Any]], Any]
    address: GlooAddress | None
    config_digest: int
    ready_batches: int = 4  # batches that may wait for the training loop

    @property
    def plan(self) -> PlanConfig:
        """The planning core's part of the options."""
        return self.options.plan_config()


def measurer_of(options: ODBConfig) -> Measurer:
    """How samples are measured under these options."""
    return Measurer(
        length_fn=options.length_fn,
        loss_tokens_fn=options.loss_tokens_fn,
        patches_fn=options.patches_fn,
        ignore_index=options.ignore_index,
        # In a packed row the collator masks each sample's first label, whether the model shifts or not.
        label_shift=options.label_shift or options.layout == "packed",
    )


def _place(order: Order) -> int:
    """Digest of where an epoch starts: equal on all ranks where they share one order."""
    if order.common is not None:
        return digest(repr(order.levels), order.common.tobytes())
    return digest(repr(order.levels)) if order.levels else 0


@contextlib.contextmanager
def workers_starting(num_workers: int) -> Iterator[None]:
    """Says what is short where workers can't be started because /dev/shm is full: their queues need a little of it."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC or not os.path.ismount(_SHM):
            raise
        space = os.statvfs(_SHM)
        free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        raise OSError(
            error.errno,
            f"{error.strerror}: {num_workers} workers can't be started; {_SHM} has {free} of {total} bytes free: make room "
            "there, or give the container more, for example --shm-size=8g with docker",
        ) from error


class DirectFeed:
    """Records straight from the source, where there is no worker to wait for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def take(self, poll: Callable[[], None]) -> list[Record] | None:
        """The next chunk, read in this thread."""
        poll()
        chunk = self._source.next_chunk()
        return None if chunk is None else self._source.opened(chunk)

    def grant(self, block: range, is_complete: bool) -> None:
        """More keys of a shared order."""
        self._source.grant(block, is_complete)

    def stop(self) -> None:
        """Nothing runs by itself."""

    def is_stopped(self, timeout: float) -> bool:
        """Always."""
        return True


class ThreadFeed:
    """Records drawn by a thread, so that the next window fills while this one is emitted. Bounded by one window."""

    def __init__(self, source: Source, plan: PlanConfig) -> None:
        self._source = source
        self._inbox = Inbox(plan.window, plan.max_held_tokens, plan.max_held_bytes)
        self._thread = threading.Thread(target=self._draw, name="odb-draw", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        try:
            while True:
                chunk = self._source.next_chunk()
                assert not isinstance(chunk, list)  # workers send parcels
                if not self._inbox.put(chunk):
                    return
        except BaseException as error:  # whatever it is, the round loop must learn of it
            self._inbox.fail(error)

    def take(self, poll: Callable[[], None]) -> list[Record] | None:
        """The next chunk; waits in slices."""
        while True:
            poll()
            if self._inbox.wait(_SLICE_S):  # told apart from a TimeoutError of the dataset's own
                chunk = self._inbox.take()
                return None if chunk is None else self._source.opened(chunk)

    def grant(self, block: range, is_complete: bool) -> None:
        """More keys of a shared order."""
        self._source.grant(block, is_complete)

    def stop(self) -> None:
        """Lets the thread go; it ends after the chunk that it is waiting for."""
        self._inbox.stop()
        self._source.release()

    def is_stopped(self, timeout: float) -> bool:
        """Whether the thread has ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()


class Node:
    """Runs epochs for one rank. Make it on the main thread of the process that hosts it."""

    def __init__(
        self,
        spec: NodeSpec,
        collate_pid: int,
        *,
        use_signal: bool,
        poll: Callable[[], None],
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> None:
        self.spec = spec
        self.is_awaited = is_awaited  # whether the training loop has no batch left to go on with
        self.plan = spec.plan
        self.poll = poll
        self.exchange: Exchange | None = None
        self.source = Source(spec.source, collate_pid, use_signal)
        self.assembler = Assembler(
            self.plan,
            spec.collate_fn,
            recount=spec.options.loss_tokens_fn is None and spec.options.scaling == "exact",
            ignore_index=spec.options.ignore_index,
            label_shift=spec.options.label_shift,
            filler_fn=spec.options.filler_fn,
            first_sample=self._first_sample,
        )
        self.pool = self._make_pool()
        self._probe_due = spec.options.warmup_probe
        self.job: EpochJob | None = None
        self.feed: DirectFeed | ThreadFeed | None = None

    def _make_pool(self) -> CollatePool | None:
        """The processes that share a slow `collate_fn`; none in the training process itself."""
        source, wanted = self.spec.source, self.spec.options.collate_workers
        if not source.num_workers:
            return None
        return CollatePool(
            self.assembler,
            source.num_workers if wanted == "auto" else int(wanted),
            is_auto=wanted == "auto",
            start_method=source.multiprocessing_context,
            poll=self._poll_and_check,
            is_awaited=self.is_awaited,
        )

    def _first_sample(self) -> Any:
        """What fills in for a rank that had no group yet: in a resumed epoch the sample that did before."""
        record = None
        if self.job is not None and self.job.resume is not None and self.job.resume.stand_in >= 0:
            stand_in = self.job.resume.stand_in
            record = self.job.stand_in or self.source.record_again(sample_of(stand_in))
            if record is not None and record.measure is not None:
                return self.job.fitting(record, stand_in // PIECE)
        if record is None or record.measure is None:
            record = self.source.first_record()
        return None if record is None or self.job is None else self.job.fitting(record)

    def connect(self) -> Exchange:
        """Meets the other ranks, once."""
        if self.exchange is None:
            address = self.spec.address
            self.exchange = SoloExchange() if address is None else GlooExchange.connect(address, self.poll)
        return self.exchange

    def begin(
        self, order: Order, base_seed: int, is_closed: Callable[[], bool], resume: ResumePoint | None = None
    ) -> Iterator[Any]:
        """Starts an epoch; yields its deliveries (and `PeersClosed`) in order."""
        if resume is not None or not self.spec.source.is_iterable:
            self.assembler.forget()
        if self.pool is not None:
            self.assembler.address = (self.plan.seed, order.epoch, order.rank)
            self.pool.prepare()
        with workers_starting(self.spec.source.num_workers):
            self.source.begin(order, seeded(base_seed, order.rank))
        exchange = self.connect()  # only now: the workers start meanwhile
        threaded = self.spec.source.num_workers > 0
        self.feed = ThreadFeed(self.source, self.plan) if threaded else DirectFeed(self.source)
        self.job = EpochJob(
            config=self.plan,
            epoch=order.epoch,
            feed=self.feed,
            exchange=exchange,
            config_digest=self.spec.config_digest,
            is_closed=is_closed,
            poll=self._poll_and_check,
            explain=exchange.explain_disagreement,
            on_empty=self.spec.options.on_empty,
            measure=self.spec.source.reading.measurer,
            resume=resume,
            num_keys=None if self.spec.source.is_iterable or not order.passes else order.num_keys,
            pass_length=None if order.passes else order.pass_length,
            place=_place(order),
            waiting=[range(first, end) for first, end in order.waiting] if order.is_elastic else None,
        )
        probe, self._probe_due = self._probe_due, False
        return deliveries(self.job.steps(), self.assembler, warmup_probe=probe, is_closed=is_closed, pool=self.pool)

    def _poll_and_check(self) -> None:
        """Reacts to the caller, and to a peer's failure also while this rank draws and is in no collective."""
        self.poll()
        if self.exchange is not None:
            self.exchange.check()

    def counts(self) -> Counts:
        """The running counts of the epoch."""
        job = self.job
        assert job is not None, "begin() first"
        return Counts(
            dict(job.rejected), dict(job.dropped), job.rounds, job.max_held_tokens, job.mark, cut=dict(job.cut)
        )

    def finish(self) -> None:
        """Ends the epoch's drawing; returns once the drawing thread has ended."""
        if self.feed is None:
            return
        self.feed.stop()
        while not self.feed.is_stopped(_SLICE_S):
            self.poll()
        self.source.end()

    def close(self, grace_s: float) -> bool:
        """Leaves the exchange and ends the workers. False if a worker is stuck: then only ending the process helps."""
        if self.exchange is not None:
            self.exchange.close()
        if self.pool is not None:
            self.pool.close()
        if self.feed is not None:
            self.feed.stop()
            if not self.feed.is_stopped(grace_s):
                return False
        self.source.close()
        return True
