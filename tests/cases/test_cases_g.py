"""Worker processes: small inputs on which systems of this kind failed."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
from scenarios import Spec, iterate
from torch.utils.data import Dataset

import odb
from odb.testing import LengthsDataset, assert_each_once, collate, make_sample, record

pytestmark = pytest.mark.timeout(120)

#: Within about a second on a free machine, start included; what failed in the reports took a minute to half an hour.
SOON_S = 15

KEEP_BATCHES = """
import os, resource
import odb
from odb.testing import LengthsDataset, collate

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    before = len(os.listdir("/proc/self/fd"))
    loader = odb.ODBDataLoader(LengthsDataset([10] * 600), token_budget=10, num_workers=2, collate_fn=collate)
    kept = list(loader)
    print("kept", len(kept), "files", len(os.listdir("/proc/self/fd")) - before)
"""


def test_g01_batches_can_be_kept_without_running_out_of_descriptors() -> None:
    done = ranks.run_script(KEEP_BATCHES)
    assert done.returncode == 0, done.output
    _, kept, _, files = done.stdout[-1].split()
    assert int(kept) == 600
    assert int(files) <= 50


# ---- G-02 and the other deaths


class Deadly(Dataset):
    """Kills the worker that makes sample 5."""

    def __init__(self, count: int, signal_number: int) -> None:
        self.count = count
        self.signal_number = signal_number

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            os.kill(os.getpid(), self.signal_number)
        return make_sample(index, 10)


def iterate_dataset(rank: int, world_size: int, dataset: Any, options: dict[str, Any]) -> int:
    with odb.ODBDataLoader(
        dataset, collate_fn=collate, **({"token_budget": 10, "num_workers": 2, "sharding": "static"} | options)
    ) as loader:
        return len(record(loader))


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGBUS, ("Bus error", "shared memory")), (signal.SIGKILL, ("Killed",))]
)
def test_g02_a_worker_killed_by_a_signal_is_an_error_on_all_ranks(number: int, words: tuple[str, ...]) -> None:
    first, second = ranks.run_ranks(2, iterate_dataset, Deadly(12, number), {}, timeout=20)
    assert first.error is not None and second.error is not None
    assert first.error.type_name == "PeerFailedError" and first.error.ranks == (1,)
    for error in (first.error, second.error):
        assert all(word in error.text for word in words), error.text
    assert max(first.seconds, second.seconds) < SOON_S


class ExitsQuietly(Deadly):
    """Ends the worker that makes sample 5, with a status."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            os._exit(self.signal_number)
        return make_sample(index, 10)


def test_g02_a_worker_that_exits_is_an_error_on_all_ranks() -> None:
    first, second = ranks.run_ranks(2, iterate_dataset, ExitsQuietly(12, 23), {}, timeout=20)
    assert first.error is not None and second.error is not None
    assert first.error.type_name == "PeerFailedError" and first.error.ranks == (1,)
    assert "worker" in second.error.text and "exited unexpectedly" in second.error.text


def collate_process() -> int:
    """Pid of this process's only child that is not one of `multiprocessing`'s own."""
    (pid,) = ranks.children_of(os.getpid(), recursive=False)
    return pid


def kill_collate_process(rank: int, world_size: int, spec: Spec) -> str:
    """Rank 1 kills its collate process after three steps; what each rank then sees."""
    with spec.loader(rank, world_size) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        if rank == 1:
            os.kill(collate_process(), signal.SIGKILL)
        for _ in batches:
            pass
    return "finished"


def test_a_killed_collate_process_is_an_error_on_all_ranks() -> None:
    spec = Spec([10] * 400, 10, num_workers=2, options={"max_steps_per_round": 4, "window": 8})
    first, second = ranks.run_ranks(2, kill_collate_process, spec, timeout=20)
    assert first.error is not None and second.error is not None
    assert second.error.type_name == "ProcessDied" and "SIGKILL" in second.error.text
    assert "ExchangeError" in first.error.bases and first.error.ranks == (1,) and "rank 1" in first.error.text
    assert max(first.seconds, second.seconds) < SOON_S


