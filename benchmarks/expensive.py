"""Samples that take 10 ms each: what the wrapper adds to an epoch of a plain `DataLoader` with the same workers."""

from __future__ import annotations

import argparse
import time
from typing import Any

from torch.utils.data import DataLoader

from benchmarks import harness
from benchmarks.workload import SlowSamples, collate

SAMPLE_S = 0.01
TOKEN_BUDGET = 16384


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """One epoch, from asking for the first batch to the end."""
    dataset = SlowSamples(args.num_samples or 1600, SAMPLE_S)
    common: dict[str, Any] = {"shuffle": True, "num_workers": args.workers, "collate_fn": collate}
    if name == "plain-8":
        loader: Any = DataLoader(dataset, batch_size=8, **common)
    else:
        import odb

        loader = odb.ODBDataLoader(dataset, token_budget=TOKEN_BUDGET, **common)
    began = time.perf_counter()
    for _ in loader:
        pass
    return {"epoch_s": time.perf_counter() - began}


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    harness.main("benchmarks.expensive", str(__doc__), ["plain-8", "odb"], "epoch_s", measure, argv)


if __name__ == "__main__":
    main()
