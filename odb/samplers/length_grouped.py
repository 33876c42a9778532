"""`LengthGroupedSampler`: batches of samples of like length, from random windows or from the whole set."""

from __future__ import annotations

from typing import Any

import numpy as np

from odb.errors import ConfigError
from odb.plan import group
from odb.plan.labels import Microbatch
from odb.plan.types import I64, Measures, PlanConfig
from odb.samplers.base import EpochPlan, PlannedBatchSampler, check_positive, checked_lengths, digest


class LengthGroupedSampler(PlannedBatchSampler):
    """Sorts windows of the shuffled epoch by length and cuts them into batches; steps run in random order.

    Either batches of `batch_size` samples, or as many as fit a token budget (rows x longest). Each step's batches, one a
    rank, are neighbours in length. With `window=None` the whole epoch is sorted: what an oracle that knows all lengths
    gets, at the price that a batch's samples are alike in every epoch.

    Args:
        lengths: tokens of each sample.
        batch_size: samples of a batch.
        token_budget: instead: rows x padded length of a batch at most. A longer sample goes alone.
        window: samples that are sorted together.
        longest_first: run the step with the longest sample first, so that a lack of memory shows at once.
        pad_to_multiple_of: what the collator pads to.
        **common: see `PlannedBatchSampler`.

    Raises:
        ConfigError: both or neither of `batch_size` and `token_budget`, or a wrong value.
    """

    def __init__(
        self,
        lengths: Any,
        *,
        batch_size: int | None = None,
        token_budget: int | None = None,
        window: int | None = 4096,
        longest_first: bool = True,
        pad_to_multiple_of: int = 1,
        **common: Any,
    ) -> None:
        self.lengths = checked_lengths(lengths)
        super().__init__(len(self.lengths), **common)
        if (batch_size is None) == (token_budget is None):
            raise ConfigError(f"give batch_size or token_budget, got {batch_size!r} and {token_budget!r}")
        bound = batch_size if token_budget is None else token_budget
        check_positive(
            **{"token_budget" if batch_size is None else "batch_size": bound},
            pad_to_multiple_of=pad_to_multiple_of,
            window=1 if window is None else window,
        )
        self.samples_per_batch = batch_size
        self.token_budget = token_budget
        self.window = window
        self.longest_first = longest_first
        self.pad_to_multiple_of = pad_to_multiple_of

    def _settings(self) -> dict[str, Any]:
        names = ("samples_per_batch", "token_budget", "window", "longest_first", "pad_to_multiple_of")
        return {name: getattr(self, name) for name in names} | {"data": digest(self.lengths)}

    def _make_plan(self, order: I64, rng: np.random.Generator) -> EpochPlan:
        steps: list[list[I64]] = []
        window = len(order) if self.window is None else self.window
        carried = np.empty(0, np.int64)
        dropped = repeated = 0
        for start in range(0, len(order), window):
            part = np.concatenate([carried, order[start : start + window]])
            is_last = start + window >= len(order)
            batches = self._slices(part)
            keep = len(batches) - len(batches) % self.world_size
            carried = np.concatenate([*batches[keep:], np.empty(0, np.int64)])
            if is_last and self.drop_last:
                dropped = len(carried)
            elif is_last and len(carried):
                batches, repeated = self._completed(part, len(batches), order)
                keep = len(batches)
            steps += [batches[i : i + self.world_size] for i in range(0, keep, self.world_size)]
        steps = self._in_time(steps, rng)
        plan: list[Microbatch] = [[[int(s)] for s in batch] for step in steps for batch in step]
        return EpochPlan(plan, self._stats(steps) | {"dropped": dropped, "repeated": repeated})

    def _sorted(self, part: I64) -> tuple[group.Sorted, PlanConfig]:
        size = self.samples_per_batch
        longest = int(self.lengths.max()) + self.pad_to_multiple_of
        budget = size * longest if size is not None else self.token_budget
        assert budget is not None
        config = PlanConfig(
            token_budget=budget,
            window=len(part),
            max_held_tokens=1,
            max_held_bytes=1,
            max_steps_per_round=1,
            max_samples=size,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        none = np.zeros(len(part), np.int64)
        measures = Measures(np.arange(len(part)), self.lengths[part], none, none, none)
        return group.Sorted.of(measures, config), config

    def _slices(self, part: I64) -> list[I64]:
        """Batches of a window, longest samples first."""
        samples, config = self._sorted(part)
        return [part[one] for one in group.slices(samples, group.greedy(samples, config))]

    def _completed(self, part: I64, num_batches: int, order: I64) -> tuple[list[I64], int]:
        """Every sample of the window in a multiple of the ranks' batches; and how many had to come again for that."""
        number = num_batches + -num_batches % self.world_size
        repeated = max(0, number - len(part))
        part = np.concatenate([part, np.resize(order, repeated)]) if repeated else part
        samples, config = self._sorted(part)
        return [part[one] for one in group.slices(samples, group.exactly(samples, number, config))], repeated

    def _in_time(self, steps: list[list[I64]], rng: np.random.Generator) -> list[list[I64]]:
        if self.shuffle:
            steps = [steps[i] for i in rng.permutation(len(steps)).tolist()]
        if self.longest_first and steps:
            longest = [max(int(self.lengths[batch].max()) for batch in step) for step in steps]
            steps.insert(0, steps.pop(int(np.argmax(longest))))
        return steps

    def _stats(self, steps: list[list[I64]]) -> dict[str, Any]:
        multiple = self.pad_to_multiple_of
        padded = [[len(b) * -(-int(self.lengths[b].max()) // multiple) * multiple for b in step] for step in steps]
        tokens = sum(int(self.lengths[batch].sum()) for step in steps for batch in step)
        slots = sum(map(sum, padded))
        waited = self.world_size * sum(map(max, padded))
        return {
            "batches": sum(map(len, steps)),
            "tokens": tokens,
            "padded_tokens": slots,
            "step_efficiency": tokens / max(1, waited),
        }
