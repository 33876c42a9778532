"""`LabelBalancedBatchSampler`: batches with a fixed number of samples, their supervised tokens evened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from odb.errors import ConfigError
from odb.plan.fixed_count import balance_flattened, balance_padded
from odb.plan.labels import WINDOW, Labelled, Microbatch, RowBounds
from odb.plan.types import I64
from odb.samplers.balancing import Passes
from odb.samplers.base import EpochPlan, PlannedBatchSampler, aligned, check_positive, checked_lengths, digest


class LabelBalancedBatchSampler(PlannedBatchSampler):
    """Random batches of `batch_size` samples, exchanged so that labels and sizes of batches and updates are alike.

    Follows Axolotl's `LabelBalancedRandomSampler` (axolotl-ai-cloud/axolotl, docs/multipack). Samples stay whole, a
    batch keeps its number of samples, and neither padding nor the largest batch grows. An incomplete last batch, and
    what makes no complete optimizer update, keep their random content and place.

    Args:
        lengths: tokens of each sample.
        label_counts: labels of each sample that bear loss, without its first label if the model shifts (padded) or the
            collator masks it (flattened).
        batch_size: samples of a batch.
        mode: "padded": cost is samples x longest; "flattened": the sum of lengths.
        pad_to_multiple_of: what the collator pads to.
        label_window_updates: optimizer updates among which samples may be exchanged after the first pass.
        **common: see `PlannedBatchSampler`.

    Raises:
        ConfigError: a wrong value; names the first sample that is wrong.
    """

    def __init__(
        self,
        lengths: Any,
        label_counts: Any,
        batch_size: int,
        *,
        mode: str = "padded",
        pad_to_multiple_of: int = 1,
        label_window_updates: int = 1,
        **common: Any,
    ) -> None:
        self.lengths = checked_lengths(lengths)
        super().__init__(len(self.lengths), **common)
        check_positive(
            batch_size=batch_size, pad_to_multiple_of=pad_to_multiple_of, label_window_updates=label_window_updates
        )
        if mode not in ("padded", "flattened"):
            raise ConfigError(f"mode must be 'padded' or 'flattened', got {mode!r}")
        self.data = Labelled.of(self.lengths, label_counts)
        self.samples_per_batch = batch_size
        self.mode = mode
        self.pad_to_multiple_of = pad_to_multiple_of
        self.label_window_updates = label_window_updates
        self._whole: list[Microbatch] = []  # the plan before any tail is dropped or split

    def _settings(self) -> dict[str, Any]:
        names = ("samples_per_batch", "mode", "pad_to_multiple_of", "label_window_updates")
        return {name: getattr(self, name) for name in names} | {"data": digest(self.lengths, self.data.counts)}

    def _make_plan(self, order: I64, rng: np.random.Generator) -> EpochPlan:
        size = self.samples_per_batch
        batches = [self._rows(order[i : i + size]) for i in range(0, len(order), size)]
        num_full = len(order) // size
        bounds = RowBounds(multiple=self.pad_to_multiple_of)
        passes = Passes(self.data, bounds, self.world_size, self.grad_accum_steps, self.label_window_updates)
        batches, metrics = passes.run(batches, num_full, lambda head: self._balanced(head, rng))
        self._whole = list(batches)
        dropped = 0
        if self.drop_last and num_full < len(batches):
            dropped = sum(map(len, batches.pop()))
        batches, counts = aligned(batches, self.world_size, self.drop_last, order)
        counts["dropped"] += dropped
        last = metrics["after"]
        stats = {name: last[name] for name in ("mean_batch_cost", "max_batch_cost", "padding_tokens")}
        return EpochPlan(batches, {"batches": len(batches)} | stats | counts, metrics)

    def _rows(self, samples: I64) -> Microbatch:
        return [[int(s)] for s in samples] if self.mode == "padded" else [samples.tolist()]

    def _balanced(self, batches: list[Microbatch], rng: np.random.Generator) -> list[Microbatch]:
        out: list[Microbatch] = []
        for start in range(0, len(batches), WINDOW):
            window = np.array(
                [[s for row in batch for s in row] for batch in batches[start : start + WINDOW]], np.int64
            )
            if self.mode == "padded":
                window = balance_padded(window, self.lengths, self.data.counts, self.pad_to_multiple_of)
            else:
                window = balance_flattened(window, self.lengths, self.data.counts)
            out += [self._rows(window[i]) for i in rng.permutation(len(window)).tolist()]
        return out

    @property
    def label_metrics(self) -> dict[str, dict[str, Any]]:
        """The current epoch's plan before and after each pass."""
        return self.plan().label_metrics

    def whole_order(self) -> Iterator[int]:
        """Every sample once, in the order of the common plan."""
        self.plan()
        return (sample for batch in self._whole for row in batch for sample in row)

    def indices(self) -> IndexSampler:
        """The same order as single indices, for a `DataLoader` that batches and a framework that shards by itself."""
        return IndexSampler(self)


class IndexSampler(Sampler[int]):
    """Dataset indices one by one, in the order of the common plan; give the loader the sampler's `batch_size`.

    Every sample comes once, on every rank: to drop a tail and to shard is left to who batches them.
    """

    def __init__(self, sampler: LabelBalancedBatchSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return self.sampler.whole_order()

    def __len__(self) -> int:
        return self.sampler.num_samples

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch `epoch`."""
        self.sampler.set_epoch(epoch)
