"""Every interleaving of the production round loop, `EpochJob.steps`, in small worlds.

Ranks share nothing but the exchange. So what a rank does next is a function of its own samples, of what its consumer
and its source do, and of the results of its collectives so far; events of different ranks between two collectives
commute. An interleaving is therefore given, up to the order of independent events, by *where in each rank's own
sequence of events* something happens to it, and it is enough to enumerate these places, independently for each rank:

- its consumer leaves: `is_closed` turns true at its j-th evaluation, for every j that occurs (the consumer runs in
  another process: between two evaluations nobody can tell when it left);
- its source fails at the j-th record, or it fails while it waits in its j-th collective, having contributed;
- in the latter case each peer may, or may not, still get the result of that collective: all subsets are run.

Since a rank is a function of its inputs, it is run again from the start for each new result, with the results so far
replayed; equal runs are shared between interleavings. No threads, no clock. A rank that asks for a collective that its
peers don't ask for is a deadlock, found at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
from predicates import gives_nothing_up, keeps_the_bounds, require

from odb.errors import PeerFailedError
from odb.feed.engine import Emission, EpochJob, PeersClosed
from odb.feed.measure import Measure
from odb.feed.source import Record
from odb.plan.types import I64, PlanConfig, StepPlan

MAX_CALLS = 60
NEVER = 10**9

#: The result of a collective as it is replayed: an array, or the rank whose failure was seen instead.
Result = tuple[tuple[int, ...], bytes] | int


class _Blocked(BaseException):
    """The rank waits in a collective whose result is not there yet."""


class InjectedError(Exception):
    """What a rank fails with here."""


@dataclass(frozen=True)
class Script:
    """What happens to one rank: where its consumer leaves, where it fails."""

    leaves: int = NEVER  # evaluation of `is_closed`
    source_fails: int = NEVER  # record
    wait_fails: int = NEVER  # collective, after contributing


@dataclass
class ReplayExchange:
    """Gives the results so far, then blocks."""

    rank: int
    world_size: int
    log: tuple[Result, ...]
    calls: int = 0
    asked: tuple[str, I64] | None = None

    def all_gather(self, row: I64, poll: Callable[[], None] | None = None) -> I64:
        return self._call("all_gather", row, poll)

    def all_reduce_sum(self, values: I64, poll: Callable[[], None] | None = None) -> I64:
        return self._call("all_reduce_sum", values, poll)

    def _call(self, kind: str, values: I64, poll: Callable[[], None] | None) -> I64:
        self.asked = kind, values
        self.calls += 1
        result = self.log[self.calls - 1] if self.calls <= len(self.log) else None
        assert poll is not None
        if result is None or not isinstance(result, int):
            poll()
        if result is None:
            raise _Blocked
        if isinstance(result, int):
            raise PeerFailedError(f"rank {result} failed", (result,))
        self.asked = None
        shape, data = result
        return np.frombuffer(data, np.int64).reshape(shape)

    def waiting_for_consumer(self) -> Any:
        return nullcontext()

    def check(self) -> None:
        """The driver decides where a failure is seen."""

    def explain_disagreement(self) -> str:
        return ""

    def publish_failure(self, text: str) -> None:
        """The driver sees the exception itself."""

    def linger(self, seconds: float) -> bool:
        return True

    def close(self) -> None:
        """Nothing to leave."""


@dataclass
class ListFeed:
    """Records of these lengths, in chunks; fails at one of them if told to."""

    lengths: tuple[int, ...]
    chunk: int
    fails: int
    next: int = 0

    def take(self, poll: Callable[[], None]) -> list[Record] | None:
        poll()
        start, self.next = self.next, min(self.next + self.chunk, len(self.lengths))
        if start <= self.fails < max(self.next, start + 1):
            raise InjectedError(f"record {self.fails}")
        if start == self.next:
            return None
        return [self._record(i) for i in range(start, self.next)]

    def _record(self, i: int) -> Record:
        n = self.lengths[i]
        return Record(id=i, sample=("sample", i), measure=Measure(n, n - 1, 0, 8 * n))


@dataclass
class Trace:
    """What a rank has done with the results so far, and what it waits for."""

    steps: list[StepPlan] = field(default_factory=list)
    peers_closed: list[tuple[int, ...]] = field(default_factory=list)
    asked: tuple[str, I64] | None = None  # None: it has ended
    error: Exception | None = None
    left: bool = False
    evaluations: int = 0
    records: int = 0
    calls: int = 0
    rounds: int = 0
    drawn: int = 0
    num_dropped: int = 0
    max_held_tokens: int = 0


@dataclass(frozen=True)
class World:
    """Who has what, and how."""

    config: PlanConfig
    shards: tuple[tuple[int, ...], ...]
    chunk: int = 1
    tells_length: bool = True  # the number of keys is known beforehand, as with map-style datasets


@dataclass
class Loops:
    """Runs worlds and their interleavings; counts both."""

    counts_what_was_left: bool = True  # epochs that were left: all that was drawn is counted, not only never too much
    worlds: int = 0
    interleavings: int = 0
    _traces: dict[Any, Trace] = field(default_factory=dict)

    def run(self, world: World, scripts: tuple[Script, ...], sees_it_late: tuple[int, ...] = ()) -> list[Trace]:
        """One interleaving to its end. `sees_it_late`: who still gets the result of the collective that a peer fails in."""
        self.interleavings += 1
        logs: list[tuple[Result, ...]] = [()] * len(world.shards)
        for _ in range(MAX_CALLS):
            traces = [self._trace(world, rank, scripts[rank], log) for rank, log in enumerate(logs)]
            waiting = [rank for rank, trace in enumerate(traces) if trace.error is None and trace.asked is not None]
            if not waiting:
                return traces
            results = _results(traces, waiting, sees_it_late)
            logs = [(*log, results[rank]) if rank in waiting else log for rank, log in enumerate(logs)]
        raise AssertionError(f"no end after {MAX_CALLS} collectives")

    def _trace(self, world: World, rank: int, script: Script, log: tuple[Result, ...]) -> Trace:
        key = (world.shards[rank], rank, script, log)
        if key not in self._traces:
            self._traces[key] = run_rank(world, rank, script, log)
        return self._traces[key]

    def explore(self, world: World, leaving: bool = True, failing: bool = True) -> None:
        """All interleavings of one world."""
        self.worlds += 1
        self._traces.clear()
        plain = self.run(world, (Script(),) * len(world.shards))
        check_undisturbed(world, plain)
        if leaving:
            self._leave_everywhere(world)
        if failing:
            for rank, trace in enumerate(plain):
                self._fail_everywhere(world, rank, trace, plain)

    def _leave_everywhere(self, world: World) -> None:
        """Each rank's consumer leaves at every evaluation that occurs in any run, or never: until no run has more."""
        done: set[tuple[int, ...]] = set()
        while True:
            places = [[*range(self._evaluations(rank)), NEVER] for rank in range(len(world.shards))]
            todo = [chosen for chosen in product(*places) if chosen not in done]
            if not todo:
                return
            for chosen in todo:
                done.add(chosen)
                traces = self.run(world, tuple(Script(leaves=place) for place in chosen))
                check_left(traces, self.counts_what_was_left)

    def _evaluations(self, rank: int) -> int:
        """The most evaluations of `is_closed` on this rank in any run so far of this world."""
        return max(trace.evaluations for key, trace in self._traces.items() if key[1] == rank)

    def _fail_everywhere(self, world: World, rank: int, trace: Trace, plain: list[Trace]) -> None:
        others = [r for r in range(len(world.shards)) if r != rank]
        scripts = [Script(source_fails=j) for j in range(trace.records)]
        scripts += [Script(wait_fails=j) for j in range(trace.calls)]
        for script in scripts:
            chosen = tuple(script if r == rank else Script() for r in range(len(world.shards)))
            late = product((False, True), repeat=len(others)) if script.wait_fails < NEVER else [(False,) * len(others)]
            for flags in late:
                sees_it_late = tuple(r for r, flag in zip(others, flags, strict=True) if flag)
                check_failed(rank, self.run(world, chosen, sees_it_late), plain)


