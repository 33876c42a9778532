"""A `collate_fn` that takes 50 ms a batch (a processor): in the pool, in one process, and run per sample by the workers."""

from __future__ import annotations

import argparse
import time
from typing import Any

from torch.utils.data import DataLoader

from benchmarks import harness
from benchmarks.workload import CheapSamples, collate, rows

COLLATE_S = 0.05
PER_SAMPLE_S = COLLATE_S / 27  # the same work, sample by sample
TOKEN_BUDGET = 16384


def busy(seconds: float) -> None:
    """Waits as work on another core would make this process wait; the benchmark must run on a machine of few cores."""
    time.sleep(seconds)


def slow_collate(samples: list[Any]) -> Any:
    """50 ms, then padding."""
    busy(COLLATE_S)
    return collate(samples)


def process_one(samples: list[Any]) -> Any:
    """The same as a processor of single samples."""
    busy(PER_SAMPLE_S * len(samples))
    return {key: value[None] for key, value in samples[0].items()}


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """One epoch; samples per second from the sixth batch on, when the pool has started."""
    dataset = CheapSamples(args.num_samples or 4000)
    common: dict[str, Any] = {"shuffle": True, "num_workers": args.workers}
    if name == "plain-27":
        loader: Any = DataLoader(dataset, batch_size=27, collate_fn=slow_collate, **common)
    else:
        import odb
        from odb.collators import per_sample

        given = per_sample(process_one, then=collate) if name == "odb-per-sample" else slow_collate
        options: dict[str, Any] = {"collate_workers": 0} if name == "odb-one-process" else {}
        loader = odb.ODBDataLoader(dataset, token_budget=TOKEN_BUDGET, collate_fn=given, **common, **options)
    num_seen, num_before, began = 0, 0, time.perf_counter()
    for number, batch in enumerate(loader):
        num_seen += rows(batch)
        if number == 5:
            num_before, began = num_seen, time.perf_counter()
    seconds = time.perf_counter() - began
    return {"samples_per_s": (num_seen - num_before) / seconds}


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    names = ["plain-27", "odb-one-process", "odb", "odb-per-sample"]
    harness.main("benchmarks.slow_collate", str(__doc__), names, "samples_per_s", measure, argv)


if __name__ == "__main__":
    main()
