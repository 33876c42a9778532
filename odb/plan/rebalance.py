"""Groups of about equal cost, whatever number of samples each holds (batch rebalance).

Two problems. Rows padded to the longest of their group: groups are contiguous slices of the samples sorted by length, so
a partition is K counts. Costs that add up (packed rows): any split into K parts.

For slices the cheapest possible dearest group is found exactly. Under a threshold every slice that starts at a sample
has a furthest end, which never falls from one start to the next; so the ends that k slices can reach form an interval,
and bisection over the threshold needs K steps a time. Nothing is moved sample by sample, so there are no positions that
go stale, no group that has nothing to give, and no search that ends early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odb.errors import ConfigError
from odb.plan.types import I64

#: `(rows, padded_len) -> cost` over int64 arrays; must not fall when either argument grows.
Cost = Callable[[Any, Any], Any]

_TOLERANCE = 1e-12  # relative, of the bisection over float thresholds


@dataclass(frozen=True)
class Quadratic:
    """Cost `intercept + rows * L + alpha * rows * L**2` of `rows` rows padded to `L` tokens."""

    intercept: float = 0.0
    alpha: float = 0.001

    def __call__(self, rows: Any, padded_len: Any) -> Any:
        """Elementwise."""
        return self.intercept + rows * padded_len + self.alpha * rows * padded_len * padded_len


@dataclass(frozen=True, slots=True)
class Groups:
    """A partition of `n` samples into K groups.

    Attributes:
        members: K arrays of positions, each the longest sample first.
        costs: (K,) float64.
        exceeding: numbers of the groups above `max_tokens`, which no partition could avoid.
    """

    members: list[I64]
    costs: npt.NDArray[np.float64]
    exceeding: tuple[int, ...] = ()

    @property
    def peak(self) -> float:
        """Cost of the dearest group."""
        return float(self.costs.max())


def contiguous(
    lengths: I64, num_groups: int, cost: Cost | None = None, max_tokens: int | None = None, min_per_group: int = 1
) -> Groups:
    """The partition into `num_groups` slices by length whose dearest slice is as cheap as possible.

    Args:
        lengths: (n,) tokens.
        num_groups: K.
        cost: of a group by rows and longest sample; None: `Quadratic()`.
        max_tokens: rows x longest sample of a group at most. Where no partition keeps it, the smallest bound that one
            does keep stands in, and the groups above are named in `exceeding`: no sample is lost.
        min_per_group: samples of a group at least.

    Raises:
        ConfigError: n < num_groups * min_per_group, or an argument below 1.
    """
    _check_counts(len(lengths), num_groups, min_per_group, max_tokens)
    order = np.argsort(-lengths, kind="stable")
    slices = _Slices(lengths[order].tolist(), num_groups, min_per_group, Quadratic() if cost is None else cost)
    bound = max_tokens
    if max_tokens is not None and slices.ends(np.inf, max_tokens) is None:
        bound = slices.least_tokens(max_tokens)
    ends = slices.best(bound)
    members = [order[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    tokens = [len(one) * int(lengths[one[0]]) for one in members]
    over = tuple(k for k, total in enumerate(tokens) if max_tokens is not None and total > max_tokens)
    return Groups(members, slices.costs(ends), over)


def _check_counts(num_samples: int, num_groups: int, min_per_group: int, max_tokens: int | None) -> None:
    for name, value in (("num_groups", num_groups), ("min_per_group", min_per_group), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be >= 1, got {value}")
    if num_samples < num_groups * min_per_group:
        raise ConfigError(
            f"{num_samples} samples can't fill {num_groups} groups of at least {min_per_group}: reduce the number of "
            "groups (ranks x accumulation steps), or give larger global batches or a larger dataset"
        )


class _Slices:
    """Partitions of lengths, longest first, into K slices of at least `least` samples."""

    def __init__(self, lengths: list[int], num: int, least: int, cost: Cost) -> None:
        self.lengths, self.num, self.least, self._cost = lengths, num, least, cost
        self._known: dict[tuple[int, int], float] = {}

    def cost(self, rows: int, length: int) -> float:
        """Of one group. Asked often for the same, so remembered."""
        key = (rows, length)
        if key not in self._known:
            if isinstance(self._cost, Quadratic):
                self._known[key] = float(self._cost(rows, length))
            else:
                value = self._cost(np.array([rows], np.int64), np.array([length], np.int64))
                self._known[key] = float(np.asarray(value).reshape(-1)[0])
        return self._known[key]

    def costs(self, ends: list[int]) -> npt.NDArray[np.float64]:
        """(K,) of each slice."""
        starts = [0, *ends[:-1]]
        return np.array([self.cost(b - a, self.lengths[a]) for a, b in zip(starts, ends, strict=True)], np.float64)

    def _reach(self, start: int, threshold: float, tokens: int | None) -> int:
        """The furthest end of a slice from `start` within both bounds."""
        length = self.lengths[start]
        low, high = 0, len(self.lengths) - start
        if tokens is not None:
            high = min(high, tokens // length)
        while low < high:
            middle = (low + high + 1) // 2
            if self.cost(middle, length) <= threshold:
                low = middle
            else:
                high = middle - 1
        return start + low

    def ends(self, threshold: float, tokens: int | None) -> list[int] | None:
        """A partition within both bounds, None where there is none."""
        total = len(self.lengths)
        if self._reach(0, threshold, tokens) < self.least:  # later starts are shorter: what holds here holds there
            return None
        furthest = [0]
        while len(furthest) <= self.num and furthest[-1] < total:
            furthest.append(self._reach(furthest[-1], threshold, tokens))
        if furthest[-1] < total:
            return None
        furthest += [total] * (self.num + 1 - len(furthest))
        out = [total]
        for k in range(self.num - 1, 0, -1):
            out.append(min(furthest[k], out[-1] - self.least))
        return out[::-1]

    def best(self, tokens: int | None) -> list[int]:
        """The partition with the smallest possible peak under the bound of tokens, which some partition must keep."""
        best = self.ends(np.inf, tokens)
        assert best is not None, tokens
        low, high = 0.0, float(self.costs(best).max())
        while high - low > _TOLERANCE * high:
            middle = low + (high - low) / 2
            found = self.ends(middle, tokens)
            if found is None:
                low = middle
            else:
                best, high = found, min(middle, float(self.costs(found).max()))
        return best

    def least_tokens(self, above: int) -> int:
        """The smallest bound of tokens that a partition keeps."""
        low, high = above, len(self.lengths) * self.lengths[0]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.ends(np.inf, middle) is not None else (middle, high)
        return high


def additive(costs: npt.NDArray[Any], num_groups: int, max_rounds: int = 64) -> Groups:
    """`num_groups` non-empty parts with about equal sums of costs; the largest is at most 4/3 of the smallest possible.

    The longest first, each to the lightest part (Graham 1969); then moves and swaps between the dearest part and others,
    the best of them at a time, as long as the dearest gets cheaper.

    Raises:
        ConfigError: fewer samples than groups, or a cost that is negative or not finite.
    """
    _check_counts(len(costs), num_groups, 1, None)
    value = np.asarray(costs, np.float64)
    if not (np.isfinite(value) & (value >= 0)).all():
        raise ConfigError(f"costs must be finite and >= 0, got {costs}")
    part = _lightest_first(value, num_groups)
    for _ in range(max_rounds):
        if not _relieve(value, part, num_groups):
            break
    members = [np.flatnonzero(part == k) for k in range(num_groups)]
    members = [one[np.argsort(-value[one], kind="stable")] for one in members]
    return Groups(members, np.bincount(part, value, num_groups).astype(np.float64))


def _lightest_first(value: npt.NDArray[np.float64], num_groups: int) -> I64:
    """(n,) the part of each sample; the first `num_groups` samples open one each, so that none is empty."""
    sums = np.zeros(num_groups)
    part = np.zeros(len(value), np.int64)
    for rank, sample in enumerate(np.argsort(-value, kind="stable").tolist()):
        part[sample] = rank if rank < num_groups else int(np.argmin(sums))
        sums[part[sample]] += value[sample]
    return part


def _relieve(value: npt.NDArray[np.float64], part: I64, num_groups: int) -> bool:
    """The move or swap that lowers the dearest part most, with the part that it is done with below that. In place."""
    sums = np.bincount(part, value, num_groups)
    dear = int(np.argmax(sums))
    mine = np.flatnonzero(part == dear)
    others = np.flatnonzero(part != dear)
    if not len(others):
        return False
    # (mine, others + one "nothing" per other part): what leaves the dearest part and goes to the other one.
    given = [value[mine][:, None] - value[others][None, :]]
    targets = np.concatenate([part[others], np.setdiff1d(np.arange(num_groups), [dear])])
    if len(mine) > 1:
        given.append(np.repeat(value[mine][:, None], num_groups - 1, axis=1))
    moved = np.concatenate(given, axis=1)
    after = np.maximum(sums[dear] - moved, sums[targets[: moved.shape[1]]] + moved)
    best = int(np.argmin(after))
    if after.flat[best] >= sums[dear] * (1 - _TOLERANCE):
        return False
    row, column = divmod(best, moved.shape[1])
    part[mine[row]] = targets[column]
    if column < len(others):
        part[others[column]] = dear
    return True


def assign(costs: npt.NDArray[np.float64], num_ranks: int, by: str = "slots") -> I64:
    """Which group each rank runs in each slot (accumulation micro-step): (slots, ranks) group numbers.

    Args:
        costs: (slots * ranks,) of the groups.
        num_ranks: of one slot.
        by: "slots": groups of similar cost meet in a slot, for trainers that synchronise in every micro-step (FSDP,
            ZeRO-3); inside a slot the dearest goes to the rank that has had least so far. "totals": the ranks' sums over
            all slots are evened, for gradient accumulation that synchronises once (DDP's no_sync).
    """
    if by not in ("slots", "totals"):
        raise ConfigError(f"by must be 'slots' or 'totals', got {by!r}")
    assert len(costs) % num_ranks == 0, (len(costs), num_ranks)
    ranked = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    if by == "totals":
        return _by_totals(costs, ranked)
    totals = np.zeros(num_ranks)
    out = np.empty_like(ranked)
    for slot, groups in enumerate(ranked):
        lightest = np.argsort(totals, kind="stable")
        out[slot, lightest] = groups
        totals[lightest] += costs[groups]
    return out


def _by_totals(costs: npt.NDArray[np.float64], ranked: I64) -> I64:
    num_slots, num_ranks = ranked.shape
    totals = np.zeros(num_ranks)
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for group in ranked.reshape(-1).tolist():
        free = [rank for rank in range(num_ranks) if len(held[rank]) < num_slots]
        rank = min(free, key=lambda one: totals[one])
        held[rank].append(group)
        totals[rank] += costs[group]
    return np.ascontiguousarray(np.array(held, np.int64).T)
