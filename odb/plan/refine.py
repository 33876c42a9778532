"""Swaps inside optimizer updates: microbatches of one update become alike in cost and tokens, the update stays as it is.

Follows Axolotl's accumulation-aware refinement (axolotl-ai-cloud/axolotl, docs/multipack). See `odb.plan.labels` for the
words. An exchange is made only if nothing gets worse: padded slots, the dearer of the two, the variance of cost over the
window and over all of it, the variance of tokens and labels of the pair and, across updates, of updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb.plan.labels import PASSES, Exchange, Labelled, Microbatch, Places, RowBounds, exchanged, slots, tokens, totals
from odb.plan.types import I64


@dataclass
class _Ledger:
    """Running sums of all microbatches that are refined. Arrays of shape (b,); updates of shape (b / width,)."""

    cost: I64
    tokens: I64
    labels: I64
    width: int

    def update_sums(self, values: I64, update: int) -> int:
        """Sum over one optimizer update."""
        return int(values[update * self.width : (update + 1) * self.width].sum())


def refine(
    batches: Sequence[Microbatch], data: Labelled, bounds: RowBounds, width: int, window_updates: int = 1
) -> list[Microbatch]:
    """Exchanges samples within `window_updates` complete optimizer updates of `width` microbatches each.

    Every window keeps its samples, tokens and labels, every microbatch its rows, every row its number of samples. With a
    window of several updates, run it again with one. What is behind the last complete window stays as it is.
    """
    out = [[list(row) for row in batch] for batch in batches]
    size = width * window_updates
    covered = len(out) // size * size
    if size < 2 or not covered:
        return out
    part = out[:covered]
    ledger = _Ledger(
        np.array([slots(batch, data, bounds) for batch in part], np.int64),
        np.array([tokens(batch, data) for batch in part], np.int64),
        totals(part, data),
        width,
    )
    for start in range(0, covered, size):
        _refine_window(part, range(start, start + size), ledger, data, bounds)
    return out


def _refine_window(
    batches: list[Microbatch], window: range, ledger: _Ledger, data: Labelled, bounds: RowBounds
) -> None:
    for number in range(PASSES):
        by_tokens = number % 2 == 1
        values = (ledger.tokens if by_tokens else ledger.cost)[window.start : window.stop]
        order = (np.argsort(values, kind="stable") + window.start).tolist()
        changed = False
        for low, high in zip(order[: len(order) // 2], order[::-1], strict=False):
            changed |= _exchange_pair(batches, low, high, window, ledger, data, bounds)
        if by_tokens and not changed:
            return


def _exchange_pair(
    batches: list[Microbatch], low: int, high: int, window: range, ledger: _Ledger, data: Labelled, bounds: RowBounds
) -> bool:
    """The best exchange that makes nothing worse, in place."""
    if ledger.cost[low] == ledger.cost[high] and ledger.tokens[low] == ledger.tokens[high]:
        return False
    long, short = Places.of(batches[high], data, -data.lengths), Places.of(batches[low], data, data.lengths)
    swap = Exchange.of(long, short, (len(batches[high]), len(batches[low])), data, bounds)
    old = (int(ledger.cost[high]), int(ledger.cost[low]))
    good = _worsens_nothing(swap, low, high, ledger) & _leads_alike(long, short, data)
    larger = np.maximum(swap.my_slots, swap.their_slots)
    saved = sum(old) - swap.my_slots - swap.their_slots
    good &= (saved >= 0) & (larger <= max(old))
    gain = _variance_gain(swap, old, ledger.cost[window.start : window.stop])
    good &= (gain >= 0) & (_variance_gain(swap, old, ledger.cost) >= 0)
    difference = int(ledger.tokens[high] - ledger.tokens[low])
    closer = difference**2 - (difference - 2 * swap.shift) ** 2
    better = (larger < max(old)) | (saved > 0) | (gain > 0) | (closer > 0)
    places = np.flatnonzero(good & better)
    if not len(places):
        return False
    keys = tuple(array.ravel()[places] for array in (-closer, -gain, -saved, larger))
    a, b = divmod(int(places[np.lexsort(keys)[0]]), swap.shift.shape[1])
    exchanged((batches[high], batches[low]), long, a, short, b)
    for place, sign, cost in ((high, -1, swap.my_slots[a, b]), (low, 1, swap.their_slots[a, b])):
        ledger.tokens[place] += sign * swap.shift[a, b]
        ledger.labels[place] += sign * swap.labels[a, b]
        ledger.cost[place] = cost
    return True


def _worsens_nothing(swap: Exchange, low: int, high: int, ledger: _Ledger) -> npt.NDArray[np.bool_]:
    """(a, b) whether tokens and labels of the pair, and of its two updates, come no further apart."""
    good = swap.fits & swap.keeps_labels & (swap.shift > 0)
    for moved, values in ((swap.shift, ledger.tokens), (swap.labels, ledger.labels)):
        good &= _comes_no_further(moved, int(values[high] - values[low]))
        updates = (high // ledger.width, low // ledger.width)
        if updates[0] != updates[1]:
            apart = ledger.update_sums(values, updates[0]) - ledger.update_sums(values, updates[1])
            good &= _comes_no_further(moved, apart)
    return good


def _comes_no_further(moved: I64, difference: int) -> npt.NDArray[np.bool_]:
    good: npt.NDArray[np.bool_] = np.abs(difference - 2 * moved) <= abs(difference)
    return good


def _leads_alike(long: Places, short: Places, data: Labelled) -> npt.NDArray[np.bool_]:
    """(a, b) a label that its row's start hides stays hidden: a sample that leads changes places with one that leads."""
    a, b = long.leads[:, None], short.leads[None, :]
    no_start = (data.starts[long.sample][:, None] == 0) & (data.starts[short.sample][None, :] == 0)
    alike: npt.NDArray[np.bool_] = (a == b) | no_start
    return alike


def _variance_gain(swap: Exchange, old: tuple[int, int], costs: I64) -> npt.NDArray[np.float64]:
    """(a, b) by how much the exchange lowers the population variance of costs, times their number."""
    number, total = len(costs), int(costs.sum())
    change = swap.my_slots + swap.their_slots - sum(old)
    squares = old[0] ** 2 + old[1] ** 2 - swap.my_slots**2 - swap.their_slots**2
    # In integers over the common denominator: variances of equal plans must come out equal.
    means = (total + change) ** 2 - total**2
    out: npt.NDArray[np.float64] = (squares * number + means) / number
    return out
