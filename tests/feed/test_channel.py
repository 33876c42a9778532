"""Whole objects over a socket pair: sizes, limits, ends, interruptions."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from scripts import run_script

from odb.errors import ChannelClosed, SampleError
from odb.feed.channel import Channel, channel_pair, close_inherited, handing_over

pytestmark = pytest.mark.timeout(60)

EVERYTHING_INLINE = {"inline_limit": sys.maxsize}
VARIANTS = {
    "as shipped": {},
    "all mapped": {"inline_limit": 0, "map_from": 0},
    "all copied": {"inline_limit": 0, "map_from": sys.maxsize},
    "all inline": EVERYTHING_INLINE,
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    pair = channel_pair(**request.param)
    yield pair
    for end in pair:
        end.close()


@contextmanager
def running(target: Any, *args: Any) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    yield thread
    thread.join(20)
    assert not thread.is_alive()


def batch(num_bytes: int, value: int = 0) -> dict[str, Any]:
    return {"x": torch.full((max(1, num_bytes // 8),), value), "n": value}


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("num_bytes", [0, 8, 16_000, 17_000, 1 << 20, (1 << 20) + 8, 9_000_000])
def test_messages_of_any_size_arrive_in_order_both_ways(ends: tuple[Channel, Channel], num_bytes: int) -> None:
    def echo() -> None:
        for _ in range(3):
            ends[1].send(ends[1].recv(20), 20)

    with running(echo):
        for i in range(3):
            ends[0].send(batch(num_bytes, i), 20)
            got = ends[0].recv(20)
            assert got["n"] == i and torch.equal(got["x"], batch(num_bytes, i)["x"])
            got["x"] += 1  # writable


def test_many_buffers_and_odd_sizes(ends: tuple[Channel, Channel]) -> None:
    sent = [np.full(n % 131, n % 256, np.uint8) for n in range(3000)] + [torch.tensor(2.5), "x" * 70_001, b""]
    with running(ends[0].send, sent, 20):
        got = ends[1].recv(20)
    assert all(np.array_equal(g, s) for g, s in zip(got[:3000], sent[:3000], strict=True))
    assert got[3000] == 2.5 and got[3001:] == sent[3001:]


def test_several_threads_share_an_end(ends: tuple[Channel, Channel]) -> None:
    def talk(who: int) -> None:
        for i in range(60):
            ends[0].send((who, i, batch(8 * (1 + (i * 7919) % 40_000), who * 1000 + i)), 20)

    threads = [threading.Thread(target=talk, args=(who,), daemon=True) for who in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {who: [] for who in range(4)}
    for _ in range(240):
        who, i, got = ends[1].recv(20)
        seen[who].append(i)
        assert bool((got["x"] == who * 1000 + i).all())
    assert all(order == list(range(60)) for order in seen.values())


def test_a_timeout_of_recv_loses_nothing_of_a_message_in_pieces() -> None:
    ours, theirs = channel_pair(**EVERYTHING_INLINE)
    ours.send(batch(3000, 7))
    with socket.socket(fileno=os.dup(theirs.fileno())) as raw:
        raw.setblocking(False)
        data = raw.recv(100_000)
    sender, receiver = socket.socketpair()
    end = Channel(receiver)
    with sender, pytest.raises(TimeoutError):
        end.recv(0.0)
    sender, receiver = socket.socketpair()
    end = Channel(receiver)
    for i in range(0, len(data), 611):
        with pytest.raises(TimeoutError):
            end.recv(0.0)
        sender.sendall(data[i : i + 611])
    assert end.recv(5)["n"] == 7
    assert not end.poll()


def test_a_send_without_room_times_out_and_sends_nothing() -> None:
    ours, theirs = channel_pair()
    sent = 0
    with pytest.raises(TimeoutError, match="takes no message"):
        while True:
            ours.send(batch(2000, sent), 0.05)
            sent += 1
    for i in range(sent):
        assert theirs.recv(5)["n"] == i
    assert not theirs.poll()
    ours.send("still in use", 5)
    assert theirs.recv(5) == "still in use"


def test_large_bodies_wait_for_nobody() -> None:
    ours, theirs = channel_pair()
    for i in range(20):
        ours.send(batch(2_000_000, i), 1.0)
    assert [theirs.recv(5)["n"] for _ in range(20)] == list(range(20))


def test_poll_and_fileno_tell_of_messages_and_of_the_end() -> None:
    ours, theirs = channel_pair()
    assert not theirs.poll(0.01)
    ours.send(1)
    assert theirs.poll(5) and multiprocessing.connection.wait([theirs], 5) == [theirs]
    assert theirs.recv() == 1
    ours.close()
    assert theirs.poll(5)


@pytest.mark.parametrize("end_it", [Channel.close, Channel.release])
def test_what_was_sent_before_the_end_is_received_then_the_end(ends: tuple[Channel, Channel], end_it: Any) -> None:
    ours, theirs = ends
    ours.send("last words")
    ours.send(batch(30_000, 3))
    end_it(ours)
    assert theirs.recv(5) == "last words" and theirs.recv(5)["n"] == 3
    with pytest.raises(ChannelClosed, match="closed it or is gone"):
        theirs.recv(5)
    with pytest.raises(ChannelClosed):
        theirs.send(1)
    assert theirs.closed
    end_it(ours)  # twice is once
    for use in (ours.recv, ours.poll, ours.fileno, lambda: ours.send(1)):
        with pytest.raises(ChannelClosed, match="in this process"):
            use()


def test_a_send_to_nobody_says_so(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    with pytest.raises(ChannelClosed, match="is gone"):
        ends[0].send(batch(100_000))


def test_closing_wakes_a_thread_that_waits() -> None:
    ours, _theirs = channel_pair()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            ours.recv(30)
        except BaseException as error:
            caught.append(error)

    with running(wait):
        ours.close()
    assert len(caught) == 1 and isinstance(caught[0], ChannelClosed)


def test_what_cannot_be_pickled_or_rebuilt_leaves_the_channel_in_use(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    with pytest.raises(SampleError, match=r"message\['fn'\]"):
        ours.send({"fn": lambda: 0})
    ours.send(NotRebuilt())
    ours.send("fine")
    with pytest.raises(SampleError, match="can't be rebuilt"):
        theirs.recv(5)
    assert theirs.recv(5) == "fine"


def test_too_many_descriptors_in_flight_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = 3
    send_fds = socket.send_fds

    def refuse(*args: Any) -> int:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return send_fds(*args)

    monkeypatch.setattr(socket, "send_fds", refuse)
    ours, theirs = channel_pair()
    ours.send(batch(100_000, 1), 5)
    assert theirs.recv(5)["n"] == 1
    refusals = 10**9
    with pytest.raises(TimeoutError):
        ours.send(batch(100_000, 2), 0.05)
    refusals = 0
    ours.send(batch(100_000, 3), 5)
    assert theirs.recv(5)["n"] == 3


class NotRebuilt:
    def __reduce__(self) -> Any:
        return (int, ("no number",))


def test_garbage_closes_the_channel() -> None:
    ours, theirs = socket.socketpair()
    end = Channel(theirs)
    ours.sendall(b"GET / HTTP/1.1\r\n" * 8)
    with pytest.raises(ChannelClosed, match="out of step"):
        end.recv(5)
    ours.close()


def num_mapped() -> int:
    """Mappings of anonymous memory of ours; other tests of this process may have left some to be collected."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:odb")