def run_rank(world: World, rank: int, script: Script, log: tuple[Result, ...]) -> Trace:
    """One rank, from the start to where it needs a result that is not there."""
    trace = Trace()
    exchange = ReplayExchange(rank, len(world.shards), log)

    def is_closed() -> bool:
        trace.evaluations += 1
        trace.left = trace.left or trace.evaluations > script.leaves
        return trace.left

    def poll() -> None:
        if exchange.asked is not None and exchange.calls > script.wait_fails:
            raise InjectedError(f"collective {script.wait_fails}")

    feed = ListFeed(world.shards[rank], world.chunk, script.source_fails)
    num_keys = len(world.shards[rank]) if world.tells_length else None
    job = EpochJob(world.config, 0, feed, exchange, 7, is_closed, poll, num_keys=num_keys)
    try:
        for item in job.steps():
            if isinstance(item, PeersClosed):
                trace.peers_closed.append(item.ranks)
                trace.left = True  # the consumer learns of it, and leaves or gives up: either way this side closes
            else:
                _check_emission(world, rank, item)
                trace.steps.append(item.plan)
    except _Blocked:
        trace.asked = exchange.asked
    except (InjectedError, PeerFailedError) as error:
        trace.error = error
        trace.asked = exchange.asked  # what it had contributed
    trace.records, trace.calls, trace.rounds = feed.next, exchange.calls, job.rounds
    trace.drawn, trace.num_dropped, trace.max_held_tokens = job.cursor, sum(job.dropped.values()), job.max_held_tokens
    return trace


