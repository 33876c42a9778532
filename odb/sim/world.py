"""All ranks of an epoch in one process: the planning core on given lengths, without samples, processes or transports.

One `settle` stands for all ranks, as it does not know which rank it runs on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from odb.errors import ConfigError
from odb.plan import grants, packed
from odb.plan import round as protocol
from odb.plan.cost import group_cost, padded_length
from odb.plan.types import I64, Agreement, Measures, Plan, PlanConfig, Room, RoundState

#: A round without a step is legal; this many in a row would mean that the protocol stands still.
_MOST_EMPTY_ROUNDS = 1000


@dataclass(frozen=True, slots=True)
class Trace:
    """What an epoch came to, step by step. `S` steps, `W` ranks, `n` samples.

    Attributes:
        costs: (S, W) int64, what each rank's group costs; 0 where it is idle.
        padded_len: (S, W) int64, its padded row length; of the longest row where a batch has several packed ones.
        rows: (S, W) int64, rows of it: samples, or packed rows.
        tokens: (S, W) int64, real tokens of it.
        samples: (S, W) int64, samples of it.
        step_of: (n,) int64, the step in which each sample of the global order left; -1: not emitted.
        rounds: how many there were.
        max_held_tokens: the most that a rank held observed and not yet assigned.
        max_waiting_keys: the most keys that a rank was granted and had not used yet.
        seconds: that the simulation took.
        max_age: the most rounds that a sample was carried.
        longest: tokens of the longest sample.
        max_displacement: the furthest that a sample can have moved in the order, see `_Log.reach`; -1: shares are fixed.
    """

    costs: I64
    padded_len: I64
    rows: I64
    tokens: I64
    samples: I64
    step_of: I64
    rounds: int
    max_held_tokens: int
    max_waiting_keys: int
    seconds: float
    max_age: int
    longest: int
    max_displacement: int


@dataclass
class _Rank:
    """One rank: its keys in the order in which it reads them, and its state between rounds."""

    state: RoundState
    keys: I64  # positions in the global order, granted and not used yet

    def grant(self, block: range) -> None:
        if len(block):
            self.keys = np.concatenate([self.keys, np.arange(block.start, block.stop)])

    def draw(self, lengths: I64, room: Room) -> Measures:
        """Samples as long as they fit."""
        ahead = _measures(self.keys[: max(room.samples, room.must, 0)], lengths)
        num = room.num_taken(ahead.length, ahead.num_bytes)
        self.keys = self.keys[num:]
        return ahead.take(slice(0, num))


def _measures(keys: I64, lengths: I64) -> Measures:
    length = lengths[keys]
    return Measures(keys, length, length, np.zeros_like(length), np.zeros_like(length))


def simulate(config: PlanConfig, lengths: I64, num_ranks: int, *, sharding: str = "elastic", epoch: int = 0) -> Trace:
    """One epoch of `num_ranks` ranks over samples of these lengths (tokens, in the global order).

    Args:
        config: as for a loader; `ODBConfig(...).plan_config()` makes one.
        lengths: (n,) tokens of each sample view, in the order of the (shuffled) epoch.
        num_ranks: data-parallel ranks.
        sharding: "elastic": granted round by round; "static": rank `r` owns positions `r, r + W, ...`.
        epoch: of the random order in time.

    Raises:
        ConfigError: an unknown sharding, no rank, or a length below 1.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    if sharding not in ("elastic", "static"):
        raise ConfigError(f"sharding must be 'elastic' or 'static', got {sharding!r}")
    if num_ranks < 1 or (len(lengths) and lengths.min() < 1):
        raise ConfigError(f"a simulation needs at least one rank and lengths >= 1, got {num_ranks} ranks")
    began = time.perf_counter()
    ranks = [_rank(config, sharding, epoch, len(lengths), rank, num_ranks) for rank in range(num_ranks)]
    log = _Log(config, lengths, sharding == "elastic")
    empty = 0
    while not log.has_ended:
        num = _one_round(config, lengths, ranks, log)
        empty = 0 if num else empty + 1
        assert empty < _MOST_EMPTY_ROUNDS, "the protocol stands still"
    return log.trace(time.perf_counter() - began)


def _rank(config: PlanConfig, sharding: str, epoch: int, num_keys: int, rank: int, num_ranks: int) -> _Rank:
    if sharding == "static":
        return _Rank(RoundState.start(epoch), np.arange(rank, num_keys, num_ranks))
    block = grants.first_block(num_keys, rank, num_ranks, config.sample_quota)
    state = grants.start(epoch, num_keys, rank, num_ranks, config.sample_quota)
    return _Rank(state, np.arange(block.start, block.stop))


