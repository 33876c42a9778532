"""Real rank processes for tests, ready when a test asks for them; and whole programs in subprocesses.

`run_ranks(2, fn, *args)` runs `fn(rank, world_size, *args)` in two processes whose default process group is Gloo, and
returns what each gave or raised. The processes are forks of a *nursery*, a clean process that has imported torch once
and has no threads, so that a new world costs a tenth of a second. A world is used again by the next test as long as
nothing went wrong in it. After each run nothing may be left of it: no child process, no thread, no file in /dev/shm.

A rank that hangs fails the test when its time is up, with the stack of every thread of every process of the world.
All processes, orphans too, are found by a variable in their environment, and go when the session ends, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil

MARKER = "ODB_TEST_MARKER"
SHM = Path("/dev/shm")
SETTLE_S = 5.0  # how long what a test started may take to go
START_S = 60.0
_TRACKER_S = 3.0
_INFRASTRUCTURE = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


# ---- what a test gets


@dataclass(frozen=True)
class RankError:
    """What a rank raised."""

    type_name: str
    text: str
    traceback: str
    bases: tuple[str, ...]  # names of all classes that it is an instance of
    ranks: tuple[int, ...] = ()  # its attribute of this name, where it has one

    def __str__(self) -> str:
        return self.traceback


@dataclass(frozen=True)
class RankResult:
    """What one rank's function returned, or raised, and how long it took."""

    rank: int
    returned: Any
    error: RankError | None
    seconds: float

    @property
    def value(self) -> Any:
        """What the function returned; fails the test if it raised."""
        if self.error is not None:
            raise AssertionError(f"rank {self.rank} raised {self.error.type_name}:\n{self.error.traceback}")
        return self.returned


class RankTimeout(AssertionError):
    """Some rank was not done in time, or died."""


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, check: bool = True
) -> list[RankResult]:
    """Runs `fn(rank, world_size, *args)` on every rank of a world and waits for all.

    Args:
        world_size: number of ranks, >= 1.
        fn: a module-level function; it and the arguments travel by pickle.
        timeout: seconds; a rank that is not done by then fails the test, with stacks.
        check: whether a process, thread or /dev/shm file that outlives the run fails the test.

    Raises:
        RankTimeout: a rank hung or died.
        AssertionError: something was left behind.
    """
    world = _worlds.get(world_size)
    before = shm_files()
    try:
        results = world.run(fn, args, timeout)
        if check:
            world.check_nothing_left(before)
    except BaseException:
        _worlds.discard(world_size)
        raise
    if any(result.error is not None for result in results):
        _worlds.discard(world_size)  # its default group may be out of step
    return results


