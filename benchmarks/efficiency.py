"""Step efficiency of simulated epochs: elastic and static sharding, the published rule, and an oracle that knows all.

`python -m benchmarks.efficiency [--ranks 8 64 1024] [--seeds 3] [--quick]` prints one line per distribution and size.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from odb.config import ODBConfig
from odb.plan.types import I64
from odb.sim import baselines, lengths
from odb.sim.summary import StepTime, compared, summarise
from odb.sim.world import simulate

TOKEN_BUDGET = 16384
MAX_HELD_TOKENS = 60 * TOKEN_BUDGET  # with the sample that reaches the limit below a million
SAMPLES = {8: 100_000, 64: 400_000, 1024: 1_200_000}
BARS = {8: (0.96, 1.06), 64: (0.95, 1.06), 1024: (0.92, 1.12)}  # step efficiency, steps against the oracle's
SHORT = ("cv2", 1024, 0.87)  # an epoch shorter than a window


def run(given: I64, num_ranks: int, sharding: str, policy: str) -> dict[str, Any]:
    config = ODBConfig(token_budget=TOKEN_BUDGET, max_held_tokens=MAX_HELD_TOKENS, policy=policy).plan_config()
    return summarise(config, simulate(config, given, num_ranks, sharding=sharding))


def oracle(given: I64, num_ranks: int) -> dict[str, Any]:
    config = ODBConfig(token_budget=TOKEN_BUDGET).plan_config()
    return compared(config, given, "oracle", baselines.oracle(config, given, num_ranks), 1.0, StepTime())


def one(name: str, num_ranks: int, seeds: int, scale: int) -> dict[str, Any]:
    """Means over seeds, and the worst seed."""
    rows = []
    for seed in range(seeds):
        given = lengths.draw(name, SAMPLES[num_ranks] // scale, seed)
        best = oracle(given, num_ranks)
        elastic = run(given, num_ranks, "elastic", "odb")
        published = run(given, num_ranks, "static", "published")
        rows.append(
            {
                "elastic": elastic["step_efficiency"],
                "static": run(given, num_ranks, "static", "odb")["step_efficiency"],
                "published": published["step_efficiency"],
                "oracle": best["step_efficiency"],
                "steps": elastic["steps"] / best["steps"],
                "idle": elastic["idle_share"],
                "held": elastic["max_held_tokens"],
            }
        )
    mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    worst = min(row["elastic"] for row in rows)
    return {"name": name, "ranks": num_ranks, "worst": worst, "held_max": max(row["held"] for row in rows)} | mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(SAMPLES), default=[8, 64, 1024])
    parser.add_argument("--names", nargs="+", choices=lengths.DISTRIBUTIONS, default=lengths.DISTRIBUTIONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples: no bar is meant for it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for num_ranks in args.ranks:
        for name in args.names:
            row = one(name, num_ranks, args.seeds, 10 if args.quick else 1)
            bar, most = BARS[num_ranks]
            if (name, num_ranks) == SHORT[:2]:
                bar = SHORT[2]
            row["passes"] = row["elastic"] >= bar and row["steps"] <= most and row["elastic"] > row["published"]
            print(json.dumps(row) if args.json else _line(row, bar, most), flush=True)


def _line(row: dict[str, Any], bar: float, most: float) -> str:
    return (
        f"{row['ranks']:5d} {row['name']:10s} elastic {row['elastic']:.4f} (bar {bar}, worst {row['worst']:.4f})  "
        f"static {row['static']:.4f}  published {row['published']:.4f}  oracle {row['oracle']:.4f}  "
        f"steps {row['steps']:.3f}x (at most {most})  idle {row['idle']:.3%}  held {row['held_max']:,}  "
        f"{'ok' if row['passes'] else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