# ---- G-04, G-05

LONG_RUN = """
import sys, time
import odb
from odb.testing import LengthsDataset, collate

if __name__ == "__main__":
    loader = odb.ODBDataLoader(
        LengthsDataset([1000] * 100_000), token_budget=1000, num_workers=int(sys.argv[1]) if sys.argv[1:] else 4,
        collate_fn=collate,
    )
    for number, batch in enumerate(loader):
        print("step", number, flush=True)
        time.sleep(0.05)
"""


def clean_end(running: ranks.Script, sent: float, limit: float) -> None:
    """The program ends within `limit` seconds of a signal, and all its processes with it."""
    running.process.wait(limit)
    assert ranks.wait_until(lambda: not running.pids(), max(0.0, limit - (time.monotonic() - sent))), running.output


def test_g04_ctrl_c_ends_everything_with_one_traceback() -> None:
    with ranks.script(LONG_RUN, timeout=50) as running:
        ranks.wait_for_line(running, "step", 3)
        os.killpg(running.process.pid, signal.SIGINT)
        clean_end(running, time.monotonic(), 5)
    assert running.returncode in (-signal.SIGINT, 130), running.output
    errors = "".join(running.stderr)
    assert errors.count("Traceback") == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert "Fatal Python error" not in errors


def test_g04_sigterm_to_the_main_process_ends_everything() -> None:
    with ranks.script(LONG_RUN, timeout=50) as running:
        ranks.wait_for_line(running, "step", 3)
        running.process.terminate()
        clean_end(running, time.monotonic(), 5)
    assert running.returncode in (-signal.SIGTERM, 143), running.output
    errors = "".join(running.stderr)
    assert "Traceback" not in errors and "Fatal Python error" not in errors, errors


def test_g05_nothing_outlives_a_killed_main_process() -> None:
    before = ranks.shm_files()
    with ranks.script(LONG_RUN, timeout=50) as running:
        ranks.wait_for_line(running, "step", 3)
        pids = running.pids()
        assert len(pids) >= 6  # main, collate process, four workers
        running.process.kill()
        clean_end(running, time.monotonic(), 10)

        def left() -> set[str]:  # under fork, semaphores lose their name when made: those here are other programs'
            return {name for name in ranks.leaked_shm_files(before, pids) if not name.startswith("sem.")}

        assert ranks.wait_until(lambda: not left(), 5), left()


LEFT_OPEN = """
import odb
from odb.testing import LengthsDataset, collate

if __name__ == "__main__":
    loader = odb.ODBDataLoader(LengthsDataset([10] * 1000), token_budget=10, num_workers=2, collate_fn=collate, {more})
    batches = iter(loader)
    next(batches)
    next(batches)
    print("leaving")
"""


@pytest.mark.parametrize("more", ["", "persistent_workers=True", "multiprocessing_context='spawn'"])
def test_the_interpreter_exits_quietly_with_an_open_epoch(more: str) -> None:
    done = ranks.run_script(LEFT_OPEN.replace("{more}", more))
    assert done.returncode == 0, done.output
    assert "".join(done.stdout).strip() == "leaving"
    errors = "".join(done.stderr)
    if "spawn" in more:  # workers that were still importing are killed; what they shared is cleaned up with a word
        errors = "".join(line for line in done.stderr if "resource_tracker" not in line)
    assert errors.strip() == ""


# ---- G-07


