"""Collation in several processes, for a `collate_fn` that takes long (stacking images, a processor).

Steps go round among the processes and come back in their order, so that batches are those of a single process: random
numbers that a `collate_fn` draws depend on the step alone (see `Assembler.batch`). A process that raises passes its
exception on with its traceback; one that dies is named. All of them end with the collate process, however that ends.

With `collate_workers="auto"` the pool starts once collation has proved slow here while the training loop was waiting for
it, and is used when its processes are ready; until then this process goes on by itself.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from odb.errors import ChannelClosed, ProcessDied
from odb.feed import supervise
from odb.feed.assemble import Assembler
from odb.feed.channel import Channel, NotInTime, channel_pair, close_inherited
from odb.feed.messages import Failed, pickled, rebuilt
from odb.plan.types import StepPlan

logger = logging.getLogger("odb")

#: Under "auto": seconds per batch from which collation is shared out, and batches that are timed, at least and at most.
SLOW_S = 0.010
NUM_TIMED = (4, 8)
_SLICE_S = 0.2
_GRACE_S = 1.0
_READY = "ready"


@dataclass(frozen=True, slots=True)
class _Task:
    number: int
    samples: list[Any]
    plan: StepPlan
    address: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class _Done:
    number: int
    batch: Any


@dataclass(frozen=True, slots=True)
class _Raised:
    number: int
    failure: Failed


def run(assembler: Assembler, channel: Channel, parent_pid: int, use_signal: bool) -> None:
    """Body of a process of the pool."""
    supervise.guard_against_orphaning(parent_pid, use_signal=use_signal)
    supervise.ignore_interrupts()
    close_inherited(keep=(channel,))
    torch.set_num_threads(1)
    with suppress(ChannelClosed):  # the collate process has let this one go
        channel.send(_READY)
        while True:
            task = channel.recv(None)
            answer = _answer(assembler, task)
            try:
                channel.send(answer)
            except ChannelClosed:
                raise
            except Exception as error:  # the batch can't be pickled, or there is no memory to hand it over
                channel.send(_raised(task.number, error))
    os._exit(0)  # nothing inherited from the collate process is to run at this one's exit


def _answer(assembler: Assembler, task: _Task) -> _Done | _Raised:
    assembler.address = task.address
    try:
        return _Done(task.number, assembler.batch(task.samples, task.plan))
    except Exception as error:
        return _raised(task.number, error)


def _raised(number: int, error: Exception) -> _Raised:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return _Raised(number, Failed(pickled(error), text))


class CollatePool:
    """The processes, seen from the collate process. Not thread-safe; use it on the main thread.

    Args:
        size: processes; 0: never any.
        is_auto: start them only when collation has proved slow.
        start_method: as for the inner loader's workers.
        poll: called while waiting; may raise.
        is_awaited: whether the training loop has nothing left to go on with.
    """

    def __init__(
        self,
        assembler: Assembler,
        size: int,
        *,
        is_auto: bool,
        start_method: str | None,
        poll: Callable[[], None],
        is_awaited: Callable[[], bool],
    ) -> None:
        self.size = size
        self.depth = size + 1  # steps under way: one in each process, one that waits
        self._assembler = assembler
        self._is_auto = is_auto
        self._start_method = start_method
        self._poll = poll
        self._is_awaited = is_awaited
        self._members: list[tuple[Any, Channel]] = []
        self._is_ready = False
        self._timed: deque[float] = deque(maxlen=NUM_TIMED[1])
        self._num_submitted = self._num_taken = 0

    def prepare(self) -> None:
        """An epoch begins: starts the processes where they are wanted without being asked for."""
        self._num_taken = self._num_submitted  # what an epoch that was left has not taken is thrown away
        if self.size and not self._is_auto and not self._members:
            self._start()

    @property
    def is_running(self) -> bool:
        """Whether all processes are ready for work. Those that were asked for are waited for."""
        if not self._members or self._is_ready:
            return self._is_ready
        while not all(channel.poll(0) for _, channel in self._members):
            if self._is_auto:
                self._check_members()
                return False
            self._wait()
        for member in range(self.size):
            message = self._receive(member)
            assert message == _READY, message
        self._is_ready = True
        return True

    def note(self, seconds: float) -> None:
        """How long a batch took in this process; may start the pool.

        Only batches that the training loop waited for count: where its steps take longer, one process is enough. Three of
        four have to be slow: on a machine with much else to do any batch may take long, but few do.
        """
        if not self.size or self._members:
            return
        self._poll()
        if not self._is_awaited():
            return
        self._timed.append(seconds)
        num = len(self._timed)
        typical = sorted(self._timed)[num // 4]
        if num >= NUM_TIMED[0] and typical >= SLOW_S:
            logger.info(
                "collate_fn takes %.0f ms a batch: %d processes share it (collate_workers)", 1e3 * typical, self.size
            )
            self._start()

    def submit(self, samples: list[Any], plan: StepPlan) -> None:
        """Has a step's batch made by the next process in turn."""
        number = self._num_submitted
        self._num_submitted += 1
        member = number % self.size
        with suppress(ChannelClosed):  # why is found out, and raised, where the result is asked for
            self._members[member][1].send(_Task(number, samples, plan, self._assembler.address))

    def result(self, plan: StepPlan) -> Any:
        """The batch of the step that was submitted first of those that are under way.

        Raises:
            ProcessDied: its process is gone.
            Exception: what `collate_fn` raised.
        """
        number = self._num_taken
        self._num_taken += 1
        while True:
            message = self._receive(number % self.size)
            if message.number != number:
                assert message.number < number
                continue  # of an epoch that was left
            if isinstance(message, _Raised):
                raise rebuilt(message.failure, f"process {number % self.size} that collates (step {plan.step})")
            return message.batch

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        members, self._members, self._is_ready = self._members, [], False
        for _, channel in members:
            channel.close()
        deadline = time.monotonic() + _GRACE_S
        for process, _ in members:
            supervise.stop(process, max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        use_signal = supervise.can_use_signal(self._start_method)
        for number in range(self.size):
            ours, theirs = channel_pair(num_blocks=3, num_blocks_out=3)
            args = (self._assembler.alone(), theirs, os.getpid(), use_signal)
            process = supervise.start(self._start_method, run, args, f"odb-collate-{number}")
            self._members.append((process, ours))

    def _receive(self, member: int) -> Any:
        process, channel = self._members[member]
        while True:
            try:
                return channel.recv(_SLICE_S)
            except NotInTime:
                self._poll()
            except ChannelClosed:
                process.join(_GRACE_S)
                raise self._died(process) from None

    def _wait(self) -> None:
        self._poll()
        self._check_members()
        time.sleep(0.01)

    def _check_members(self) -> None:
        for process, _ in self._members:
            if process.exitcode is not None:
                raise self._died(process)

    @staticmethod
    def _died(process: Any) -> ProcessDied:
        return ProcessDied(
            f"process {process.name} (pid {process.pid}), which runs collate_fn, died: "
            f"{supervise.describe_exit(process)}"
        )
