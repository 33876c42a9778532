"""The round loop: draw, observe, report, agree, plan, emit. One generator for every way of running it.

It runs in the collate process, and in the training process where there are no workers. Everything that touches the
world comes in: where records come from, how ranks talk, whether the consumer has left.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from odb.errors import DisagreementError, MeasureError
from odb.exchange.base import Exchange
from odb.feed.chunk import Record
from odb.feed.cut import PIECE, pieces, sample_of
from odb.feed.elastic import ENDLESS
from odb.feed.measure import Measure
from odb.plan import cost, grants
from odb.plan import round as protocol
from odb.plan.types import I64, Agreement, Measures, PlanConfig, Room, RoundState, StepPlan, Verdict
from odb.plan.wire import digest

logger = logging.getLogger("odb")


class Feed(Protocol):
    """Where records come from."""

    def take(self, poll: Callable[[], None]) -> list[Record] | None:
        """The next chunk of records, None when the epoch's order is used up; calls `poll` while it waits."""

    def grant(self, block: range, is_complete: bool) -> None:
        """More keys of a shared order; `is_complete`: no rank gets any behind them."""


@dataclass(frozen=True, slots=True)
class Emission:
    """One step for this rank: its plan and the samples of its group, in the plan's order (none where it is idle)."""

    plan: StepPlan
    samples: list[Any]
    measures: list[Any]  # `Measure` of each sample
    more: bool = False  # another step of this round follows, without waiting for anybody


