"""Starts ranks of `program` quickly: forks of a process that has imported torch once and has no threads.

Reads jobs, one line of JSON each, from its standard input: name, method, folder, ports and number of ranks. Every rank
becomes a process with the environment that torchrun gives, output files of its own, and an interpreter that ends in the
ordinary way. How each ended goes to the standard output, one line of JSON per rank.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def serve() -> dict[str, Any] | None:
    """Forks ranks as they are asked for; returns in a new rank, with its job, and at the end of the input, with None."""
    running: dict[int, int] = {}
    buffered = b""
    while True:
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            answer = {"rank": running.pop(pid), "status": os.waitstatus_to_exitcode(status)}
            os.write(1, (json.dumps(answer) + "\n").encode())
        if not select.select([0], [], [], 0.02)[0]:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return None
        *lines, buffered = (buffered + chunk).split(b"\n")
        for line in lines:
            job = json.loads(line)
            for rank in range(job["world_size"]):
                pid = os.fork()
                if pid == 0:
                    become_rank(rank, job)
                    return job
                running[pid] = rank


def become_rank(rank: int, job: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    output = os.open(Path(job["folder"], f"output-{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["world_size"], "MASTER_PORT": job["port"]}
    os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}


if __name__ == "__main__":
    import program
    import ranks
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        ranks.own_shm()
    gc.freeze()
    todo = serve()
    if todo is not None:
        program.main(todo["name"], todo["method"], todo["folder"])
