"""What one rank runs in the tests of failures: a small training program in which something goes wrong.

It is run with the environment that torchrun gives (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), by `launcher` or by
torchrun itself. What the rank saw, and what was left of its loader, goes into `report-<rank>.json`; then the error goes
on its way, so that exit status and last words are those of any program.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import odb
from odb.exchange import _private, rendezvous
from odb.feed import channel
from odb.testing import collate, make_sample

TIMEOUT_S = 2.0
#: Processes that have to import everything start seconds apart on a busy machine, which must not pass for the failure.
SLOW_START_S = {"spawn": 15.0, "forkserver": 15.0}
NUM_SAMPLES = 600
#: Bytes of the memory which processes share from their start, see `small_blocks`, and tokens of a batch beyond it.
SMALL_BLOCK = 1 << 20
LARGE = SMALL_BLOCK // 24 + 1000
LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)
LEFT_S = 5.0  # how long what a loader started may take to go after its error
#: One sample a step, short rounds, a small window: everything happens while there is more to come.
SMALL = {"token_budget": 10, "window": 8, "max_steps_per_round": 4, "prefetch_factor": 4}


# ---- the parts of a program that fail


def happened(folder: str, what: str = "") -> None:
    """Notes when the failure struck; the clock is the same in all processes."""
    temporary = Path(folder, f"event.{os.getpid()}")
    temporary.write_text(json.dumps({"at": time.monotonic(), "pid": os.getpid(), "what": what}))
    temporary.rename(Path(folder, "event.json"))


@dataclass
class Bad:
    """Which one something happens to: what holds sample `index`, or whatever comes after `number` others in an epoch."""

    index: int = -1
    number: int = -1
    epoch: int = 0
    now: int = 0
    so_far: int = 0

    def begin(self, epoch: int) -> None:
        self.now, self.so_far = epoch, 0

    def is_next(self, indices: list[int]) -> bool:
        self.so_far += 1
        if self.number < 0:
            return self.index in indices
        return self.now == self.epoch and self.so_far > self.number


@dataclass
class Data(Dataset[Any]):
    """Samples of equal length; making the one that is `bad` does what `deed` says."""

    folder: str
    bad: Bad
    deed: str = ""
    count: int = NUM_SAMPLES
    length: int = 10

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.bad.begin(epoch)

    def __getitem__(self, index: int) -> Any:
        if self.deed and self.bad.is_next([index]):
            happened(self.folder)
            DEEDS[self.deed]()
        return make_sample(index, self.length)


def raise_an_error() -> None:
    raise ValueError("bad sample, says the dataset")


def time_out() -> None:
    raise TimeoutError("the socket timed out, says the dataset")


def raise_a_local_class() -> None:
    """As clients of web services do, which make their exceptions' classes when they run."""

    class NoSuchKeyError(Exception):
        pass

    raise NoSuchKeyError("not in the bucket, says the dataset")


def exit_as_if_all_were_well() -> None:
    sys.exit(0)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def use_up_descriptors() -> None:
    """Opens files until no more may be open, as a dataset does that never closes them."""
    soft = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    LEAKED.extend(open(os.devnull) for _ in range(100))  # noqa: SIM115 - never to be closed


LEAKED: list[Any] = []
DEEDS: dict[str, Callable[[], None]] = {
    "raise": raise_an_error,
    "time out": time_out,
    "local class": raise_a_local_class,
    "kill": kill_this_process,
    "descriptors": use_up_descriptors,
}


@dataclass
class BadCollate:
    """Collates until it meets what is `bad`."""

    folder: str
    bad: Bad
    deed: str

    def __call__(self, samples: list[Any]) -> Any:
        if self.bad.is_next([int(sample["id"]) for sample in samples]):
            happened(self.folder)
            COLLATE_DEEDS[self.deed]()
        return collate(samples)


def raise_in_collate() -> None:
    raise KeyError("no such field, says collate_fn")


