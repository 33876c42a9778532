"""Epochs of many ranks through the planning core, in one process, and what must hold for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from predicates import gives_nothing_up, keeps_the_bounds, require

from odb.plan import round as rounds
from odb.plan.types import I64, Measures, Outcome, PlanConfig, Room, RoundState

MAX_ROUNDS = 5000


@dataclass
class Shard:
    """A rank's lengths, and how far they are drawn."""

    lengths: I64
    position: int = 0

    @property
    def is_dry(self) -> bool:
        return self.position == len(self.lengths)

    def draw(self, room: Room) -> Measures:
        """Until a sample does not fit."""
        ahead = self.lengths[self.position : self.position + max(room.samples, room.must, 0)]
        num = room.num_taken(ahead, 8 * ahead)
        ids = np.arange(self.position, self.position + num)
        self.position += num
        length = self.lengths[ids]
        return Measures(ids, length, length // 2, length * 0, length * 8)


def drive(config: PlanConfig, shards: list[Shard], epoch: int) -> Iterator[list[Outcome]]:
    """One epoch, round by round: all ranks' outcomes."""
    states = [RoundState.start(epoch) for _ in shards]
    for _ in range(MAX_ROUNDS):
        arrivals = [shard.draw(rounds.fill_target(config, state)) for shard, state in zip(shards, states, strict=True)]
        proposals = [
            rounds.propose(config, state, new, exhausted=shard.is_dry)
            for state, new, shard in zip(states, arrivals, shards, strict=True)
        ]
        rows = np.stack([rounds.encode(proposal.report) for proposal in proposals])
        agreement = rounds.settle(config, rounds.decode_all(rows))
        plans = [rounds.form(config, proposal, agreement, rank) for rank, proposal in enumerate(proposals)]
        totals = np.sum([plan.totals for plan in plans], axis=0)
        outcomes = [rounds.conclude(config, plan, totals, len(shards), rank) for rank, plan in enumerate(plans)]
        yield outcomes
        states = [outcome.state for outcome in outcomes]
        if any(outcome.ended for outcome in outcomes):
            require(all(outcome.ended for outcome in outcomes), "all ranks learn of the end in the same round")
            return
    require(False, "termination", MAX_ROUNDS)


def check_epoch(config: PlanConfig, lengths: list[I64], epoch: int) -> int:
    """Drives one epoch; raises `Broken` where a guarantee does not hold. Returns the number of sample views."""
    shards = [Shard(own) for own in lengths]
    seen = [np.zeros(len(own), np.int64) for own in lengths]
    for outcomes in drive(config, shards, epoch):
        _check_round(config, lengths, outcomes)
        for times, outcome in zip(seen, outcomes, strict=True):
            np.add.at(times, np.concatenate([outcome.dropped_ids, *(step.ids for step in outcome.steps)]), 1)
            require(not len(outcome.dropped_ids) or not gives_nothing_up(config), "conservation: none dropped")
    for rank, (times, shard) in enumerate(zip(seen, shards, strict=True)):
        require(bool((times[: shard.position] == 1).all()), "conservation: each once", rank)
        require(not times[shard.position :].any(), "conservation: nothing that was not drawn", rank)
        require(shard.is_dry or not gives_nothing_up(config), "the end waits for every source", rank)
    return sum(map(len, lengths))


def _check_round(config: PlanConfig, lengths: list[I64], outcomes: list[Outcome]) -> None:
    shared = {tuple((s.step, s.sync_gradients, s.all_samples, s.all_tokens) for s in o.steps) for o in outcomes}
    require(len(shared) == 1, "step alignment")
    held = emitted = 0
    for own, outcome in zip(lengths, outcomes, strict=True):
        for step in outcome.steps:
            samples = own[step.ids].tolist()
            require(keeps_the_bounds(config, samples), "budget", samples)
            emitted += len(samples)
        held += len(outcome.state.window)
    require(sum(step.all_samples for step in outcomes[0].steps) == emitted, "totals")
    if gives_nothing_up(config) and held:
        require(emitted > 0, "termination: a sample leaves in every round", held)
    if not outcomes[0].ended:
        require(len(outcomes[0].steps) % config.grad_accum_steps == 0, "no accumulation window crosses a round")
