"""Step efficiency of simulated epochs: elastic and static sharding, the published rule, and an oracle that knows all.

`python -m benchmarks.efficiency [--ranks 8 64 1024] [--seeds 3] [--layout packed] [--markdown]` prints one line per
distribution and size. Counts are exact: they depend on the seeds, not on the machine.
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
MAX_HELD_TOKENS = 1_000_000
SAMPLES = {8: 100_000, 64: 400_000, 1024: 1_200_000}
BARS = {8: (0.96, 1.06), 64: (0.95, 1.06), 1024: (0.92, 1.12)}  # step efficiency, steps against the oracle's
SHORT = ("cv2", 1024, 0.87)  # an epoch shorter than a window
PACKED_BAR = 0.98
MOST_IDLE = 0.005


def run(given: I64, num_ranks: int, layout: str, sharding: str, policy: str) -> dict[str, Any]:
    config = ODBConfig(
        token_budget=TOKEN_BUDGET, max_held_tokens=MAX_HELD_TOKENS, layout=layout, policy=policy
    ).plan_config()
    return summarise(config, simulate(config, given, num_ranks, sharding=sharding))


def oracle(given: I64, num_ranks: int, layout: str) -> dict[str, Any]:
    """All lengths known: the whole set sorted and cut; packed, as many steps as full rows would take."""
    if layout == "packed":
        return {"steps": -(-int(given.sum()) // (num_ranks * TOKEN_BUDGET)), "step_efficiency": 1.0}
    config = ODBConfig(token_budget=TOKEN_BUDGET).plan_config()
    return compared(config, given, "oracle", baselines.oracle(config, given, num_ranks), 1.0, StepTime())


def one(name: str, num_ranks: int, seeds: int, scale: int, layout: str) -> dict[str, Any]:
    """Means over seeds, and the worst seed."""
    rows = []
    for seed in range(seeds):
        given = lengths.draw(name, SAMPLES[num_ranks] // scale, seed)
        best = oracle(given, num_ranks, layout)
        elastic = run(given, num_ranks, layout, "elastic", "odb")
        row = {
            "elastic": elastic["step_efficiency"],
            "static": run(given, num_ranks, layout, "static", "odb")["step_efficiency"],
            "oracle": best["step_efficiency"],
            "steps": elastic["steps"] / best["steps"],
            "idle": elastic["idle_share"],
            "held": elastic["max_held_tokens"],
        }
        if layout == "padded":
            published = run(given, num_ranks, layout, "static", "published")
            row |= {
                "published": published["step_efficiency"],
                "published_steps": published["steps"] / best["steps"],
                "published_held": published["max_held_tokens"],
            }
        rows.append(row)
    mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    most = {f"{key}_max": max(row[key] for row in rows) for key in ("held", "published_held", "idle") if key in rows[0]}
    worst = min(row["elastic"] for row in rows)
    return {"name": name, "ranks": num_ranks, "layout": layout, "seeds": seeds, "worst": worst} | most | mean


def bar_of(name: str, num_ranks: int, layout: str) -> tuple[float, float]:
    """Step efficiency at least, steps against the oracle's at most."""
    bar, most = BARS[num_ranks]
    if layout == "packed":
        return PACKED_BAR, most
    return (SHORT[2] if (name, num_ranks) == SHORT[:2] else bar), most


def passes(row: dict[str, Any]) -> bool:
    """Whether the means over seeds keep every bar."""
    bar, most = bar_of(row["name"], row["ranks"], row["layout"])
    is_held = max(row["held_max"], row.get("published_held_max", 0)) <= MAX_HELD_TOKENS
    is_better = row["elastic"] > row.get("published", 0.0)
    return row["elastic"] >= bar and row["steps"] <= most and row["idle"] < MOST_IDLE and is_held and is_better


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(SAMPLES), default=[8, 64, 1024])
    parser.add_argument("--names", nargs="+", choices=lengths.DISTRIBUTIONS, default=lengths.DISTRIBUTIONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layout", choices=("padded", "packed"), default="padded")
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples: no bar is meant for it")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true")
    shown.add_argument("--markdown", action="store_true", help="rows of a table")
    args = parser.parse_args()
    show = json.dumps if args.json else _markdown if args.markdown else _line
    if args.markdown:
        print(f"| {' | '.join(_HEADER)} |\n| ---: | --- |{' ---: |' * (len(_HEADER) - 2)}", flush=True)
    for num_ranks in args.ranks:
        for name in args.names:
            row = one(name, num_ranks, args.seeds, 10 if args.quick else 1, args.layout)
            print(show(row | {"passes": passes(row)}), flush=True)


_HEADER = ("ranks", "lengths", "bar", "elastic", "worst seed", "static", "published rule", "offline oracle",
           "steps / oracle's", "published rule's", "idle", "most held")  # fmt: skip


def _markdown(row: dict[str, Any]) -> str:
    bar, most = bar_of(row["name"], row["ranks"], row["layout"])
    cells = (
        f"{row['ranks']}", row["name"], f"{bar} / {most}", f"**{row['elastic']:.3f}**", f"{row['worst']:.3f}",
        f"{row['static']:.3f}", f"{row['published']:.3f}" if "published" in row else "-", f"{row['oracle']:.3f}",
        f"**{row['steps']:.3f}**", f"{row['published_steps']:.3f}" if "published" in row else "-",
        f"{row['idle']:.2%}", f"{row['held_max']:,}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _line(row: dict[str, Any]) -> str:
    bar, most = bar_of(row["name"], row["ranks"], row["layout"])
    published = f"published {row['published']:.4f} ({row['published_steps']:.3f}x)  " if "published" in row else ""
    return (
        f"{row['ranks']:5d} {row['name']:10s} elastic {row['elastic']:.4f} (bar {bar}, worst {row['worst']:.4f})  "
        f"static {row['static']:.4f}  {published}oracle {row['oracle']:.4f}  "
        f"steps {row['steps']:.3f}x (at most {most})  idle {row['idle']:.3%}  held {row['held_max']:,}  "
        f"{'ok' if row['passes'] else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
