"""The table of docs/choosing.md: step efficiency and steps of each way to batch, on five shapes of lengths.

    python -m benchmarks.choosing

Counts alone, the same on every machine: 40,000 samples, 8 ranks, 16,384 tokens. Step efficiency: real tokens / (ranks x
sum over steps of the most expensive rank's padded tokens).
"""

from __future__ import annotations

import argparse

import numpy as np

from odb.config import ODBConfig
from odb.samplers import BatchRebalanceSampler, LengthGroupedSampler, MultipackBatchSampler
from odb.samplers.base import PlannedBatchSampler
from odb.sim.lengths import DISTRIBUTIONS, draw
from odb.sim.world import simulate

RANKS, BUDGET = 8, 16384


def of_batches(lengths: np.ndarray, batches: list[list[int]], is_packed: bool = False) -> tuple[float, int]:
    """Step efficiency and steps of a common plan."""
    kept = len(batches) - len(batches) % RANKS
    costs = [int(lengths[b].sum()) if is_packed else len(b) * int(lengths[b].max()) for b in batches[:kept]]
    tokens = sum(int(lengths[b].sum()) for b in batches[:kept])
    return tokens / (RANKS * np.array(costs).reshape(-1, RANKS).max(axis=1).sum()), kept // RANKS


def of_sampler(lengths: np.ndarray, sampler: PlannedBatchSampler, is_packed: bool = False) -> tuple[float, int]:
    return of_batches(lengths, list(sampler), is_packed)


def of_loader(lengths: np.ndarray, layout: str, sharding: str) -> tuple[float, int]:
    config = ODBConfig(token_budget=BUDGET, layout=layout).plan_config()
    trace = simulate(config, lengths, RANKS, sharding=sharding)
    return float(lengths.sum() / (RANKS * trace.costs.max(axis=1).sum())), len(trace.costs)


def rows_of(name: str, number: int) -> dict[str, tuple[float, int]]:
    lengths = draw(name, number, 0)
    size = BUDGET // int(lengths.max())
    order = np.random.default_rng(0).permutation(number)
    common = {"world_size": RANKS, "shard": False}
    # The largest global batch that its mean length allows; its peak may be above the budget.
    global_batch = int(RANKS * BUDGET / (1.3 * lengths.mean()))
    return {
        "fixed size, no peak above the budget": of_batches(
            lengths, [order[i : i + size].tolist() for i in range(0, number, size)]
        ),
        "`BatchRebalanceSampler`": of_sampler(lengths, BatchRebalanceSampler(lengths, global_batch, **common)),
        "`LengthGroupedSampler`, budget": of_sampler(
            lengths, LengthGroupedSampler(lengths, token_budget=BUDGET, **common)
        ),
        "the same, whole epoch sorted": of_sampler(
            lengths, LengthGroupedSampler(lengths, token_budget=BUDGET, window=None, **common)
        ),
        "loader, padded, static shares": of_loader(lengths, "padded", "static"),
        "loader, padded, elastic shares": of_loader(lengths, "padded", "elastic"),
        "loader, packed, static shares": of_loader(lengths, "packed", "static"),
        "loader, packed, elastic shares": of_loader(lengths, "packed", "elastic"),
        "`MultipackBatchSampler`": of_sampler(
            lengths, MultipackBatchSampler(lengths, BUDGET, **common), is_packed=True
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=40_000)
    args = parser.parse_args()
    found = {name: rows_of(name, args.samples) for name in DISTRIBUTIONS}
    print("| batches | " + " | ".join(DISTRIBUTIONS) + " |")
    print("| --- |" + " --- |" * len(DISTRIBUTIONS))
    for way in next(iter(found.values())):
        cells = [f"{found[name][way][0]:.3f} / {found[name][way][1]}" for name in DISTRIBUTIONS]
        print(f"| {way} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
