"""A few blocks of shared memory that one process fills and another one empties, over and over.

Fresh shared memory costs more than the copy into it: the kernel clears every page, and both sides fault on each. Blocks
that are used again cost the copy alone. They lie in anonymous memory (`memfd_create`): no name in /dev/shm, no limit of
its size, gone with the last process that has it. A block has room for large contents and takes the memory of the largest
that it ever held, so contents go to the block that suits their size best: small ones must not lie in what large ones have
left, or each block would become large in the end.

Only the writer turns a block's flag on, only the reader turns it off; which block holds what is told by other means. The
reader need not copy: `take` lends it the block itself, which is free again when the last array or tensor over it is gone.
Where the reader forks meanwhile, its child sees the block as well: then the child, too, must have gone.

A ring gives memory back when its free blocks hold much more than the others.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import context, reduction
from typing import Any

import numpy as np

from odb.feed.body import Bytes

_PAGE = 4096
#: Smaller contents are copied: that is cheaper than keeping track of a block.
_LEND_FROM = 64 * 1024
#: Free blocks keep so many bytes beyond as much as the others hold.
_SPARE_BYTES = 128 << 20
#: A ring takes this part of the address space that the process may have (`ulimit -v`), no more.
_SHARE_OF_SPACE = 1 / 32


class Ring:
    """`num_blocks` blocks of `capacity` bytes. Memory is taken as it is written to, never before.

    Args:
        num_lent: so many of them `take` may lend at a time; the writer goes on with the others.

    Raises:
        OSError: there is no anonymous memory here.
    """

    def __init__(self, num_blocks: int, capacity: int, num_lent: int = 0, fd: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_lent = num_lent
        self._lent: dict[int, int] = {}  # reader: bytes by block
        self._seen_by: list[tuple[int, set[int]]] = []  # per fork: a pipe that ends with the child, blocks that it sees
        self._returned: set[int] = set()  # loans that ended here while a child sees them
        self._is_given_up = False
        self.capacity = -(-capacity // _PAGE) * _PAGE
        start = -(-(num_blocks + 1 + 8 * num_blocks + 8) // _PAGE) * _PAGE
        size = start + num_blocks * self.capacity
        self._start = start
        self._fd = _anonymous(size) if fd is None else fd
        self._map = mmap.mmap(self._fd, size)
        self._header = np.frombuffer(self._map, np.uint8, num_blocks + 1)
        self._in_use = self._header[:num_blocks]
        self._taken = np.frombuffer(self._map, np.int64, num_blocks, -(-(num_blocks + 1) // 8) * 8)  # memory, in bytes
        self._blocks = [
            np.frombuffer(self._map, np.uint8, self.capacity, start + k * self.capacity) for k in range(num_blocks)
        ]

    def claim(self, num_bytes: int) -> int | None:
        """Writer: a block that is free, for so many bytes; None if there is none."""
        free = np.flatnonzero(self._in_use == 0)
        if not len(free):
            return None
        taken = self._taken[free]
        enough = taken >= num_bytes
        number = int(free[taken.argmax() if not enough.any() else np.where(enough, taken, self.capacity + 1).argmin()])
        _order_memory()
        self._in_use[number] = 1
        self._taken[number] = max(self._taken[number], num_bytes)
        if self._taken.sum() > _SPARE_BYTES:
            self._trim(free[free != number])
        return number

    def _trim(self, free: np.ndarray[Any, Any]) -> None:
        """Writer: gives back what free blocks hold beyond as much as the others hold, and some; the largest first."""
        surplus = 2 * self._taken[free].sum() - self._taken.sum() - _SPARE_BYTES
        for number in free[np.argsort(-self._taken[free])].tolist():
            if surplus <= 0 or not self._remove_memory(number):
                return
            surplus -= self._taken[number]
            self._taken[number] = 0

    def _remove_memory(self, number: int, keep: int = 0) -> bool:
        """Gives a block's memory back but for the first bytes; False where the system can't."""
        start = -(-keep // _PAGE) * _PAGE
        if start >= self.capacity:
            return True
        with suppress(OSError, ValueError, AttributeError):
            self._map.madvise(mmap.MADV_REMOVE, self._start + number * self.capacity + start, self.capacity - start)
            return True
        return False

    def is_free(self, number: int) -> bool:
        """Writer: whether the reader is done with a block."""
        return not self._in_use[number]

    @property
    def fd(self) -> int:
        """This process's descriptor of the memory."""
        return self._fd

    @property
    def may_lend(self) -> bool:
        """Whether the reader has said that it can open the writer's descriptors."""
        return bool(self._header[self.num_blocks])

    @may_lend.setter
    def may_lend(self, value: bool) -> None:
        self._header[self.num_blocks] = value

    def block(self, number: int, num_bytes: int) -> Bytes:
        """The first bytes of a block, shape (num_bytes,)."""
        return self._blocks[number][:num_bytes]

    def release(self, number: int) -> None:
        """Reader: the block may be filled again. Writer: it will not be sent after all."""
        _order_memory()
        self._in_use[number] = 0

    def take(self, number: int, num_bytes: int) -> Bytes:
        """Reader: the contents of a block, for good: a copy, or the block itself, which is then released by and by."""
        if self._seen_by:
            self._settle()
        if num_bytes >= _LEND_FROM and len(self._lent) < self.num_lent:
            self._lent[number] = num_bytes
            lent: Bytes = np.asarray(_Loan(self, number, self.block(number, num_bytes)))
            return lent
        copied: Bytes = self.block(number, num_bytes).copy()
        self.release(number)
        return copied

    def return_loan(self, number: int) -> None:
        """Nothing refers to a block any more that `take` has lent. Runs in any thread, and inside a collection."""
        if self._seen_by:
            self._returned.add(number)
            return
        self._lent.pop(number, None)
        if self._is_given_up:
            self._remove_memory(number)
        self.release(number)

    def before_fork(self) -> int:
        """Reader: a child is about to see what is lent. Returns a descriptor that the child must keep open; -1: none."""
        if not self._lent:
            return -1
        try:
            ends, kept = os.pipe()
        except OSError:  # no descriptor left: nobody will know when the child has gone
            ends = kept = -1
        self._seen_by.append((ends, set(self._lent)))
        return kept

    def _settle(self) -> None:
        """Ends the loans that ended here and that no child sees any more."""
        for entry in list(self._seen_by):
            if entry[0] >= 0 and _has_ended(entry[0]):
                self._seen_by.remove(entry)
                os.close(entry[0])
        seen = set[int]().union(*(blocks for _, blocks in self._seen_by))
        for number in list(self._returned):
            if number not in seen:
                self._returned.discard(number)
                self._lent.pop(number, None)
                self.release(number)

    def forget_loans(self) -> None:
        """In a forked child: they are its parent's."""
        while self._seen_by:
            ends = self._seen_by.pop()[0]
            if ends >= 0:
                os.close(ends)
        self._lent.clear()
        self._returned.clear()

    def give_up(self) -> None:
        """Reader: nothing more will be taken. Only what is lent keeps its memory."""
        self._is_given_up = True
        for number in range(self.num_blocks):
            self._remove_memory(number, self._lent.get(number, 0))

    def reset(self) -> None:
        """Reader: all blocks but those that are lent are free. Only while nobody writes."""
        for number in range(self.num_blocks):
            self._in_use[number] = number in self._lent
        self.may_lend = False

    def __reduce__(self) -> Any:
        context.assert_spawning(self)
        return _rebuilt, (self.num_blocks, self.capacity, self.num_lent, reduction.DupFd(self._fd))

    def __del__(self, _close: Callable[[int], None] = os.close, _suppress: Any = suppress) -> None:
        # Defaults, since a module's own names may be gone when the interpreter ends.
        if hasattr(self, "_fd"):
            for fd in (self._fd, *(ends for ends, _ in self._seen_by if ends >= 0)):
                with _suppress(OSError):
                    _close(fd)


