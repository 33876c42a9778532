"""The life and death of our processes: no orphan stays behind, whoever dies first and however.

What ends what:

- *The parent ends, by any means* (SIGKILL too): `guard_against_orphaning`, called first thing in every child, the inner
  workers included. A worker whose parent is killed otherwise stays for ever, because at its exit it waits for room in a
  pipe that nobody reads any more.
- *The parent's interpreter exits with loaders open*: callbacks of `at_exit` run before `multiprocessing` joins the children
  that are no daemons, which would be a deadlock.
- *The parent stops a child*: `stop`.
- *Ctrl-C* reaches every process of the terminal; the main process alone reacts, the others call `ignore_interrupts`.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import multiprocessing.util  # before atexit.register below: callbacks run last in, first out
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, current_process, get_context, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from types import FrameType, MethodType
from typing import Any

from odb.errors import ConfigError, ProcessDied
from odb.feed.channel import Channel, handing_over
from odb.feed.handoff import locate_unpicklable

_log = logging.getLogger(__name__)

#: Exit code of a process that ended because its parent was gone.
ORPHANED = 113
_POLL_S = 0.5  # between two looks at a parent where the system can't wake us
_TERMINATE_S = 2.0  # between SIGTERM and SIGKILL
_KILL_S = 5.0  # for the kernel to end a killed process
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

# Starting and stopping


def start(
    context: BaseContext | str | None, target: Callable[..., object], args: tuple[Any, ...], name: str
) -> BaseProcess:
    """Starts a process that may have children of its own.

    Channels among `args` (not inside of them) belong to the child from then on: this process's copies are released.
    Until the child calls `ignore_interrupts`, Ctrl-C can't strike it (forkserver: it can, before `target` runs).

    Args:
        context: a `multiprocessing` context or the name of a start method; None for the default one.
        target: what the process runs.
        args: its arguments.
        name: of the process, for errors and for `ps`.

    Raises:
        ConfigError: this process may not have children, or an argument can't be pickled under spawn or forkserver.
    """
    context = get_context(context) if context is None or isinstance(context, str) else context
    if current_process().daemon:
        raise ConfigError(
            f"{name} can't be started: this process ({current_process().name}) is a daemonic child of another one, and "
            "such processes may not have children. Start it with daemon=False, or use num_workers=0"
        )
    ends = tuple(arg for arg in args if isinstance(arg, Channel))
    process: BaseProcess = context.Process(target=target, args=args, name=name, daemon=False)  # type: ignore[attr-defined]
    try:
        with handing_over(*ends), _interrupts_blocked(context):
            process.start()
            _started_in[process] = os.getpid()
            for end in ends:
                end.release()
    except (PicklingError, TypeError, AttributeError) as error:
        raise _cannot_start(context, name, args, error) from error
    except BaseException:  # such as Ctrl-C at the end of the block: nobody would ever learn of the process
        if process.pid is not None:
            process.kill()
        raise
    return process


def stop(process: BaseProcess, grace_s: float = 5.0) -> str:
    """Waits `grace_s` seconds for a process that has been asked to end, then ends it. Never raises an `Exception`.

    Returns:
        How it ended, see `describe_exit`.
    """
    if _started_in.get(process, os.getpid()) != os.getpid():
        return f"{process.name} belongs to another process"
    try:
        for end_it, wait_s in ((None, grace_s), (process.terminate, _TERMINATE_S), (process.kill, _KILL_S)):
            if process.exitcode is None:
                if end_it is not None:
                    end_it()
                process.join(wait_s)
        return describe_exit(process)
    except Exception as error:  # runs where an error would hide the one that led here
        _log.warning("%s could not be stopped: %r", process.name, error)
        return f"could not be stopped ({error!r})"
    except BaseException:
        process.kill()
        raise


def describe_exit(process: BaseProcess) -> str:
    """How a process ended: "exit code 1", "killed by signal SIGKILL (...)", with the usual cause where there is one."""
    code = process.exitcode
    if code is None:
        return "still running"
    if code == ORPHANED:
        return f"exit code {code} (the process that started it was gone)"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    return f"killed by signal {name}" + _USUAL_CAUSES.get(name, "")


_USUAL_CAUSES = {
    "SIGBUS": " (usually shared memory is full: see `df -h /dev/shm`; give the container more, for example "
    "--shm-size=8g or --ipc=host with docker, or use fewer workers or a smaller prefetch_factor)",
    "SIGKILL": " (usually by the kernel because memory ran out: see `dmesg`; use fewer workers or a smaller window)",
    "SIGSEGV": " (a crash in native code: run with PYTHONFAULTHANDLER=1 to see where)",
}

_started_in: weakref.WeakKeyDictionary[BaseProcess, int] = weakref.WeakKeyDictionary()


def _cannot_start(context: BaseContext, name: str, args: tuple[Any, ...], error: Exception) -> Exception:
    if context.get_start_method() == "fork" or _can_pickle_for_start(args):
        return error
    path, part = locate_unpicklable(args, f"{name}: args", _can_pickle_for_start)
    return ConfigError(
        f"{path} is {part!r:.120}, which can't be pickled ({error}); the start method {context.get_start_method()!r} has "
        "to pickle everything that the new process needs. Use a function or class that is defined at the top of a "
        "module, or multiprocessing_context='fork'"
    )


def _can_pickle_for_start(obj: Any) -> bool:
    try:
        ForkingPickler.dumps(obj)
    except RuntimeError:  # a lock, a queue, a channel: can be pickled, but only while a process is being started
        return True
    except Exception:  # whatever it is, it can't be pickled
        return False
    return True


# Interrupts


def ignore_interrupts() -> None:
    """Leaves Ctrl-C to the main process. Called first thing in a child, in its main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def _interrupts_blocked(context: BaseContext) -> Iterator[None]:
    """A process that is forked or spawned inside starts with SIGINT blocked, so that none strikes while it imports."""
    if context.get_start_method() not in ("fork", "spawn") or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # spawn starts it, and that unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ChildWatch:
    """Notices that a `DataLoader` worker has died, and raises it where `check` stands.

    PyTorch's SIGCHLD handler raises in the main thread, wherever that thread happens to be: in the middle of a collective,
    or of telling others what went wrong. What it raises is kept here until it is asked for. Under forkserver no signal
    comes at all, as the workers are children of the fork server, so that their sentinels are looked at as well.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._handler: Any = None
        self._workers: list[BaseProcess] = []  # held, so that no other file gets the number of a sentinel
        self._sentinels: select.poll | None = None

    def install(self, num_workers: int) -> None:
        """Wraps the handler that is set now, and takes note of the workers. On the main thread, once they are started."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
            return
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and handler != self._handle:
            self._handler = handler
            signal.signal(signal.SIGCHLD, self._handle)
        self._workers = [process for process in active_children() if process not in _started_in]
        if len(self._workers) < num_workers:
            missing = num_workers - len(self._workers)
            self._error = self._error or ProcessDied(
                f"{missing} of {num_workers} DataLoader workers died at their start"
            )
        self._sentinels = select.poll()
        for process in self._workers:
            self._sentinels.register(process.sentinel, select.POLLIN)

    def release(self) -> None:
        """The workers are about to be ended on purpose."""
        self._workers, self._sentinels = [], None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except Exception as error:
            self._error = self._error or error

    def check(self) -> None:
        """Raises what the handler raised, once, or which worker died. Costs about a microsecond."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._sentinels is not None and self._sentinels.poll(0):
            self._look_who_ended()

    def _look_who_ended(self) -> None:
        for process in self._workers:
            if process.exitcode:
                raise _worker_died(process)
        ended = [process for process in self._workers if process.exitcode == 0]  # its share of a stream is used up
        for process in ended:
            assert self._sentinels is not None
            self._sentinels.unregister(process.sentinel)
            self._workers.remove(process)


def _worker_died(process: BaseProcess) -> ProcessDied:
    code = process.exitcode or 0
    how = f"died ({signal.strsignal(-code)})" if code < 0 else "exited unexpectedly"
    return ProcessDied(f"DataLoader worker (pid {process.pid}) {how}: {describe_exit(process)}")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal. Linux; elsewhere it can't be told, and False."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


# Orphans


def can_use_signal(context: BaseContext | str | None) -> bool:
    """Whether the kernel's parent-death signal may guard a process that is started here and now.

    The signal follows the *thread* that creates the process, and needs that process to be the direct parent.
    """
    context = get_context(context) if context is None or isinstance(context, str) else context
    in_main_thread = threading.current_thread() is threading.main_thread()
    return sys.platform == "linux" and in_main_thread and context.get_start_method() in ("fork", "spawn")


def guard_against_orphaning(parent_pid: int, *, use_signal: bool) -> None:
    """Makes this process end when the process `parent_pid` does, whatever ends that. First thing in a child.

    Where possible the kernel kills this process; elsewhere a daemon thread waits for the parent's end. Where the parent
    is gone already, this process ends here.

    Args:
        parent_pid: the process that has this one started, which under forkserver is not the direct parent.
        use_signal: what `can_use_signal` said in the creating process.
    """
    if use_signal and os.getppid() == parent_pid and _request_death_signal():
        if os.getppid() != parent_pid:  # it ended before the request
            os._exit(ORPHANED)
        return
    wait = _waiter(parent_pid)
    threading.Thread(target=_exit_after, args=(wait,), name="odb-orphan-guard", daemon=True).start()


def _request_death_signal() -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0)
    except (AttributeError, OSError):  # no prctl here
        return False


def _exit_after(wait: Callable[[], None]) -> None:
    wait()
    os._exit(ORPHANED)


def _waiter(pid: int) -> Callable[[], None]:
    """A function that returns when process `pid` has ended. Identifies the process now, so that a pid may be reused."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(ORPHANED)
    except (AttributeError, OSError):  # not Linux, an old kernel, or a sandbox
        return partial(_poll_until_gone, pid, _start_time(pid))
    return partial(_wait_for_pidfd, pidfd)