def forbid_large_files() -> None:
    """From now on memory of its own is refused to a batch (`ulimit -f`)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


COLLATE_DEEDS = {
    "raise": raise_in_collate,
    "exit": exit_as_if_all_were_well,
    "kill": kill_this_process,
    "descriptors": use_up_descriptors,
    "memory": forbid_large_files,
}


class EndlessThenRaises(IterableDataset[Any]):
    """A stream that breaks on one rank, after some samples."""

    def __init__(self, folder: str, rank: int, breaks: bool) -> None:
        self.folder, self.rank, self.breaks = folder, rank, breaks

    def __iter__(self) -> Any:
        worker = get_worker_info()
        for number in range(10**9):
            if self.breaks and number == 40 and (worker is None or worker.id == 0):
                happened(self.folder)
                raise ConnectionError("the stream broke off, says the dataset")
            yield make_sample(number, 10)


# ---- what the culprit does between two of its steps


def children() -> list[int]:
    """Pids of all descendants of this process."""
    found, todo = [], [os.getpid()]
    while todo:
        parent = todo.pop()
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = entry.read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent and fields[0] not in "ZX":
                    found.append(int(entry.parent.name))
                    todo.append(int(entry.parent.name))
    return found


def collate_process(loader: Any) -> int:
    return int(loader._backend.pid)


def kill_collate_process(loader: Any, folder: str) -> None:
    happened(folder)
    os.kill(collate_process(loader), signal.SIGKILL)


def kill_own_process(loader: Any, folder: str) -> None:
    happened(folder)
    kill_this_process()


def stop_all_processes(loader: Any, folder: str) -> None:
    """As Ctrl-Z on one host. Somebody else wakes them."""
    happened(folder, json.dumps([*children(), os.getpid()]))
    for pid in [*children(), os.getpid()]:
        os.kill(pid, signal.SIGSTOP)


def stop_training_process(loader: Any, folder: str) -> None:
    happened(folder, json.dumps([os.getpid()]))
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_collate_process(loader: Any, folder: str) -> None:
    happened(folder, json.dumps([collate_process(loader)]))
    os.kill(collate_process(loader), signal.SIGSTOP)


def pause(loader: Any, folder: str) -> None:
    happened(folder)
    time.sleep(3 * TIMEOUT_S)


def raise_in_the_loop(loader: Any, folder: str) -> None:
    happened(folder)
    raise FloatingPointError("the loss is NaN, says the training loop")


def interrupt(loader: Any, folder: str) -> None:
    """Ctrl-C, to all processes of this rank, as a terminal does."""
    happened(folder)
    for pid in [*children(), os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    time.sleep(5)  # the interpreter raises in here


def leave_no_descriptors(loader: Any, folder: str) -> None:
    """The training process itself may open no further file."""
    happened(folder)
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 1
    for fd in range(soft):  # the gaps too
        with contextlib.suppress(OSError):
            os.fstat(fd)
            continue
        os.dup2(0, fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def fill_shared_memory(loader: Any = None, folder: str = "") -> None:
    """A /dev/shm without room, for this process and its children alone."""
    happened(folder)
    with open("/dev/shm/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


# ---- what the culprit does before it makes its loader


def small_shared_memory(folder: str) -> None:
    """A /dev/shm of its own, of 64 KiB; needs the right to mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0
    if not done or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k,mode=1777") != 0:
        raise SystemExit("can't mount")


def full_shared_memory(folder: str) -> None:
    small_shared_memory(folder)
    fill_shared_memory(folder=folder)


def small_blocks(folder: str) -> None:
    """Batches that do not fit, and are handed over by a descriptor of their own, need not be huge."""
    channel.BLOCK_BYTES = SMALL_BLOCK


def lose_the_store(folder: str) -> None:
    """Where this rank looks for the ranks' meeting point, nobody listens: a firewall, a wrong interface."""
    import odb.loader

    def misled(**kwargs: Any) -> Any:
        address = rendezvous.rendezvous(**kwargs)
        assert address is not None
        happened(folder)
        return replace(address, port=1)

    odb.loader.rendezvous = misled