def many_loaders(rank: int, world_size: int, spec: Spec, count: int) -> tuple[int, list[set[int]]]:
    """Builds and exhausts loaders, two epochs each, while a thread takes and releases the logging lock."""
    stop, pids, num_epochs = threading.Event(), [], 0
    handler = logging.StreamHandler(open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the handler
    log = logging.getLogger("noise")
    log.propagate = False
    log.addHandler(handler)

    def make_noise() -> None:
        while not stop.is_set():
            log.warning("noise")

    noise = threading.Thread(target=make_noise)
    noise.start()
    try:
        for _ in range(count):
            with spec.loader(rank, world_size) as loader:
                collators = set()
                for _ in range(2):
                    assert_each_once([record(loader)], range(len(spec.lengths)))
                    collators.add(collate_process())
                    num_epochs += 1
                pids.append(collators)
    finally:
        stop.set()
        noise.join()
        handler.stream.close()
    return num_epochs, pids


def test_g07_forking_beside_a_busy_thread_never_deadlocks() -> None:
    ((num_epochs, pids),) = ranks.values(1, many_loaders, Spec([10] * 8, 40, num_workers=1), 20, timeout=50)
    assert num_epochs == 40
    assert all(len(collators) == 1 for collators in pids), "the collate process is made once, not once per epoch"
    assert len(set.union(*pids)) == 20


# ---- G-08


def lambdas(rank: int, world_size: int) -> list[tuple[str, str, str, str, float]]:
    """What each callable argument gives as a lambda under start methods that pickle."""
    out = []
    for method in ("spawn", "forkserver"):
        for name in (
            "collate_fn",
            "worker_init_fn",
            "length_fn",
            "loss_tokens_fn",
            "patches_fn",
            "cost_fn",
            "filler_fn",
        ):
            fn = (lambda rows, width: rows * width) if name == "cost_fn" else (lambda *args: 1)
            options: dict[str, Any] = {name: fn, "num_workers": 1, "multiprocessing_context": method}
            start = time.monotonic()
            try:
                with odb.ODBDataLoader(LengthsDataset([5] * 4), token_budget=10, **options) as loader:
                    next(iter(loader))
                out.append((method, name, "", "no error", time.monotonic() - start))
            except Exception as error:
                out.append((method, name, type(error).__name__, str(error), time.monotonic() - start))
    return out


def test_g08_what_cannot_be_pickled_is_named() -> None:
    for rank_errors in ranks.values(2, lambdas, timeout=50):
        assert len(rank_errors) == 14
        for method, name, kind, text, seconds in rank_errors:
            assert kind == "ConfigError" and name in text and "top of a module" in text, (method, name, kind, text)
            assert seconds < SOON_S


def lambda_under_fork(rank: int, world_size: int) -> int:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "sharding": "static"}
    collate_fn = lambda samples: collate(samples)  # noqa: E731 - that it is one is the point
    with odb.ODBDataLoader(LengthsDataset([5] * 4), token_budget=10, collate_fn=collate_fn, **options) as loader:
        return len(record(loader))


def test_g08_lambdas_work_under_fork_as_with_a_plain_loader() -> None:
    assert ranks.values(2, lambda_under_fork) == [1, 1]


# ---- G-09


class ManyObjects(Dataset):
    """Holds 200,000 small objects, so that reference counts touch many pages."""

    def __init__(self) -> None:
        self.objects = [{"n": i} for i in range(200_000)]

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> dict[str, Any]:
        taken = [self.objects[(index * 167 + k) % len(self.objects)]["n"] for k in range(500)]
        return make_sample(index, 10) | {"taken": len(taken)}