def _one_round(config: PlanConfig, lengths: I64, ranks: list[_Rank], log: _Log) -> int:
    proposals = []
    for one in ranks:
        arrivals = one.draw(lengths, protocol.fill_target(config, one.state))
        proposals.append(protocol.propose(config, one.state, arrivals, exhausted=not len(one.keys)))
    table = protocol.decode_table(np.stack([protocol.encode(p.report) for p in proposals]))
    agreement = protocol.settle(config, table)
    plans = [protocol.form(config, proposal, agreement, rank) for rank, proposal in enumerate(proposals)]
    totals = np.sum([plan.totals for plan in plans], axis=0)
    num_steps = 0
    for rank, (one, plan) in enumerate(zip(ranks, plans, strict=True)):
        num_steps, log.has_ended, one.state = protocol.advance(config, plan, totals, rank)
        one.grant(grants.block(agreement.grants, agreement.first_key, rank))
        log.rank(plan, num_steps, len(one.keys))
    log.round(num_steps, agreement)
    return num_steps


class _Log:
    """Collects the trace, round by round."""

    def __init__(self, config: PlanConfig, lengths: I64, is_elastic: bool) -> None:
        self._config = config
        self._is_elastic = is_elastic
        self._longest = int(lengths.max(initial=0))
        self._step_of = np.full(len(lengths), -1, np.int64)
        self._parts: list[I64] = []
        self._rows: list[I64] = []
        self._granted_in = np.zeros(len(lengths), np.int64)
        self._first_step = self._emitted = self._rounds = 0
        self._max_held = self._max_waiting = self._max_age = self._max_lag = self._max_open = self._max_emitted = 0
        self.has_ended = False

    def rank(self, plan: Plan, num_steps: int, num_waiting: int) -> None:
        """A rank's part of a round."""
        proposal, slots = plan.proposal, plan.groups[:num_steps]
        window = proposal.window
        rows = samples = np.array([len(s) for s in slots], np.int64)
        if len(slots):
            self._step_of[window.ids[np.concatenate(slots)]] = self._first_step + np.repeat(
                np.arange(num_steps), samples
            )
        if self._config.layout == "packed":
            cost = packed.costs(window, slots, self._config)
            shapes = [packed.shape(window.length[s], self._config) for s in slots]
            rows, padded = np.array(shapes, np.int64).reshape(-1, 2).T
        else:
            longest = np.array([window.length[s].max(initial=0) for s in slots], np.int64)
            padded = padded_length(longest, self._config)
            cost = np.where(rows > 0, group_cost(rows, padded, self._config), 0)
        self._rows.append(np.stack([cost, padded, rows, plan.totals[:num_steps, 1], samples]))
        self._max_held = max(self._max_held, proposal.report.held_tokens)
        self._max_waiting = max(self._max_waiting, num_waiting)
        self._max_age = max(self._max_age, int(proposal.age.max(initial=0)))
        lag = self._rounds - self._granted_in[window.ids] - proposal.age
        self._max_lag = max(self._max_lag, int(lag.max(initial=0)))

    def round(self, num_steps: int, agreement: Agreement) -> None:
        """All ranks' parts are there."""
        self._parts.append(np.stack(self._rows, axis=2))
        self._rows = []
        self._first_step += num_steps
        self._rounds += 1
        emitted = int(self._parts[-1][4].sum())
        self._emitted += emitted
        self._max_emitted = max(self._max_emitted, emitted)
        if self._is_elastic:
            end = agreement.first_key + int(agreement.grants.sum())
            self._granted_in[agreement.first_key : end] = self._rounds
            self._max_open = max(self._max_open, end - self._emitted)

    def reach(self) -> int:
        """How far a sample can move: past all that is granted at a time, and past what leaves while it waits."""
        if not self._is_elastic:
            return -1
        first = self._max_open + self._max_emitted
        return first + (self._max_lag + self._max_age) * self._max_emitted

    def trace(self, seconds: float) -> Trace:
        """Everything together."""
        costs, padded, rows, tokens, samples = np.concatenate(self._parts, axis=1)
        return Trace(
            costs,
            padded,
            rows,
            tokens,
            samples,
            self._step_of,
            self._rounds,
            self._max_held,
            self._max_waiting,
            seconds,
            self._max_age,
            self._longest,
            self.reach(),
        )
