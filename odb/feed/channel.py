"""A two-way link between two processes of one machine that carries whole objects.

A message is a header of `_HEADER.size` bytes on a socket pair, followed by its body if that is small. A larger body is
written into a block of the link's `Ring` and read there, or, where it is larger than a block or none is free, into
anonymous memory (`memfd_create`) whose descriptor goes along with the header. So messages in flight cost the
socket a few bytes each, a send practically never waits for the receiver, and nothing has a name in /dev/shm, whose size
limit doesn't apply either. The receiver closes the descriptor before `recv` returns: a batch that is kept costs memory
only. Where there is no `memfd_create`, every body goes through the socket.

Body: sizes of the buffers (int64), pickle stream, buffers, each of these at a multiple of 64 bytes. See `odb.feed.handoff` for
what may be sent and how it arrives.

What holds after an interruption (Ctrl-C, or any exception out of a signal handler): while the channel only waits, nothing is
lost and it can be used on; if it strikes between the first and the last byte of a message, the channel closes, because no
later message could be told from the rest of that one. If it strikes after the last byte, that message has gone, sent or
received, and the channel can be used on. A timeout never strikes amid a message.

Ends and processes: both ends are made in the parent. The child's end is handed over with `odb.feed.supervise.start`, or by
hand inside `handing_over`, after which the parent calls `release` on its copy. A forked child closes its copies of all
other ends by itself, so that the end of a process always shows at the other side.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context
from typing import Any

import numpy as np
import torch

from odb.errors import ChannelClosed
from odb.feed import handoff
from odb.feed.body import Body, Bytes, split
from odb.feed.ring import Ring, make_ring

#: Magic; where the body is (a block's number, or one of the two below); bytes of the body, of its stream; buffers.
_HEADER = struct.Struct("<4siqqq")
_IN_SOCKET, _IN_MEMORY = -1, -2
_MAGIC = b"odb1"
_MAX_VECTORS = 512  # buffers per writev; the least that systems allow today is 1024
_HAS_MEMFD = hasattr(os, "memfd_create") and hasattr(socket, "send_fds")

#: Bodies up to this many bytes go through the socket.
INLINE_LIMIT = 16 * 1024 if _HAS_MEMFD else sys.maxsize
#: Bodies from this many bytes on are mapped, smaller ones are copied into fresh memory. Copying reuses memory that is mapped
#: already, which wins for small bodies; from about a megabyte on, page faults and the copy itself cost more than a mapping.
MAP_FROM = 1024 * 1024
#: Larger bodies get memory of their own.
BLOCK_BYTES = 64 * 1024 * 1024
#: Received messages that may keep their block; further ones are copied.
NUM_LENT = 6
_RETRY_S = 0.005  # after a refusal that nothing tells the end of
_SLICE_S = 0.5  # a wait looks this often whether another thread closed the channel


class NotInTime(TimeoutError):
    """A channel's own time limit is over; apart from a `TimeoutError` that a signal handler raises meanwhile."""


