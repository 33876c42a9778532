"""A main process, a child like the collate process and that child's inner workers, for the tests of supervision.

`training.py START_METHOD BEHAVIOUR [NUM_WORKERS]`: prints the pids as soon as batches flow, then behaves.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from odb.errors import ChannelClosed
from odb.feed.channel import Channel, channel_pair
from odb.feed.handoff import dumps_bytes, loads_bytes
from odb.feed.supervise import at_exit, can_use_signal, guard_against_orphaning, ignore_interrupts, start, stop

_GRACE_S = 40.0  # far more than it takes: a child that has to be killed is a failure, a busy machine is none


class Numbers(Dataset[Any]):
    """Samples large enough that a worker's pipe is full at all times: the hard case at the end."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Any:
        return {"pid": os.getpid(), "x": torch.full((600,), index)}


def init_worker(_: int, *, parent_pid: int, use_signal: bool) -> None:
    ignore_interrupts()
    guard_against_orphaning(parent_pid, use_signal=use_signal)


def body(end: Channel, parent_pid: int, use_signal: bool, method: str, num_workers: int, stuck: bool) -> None:
    ignore_interrupts()
    guard_against_orphaning(parent_pid, use_signal=use_signal)
    init = partial(init_worker, parent_pid=os.getpid(), use_signal=can_use_signal(method))
    loader = DataLoader(
        Numbers(),
        batch_size=32,
        num_workers=num_workers,
        multiprocessing_context=method,
        worker_init_fn=init,
        collate_fn=dumps_bytes,
    )
    try:
        for i, chunk in enumerate(loader):
            end.send((os.getpid(), loads_bytes(chunk)))
            if stuck and i == 2 * num_workers:
                time.sleep(600)  # never looks at the channel again
    except ChannelClosed:
        pass


class Loader:
    """As much of a loader as matters here. The tests never call `close`."""

    def __init__(self, method: str, num_workers: int, stuck: bool) -> None:
        self.num_workers = num_workers
        self.end, theirs = channel_pair()
        args = (theirs, os.getpid(), can_use_signal(method), method, num_workers, stuck)
        self.process = start(method, body, args, "collate process")
        at_exit(self.close)

    def close(self) -> None:
        self.end.close()
        print(stop(self.process, _GRACE_S), flush=True)


def announce(loader: Loader) -> None:
    """Receives until all workers have delivered, then prints all pids."""
    workers: set[int] = set()
    while len(workers) < loader.num_workers:
        collate, samples = loader.end.recv(60)
        workers |= {sample["pid"] for sample in samples}
    print(json.dumps({"collate": collate, "workers": sorted(workers)}), flush=True)


def train(method: str, behaviour: str, num_workers: int) -> None:
    global kept
    kept = loader = Loader(method, num_workers, behaviour == "stuck")  # a global: nothing collects it before the end
    if behaviour == "at once":
        print("{}", flush=True)
    else:
        announce(loader)
    if behaviour in ("run", "at once"):
        while True:
            loader.end.recv(60)
            time.sleep(0.01)
    if behaviour == "stuck":
        time.sleep(600)
    if behaviour == "until closed":
        try:
            while True:
                loader.end.recv(60)
        except ChannelClosed:
            print("closed:", stop(loader.process, _GRACE_S), flush=True)
    if behaviour == "raise":
        raise LookupError("training failed")


def main(method: str, behaviour: str, num_workers: int) -> None:
    multiprocessing.set_forkserver_preload(["torch.utils.data"])  # else each process imports it anew
    if behaviour == "child":  # training itself is a child, as under torch.multiprocessing.spawn
        trainer = multiprocessing.get_context("fork").Process(target=train, args=(method, "exit", num_workers))
        trainer.start()
        trainer.join()
        print("trainer:", trainer.exitcode, flush=True)
    elif behaviour == "thread":  # the creating thread ends long before its process does
        thread = threading.Thread(target=train, args=(method, "exit", num_workers))
        thread.start()
        thread.join()
        gc.collect()
        for _ in range(50):
            kept.end.recv(60)
        print("outlived its thread", flush=True)
    else:
        train(method, behaviour, num_workers)


kept: Any = None

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 2)