def _wait_for_pidfd(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    while not poller.poll():
        pass


def _poll_until_gone(pid: int, started: str | None) -> None:
    while started != "" and _is_alive(pid) and _start_time(pid) == started:
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks after boot; "" for one that has ended, None where the system can't say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may hold anything
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


# The interpreter's exit

_callbacks: dict[int, tuple[int, Callable[[], Callable[[], object] | None]]] = {}  # key -> (pid, reference)
_keys = itertools.count()
_armed_in: int | None = None


def at_exit(callback: Callable[[], object]) -> Callable[[], None]:
    """Has `callback` called at this process's exit, before `multiprocessing` waits for children that are no daemons.

    A bound method is held weakly: its object may go, and its callback with it. Last in, first out. Never called in a
    forked child. Also called at the end of a process that `multiprocessing` started, where `atexit` comes too late.

    Returns:
        A function that withdraws the callback.
    """
    _arm()
    key = next(_keys)

    def withdraw(_: object = None) -> None:
        _callbacks.pop(key, None)

    method = isinstance(callback, MethodType)
    _callbacks[key] = (os.getpid(), weakref.WeakMethod(callback, withdraw) if method else lambda: callback)
    return withdraw


def _arm() -> None:
    global _armed_in
    if _armed_in == os.getpid():
        return
    _armed_in = os.getpid()
    # Not documented, but the only thing that runs before the children are joined in a process of multiprocessing's own.
    multiprocessing.util.Finalize(None, _run_callbacks, exitpriority=100)


def _run_callbacks() -> None:
    while _callbacks:
        pid, reference = _callbacks.pop(max(_callbacks))
        callback = reference() if pid == os.getpid() else None
        try:
            if callback is not None:
                callback()
        except Exception:  # the others must run too
            _log.exception("an exit callback failed")


atexit.register(_run_callbacks)
