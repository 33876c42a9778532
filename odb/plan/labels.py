"""Balancing of supervised tokens: full batches hold like amounts of labels that bear loss, and nothing else gets worse.

A *microbatch* is what one rank runs in one forward and backward: a list of rows, each a list of sample numbers. Packed
layout: rows of several samples; padded layout: rows of one; flattened: one row. A row's labels are the sum of its
samples', less its first sample's start (see `Labelled`); its slots are its length after padding.

Exchanges keep samples, rows and microbatches, every row's capacity, the sum of all labels, and never add padding.
The behaviour follows Axolotl's `balance_labels` (axolotl-ai-cloud/axolotl, docs/multipack): window by window, rows are
regrouped, samples swapped in pairs of a poor and a rich microbatch, and a pair repacked where no swap helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odb.errors import ConfigError
from odb.plan.types import I64

Row = list[int]
Microbatch = list[Row]

WINDOW = 64  # microbatches that are balanced together
PASSES = 4
CANDIDATES = 32  # samples of each side that are tried in an exchange


@dataclass(frozen=True, slots=True)
class Labelled:
    """Lengths and labels of `n` samples. All arrays int64, shape (n,).

    Attributes:
        lengths: tokens, >= 1.
        counts: labels that bear loss, as long as the sample does not open a row.
        starts: 1 where opening a row costs the sample a label, as the model's causal shift predicts nothing at a row's
            first place. All 0 where counts leave out each sample's first label already (what flattening collators
            mask), and where labels come shifted.
    """

    lengths: I64
    counts: I64
    starts: I64

    @classmethod
    def of(cls, lengths: Any, counts: Any, starts: Any = None, capacity: int | None = None) -> Labelled:
        """Checked copies.

        Raises:
            ConfigError: shapes differ, values are no integers, or 0 < length <= capacity, 0 <= start <= count <= length
                or start <= 1 does not hold; names the first sample that is wrong.
        """
        length = _integers("lengths", lengths)
        count = _integers("label counts", counts)
        start = np.zeros_like(count) if starts is None else _integers("starts", starts)
        if not len(length) == len(count) == len(start):
            raise ConfigError(
                f"one length, label count and start per sample: got {len(length)}, {len(count)}, {len(start)}"
            )
        _check("lengths must be >= 1", length < 1, length)
        if capacity is not None:
            _check(f"lengths must be at most the capacity {capacity}: truncate or filter", length > capacity, length)
        _check("label counts must be from 0 to the length", (count < 0) | (count > length), count)
        _check("starts must be 0 or 1 and at most the label count", (start < 0) | (start > 1) | (start > count), start)
        return cls(length, count, start)


def _integers(name: str, values: Any) -> I64:
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name} must be a list of integers, one per sample, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def _check(rule: str, is_wrong: npt.NDArray[np.bool_], values: I64) -> None:
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise ConfigError(f"{rule}; sample {first} has {values[first]}")


def count_labels(labels: Sequence[int], ignore_index: int = -100, label_shift: bool = True) -> tuple[int, int]:
    """Count and start of one sample: labels that bear loss, and 1 if its first one would be lost at a row's start."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ConfigError(f"labels must be one list of numbers per sample, got shape {array.shape}")
    count = int(np.count_nonzero(array != ignore_index))
    return count, int(label_shift and len(array) > 0 and array[0] != ignore_index)


