"""`BatchRebalanceSampler`: of each global batch every rank gets about the same work, not the same number of samples."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from odb.errors import ConfigError
from odb.plan.labels import Microbatch
from odb.plan.rebalance import Cost, Groups, Quadratic, assign, contiguous
from odb.plan.types import I64
from odb.samplers.base import EpochPlan, PlannedBatchSampler, check_positive, checked_lengths, digest

logger = logging.getLogger("odb")


class BatchRebalanceSampler(PlannedBatchSampler):
    """Cuts each global batch, sorted by length, into slices of about equal cost: few long samples, or many short ones.

    The cut is the best there is: no other has a cheaper dearest slice. A global batch stays a random one, its samples are
    shared out among ranks and accumulation steps; needs no attention over varying lengths.

    Args:
        lengths: tokens of each sample.
        global_batch_size: samples of an optimizer update over all ranks and accumulation steps.
        cost_fn: `(rows, longest) -> cost` over int64 arrays, not falling when either grows. None:
            `intercept + rows * L + alpha * rows * L**2`.
        alpha: weight of attention.
        intercept: of a batch.
        max_tokens: rows x longest of a batch at most. Where a global batch can't keep it, the smallest bound that it can
            keep stands in; batches above are counted in `stats()["above_max_tokens"]` and said in the log. No sample is
            lost.
        min_per_group: samples of a batch at least.
        assign_by: "slots" (batches of like cost run at the same time) or "totals" (ranks' sums over the update are alike,
            for trainers that synchronise once an update).
        **common: see `PlannedBatchSampler`. `drop_last` is about the last global batch: False uses what is left, and
            where that is too little for all ranks, the epoch's first samples come again (`stats()["repeated"]`).

    Raises:
        ConfigError: a global batch too small for ranks x accumulation steps x `min_per_group`, or a wrong value.
    """

    def __init__(
        self,
        lengths: Any,
        global_batch_size: int,
        *,
        cost_fn: Cost | None = None,
        alpha: float = 0.001,
        intercept: float = 0.0,
        max_tokens: int | None = None,
        min_per_group: int = 1,
        assign_by: str = "slots",
        **common: Any,
    ) -> None:
        self.lengths = checked_lengths(lengths)
        super().__init__(len(self.lengths), **common)
        check_positive(
            global_batch_size=global_batch_size,
            min_per_group=min_per_group,
            max_tokens=1 if max_tokens is None else max_tokens,
        )
        if global_batch_size < self.width * min_per_group:
            raise ConfigError(
                f"global_batch_size={global_batch_size} can't fill {self.width} batches (world_size={self.world_size} x "
                f"grad_accum_steps={self.grad_accum_steps}) of at least {min_per_group} samples: make it larger"
            )
        if self.drop_last and self.num_samples < global_batch_size:
            raise ConfigError(
                f"{self.num_samples} samples don't make one global_batch_size={global_batch_size}: reduce it, use more "
                "data, or give drop_last=False"
            )
        if not (np.isfinite([alpha, intercept]).all() and alpha >= 0 and intercept >= 0):
            raise ConfigError(f"alpha and intercept must be finite and >= 0, got {alpha!r} and {intercept!r}")
        if assign_by not in ("slots", "totals"):
            raise ConfigError(f"assign_by must be 'slots' or 'totals', got {assign_by!r}")
        self.global_batch_size = global_batch_size
        self.cost: Cost = Quadratic(intercept, alpha) if cost_fn is None else cost_fn
        self.max_tokens = max_tokens
        self.min_per_group = min_per_group
        self.assign_by = assign_by

    def _settings(self) -> dict[str, Any]:
        cost = repr(self.cost) if isinstance(self.cost, Quadratic) else getattr(self.cost, "__qualname__", "custom")
        names = ("global_batch_size", "max_tokens", "min_per_group", "assign_by")
        return {name: getattr(self, name) for name in names} | {"cost": cost, "data": digest(self.lengths)}

    def _make_plan(self, order: I64, rng: np.random.Generator) -> EpochPlan:
        size = self.global_batch_size
        least = self.width * self.min_per_group
        batches: list[Microbatch] = []
        num_above, peaks, dropped, repeated = 0, 0.0, 0, 0
        for start in range(0, len(order), size):
            part = order[start : start + size]
            if len(part) < size and self.drop_last:
                dropped = len(part)
                break
            if len(part) < least:
                repeated = least - len(part)
                part = np.concatenate([part, np.resize(order, repeated)])
            groups = self._groups(part)
            num_above += len(groups.exceeding)
            peaks += groups.peak
            batches += self._dealt(part, groups, rng)
        if num_above:
            logger.warning(
                "%d batches are above max_tokens=%s, as their global batch can't keep it: raise it, or add ranks or "
                "accumulation steps",
                num_above,
                self.max_tokens,
            )
        stats = {"batches": len(batches), "above_max_tokens": num_above, "dropped": dropped, "repeated": repeated}
        return EpochPlan(batches, stats | self._balance(batches) | {"sum_of_peaks": peaks})

    def _groups(self, part: I64) -> Groups:
        return contiguous(self.lengths[part], self.width, self.cost, self.max_tokens, self.min_per_group)

    def _dealt(self, part: I64, groups: Groups, rng: np.random.Generator) -> list[Microbatch]:
        """The groups in plan order; which slot comes first is random."""
        table = assign(groups.costs, self.world_size, self.assign_by)
        if self.shuffle and self.assign_by == "slots":
            table = table[rng.permutation(len(table))]
        return [[[int(s)] for s in part[groups.members[k]]] for k in table.ravel().tolist()]

    def _balance(self, batches: list[Microbatch]) -> dict[str, Any]:
        """Padded tokens and how far the ranks of a step are apart: 1.0 is none, and no padding."""
        lengths = [self.lengths[[row[0] for row in batch]] for batch in batches]
        rows = np.array([len(one) for one in lengths])
        longest = np.array([one.max() for one in lengths])
        costs = [float(np.asarray(self.cost(b, m))) for b, m in zip(rows, longest, strict=True)]
        steps = np.array(costs).reshape(-1, self.world_size)
        return {
            "tokens": sum(int(one.sum()) for one in lengths),
            "padded_tokens": int((rows * longest).sum()),
            "max_padded_tokens": int((rows * longest).max(initial=0)),
            "straggler_ratio": float(steps.max(axis=1).sum() / max(steps.mean(axis=1).sum(), 1e-300)),
        }