@dataclass(frozen=True, slots=True)
class PeersClosed:
    """Nothing more can be planned: these ranks left the epoch, this one has not."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundMark:
    """What resuming inside a round needs. Made once a round; together with the last step taken it is the state.

    Attributes:
        first_step: of the round, counted in the epoch.
        groups: identities of each of the round's T steps on this rank.
        totals: (T, 3) samples, tokens and loss tokens of each step over all ranks.
        partial: (j, 3) the same of the j micro-steps before `first_step` that belong to its optimizer step.
        state: this rank's state after the round.
        cursor: keys of the rank's order that were used up when the round's window closed.
        is_last: the epoch is over after this round.
        stand_ins: (T + 1,) identity of the sample that fills in for this rank after 0 to T steps; -1: none yet.
        waiting: first and end of each block of keys that this rank was granted and had not used, grants of the round
            included; empty where shares are fixed.
    """

    first_step: int
    groups: tuple[I64, ...]
    totals: I64
    partial: I64
    state: RoundState
    cursor: int
    is_last: bool
    stand_ins: I64
    waiting: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where an epoch goes on: steps that were agreed on and not taken, then rounds from a state.

    `state.window` has the carried identities and no measures yet: samples are read, and measured, again.
    """

    pending: tuple[I64, ...]  # identities of each step
    partial: I64  # (j, 3), see `RoundMark`
    state: RoundState
    cursor: int
    is_last: bool
    stand_in: int = -1  # see `RoundMark.stand_ins`
    is_stream: bool = False  # all of it is read again: the stand-in is kept when it passes by
    waiting: tuple[tuple[int, int], ...] = ()  # see `RoundMark.waiting`

    @property
    def head(self) -> tuple[int, ...]:
        """Identities to read first: of the pending steps, then carried ones; a sample that was cut, once."""
        ids = tuple(dict.fromkeys(sample_of(i) for ids in (*self.pending, self.state.window.ids) for i in ids.tolist()))
        return (*ids, sample_of(self.stand_in)) if self.is_stream and self.stand_in >= 0 else ids


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
    measure: Callable[[Any], Measure] | None = None  # of pieces that are cut here
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)  # samples and tokens, by what was done to too long samples
    rounds: int = 0
    max_held_tokens: int = 0
    num_keys: int | None = None  # of this epoch on this rank, None where that can't be told
    pass_length: int | None = None  # keys of one pass, where passes repeat until a quota is reached
    resume: ResumePoint | None = None
    place: int = 0  # digest of where the epoch starts, equal on all ranks
    waiting: list[range] | None = None  # granted and not used, where one order is shared: `num_keys` are all ranks'
    mark: RoundMark | None = None
    cursor: int = 0
    _num_refused: int = 0  # records in a row that could not be planned
    stand_in: Record | None = None  # of a resumed stream
    _last_cheapest: int = -1
    _backlog: list[tuple[Record, bool]] = field(default_factory=list)  # and whether it is too large
    _plain: Measures | None = None  # of the last chunk that was drawn, if all of it may be planned
    _held: dict[int, Record] = field(default_factory=dict)

    def steps(self) -> Iterator[Emission | PeersClosed]:
        """Yields this rank's steps in order; ends when the epoch is over on all ranks.

        After a `PeersClosed` the consumer must close this rank's side too, or give up with an error; the loop waits.
        """
        state = replace(self._first_state(), agreement_digest=self.place)
        if self.resume is not None:
            state, is_over = yield from self._replay(self.resume)
            if is_over:
                return
        while True:
            first_key = self.cursor
            arrivals, exhausted = self._gather(state)
            closed = self.is_closed()
            proposal = protocol.propose(
                self.config,
                state,
                arrivals,
                exhausted=exhausted,
                closed=closed,
                config_digest=self.config_digest,
                num_used=self.cursor - first_key,
            )
            agreement = self._agree(protocol.encode(proposal.report))
            self.rounds += 1
            if agreement.verdict in (Verdict.END, Verdict.ALL_CLOSED):
                self._count_dropped(agreement.verdict, state)
                return
            if agreement.verdict is Verdict.PEER_CLOSED:
                yield from self._wait_for_close(agreement, closed)
                state = replace(state, round=state.round + 1, agreement_digest=agreement.digest)
                continue
            self._book_grants(agreement, state)
            plan = protocol.form(self.config, proposal, agreement, self.exchange.rank)
            totals = self.exchange.all_reduce_sum(plan.totals, self.poll) if agreement.num_steps else plan.totals
            outcome = protocol.conclude(self.config, plan, totals, self.exchange.world_size, self.exchange.rank)
            for identity in outcome.dropped_ids.tolist():
                del self._held[identity]
            self.dropped["tail"] += len(outcome.dropped_ids) + (
                self._num_undrawn(outcome.state) if outcome.ended else 0
            )
            self.mark = RoundMark(
                state.step,
                tuple(s.ids for s in outcome.steps),
                totals,
                _NO_ROWS,
                outcome.state,
                self.cursor,
                outcome.ended,
                self._stand_ins(outcome.steps),
                self._blocks(),
            )
            yield from self._emit(outcome.steps)
            state = outcome.state
            if outcome.ended:
                return

    def _first_state(self) -> RoundState:
        if self.waiting is None:
            return RoundState.start(self.epoch)
        num_keys = ENDLESS if self.num_keys is None else self.num_keys
        return grants.start(
            self.epoch, num_keys, self.exchange.rank, self.exchange.world_size, self.config.sample_quota
        )

    def _book_grants(self, agreement: Agreement, state: RoundState) -> None:
        """Passes on what this rank is granted, before it plans: the workers read meanwhile."""
        if self.waiting is None:
            return
        block = grants.block(agreement.grants, agreement.first_key, self.exchange.rank)
        self.waiting.append(block)
        self.feed.grant(block, agreement.first_key + int(agreement.grants.sum()) >= state.num_keys)

    def _blocks(self) -> tuple[tuple[int, int], ...]:
        return tuple((block.start, block.stop) for block in self.waiting or () if len(block))

    def _use_keys(self, num: int) -> None:
        """Keys have been used up."""
        self.cursor += num
        while self.waiting and num:
            block = self.waiting.pop(0)
            if num < len(block):
                self.waiting.insert(0, block[num:])
            num -= min(num, len(block))

    def _has_keys(self) -> bool:
        """Whether there may be something to draw: always, where shares are fixed."""
        return self.waiting is None or any(map(len, self.waiting))

    def _emit(self, steps: tuple[StepPlan, ...]) -> Iterator[Emission]:
        for step in steps:
            records = [self._held.pop(identity) for identity in step.ids.tolist()]
            more = step is not steps[-1]
            emission = Emission(step, [r.take() for r in records], [r.measure for r in records], more)
            del records  # their memory goes with the batch
            yield emission
            del emission

    def _stand_ins(self, steps: tuple[StepPlan, ...]) -> I64:
        """See `RoundMark.stand_ins`: the first of the shortest samples of the last real group."""
        out = [self._last_cheapest]
        for step in steps:
            ids = step.ids.tolist()
            out.append(min(ids, key=self._length_of) if ids else out[-1])
        self._last_cheapest = out[-1]
        return np.array(out, np.int64)

    def _length_of(self, identity: int) -> int:
        measure = self._held[identity].measure
        assert measure is not None
        return measure.length

    def _replay(self, point: ResumePoint) -> Generator[Emission, None, tuple[RoundState, bool]]:
        """The steps that were agreed on before the state was saved, with the same groups; totals are agreed on again.

        Where samples came out longer than they were, what is too much in a group is carried into the next round.
        Returns the state after these steps, and whether the epoch is over.
        """
        self.cursor, self._last_cheapest = point.cursor, point.stand_in
        self._read_head(point)
        self._check_same_place(point)
        window, slots = self._pending(point)
        slots, left, totals = protocol.refit(self.config, window, slots)
        planned, kept = sum(map(len, point.pending)), sum(map(len, slots))
        extra = np.array([[planned - kept, len(left), 0]], np.int64)  # counts over all ranks, in the same exchange
        sums = self.exchange.all_reduce_sum(np.concatenate([totals, extra]), self.poll)
        all_totals, (all_missing, all_left, _) = sums[:-1], sums[-1].tolist()
        state = self._resumed_state(point, window.take(left), planned - kept, all_missing)
        steps = protocol.replayed(
            self.config, state, window, slots, point.partial, all_totals, self.exchange.world_size
        )
        quota = self.config.sample_quota
        is_over = point.is_last and (not all_left if quota is None else state.all_emitted_samples >= quota)
        self.dropped["tail"] += len(left) if is_over else 0
        if steps:
            groups = tuple(step.ids for step in steps)
            marks = self._stand_ins(steps)
            self.mark = RoundMark(
                steps[0].step, groups, all_totals, point.partial, state, point.cursor, is_over, marks, point.waiting
            )
        yield from self._emit(steps)
        return state, is_over

    def _pending(self, point: ResumePoint) -> tuple[Measures, tuple[I64, ...]]:
        """The samples of pending steps as they are measured now, and each step's positions among them."""
        groups = [[i for i in ids.tolist() if i in self._held] for ids in point.pending]
        window = _measures([self._held[i] for ids in groups for i in ids])
        ends = np.cumsum([0, *map(len, groups)]).tolist()
        return window, tuple(np.arange(a, b) for a, b in pairwise(ends))

    def _check_same_place(self, point: ResumePoint) -> None:
        """All ranks must resume from states that were saved after the same step."""
        here = replace(point.state, observed_samples=0, observed_tokens=0, emitted_samples=0, step=0)
        report = protocol.propose(
            self.config, replace(here, window=Measures.empty(), age=_NO_IDS), Measures.empty(), exhausted=True
        ).report
        place = digest(repr((point.state.agreement_digest, len(point.pending), point.partial.tolist())))
        try:
            self._agree(protocol.encode(replace(report, config_digest=self.config_digest, agreement_digest=place)))
        except DisagreementError as error:
            raise DisagreementError(
                f"the ranks can't resume together: each must load the state that was saved after the same step. {error}",
                error.ranks,
            ) from None

    def _read_head(self, point: ResumePoint) -> None:
        missing = set(point.head)
        wanted = {i for ids in (*point.pending, point.state.window.ids) for i in ids.tolist()}
        while missing:
            if not self._backlog and not self._draw():
                break
            record, is_large = self._backlog[0]
            if record.id not in missing:
                break
            del self._backlog[0]
            missing.discard(record.id)
            if point.is_stream and record.id == sample_of(point.stand_in):
                self.stand_in = record
            else:
                self._held |= {one.id: one for one in self._admitted(record, is_large) if one.id in wanted}

    def _resumed_state(self, point: ResumePoint, left: Measures, missing: int, all_missing: int) -> RoundState:
        """The state after the replayed steps: its window measured anew, and with it what had to leave its group."""
        state, window = point.state, point.state.window
        here = [k for k, i in enumerate(window.ids.tolist()) if i in self._held]
        carried = _measures([self._held[int(window.ids[k])] for k in here])
        overdue = np.full(len(left), self.config.max_age, np.int64)
        return replace(
            state,
            window=Measures.concat([left, carried]),
            age=np.concatenate([overdue, state.age[here]]),
            emitted_samples=state.emitted_samples - missing,
            all_emitted_samples=state.all_emitted_samples - all_missing,
        )

    def _agree(self, row: np.ndarray[Any, Any]) -> Agreement:
        rows = self.exchange.all_gather(row, self.poll)
        try:
            return protocol.settle(self.config, protocol.decode_table(rows))
        except DisagreementError as error:
            details = self.explain()
            raise DisagreementError(f"{error}\n{details}" if details else str(error), error.ranks) from None

    def _count_dropped(self, verdict: Verdict, state: RoundState) -> None:
        """What the epoch's end finds here: all that was drawn, also for a round that planned nothing."""
        if verdict is Verdict.ALL_CLOSED:
            self.dropped["closed"] += len(self._held)
        else:
            self.dropped["tail"] += len(self._held) + self._num_undrawn(state)
        self._held.clear()

    def _wait_for_close(self, agreement: Agreement, closed: bool) -> Iterator[PeersClosed]:
        if not closed:
            yield PeersClosed(agreement.closed_ranks)

    def _gather(self, state: RoundState) -> tuple[Measures, bool]:
        """Draws until this round's window is closed; returns what was drawn, and whether the source is dry."""
        room = protocol.fill_target(self.config, state)
        taken: list[Measures] = []
        exhausted = False
        while not (room.is_full or self._backlog_waits(room) or self.is_closed()):
            if not self._has_keys() or (not self._backlog and not self._draw()):
                exhausted = True
                break
            room = self._use_backlog(taken, room)
        # Told a round earlier than by drawing in vain.
        exhausted = exhausted or (self.cursor == self.num_keys if self.waiting is None else not self._has_keys())
        arrivals = Measures.concat(taken)
        held = int(state.window.length.sum() + arrivals.length.sum())
        self.max_held_tokens = max(self.max_held_tokens, held)
        return arrivals, exhausted

    def _num_undrawn(self, state: RoundState) -> int:
        """Sample views of an epoch that ends by an option before they were drawn; ungranted ones are rank 0's."""
        if self.num_keys is None:  # without end: as many as anybody likes
            return 0
        if self.waiting is not None:
            return sum(map(len, self.waiting)) + (0 if self.exchange.rank else state.num_keys - state.next_key)
        return self.num_keys - self.cursor

    def _draw(self) -> bool:
        """The next records into the backlog; False when the source is dry."""
        chunk: list[Record] | None = []
        while not chunk:
            chunk = self.feed.take(self.poll)
            if chunk is None:
                return False
        good = _measures(chunk)
        large = self._too_large(good)
        self._plain = good if len(good) == len(chunk) and not large.any() else None
        large_ids = set(good.ids[large].tolist())
        self._backlog = [(record, record.id in large_ids) for record in chunk]
        return True

    def _too_large(self, measures: Measures) -> np.ndarray[Any, Any]:
        """(n,) Whether each sample alone exceeds the budget; not asked where that is allowed."""
        if self.config.on_oversize == "alone":
            return np.zeros(len(measures), np.bool_)
        return cost.oversize(self.config, measures)

    def _backlog_waits(self, room: Room) -> bool:
        """Whether the next record is one that the window has no room for."""
        return bool(self._backlog) and not room.takes(*self._size(*self._backlog[0]))

    def _use_backlog(self, taken: list[Measures], room: Room) -> Room:
        """Takes records until one does not fit; returns the room that is left."""
        plain, self._plain = self._plain, None
        is_whole = plain is not None and len(plain) == len(self._backlog)
        if plain is not None and is_whole and room.num_taken(plain.length, plain.num_bytes) == len(plain):
            return self._use_all(taken, plain, room)
        ones: list[Record] = []
        used = 0
        for record, is_large in self._backlog:
            if not room.takes(*self._size(record, is_large)):
                break
            used += 1
            for one in self._admitted(record, is_large):
                assert one.measure is not None
                ones.append(one)
                self._held[one.id] = one
                room = room.less(one.measure.length, one.measure.num_bytes)
        taken.append(_measures(ones))
        self._use_keys(used)
        self._backlog = self._backlog[used:]
        return room

    def _use_all(self, taken: list[Measures], plain: Measures, room: Room) -> Room:
        """The same for a whole chunk that fits, at once."""
        taken.append(plain)
        self._held.update((record.id, record) for record, _ in self._backlog)
        self._num_refused = 0
        self._use_keys(len(plain))
        self._backlog = []
        return room.less(int(plain.length.sum()), int(plain.num_bytes.sum()), len(plain))

    def _size(self, record: Record, is_large: bool) -> tuple[int, int]:
        """Tokens and bytes that a record adds to the window at most; none where it is refused."""
        if record.measure is None or (is_large and self.config.on_oversize not in ("truncate", "split")):
            return 0, 0
        length = record.measure.length
        if is_large and self.config.on_oversize == "truncate":
            length = min(length, cost.row_capacity(self.config))
        return length, record.measure.num_bytes

    def _admitted(self, record: Record, is_large: bool) -> list[Record]:
        """What may be planned of a record; the others are refused, counted or cut, as the options say."""
        if record.measure is not None and not is_large:
            self._num_refused = 0
            return [record]
        if record.measure is not None and self.config.on_oversize in ("truncate", "split"):
            self._num_refused = 0
            return self._cut(record)
        if record.measure is None:
            self._reject(record)
        else:
            self._reject_oversize(record)
        self._num_refused += 1
        if self.pass_length is not None and self._num_refused >= self.pass_length:
            raise MeasureError(
                f"a whole pass of {self.pass_length} samples gave none that may be planned ({dict(self.rejected)}), so "
                f"sample_quota={self.config.sample_quota} can't be reached: mend the dataset or its policies"
            )
        return []

    def _cut(self, record: Record) -> list[Record]:
        """A sample longer than a packed row, cut to its capacity, or in pieces that are planned one by one."""
        assert record.measure is not None and self.measure is not None
        capacity = cost.row_capacity(self.config)
        try:
            parts = pieces(record.take(), record.measure.length, capacity)
        except MeasureError as error:
            raise MeasureError(f"sample {record.id} has {record.measure.length} tokens: {error}") from None
        if self.config.on_oversize == "truncate":
            del parts[1:]
            self.cut["truncated_samples"] += 1
            self.cut["truncated_tokens"] += record.measure.length - capacity
        else:
            self.cut["split_samples"] += 1
        return [Record(record.id + number * PIECE, part, self.measure(part)) for number, part in enumerate(parts)]

    def fitting(self, record: Record, number: int = 0) -> Any:
        """A record's sample to fill in for this rank; piece `number` of it where it is longer than a row and may be cut."""
        if record.measure is None or self.config.on_oversize not in ("truncate", "split"):
            return record.take()
        parts = pieces(record.take(), record.measure.length, cost.row_capacity(self.config))
        return parts[min(number, len(parts) - 1)]

    def _reject(self, record: Record) -> None:
        if record.rejected == "empty" and self.on_empty == "error":
            raise MeasureError(
                f"{record.text}; every sample needs at least one token: mend the dataset, or give on_empty='skip', "
                "which leaves such samples out and counts them"
            )
        if not self.rejected[record.rejected]:
            logger.warning("left out: %s (said once an epoch; stats().rejected counts them)", record.text)
        self.rejected[record.rejected] += 1

    def _reject_oversize(self, record: Record) -> None:
        if self.config.on_oversize == "error":
            assert record.measure is not None
            raise MeasureError(
                f"sample {record.id} has {record.measure.length} tokens ({record.measure.patches} patches) and alone "
                f"exceeds {self._bound_text()} (max_patches={self.config.max_patches}): truncate it in the dataset, raise "
                f"the budget, or give on_oversize={self._remedies()}"
            )
        self.rejected["oversize"] += 1

    def _bound_text(self) -> str:
        config = self.config
        rows = f" / rows_per_batch={config.rows_per_batch}" if config.rows_per_batch > 1 else ""
        return f"token_budget={config.token_budget}{rows}"

    def _remedies(self) -> str:
        return "'truncate', 'split', 'alone' or 'skip'" if self.config.layout == "packed" else "'alone' or 'skip'"


_NO_ROWS = np.zeros((0, 3), np.int64)
_NO_IDS = np.empty(0, np.int64)


def _measures(records: list[Record]) -> Measures:
    rows = [(r.id, m.length, m.loss_tokens, m.patches, m.num_bytes) for r in records if (m := r.measure) is not None]
    table = np.array(rows, np.int64).reshape(len(rows), 5)
    return Measures(*(np.ascontiguousarray(column) for column in table.T))
