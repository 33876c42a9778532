"""Every world of a bounded size, driven through the real `fill_target`, `propose`, `settle`, `form` and `conclude`.

The states are those right after the draw: what each rank holds, with ages, how much it has drawn, whether its source
is dry. From each all that can come next is explored: a source gives any length or ends, and tells so with its last
sample or only when asked once more. So no list of worlds is needed: a rank's future is chosen when it is drawn, and
worlds that agree so far share their states. That is exhaustive over all length sequences, since every sequence is one
path of choices.

Reductions, and why each loses nothing:

- Order of events: between two exchanges ranks share nothing, and `settle` sees all reports at once; whatever the order
  in time in which ranks draw, plan and emit, the same values meet. One order stands for all of them.
- Ranks: `settle` treats ranks alike, so a state is the *sorted* tuple of what the ranks hold.
- Names: identities are only compared, so carried samples are renumbered in their order. Windows that differ in the
  order of samples of unlike length are one state: planning sorts by length first. The representative that is run keeps
  its raw order, so positions and sorted positions differ.
- Counters: what was emitted so far, steps and the digest's value decide nothing (digests are only compared). They are
  checked after each round and reset. `all_emitted_samples` stays where a quota reads it.

Conservation over an epoch follows from conservation in every round: each round's window is last round's carry plus
what was drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, combinations, combinations_with_replacement, groupby, product
from typing import Any, NamedTuple

import numpy as np
import predicates
from predicates import Broken, require

from odb.errors import DisagreementError, PeerFailedError
from odb.plan import round as rounds
from odb.plan.types import (
    NUM_QUANTILES,
    Agreement,
    Measures,
    Outcome,
    Plan,
    PlanConfig,
    Proposal,
    ReportTable,
    Room,
    RoundState,
    Status,
)

CONFIG_DIGEST = 7
EARLIER_DIGEST = 12345  # of the agreement before: any number, the same on all ranks
MAX_ROUNDS = 60
#: `settle` is run three more times, in other ways, for one in so many sets of reports.
EVERY = 32


def small_config(token_budget: int, window: int, **options: Any) -> PlanConfig:
    """A configuration whose only binding limits are those given."""
    defaults = {"max_held_tokens": 10**6, "max_held_bytes": 10**9, "max_steps_per_round": 100}
    return PlanConfig(token_budget=token_budget, window=window, **(defaults | options))


def measures(lengths: list[int], first_id: int) -> Measures:
    """Samples of which the shortest bear no loss."""
    length = np.array(lengths, np.int64)
    return Measures(np.arange(first_id, first_id + len(length)), length, length - 1, length * 0, length * 8)


class Facts(NamedTuple):
    """All of an agreement but its digest, to be compared and hashed."""

    verdict: str
    numbers: tuple[int, ...]
    num_emitting: tuple[int, ...]
    closed_ranks: tuple[int, ...]
    arrays: bytes


COLUMNS = tuple(one.name for one in fields(ReportTable))


class WatchedTable(ReportTable):
    """Reports that note which of their columns are looked at, in the order in which that happens."""

    seen: list[str]

    def __new__(cls, *columns: Any, **more: Any) -> WatchedTable:
        self = super().__new__(cls)
        object.__setattr__(self, "seen", [])
        return self

    def __getattribute__(self, name: str) -> Any:
        if name in COLUMNS:
            seen = object.__getattribute__(self, "seen")
            if name not in seen:
                seen.append(name)
        return object.__getattribute__(self, name)


def table_of(rows: np.ndarray) -> WatchedTable:
    """As `decode_table`, of rows that need no check."""
    return WatchedTable(*np.ascontiguousarray(rows[:, 1:-NUM_QUANTILES].T), rows[:, -NUM_QUANTILES:])


@dataclass
class Settled:
    """What `settle` came to, by what it looked at: a tree.

    It reads columns of a table one after the other, and which one it reads next can only depend on what it has read:
    so reports that agree in all columns that were read come to the same, whatever the other columns say.
    """

    column: int | None = None  # that is read next
    after: dict[tuple[Any, ...], Settled] = field(default_factory=dict)  # by its values
    result: tuple[Agreement, int] | None = None

    def find(self, rows: Sequence[tuple[Any, ...]]) -> tuple[Agreement, int] | None:
        """What is known of these reports, each a tuple of what is in its columns."""
        at = self
        while at.column is not None:
            following = at.after.get(tuple([row[at.column] for row in rows]))
            if following is None:
                return None
            at = following
        return at.result

    def add(self, rows: Sequence[tuple[Any, ...]], seen: list[str], result: tuple[Agreement, int]) -> None:
        """Keeps what reports come to whose columns were looked at in this order."""
        at = self
        for name in seen:
            column = COLUMNS.index(name)
            assert at.column in (None, column), "the next column depends on nothing but those before"
            at.column = column
            at = at.after.setdefault(tuple([row[column] for row in rows]), Settled())
        at.result = result


def facts_of(agreement: Agreement) -> Facts:
    """What an agreement says."""
    a = agreement
    arrays = a.caps.tobytes() + b"|" + a.grants.tobytes()
    numbers = a.epoch, a.round, a.num_steps, int(a.last), a.first_key
    return Facts(a.verdict.name, numbers, tuple(a.num_emitting.tolist()), a.closed_ranks, arrays)


@dataclass(frozen=True)
class Bounds:
    """How large the worlds are."""

    world_size: int
    most_samples: int  # of a rank
    lengths: tuple[int, ...]


@dataclass
class Explorer:
    """Explores one configuration. Pure functions are called once per distinct input; their results are shared."""

    config: PlanConfig
    bounds: Bounds
    num_states: int = 0
    endings: bool = True  # also closing, failing and drifting from every state
    depth: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    _states: dict[Any, int] = field(default_factory=dict)
    _between: list[tuple[RoundState, bool]] = field(default_factory=list)
    _draws: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _nodes: dict[Any, int] = field(default_factory=dict)
    _proposals: list[tuple[Proposal, bool, Any, int]] = field(default_factory=list)  # , dry, row, id of the row
    _rows: dict[bytes, int] = field(default_factory=dict)
    _cells: list[tuple[Any, ...]] = field(default_factory=list)  # of each distinct row
    _settled: Settled = field(default_factory=Settled)
    _agreed: dict[tuple[int, ...], tuple[Agreement, int]] = field(default_factory=dict)
    _agreements: dict[tuple[Facts, int], int] = field(default_factory=dict)
    _facts: dict[int, Facts] = field(default_factory=dict)
    _after: dict[tuple[int, bool], int] = field(default_factory=dict)
    _plans: dict[tuple[int, int, int], tuple[Plan, int]] = field(default_factory=dict)
    _outcomes: dict[tuple[int, bytes], tuple[Outcome, int]] = field(default_factory=dict)
    _joined: set[tuple[int, ...]] = field(default_factory=set)

    def run(self) -> Explorer:
        """Explores everything; raises `Broken` at the first state in which a guarantee does not hold."""
        assert self.config.pad_to_multiple_of == 1 and self.config.cost_fn is None
        start = replace(RoundState.start(0), agreement_digest=EARLIER_DIGEST)
        frontier = self._first(self._between_id(start, False))
        while frontier:
            self.depth += 1
            require(self.depth < MAX_ROUNDS, "termination", self.depth)
            frontier = self._layer(frontier)
        return self

    def _first(self, state: int) -> Any:
        """What `_layer` goes on from: the states of all ranks together."""
        return {(state,) * self.bounds.world_size}

    def windows(self) -> set[Any]:
        """All that one rank may hold right after a draw, and what it knows, in any state that was explored."""
        return set(self._nodes)

    def _layer(self, frontier: Any) -> Any:
        after: set[tuple[int, ...]] = set()
        seen: set[tuple[int, ...]] = set()
        for joint in frontier:
            for node in self._joint_draws(joint):
                if node not in seen:
                    seen.add(node)
                    successor = self._round(node)
                    if successor is not None:
                        after.add(successor)
        self.num_states += len(seen)
        return after

    def _joint_draws(self, joint: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """What all ranks together may hold after the draw, up to the order of ranks."""
        alike = [(self._draw(state), len(list(same))) for state, same in groupby(joint)]
        for parts in product(*(combinations_with_replacement(options, num) for options, num in alike)):
            yield tuple(sorted(chain.from_iterable(parts)))

    # One rank between rounds, and what it may draw.

    def _between_id(self, state: RoundState, dry: bool) -> int:
        if self.config.sample_quota is None:
            state = replace(state, all_emitted_samples=0)
        state = replace(
            state,
            window=replace(state.window, ids=np.arange(len(state.window))),
            step=0,
            emitted_samples=0,
            agreement_digest=EARLIER_DIGEST,
        )
        key = (self._content(state.window.length.tolist(), state.age.tolist()), self._rest(state), dry)
        if key not in self._states:
            self._states[key] = len(self._between)
            self._between.append((state, dry))
        return self._states[key]

    @staticmethod
    def _content(lengths: list[int], ages: list[int]) -> tuple[tuple[int, int], ...]:
        """Samples of one length keep their order, as identities break ties."""
        return tuple(sorted(zip(lengths, ages, strict=True), key=lambda sample: sample[0]))

    @staticmethod
    def _rest(state: RoundState) -> tuple[int, ...]:
        return state.round, state.observed_samples, state.observed_tokens, state.all_emitted_samples

    def _draw(self, between: int) -> tuple[int, ...]:
        if between not in self._draws:
            state, dry = self._between[between]
            target = rounds.fill_target(self.config, state)
            options = [([], True)] if dry else self._arrivals(state.observed_samples, target)
            carried = state.window.length.tolist()
            for new, _ in options:
                predicates.may_draw(self.config, carried, carried + new)
            self._draws[between] = tuple(sorted({self._node(state, new, is_dry) for new, is_dry in options}))
        return self._draws[between]

    def _arrivals(self, drawn: int, room: Room) -> list[tuple[list[int], bool]]:
        """All that a source may give until a sample does not fit, each with whether it says that it is dry.

        Which one that was is chosen in the next round, a shorter one or none at all included: more than can happen.
        """
        endless = self.config.sample_quota is not None
        if room.is_full:
            return [([], False)] if endless else [([], False), ([], True)]
        out: list[tuple[list[int], bool]] = [] if endless else [([], True)]
        if endless or drawn < self.bounds.most_samples:
            waits = [n for n in self.bounds.lengths if not room.takes(n, 8 * n)]
            out += [([], False)] if waits else []
            for length in self.bounds.lengths:
                if length not in waits:
                    left = room.less(length, 8 * length)
                    out += [([length, *new], is_dry) for new, is_dry in self._arrivals(drawn + 1, left)]
        return out

    def _node(self, state: RoundState, new: list[int], dry: bool) -> int:
        lengths, ages = [*state.window.length.tolist(), *new], [*state.age.tolist(), *[0] * len(new)]
        rest = self._rest(state)
        key = (self._content(lengths, ages), rest[0], rest[1] + len(new), rest[2] + sum(new), rest[3], dry)
        if key not in self._nodes:
            self.calls["propose"] += 1
            arrivals = measures(new, len(state.window))
            proposal = rounds.propose(self.config, state, arrivals, exhausted=dry, config_digest=CONFIG_DIGEST)
            held = proposal.window.length.tolist(), proposal.age.tolist()
            require(held == (lengths, ages), "conservation: what is drawn is held", held, lengths, ages)
            predicates.report_is_true(self.config, proposal.report, lengths, dry)
            if self.endings:
                check_closing_rounds(self.config, proposal)
            row = rounds.encode(proposal.report)
            self._nodes[key] = len(self._proposals)
            self._proposals.append((proposal, dry, row, self._row_id(row)))
        return self._nodes[key]

    # A round of all ranks.

    def _round(self, node: tuple[int, ...]) -> tuple[int, ...] | None:
        """Checks one round; the ranks' states after it, None where the epoch is over."""
        agreement, agreed = self._settle(node)
        plans = [self._form(rank, n, agreement, agreed) for rank, n in enumerate(node)]
        totals = plans[0][0].totals
        for plan, _ in plans[1:]:
            totals = totals + plan.totals
        data = totals.tobytes()
        concluded = [self._conclude(rank, plan, i, totals, data) for rank, (plan, i) in enumerate(plans)]
        together = tuple(number for _, number in concluded)
        if together not in self._joined:
            self._joined.add(together)
            self._check_together([plan for plan, _ in plans], [outcome for outcome, _ in concluded])
        if concluded[0][0].ended:
            return None
        return tuple(sorted(self._after_id(n, *one) for n, one in zip(node, concluded, strict=True)))

    def _after_id(self, node: int, outcome: Outcome, number: int) -> int:
        dry = self._proposals[node][1]
        if (number, dry) not in self._after:
            self._after[number, dry] = self._between_id(outcome.state, dry)
        return self._after[number, dry]

    def _row_id(self, row: np.ndarray) -> int:
        data = row.tobytes()
        if data not in self._rows:
            self._rows[data] = len(self._rows)
            self._cells.append((*row[1:-NUM_QUANTILES].tolist(), row[-NUM_QUANTILES:].tobytes()))
        return self._rows[data]

    def _settle(self, node: tuple[int, ...]) -> tuple[Agreement, int]:
        key = tuple(self._proposals[n][3] for n in node)
        if key not in self._agreed:
            known = self._settled.find(self._cells_of(node))
            if known is None or self.endings or len(self._agreed) % EVERY == 0:
                known = self._settle_anew(node, known)
            self._agreed[key] = known
        return self._agreed[key]

    def _cells_of(self, nodes: Sequence[int]) -> list[tuple[Any, ...]]:
        return [self._cells[self._proposals[node][3]] for node in nodes]

    def _settle_anew(self, nodes: Sequence[int], known: tuple[Agreement, int] | None) -> tuple[Agreement, int]:
        """What ranks with these windows agree on, which must be what is `known` of them already."""
        self.calls["settle"] += 1
        rows = np.stack([self._proposals[node][2] for node in nodes])
        table = table_of(rows)
        agreement = self._settle_reports(table)
        facts = facts_of(agreement)
        if self.calls["settle"] % EVERY == 0:
            self._check_settle(rows, facts, agreement.digest)
        self._check_digest(agreement, facts)
        if self.endings:
            check_endings(self.config, rows)
        number = self._agreements.setdefault((facts, agreement.digest), len(self._agreements))
        if known is not None:
            require(known[1] == number, "settle depends on what it reads alone", known, agreement)
            return known
        self._settled.add(self._cells_of(nodes), table.seen, (agreement, number))
        return agreement, number

    def _settle_reports(self, reports: Any) -> Agreement:
        try:
            return rounds.settle(self.config, reports)
        except (DisagreementError, PeerFailedError) as error:
            raise Broken(f"ranks that do the same disagree: {error}") from error

    def _check_settle(self, rows: np.ndarray, facts: Facts, digest: int) -> None:
        """Whoever runs it comes to the same, from single reports too; and ranks are treated alike."""
        again = self._settle_reports(rounds.decode_all(rows))
        require((facts_of(again), again.digest) == (facts, digest), "settle depends on the reports alone", again, facts)
        mirrored = facts_of(self._settle_reports(rounds.decode_table(rows[::-1])))
        require(mirrored == facts._replace(num_emitting=facts.num_emitting[::-1]), "ranks are treated alike", facts)

    def _check_digest(self, agreement: Agreement, facts: Facts) -> None:
        """One digest never stands for two agreements."""
        known = self._facts.setdefault(agreement.digest, facts)
        require(known == facts, "the digest tells agreements apart", known, facts)
        require(agreement.digest != EARLIER_DIGEST, "the digest is a new one", agreement)

    def _form(self, rank: int, node: int, agreement: Agreement, agreed: int) -> tuple[Plan, int]:
        key = (node, agreed, int(agreement.num_emitting[rank]))
        if key not in self._plans:
            self.calls["form"] += 1
            plan = rounds.form(self.config, self._proposals[node][0], agreement, rank)
            predicates.rank_is_idle_only_with_nothing(self.config, plan)
            self._plans[key] = plan, len(self._plans)
        return self._plans[key]

    def _conclude(self, rank: int, plan: Plan, number: int, totals: np.ndarray, data: bytes) -> tuple[Outcome, int]:
        key = (number, data)
        if key not in self._outcomes:
            self.calls["conclude"] += 1
            outcome = rounds.conclude(self.config, plan, totals, self.bounds.world_size, rank)
            predicates.rank_keeps_its_samples(self.config, plan, outcome)
            predicates.rank_keeps_the_budget(self.config, plan, outcome)
            require(
                outcome.state.agreement_digest == plan.agreement.digest,
                "the next report carries the digest of this agreement",
                outcome.state.agreement_digest,
            )
            self._outcomes[key] = outcome, len(self._outcomes)
        return self._outcomes[key]

    def _check_together(self, plans: list[Plan], outcomes: list[Outcome]) -> None:
        predicates.ranks_do_the_same(self.config, plans, outcomes)
        predicates.target_can_be_filled(self.config, plans)
        predicates.totals_are_true(self.config, plans, outcomes)
        predicates.round_makes_progress(self.config, plans, outcomes)
        predicates.end_is_right(self.config, plans, outcomes, plans[0].proposal.state.all_emitted_samples)


