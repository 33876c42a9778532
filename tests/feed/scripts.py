"""Runs the scripts beside it in sessions of their own, so that whatever they leave behind is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import odb

_ROOT = str(Path(odb.__file__).parents[1])


def _popen(script: Path, *args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": _ROOT, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(script), *args], stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True
    )


@contextmanager
def running_script(script: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """The script, running; at the end everything that it started is killed."""
    process = _popen(script, *args)
    try:
        yield process
    finally:
        for pid in alive_in_session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def run_script(script: Path, *args: str, timeout_s: float = 70) -> tuple[list[str], str]:
    """Lines of stdout, and stderr, of a script that ends by itself and leaves no process."""
    with running_script(script, *args) as process:
        out, err = process.communicate(timeout=timeout_s)
        await_empty_session(process.pid)
    return out.splitlines(), err


def alive_in_session(session: int) -> list[int]:
    """Processes of a session that have not ended (zombies have)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and _session_if_alive(name) == session:
            found.append(int(name))
    return found


def _session_if_alive(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[3])


def await_empty_session(session: int, timeout_s: float = 10.0) -> float:
    """Seconds until the session has no process left; fails after `timeout_s`."""
    start = time.monotonic()
    while left := alive_in_session(session):
        if time.monotonic() - start > timeout_s:
            raise AssertionError(f"still alive after {timeout_s} s: {[(pid, _command(pid)) for pid in left]}")
        time.sleep(0.02)
    return time.monotonic() - start


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "gone by now"