def _check_emission(world: World, rank: int, item: Emission) -> None:
    ids = item.plan.ids.tolist()
    require(item.samples == [("sample", i) for i in ids], "a step carries the samples that it names", item)
    rows = [world.shards[rank][i] for i in ids]
    require(keeps_the_bounds(world.config, rows), "budget", rows)


def _results(traces: list[Trace], waiting: list[int], sees_it_late: tuple[int, ...]) -> dict[int, Result]:
    """What each waiting rank's collective gives it."""
    dead = [rank for rank, trace in enumerate(traces) if trace.error is not None]
    first = [rank for rank in dead if isinstance(traces[rank].error, InjectedError)]
    over = [rank for rank, trace in enumerate(traces) if trace.error is None and trace.asked is None]
    require(not over or bool(dead), "deadlock: some ranks have ended the epoch, others wait", over, waiting)
    asked = [trace.asked for trace in traces]
    calls = {trace.calls for trace in traces}
    complete = len(calls) == 1 and all(a is not None for a in asked)
    if not dead or (complete and any(rank in sees_it_late for rank in waiting)):
        require(complete, "deadlock: ranks wait in different collectives", calls, asked)
        result = _combine([a for a in asked if a is not None])
        return {r: result if not dead or r in sees_it_late else first[0] for r in waiting}
    return dict.fromkeys(waiting, first[0])


def _combine(asked: list[tuple[str, I64]]) -> Result:
    kinds = {(kind, values.shape) for kind, values in asked}
    require(len(kinds) == 1, "step alignment: the same collective, of the same shape", kinds)
    values = [values for _, values in asked]
    out = np.stack(values) if asked[0][0] == "all_gather" else np.sum(values, axis=0)
    return out.shape, np.ascontiguousarray(out, np.int64).tobytes()