def num_in_shm() -> int:
    """Mappings of files in /dev/shm; `multiprocessing.Value` has one, for as long as its process lives."""
    return Path("/proc/self/maps").read_text().count("/dev/shm")


@pytest.mark.parametrize("options", [{}, {"map_from": 0}], ids=["copied", "mapped"])
def test_kept_batches_use_memory_only(options: dict[str, int]) -> None:
    """600 batches stay alive: no descriptor, no name in /dev/shm, and the memory goes with the last tensor."""
    ours, theirs = channel_pair(**options)
    before, mapped, num_shared = open_fds(), num_mapped(), num_in_shm()
    kept = []
    for i in range(600):
        ours.send(batch(40_000, i))
        kept.append(theirs.recv(5))
    assert open_fds() == before
    assert num_in_shm() == num_shared
    assert num_mapped() - mapped == (600 if options else 0)
    assert all(bool((got["x"] == i).all()) for i, got in enumerate(kept))
    last = kept[-1]["x"][5:]
    kept.clear()
    gc.collect()
    assert num_mapped() - mapped == (1 if options else 0)
    assert bool((last == 599).all())
    ours.close()
    theirs.close()


@pytest.mark.parametrize("num_children", [1, 2])
def test_what_a_forked_child_sees_stays_as_it_was(num_children: int) -> None:
    """Also once its parent has let go of the batch and received many others; after that the block is used again."""
    ours, theirs = channel_pair(num_blocks=2)
    theirs.send(batch(200_000, 7))
    kept = ours.recv(5)
    reading, writing = os.pipe()
    children = []
    for _ in range(num_children):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent has closed its end
            os._exit(0 if (kept["x"] == 7).all() else 1)
        children.append(child)
    del kept
    gc.collect()
    for value in range(20):
        theirs.send(batch(200_000, value))
        assert (ours.recv(5)["x"] == value).all()
    before = open_fds()
    os.close(writing)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * num_children
    theirs.send(batch(200_000, 1))
    ours.recv(5)
    assert open_fds() == before - 1 - num_children
    gc.collect()
    ring = ours._rings[1]
    assert ring is not None and all(map(ring.is_free, range(ring.num_blocks)))
    os.close(reading)