def values(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """What `fn` returned on each rank; fails the test if any raised."""
    results = run_ranks(world_size, fn, *args, timeout=timeout)
    failed = [result for result in results if result.error is not None]
    if failed:
        raise AssertionError(
            "\n".join(f"rank {r.rank} of {world_size} raised {r.error.type_name}:\n{r.error.traceback}" for r in failed)
        )
    return [result.returned for result in results]


# ---- processes and files


def children_of(pid: int, recursive: bool = True) -> list[int]:
    """Pids of a process's living descendants (or children alone), the helpers of `multiprocessing` itself left out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).children(recursive=recursive)
        return [child.pid for child in found if is_alive(child.pid) and not _is_infrastructure(child)]
    return []


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_infrastructure(process: psutil.Process) -> bool:
    """The fork server and resource tracker of `multiprocessing` live as long as their parent, not what they serve."""
    try:
        line = " ".join(process.cmdline())
        parent = process.parent()
        parent_line = " ".join(parent.cmdline()) if parent is not None else ""
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    return any(name in line and name not in parent_line for name in _INFRASTRUCTURE)


def marked_pids(marker: str) -> set[int]:
    """All living processes that carry a marker in their environment, orphans included."""
    needle, found = f"{MARKER}={marker}".encode(), set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if needle in Path(entry.path, "environ").read_bytes().split(b"\0") and is_alive(int(entry.name)):
                found.add(int(entry.name))
    return found


def kill_marked(marker: str) -> None:
    """Ends every process that carries the marker; resource trackers may first remove what the others left behind."""
    start = time.monotonic()
    while (pids := marked_pids(marker) - {os.getpid()}) and time.monotonic() < start + SETTLE_S + _TRACKER_S:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if time.monotonic() > start + _TRACKER_S or not _is_tracker(pid):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _is_tracker(pid: int) -> bool:
    return _INFRASTRUCTURE[0] in " ".join(psutil.Process(pid).cmdline())


def shm_files() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir(SHM)) if SHM.exists() else set()


def leaked_shm_files(before: set[str], pids: set[int]) -> set[str]:
    """Files new in /dev/shm; not those that tell another maker's pid, nor those in use by programs beside this one."""
    leaked = set()
    for name in shm_files() - before:
        told = re.match(r"torch_(\d+)_", name)
        if int(told[1]) in pids if told else not _foreign_users(name):
            leaked.add(name)
    return leaked


def _foreign_users(name: str) -> list[int]:
    """Living processes without a marker of ours that have a file of /dev/shm mapped."""
    users = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            is_marked = f"{MARKER}=".encode() in Path(entry.path, "environ").read_bytes()
            if not is_marked and f"{SHM}/{name}" in Path(entry.path, "maps").read_text():
                users.append(int(entry.name))
    return users


def wait_until(condition: Callable[[], Any], seconds: float, interval: float = 0.02) -> bool:
    """Polls a condition until it holds; False if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def describe(pid: int) -> str:
    """A process's command line and, where py-spy can read it, the stack of each of its threads."""
    try:
        process = psutil.Process(pid)
        head = f"--- pid {pid}, parent {process.ppid()}, {process.status()}: {' '.join(process.cmdline())[:200]}\n"
    except psutil.NoSuchProcess:
        return f"--- pid {pid}: gone\n"
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return head + "(py-spy is not installed: no stack)\n"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run([tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=10)
        return head + (done.stdout or done.stderr)
    return head + "(py-spy did not answer)\n"


# ---- the driver's side


class _World:
    """The ranks of one world size, as the test process sees them."""

    def __init__(self, nursery: _Nursery, world_size: int) -> None:
        self.nursery = nursery
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=nursery.folder))
        self.pids, self.connections = nursery.fork(world_size, self.folder)
        self.seen_pids: set[int] = set(self.pids)
        port = self.connections[0].recv()
        for connection in self.connections[1:]:
            connection.send(port)
        for connection in self.connections:
            if not connection.poll(START_S):
                raise RankTimeout(f"a rank did not join its world of {world_size}\n{self.stacks()}")
            connection.recv()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[RankResult]:
        """Sends the call to all ranks and gathers what they answer."""
        call = pickle.dumps((list(sys.path), _reference(fn), SETTLE_S))
        payload = pickle.dumps(args)
        for connection in self.connections:
            connection.send((call, payload))
        results: dict[int, RankResult] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world_size:
            waiting = {c: r for r, c in enumerate(self.connections) if r not in results}
            ready = wait(list(waiting), timeout=0.2)
            self.seen_pids |= {pid for rank_pid in self.pids for pid in children_of(rank_pid)}
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    results[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    raise RankTimeout(f"rank {rank} died\n{self.story(results)}") from None
            if time.monotonic() > deadline:
                late = sorted(set(range(self.world_size)) - set(results))
                raise RankTimeout(f"ranks {late} not done after {timeout} s\n{self.stacks()}\n{self.story(results)}")
        return [results[rank] for rank in range(self.world_size)]

    def check_nothing_left(self, shm_before: set[str]) -> None:
        """Fails if a process or shared-memory file of the last run is still there after a moment."""

        def left() -> list[int]:
            return [pid for rank_pid in self.pids for pid in children_of(rank_pid)] + self.nursery.orphans()

        if not wait_until(lambda: not left(), SETTLE_S):
            stacks = "".join(describe(pid) for pid in left())
            raise AssertionError(f"processes outlived the run by {SETTLE_S} s:\n{stacks}\n{self.story({})}")
        if not wait_until(lambda: not leaked_shm_files(shm_before, self.seen_pids), SETTLE_S):
            raise AssertionError(f"left in /dev/shm: {sorted(leaked_shm_files(shm_before, self.seen_pids))[:10]}")

    def stacks(self) -> str:
        """Stacks of all threads of all processes of this world."""
        parts = []
        for rank, pid in enumerate(self.pids):
            dump = self.folder / f"stacks-{rank}"
            size = dump.stat().st_size if dump.exists() else 0
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            wait_until(lambda d=dump, s=size: d.exists() and d.stat().st_size > s, 2.0)
            time.sleep(0.1)  # let it finish writing
            parts.append(f"=== rank {rank}, pid {pid}\n{dump.read_text() if dump.exists() else '(no answer)'}")
            parts += [describe(child) for child in children_of(pid)]
        parts += [describe(orphan) for orphan in self.nursery.orphans()]
        return "\n".join(parts)

    def story(self, results: dict[int, RankResult]) -> str:
        """What ranks raised so far and what they printed."""
        parts = [f"=== rank {r.rank} raised\n{r.error.traceback}" for r in results.values() if r.error is not None]
        for rank in range(self.world_size):
            text = (self.folder / f"output-{rank}").read_text(errors="replace")[-3000:]
            parts += [f"=== output of rank {rank}\n{text}"] if text else []
        return "\n".join(parts)

    def close(self) -> None:
        """Ends the ranks and whatever they started."""
        for pid in [child for rank_pid in self.pids for child in children_of(rank_pid)] + self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self.connections:
            connection.close()
        wait_until(lambda: not any(map(is_alive, self.pids)), SETTLE_S)
        self.nursery.worlds.discard(self)
        for pid in self.nursery.orphans():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Nursery:
    """The clean process that ranks are forked from, as the test process sees it."""

    def __init__(self) -> None:
        self.marker = uuid.uuid4().hex
        self.folder = tempfile.mkdtemp(prefix="odb-tests-")
        self.worlds: set[_World] = set()
        self.listener = Listener(family="AF_UNIX", address=os.path.join(self.folder, "door"))
        env = os.environ | {MARKER: self.marker, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_import_path())}
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.listener.address)], env=env, start_new_session=True
        )
        self.control = self._accept()

    def fork(self, world_size: int, folder: Path) -> tuple[list[int], list[Connection]]:
        """New ranks; their pids and a connection to each, in order of rank."""
        self.control.send((world_size, str(folder), list(sys.path)))
        pids: list[int] = self.control.recv()
        connections: dict[int, Connection] = {}
        while len(connections) < world_size:
            connection = self._accept()
            connections[connection.recv()] = connection
        world_connections = [connections[rank] for rank in range(world_size)]
        return pids, world_connections

    def _accept(self) -> Connection:
        listening = self.listener._listener._socket  # type: ignore[attr-defined]  # Listener has no time limit of its own
        listening.settimeout(START_S)
        connection = self.listener.accept()
        assert isinstance(connection, Connection)
        return connection

    def orphans(self) -> list[int]:
        """Living processes of ours that descend from no living rank."""
        known = {self.process.pid}
        for world in self.worlds:
            for pid in world.pids:
                known.add(pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    known |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        found = []
        for pid in sorted(marked_pids(self.marker) - known):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not _is_tracker(pid):
                    found.append(pid)
        return found

    def close(self) -> None:
        """Ends everything."""
        self.listener.close()
        kill_marked(self.marker)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Worlds:
    """The worlds of this test session, made when first asked for."""

    def __init__(self) -> None:
        self._nursery: _Nursery | None = None
        self._worlds: dict[int, _World] = {}

    def get(self, world_size: int) -> _World:
        """The world of this size, made anew if need be."""
        if self._nursery is None:
            self._nursery = _Nursery()
        if world_size not in self._worlds:
            world = _World(self._nursery, world_size)
            self._nursery.worlds.add(world)
            self._worlds[world_size] = world
        return self._worlds[world_size]

    def discard(self, world_size: int) -> None:
        """Ends the world of this size, if there is one."""
        world = self._worlds.pop(world_size, None)
        if world is not None:
            world.close()

    def shutdown(self) -> None:
        """Ends all worlds and the nursery."""
        self._worlds.clear()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


_worlds = _Worlds()
shutdown = _worlds.shutdown
atexit.register(shutdown)


def _import_path() -> list[str]:
    return [path for path in sys.path if path]


def _reference(fn: Callable[..., Any]) -> tuple[str, str]:
    if "<" in fn.__qualname__:
        raise TypeError(f"run_ranks needs a module-level function, got {fn.__qualname__}")
    return fn.__module__, fn.__qualname__


# ---- the ranks' side


def _nursery_main(address: str) -> None:
    """Body of the nursery: forks worlds on request, buries its dead, and ends them all when the driver is gone."""
    import torch
    import torch._dynamo  # DistributedDataParallel imports it: once here, not once per rank
    import torch.distributed
    import torch.utils.data

    torch.set_num_threads(1)
    control = Client(address, family="AF_UNIX")
    gc.freeze()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not control.poll(0.1):
            continue
        try:
            world_size, folder, path = control.recv()
        except (EOFError, ConnectionResetError):
            kill_marked(os.environ[MARKER])
            return
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                control.close()
                _rank_main(address, rank, world_size, Path(folder), path)
            pids.append(pid)
        control.send(pids)


def _rank_main(address: str, rank: int, world_size: int, folder: Path, path: list[str]) -> None:
    """Body of a rank: joins its world, then runs one call after another. Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        dump = open(folder / f"stacks-{rank}", "a")  # noqa: SIM115 - lives as long as the process
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
        sys.path[:] = path
        connection = Client(address, family="AF_UNIX")
        connection.send(rank)
        _join_world(connection, rank, world_size)
        _serve(connection, rank, world_size)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _join_world(connection: Connection, rank: int, world_size: int) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    limit = timedelta(seconds=START_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=limit, wait_for_workers=False)
        connection.send(store.port)
        port = store.port
    else:
        port = connection.recv()
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=limit)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    connection.send("joined")


def _serve(connection: Connection, rank: int, world_size: int) -> None:
    threads = threading.active_count()
    while True:
        try:
            call, payload = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        path, reference, settle_s = pickle.loads(call)
        sys.path[:] = path
        result = _call(reference, payload, rank, world_size)
        gc.collect()
        if result.error is None and not wait_until(lambda: threading.active_count() <= threads, settle_s):
            names = [thread.name for thread in threading.enumerate()]
            text = f"threads outlived the run: {names}"
            result = RankResult(rank, None, RankError("ThreadLeak", text, text, ()), result.seconds)
        connection.send_bytes(_pickled(result))


def _call(reference: tuple[str, str], payload: bytes, rank: int, world_size: int) -> RankResult:
    start = time.monotonic()
    try:
        module, name = reference
        fn: Any = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
        returned = fn(rank, world_size, *pickle.loads(payload))
    except BaseException as error:
        described = _described(error)
        traceback.clear_frames(error.__traceback__)  # lets go of what the function held
        return RankResult(rank, None, described, time.monotonic() - start)
    return RankResult(rank, returned, None, time.monotonic() - start)


def _described(error: BaseException) -> RankError:
    return RankError(
        type_name=type(error).__name__,
        text=str(error),
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        bases=tuple(cls.__name__ for cls in type(error).__mro__),
        ranks=tuple(getattr(error, "ranks", ())),
    )


def _pickled(result: RankResult) -> bytes:
    """The result as bytes, or the reason why it can't travel: a mistake of the test's."""
    try:
        return pickle.dumps(result)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return pickle.dumps(RankResult(result.rank, None, RankError("PicklingError", text, text, ()), result.seconds))


# ---- whole programs


@dataclass
class Script:
    """A program that runs, or has run, in a process group of its own."""

    process: subprocess.Popen[str]
    marker: str
    started: float
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def returncode(self) -> int:
        """Exit status as `subprocess` gives it; negative: the signal that ended it."""
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def output(self) -> str:
        """Everything that it printed."""
        return "--- stdout\n" + "".join(self.stdout) + "--- stderr\n" + "".join(self.stderr)

    def pids(self) -> set[int]:
        """All its living processes, orphans included."""
        return marked_pids(self.marker)


@contextlib.contextmanager
def script(code: str, nproc: int = 0, timeout: float = 60.0, **env: str) -> Iterator[Script]:
    """Runs a program, `nproc` ranks of it under torchrun or one plain process if 0; kills what is left at the end.

    The program is a file, so that every start method can import it: guard its main part.
    """
    marker = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="odb-script-") as folder:
        file = Path(folder, "program.py")
        file.write_text(code)
        command = [sys.executable, "-u", str(file)]
        if nproc:
            run = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={nproc}"]
            command = [sys.executable, *run, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(file)]
        full = os.environ | {MARKER: marker, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        full |= {"PYTHONPATH": os.pathsep.join(_import_path())} | env
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=full, start_new_session=True, cwd=folder, **pipes)
        running = Script(process, marker, time.monotonic())
        readers = [
            threading.Thread(target=_read_lines, args=(process.stdout, running.stdout), daemon=True),
            threading.Thread(target=_read_lines, args=(process.stderr, running.stderr), daemon=True),
        ]
        for reader in readers:
            reader.start()
        watchdog = threading.Timer(timeout, kill_marked, (marker,))
        watchdog.start()
        try:
            yield running
        finally:
            watchdog.cancel()
            kill_marked(marker)
            process.wait()
            for reader in readers:
                reader.join(SETTLE_S)


def _read_lines(stream: Any, lines: list[str]) -> None:
    for line in stream:
        lines.append(line)


def finish(running: Script, timeout: float = 60.0) -> Script:
    """Waits for a program's end; fails the test, with stacks and output, if it does not come."""
    try:
        running.process.wait(timeout)
    except subprocess.TimeoutExpired:
        stacks = "".join(describe(pid) for pid in sorted(running.pids()))
        raise AssertionError(f"the program is not done after {timeout} s\n{stacks}\n{running.output}") from None
    running.seconds = time.monotonic() - running.started
    return running


def wait_for_line(running: Script, text: str, count: int = 1, timeout: float = 60.0) -> None:
    """Waits until a program has printed `count` lines that contain `text`."""

    def is_there() -> bool:
        return sum(text in line for line in list(running.stdout)) >= count

    if not wait_until(lambda: is_there() or running.process.poll() is not None, timeout) or not is_there():
        stacks = "".join(describe(pid) for pid in sorted(running.pids()))
        raise AssertionError(f"{count} lines with {text!r} did not come within {timeout} s\n{stacks}\n{running.output}")


def run_script(code: str, nproc: int = 0, timeout: float = 60.0, **env: str) -> Script:
    """Runs a program to its end; see `script`. Fails if it does not end in time or leaves a process behind."""
    with script(code, nproc, timeout + 2 * SETTLE_S, **env) as running:
        finish(running, timeout)
        if not wait_until(lambda: not running.pids(), SETTLE_S):
            stacks = "".join(describe(pid) for pid in sorted(running.pids()))
            raise AssertionError(f"processes outlived the program:\n{stacks}\n{running.output}")
    return running


if __name__ == "__main__":
    # Results must be instances of the importable module's classes, not of `__main__`'s.
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module("ranks")._nursery_main(sys.argv[1])