def check_aligned(traces: list[Trace]) -> None:
    """All ranks made the same steps, told the same totals, and ended in the same round."""
    require(len({len(t.steps) for t in traces}) == 1, "step alignment", [len(t.steps) for t in traces])
    require(len({t.rounds for t in traces}) == 1, "the end comes in the same round", [t.rounds for t in traces])
    require(len({t.calls for t in traces}) == 1, "as many collectives", [t.calls for t in traces])
    for together in zip(*(trace.steps for trace in traces), strict=True):
        said = {(s.step, s.sync_gradients, s.all_samples, s.all_tokens, s.window_loss_tokens) for s in together}
        require(len(said) == 1, "one step is the same for all", said)
        require(sum(len(s.ids) for s in together) == together[0].all_samples, "totals: samples", together)
        require(sum(s.local_tokens for s in together) == together[0].all_tokens, "totals: tokens", together)


def emitted(trace: Trace) -> list[int]:
    """Identities that a rank emitted, sorted."""
    return sorted(i for step in trace.steps for i in step.ids.tolist())


def check_undisturbed(world: World, traces: list[Trace]) -> None:
    """An epoch that nobody leaves and in which nothing fails."""
    check_aligned(traces)
    for trace, shard in zip(traces, world.shards, strict=True):
        once = emitted(trace)
        require(len(set(once)) == len(once), "conservation: none twice", once)
        # A source that does not tell its length: what it was never asked for can't be counted.
        every = len(shard) if world.tells_length or gives_nothing_up(world.config) else trace.drawn
        require(len(once) + trace.num_dropped == every, "conservation: counted", once, trace.num_dropped, every, shard)
        require(not trace.num_dropped or not gives_nothing_up(world.config), "conservation: none dropped", trace)
        require(not trace.peers_closed and trace.error is None, "nobody left, nothing failed", trace)
        require([s.step for s in trace.steps] == list(range(len(trace.steps))), "steps are numbered", trace.steps)


def check_left(traces: list[Trace], exact: bool) -> None:
    """Whoever leaves, and whenever: all end together, those who stayed are told who left, drawn samples are counted."""
    check_aligned(traces)
    for rank, trace in enumerate(traces):
        require(trace.error is None and trace.asked is None, "closing: no error in the loop, no wait for ever", trace)
        for ranks in trace.peers_closed:
            others = [r for r in ranks if r != rank and traces[r].left]
            require(bool(ranks) and len(others) == len(ranks), "closing: names who left", rank, ranks)
        once = emitted(trace)
        require(len(set(once)) == len(once), "conservation: none twice", once)
        # An epoch that came to its end counts what was never drawn, too.
        uncounted = trace.drawn - len(once) - trace.num_dropped
        require(
            uncounted >= 0 or not any(t.left for t in traces), "conservation: nothing is counted twice", rank, trace
        )
        require(uncounted <= 0 or not exact, "conservation: what was drawn and not emitted is counted", rank, trace)


def check_failed(culprit: int, traces: list[Trace], plain: list[Trace]) -> None:
    """Whoever fails, and wherever: each other rank gets an error that names it, or had ended the epoch already."""
    require(isinstance(traces[culprit].error, InjectedError), "failure: it fails", traces[culprit])
    for rank, trace in enumerate(traces):
        steps = [(s.step, s.ids.tolist()) for s in trace.steps]
        undisturbed = [(s.step, s.ids.tolist()) for s in plain[rank].steps]
        require(steps == undisturbed[: len(steps)], "failure: until then nothing changes", steps, undisturbed)
        if rank == culprit:
            continue
        if trace.error is None:
            require(len(steps) == len(undisturbed) and trace.asked is None, "failure: all ranks learn it", trace)
        else:
            named = isinstance(trace.error, PeerFailedError) and trace.error.ranks == (culprit,)
            require(named, "failure: names the culprit", trace.error)


def small_worlds(
    config: PlanConfig, world_size: int, most_samples: int, lengths: tuple[int, ...], **options: Any
) -> Iterator[World]:
    """All worlds up to symmetry of ranks."""
    shards = [s for n in range(most_samples + 1) for s in product(lengths, repeat=n)]
    for chosen in combinations_with_replacement(shards, world_size):
        yield World(config, chosen, **options)
