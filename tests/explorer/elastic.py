"""Small worlds whose ranks share one order: all of them, driven through the planning core, every rank for itself.

What is checked in each round: equal agreements and steps (1), the budget (2), every key granted to one rank and emitted
once (3), something leaves or is granted (4), and that ranks whose ledgers differ are named (8).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from predicates import (
    Broken,
    gives_nothing_up,
    keeps_the_bounds,
    rank_is_idle_only_with_nothing,
    rank_keeps_its_samples,
    require,
)

from odb.plan import grants
from odb.plan import round as rounds
from odb.plan.types import I64, Agreement, Measures, Outcome, Plan, PlanConfig, Room, RoundState

_MAX_ROUNDS = 2000


@dataclass
class Rank:
    """One rank: its state, the keys that it may read, and what it has emitted."""

    state: RoundState
    keys: list[int]
    emitted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def draw(self, lengths: I64, room: Room) -> Measures:
        """Until a sample does not fit or the grants are used up."""
        taken: list[int] = []
        while self.keys and room.takes(size := int(lengths[self.keys[0]]), 8 * size):
            taken.append(self.keys.pop(0))
            room = room.less(size, 8 * size)
        ids = np.array(taken, np.int64)
        length = lengths[ids]
        return Measures(ids, length, length, length * 0, length * 8)


def worlds(most_samples: int, lengths: tuple[int, ...]) -> Iterator[I64]:
    """Every order of up to `most_samples` samples of these lengths."""
    for num in range(most_samples + 1):
        for one in itertools.product(lengths, repeat=num):
            yield np.array(one, np.int64)


def drive(config: PlanConfig, lengths: I64, world_size: int) -> int:
    """One epoch; raises `Broken` where a guarantee does not hold. Returns its rounds."""
    return run(config, lengths, world_size)[1]


def run(config: PlanConfig, lengths: I64, world_size: int) -> tuple[list[Rank], int]:
    """The same, and what became of the ranks."""
    ledger = (world_size, config.sample_quota)
    ranks = [
        Rank(grants.start(0, len(lengths), r, *ledger), list(grants.first_block(len(lengths), r, *ledger)))
        for r in range(world_size)
    ]
    for number in range(_MAX_ROUNDS):
        before = _progress(ranks)
        if _round(config, lengths, ranks):
            _check_end(config, lengths, ranks)
            return ranks, number + 1
        require(_progress(ranks) > before, "termination: something is granted, drawn or emitted", before)
    raise Broken(f"termination: {lengths}")


def _progress(ranks: list[Rank]) -> int:
    return ranks[0].state.next_key + sum(rank.state.num_drawn + len(rank.emitted) for rank in ranks)


def _round(config: PlanConfig, lengths: I64, ranks: list[Rank]) -> bool:
    proposals = []
    for rank in ranks:
        arrivals = rank.draw(lengths, rounds.fill_target(config, rank.state))
        proposals.append(rounds.propose(config, rank.state, arrivals, exhausted=not rank.keys))
    rows = np.stack([rounds.encode(proposal.report) for proposal in proposals])
    agreements = [rounds.settle(config, rounds.decode_table(rows)) for _ in ranks]
    require(len({a.digest for a in agreements}) == 1, "all ranks agree")
    plans = [rounds.form(config, p, a, r) for r, (p, a) in enumerate(zip(proposals, agreements, strict=True))]
    totals = np.sum([plan.totals for plan in plans], axis=0)
    outcomes = [rounds.conclude(config, plan, totals, len(ranks), r) for r, plan in enumerate(plans)]
    require(len({o.ended for o in outcomes}) == 1, "all ranks learn of the end in the same round")
    _check_grants(lengths, ranks, agreements)
    for number, (rank, plan, outcome) in enumerate(zip(ranks, plans, outcomes, strict=True)):
        _check_rank(config, lengths, plan, outcome)
        rank.state = outcome.state
        rank.emitted += [i for step in outcome.steps for i in step.ids.tolist()]
        rank.dropped += outcome.dropped_ids.tolist()
        rank.keys += grants.block(agreements[number].grants, agreements[number].first_key, number)
    return outcomes[0].ended


def _check_grants(lengths: I64, ranks: list[Rank], agreements: list[Agreement]) -> None:
    granted = [k for r, a in enumerate(agreements) for k in grants.block(a.grants, a.first_key, r)]
    first = ranks[0].state.next_key
    require(granted == list(range(first, first + len(granted))), "grants lie behind each other", first, granted)
    require(first + len(granted) <= len(lengths), "grants end with the order", granted, len(lengths))


def _check_rank(config: PlanConfig, lengths: I64, plan: Plan, outcome: Outcome) -> None:
    rank_keeps_its_samples(config, plan, outcome)
    rank_is_idle_only_with_nothing(config, plan)
    for step in outcome.steps:
        held = lengths[step.ids].tolist()
        require(keeps_the_bounds(config, held), "budget", held)
    if not outcome.ended:
        require(len(outcome.steps) % config.grad_accum_steps == 0, "no accumulation window crosses a round")


def _check_end(config: PlanConfig, lengths: I64, ranks: list[Rank]) -> None:
    emitted = sorted(i for rank in ranks for i in rank.emitted)
    dropped = [i for rank in ranks for i in rank.dropped]
    undrawn = [i for rank in ranks for i in rank.keys] + list(range(ranks[0].state.next_key, len(lengths)))
    require(sorted([*emitted, *dropped, *undrawn]) == list(range(len(lengths))), "conservation", emitted, dropped)
    require(not gives_nothing_up(config) or len(emitted) == len(lengths), "conservation: all of it", emitted)
