"""All ranks of an epoch in one process: the planning core without processes, transports or samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from odb.plan import round as rounds
from odb.plan.types import Agreement, Measures, Plan, PlanConfig, Room, RoundState, StepPlan


def make_config(token_budget: int, **options: Any) -> PlanConfig:
    """A configuration with roomy limits."""
    defaults = {
        "window": 1024,
        "max_held_tokens": 64 * token_budget,
        "max_held_bytes": 10**12,
        "max_steps_per_round": 4096,
    }
    return PlanConfig(token_budget=token_budget, **(defaults | options))


def make_measures(
    lengths: Sequence[int],
    ids: Sequence[int] | None = None,
    loss_tokens: Sequence[int] | None = None,
    patches: Sequence[int] | None = None,
) -> Measures:
    """Samples of these lengths; 8 bytes a token, every token bears loss unless told otherwise."""
    length = np.array(lengths, np.int64)
    return Measures(
        ids=np.arange(len(length)) if ids is None else np.array(ids, np.int64),
        length=length,
        loss_tokens=length if loss_tokens is None else np.array(loss_tokens, np.int64),
        patches=np.zeros_like(length) if patches is None else np.array(patches, np.int64),
        num_bytes=length * 8,
    )


def strided(lengths: Sequence[int], world_size: int) -> list[Measures]:
    """Rank `r` owns ids `r, r+W, ...`."""
    return [make_measures(lengths[r::world_size], range(r, len(lengths), world_size)) for r in range(world_size)]


def blocks(sizes: Sequence[int], length: int) -> list[Measures]:
    """Contiguous blocks of these sizes, all samples of one length."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return [make_measures([length] * n, range(s, s + n)) for n, s in zip(sizes, starts, strict=False)]


@dataclass
class Source:
    """A rank's samples in their order; `passes` > 1 starts over, as non-join epochs with a quota do."""

    samples: Measures
    lookahead: bool = True  # knows that it is dry as soon as the last sample is taken, not only at the next attempt
    position: int = 0
    exhausted: bool = False

    def __post_init__(self) -> None:
        self.exhausted = self.lookahead and not len(self.samples)

    def draw(self, room: Room) -> Measures:
        """Samples until one does not fit or nothing is left."""
        start = self.position
        while not room.is_full:
            if self.position == len(self.samples):
                self.exhausted = True
                break
            length, size = int(self.samples.length[self.position]), int(self.samples.num_bytes[self.position])
            if not room.takes(length, size):
                break
            room = room.less(length, size)
            self.position += 1
        if self.lookahead and self.position == len(self.samples):
            self.exhausted = True
        return self.samples.take(np.arange(start, self.position))


@dataclass
class Epoch:
    """What an epoch came to. `steps[r]` are rank `r`'s, in order."""

    steps: list[list[StepPlan]]
    dropped: list[list[int]]
    undrawn: list[list[int]] = field(default_factory=list)  # never read, as the epoch ended before
    final: list[RoundState] = field(default_factory=list)  # after the last round, per rank
    agreements: list[list[Agreement]] = field(default_factory=list)  # of each round, per rank
    plans: list[list[Plan]] = field(default_factory=list)
    states: list[list[RoundState]] = field(default_factory=list)  # before each round, per rank

    def emitted(self) -> list[int]:
        """All ids, as often as they were emitted."""
        return sorted(int(i) for rank in self.steps for step in rank for i in step.ids)

    def all_dropped(self) -> list[int]:
        """All ids that left unemitted."""
        return sorted(i for rank in self.dropped for i in rank)

    def num_idle(self) -> list[int]:
        """Idle steps of each rank."""
        return [sum(step.idle for step in rank) for rank in self.steps]


def drive_epoch(
    config: PlanConfig, shards: Sequence[Measures], epoch: int = 0, lookahead: bool = True, max_rounds: int = 10_000
) -> Epoch:
    """Runs all ranks through an epoch; fails if they don't end together or don't end at all."""
    world = len(shards)
    sources = [Source(shard, lookahead) for shard in shards]
    states = [RoundState.start(epoch) for _ in shards]
    out = Epoch([[] for _ in shards], [[] for _ in shards])
    for _ in range(max_rounds):
        out.states.append(list(states))
        arrivals = [s.draw(rounds.fill_target(config, state)) for s, state in zip(sources, states, strict=True)]
        proposals = [
            rounds.propose(config, state, new, exhausted=source.exhausted, config_digest=7)
            for state, new, source in zip(states, arrivals, sources, strict=True)
        ]
        reports = rounds.decode_all(np.stack([rounds.encode(p.report) for p in proposals]))
        agreements = [rounds.settle(config, reports) for _ in shards]
        plans = [rounds.form(config, p, a, r) for r, (p, a) in enumerate(zip(proposals, agreements, strict=True))]
        totals = np.sum([plan.totals for plan in plans], axis=0)
        outcomes = [rounds.conclude(config, plan, totals, world, r) for r, plan in enumerate(plans)]
        out.agreements.append(agreements)
        out.plans.append(plans)
        for rank, outcome in enumerate(outcomes):
            out.steps[rank].extend(outcome.steps)
            out.dropped[rank].extend(outcome.dropped_ids.tolist())
        states = [outcome.state for outcome in outcomes]
        assert len({outcome.ended for outcome in outcomes}) == 1, "ranks disagree on the end"
        if outcomes[0].ended:
            out.final = states
            out.undrawn = [source.samples.ids[source.position :].tolist() for source in sources]
            return out
    raise AssertionError(f"no end after {max_rounds} rounds")
