"""A sender and a receiver that keeps 600 batches, with 256 descriptors allowed. Prints what to compare."""

import os
import resource

import torch

from odb.feed.channel import Channel, channel_pair
from odb.feed.supervise import ignore_interrupts, start, stop


def body(end: Channel) -> None:
    ignore_interrupts()
    for i in range(600):
        end.send({"x": torch.full((6000,), i), "y": torch.full((200_000,), i % 100, dtype=torch.int8)}, 30)
    end.recv(30)


def num_open(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    ours, theirs = channel_pair(map_from=100_000)
    process = start("fork", body, (theirs,), "sender")
    assert process.pid is not None
    before = num_open(os.getpid())
    kept = [ours.recv(30) for _ in range(600)]
    print(num_open(os.getpid()) - before, "more open")
    print("sender below 30", num_open(process.pid) < 30)
    print("all whole", all(bool((k["x"] == i).all()) for i, k in enumerate(kept)))
    pids = (str(os.getpid()), str(process.pid))
    print("left in /dev/shm", [name for name in os.listdir("/dev/shm") if any(pid in name for pid in pids)])
    ours.send(None)
    print(stop(process))


if __name__ == "__main__":
    main()