def no_descriptors_from_the_start(folder: str) -> None:
    happened(folder)
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def die_before_the_loader(folder: str) -> None:
    time.sleep(0.3)  # the others wait for this rank by then; earlier or later is an error as well
    happened(folder)
    kill_this_process()


def die_while_the_loader_starts(folder: str) -> None:
    def die() -> None:
        happened(folder)
        kill_this_process()

    threading.Timer(0.1, die).start()


# ---- what the culprit does once it has its loader


def raise_before_the_loop(folder: str) -> None:
    time.sleep(0.3)  # the others wait for this rank by then; earlier or later is an error as well
    happened(folder)
    raise MemoryError("the model does not fit, says the program")


# ---- the table


@dataclass(frozen=True)
class Sees:
    """What a rank must see: one of these exceptions with all of these words; none where nothing is to happen."""

    types: tuple[str, ...]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """One way to fail. `{c}` in a text is the culprit's rank; a peer's error names it in `ranks` as well."""

    culprit: Sees | None  # None: it does not live to see anything
    peers: Sees
    limit_s: float = 5.0  # from the event to the last rank's error
    data: str = ""  # deed of the culprit's dataset at one index
    collate: str = ""  # deed of its collate_fn
    at_step: Callable[[Any, str], None] | None = None
    before: Callable[[str], None] | None = None
    at_start: Callable[[str], None] | None = None
    length: int = 10
    stream: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    of_culprit: dict[str, Any] = field(default_factory=dict)  # its loader's options where they differ
    count_of_culprit: int = NUM_SAMPLES
    is_first: bool = False  # the culprit is rank 0, which hosts the store; else the last rank
    inline: bool = True  # also without workers
    names_culprit: bool = True  # in `ranks` of the peers' error
    rank: int | None = None  # the culprit, where it is neither the first nor the last
    number: int | None = None  # step, sample or batch of the culprit in which it happens, counted in its epoch
    epoch: int = 0  # in which it happens
    late_s: float = 0.0  # by how much the others come later to their loaders

    def rank_of_culprit(self, world_size: int) -> int:
        last = world_size - 1 if self.rank is None else self.rank
        return 0 if self.is_first else last


FINE = Sees(())
STOPPED = ("timeout_s", "rank {c}")
LOST = Sees(("PeerLostError", "PeerFailedError"), ("rank {c}",))
DISAGREE = ("DisagreementError",)
OUT = "Too many open files"

