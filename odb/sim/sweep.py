"""Budgets and depths tried side by side: where more of either stops paying.

Larger budgets fill batches better until memory or step time says stop; deeper windows pad less, with diminishing gain.
How much there is to gain depends on the lengths: their coefficient of variation and how many are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from odb.plan.types import I64, PlanConfig
from odb.sim import baselines, world
from odb.sim.baselines import Steps
from odb.sim.summary import StepTime, epoch_time, summarise

#: Of what is reported per setting.
FIGURES = ("steps", "step_efficiency", "padding", "budget_fill", "samples_per_step", "max_held_tokens", "rounds")

#: A sample below this part of the mean length counts as short.
SHORT = 0.5


def spread(lengths: I64) -> dict[str, float]:
    """Mean, coefficient of variation, and share of samples below `SHORT` x mean: what gains depend on."""
    mean = float(lengths.mean())
    return {
        "mean_length": mean,
        "coefficient_of_variation": float(lengths.std() / mean),
        "short_share": float((lengths < SHORT * mean).mean()),
    }


def sweep(
    config: PlanConfig,
    lengths: I64,
    num_ranks: int,
    *,
    budgets: Sequence[int],
    depths: Sequence[int],
    sharding: str,
    step_time: StepTime,
) -> list[dict[str, Any]]:
    """One epoch for each budget and depth.

    Args:
        config: everything but budget and depth.
        lengths: (n,) tokens of each sample, in the epoch's order.
        num_ranks: data-parallel ranks.
        budgets: token budgets to try.
        depths: tokens that a rank may hold, in budgets.
        sharding: "elastic" or "static".
        step_time: of one step.

    Returns:
        a row for each pair, with `budget`, `depth`, `FIGURES`, `epoch_time` (in the units of `step_time`) and
        `speedup_over_fixed`: against fixed batches of the largest size that this budget allows.
    """
    rows = []
    for budget in budgets:
        fixed = epoch_time(baselines.fixed(replace(config, token_budget=budget), lengths, num_ranks), step_time)
        for depth in depths:
            one = replace(config, token_budget=budget, max_held_tokens=depth * budget)
            trace = world.simulate(one, lengths, num_ranks, sharding=sharding)
            seconds = epoch_time(Steps(trace.rows, trace.padded_len), step_time)
            figures = summarise(one, trace)
            rows.append(
                {"budget": budget, "depth": depth}
                | {name: figures[name] for name in FIGURES}
                | {"epoch_time": seconds, "speedup_over_fixed": fixed / seconds if seconds else 1.0}
            )
    return rows


def advice(rows: Sequence[dict[str, Any]], within: float = 0.01) -> dict[str, Any]:
    """The fastest row's cheapest equal: the least tokens held among those at most `within` slower than the fastest."""
    fastest = min(float(row["epoch_time"]) for row in rows)
    near = [row for row in rows if row["epoch_time"] <= fastest * (1 + within)]
    return min(near, key=lambda row: (row["budget"] * row["depth"], row["epoch_time"]))


def powers(text: str) -> list[int]:
    """`"8,16,32"` or `"8..64"` (doubling) as integers.

    Raises:
        ValueError: something else, or a number below 1.
    """
    if ".." in text:
        first, last = (int(part) for part in text.split(".."))
        values = [first << k for k in range(64) if first << k <= last]
    else:
        values = [int(part) for part in text.split(",")]
    if not values or min(values) < 1:
        raise ValueError(f"expected numbers >= 1 such as 8,16,32 or 8..64, got {text!r}")
    return sorted(set(values))
