"""Seconds to the first batch, samples of 10 ms: against a plain `DataLoader` that delivers as many samples as `odb` reads.

`plain` delivers, in batches of 8, as many samples as `odb`'s first window holds: what its first batch needs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from torch.utils.data import DataLoader

from benchmarks import harness
from benchmarks.workload import SlowSamples, collate, rows

SAMPLE_S = 0.01
TOKEN_BUDGET = 16384


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """The first batch of the first epoch, and of the second."""
    dataset = SlowSamples(args.num_samples or 400, SAMPLE_S)
    common: dict[str, Any] = {"shuffle": name != "plain", "num_workers": args.workers, "collate_fn": collate}
    if name == "plain":
        loader: Any = DataLoader(dataset, batch_size=8, **common)
    else:
        import odb

        loader = odb.ODBDataLoader(dataset, token_budget=TOKEN_BUDGET, seed=1, **common)
    first = [_seconds_to_first(loader, dataset.num_for(TOKEN_BUDGET) if name == "plain" else 1) for _ in range(2)]
    return {"first_epoch_s": first[0], "second_epoch_s": first[1]}


def _seconds_to_first(loader: Any, num_samples: int) -> float:
    began, num_seen = time.perf_counter(), 0
    iterator = iter(loader)
    while num_seen < num_samples:
        num_seen += rows(next(iterator))
    seconds = time.perf_counter() - began
    for _ in iterator:
        pass
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    harness.main("benchmarks.first_batch", str(__doc__), ["plain", "odb"], "first_epoch_s", measure, argv)


if __name__ == "__main__":
    main()