FAILURES: dict[str, Failure] = {
    "dataset raises": Failure(
        Sees(("ValueError",), ("says the dataset", "in __getitem__", "index")),
        Sees(("PeerFailedError",), ("rank {c}", "ValueError", "says the dataset", "in raise_an_error")),
        data="raise",
    ),
    "stream raises": Failure(
        Sees(("ConnectionError",), ("says the dataset", "in __iter__")),
        Sees(("PeerFailedError",), ("rank {c}", "ConnectionError", "says the dataset", "in __iter__")),
        stream=True,
    ),
    "collate_fn raises": Failure(
        Sees(("KeyError",), ("says collate_fn", "in raise_in_collate")),
        Sees(("PeerFailedError",), ("rank {c}", "KeyError", "says collate_fn", "in raise_in_collate")),
        collate="raise",
    ),
    "dataset times out": Failure(
        Sees(("TimeoutError",), ("says the dataset", "in __getitem__", "index")),
        Sees(("PeerFailedError",), ("rank {c}", "TimeoutError", "says the dataset", "in time_out")),
        data="time out",
        options={"timeout_s": 30.0},
    ),
    "dataset raises a local class": Failure(
        Sees(("SampleError", "NoSuchKeyError"), ("NoSuchKeyError", "says the dataset", "in __getitem__")),
        Sees(("PeerFailedError",), ("rank {c}", "NoSuchKeyError", "says the dataset", "in raise_a_local_class")),
        data="local class",
        options={"timeout_s": 30.0},
    ),
    "collate_fn exits": Failure(
        Sees(("SampleError",), ("SystemExit: 0", "in exit_as_if_all_were_well")),
        Sees(("PeerFailedError",), ("rank {c}", "SystemExit: 0", "in exit_as_if_all_were_well")),
        collate="exit",
        inline=False,
    ),
    "program raises before its loop": Failure(
        Sees(("MemoryError",), ("says the program",)),
        Sees(("PeerFailedError",), ("rank {c}", "MemoryError", "says the program", "in raise_before_the_loop")),
        at_start=raise_before_the_loop,
        options={"timeout_s": 30.0},
    ),
    "worker killed": Failure(
        Sees(("RuntimeError",), ("worker", "Killed")),
        Sees(("PeerFailedError",), ("rank {c}", "worker", "Killed")),
        data="kill",
        inline=False,
    ),
    "collate process killed": Failure(
        Sees(("ProcessDied",), ("collate process", "SIGKILL")),
        Sees(("PeerFailedError", "PeerLostError"), ("rank {c}",)),
        at_step=kill_collate_process,
        inline=False,
    ),
    "training process killed": Failure(None, LOST, at_step=kill_own_process),
    "training process of rank 0 killed": Failure(None, LOST, at_step=kill_own_process, is_first=True),
    "rank 0 killed before its loader": Failure(
        None,
        Sees(("PeerLostError", "ExchangeTimeout"), ("rank 0",)),  # torchrun's store outlives it: then only time tells
        limit_s=TIMEOUT_S + 4,
        before=die_before_the_loader,
        is_first=True,
    ),
    "killed while its loader starts": Failure(
        None,
        Sees(("PeerLostError", "PeerFailedError", "ExchangeTimeout"), ("rank {c}",)),
        limit_s=TIMEOUT_S + 4,
        before=die_while_the_loader_starts,
    ),
    "process that collates killed": Failure(
        Sees(("ProcessDied",), ("odb-collate", "collate_fn", "SIGKILL")),
        Sees(("PeerFailedError",), ("rank {c}", "odb-collate", "SIGKILL")),
        collate="kill",
        options={"collate_workers": 2},
        number=5,
        inline=False,
    ),
    "all of a rank stopped": Failure(
        Sees(("ExchangeTimeout", "PeerLostError", "PeerFailedError", "ProcessDied", "ExchangeError")),
        Sees(("ExchangeTimeout",), STOPPED),
        limit_s=TIMEOUT_S + 6,
        at_step=stop_all_processes,
    ),
    "all of rank 0 stopped": Failure(
        Sees(("ExchangeTimeout", "PeerLostError", "PeerFailedError", "ProcessDied", "ExchangeError")),
        Sees(("ExchangeTimeout",), STOPPED),
        limit_s=TIMEOUT_S + 10,
        at_step=stop_all_processes,
        is_first=True,
    ),
    "training process stopped": Failure(
        Sees(("ExchangeTimeout",), STOPPED),
        Sees(("ExchangeTimeout",), STOPPED),
        limit_s=TIMEOUT_S + 6,
        at_step=stop_training_process,
    ),
    "collate process stopped": Failure(
        Sees(("ProcessDied",), ("is stopped", "timeout_s")),
        Sees(("ExchangeTimeout", "PeerFailedError"), ("rank {c}",)),
        limit_s=TIMEOUT_S + 6,
        at_step=stop_collate_process,
        inline=False,
    ),
    "a pause of three times the timeout": Failure(
        FINE, FINE, limit_s=60, at_step=pause, options={"timeout_s": TIMEOUT_S}
    ),
    "another budget": Failure(
        Sees(DISAGREE, ("token_budget", "10", "20")),
        Sees(DISAGREE, ("token_budget", "10", "20")),
        of_culprit={"token_budget": 20},
        names_culprit=False,
    ),
    "another seed": Failure(
        Sees(DISAGREE, ("seed", "7")),
        Sees(DISAGREE, ("seed", "7")),
        options={"shuffle": True},
        of_culprit={"seed": 7},
        names_culprit=False,
    ),
    "another dataset length": Failure(
        Sees(DISAGREE, ("num_samples", "600", "599")),
        Sees(DISAGREE, ("num_samples", "600", "599")),
        count_of_culprit=599,
        names_culprit=False,
    ),
    "store unreachable": Failure(
        Sees(("PeerLostError",), ("rank 0", ":1", "firewall")),
        Sees(("ExchangeTimeout", "PeerFailedError", "PeerLostError"), ("rank {c}",)),
        limit_s=TIMEOUT_S + 4,
        before=lose_the_store,
    ),
    "Ctrl-C on one rank": Failure(
        Sees(("KeyboardInterrupt",)),
        Sees(("PeerFailedError",), ("rank {c}", "KeyboardInterrupt")),
        at_step=interrupt,
    ),
    "training loop raises": Failure(
        Sees(("FloatingPointError",), ("says the training loop",)),
        Sees(
            ("PeerFailedError",), ("rank {c}", "FloatingPointError", "says the training loop", "in raise_in_the_loop")
        ),
        at_step=raise_in_the_loop,
    ),
    "dataset out of descriptors": Failure(
        Sees(("OSError",), (OUT, "in use_up_descriptors")),
        Sees(("PeerFailedError",), ("rank {c}", OUT, "in use_up_descriptors")),
        data="descriptors",
    ),
    "collate process out of descriptors": Failure(
        Sees(("OSError",), (OUT, "in use_up_descriptors")),
        Sees(("PeerFailedError",), ("rank {c}", OUT, "in use_up_descriptors")),
        collate="descriptors",
    ),
    "training process out of descriptors": Failure(
        Sees(("ChannelClosed",), ("ulimit -n",)),
        Sees(("PeerFailedError",), ("rank {c}", "ulimit -n")),
        at_step=leave_no_descriptors,
        before=small_blocks,
        length=LARGE,
        options={"token_budget": LARGE},
        inline=False,
    ),
    "no descriptors from the start": Failure(
        Sees(("OSError", "RuntimeError", "PeerLostError", "ExchangeError")),
        Sees(("ExchangeTimeout", "PeerFailedError", "PeerLostError"), ("rank {c}",)),
        limit_s=TIMEOUT_S + 4,
        before=no_descriptors_from_the_start,
    ),
    "large files forbidden meanwhile": Failure(  # bodies take the way through the socket then
        FINE,
        FINE,
        collate="memory",
        before=small_blocks,
        length=LARGE,
        options={"token_budget": LARGE},
        inline=False,
    ),
    "/dev/shm full from the start": Failure(
        Sees(("OSError",), ("No space left on device", "/dev/shm")),
        Sees(("PeerFailedError",), ("rank {c}", "No space left on device", "/dev/shm")),
        before=full_shared_memory,
        inline=False,
    ),
    "/dev/shm fills up meanwhile": Failure(
        FINE,
        FINE,
        limit_s=60,
        before=small_shared_memory,
        at_step=fill_shared_memory,
        length=10_000,
        options={"token_budget": 10_000},
        inline=False,
    ),
}


