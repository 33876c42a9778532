"""The passes of label balancing over a common plan, in their order, with what it looks like between them.

Follows Axolotl's `balance_labels`, its accumulation ordering and its rank ordering; see `odb.plan.labels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from odb.plan.accumulate import order_by_rank, order_updates
from odb.plan.labels import Labelled, Microbatch, RowBounds, slots, summary, totals
from odb.plan.refine import refine

Balancer = Callable[[list[Microbatch]], list[Microbatch]]


@dataclass(frozen=True)
class Passes:
    """What the passes need besides the plan."""

    data: Labelled
    bounds: RowBounds
    world_size: int
    grad_accum_steps: int
    window_updates: int

    @property
    def width(self) -> int:
        """Microbatches of an optimizer update."""
        return self.world_size * self.grad_accum_steps

    def run(
        self, batches: list[Microbatch], num_full: int, balance: Balancer
    ) -> tuple[list[Microbatch], dict[str, dict[str, Any]]]:
        """The balanced plan, and its metrics before and after each pass.

        Only complete updates of full microbatches change; what is behind them stays last, as it is.

        Args:
            batches: the common plan.
            num_full: leading microbatches that are full.
            balance: the first pass, which evens the labels of microbatches.
        """
        end = num_full // self.width * self.width
        head, tail = batches[:end], batches[end:]

        def look(now: list[Microbatch]) -> dict[str, Any]:
            return summary(now + tail, self.data, self.bounds, self.width, num_full)

        stages = {"before": look(head)}
        head = balance(head)
        stages["before_accumulation"] = look(head)
        labels = totals(head, self.data)
        head = [head[i] for i in order_updates(labels, self.width).tolist()]
        stages["before_microbatch"] = look(head)
        for window in dict.fromkeys((self.window_updates, 1)):
            head = refine(head, self.data, self.bounds, self.width, window)
        stages["before_rank"] = look(head)
        if self.world_size > 1:
            costs = np.array([slots(batch, self.data, self.bounds) for batch in head], np.float64)
            head = [head[i] for i in order_by_rank(costs, self.world_size, self.grad_accum_steps).tolist()]
        stages["after"] = look(head)
        return head + tail, stages
