"""Deliberate breaks of the protocol. Each must be caught by the explorer on a small slice: an explorer that misses one
checks too little.

A break replaces one function of the real code while it is in force; `Break.where` says on which slice it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import loops
import numpy as np
from loops import Loops, ReplayExchange, small_worlds
from statespace import Bounds, Explorer, small_config

from odb.errors import PeerFailedError
from odb.feed.engine import EpochJob
from odb.plan import align, group, pack, packed
from odb.plan import round as rounds
from odb.plan.types import Measures, PlanConfig, ReportTable, Room, Status, Verdict

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Break:
    """What is replaced by what, and the slice: "space" (all reachable rounds) or "loops" (the loop's interleavings)."""

    owner: Any
    name: str
    by: Callable[[Any], Callable[..., Any]]  # the original -> its replacement
    driver: str = "space"
    token_budget: int = 4
    window: int = 2
    most_samples: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def explore(self, is_broken: bool, explorer: type[Explorer] = Explorer) -> None:
        """Runs the slice, with the break in force or, as a control, without it."""
        if not is_broken:
            return self._slice(explorer)
        with mock.patch.object(self.owner, self.name, self.by(getattr(self.owner, self.name))):
            self._slice(explorer)

    def _slice(self, explorer: type[Explorer]) -> None:
        config = small_config(self.token_budget, self.window, **self.options)
        if self.driver == "space":
            explorer(config, Bounds(2, self.most_samples, (1, 2, 3))).run()
        else:
            every = Loops()
            for world in small_worlds(config, 2, 2, (1, 3)):
                every.explore(world)


def _after(change: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """The original's result, changed: `change(result, *args)`."""
    return lambda original: lambda *args, **kw: change(original(*args, **kw), *args)


def _before(change: Callable[..., tuple[Any, ...]]) -> Callable[[Any], Callable[..., Any]]:
    """The original on other arguments: `change(*args)` gives them."""
    return lambda original: lambda *args, **kw: original(*change(*args), **kw)


def _all(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: lambda *args, **kw: value


def _seldom_idle(config: PlanConfig, proposal: Any, agreement: Any, rank: int) -> tuple[Any, ...]:
    emitting = agreement.num_emitting.copy()
    emitting[rank] -= emitting[rank] > 1
    return config, proposal, replace(agreement, num_emitting=emitting), rank


def _own_draws(config: PlanConfig, window: Measures, groups: Any, agreement: Any) -> tuple[Any, ...]:
    return config, window, groups, replace(agreement, round=agreement.round + len(window))


def _say(status: Status, instead: Status) -> Callable[[Any], Callable[..., Any]]:
    def change(config: PlanConfig, reports: Any) -> tuple[Any, ...]:
        table = reports if isinstance(reports, ReportTable) else ReportTable.of(reports)
        return config, replace(table, status=np.where(table.status == status, instead, table.status))

    return _before(change)


def _only_rank_0_ends(outcome: Any, config: Any, plan: Any, totals: Any, world: int, rank: int) -> Any:
    return replace(outcome, ended=outcome.ended and not rank)


def _one_row_missing(totals: Any, window: Measures, slots: Any) -> Any:
    if len(totals):
        totals[0] = 0
    return totals


def _leaves_at_once(original: Any) -> Callable[..., Any]:
    def steps(job: EpochJob) -> Any:
        for item in original(job):
            yield item
            if job.is_closed():
                return

    return steps


def _swallows(original: Any) -> Callable[..., Any]:
    def steps(job: EpochJob) -> Any:
        try:
            yield from original(job)
        except PeerFailedError:
            return

    return steps


def _loses_a_record(original: Any) -> Callable[..., Any]:
    def draw(job: EpochJob) -> bool:
        more = original(job)
        job._backlog = [entry for entry in job._backlog if entry[0].id != 1]
        return bool(more) and (bool(job._backlog) or draw(job))

    return draw


def _skips_when_idle(original: Any) -> Callable[..., Any]:
    def all_reduce_sum(self: ReplayExchange, values: Any, poll: Any = None) -> Any:
        return original(self, values, poll) if values.any() else values

    return all_reduce_sum


def _forgets_rank_0(original: Any) -> Callable[..., Any]:
    return lambda asked: original(
        asked if asked[0][0] == "all_gather" else [(asked[0][0], asked[0][1] * 0), *asked[1:]]
    )


def _says_nobody(original: Any) -> Callable[..., Any]:
    return lambda job, agreement, closed: original(job, replace(agreement, closed_ranks=()), closed)


def _never_says(original: Any) -> Callable[..., Any]:
    return lambda job, agreement, closed: iter(())


def _wrong_samples(original: Any) -> Callable[..., Any]:
    def emit(job: EpochJob, steps: Any) -> Any:
        for item in original(job, steps):
            yield replace(item, samples=item.samples[::-1])

    return emit


def _without_digest(agreement: Any, *_: Any) -> Any:
    return replace(agreement, digest=agreement.num_steps)


def _keep_old_digest(state: Any, plan: Any, *_: Any) -> Any:
    return replace(state, agreement_digest=plan.proposal.state.agreement_digest)


def _lose_last_arrival(config: PlanConfig, state: Any, arrivals: Measures) -> tuple[Any, ...]:
    return config, state, arrivals.take(np.arange(max(0, len(arrivals) - 1)))


def _until_enough(config: PlanConfig, state: Any, totals: Any) -> tuple[int, bool]:
    so_far = state.all_emitted_samples + np.cumsum(totals[:, 0])
    enough = np.flatnonzero(so_far > config.sample_quota)
    return (int(enough[0]) + 1, True) if len(enough) else (len(totals), False)


def _any_dry_ends(original: Any) -> Callable[..., Any]:
    return lambda table, steps: not table.running.all()


_A2 = {"grad_accum_steps": 2}
_QUOTA = {"join": False, "sample_quota": 5}
_PACKED = {"layout": "packed"}
_AGE = {"max_age": 1, "max_steps_per_round": 1}

BREAKS = {
    "the overflow is dropped": Break(
        rounds, "_next_state", _before(lambda p, c, n, t, r: (p, c[:0], n, t, r)), options=_AGE
    ),
    "what was emitted stays, too": Break(
        rounds, "_next_state", _before(lambda p, c, n, t, r: (p, np.arange(len(p.proposal.window)), n, t, r))
    ),
    "an arrival is lost": Break(rounds, "propose", _before(_lose_last_arrival)),
    "one step too many": Break(align, "_target", _after(lambda r, *_: (r[0] + 1, *r[1:]))),
    "one step too few": Break(align, "_target", _after(lambda r, *_: (max(0, r[0] - 1), *r[1:]))),
    "the target is more than a rank can fill": Break(
        align, "_odb_steps", lambda o: lambda config, table: (int(table.groups.max()), False), options={"max_held_tokens": 4},
        token_budget=2, window=4, most_samples=4,
    ),
    "the limit on steps is forgotten": Break(
        align, "_target", _before(lambda c, t: (replace(c, max_steps_per_round=99), t)), options=_AGE
    ),
    "unequal random draws": Break(
        rounds, "_in_order", _before(_own_draws), options={"grad_accum_steps": 4}, window=4, most_samples=4
    ),
    "groups run in the order they were made": Break(
        rounds, "by_cost", lambda o: lambda costs, ids: np.arange(len(costs)), window=3
    ),
    "a rank idles although it has samples": Break(rounds, "form", _before(_seldom_idle), token_budget=2),
    "idle steps come at random": Break(
        rounds, "in_time", _before(lambda n, c, e, r, full: (n, c, e, r)), token_budget=2, options=_A2
    ),
    "the digest of the last agreement is stale": Break(rounds, "_next_state", _after(_keep_old_digest)),
    "the digest does not tell agreements apart": Break(align, "_agreement", _after(_without_digest)),
    "reports are not compared": Break(align, "_check_equal", _all(None)),
    "a failed rank's report is not read": Break(rounds, "settle", _say(Status.FAILED, Status.DRAINED)),
    "a closed rank passes for a drained one": Break(rounds, "settle", _say(Status.CLOSED, Status.DRAINED)),
    "the epoch ends for all when one has left": Break(
        align,
        "_agreement",
        _before(lambda v, *a: (Verdict.ALL_CLOSED if v == Verdict.PEER_CLOSED else v, *a)),
    ),
    "carried samples don't age": Break(
        rounds, "_next_state", _after(lambda s, *_: replace(s, age=s.age * 0)), options=_AGE
    ),
    "overdue samples don't go first": Break(
        rounds, "_best", _before(lambda value, urgent, num: (value, urgent & False, num)), options=_AGE, window=3,
        most_samples=5,
    ),
    "a step's totals are missing on the ranks": Break(rounds, "_totals", _after(_one_row_missing)),
    "scales forget the number of ranks": Break(rounds, "loss_scales", _after(lambda s, *_: s / 2)),
    "the last optimizer step does not end": Break(
        rounds, "sync_flags", lambda o: lambda num, accum: np.arange(1, num + 1) % accum == 0, options=_A2
    ),
    "accumulation windows cross rounds": Break(
        align, "_whole_windows", lambda o: lambda config, steps: steps, options=_A2, token_budget=3
    ),
    "the window has no end": Break(rounds, "fill_target", _after(lambda room, *_: replace(room, samples=9))),
    "nothing is drawn any more": Break(rounds, "fill_target", _all(Room(0, 0, 0))),
    "the budget is exceeded by a row": Break(group, "most_rows", _after(lambda rows, *_: rows + 1)),
    "the epoch ends with the first dry rank": Break(align, "_all_leaves", _any_dry_ends),
    "the epoch never ends": Break(align, "_target", _after(lambda r, *_: (r[0], False, r[2]))),
    "only rank 0 learns of the end": Break(rounds, "conclude", _after(_only_rank_0_ends)),
    "a rank never says that it is dry": Break(rounds, "_status", _all(Status.RUNNING)),
    "a dry rank with samples passes for drained": Break(
        rounds, "_status", lambda o: lambda held, dry, closed: Status.DRAINED if dry else Status.RUNNING
    ),
    "drop_last drops complete groups": Break(
        group, "complete", _after(lambda mask, *_: mask & (np.arange(len(mask)) < 1)), options={"drop_last": True},
        window=4,
    ),
    "tail='drop' goes on past the first idle step": Break(
        align, "_steps_without_idle", lambda o: lambda c, t, steps: (steps, align._all_leaves(t, steps)),
        options={"tail": "drop"},
    ),
    "the quota is overshot": Break(rounds, "_until_quota", lambda o: _until_enough, options=_QUOTA),
    "the quota ends an epoch inside an optimizer step": Break(
        rounds,
        "_until_quota",
        _before(lambda c, s, t: (replace(c, grad_accum_steps=1), s, t)),
        options=_QUOTA | _A2,
        window=4,
    ),
    "packed: a row takes one token too many": Break(packed, "row_capacity", _after(lambda n, *_: n + 1), options=_PACKED),
    "packed: evened out without regard to the bounds": Break(
        pack, "_keeps", _all(True), options=_PACKED | _A2, token_budget=6, window=5, most_samples=5
    ),
    "packed: what is overdue waits like any other": Break(
        packed, "_overflow", _before(lambda c, p, g, n: (replace(c, max_age=99), p, g, n)), options=_PACKED | _AGE,
        most_samples=4,
    ),
    "packed: a group's last sample is forgotten": Break(
        packed, "choose", _after(lambda groups, *_: [g[: max(1, len(g) - 1)] for g in groups]), options=_PACKED,
    ),
    "loop: a rank that was left goes at once": Break(EpochJob, "steps", _leaves_at_once, "loops"),
    "loop: a peer's failure is swallowed": Break(EpochJob, "steps", _swallows, "loops"),
    "loop: a record is lost": Break(EpochJob, "_draw", _loses_a_record, "loops"),
    "loop: a rank with nothing skips the totals": Break(ReplayExchange, "all_reduce_sum", _skips_when_idle, "loops"),
    "loop: the totals of one rank are missing": Break(loops, "_combine", _forgets_rank_0, "loops"),
    "loop: those who stay are not told who left": Break(EpochJob, "_wait_for_close", _says_nobody, "loops"),
    "loop: those who stay are told nothing": Break(EpochJob, "_wait_for_close", _never_says, "loops"),
    "loop: a step carries another step's samples": Break(EpochJob, "_emit", _wrong_samples, "loops"),
}  # fmt: skip