def failure_named(name: str) -> Failure:
    """A row of the table, or one with something else: "dataset raises; rank=0; number=0; layout='packed'"."""
    row, *changes = name.split("; ")
    failure = FAILURES[row]
    for key, value in (change.split("=", 1) for change in changes):
        if key in ("rank", "number", "epoch", "late_s"):
            failure = replace(failure, **{key: ast.literal_eval(value)})
        else:
            failure = replace(failure, options=failure.options | {key: ast.literal_eval(value)})
    waits = failure.options.get("timeout_s", TIMEOUT_S) - TIMEOUT_S
    return replace(failure, limit_s=failure.limit_s + max(0.0, waits) * (failure.limit_s > TIMEOUT_S + 3))


# ---- the program


def make_loader(failure: Failure, rank: int, world_size: int, method: str, folder: str) -> odb.ODBDataLoader:
    is_culprit = rank == failure.rank_of_culprit(world_size)
    bad = Bad(40 * world_size + rank)
    if failure.number is not None:
        bad = Bad(number=failure.number, epoch=failure.epoch)
    dataset: Any = Data(folder, bad, failure.data if is_culprit else "", length=failure.length)
    if failure.stream:
        dataset = EndlessThenRaises(folder, rank, is_culprit)
    elif is_culprit:
        dataset.count = failure.count_of_culprit
    options = SMALL | {"timeout_s": SLOW_START_S.get(method, TIMEOUT_S), "collate_fn": collate} | failure.options
    if method == "inline":
        del options["prefetch_factor"]
    else:
        options |= {"num_workers": 1, "multiprocessing_context": method}
    if is_culprit:
        options |= failure.of_culprit
        if failure.collate:
            options["collate_fn"] = BadCollate(folder, bad, failure.collate)
    return odb.ODBDataLoader(dataset, **options)


