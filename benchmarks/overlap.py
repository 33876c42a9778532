"""Wait share: steps of 50 ms, preprocessing that fits; how long the training process waits after the first round."""

from __future__ import annotations

import argparse
import time
from typing import Any

from torch.utils.data import DataLoader

from benchmarks import harness
from benchmarks.workload import SlowSamples, collate

STEP_S = 0.05
SAMPLE_S = 0.001
TOKEN_BUDGET = 16384


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """One epoch. The first 10 % of the steps hold the first rounds, and are left out."""
    dataset = SlowSamples(args.num_samples or 4000, SAMPLE_S)
    common: dict[str, Any] = {"shuffle": True, "num_workers": args.workers, "collate_fn": collate}
    if name == "plain-27":  # as many samples a batch as the budget holds on average
        loader: Any = DataLoader(dataset, batch_size=27, **common)
    else:
        import odb

        loader = odb.ODBDataLoader(dataset, token_budget=TOKEN_BUDGET, **common)
    waits, asked = [], time.perf_counter()
    for _ in loader:
        waits.append(time.perf_counter() - asked)
        time.sleep(STEP_S)
        asked = time.perf_counter()
    after = waits[max(4, len(waits) // 10) :]
    return {
        "steps": len(waits),
        "first_wait_s": waits[0],
        "wait_share_percent": 100 * sum(after) / (sum(after) + STEP_S * len(after)),
        "longest_wait_ms": 1e3 * max(after),
    }


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    harness.main("benchmarks.overlap", str(__doc__), ["plain-27", "odb"], "wait_share_percent", measure, argv)


if __name__ == "__main__":
    main()
