"""Loss scales that make the gradient exact: the mean over all loss-bearing tokens of an optimizer step.

Each rank's loss is a mean over its own labels, and the ranks' gradients are averaged. With `W` ranks the mean over
the whole optimizer step (all ranks, all `A` micro-steps) follows from

    loss_scale = W * local_loss_tokens / window_loss_tokens

and summing, not averaging, over micro-steps. The scale is 0.0 where nothing bears loss.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odb.plan.types import I64, PlanConfig

#: Columns of the totals.
SAMPLES, TOKENS, LOSS_TOKENS = 0, 1, 2


def window_totals(all_totals: I64, grad_accum_steps: int) -> I64:
    """(T, 3) for each step the sums over its optimizer step; `all_totals` (T, 3) is summed over ranks already."""
    if not len(all_totals):
        return all_totals
    starts = np.arange(0, len(all_totals), grad_accum_steps)
    sums = np.add.reduceat(all_totals, starts, axis=0)
    return sums[np.arange(len(all_totals)) // grad_accum_steps]


def loss_scales(totals: I64, all_totals: I64, world_size: int, config: PlanConfig) -> npt.NDArray[np.float64]:
    """(T,) the factor on each step's local mean loss; `totals` (T, 3) are this rank's, `all_totals` all ranks'."""
    if config.loss_scaling == "none":
        return (totals[:, SAMPLES] > 0).astype(np.float64)
    column = SAMPLES if config.loss_scaling == "samples" else LOSS_TOKENS
    of_window = window_totals(all_totals, config.grad_accum_steps)[:, column]
    scaled = (world_size * totals[:, column]).astype(np.float64)
    return np.divide(scaled, of_window, out=np.zeros(len(totals)), where=of_window > 0)


def sync_flags(num_steps: int, grad_accum_steps: int) -> npt.NDArray[np.bool_]:
    """(T,) true on the last micro-step of each optimizer step, a short last one included."""
    index = np.arange(1, num_steps + 1)
    flags: npt.NDArray[np.bool_] = (index % grad_accum_steps == 0) | (index == num_steps)
    return flags
