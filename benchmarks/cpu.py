"""CPU microseconds per sample of each process of a loader: where the time goes, independent of who else runs.

`python -m benchmarks.cpu odb plain-64 -n 20000 -w 2`. Reads /proc, so Linux only. Processor time, not wall time: on a
machine that others use it repeats to a few per cent where samples per second do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.throughput import make_loader
from benchmarks.workload import KINDS, rows

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split()]
    return found


def family(pid: int) -> dict[int, str]:
    """A process and its descendants -> role: "training", "collate" (a child with children), "worker"."""
    roles = {pid: "training"}
    for child in children(pid):
        grandchildren = children(child)
        roles[child] = "collate" if grandchildren else "worker"
        roles.update(dict.fromkeys(grandchildren, "worker"))
    return roles


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system seconds of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) * _TICK_S, int(fields[12]) * _TICK_S


def measure(name: str, num_samples: int, num_workers: int, kind: str) -> dict[str, Any]:
    """From 10 % to 60 % of an epoch, while all workers are at work: microseconds per sample by role."""
    loader = make_loader(name, num_samples, num_workers, kind)
    num_seen = num_before = 0
    before: dict[int, tuple[float, float]] = {}
    after: dict[int, tuple[float, float]] = {}
    roles: dict[int, str] = {}
    began = ended = 0.0
    for batch in loader:
        num_seen += rows(batch)
        if not before and num_seen > 0.1 * num_samples:
            roles = family(os.getpid())
            before, num_before, began = {pid: cpu_seconds(pid) for pid in roles}, num_seen, time.perf_counter()
        if before and not after and num_seen > 0.6 * num_samples:
            after, num_after, ended = {pid: cpu_seconds(pid) for pid in roles}, num_seen, time.perf_counter()
    num = num_after - num_before
    out: dict[str, Any] = {"samples_per_s": num / (ended - began)}
    for role in ("worker", "collate", "training"):
        for kind, which in (("user", 0), ("system", 1)):
            spent = sum(after[pid][which] - before[pid][which] for pid in roles if roles[pid] == role)
            out[f"{role}_{kind}_us"] = round(1e6 * spent / num, 1)
    out["total_us"] = round(sum(value for key, value in out.items() if key.endswith("_us")), 1)
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("loaders", nargs="*", default=["odb", "plain-64"])
    parser.add_argument("-n", "--num-samples", type=int, default=20000)
    parser.add_argument("-w", "--workers", type=int, default=2)
    parser.add_argument("-r", "--repeats", type=int, default=1)
    parser.add_argument("-k", "--kind", choices=list(KINDS), default="tokens", help="of samples")
    args = parser.parse_args()
    for name in args.loaders:
        runs = [measure(name, args.num_samples, args.workers, args.kind) for _ in range(args.repeats)]
        print(name, json.dumps({key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]}))


if __name__ == "__main__":
    main()
