"""A few blocks of shared memory that one process fills and another one empties, over and over.

Fresh shared memory costs more than the copy into it: the kernel clears every page, and both sides fault on each. Blocks
that are used again cost the copy alone. They lie in anonymous memory (`memfd_create`): no name in /dev/shm, no limit of
its size, gone with the last process that has it.

Only the writer turns a block's flag on, only the reader turns it off; which block holds what is told by other means.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import context, reduction
from typing import Any

import numpy as np

from odb.feed.body import Bytes

_PAGE = 4096


class Ring:
    """`num_blocks` blocks of `capacity` bytes. Memory is taken as it is written to, never before.

    Raises:
        OSError: there is no anonymous memory here.
    """

    def __init__(self, num_blocks: int, capacity: int, fd: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.capacity = -(-capacity // _PAGE) * _PAGE
        size = _PAGE + num_blocks * self.capacity
        self._fd = _anonymous(size) if fd is None else fd
        self._map = mmap.mmap(self._fd, size)
        self._header = np.frombuffer(self._map, np.uint8, num_blocks + 1)
        self._in_use = self._header[:num_blocks]
        self._blocks = [
            np.frombuffer(self._map, np.uint8, self.capacity, _PAGE + k * self.capacity) for k in range(num_blocks)
        ]
        self._next = 0
        self._fence = threading.Lock()

    def claim(self) -> int | None:
        """Writer: a block that is free, None if there is none."""
        for k in range(self._next, self._next + self.num_blocks):
            number = k % self.num_blocks
            if not self._in_use[number]:
                self._order_memory()
                self._in_use[number] = 1
                self._next = number + 1
                return number
        return None

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
        self._order_memory()
        self._in_use[number] = 0

    def reset(self) -> None:
        """All blocks are free. Only while nobody writes."""
        self._header[:] = 0

    def _order_memory(self) -> None:
        # What was read before must have been read when the other side sees the flag, also where processors reorder:
        # no load passes a release, no store passes an acquisition.
        with self._fence:
            pass
        with self._fence:
            pass

    def __reduce__(self) -> Any:
        context.assert_spawning(self)
        return _rebuilt, (self.num_blocks, self.capacity, reduction.DupFd(self._fd))

    def __del__(self, _close: Callable[[int], None] = os.close, _suppress: Any = suppress) -> None:
        # Defaults, since a module's own names may be gone when the interpreter ends.
        if hasattr(self, "_fd"):
            with _suppress(OSError):
                _close(self._fd)


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


def _rebuilt(num_blocks: int, capacity: int, descriptor: Any) -> Ring:
    return Ring(num_blocks, capacity, descriptor.detach())


def make_ring(num_blocks: int, capacity: int) -> Ring | None:
    """A ring, or None where the system has none: then messages go their own way each."""
    try:
        return Ring(num_blocks, capacity)
    except (OSError, ValueError):
        return None
