"""Which optimizer update and which rank runs a microbatch. Whole microbatches move; what is in them stays.

Follows Axolotl's accumulation ordering and rank ordering (axolotl-ai-cloud/axolotl, docs/multipack). An optimizer update
is `width` = ranks x accumulation steps consecutive microbatches of the common plan; rank `r` of `W` takes places `r, r+W,
...`, so inside an update place = micro-step x W + rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from odb.errors import ConfigError
from odb.plan.types import I64

UPDATES = 16  # complete updates that share out their microbatches
RANK_WINDOW = 32  # updates after which the search over orders settles on the best one
BEAM = 8  # orders that are followed at the same time
_ALL_ORDERS_UP_TO = 4  # ranks
_SHIFTS = 12

F64 = npt.NDArray[np.float64]


def order_updates(labels: I64, width: int) -> I64:
    """An order of the microbatches in which optimizer updates hold like amounts of labels.

    Args:
        labels: (b,) of each microbatch.
        width: microbatches of an update.

    Returns:
        (b,) places in `labels`. Where a window of 16 updates can't be improved, and behind the last complete update, as
        it was.
    """
    order = np.arange(len(labels))
    num_updates = len(labels) // width
    if width == 1:
        return order
    for first in range(0, num_updates, UPDATES):
        number = min(UPDATES, num_updates - first)
        part = slice(first * width, (first + number) * width)
        if number > 1:
            order[part] = _shared_out(labels[part], width) + part.start
    return order


def _shared_out(labels: I64, width: int) -> I64:
    """The richest first, each to the poorest update that has a place left; as it was where that is no better."""
    number = len(labels) // width
    sums = np.zeros(number, np.int64)
    held: list[list[int]] = [[] for _ in range(number)]
    for place in np.argsort(-labels, kind="stable").tolist():
        update = min((u for u in range(number) if len(held[u]) < width), key=lambda u: (int(sums[u]), u))
        held[update].append(place)
        sums[update] += labels[place]
    before = labels.reshape(number, width).sum(axis=1)
    is_better = (sums**2).sum() < (before**2).sum()
    return np.array([p for places in held for p in places]) if is_better else np.arange(len(labels))


def order_by_rank(costs: Any, num_ranks: int, grad_accum_steps: int = 1) -> I64:
    """An order in which each rank's consecutive microbatches are close in size; every update keeps its own.

    A beam search. Of the orders of an update those stay in the running that neither spread simultaneous costs further
    nor raise the sum of the micro-steps' largest costs. Compared are, in this order: the worst rank's squared size
    changes, the imbalance of the ranks' work, the simultaneous spread, all squared size changes; each summed up so far.

    Args:
        costs: (b,) of the microbatches in plan order, b a multiple of `num_ranks * grad_accum_steps`.
        num_ranks: data-parallel ranks.
        grad_accum_steps: micro-steps of an update.

    Returns:
        (b,) places in `costs`.

    Raises:
        ConfigError: costs are no list of finite numbers >= 0 of such a length, or a number is below 1.
    """
    for name, value in (("num_ranks", num_ranks), ("grad_accum_steps", grad_accum_steps)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
    cost = np.asarray(costs, np.float64)
    width = num_ranks * grad_accum_steps
    if cost.ndim != 1 or len(cost) % width or not (np.isfinite(cost) & (cost >= 0)).all():
        raise ConfigError(
            f"costs must be a list of finite numbers >= 0 whose length is a multiple of {width} "
            f"(ranks x accumulation steps), got shape {cost.shape}"
        )
    beam = [_Path.start(num_ranks)]
    for update in range(len(cost) // width):
        first = update * width
        table = cost[first : first + width].reshape(grad_accum_steps, num_ranks)
        options = _options(table)
        beam = _extended(beam, table, options, first)
        if (update + 1) % RANK_WINDOW == 0:
            beam = beam[:1]
    return np.array(beam[0].places, np.int64)


@dataclass(frozen=True, slots=True)
class _Path:
    """One order of the updates so far. Arrays of shape (W,)."""

    places: tuple[int, ...]
    last: F64 | None  # cost of each rank's last microbatch
    jumps: F64  # squared size changes of each rank
    work: F64
    spread: float

    @classmethod
    def start(cls, num_ranks: int) -> _Path:
        return cls((), None, np.zeros(num_ranks), np.zeros(num_ranks), 0.0)


def _options(table: F64) -> npt.NDArray[np.int64]:
    """(k, G, W) orders of one update, as places in the flattened (G, W) table, the original first."""
    unique: dict[bytes, I64] = {}
    for base in _bases(table):
        for ranks in _rank_orders(table.shape[1]):
            one = np.ascontiguousarray(base[:, list(ranks)])
            unique.setdefault(one.tobytes(), one)
    all_orders = np.stack(list(unique.values()))
    costs = table.ravel()[all_orders]
    spread, peaks = _spread(costs), costs.max(axis=2).sum(axis=1)
    kept: npt.NDArray[np.int64] = all_orders[(spread <= spread[0] + 1e-6) & (peaks <= peaks[0] + 1e-6)]
    return kept


def _spread(costs: F64) -> F64:
    """(k,) squared deviations between ranks, summed over micro-steps; `costs` (k, G, W)."""
    out: F64 = ((costs - costs.mean(axis=2, keepdims=True)) ** 2).sum(axis=(1, 2))
    return out


def _bases(table: F64) -> Iterator[I64]:
    """As it is, sorted by rows, sorted by columns, sorted with every second row reversed; then each from behind."""
    num_steps, num_ranks = table.shape
    ascending = np.argsort(table.ravel(), kind="stable")
    snake = ascending.reshape(num_steps, num_ranks).copy()
    snake[1::2] = snake[1::2, ::-1]
    layouts = (
        np.arange(table.size).reshape(table.shape),
        ascending.reshape(num_steps, num_ranks),
        ascending.reshape(num_ranks, num_steps).T,
        snake,
    )
    for layout in layouts:
        yield layout
        yield layout[::-1]


def _rank_orders(num_ranks: int) -> Iterator[tuple[int, ...]]:
    """All orders of a few ranks; of many the cyclic shifts, 12 evenly spaced, forwards and backwards."""
    if num_ranks <= _ALL_ORDERS_UP_TO:
        yield from permutations(range(num_ranks))
        return
    number = min(num_ranks, _SHIFTS)
    for ranks in (tuple(range(num_ranks)), tuple(range(num_ranks))[::-1]):
        for k in range(number):
            shift = k * num_ranks // number
            yield ranks[shift:] + ranks[:shift]


def _extended(beam: list[_Path], table: F64, options: npt.NDArray[np.int64], first: int) -> list[_Path]:
    """The best paths one update further."""
    costs = table.ravel()[options]  # (k, G, W)
    inside = (np.diff(costs, axis=1) ** 2).sum(axis=1)  # (k, W)
    spread, work = _spread(costs), costs.sum(axis=1)
    scores, jumps = [], []
    for path in beam:
        step = inside if path.last is None else inside + (costs[:, 0] - path.last) ** 2
        jumps.append(path.jumps + step)
        total = path.work + work
        uneven = ((total - total.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
        scores.append(np.stack([jumps[-1].max(axis=1), uneven, path.spread + spread, jumps[-1].sum(axis=1)]))
    keys = np.concatenate(scores, axis=1)  # (4, beam * k)
    best = np.lexsort(keys[::-1])[:BEAM]
    out = []
    for parent, k in (divmod(int(i), len(options)) for i in best):
        path = beam[parent]
        places = path.places + tuple((options[k].ravel() + first).tolist())
        out.append(_Path(places, costs[k, -1], jumps[parent][k], path.work + work[k], path.spread + float(spread[k])))
    return out