def test_a_limit_on_the_size_of_files_leaves_the_socket() -> None:
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        ours, theirs = channel_pair(num_blocks=2)
        sender = threading.Thread(target=theirs.send, args=(batch(400_000, 3), 20))
        sender.start()
        os._exit(0 if (ours.recv(20)["x"] == 3).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_mapped_batch_is_private_to_its_receiver() -> None:
    ours, theirs = channel_pair(map_from=0, inline_limit=0)
    sent = batch(80_000)
    ours.send(sent)
    got = theirs.recv(5)
    got["x"] += 1
    assert int(sent["x"].sum()) == 0 and bool((got["x"] == 1).all())


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        while True:
            try:
                fillers.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_receiver_without_descriptors_names_the_limit() -> None:
    ours, theirs = channel_pair()
    ours.send(batch(100_000))
    with no_descriptor_left(), pytest.raises(ChannelClosed, match="ulimit -n"):
        theirs.recv(5)


def test_a_sender_without_descriptors_uses_the_socket() -> None:
    ours, theirs = channel_pair()
    with no_descriptor_left():
        ours.send(batch(100_000, 4), 5)
        assert theirs.recv(5)["n"] == 4


class Struck(BaseException):
    pass


@contextmanager
def strikes(first_s: float, again_s: float = 0.0) -> Iterator[None]:
    """A signal handler raises in the main thread, as Ctrl-C does."""

    def strike(*_: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, first_s, again_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_wait_loses_nothing(ends: tuple[Channel, Channel]) -> None:
    with strikes(0.05), pytest.raises(Struck):
        ends[1].recv(20)
    ends[0].send("after")
    assert ends[1].recv(5) == "after"


def test_an_interruption_amid_a_message_closes_both_ends() -> None:
    ours, theirs = channel_pair(**EVERYTHING_INLINE)
    with strikes(0.1), pytest.raises(Struck):
        ours.send(batch(5_000_000), 20)
    assert ours.closed
    with pytest.raises(ChannelClosed):
        theirs.recv(5)
    with pytest.raises(ChannelClosed, match="middle of a message"):
        ours.send(1)


class StrikeAtLine:
    """Raises at the `n`-th line that the channel's module runs while this is the trace function."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith("channel.py") or frame.f_code.co_name == "<listcomp>":
            return None
        if event == "line" and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise Struck
        return self

    def during(self, act: Any) -> bool:
        """Whether it struck; False once there are fewer than `n` lines."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            act()
        except Struck:
            return True
        finally:
            sys.settrace(before)
        return False


def received(end: Channel) -> list[int]:
    """Everything that still arrives: whole messages, then nothing or the end."""
    got = []
    try:
        while end.poll(0.0):
            item = end.recv(5)
            assert bool((item["x"] == item["n"]).all())
            got.append(item["n"])
    except ChannelClosed:
        pass
    return got


@pytest.mark.parametrize("num_bytes", [8, 60_000])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_an_interruption_at_any_line_of_send_never_garbles(options: dict[str, int], num_bytes: int) -> None:
    for n in range(1000):
        ours, theirs = channel_pair(**options)
        ours.send(batch(num_bytes, 1))
        struck = StrikeAtLine(n)
        if not struck.during(lambda: ours.send(batch(num_bytes, 2))):  # noqa: B023
            assert n > 20
            return
        with suppress(ChannelClosed):
            if num_bytes < 100:
                ours.send(batch(num_bytes, 3), 5)
        got = received(theirs)
        assert got in ([1], [1, 2], [1, 3], [1, 2, 3]), struck.where
        assert ours.closed or num_bytes > 100 or got[-1] == 3, struck.where
        ours.close()
        theirs.close()
    raise AssertionError("send never came to its end")


@pytest.mark.parametrize("num_bytes", [8, 60_000])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_an_interruption_at_any_line_of_recv_never_garbles(options: dict[str, int], num_bytes: int) -> None:
    for n in range(1000):
        ours, theirs = channel_pair(**options)
        ours.send(batch(num_bytes, 1))
        struck = StrikeAtLine(n)
        if not struck.during(lambda: theirs.recv(5)):  # noqa: B023
            assert n > 20
            return
        with suppress(ChannelClosed):
            ours.send(batch(64, 2), 5)
        got = received(theirs)
        assert got in ([1, 2], [2]) or (theirs.closed and got == []), struck.where
        ours.close()
        theirs.close()
    raise AssertionError("recv never came to its end")


def test_a_channel_is_pickled_only_while_a_process_is_being_started() -> None:
    ours, _theirs = channel_pair()
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(ours)


def await_the_end(end: Channel, exit_code: int) -> None:
    try:
        end.send(os.getpid())
        end.recv(30)
    except ChannelClosed:
        os._exit(exit_code)


def fork(end: Channel, exit_code: int) -> Any:
    process = multiprocessing.get_context("fork").Process(target=await_the_end, args=(end, exit_code))
    with handing_over(end):
        process.start()
    end.release()
    return process


def test_a_forked_child_keeps_no_end_of_others_open() -> None:
    """The second child would otherwise hold a copy of the parent's end of the first link, and hide its end."""
    first, theirs = channel_pair()
    children = [fork(theirs, 7)]
    second, theirs = channel_pair()
    children.append(fork(theirs, 8))
    assert first.recv(20) == children[0].pid and second.recv(20) == children[1].pid
    first.release()  # no hang-up: only the last copy's end counts
    children[0].join(20)
    assert children[0].exitcode == 7 and children[1].is_alive()
    second.release()
    children[1].join(20)
    assert children[1].exitcode == 8


def test_the_parent_sees_the_end_of_a_killed_child_whose_own_child_lives() -> None:
    """A grandchild forked from the child keeps no copy of the child's end."""
    ours, theirs = channel_pair()
    process = multiprocessing.get_context("fork").Process(target=fork_and_tell, args=(theirs,))
    with handing_over(theirs):
        process.start()
    theirs.release()
    grandchild = ours.recv(20)
    try:
        process.kill()
        with pytest.raises(ChannelClosed):
            ours.recv(5)
        os.kill(grandchild, 0)  # it is alive all the same
    finally:
        os.kill(grandchild, signal.SIGKILL)
        process.join(20)


def fork_and_tell(end: Channel) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    end.send(pid)
    time.sleep(60)


def test_close_inherited_releases_all_but_what_is_kept() -> None:
    one, two = channel_pair()
    three, four = channel_pair()
    close_inherited(keep=(one, two))
    assert not one.closed and not two.closed and three.closed and four.closed


def test_a_process_under_a_low_limit_keeps_600_batches() -> None:
    """Across processes, with 256 descriptors allowed: the sender needs none either."""
    out, err = run_script(Path(__file__).with_name("keep_batches.py"))
    assert out == ["0 more open", "sender below 30 True", "all whole True", "left in /dev/shm []", "exit code 0"], err
