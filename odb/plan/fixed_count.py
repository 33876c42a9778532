"""Label balancing of microbatches with a fixed number of samples: padded, or flattened into one row of any length.

Follows Axolotl's `LabelBalancedRandomSampler` (axolotl-ai-cloud/axolotl, docs/multipack): labels and cost are evened
together, window by window, and a change is kept only if neither gets worse, nor padding, nor the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb.plan.labels import CANDIDATES, PASSES
from odb.plan.types import I64

F64 = npt.NDArray[np.float64]


def balance_padded(batches: I64, lengths: I64, counts: I64, multiple: int = 1) -> I64:
    """A window of padded microbatches, shape (b, size), with labels and cost evened; rows are microbatches.

    Cost of one: samples x longest, padded to the multiple. Neither the variance of labels or cost, nor the sum of costs,
    nor the dearest one grows.
    """
    window = _Window(batches, counts, _PaddedCost(-(-lengths // multiple) * multiple))
    by_length = batches.ravel()[np.argsort(-lengths[batches.ravel()], kind="stable")].reshape(batches.shape)
    window.adopt(by_length)
    for number in range(PASSES):
        if not window.swap_pass(by_labels=number % 2 == 0, key=counts.astype(np.float64)):
            break
    return window.batches


def balance_flattened(batches: I64, lengths: I64, counts: I64) -> I64:
    """A window of flattened microbatches, shape (b, size), with labels and tokens evened; rows are microbatches.

    Neither the variance of labels or tokens nor the longest one grows.
    """
    window = _Window(batches, counts, _TokenCost(lengths))
    weight = _shares(counts, batches) + _shares(lengths, batches)
    window.adopt(_dealt(batches, weight))
    for number in range(PASSES):
        if not window.swap_pass(by_labels=number % 2 == 0, key=weight):
            break
    return window.batches


def _shares(values: I64, batches: I64) -> F64:
    """(n,) values in units of a microbatch's mean."""
    mean = float(values[batches].sum()) / len(batches)
    out: F64 = values / mean if mean else np.zeros(len(values))
    return out


def _dealt(batches: I64, weight: F64) -> I64:
    """The heaviest first, each to the lightest microbatch that has a place."""
    number, size = batches.shape
    sums, held = np.zeros(number), np.zeros(number, np.int64)
    out = np.empty_like(batches)
    samples = batches.ravel()
    for sample in samples[np.argsort(-weight[samples], kind="stable")].tolist():
        target = int(np.argmin(np.where(held < size, sums, np.inf)))
        out[target, held[target]] = sample
        held[target] += 1
        sums[target] += weight[sample]
    return out


@dataclass(frozen=True)
class _PaddedCost:
    """Samples x longest."""

    padded: I64

    def of(self, batches: I64) -> I64:
        """(b,) of each microbatch."""
        out: I64 = batches.shape[1] * self.padded[batches].max(axis=1)
        return out

    def after(self, batch: I64, old: int, place: I64, new: I64) -> I64:
        """(a, b) of a microbatch whose samples at `place` (a,) make room for `new` (b,)."""
        length = self.padded[batch]
        top = np.partition(length, -2)[-2:] if len(batch) > 1 else np.array([0, length[0]])
        others = np.where(length[place] == top[1], top[0], top[1])
        out: I64 = len(batch) * np.maximum(others[:, None], self.padded[new][None, :])
        return out


@dataclass(frozen=True)
class _TokenCost:
    """Sum of lengths."""

    lengths: I64

    def of(self, batches: I64) -> I64:
        """(b,) of each microbatch."""
        out: I64 = self.lengths[batches].sum(axis=1)
        return out

    def after(self, batch: I64, old: int, place: I64, new: I64) -> I64:
        """(a, b) of a microbatch whose samples at `place` (a,) make room for `new` (b,)."""
        return old - self.lengths[batch[place]][:, None] + self.lengths[new][None, :]


class _Window:
    """Microbatches under exchange, with their labels and costs."""

    def __init__(self, batches: I64, counts: I64, cost: _PaddedCost | _TokenCost) -> None:
        self.batches: I64 = batches.copy()
        self.counts = counts
        self.cost = cost
        self.labels: I64 = counts[batches].sum(axis=1)
        self.costs = cost.of(batches)
        self.peak = int(self.costs.max())  # of the window as it came

    def adopt(self, batches: I64) -> None:
        """Takes another arrangement of the same samples if nothing grows and something shrinks."""
        labels, costs = self.counts[batches].sum(axis=1), self.cost.of(batches)
        now = (_squares(self.labels), int(self.costs.sum()), _centred(self.costs))
        new = (_squares(labels), int(costs.sum()), _centred(costs))
        if costs.max() <= self.peak and new != now and all(b <= a for a, b in zip(now, new, strict=True)):
            self.batches, self.labels, self.costs = batches.copy(), labels, costs

    def swap_pass(self, by_labels: bool, key: F64) -> bool:
        """One exchange for each pair of a high and a low microbatch; whether there was any."""
        order = np.argsort(self.labels if by_labels else self.costs, kind="stable").tolist()
        done = [self._swap(low, high, key) for low, high in zip(order[: len(order) // 2], order[::-1], strict=False)]
        return any(done)

    def _swap(self, low: int, high: int, key: F64) -> bool:
        mine, theirs = self.batches[high], self.batches[low]
        a = np.argsort(-key[mine], kind="stable")[:CANDIDATES]
        b = np.argsort(key[theirs], kind="stable")[:CANDIDATES]
        moved = self.counts[mine[a]][:, None] - self.counts[theirs[b]][None, :]
        difference = int(self.labels[high] - self.labels[low])
        label_gain = 2 * moved * (difference - moved)
        old_high, old_low = int(self.costs[high]), int(self.costs[low])
        new_high = self.cost.after(mine, old_high, a, theirs[b])
        new_low = self.cost.after(theirs, old_low, b, mine[a]).T
        saved = old_high + old_low - new_high - new_low
        cost_gain = self._cost_gain(old_high**2 + old_low**2 - new_high**2 - new_low**2, saved)
        good = (label_gain >= 0) & (cost_gain >= 0) & (saved >= 0) & (np.maximum(new_high, new_low) <= self.peak)
        score = np.where(good, self._score(label_gain, cost_gain, saved), 0.0)
        if score.max() <= 0:
            return False
        i, j = divmod(int(np.argmax(score)), score.shape[1])
        mine[a[i]], theirs[b[j]] = theirs[b[j]], mine[a[i]]
        self.labels[high] -= moved[i, j]
        self.labels[low] += moved[i, j]
        self.costs[high], self.costs[low] = new_high[i, j], new_low[i, j]
        return True

    def _cost_gain(self, squares: I64, saved: I64) -> F64:
        """(a, b) by how much the sum of squared deviations of costs falls."""
        total, number = int(self.costs.sum()), len(self.costs)
        out: F64 = (squares * number + (total - saved) ** 2 - total**2) / number
        return out

    def _score(self, label_gain: I64, cost_gain: F64, saved: I64) -> F64:
        number = len(self.costs)
        labels, cost = max(float(self.labels.mean()), 1e-9), float(self.costs.mean())
        out: F64 = label_gain / labels**2 + cost_gain / (number * cost**2) + saved / cost
        return out


def _squares(values: I64) -> int:
    return int((values**2).sum())


def _centred(values: I64) -> int:
    """Squared deviations from the mean, times the number of values: an integer."""
    return int(len(values) * (values**2).sum() - values.sum() ** 2)
