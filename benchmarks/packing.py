"""Fill of packed rows, quality of rebalanced groups, evenness of labels; and what planning them takes.

    python -m benchmarks.packing

Lengths are lognormal (mean 600, CV 0.8), cut at the capacity; counts are exact, seconds are of this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from odb.config import ODBConfig
from odb.plan import pack
from odb.plan.rebalance import Quadratic, contiguous
from odb.samplers import BatchRebalanceSampler, LabelBalancedBatchSampler, MultipackBatchSampler
from odb.sim.world import simulate

CAPACITIES = (4096, 16384)


def lognormal(number: int, longest: int, seed: int = 0, mean: float = 600, cv: float = 0.8) -> np.ndarray:
    sigma = np.sqrt(np.log(1 + cv * cv))
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, number)
    return np.clip(draws, 1, longest).astype(np.int64)


@contextmanager
def timed(text: Callable[[], str]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"{text()}  {time.perf_counter() - start:.2f} s", flush=True)


def fill(lengths: np.ndarray, num_rows: int, capacity: int) -> str:
    return f"fill {lengths.sum() / (num_rows * capacity):.4f}  rows {num_rows}"


def packing() -> None:
    for capacity in CAPACITIES:
        lengths = lognormal(50_000, capacity)
        print(f"\n50,000 lengths, capacity {capacity}; lower bound {-(-int(lengths.sum()) // capacity)} rows")
        packers: dict[str, Callable[[], list[Any]]] = {
            "whole epoch": lambda lengths=lengths, c=capacity: pack.first_fit_decreasing(lengths, pack.Bounds(c)),
            "sequential": lambda lengths=lengths, c=capacity: pack.next_fit(lengths, pack.Bounds(c)),
        }
        for window in (64, 256, 1024, 4096):
            packers[f"window {window}"] = lambda lengths=lengths, c=capacity, w=window: list(
                pack.windowed(lengths, pack.Bounds(c), w)
            )
        for name, run in packers.items():
            rows: list[Any] = []
            with timed(lambda name=name, rows=rows, x=lengths, c=capacity: f"  {name:14} {fill(x, len(rows), c)}"):
                rows += run()
        for ranks, window in ((1, 256), (1, 8192), (8, 8192)):
            config = ODBConfig(token_budget=capacity, layout="packed", window=window).plan_config()
            trace = simulate(config, lengths, ranks, sharding="static")
            efficiency = lengths.sum() / (ranks * trace.costs.max(axis=1).sum())
            used = lengths.sum() / (trace.costs.size * capacity)
            print(f"  loader, {ranks} rank(s), window {window}: fill {used:.4f}, step efficiency {efficiency:.4f}")


def a_million() -> None:
    print("\n1,000,000 lengths, whole epoch, one core")
    for capacity in CAPACITIES:
        lengths = lognormal(1_000_000, capacity)
        rows: list[Any] = []
        with timed(lambda rows=rows, x=lengths, c=capacity: f"  capacity {c:6} {fill(x, len(rows), c)}"):
            rows += pack.first_fit_decreasing(lengths, pack.Bounds(capacity))


def rebalancing() -> None:
    print("\nglobal batches, cost b*L + 0.001*b*L**2: dearest group of a random equal split against the best slices")
    cost = Quadratic()
    for ranks, accum, per_rank in ((8, 1, 4), (8, 1, 8), (8, 4, 4), (4, 2, 8)):
        groups = ranks * accum
        size = groups * per_rank
        lengths = lognormal(100 * size, 16384, seed=1)
        random = [cost(per_rank, lengths[i : i + per_rank].max()) for i in range(0, len(lengths), per_rank)]
        naive = np.array(random).reshape(-1, groups).max(axis=1)
        start = time.perf_counter()
        best = np.array([contiguous(lengths[i : i + size], groups).peak for i in range(0, len(lengths), size)])
        seconds = (time.perf_counter() - start) / len(best)
        sampler = BatchRebalanceSampler(lengths, size, world_size=ranks, grad_accum_steps=accum)
        print(
            f"  {ranks} ranks x {accum} steps, {size:4} samples: peak {(best / naive).mean():.3f} of random, "
            f"straggler ratio {sampler.stats()['straggler_ratio']:.3f}, {1000 * seconds:.2f} ms a batch",
            flush=True,
        )


def labels() -> None:
    print("\nlabels, 20,000 samples, 4 ranks x 4 accumulation steps: standard deviation before -> after")
    lengths = lognormal(20_000, 4096)
    counts = (lengths * np.random.default_rng(1).beta(0.8, 1.6, len(lengths))).astype(np.int64)
    common = {"world_size": 4, "grad_accum_steps": 4}
    samplers: dict[str, Callable[[], Any]] = {
        "packed, 1 row": lambda: MultipackBatchSampler(lengths, 4096, label_counts=counts, **common),
        "packed, 1 row, window 256": lambda: MultipackBatchSampler(
            lengths, 4096, label_counts=counts, window=256, **common
        ),
        "packed, 4 rows": lambda: MultipackBatchSampler(lengths, 4096, label_counts=counts, rows_per_batch=4, **common),
        "padded, 4 samples": lambda: LabelBalancedBatchSampler(lengths, counts, 4, **common),
        "flattened, 4 samples": lambda: LabelBalancedBatchSampler(lengths, counts, 4, mode="flattened", **common),
    }
    for name, make in samplers.items():
        start = time.perf_counter()
        metrics = make().label_metrics
        first, last = metrics["before"], metrics["after"]
        print(
            f"  {name:26} batches {first['std_label_count']:.0f} -> {last['std_label_count']:.0f}, updates "
            f"{first['std_global_update_labels']:.0f} -> {last['std_global_update_labels']:.0f}, padding tokens "
            f"{first['padding_tokens']:,} -> {last['padding_tokens']:,}  {time.perf_counter() - start:.1f} s",
            flush=True,
        )


def main() -> None:
    packing()
    a_million()
    rebalancing()
    labels()


if __name__ == "__main__":
    main()