class Channel:
    """One end of a link. Safe to use from several threads; messages of one thread keep their order."""

    def __init__(
        self,
        sock: socket.socket,
        inline_limit: int = INLINE_LIMIT,
        map_from: int = MAP_FROM,
        rings: tuple[Ring | None, Ring | None] = (None, None),
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._limits = (inline_limit, map_from)
        self._rings = rings  # of what this end sends, of what it receives
        # Reentrant, because an interruption may strike between taking a lock and being ready to give it back.
        self._sending = threading.RLock()
        self._receiving = threading.RLock()
        self._closed = ""  # why, once it is
        self._amid_message = [False, False]  # sending, receiving: True while the stream's position is in doubt
        self._forget_incoming()
        _live_ends.add(self)

    def send(self, obj: Any, timeout: float | None = None) -> None:
        """Sends an object.

        Args:
            obj: see `odb.feed.handoff`.
            timeout: seconds to wait for room, None for no limit. A message that has begun is completed however long
                that takes; only bodies in the socket can be in that position.

        Raises:
            SampleError: the object can't be pickled; the channel can be used on.
            NotInTime: no room in time; nothing was sent.
            ChannelClosed: the other end is gone, or this one was closed.
        """
        packed = handoff.dumps(obj, "message")
        deadline = _deadline(timeout)
        with _held(self._sending, deadline, "send"):
            self._close_if_amid(0)  # the one that was interrupted may not have come to that
            self._check_open()
            data, fd, block = self._encode(packed)
            try:
                self._send_all(memoryview(data), [] if fd is None else [fd], deadline)
            except NotInTime:  # nothing went; after anything else the other end might read the block yet
                if block is not None and self._rings[0] is not None:
                    self._rings[0].release(block)
                raise
            finally:
                if fd is not None:
                    os.close(fd)
                self._close_if_amid(0)

    def recv(self, timeout: float | None = None, place: handoff.Place | None = None) -> Any:
        """Receives the next object.

        Args:
            timeout: seconds to wait for a complete message, None for no limit.
            place: see `odb.feed.handoff.loads`; for example `torch.Tensor.pin_memory`.

        Raises:
            NotInTime: no complete message in time; what has arrived of it is kept for the next call.
            ChannelClosed: the other end is gone and everything that it sent has been received, or this one was closed.
            SampleError: the object can't be rebuilt here; the channel can be used on.
        """
        deadline = _deadline(timeout)
        with _held(self._receiving, deadline, "receive"):
            self._close_if_amid(1)
            self._check_open()
            try:
                head, buffers = self._receive_message(deadline)
            finally:
                self._close_if_amid(1)
        return handoff.loads(head, buffers, place)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether `recv` has something to do (a message, a part of one, or the end), waiting up to `timeout` seconds."""
        self._check_open()
        return self._wait(select.POLLIN, _deadline(timeout))

    def fileno(self) -> int:
        """The socket's descriptor, for `multiprocessing.connection.wait`. Readable means the same as `poll`."""
        self._check_open()
        return self._sock.fileno()

    def release(self) -> None:
        """Closes this process's copy of this end; the link lives on with whoever holds another copy."""
        self._shut("its end was given up in this process", hang_up=False)

    def close(self) -> None:
        """Ends the link for all processes: the other end receives what was sent before, then the end."""
        self._shut("it was closed in this process", hang_up=True)

    @property
    def closed(self) -> bool:
        """Whether this end can't be used any more."""
        return bool(self._closed)

    def __reduce__(self) -> Any:
        context.assert_spawning(self)  # pragma: no branch - raises unless a process is being started
        return Channel, (self._sock, *self._limits, self._rings)

    def __del__(self) -> None:
        if hasattr(self, "_amid_message"):
            self.release()

    # Sending

    def _encode(self, packed: handoff.Packed) -> tuple[bytes, int | None, int | None]:
        """What goes through the socket, the descriptor that goes along, and the block that holds the body."""
        body = Body(packed.head, packed.buffers, [len(buffer) for buffer in packed.buffers])
        num_bytes = body.num_bytes
        fd = block = None
        if num_bytes > self._limits[0]:
            block = self._written_into_block(body, num_bytes)
            fd = memory_with(body) if block is None else None
        place = block if block is not None else _IN_SOCKET if fd is None else _IN_MEMORY
        header = _HEADER.pack(_MAGIC, place, num_bytes, len(packed.head), len(packed.buffers))
        return (header if place != _IN_SOCKET else b"".join([header, *body.pieces()])), fd, block

    def _written_into_block(self, body: Body, num_bytes: int) -> int | None:
        ring = self._rings[0]
        if ring is None or num_bytes > ring.capacity:
            return None
        block = ring.claim(num_bytes)
        if block is not None:
            body.write_into(ring.block(block, num_bytes))
        return block

    def _send_all(self, data: memoryview, fds: list[int], deadline: float | None) -> None:
        begun = False
        while True:
            self._amid_message[0] = True
            sent = self._try_send(data, [] if begun else fds)
            begun = begun or sent > 0
            data = data[sent:]
            self._amid_message[0] = begun and len(data) > 0
            if not data:
                return
            in_time = begun or deadline is None or time.monotonic() < deadline
            if not (in_time and self._wait(select.POLLOUT, None if begun else deadline)):
                raise NotInTime("the other end of the channel takes no message: it has not received for too long")

    def _try_send(self, data: memoryview, fds: list[int]) -> int:
        try:
            return socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # this user's descriptors in flight, over all processes: ulimit -n
                time.sleep(_RETRY_S)
                return 0
            if (
                isinstance(error, BrokenPipeError) and not self._amid_message[1]
            ):  # what it said before can still be read
                self._amid_message[0] = False
                raise ChannelClosed(
                    "the channel has ended: the process at the other end closed it or is gone"
                ) from error
            raise self._lost(error) from error

    # Receiving

    def _forget_incoming(self) -> None:
        self._header = bytearray(_HEADER.size)
        self._body: Bytes | None = None
        self._num_received = 0  # bytes of the header, or of the body once that is expected
        self._fds: list[int] = []

    def _receive_message(self, deadline: float | None) -> tuple[memoryview, list[memoryview]]:
        if self._body is None:
            self._receive_into(memoryview(self._header), deadline)
        _, place, num_bytes, num_head_bytes, num_buffers = self._parse_header()
        self._amid_message[1] = True
        if place >= 0:
            ring = self._rings[1]
            assert ring is not None
            self._body = ring.take(place, num_bytes)
        elif place == _IN_MEMORY:
            self._body = self._open_body(num_bytes)
        else:
            if self._body is None:
                self._body, self._num_received = np.empty(num_bytes, np.uint8), 0
            self._receive_into(self._body.data, deadline)
        body = self._body.data
        self._forget_incoming()
        self._amid_message[1] = False
        return split(body, num_head_bytes, num_buffers)

    def _receive_into(self, target: memoryview, deadline: float | None) -> None:
        while self._num_received < len(target):
            self._amid_message[1] = True
            self._num_received += self._try_receive(target[self._num_received :])
            self._amid_message[1] = False
            if self._num_received < len(target) and not self._wait(select.POLLIN, deadline):
                raise NotInTime("no message came from the other end of the channel in time")

    def _try_receive(self, target: memoryview) -> int:
        """Bytes received, 0 if there are none yet."""
        room = socket.CMSG_SPACE(8 * struct.calcsize("i")) if _HAS_MEMFD else 0
        try:
            num, ancillary, flags, _ = self._sock.recvmsg_into([target], room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise self._lost(error) from error
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        if flags & getattr(socket, "MSG_CTRUNC", 0):
            raise self._lost(OSError(_NO_DESCRIPTOR))
        if num == 0:
            raise self._lost(None)
        return num

    def _parse_header(self) -> tuple[Any, ...]:
        fields = _HEADER.unpack(self._header)
        if fields[0] != _MAGIC or (fields[1] == _IN_MEMORY) != len(self._fds) or not self._is_block(fields[1]):
            raise self._lost(OSError(f"the stream is out of step: a message begins with {fields[0]!r}"))
        return fields

    def _is_block(self, place: int) -> bool:
        ring = self._rings[1]
        return place < 0 or (ring is not None and place < ring.num_blocks)

    def _open_body(self, num_bytes: int) -> Bytes:
        fd = self._fds.pop()
        try:
            return map_memory(fd, num_bytes) if num_bytes >= self._limits[1] else _copy(fd, num_bytes)
        finally:
            os.close(fd)

    # Both

    def _wait(self, event: int, deadline: float | None) -> bool:
        """Waits for `event` or the link's end; False once the deadline has passed."""
        poller = select.poll()
        try:
            poller.register(self._sock, event)
        except ValueError:  # another thread has just closed the socket
            self._check_open()
            raise
        while True:
            left = _SLICE_S if deadline is None else min(_SLICE_S, max(0.0, deadline - time.monotonic()))
            ready = poller.poll(left * 1000)
            self._check_open()
            if ready:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"the channel can't be used: {self._closed}")

    def _close_if_amid(self, direction: int) -> None:
        if self._amid_message[direction] and not self._closed:
            self._shut("it was interrupted in the middle of a message", hang_up=True)

    def _lost(self, error: OSError | None) -> ChannelClosed:
        """Closes this end; returns what to raise."""
        self._amid_message = [False, False]
        reason = self._closed or "the process at the other end closed it or is gone"
        if not self._closed and error is not None and not isinstance(error, BrokenPipeError | ConnectionResetError):
            reason = str(error)
        self._shut(reason, hang_up=True)
        return ChannelClosed(f"the channel has ended: {reason}")

    def _shut(self, reason: str, hang_up: bool) -> None:
        if self._closed:
            return
        self._closed = reason
        if hang_up:
            with suppress(OSError):  # the other end was faster
                self._sock.shutdown(socket.SHUT_RDWR)
            if self._rings[1] is not None:
                self._rings[1].give_up()
        self._sock.close()
        while self._fds:
            os.close(self._fds.pop())


_NO_DESCRIPTOR = (
    "this process could not take the descriptor that came with a message. Usually it has as many files open as it may: "
    "see `ulimit -n`, raise it, or look for what keeps files open (tensors from this channel don't)"
)

_live_ends: weakref.WeakSet[Channel] = weakref.WeakSet()
_handed_over: list[Channel] = []


def channel_pair(
    inline_limit: int = INLINE_LIMIT, map_from: int = MAP_FROM, num_blocks: int = 0, num_blocks_out: int = 0
) -> tuple[Channel, Channel]:
    """Two ends of a new link, both in this process. The limits are for tests and for measuring.

    `num_blocks`: messages of the second end that may be under way in memory that is used over and over; `num_blocks_out`:
    of the first end.
    """
    ours, theirs = socket.socketpair()
    back, out = (
        make_ring(num + NUM_LENT, BLOCK_BYTES, NUM_LENT) if num and _HAS_MEMFD else None
        for num in (num_blocks, num_blocks_out)
    )
    return (
        Channel(ours, inline_limit, map_from, (out, back)),
        Channel(theirs, inline_limit, map_from, (back, out)),
    )


@contextmanager
def handing_over(*ends: Channel) -> Iterator[None]:
    """A process that is forked inside keeps `ends`; any other forked process closes them."""
    _handed_over.extend(ends)
    try:
        yield
    finally:
        for end in ends:
            _handed_over.remove(end)


def close_inherited(keep: tuple[Channel, ...] = ()) -> None:
    """Releases this process's copies of all ends but `keep`. A forked child does this by itself."""
    for end in list(_live_ends):
        if not any(end is kept for kept in keep):
            end.release()


_kept_by_child: list[int] = []  # during a fork: descriptors whose end will tell that the child has gone


def _lending_rings() -> list[Ring]:
    return [ring for end in list(_live_ends) if (ring := end._rings[1]) is not None]


def _before_fork() -> None:
    if _handed_over:  # our own processes never look at what this one holds
        return
    _kept_by_child.extend(fd for ring in _lending_rings() if (fd := ring.before_fork()) >= 0)


def _after_fork_in_parent() -> None:
    while _kept_by_child:
        os.close(_kept_by_child.pop())


def _after_fork_in_child() -> None:
    _kept_by_child.clear()
    for ring in _lending_rings():
        ring.forget_loans()
    close_inherited(keep=tuple(_handed_over))
    _handed_over.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


@contextmanager
def _held(lock: Any, deadline: float | None, verb: str) -> Iterator[None]:
    left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
    if not lock.acquire(timeout=left):
        raise NotInTime(f"another thread of this process has been waiting to {verb} on the channel for too long")
    try:
        yield
    finally:
        lock.release()


def memory_with(body: Body) -> int | None:
    """Descriptor of anonymous memory that holds `body`, or None where the system refuses: then the socket has to do."""
    try:
        fd = os.memfd_create("odb", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    try:
        _write_all(fd, [memoryview(piece) for piece in body.pieces()])
    except OSError:  # no room, or a limit on the size of files (`ulimit -f`)
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, parts: list[memoryview]) -> None:
    first = 0
    while first < len(parts):
        num = os.writev(fd, parts[first : first + _MAX_VECTORS])
        while first < len(parts) and num >= len(parts[first]):
            num -= len(parts[first])
            first += 1
        if num:
            parts[first] = parts[first][num:]


def _copy(fd: int, num_bytes: int) -> Bytes:
    """The file's content in fresh memory."""
    body = np.empty(num_bytes, np.uint8)
    view, offset = body.data, 0
    while offset < num_bytes:
        num = os.preadv(fd, [view[offset:]], offset)
        if num == 0:
            raise OSError(f"a message of {num_bytes} bytes ends after {offset}")
        offset += num
    return body


def map_memory(fd: int, num_bytes: int) -> Bytes:
    """The file's content where it is, private and writable; unmapped when nothing refers to it any more.

    PyTorch's mapping holds no descriptor, unlike that of `mmap` before Python 3.13, and is undone in native code.
    """
    try:
        mapped = torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=num_bytes, dtype=torch.uint8)
    except RuntimeError:  # no /proc here, or no descriptor left for the second that this takes for a moment
        return _copy(fd, num_bytes)
    body: Bytes = mapped.numpy()
    return body
