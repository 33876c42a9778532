"""`MultipackBatchSampler`: whole samples packed into rows of fixed capacity."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import numpy as np

from odb.errors import ConfigError
from odb.plan import pack
from odb.plan.label_search import balance_windows
from odb.plan.labels import Labelled, Microbatch, RowBounds
from odb.plan.types import I64
from odb.samplers.balancing import Passes
from odb.samplers.base import EpochPlan, PlannedBatchSampler, aligned, check_positive, checked_lengths, digest

logger = logging.getLogger("odb")


class MultipackBatchSampler(PlannedBatchSampler):
    """Packs whole samples into rows of `capacity` tokens; a batch is one row, or several.

    Give `odb.collators.FlattenCollator` (one row, attention over varying lengths) or `BlockMaskCollator` (rows with a 4-D
    mask) to the `DataLoader`; with several rows a batch, tell the collator the capacity too.

    Args:
        lengths: tokens of each sample.
        capacity: tokens of a row at most.
        rows_per_batch: rows of a batch; the last batch may be short of some and is dropped with `drop_last`.
        max_samples: samples of a row at most.
        window: samples of the shuffled epoch that are packed together; what fills no row waits for the next window.
            None: the whole epoch, which fills best, but puts like lengths together in every epoch and leaves label
            balancing little to exchange.
        sequential: keep the order: a row closes when the next sample does not fit. Fills less.
        label_counts: labels of each sample that bear loss (see `label_counts_of`); evens them over batches and updates.
        label_starts: 1 for samples that lose a label when they open a row; leave it out with odb's collators, which mask
            every sample's first label, and count without it.
        label_window_updates: optimizer updates among which samples may be exchanged after that.
        pad_to_multiple_of: what the collator pads rows to; balancing then never adds padding.
        on_oversize: "error", or "skip": leave samples above the capacity out, counted in `stats()["oversize"]`.
        **common: see `PlannedBatchSampler`.

    Raises:
        ConfigError: a wrong value, a sample above the capacity, or label counts together with `sequential`.
    """

    def __init__(
        self,
        lengths: Any,
        capacity: int,
        *,
        rows_per_batch: int = 1,
        max_samples: int | None = None,
        window: int | None = 1024,
        sequential: bool = False,
        label_counts: Any = None,
        label_starts: Any = None,
        label_window_updates: int = 1,
        pad_to_multiple_of: int = 1,
        on_oversize: str = "error",
        **common: Any,
    ) -> None:
        self.lengths = checked_lengths(lengths)
        super().__init__(len(self.lengths), **common)
        check_positive(
            capacity=capacity,
            rows_per_batch=rows_per_batch,
            label_window_updates=label_window_updates,
            pad_to_multiple_of=pad_to_multiple_of,
            max_samples=1 if max_samples is None else max_samples,
            window=1 if window is None else window,
        )
        if pad_to_multiple_of > capacity:
            raise ConfigError(f"pad_to_multiple_of={pad_to_multiple_of} is more than the capacity {capacity}")
        self.capacity = capacity
        self.rows_per_batch = rows_per_batch
        self.max_samples = max_samples
        self.window = window
        self.sequential = sequential
        self.label_window_updates = label_window_updates
        self.pad_to_multiple_of = pad_to_multiple_of
        # Tokens that rows are filled with: padding up to the multiple must not exceed the capacity.
        self.bounds = pack.Bounds(capacity - capacity % pad_to_multiple_of, max_samples)
        self.usable = self._usable(on_oversize)
        self.labelled = self._labelled(label_counts, label_starts)

    def _usable(self, on_oversize: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(n,) bool: samples that fit."""
        if on_oversize not in ("error", "skip"):
            raise ConfigError(f"on_oversize must be 'error' or 'skip', got {on_oversize!r}")
        fits: np.ndarray[Any, np.dtype[np.bool_]] = self.lengths <= self.bounds.capacity
        if not fits.all():
            first = int(np.argmin(fits))
            text = (
                f"sample {first} has {self.lengths[first]} tokens, more than a row's capacity {self.bounds.capacity} "
                f"({int((~fits).sum())} such samples)"
            )
            if on_oversize == "error":
                raise ConfigError(f"{text}: truncate them in the dataset, raise it, or give on_oversize='skip'")
            logger.warning("%s: left out", text)
        return fits

    def _labelled(self, counts: Any, starts: Any) -> Labelled | None:
        if counts is None:
            if starts is not None:
                raise ConfigError("label_starts belong to label_counts: give both or neither")
            return None
        if self.sequential:
            raise ConfigError("sequential=True keeps the order, label_counts ask to change it: give one")
        return Labelled.of(self.lengths, counts, starts)

    def _settings(self) -> dict[str, Any]:
        names = ("capacity", "rows_per_batch", "max_samples", "window", "sequential", "pad_to_multiple_of")
        labels = () if self.labelled is None else (self.labelled.counts, self.labelled.starts)
        balancing = {} if self.labelled is None else {"label_window_updates": self.label_window_updates}
        return {name: getattr(self, name) for name in names} | balancing | {"data": digest(self.lengths, *labels)}

    def _make_plan(self, order: I64, rng: np.random.Generator) -> EpochPlan:
        order = order[self.usable[order]]
        rows = self._rows(order)
        if self.shuffle and not self.sequential:  # they come with the longest samples first
            rows = [rows[i] for i in rng.permutation(len(rows)).tolist()]
        size = self.rows_per_batch
        batches: list[Microbatch] = [rows[i : i + size] for i in range(0, len(rows), size)]
        num_full = len(rows) // size
        dropped = 0
        if self.drop_last and num_full < len(batches):
            dropped = sum(map(len, batches.pop()))
        metrics: dict[str, dict[str, Any]] = {}
        if self.labelled is not None:
            batches, metrics = self._balanced(batches, num_full, self.labelled, rng)
        batches, counts = aligned(batches, self.world_size, self.drop_last, order)
        counts["dropped"] += dropped
        return EpochPlan(batches, self._stats(batches) | counts, metrics)

    def _rows(self, order: I64) -> list[list[int]]:
        sizes = self.lengths[order]
        if self.sequential:
            ends = pack.next_fit(sizes, self.bounds)
            return [order[a:b].tolist() for a, b in pairwise([0, *ends])]
        if self.window is None:
            return [order[row].tolist() for row in pack.first_fit_decreasing(sizes, self.bounds)]
        return [order[row].tolist() for row in pack.windowed(sizes, self.bounds, self.window)]

    def _balanced(
        self, batches: list[Microbatch], num_full: int, data: Labelled, rng: np.random.Generator
    ) -> tuple[list[Microbatch], dict[str, dict[str, Any]]]:
        bounds = RowBounds(self.bounds.capacity, self.max_samples, self.pad_to_multiple_of)
        passes = Passes(data, bounds, self.world_size, self.grad_accum_steps, self.label_window_updates)
        return passes.run(batches, num_full, lambda head: balance_windows(head, data, bounds, rng))

    def _stats(self, batches: list[Microbatch]) -> dict[str, Any]:
        rows = [row for batch in batches for row in batch]
        tokens = sum(int(self.lengths[row].sum()) for row in rows)
        return {
            "batches": len(batches),
            "rows": len(rows),
            "samples": sum(map(len, rows)),
            "tokens": tokens,
            "token_slots": len(rows) * self.capacity,
            "fill": tokens / max(1, len(rows) * self.capacity),
            "oversize": int((~self.usable).sum()),
        }

    @property
    def label_metrics(self) -> dict[str, dict[str, Any]]:
        """The current epoch's plan before and after each pass of label balancing; empty without `label_counts`."""
        return self.plan().label_metrics
