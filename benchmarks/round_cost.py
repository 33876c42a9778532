"""CPU milliseconds of one rank for the planning of a round, and what it sends, in worlds of up to 4096 ranks.

`python -m benchmarks.round_cost [--window 512] [--ranks 8 64 1024 4096]`. Shares are elastic: grants are decided, too. The
other ranks' reports come from 64 different windows; the row that this rank sends is what `encode` makes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from odb.config import ODBConfig
from odb.plan import grants
from odb.plan import round as rounds
from odb.plan.types import I64, Measures, PlanConfig, Proposal, RoundState
from odb.sim import lengths

PHASES = ("propose", "settle", "form", "conclude")
REPEATS = 9


@dataclass
class World:
    """All that a rank needs to plan a round of many ranks."""

    config: PlanConfig
    state: RoundState
    arrivals: Measures
    rows: I64  # of all ranks

    @classmethod
    def of(cls, num_ranks: int, window: int, name: str, layout: str) -> World:
        given = [_measures(lengths.draw(name, window, seed)) for seed in range(min(64, num_ranks))]
        most = max(int(one.length.sum()) for one in given)
        config = ODBConfig(
            token_budget=16384, window=window, max_held_tokens=most, layout=layout, on_oversize="alone"
        ).plan_config()
        # In the middle of a long epoch.
        state = replace(grants.start(0, 1000 * window * num_ranks, 0, num_ranks), round=30)
        proposals = [rounds.propose(config, state, one, exhausted=False) for one in given]
        own = np.stack([rounds.encode(proposal.report) for proposal in proposals])
        return cls(config, state, given[0], np.resize(own, (num_ranks, own.shape[1])))

    def once(self) -> dict[str, float]:
        """Milliseconds of each phase."""
        times = [time.process_time()]
        room = rounds.fill_target(self.config, self.state)
        assert room.num_taken(self.arrivals.length, self.arrivals.num_bytes) == len(self.arrivals)
        proposal: Proposal = rounds.propose(self.config, self.state, self.arrivals, exhausted=False)
        rounds.encode(proposal.report)
        times.append(time.process_time())
        agreement = rounds.settle(self.config, rounds.decode_table(self.rows))
        times.append(time.process_time())
        plan = rounds.form(self.config, proposal, agreement, 0)
        times.append(time.process_time())
        rounds.conclude(self.config, plan, plan.totals * len(self.rows), len(self.rows), 0)
        times.append(time.process_time())
        return dict(zip(PHASES, (1000 * np.diff(times)).tolist(), strict=True)) | {"steps": agreement.num_steps}


def _measures(length: I64) -> Measures:
    zeros = np.zeros_like(length)
    return Measures(np.arange(len(length)), length, length, zeros, zeros)


def measure(num_ranks: int, window: int, name: str, layout: str) -> dict[str, Any]:
    """Medians over some repetitions."""
    world = World.of(num_ranks, window, name, layout)
    runs = [world.once() for _ in range(REPEATS)]
    out: dict[str, Any] = {phase: float(np.median([run[phase] for run in runs])) for phase in PHASES}
    sums = [sum(run[phase] for phase in PHASES) for run in runs]
    return out | {"sum": float(np.median(sums)), "most": max(sums), "row": world.rows.itemsize * world.rows.shape[1],
                  "steps": runs[0]["steps"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 4096])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--names", nargs="+", choices=lengths.DISTRIBUTIONS, default=["cv2"])
    parser.add_argument("--layout", choices=("padded", "packed"), default="padded")
    args = parser.parse_args()
    for name in args.names:
        for num_ranks in args.ranks:
            got = measure(num_ranks, args.window, name, args.layout)
            phases = "  ".join(f"{phase} {got[phase]:.2f}" for phase in PHASES)
            print(
                f"{num_ranks:5d} ranks, {name}, window {args.window}, {got['steps']} steps: {got['sum']:.2f} ms of CPU "
                f"(most {got['most']:.2f}): {phases}; {got['row']} bytes sent",
                flush=True,
            )


if __name__ == "__main__":
    main()