@dataclass(frozen=True, slots=True)
class RowBounds:
    """What exchanges must keep. None: no bound (padded and flattened microbatches with a fixed number of samples)."""

    capacity: int | None = None  # tokens of a row
    max_samples: int | None = None  # of a row
    multiple: int | None = None  # padded length is a multiple of this; None: padding may grow

    def padded(self, length: int) -> int:
        """A row's length after padding."""
        return length if self.multiple is None else -(-length // self.multiple) * self.multiple


def row_labels(row: Row, data: Labelled) -> int:
    """Labels of one row that bear loss."""
    return int(data.counts[row].sum()) - int(data.starts[row[0]])


def row_length(row: Row, data: Labelled) -> int:
    """Tokens of one row."""
    return int(data.lengths[row].sum())


def totals(batches: Sequence[Microbatch], data: Labelled) -> I64:
    """(b,) labels of each microbatch."""
    return np.array([sum(row_labels(row, data) for row in batch) for batch in batches], np.int64)


def slots(batch: Microbatch, data: Labelled, bounds: RowBounds) -> int:
    """Padded token slots of a microbatch: rows x the longest row after padding."""
    return len(batch) * bounds.padded(max(row_length(row, data) for row in batch))


def tokens(batch: Microbatch, data: Labelled) -> int:
    """Tokens of a microbatch, without padding."""
    return sum(row_length(row, data) for row in batch)


def balance_windows(
    batches: Sequence[Microbatch], data: Labelled, bounds: RowBounds, rng: np.random.Generator, window: int = WINDOW
) -> list[Microbatch]:
    """The microbatches with their labels evened, `window` of them at a time, each window shuffled afterwards.

    Samples, rows, microbatches and the sum of labels stay the same; the sum of squared label totals never grows.
    """
    out: list[Microbatch] = []
    for start in range(0, len(batches), window):
        part = [[list(row) for row in batch] for batch in batches[start : start + window]]
        part = _regrouped(part, data, bounds)
        for _ in range(PASSES):
            if not _swap_pass(part, data, bounds):
                break
        out += [part[i] for i in rng.permutation(len(part)).tolist()]
    return out


def _regrouped(batches: list[Microbatch], data: Labelled, bounds: RowBounds) -> list[Microbatch]:
    """Whole rows dealt anew: the richest to the poorest microbatch that still has a place. Kept if it is better."""
    rows = [row for batch in batches for row in batch]
    labels = np.array([row_labels(row, data) for row in rows], np.int64)
    room = [len(batch) for batch in batches]
    sums = np.zeros(len(batches), np.int64)
    dealt: list[Microbatch] = [[] for _ in batches]
    for number in np.argsort(-labels, kind="stable").tolist():
        free = [b for b in range(len(batches)) if len(dealt[b]) < room[b]]
        target = min(free, key=lambda b: (int(sums[b]), b))
        dealt[target].append(rows[number])
        sums[target] += labels[number]
    is_better = (sums**2).sum() < (totals(batches, data) ** 2).sum()
    if is_better and bounds.multiple is not None:
        is_better = _all_slots(dealt, data, bounds) <= _all_slots(batches, data, bounds)
    return dealt if is_better else batches


def _all_slots(batches: Sequence[Microbatch], data: Labelled, bounds: RowBounds) -> int:
    return sum(slots(batch, data, bounds) for batch in batches)


def _swap_pass(batches: list[Microbatch], data: Labelled, bounds: RowBounds) -> bool:
    """One exchange for each pair (poorest with richest, and so on inwards). In place; whether anything changed."""
    sums = totals(batches, data)
    order = np.argsort(sums, kind="stable").tolist()
    changed = False
    for low, high in zip(order[: len(order) // 2], order[::-1], strict=False):
        difference = int(sums[high] - sums[low])
        if difference <= 1:
            continue
        pair = (batches[low], batches[high])
        better = _swapped(pair, difference, data, bounds) or _repacked(pair, difference, data, bounds)
        if better is not None:
            batches[low], batches[high] = better
            changed = True
    return changed


@dataclass(frozen=True, slots=True)
class Places:
    """Candidate samples of a microbatch and where they stand. Arrays of shape (k,)."""

    row: I64
    index: I64  # within the row
    sample: I64
    row_len: I64  # of the sample's row
    others: I64  # longest of the other rows, 0 if there is none

    @classmethod
    def of(cls, batch: Microbatch, data: Labelled, key: npt.NDArray[Any], most: int = CANDIDATES) -> Places:
        """The `most` samples for which `key`, shape (n,) over all samples, is smallest; ties in the order of places."""
        flat = np.array([s for row in batch for s in row], np.int64)
        at = np.array([(r, i) for r, row in enumerate(batch) for i in range(len(row))], np.int64)
        chosen = np.argsort(key[flat], kind="stable")[:most]
        length = np.array([row_length(row, data) for row in batch], np.int64)
        longest = [int(np.delete(length, r).max(initial=0)) for r in range(len(batch))]
        row = at[chosen, 0]
        return cls(row, at[chosen, 1], flat[chosen], length[row], np.array(longest, np.int64)[row])

    @property
    def leads(self) -> npt.NDArray[np.bool_]:
        """Whether each opens its row."""
        first: npt.NDArray[np.bool_] = self.index == 0
        return first


@dataclass(frozen=True, slots=True)
class Exchange:
    """What swapping candidate a of `mine` with candidate b of `theirs` would come to. Arrays of shape (a, b)."""

    shift: I64  # tokens that `mine` loses
    labels: I64  # labels that `mine` loses
    keeps_labels: npt.NDArray[np.bool_]  # `theirs` gains just as many
    fits: npt.NDArray[np.bool_]  # rows keep their capacity
    my_slots: I64
    their_slots: I64

    @classmethod
    def of(cls, mine: Places, theirs: Places, num_rows: tuple[int, int], data: Labelled, bounds: RowBounds) -> Exchange:
        """All exchanges between two microbatches of `num_rows` rows each."""
        a, b = mine.sample[:, None], theirs.sample[None, :]
        shift = data.lengths[a] - data.lengths[b]
        start = data.starts[a] - data.starts[b]
        a_leads, b_leads = mine.leads[:, None], theirs.leads[None, :]
        labels = data.counts[a] - data.counts[b] - start * a_leads
        my_row, their_row = mine.row_len[:, None] - shift, theirs.row_len[None, :] + shift
        longest = np.iinfo(np.int64).max if bounds.capacity is None else bounds.capacity
        return cls(
            shift,
            labels,
            (start == 0) | (a_leads == b_leads),
            (my_row <= longest) & (their_row <= longest),
            num_rows[0] * _padded(np.maximum(my_row, mine.others[:, None]), bounds),
            num_rows[1] * _padded(np.maximum(their_row, theirs.others[None, :]), bounds),
        )


def _padded(length: I64, bounds: RowBounds) -> I64:
    return length if bounds.multiple is None else -(-length // bounds.multiple) * bounds.multiple


def exchanged(pair: tuple[Microbatch, Microbatch], mine: Places, a: int, theirs: Places, b: int) -> None:
    """Swaps candidate `a` of the first microbatch with candidate `b` of the second, in place."""
    one, other = pair[0][int(mine.row[a])], pair[1][int(theirs.row[b])]
    i, j = int(mine.index[a]), int(theirs.index[b])
    one[i], other[j] = other[j], one[i]


def _swapped(
    pair: tuple[Microbatch, Microbatch], difference: int, data: Labelled, bounds: RowBounds
) -> tuple[Microbatch, Microbatch] | None:
    low, high = pair
    rich, poor = Places.of(high, data, -data.counts), Places.of(low, data, data.counts)
    swap = Exchange.of(rich, poor, (len(high), len(low)), data, bounds)
    gain = 2 * swap.labels * (difference - swap.labels)
    good = swap.keeps_labels & swap.fits & (gain > 0)
    if bounds.multiple is not None:
        good &= swap.my_slots + swap.their_slots <= slots(low, data, bounds) + slots(high, data, bounds)
    if not good.any():
        return None
    a, b = divmod(int(np.argmax(np.where(good, gain, -1))), gain.shape[1])
    exchanged((high, low), rich, a, poor, b)
    return low, high


def _repacked(
    pair: tuple[Microbatch, Microbatch], difference: int, data: Labelled, bounds: RowBounds
) -> tuple[Microbatch, Microbatch] | None:
    """All samples of the pair placed anew, the longest first; None unless the labels come closer and nothing is lost."""
    if bounds.capacity is None:
        return None
    samples = sorted((s for batch in pair for row in batch for s in row), key=lambda s: _placing_order(s, data))
    dealt: tuple[Microbatch, Microbatch] = ([[] for _ in pair[0]], [[] for _ in pair[1]])
    sums, room = [0, 0], [[bounds.capacity] * len(batch) for batch in pair]
    for sample in samples:
        length = int(data.lengths[sample])
        place = min(_places_with_room(dealt, room, sums, length, bounds), default=None)
        if place is None:
            return None
        _, _, batch, row = place
        opens = not dealt[batch][row]
        dealt[batch][row].append(sample)
        room[batch][row] -= length
        sums[batch] += int(data.counts[sample]) - (int(data.starts[sample]) if opens else 0)
    before = int(totals(pair, data).sum())
    is_better = all(row for batch in dealt for row in batch) and sum(sums) == before
    is_better = is_better and abs(sums[0] - sums[1]) < difference
    if is_better and bounds.multiple is not None:
        is_better = _all_slots(dealt, data, bounds) <= _all_slots(pair, data, bounds)
    return dealt if is_better else None


def _placing_order(sample: int, data: Labelled) -> tuple[int, int, int]:
    return -int(data.lengths[sample]), -int(data.counts[sample]), sample


def _places_with_room(
    dealt: tuple[Microbatch, Microbatch], room: list[list[int]], sums: list[int], length: int, bounds: RowBounds
) -> list[tuple[int, int, int, int]]:
    """(labels of the microbatch, room that stays, microbatch, row) of each row that can take a sample."""
    most = bounds.max_samples
    return [
        (sums[b], free - length, b, r)
        for b, rows in enumerate(room)
        for r, free in enumerate(rows)
        if length <= free and (most is None or len(dealt[b][r]) < most)
    ]


def summary(
    batches: Sequence[Microbatch], data: Labelled, bounds: RowBounds, width: int, num_full: int
) -> dict[str, Any]:
    """What a plan looks like, by name: microbatches, labels, tokens, padded slots, and labels of optimizer updates.

    Args:
        batches: of the common plan, before ranks take their shares.
        width: microbatches of an optimizer update over all ranks.
        num_full: leading microbatches that are complete; those of incomplete updates and behind are the excluded tail.
    """
    labels = totals(batches, data).astype(np.float64)
    length = np.array([tokens(batch, data) for batch in batches], np.float64)
    cost = np.array([slots(batch, data, bounds) for batch in batches], np.float64)
    num_rows = sum(map(len, batches))
    num_updates = num_full // width
    updates = labels[: num_updates * width].reshape(num_updates, width).sum(axis=1)
    return {
        "batches": len(batches),
        "packed_rows": num_rows,
        "mean_packed_length": float(length.sum() / max(1, num_rows)),
        **_moments("label_count", labels),
        "total_label_count": int(labels.sum()),
        **_moments("unpadded_length", length, largest=True),
        **_moments("batch_cost", cost, largest=True),
        "total_batch_cost": int(cost.sum()),
        "padding_tokens": int(cost.sum() - length.sum()),
        "updates": num_updates,
        **_moments("global_update_labels", updates),
        "excluded_tail_microbatches": len(batches) - num_updates * width,
    }


def _moments(name: str, values: npt.NDArray[np.float64], largest: bool = False) -> dict[str, float]:
    """Mean and population standard deviation (0 of nothing), and the largest value where asked for."""
    is_empty = not len(values)
    out = {
        f"mean_{name}": 0.0 if is_empty else float(values.mean()),
        f"std_{name}": 0.0 if is_empty else float(values.std()),
    }
    return out | ({f"max_{name}": float(values.max(initial=0.0))} if largest else {})
