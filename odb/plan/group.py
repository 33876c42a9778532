"""Groups of the padded layout: contiguous slices of a window sorted by length.

Rows of one group are padded to its longest sample, so for a cost that never falls in rows or length some optimal
partition is contiguous in the sorted window, and greedy maximal extension from the longest sample uses the fewest
groups under a cap. A partition is written as its `ends`: group `g` is `[ends[g-1], ends[g])`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb.plan.cost import group_cost, padded_length, row_cost
from odb.plan.types import I64, Measures, PlanConfig

#: A round of waiting counts like 2 % of a cap better filled.
_WORTH_OF_WAITING = 0.02


@dataclass(frozen=True, slots=True)
class Sorted:
    """Samples of a window in the order (padded length descending, id ascending). All arrays shape (n,)."""

    position: I64  # in the window
    padded: I64  # padded row length in tokens, never rises
    length: I64  # without padding
    patches: I64

    @classmethod
    def of(cls, window: Measures, config: PlanConfig) -> Sorted:
        """The whole window, sorted."""
        padded = padded_length(window.length, config)
        order = np.lexsort((window.ids, -padded))
        return cls(order, padded[order], window.length[order], window.patches[order])

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_] | slice) -> Sorted:
        """Some of the samples; `index` must keep the order."""
        return Sorted(self.position[index], self.padded[index], self.length[index], self.patches[index])

    def __len__(self) -> int:
        return len(self.position)


def most_rows(samples: Sorted, config: PlanConfig, cap: int) -> I64:
    """(n,) rows of a group that starts at each sample, were the rest of the window endless: >= 1, patches aside."""
    limit = config.max_samples or np.iinfo(np.int64).max
    if config.cost_fn is None:
        rows = cap // samples.padded
    else:
        rows = _bisect_rows(samples.padded, config, cap, min(limit, len(samples) + 1))
    return np.clip(rows, 1, limit)


def _whole(rows: I64, multiple: int) -> I64:
    """`rows` rounded down to a multiple where this leaves any."""
    return rows if multiple == 1 else np.where(rows >= multiple, rows - rows % multiple, rows)


def _bisect_rows(padded: I64, config: PlanConfig, cap: int, limit: int) -> I64:
    """(n,) the most rows, up to `limit`, of length `padded` that cost at most `cap`; 0 where even one costs more."""
    low, high = np.zeros_like(padded), np.full_like(padded, limit)
    for _ in range(int(limit).bit_length()):
        middle = (low + high + 1) // 2
        fits = group_cost(middle, padded, config) <= cap
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low


def _reach(samples: Sorted, config: PlanConfig, cap: int) -> I64:
    """(n,) the furthest end of a group that starts at each sample, before rows are rounded. Never falls.

    It lies past the window's end where no bound but that end closes the group.
    """
    starts = np.arange(len(samples))
    ends = starts + np.minimum(most_rows(samples, config, cap), 2 * len(samples) + 1)
    if config.max_patches is not None:
        total = np.concatenate([[0], np.cumsum(samples.patches)])
        by_patches = np.searchsorted(total, total[:-1] + config.max_patches, side="right") - 1
        by_patches = np.where(by_patches >= len(samples), np.iinfo(np.int64).max, by_patches)
        ends = np.maximum(np.minimum(ends, by_patches), starts + 1)
    return ends


def greedy(samples: Sorted, config: PlanConfig, cap: int | None = None, most: int | None = None) -> list[int]:
    """The fewest groups that cost at most `cap` each (default: the token budget); a sample that costs more is alone.

    Stops early, with the samples not covered, once more than `most` groups are needed.
    """
    return _walk(_reach(samples, config, config.token_budget if cap is None else cap), config.rows_multiple, most)


def _walk(reach: I64, multiple: int, most: int | None = None) -> list[int]:
    total, start = len(reach), 0
    ends: list[int] = []
    bound = total + 1 if most is None else most + 1
    item = reach.item
    while start < total and len(ends) < bound:
        end = min(item(start), total)
        if multiple > 1 and end - start > multiple:
            end -= (end - start) % multiple
        ends.append(end)
        start = end
    return ends


def complete(samples: Sorted, ends: list[int], config: PlanConfig) -> npt.NDArray[np.bool_]:
    """(groups,) which groups could not take one more sample of their own shortest length.

    Such a group is closed by a bound, not by the window's end. Incomplete ones are the last, if any.
    """
    if not ends:
        return np.empty(0, np.bool_)
    stop = np.array(ends, np.int64)
    start = np.concatenate([[0], stop[:-1]])
    reach = _reach(samples, config, config.token_budget)[start]
    closed: npt.NDArray[np.bool_] = reach <= len(samples)
    if config.max_patches is not None:
        total = np.concatenate([[0], np.cumsum(samples.patches)])
        closed |= total[stop] - total[start] + samples.patches[stop - 1] > config.max_patches
    if config.rows_multiple > 1:
        closed |= stop - start == _whole(most_rows(samples, config, config.token_budget)[start], config.rows_multiple)
    return closed


def exactly(samples: Sorted, num_groups: int, config: PlanConfig) -> list[int]:
    """Exactly `num_groups` non-empty groups under the smallest cost cap.

    The cap is found by bisection over integers; where even that cap gives fewer groups, the most expensive group is
    halved, as evenly in cost as possible, until there are enough. With `split_policy="published"`, samples are peeled
    one by one off the groups with the most rows instead. Needs minimal count <= `num_groups` <= n.
    """
    assert num_groups <= len(samples), (num_groups, len(samples))
    if config.split_policy == "published":
        return _peel(greedy(samples, config), num_groups)
    ends = _smallest_cap(samples, num_groups, config)
    return _halve(samples, ends, num_groups, config)


def _smallest_cap(samples: Sorted, num_groups: int, config: PlanConfig) -> list[int]:
    best = greedy(samples, config)
    assert len(best) <= num_groups, (len(best), num_groups)
    low, high = _no_cap(samples, config), config.token_budget  # greedy under `high` gives at most num_groups
    while high - low > 1:
        middle = (low + high) // 2
        ends = greedy(samples, config, middle, num_groups)
        if len(ends) <= num_groups:
            best, high = ends, middle
        else:
            low = middle
    return best


def _no_cap(samples: Sorted, config: PlanConfig) -> int:
    """A cap that is too small: one below which groups would lose the rows that `rows_multiple` asks for."""
    if config.rows_multiple == 1:
        return 0
    return int(group_cost(np.array([config.rows_multiple]), samples.padded[:1], config)[0]) - 1


def _halve(samples: Sorted, ends: list[int], num_groups: int, config: PlanConfig) -> list[int]:
    starts = [0, *ends[:-1]]
    costs = slice_costs(samples, ends, config)
    heap = [(-int(c), s, e) for c, s, e in zip(costs, starts, ends, strict=True) if e - s > 1]
    heapq.heapify(heap)
    ends = list(ends)
    while len(ends) < num_groups:
        _, start, end = heapq.heappop(heap)
        middle, left, right = _even_cut(samples, start, end, config)
        ends.append(middle)
        for cost, a, b in ((left, start, middle), (right, middle, end)):
            if b - a > 1:
                heapq.heappush(heap, (-cost, a, b))
    return sorted(ends)


def _even_cut(samples: Sorted, start: int, end: int, config: PlanConfig) -> tuple[int, int, int]:
    """Where to cut a group in two so that the dearer half is as cheap as possible, and what the halves cost."""
    cuts = np.arange(start + 1, end)
    if config.rows_multiple > 1 and end - start > config.rows_multiple:
        cuts = cuts[config.rows_multiple - 1 :: config.rows_multiple]
    left = group_cost(cuts - start, np.full_like(cuts, samples.padded[start]), config)
    right = group_cost(end - cuts, samples.padded[cuts], config)
    best = int(np.argmin(np.maximum(left, right)))
    return int(cuts[best]), int(left[best]), int(right[best])


def _peel(ends: list[int], num_groups: int) -> list[int]:
    starts = [0, *ends[:-1]]
    heap = [(s - e, s, e) for s, e in zip(starts, ends, strict=True)]
    heapq.heapify(heap)
    ends = list(ends)
    while len(ends) < num_groups:
        _, start, end = heapq.heappop(heap)
        ends.append(end - 1)
        heapq.heappush(heap, (start - end + 1, start, end - 1))
    return sorted(ends)


def fill(samples: Sorted, caps: I64, age: I64, config: PlanConfig) -> tuple[I64, ...]:
    """One group for each cap, each the one that is worth most under it of what the groups before it left.

    Worth is the share of the cap that real tokens fill; padding, and a cap that is missed, count alike. Samples that
    have waited are worth a little more; overdue ones (`config.max_age`) go first, the oldest before all others.

    Args:
        samples: the window, at least as many as there are caps.
        caps: (T,) what each group may cost. Only a sample that alone costs more exceeds it.
        age: (n,) rounds that each sample has waited.
        config: its bounds on groups hold.

    Returns:
        Positions in the window of each group.
    """
    pool = _Pool.of(samples, age, config)
    groups = []
    for index, cap in enumerate(caps.tolist()):
        start, end = pool.best(cap, len(caps) - index - 1, config)
        groups.append(pool.samples.position[start:end])
        pool = pool.without(start, end)
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Pool:
    """What is left to choose from. All arrays shape (n,)."""

    samples: Sorted
    value: npt.NDArray[np.float64]  # what a sample costs without padding
    waited: npt.NDArray[np.float64]  # `value` times age
    age: I64

    @classmethod
    def of(cls, samples: Sorted, age: I64, config: PlanConfig) -> _Pool:
        value = row_cost(samples.length, config).astype(np.float64)
        return cls(samples, value, value * age, age)

    def best(self, cap: int, num_left: int, config: PlanConfig) -> tuple[int, int]:
        """Bounds of the slice to take; `num_left` samples at least stay for the groups to come."""
        total = len(self.samples)
        starts = np.arange(total)
        ends = np.minimum(_reach(self.samples, config, min(cap, config.token_budget)), total)
        rows = np.clip(_whole(ends - starts, config.rows_multiple), 1, total - num_left)
        ends = np.minimum(starts + rows, total)
        rows = ends - starts
        cost = group_cost(rows, self.samples.padded, config)
        worth = _sums(self.value, starts, ends)
        waited = _sums(self.waited, starts, ends) / np.maximum(worth, 1)
        score = worth / np.maximum(np.maximum(cap, cost), 1) + _WORTH_OF_WAITING * waited - (cost > cap)
        oldest = int(np.argmax(self.age))
        if self.age[oldest] >= config.max_age:
            old = (2 * self.age >= config.max_age).astype(np.float64)
            score += _sums(old, starts, ends) / old.sum()  # one that must go takes with it those that soon must
            score[(starts > oldest) | (ends <= oldest)] = -np.inf
        start = int(np.argmax(score))
        return start, int(ends[start])

    def without(self, start: int, end: int) -> _Pool:
        """The rest, once the samples of a slice have gone."""
        kept = np.delete(np.arange(len(self.samples)), slice(start, end))
        return _Pool(self.samples.take(kept), self.value[kept], self.waited[kept], self.age[kept])


def _sums(values: npt.NDArray[np.float64], starts: I64, ends: I64) -> npt.NDArray[np.float64]:
    total = np.concatenate([[0.0], np.cumsum(values)])
    out: npt.NDArray[np.float64] = total[ends] - total[starts]
    return out


def slice_costs(samples: Sorted, ends: list[int], config: PlanConfig) -> I64:
    """(groups,) what each group costs."""
    stop = np.array(ends, np.int64)
    start = np.concatenate([[0], stop[:-1]]).astype(np.int64) if len(stop) else stop
    return group_cost(stop - start, samples.padded[start], config)


def slices(samples: Sorted, ends: list[int]) -> tuple[I64, ...]:
    """The groups as positions in the window, longest sample first."""
    return tuple(samples.position[s:e] for s, e in zip([0, *ends[:-1]], ends, strict=True)) if ends else ()


def longest_suffix(samples: Sorted, config: PlanConfig) -> int:
    """How many of the shortest samples fit into one group."""
    if not len(samples):
        return 0
    start = int(np.searchsorted(_reach(samples, config, config.token_budget), len(samples)))
    rows = len(samples) - min(start, len(samples) - 1)
    return int(_whole(np.array(rows), config.rows_multiple))


def worth(samples: Sorted, ends: list[int], config: PlanConfig) -> npt.NDArray[np.float64]:
    """(groups,) how good each group is to emit now: tokens per cost, and half as much weight on filling the budget.

    The first term alone emits small groups, the second alone wasteful ones. A group that scores low waits for better
    company: that widens the window just where samples are rare.
    """
    stop = np.array(ends, np.int64)
    start = np.concatenate([[0], stop[:-1]])
    total = np.concatenate([[0], np.cumsum(samples.length)])
    tokens = (total[stop] - total[start]).astype(np.float64)
    cost = np.maximum(slice_costs(samples, ends, config), 1)
    value: npt.NDArray[np.float64] = tokens / cost + 0.5 * tokens / config.token_budget
    return value


def chosen(samples: Sorted, ends: list[int], groups: npt.NDArray[np.bool_]) -> tuple[Sorted, list[int]]:
    """The groups that `groups`, shape (groups,) bool, marks, as a partition of their own samples."""
    rows = np.diff(np.array([0, *ends]))
    return samples.take(np.repeat(groups, rows)), np.cumsum(rows[groups]).tolist()