def train(failure: Failure, rank: int, world_size: int, loader: Any, folder: str) -> list[int]:
    ids: list[int] = []
    is_culprit = rank == failure.rank_of_culprit(world_size)
    if is_culprit and failure.at_start is not None:
        failure.at_start(folder)
    for epoch in range(failure.epoch + 1):
        ids.clear()
        for number, batch in enumerate(loader):
            info = odb.pop_step_info(batch)
            ids += [] if info.idle else batch["id"].tolist()
            is_here = epoch == failure.epoch and number == (3 if failure.number is None else failure.number)
            if is_culprit and is_here and failure.at_step is not None:
                failure.at_step(loader, folder)
    return ids


def own_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def what_is_left(sockets_before: int) -> list[str]:
    """What a loader that failed should have taken with it."""
    left = [f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}" for pid in children() if not is_helper(pid)]
    left += [f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("odb")]
    more = own_sockets() - sockets_before
    return left + ([f"{more} sockets"] if more > 0 else [])


def is_helper(pid: int) -> bool:
    """The fork server and the resource tracker of `multiprocessing` live as long as their process."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"resource_tracker" in line or (b"forkserver" in line and int(parent_of(pid)) == os.getpid())
    return True  # gone


def parent_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


def wait_for_nothing_left(sockets_before: int) -> list[str]:
    deadline = time.monotonic() + LEFT_S
    while (left := what_is_left(sockets_before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def write_report(folder: str, rank: int, **said: Any) -> None:
    temporary = Path(folder, f"report.{rank}")
    temporary.write_text(json.dumps(said))
    temporary.rename(Path(folder, f"report-{rank}.json"))


def described(error: BaseException) -> dict[str, Any]:
    return {
        "types": [cls.__name__ for cls in type(error).__mro__],
        "text": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "ranks": list(getattr(error, "ranks", ())),
    }


def main(name: str, method: str, folder: str) -> None:
    """Runs one rank; ends as the program of a user would."""
    failure, rank, world_size = failure_named(name), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    if rank == 0:  # what rank 0 hosts for its peers lives as long as its process
        rendezvous._hosted_store(_private.default_store())
    dist.barrier()
    if rank == failure.rank_of_culprit(world_size) and failure.before is not None:
        failure.before(folder)
    if rank != failure.rank_of_culprit(world_size):
        time.sleep(failure.late_s)
    sockets = own_sockets()
    loader = make_loader(failure, rank, world_size, method, folder)
    try:
        ids = train(failure, rank, world_size, loader, folder)
    except BaseException as error:
        at = time.monotonic()
        resource.setrlimit(resource.RLIMIT_NOFILE, LIMIT)  # to be able to look
        Path(folder, f"seen-{rank}").touch()
        # What the training loop raises leaves the loader open, as in a program without a `with`.
        is_open = failure.at_step in (raise_in_the_loop, interrupt) and rank == failure.rank_of_culprit(world_size)
        write_report(folder, rank, at=at, left=[] if is_open else wait_for_nothing_left(sockets), **described(error))
        raise
    loader.close()
    write_report(folder, rank, at=time.monotonic(), left=wait_for_nothing_left(sockets), types=[], text="", ids=ids)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
