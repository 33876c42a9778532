"""The round loop: draw, observe, report, agree, plan, emit. One generator for every way of running it.

It runs in the collate process, and in the training process where there are no workers. Everything that touches the
world comes in: where records come from, how ranks talk, whether the consumer has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from odb.errors import DisagreementError, MeasureError
from odb.exchange.base import Exchange
from odb.feed.source import Record
from odb.plan import cost
from odb.plan import round as protocol
from odb.plan.types import Agreement, Measures, PlanConfig, RoundState, StepPlan, Verdict


class Feed(Protocol):
    """Where records come from."""

    def take(self, poll: Callable[[], None]) -> list[Record] | None:
        """The next chunk of records, None when the epoch's order is used up; calls `poll` while it waits."""


@dataclass(frozen=True, slots=True)
class Emission:
    """One step for this rank: its plan and the samples of its group, in the plan's order (none where it is idle)."""

    plan: StepPlan
    samples: list[Any]
    measures: list[Any]  # `Measure` of each sample


@dataclass(frozen=True, slots=True)
class PeersClosed:
    """Nothing more can be planned: these ranks left the epoch, this one has not."""

    ranks: tuple[int, ...]


@dataclass
class EpochJob:
    """What one epoch's loop needs, and what it counts."""

    config: PlanConfig
    epoch: int
    feed: Feed
    exchange: Exchange
    config_digest: int
    is_closed: Callable[[], bool]
    poll: Callable[[], None]
    explain: Callable[[], str] = str  # why ranks disagree, in words
    on_empty: str = "error"
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    max_held_tokens: int = 0
    _backlog: list[Record] = field(default_factory=list)
    _held: dict[int, Record] = field(default_factory=dict)

    def steps(self) -> Iterator[Emission | PeersClosed]:
        """Yields this rank's steps in order; ends when the epoch is over on all ranks.

        After a `PeersClosed` the consumer must close this rank's side too, or give up with an error; the loop waits.
        """
        state = RoundState.start(self.epoch)
        while True:
            arrivals, exhausted = self._gather(state)
            closed = self.is_closed()
            proposal = protocol.propose(
                self.config, state, arrivals, exhausted=exhausted, closed=closed, config_digest=self.config_digest
            )
            agreement = self._agree(protocol.encode(proposal.report))
            self.rounds += 1
            if agreement.verdict in (Verdict.END, Verdict.ALL_CLOSED):
                self._count_dropped(agreement.verdict, len(proposal.window))
                return
            if agreement.verdict is Verdict.PEER_CLOSED:
                yield from self._wait_for_close(agreement, closed)
                state = replace(state, round=state.round + 1, agreement_digest=agreement.digest)
                continue
            plan = protocol.form(self.config, proposal, agreement, self.exchange.rank)
            totals = self.exchange.all_reduce_sum(plan.totals, self.poll)
            outcome = protocol.conclude(self.config, plan, totals, self.exchange.world_size, self.exchange.rank)
            for identity in outcome.dropped_ids.tolist():
                del self._held[identity]
            self.dropped["tail"] += len(outcome.dropped_ids)
            for step in outcome.steps:
                records = [self._held.pop(identity) for identity in step.ids.tolist()]
                yield Emission(step, [r.sample for r in records], [r.measure for r in records])
            state = outcome.state
            if outcome.ended:
                return

    def _agree(self, row: np.ndarray[Any, Any]) -> Agreement:
        rows = self.exchange.all_gather(row, self.poll)
        try:
            return protocol.settle(self.config, protocol.decode_all(rows))
        except DisagreementError as error:
            details = self.explain()
            raise DisagreementError(f"{error}\n{details}" if details else str(error), error.ranks) from None

    def _count_dropped(self, verdict: Verdict, num_held: int) -> None:
        self._held.clear()
        if num_held:
            self.dropped["closed" if verdict is Verdict.ALL_CLOSED else "tail"] += num_held

    def _wait_for_close(self, agreement: Agreement, closed: bool) -> Iterator[PeersClosed]:
        if not closed:
            yield PeersClosed(agreement.closed_ranks)

    def _gather(self, state: RoundState) -> tuple[Measures, bool]:
        """Draws until this round's window is closed; returns what was drawn, and whether the source is dry."""
        need = list(protocol.fill_target(self.config, state))
        taken: list[Record] = []
        exhausted = False
        while not exhausted and all(n > 0 for n in need) and not self.is_closed():
            if not self._backlog:
                chunk = self.feed.take(self.poll)
                if chunk is None:
                    exhausted = True
                    break
                self._backlog = self._admitted(chunk)
            self._use_backlog(taken, need)
        self.max_held_tokens = max(
            self.max_held_tokens, int(state.window.length.sum()) + sum(r.measure.length for r in taken if r.measure)
        )
        return _measures(taken), exhausted

    def _use_backlog(self, taken: list[Record], need: list[int]) -> None:
        used = 0
        for record in self._backlog:
            assert record.measure is not None
            taken.append(record)
            self._held[record.id] = record
            used += 1
            need[0] -= 1
            need[1] -= record.measure.length
            need[2] -= record.measure.num_bytes
            if need[0] <= 0 or need[1] <= 0 or need[2] <= 0:
                break
        self._backlog = self._backlog[used:]

    def _admitted(self, chunk: list[Record]) -> list[Record]:
        """The records of a chunk that may be planned; the others are refused or counted, as the options say."""
        good = [record for record in chunk if record.measure is not None]
        if len(good) < len(chunk):
            for record in chunk:
                if record.measure is None:
                    self._reject(record)
        if self.config.on_oversize == "alone" or not good:
            return good
        too_large = cost.oversize(self.config, _measures(good))
        for record in (r for r, large in zip(good, too_large, strict=True) if large):
            self._reject_oversize(record)
        return [r for r, large in zip(good, too_large, strict=True) if not large]

    def _reject(self, record: Record) -> None:
        if record.rejected == "empty" and self.on_empty == "error":
            raise MeasureError(
                f"{record.text}; every sample needs at least one token: mend the dataset, or give on_empty='skip', "
                "which leaves such samples out and counts them"
            )
        self.rejected[record.rejected] += 1

    def _reject_oversize(self, record: Record) -> None:
        if self.config.on_oversize == "error":
            assert record.measure is not None
            raise MeasureError(
                f"sample {record.id} has {record.measure.length} tokens ({record.measure.patches} patches) and alone "
                f"exceeds token_budget={self.config.token_budget} (max_patches={self.config.max_patches}): truncate it "
                "in the dataset, raise the budget, or give on_oversize='alone' or 'skip'"
            )
        self.rejected["oversize"] += 1


def _measures(records: list[Record]) -> Measures:
    rows = [(r.id, m.length, m.loss_tokens, m.patches, m.num_bytes) for r in records if (m := r.measure) is not None]
    table = np.array(rows, np.int64).reshape(len(rows), 5)
    return Measures(*(np.ascontiguousarray(column) for column in table.T))
