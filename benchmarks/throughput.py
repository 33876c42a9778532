"""Samples per second with a consumer that does nothing: `odb` against plain `DataLoader`s, and the paper's package.

Contenders run in turn, each in a process of its own, several times over; what counts are medians and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks import harness
from benchmarks.workload import KINDS, collate, rows

TOKEN_BUDGET = 16384


def make_loader(name: str, num_samples: int, num_workers: int, kind: str = "tokens") -> Any:
    """The loader called `name`: `plain-<batch size>`, `odb`, or `peer` (the paper's package, also imported as odb)."""
    dataset = KINDS[kind](num_samples)
    common: dict[str, Any] = {"shuffle": True, "num_workers": num_workers, "collate_fn": collate}
    if name.startswith("plain-"):
        return DataLoader(dataset, batch_size=int(name.removeprefix("plain-")), **common)
    import odb

    if name == "peer":
        if hasattr(odb, "wrap"):
            raise SystemExit(f"the interpreter given as --peer-python imports this package ({odb.__file__})")
        return odb.ODBDataLoader(dataset, token_budget=TOKEN_BUDGET, batch_size=1, prefetch_factor=256, **common)
    return odb.ODBDataLoader(dataset, token_budget=TOKEN_BUDGET, **common)


def measure(name: str, num_samples: int, num_workers: int, kind: str) -> dict[str, float]:
    """One epoch after the workers' start: seconds to the first batch, and samples per second from there on."""
    loader = make_loader(name, num_samples, num_workers, kind)
    began = time.perf_counter()
    first, num_seen, num_first = 0.0, 0, 0
    for batch in loader:
        num_seen += rows(batch)
        if not first:
            first, num_first = time.perf_counter() - began, num_seen
    seconds = time.perf_counter() - began
    return {
        "first_batch_s": first,
        "samples_per_s": (num_seen - num_first) / max(seconds - first, 1e-9),
        "total_samples_per_s": num_seen / seconds,
        "samples": num_seen,
    }


def run_once(python: str, name: str, num_samples: int, num_workers: int, kind: str) -> dict[str, float]:
    """`measure` in a fresh process of the given interpreter."""
    command = [python, "-m", "benchmarks.throughput", "--one", name, "-n", str(num_samples), "-w", str(num_workers)]
    command += ["--kind", kind]
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        place: dict[str, Any] = {}
        if name == "peer":  # its package is called odb too: ours must be out of its sight
            shutil.copytree(here, Path(folder) / here.name)
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            place = {"cwd": folder, "env": environment}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **place)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare(
    names: list[str], num_samples: int, workers: list[int], repeats: int, peer_python: str, kind: str = "tokens"
) -> list[dict[str, Any]]:
    """Medians and ranges of each contender for each number of workers; ratios against `plain-8`."""
    table = []
    for num_workers in workers:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                python = peer_python if name == "peer" else sys.executable
                runs[name].append(run_once(python, name, num_samples, num_workers, kind))
        base = statistics.median(one["total_samples_per_s"] for one in runs[names[0]])
        for name in names:
            rates = sorted(one["total_samples_per_s"] for one in runs[name])
            table.append(
                {
                    "kind": kind,
                    "workers": num_workers,
                    "loader": name,
                    "samples_per_s": statistics.median(rates),
                    "range": [rates[0], rates[-1]],
                    "ratio": statistics.median(rates) / base,
                    "first_batch_s": statistics.median(one["first_batch_s"] for one in runs[name]),
                }
            )
    return table


def show(table: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    out = Table("workers", "loader", "samples/s (median)", "range", "ratio", "first batch, s")
    for row in table:
        low, high = row["range"]
        out.add_row(
            str(row["workers"]),
            row["loader"],
            f"{row['samples_per_s']:.0f}",
            f"{low:.0f} to {high:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['first_batch_s']:.2f}",
        )
    Console().print(out)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("-n", "--num-samples", type=int, default=20000)
    parser.add_argument("-w", "--workers", type=lambda text: [int(w) for w in text.split(",")], default=[2])
    parser.add_argument("-r", "--repeats", type=int, default=5)
    parser.add_argument("-k", "--kind", choices=list(KINDS), default="tokens", help="of samples")
    parser.add_argument("--peer-python", default="", help="interpreter of an environment with online-dynamic-batching")
    parser.add_argument("--output", type=Path, default=Path("out/throughput.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one, args.num_samples, args.workers[0], args.kind)))
        return
    names = ["plain-8", "plain-64", "odb"] + (["peer"] if args.peer_python else [])
    table = compare(names, args.num_samples, args.workers, args.repeats, args.peer_python, args.kind)
    show(table)
    harness.write(table, "samples_per_s", args.output)


if __name__ == "__main__":
    main()
