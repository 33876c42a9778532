"""Nobody stays behind, whoever ends first; nobody waits for ever."""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import alive_in_session, await_empty_session, run_script, running_script

import odb
from odb.errors import ConfigError, ProcessDied
from odb.feed import supervise
from odb.feed.supervise import ChildWatch, at_exit, can_use_signal, describe_exit, guard_against_orphaning, start, stop
from odb.testing import LengthsDataset

TRAINING = Path(__file__).with_name("training.py")
METHODS = ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.soak)]  # much as spawn, and as slow

NUM_WORKERS = {"fork": "2", "spawn": "1", "forkserver": "2"}  # each spawned process takes seconds to import PyTorch

pytestmark = pytest.mark.timeout(90)
each_method = pytest.mark.parametrize("method", METHODS)


def pids_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    pids: dict[str, Any] = json.loads(line)
    return pids


@each_method
def test_a_killed_main_process_leaves_nobody_not_even_who_never_looks(method: str) -> None:
    with running_script(TRAINING, method, "stuck") as process:
        pids = pids_of(process)
        assert {process.pid, pids["collate"], *pids["workers"]} <= set(alive_in_session(process.pid))
        process.kill()
        process.wait(5)
        await_empty_session(process.pid)


@each_method
def test_a_killed_collate_process_leaves_no_worker_and_is_noticed(method: str) -> None:
    with running_script(TRAINING, method, "until closed", NUM_WORKERS[method]) as process:
        pids = pids_of(process)
        os.kill(pids["collate"], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        await_empty_session(process.pid)
    assert "closed: killed by signal SIGKILL" in out and said(err) == "" and process.returncode == 0


@each_method
@pytest.mark.parametrize("behaviour", ["exit", "child"])
def test_a_script_that_closes_nothing_exits_promptly(method: str, behaviour: str) -> None:
    out, err = run_script(TRAINING, method, behaviour, NUM_WORKERS[method])
    assert "exit code 0" in out and said(err) == ""
    assert behaviour == "exit" or out[-1] == "trainer: 0"


def test_a_script_that_fails_exits_with_its_own_traceback_alone() -> None:
    out, err = run_script(TRAINING, "fork", "raise")
    assert "exit code 0" in out and err.count("Traceback") == 1 and err.endswith("LookupError: training failed\n")


@each_method
def test_ctrl_c_leaves_nobody_and_one_traceback(method: str) -> None:
    with running_script(TRAINING, method, "run", NUM_WORKERS[method]) as process:
        pids_of(process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        await_empty_session(process.pid)
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1 and said(err).endswith("KeyboardInterrupt\n"), err


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ctrl_c_while_the_child_starts_strikes_the_main_process_alone(method: str) -> None:
    with running_script(TRAINING, method, "at once", "1") as process:
        pids_of(process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
        await_empty_session(process.pid)
    assert err.count("Traceback") == 1 and said(err).endswith("KeyboardInterrupt\n"), err


def test_sigterm_to_the_main_process_leaves_nobody() -> None:
    with running_script(TRAINING, "fork", "run") as process:
        pids_of(process)
        process.terminate()
        _, err = process.communicate(timeout=60)
        await_empty_session(process.pid)
    assert process.returncode == -signal.SIGTERM and "Traceback" not in err


def test_a_process_created_in_a_thread_outlives_the_thread() -> None:
    out, err = run_script(TRAINING, "fork", "thread")
    assert "outlived its thread" in out and "exit code 0" in out, err


def said(err: str) -> str:
    """stderr without what Python's resource tracker says of the semaphores of killed processes, which it cleans up."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if "resource_tracker" not in line)


def sleep_for_a_minute(ready: Any = None, ignore: bool = False) -> None:
    if ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if ready is not None:
        ready.set()
    time.sleep(60)


def die_by(number: int) -> None:
    faulthandler.disable()  # pytest's; it would print the stack
    os.kill(os.getpid(), number)
    time.sleep(60)


@pytest.mark.parametrize(("ignore", "how"), [(False, "SIGTERM"), (True, "SIGKILL")])
def test_stop_asks_then_forces(ignore: bool, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_TERMINATE_S", 0.2)
    ready = multiprocessing.get_context("fork").Event()
    process = start("fork", sleep_for_a_minute, (ready, ignore), "sleeper")
    assert not process.daemon and describe_exit(process) == "still running"
    assert ready.wait(20)
    assert stop(process, 0.05).startswith(f"killed by signal {how}")
    assert stop(process, 0.05).startswith(f"killed by signal {how}")


def test_stop_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    process = multiprocessing.get_context("fork").Process(target=print)
    assert "could not be stopped" in stop(process, 0.01)  # never started
    assert "could not be stopped" in caplog.text


@pytest.mark.parametrize(
    ("target", "args", "text"),
    [
        (sys.exit, (3,), "exit code 3"),
        (sys.exit, (0,), "exit code 0"),
        (die_by, (signal.SIGBUS,), "killed by signal SIGBUS (usually shared memory is full: see `df -h /dev/shm`"),
        (die_by, (signal.SIGKILL,), "killed by signal SIGKILL (usually by the kernel because memory ran out"),
        (die_by, (signal.SIGUSR1,), "killed by signal SIGUSR1"),
        (os._exit, (supervise.ORPHANED,), "exit code 113 (the process that started it was gone)"),
    ],
)
def test_exits_are_described(target: Any, args: tuple[Any, ...], text: str) -> None:
    process = start("fork", target, args, "short-lived")
    assert stop(process, 20).startswith(text)


class Options:
    def __init__(self, fn: Any) -> None:
        self.fn = fn


def watched(method: str, target: Any, args: tuple[Any, ...], num_workers: int = 1) -> tuple[ChildWatch, Any]:
    """A process as `DataLoader` starts its workers, and whoever watches it."""
    process = multiprocessing.get_context(method).Process(target=target, args=args)
    process.start()
    watch = ChildWatch()
    watch.install(num_workers)
    return watch, process


@pytest.fixture
def same_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@each_method
@pytest.mark.usefixtures("same_handler")
def test_a_worker_that_dies_is_named_though_no_signal_may_come(method: str) -> None:
    watch, process = watched(method, time.sleep, (60,))
    watch.check()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match=rf"worker \(pid {process.pid}\) died \(Killed\): killed by signal SIGKILL"):
        while process.exitcode is None:
            watch.check()
        watch.check()


@pytest.mark.usefixtures("same_handler")
def test_a_worker_that_is_done_is_no_error() -> None:
    watch, process = watched("fork", time.sleep, (0.2,))
    while process.exitcode is None:
        watch.check()
    for _ in range(3):
        watch.check()


@pytest.mark.usefixtures("same_handler")
def test_workers_that_are_ended_on_purpose_are_no_error() -> None:
    watch, process = watched("fork", time.sleep, (60,))
    watch.release()
    process.kill()
    process.join()
    watch.check()


@pytest.mark.usefixtures("same_handler")
def test_without_workers_the_training_process_keeps_its_own_handler() -> None:
    def own(number: int, frame: Any) -> None:
        """As PyTorch's of another loader."""

    signal.signal(signal.SIGCHLD, own)
    with odb.ODBDataLoader(LengthsDataset([5] * 4), token_budget=10, num_workers=0) as loader:
        assert len(list(loader)) == 2
        assert signal.getsignal(signal.SIGCHLD) is own


@pytest.mark.usefixtures("same_handler")
def test_workers_that_died_before_anybody_looked_are_counted() -> None:
    watch, process = watched("fork", time.sleep, (60,), num_workers=3)
    with pytest.raises(ProcessDied, match="2 of 3 DataLoader workers died at their start"):
        watch.check()
    process.kill()
    process.join()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_argument_that_cannot_be_pickled_is_named(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"loader: args\[1\]\['o'\]\.fn is <function.*<lambda>.*'{method}'.*module"):
        start(method, print, (1, {"o": Options(lambda: 0)}), "loader")


def test_a_lambda_works_under_fork() -> None:
    assert stop(start("fork", lambda: sys.exit(5), (), "lambda"), 20) == "exit code 5"


def run_as_daemon(queue: Any) -> None:
    try:
        start("fork", print, (), "loader")
    except ConfigError as error:
        queue.put(str(error))


def test_a_daemonic_trainer_is_told_why_it_may_not_have_children() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=run_as_daemon, args=(queue,), daemon=True)
    process.start()
    assert "daemon=False" in queue.get()
    process.join(20)


def test_the_signal_is_used_where_the_creating_thread_lives_on() -> None:
    answers = []
    thread = threading.Thread(target=lambda: answers.append(can_use_signal("fork")))
    thread.start()
    thread.join(20)
    assert (
        answers == [False] and can_use_signal("fork") and can_use_signal("spawn") and not can_use_signal("forkserver")
    )


def guard_then_sleep(parent_pid: int, use_signal: bool, hide: tuple[str, ...], ready: Any) -> None:
    """`hide`: names of `os` that this system is to lack."""
    for name in hide:
        delattr(os, name)
    guard_against_orphaning(parent_pid, use_signal=use_signal)
    if ready is not None:
        ready.set()
    time.sleep(60)


@pytest.mark.parametrize("hide", [(), ("pidfd_open",)], ids=["pidfd", "polling"])
def test_a_parent_that_is_no_direct_parent_is_watched(hide: tuple[str, ...]) -> None:
    context = multiprocessing.get_context("fork")
    parent = start("fork", sleep_for_a_minute, (), "parent by adoption")
    ready = context.Event()
    child = start("fork", guard_then_sleep, (parent.pid, True, hide, ready), "child")
    assert ready.wait(20)
    child.join(0.7)
    assert child.exitcode is None
    parent.kill()  # it is a zombie until it is joined: that is gone enough
    child.join(5)
    assert child.exitcode == supervise.ORPHANED
    parent.join(5)


@pytest.mark.parametrize("hide", [(), ("pidfd_open",)], ids=["pidfd", "polling"])
@pytest.mark.parametrize("use_signal", [True, False])
def test_a_parent_that_is_gone_already_ends_the_child_at_once(hide: tuple[str, ...], use_signal: bool) -> None:
    gone = start("fork", sys.exit, (0,), "gone")
    gone.join(20)
    child = start("fork", guard_then_sleep, (gone.pid, use_signal, hide, None), "child")
    child.join(5)
    assert child.exitcode == supervise.ORPHANED


class Closer:
    def __init__(self, calls: list[str], name: str = "closer") -> None:
        self.calls, self.name = calls, name

    def close(self) -> None:
        self.calls.append(self.name)


@pytest.fixture
def no_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_callbacks", {})


@pytest.mark.usefixtures("no_callbacks")
def test_callbacks_run_last_in_first_out_and_survive_each_other(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    one, two = Closer(calls, "one"), Closer(calls, "two")
    at_exit(one.close)
    at_exit(lambda: 1 // 0)
    withdraw = at_exit(lambda: calls.append("withdrawn"))
    at_exit(two.close)
    withdraw()
    withdraw()
    supervise._run_callbacks()
    supervise._run_callbacks()
    assert calls == ["two", "one"] and "ZeroDivisionError" in caplog.text


@pytest.mark.usefixtures("no_callbacks")
def test_a_callback_keeps_its_object_from_nothing() -> None:
    calls: list[str] = []
    closer = Closer(calls)
    at_exit(closer.close)
    del closer
    gc.collect()
    assert supervise._callbacks == {}


def run_callbacks_and_stop(process: Any, queue: Any) -> None:
    supervise._run_callbacks()
    queue.put(stop(process, 0.01))


@pytest.mark.usefixtures("no_callbacks")
def test_a_forked_child_touches_nothing_of_its_parent() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    sleeper = start("fork", sleep_for_a_minute, (), "sleeper")
    at_exit(sleeper.kill)
    child = start("fork", run_callbacks_and_stop, (sleeper, queue), "child")
    assert queue.get() == "sleeper belongs to another process"
    child.join(20)
    sleeper.join(0.2)
    assert sleeper.exitcode is None
    supervise._run_callbacks()
    sleeper.join(20)
    assert sleeper.exitcode == -signal.SIGKILL