def unique_memory(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Unique bytes of this process and of all its children at the end of each of three epochs of 300 steps."""
    out = []
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "max_samples": 4}
    with odb.ODBDataLoader(ManyObjects(), token_budget=1000, collate_fn=collate, **options) as loader:
        for _ in range(3):
            assert len(record(loader)) == 300
            here = psutil.Process()
            children = sum(child.memory_full_info().uss for child in here.children(recursive=True))
            out.append((here.memory_full_info().uss, children))
    return out


@pytest.mark.soak
def test_g09_memory_does_not_grow_over_epochs() -> None:
    ((first, _, third),) = ranks.values(1, unique_memory, timeout=120)
    assert third[0] <= 1.05 * first[0]
    assert third[1] <= 1.05 * first[1]


# ---- a rank that vanishes

TWO_RANKS = """
import os, sys, time
import multiprocessing as mp
import torch.distributed as dist
import odb
from odb.testing import LengthsDataset, collate

def say(line):
    os.write(1, (line + "\\n").encode())  # in one piece, whoever else writes

def body(rank, door):
    store = dist.FileStore(door, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    loader = odb.ODBDataLoader(
        LengthsDataset([10] * 100_000), token_budget=10, num_workers=1, collate_fn=collate,
        window=8, max_steps_per_round=4,
    )
    for number, batch in enumerate(loader):
        say(f"step of {rank} {number} {os.getpid()}")
        time.sleep(0.02)

def guarded(rank, door):
    try:
        body(rank, door)
    except BaseException as error:
        said = str(error).splitlines()[0]
        say(f"rank {rank} saw {type(error).__name__} {getattr(error, 'ranks', ())}: {said}")

if __name__ == "__main__":
    ranks = [mp.get_context("fork").Process(target=guarded, args=(rank, os.path.abspath("door"))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_noticed_by_the_others(victim: int) -> None:
    with ranks.script(TWO_RANKS, timeout=50) as running:
        for rank in range(2):
            ranks.wait_for_line(running, f"step of {rank}", 3)
        pid = next(int(line.split()[-1]) for line in running.stdout if f"step of {victim}" in line)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ranks.wait_for_line(running, f"rank {1 - victim} saw", timeout=20)
        seconds = time.monotonic() - killed
        clean_end(running, killed, 20)
    (line,) = [line for line in running.stdout if "saw" in line]
    assert f"PeerLostError ({victim},)" in line or f"PeerFailedError ({victim},)" in line, running.output
    assert f"rank {victim}" in line.split(":", 1)[1]
    assert seconds < SOON_S, seconds


UNDER_TORCHRUN = """
import os
import torch.distributed as dist
import odb
from odb.testing import LengthsDataset, collate, record

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dataset = LengthsDataset([10 + i % 7 for i in range(60)], fail_at=[5] if FAIL else [])
    with odb.ODBDataLoader(dataset, token_budget=40, num_workers=1, collate_fn=collate, shuffle=True) as loader:
        for _ in range(2):
            steps = record(loader)
            os.write(1, f"steps {len(steps)}\\n".encode())
    dist.destroy_process_group()
"""


def test_a_program_under_torchrun_runs_equal_steps_and_ends_with_status_0() -> None:
    done = ranks.run_script(UNDER_TORCHRUN.replace("FAIL", "False"), nproc=2)
    assert done.returncode == 0, done.output
    steps = [line for line in done.stdout if line.startswith("steps")]
    assert len(steps) == 4 and len(set(steps)) <= 2, steps  # two epochs, the same on both ranks


def test_a_program_under_torchrun_fails_with_the_reason_and_leaves_nothing() -> None:
    done = ranks.run_script(UNDER_TORCHRUN.replace("FAIL", "True"), nproc=2)
    assert done.returncode == 1, done.output
    assert "bad sample 5" in "".join(done.stderr)


def test_left_over_files_in_shared_memory_are_looked_for() -> None:
    before = ranks.shm_files()
    name = Path("/dev/shm", f"torch_{os.getpid()}_odb_test")
    name.write_bytes(b"x")
    try:
        assert ranks.leaked_shm_files(before, {os.getpid()}) == {name.name}
    finally:
        name.unlink()


def test_a_failing_dataset_leaves_a_loader_that_says_so() -> None:
    spec = Spec([10] * 12, 10, num_workers=0, data={"fail_at": (5,)})
    with pytest.raises(ValueError, match="bad sample 5"):
        iterate(0, 1, spec)
    outcome = iterate(0, 1, spec.but(options={"on_sample_error": "skip"}))
    assert_each_once([outcome.steps], [i for i in range(12) if i != 5])
    assert outcome.stats.rejected["sample_error"] == 1
