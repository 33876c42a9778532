"""How chunks get from the inner workers to the collate process.

The worker's queue carries a few numbers; the chunk itself lies in a block of the worker's `Ring`. It is read there: the
block is free again when the last sample of it is gone. A chunk that is too large for a block gets anonymous memory of its
own, which the collate process maps by way of /proc. Either way samples move without being copied. Where neither is
possible, the queue carries the bytes.

So that the worker never runs out of blocks, no more than `NUM_LENT` are held; further chunks are copied on arrival. What
arrives and is thrown away unopened (of an epoch that was left) frees its block too.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from odb.feed.body import Body, Bytes
from odb.feed.channel import map_memory, memory_with
from odb.feed.chunk import Record, pack, unpack
from odb.feed.ring import Ring, make_ring

#: Bytes of a block, of which only what was written to is there; larger chunks go their own way.
BLOCK_BYTES = 64 << 20
#: Blocks per worker that may hold samples of the window.
NUM_LENT = 64

_tokens = itertools.count()
_post_offices: weakref.WeakValueDictionary[int, PostOffice] = weakref.WeakValueDictionary()


class PostOffice:
    """The collate process's end for all workers of one inner loader. Make it before the workers.

    Args:
        num_workers: of the inner loader.
        num_blocks: per worker, to be filled; as many as it may have tasks under way, and some.
    """

    def __init__(self, num_workers: int, num_blocks: int) -> None:
        self.rings = [make_ring(num_blocks + NUM_LENT, BLOCK_BYTES, NUM_LENT) for _ in range(num_workers)]
        self.generation = 0
        self._token = next(_tokens)
        _post_offices[self._token] = self

    @property
    def packer(self) -> Packer:
        """The inner loader's `collate_fn`."""
        return Packer(self._token, self.rings)

    def reset(self) -> None:
        """New workers begin: what older ones left unopened is forgotten, and frees no block any more."""
        self.generation += 1
        for ring in self.rings:
            if ring is not None:
                ring.reset()


class Parcel:
    """A chunk that has arrived. Its worker may end before it is opened.

    Attributes:
        size: samples in it, and their tokens and bytes.
    """

    _fd = -1

    def __init__(self, layout: tuple[int, int], place: Place, size: tuple[int, int, int], data: bytes = b"") -> None:
        self.size = size
        self._layout = layout  # bytes of the stream, number of buffers
        self._memory: Bytes | None = None
        self._place = place
        self._data = data
        self._office = _post_offices.get(place.token)
        self._generation = self._office.generation if self._office is not None else 0
        self._holds_block = place.block >= 0
        if place.block >= 0 and place.fd >= 0:
            self._fd = _opened(place)

    def fetch(self) -> None:
        """Takes over the worker's block, or copies it (see `Ring.take`). Does little else."""
        if self._memory is None:
            self._memory = self._fetched()

    def open(self) -> list[Record]:
        """The records. Once."""
        self.fetch()
        assert self._memory is not None
        return unpack(self._memory.data, *self._layout)

    def _fetched(self) -> Bytes:
        place, ring = self._place, self._ring
        if place.block < 0:
            self._try_lending()
            return np.frombuffer(bytearray(self._data), np.uint8)
        if place.fd >= 0:
            memory = map_memory(self._fd, place.num_bytes)
            self._release()
        else:
            assert ring is not None
            self._holds_block = False  # it is the memory's from now on
            memory = ring.take(place.block, place.num_bytes)
        return memory

    @property
    def _ring(self) -> Ring | None:
        return self._office.rings[self._place.worker] if self._office is not None else None

    def _try_lending(self) -> None:
        """Finds out whether this process may open the worker's descriptors."""
        if self._ring is not None and self._place.fd >= 0:
            try:
                os.close(_opened(self._place))
            except OSError:
                return
            self._ring.may_lend = True

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        office, ring = self._office, self._ring
        if self._holds_block and office is not None and ring is not None and office.generation == self._generation:
            ring.release(self._place.block)
        self._holds_block = False

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_holds_block") and not _is_ending():
            self._release()


def _opened(place: Place) -> int:
    return os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)


class Place:
    """Where a chunk lies: the worker, the number of its block (-1: nowhere), a descriptor of its own (-1: in the block)."""

    __slots__ = ("block", "fd", "num_bytes", "pid", "token", "worker")

    def __init__(self, token: int, worker: int, num_bytes: int, block: int = -1, pid: int = 0, fd: int = -1) -> None:
        self.token, self.worker, self.num_bytes = token, worker, num_bytes
        self.block, self.pid, self.fd = block, pid, fd

    def __reduce__(self) -> Any:
        return Place, (self.token, self.worker, self.num_bytes, self.block, self.pid, self.fd)


class Sent:
    """A chunk on its way. Becomes a `Parcel` where it is unpickled."""

    def __init__(self, layout: tuple[int, int], place: Place, size: tuple[int, int, int], data: bytes = b"") -> None:
        self._fields = (layout, place, size, data)

    def __reduce__(self) -> Any:
        return Parcel, self._fields


def size_of(records: list[Record]) -> tuple[int, int, int]:
    """Samples, tokens and bytes of some records; what was rejected has none."""
    measures = [record.measure for record in records if record.measure is not None]
    return len(records), sum(m.length for m in measures), sum(m.num_bytes for m in measures)


class Packer:
    """`collate_fn` of the inner loader: packs a chunk of records and leaves it where the collate process finds it."""

    def __init__(self, token: int, rings: list[Ring | None]) -> None:
        self._token = token
        self._rings = rings
        self._lent: dict[int, int] = {}  # block -> descriptor of the memory that was lent under its flag

    def __call__(self, records: list[Record]) -> Sent:
        """One chunk."""
        body = pack(records)
        info = get_worker_info()
        worker = info.id if info is not None else 0
        ring = self._rings[worker]
        layout, num_bytes = (len(body.head), len(body.sizes)), body.num_bytes
        place = self._placed(body, ring, Place(self._token, worker, num_bytes)) if ring is not None else None
        size = size_of(records)
        if place is not None:
            return Sent(layout, place, size)
        fd = ring.fd if ring is not None and num_bytes > ring.capacity else -1
        place = Place(self._token, worker, num_bytes, -1, os.getpid(), fd)
        return Sent(layout, place, size, b"".join(body.pieces()))

    def _placed(self, body: Body, ring: Ring, place: Place) -> Place | None:
        self._take_back(ring)
        is_large = place.num_bytes > ring.capacity
        block = ring.claim(0 if is_large else place.num_bytes) if not is_large or ring.may_lend else None
        if block is None:
            return None
        try:
            if is_large:
                fd = memory_with(body)
                if fd is None:
                    ring.release(block)
                    return None
                self._lent[block] = place.fd = fd
                place.pid = os.getpid()
            else:
                body.write_into(ring.block(block, place.num_bytes))
        except BaseException:
            ring.release(block)
            raise
        place.block = block
        return place

    def _take_back(self, ring: Ring) -> None:
        for block in [block for block in self._lent if ring.is_free(block)]:
            os.close(self._lent.pop(block))