class _Loan:
    """Owner of the memory of a block that was lent: NumPy keeps it alive as long as any array or tensor over the block."""

    def __init__(self, ring: Ring, number: int, memory: Bytes) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._ring = ring  # keeps the mapping
        self._number = number
        self._pid = os.getpid()

    def __del__(self, _getpid: Callable[[], int] = os.getpid) -> None:
        if self._pid == _getpid():  # a forked process has a copy of this object; the block is its parent's
            self._ring.return_loan(self._number)


def _has_ended(pipe: int) -> bool:
    """Whether all processes that hold a pipe's writing end have gone."""
    poller = select.poll()
    poller.register(pipe, 0)
    return bool(poller.poll(0))


def _order_memory() -> None:
    # What was read before must have been read when the other side sees the flag, also where processors reorder: no load
    # passes a release, no store passes an acquisition. Locks of its own, since this also runs inside a collection.
    for _ in range(2):
        with threading.Lock():
            pass


def _anonymous(size: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    fd = os.memfd_create("odb-ring", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _rebuilt(num_blocks: int, capacity: int, num_lent: int, descriptor: Any) -> Ring:
    return Ring(num_blocks, capacity, num_lent, descriptor.detach())


def make_ring(num_blocks: int, capacity: int, num_lent: int) -> Ring | None:
    """A ring, or None where the system has none: then messages go their own way each.

    A limit on address space or on the size of files may allow smaller blocks only.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    for size in (capacity, capacity // 16, capacity // 256):
        if limit != resource.RLIM_INFINITY and num_blocks * size > limit * _SHARE_OF_SPACE:
            continue
        with suppress(OSError, ValueError):
            return Ring(num_blocks, size, num_lent)
    return None