def check_endings(config: PlanConfig, rows: np.ndarray) -> None:
    """From this state: every set of ranks closes, every rank fails, every rank drifts; all must learn it at once."""
    reports = rounds.decode_all(rows)
    ranks = range(len(reports))
    for num in range(1, len(reports) + 1):
        for closed in combinations(ranks, num):
            said = tuple(replace(r, status=Status.CLOSED) if i in closed else r for i, r in enumerate(reports))
            predicates.verdict_on_closing(rounds.settle(config, said), closed, len(reports))
    for rank in ranks:
        said = tuple(replace(r, status=Status.FAILED) if i == rank else r for i, r in enumerate(reports))
        names_the_culprit(config, said, rank, PeerFailedError)
        for name in ("epoch", "round", "config_digest", "agreement_digest"):
            odd = replace(reports[rank], **{name: getattr(reports[rank], name) + 1})
            if len(reports) > 1:
                said = tuple(odd if i == rank else r for i, r in enumerate(reports))
                names_the_culprit(config, said, rank, DisagreementError)


def names_the_culprit(config: PlanConfig, reports: Any, rank: int, kind: type[Exception]) -> None:
    try:
        agreement = rounds.settle(config, reports)
    except (PeerFailedError, DisagreementError) as error:
        # Of two ranks that differ either may be the odd one: the first is what the second is compared with.
        named = error.ranks == (rank,) or (kind is DisagreementError and len(reports) == 2 and error.ranks == (1,))
        require(isinstance(error, kind) and named, "the error names the culprit", error, rank)
    else:
        raise Broken(f"failure is loud: rank {rank} differs or failed, and all went on: {agreement}")


def check_closing_rounds(config: PlanConfig, proposal: Proposal) -> None:
    """A rank's part of a round in which a peer has left, or all have: nothing is emitted, and nothing lost early."""
    mine, left = proposal.report, replace(proposal.report, status=Status.CLOSED)
    for reports in ((mine, left), (left, left)):
        agreement = rounds.settle(config, reports)
        plan = rounds.form(config, proposal, agreement, 0)
        outcome = rounds.conclude(config, plan, plan.totals, 2, 0)
        require(not outcome.steps and not len(outcome.dropped_ids), "closing: nothing moves", outcome)
        require(outcome.ended == (mine is not reports[0]), "closing: the end", outcome)
        require(len(outcome.state.window) == len(proposal.window), "closing: nothing is lost", outcome)
