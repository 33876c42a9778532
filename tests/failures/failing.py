"""Runs worlds of `program` in which something fails, and gathers what every rank saw and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranks

HERE = Path(__file__).parent
GONE_S = 10.0  # how long processes may take to go after the last rank has ended


@dataclass
class Result:
    """What a world left behind. Lists have one entry per rank."""

    event: dict[str, Any]
    reports: list[dict[str, Any] | None]  # None: the rank did not live to write one
    statuses: list[int | None]  # as `subprocess` gives them; None where torchrun keeps them to itself
    outputs: list[str]

    def __str__(self) -> str:
        parts = [f"event: {self.event}", f"statuses: {self.statuses}"]
        for rank, (report, output) in enumerate(zip(self.reports, self.outputs, strict=True)):
            parts.append(f"==== rank {rank}: {report}\n{output[-3000:]}")
        return "\n".join(parts)


def environment(marker: str) -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent), *(path for path in sys.path if path)])
    added = {ranks.MARKER: marker, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    dropped = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if name not in dropped} | added


class Launcher:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self.marker = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launcher.py")],
            env=environment(self.marker),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.answers: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.append(json.loads(line))

    def run(self, name: str, world_size: int, method: str, timeout: float) -> Result:
        """One world, from its start to when nothing is left of it."""
        before = ranks.shm_files(self.process.pid)
        with tempfile.TemporaryDirectory(prefix="odb-failures-") as folder:
            self.answers.clear()
            job = {"name": name, "method": method, "folder": folder, "port": free_port(), "world_size": world_size}
            assert self.process.stdin is not None
            self.process.stdin.write((json.dumps(job) + "\n").encode())
            self.process.stdin.flush()
            try:
                wait_and_wake(Path(folder), world_size, lambda: len(self.answers) == world_size, timeout)
                result = gathered(Path(folder), world_size)
                by_rank = {answer["rank"]: answer["status"] for answer in self.answers}
                result.statuses = [by_rank.get(rank) for rank in range(world_size)]
                self.check_nothing_left(before, result)
            finally:
                self.kill_ranks()
        return result

    def others(self) -> set[int]:
        return ranks.marked_pids(self.marker) - {self.process.pid}

    def check_nothing_left(self, shm_before: set[str], result: Result) -> None:
        if not ranks.wait_until(lambda: not self.others(), GONE_S):
            raise AssertionError("".join(ranks.describe(pid) for pid in self.others()) + str(result))
        left = ranks.shm_files(self.process.pid) - shm_before
        assert not left, f"left in /dev/shm: {left}\n{result}"

    def kill_ranks(self) -> None:
        deadline = time.monotonic() + GONE_S
        while (pids := self.others()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def close(self) -> None:
        ranks.kill_marked(self.marker)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def gathered(folder: Path, world_size: int) -> Result:
    """What the ranks wrote."""
    reports = [read_json(folder / f"report-{rank}.json") for rank in range(world_size)]
    files = [folder / f"output-{rank}" for rank in range(world_size)]
    outputs = [file.read_text(errors="replace") if file.exists() else "" for file in files]
    return Result(read_json(folder / "event.json") or {}, reports, [None] * world_size, outputs)


def wait_and_wake(folder: Path, world_size: int, is_over: Callable[[], bool], timeout: float) -> None:
    """Waits for the end of a world; processes that were stopped are woken once all other ranks have seen an error."""
    deadline, has_woken = time.monotonic() + timeout, False
    while not is_over():
        if time.monotonic() > deadline:
            raise AssertionError(f"not over after {timeout} s\n{gathered(folder, world_size)}")
        event = read_json(folder / "event.json") or {}
        if event.get("what") and not has_woken and len(list(folder.glob("seen-*"))) >= world_size - 1:
            has_woken = True
            for pid in json.loads(event["what"]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)


@contextlib.contextmanager
def torchrun(name: str, world_size: int, method: str, folder: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The same under torchrun, which is told to look at its ranks seldom: it ends all when one has ended."""
    marker = uuid.uuid4().hex
    run = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world_size}", "--monitor-interval=12"]
    logs = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, *run, *logs, str(HERE / "program.py"), name, method, folder]
    with open(Path(folder, "output-0"), "wb") as output:
        process = subprocess.Popen(
            command, env=environment(marker), stdout=output, stderr=output, start_new_session=True, cwd=folder
        )
        try:
            yield process, marker
        finally:
            ranks.kill_marked(marker)
            process.wait()


def run_under_torchrun(name: str, world_size: int, method: str, timeout: float) -> tuple[Result, int]:
    """A world under torchrun, and torchrun's own exit status."""
    before = ranks.shm_files()
    with tempfile.TemporaryDirectory(prefix="odb-failures-") as folder:
        with torchrun(name, world_size, method, folder) as (process, marker):
            wait_and_wake(Path(folder), world_size, lambda: process.poll() is not None, timeout)
            result, pids = gathered(Path(folder), world_size), {process.pid}
            gone = ranks.wait_until(lambda: not ranks.marked_pids(marker), GONE_S)
            stacks = "" if gone else "".join(ranks.describe(pid) for pid in ranks.marked_pids(marker))
            assert gone, f"processes outlived torchrun:\n{stacks}\n{result}"
            left = ranks.leaked_shm_files(before, pids)
        return result, int(process.returncode)
    assert not left
