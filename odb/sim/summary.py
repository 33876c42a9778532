"""What an epoch came to in numbers. Definitions: docs/simulate.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odb.plan.types import I64, PlanConfig
from odb.sim.baselines import Steps
from odb.sim.world import Trace

F64 = npt.NDArray[np.float64]

#: Batches that wait for the training loop, and the one in the making.
_READY_BATCHES = 5


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds (or any unit) of a rank's step: `intercept + per_token * rows * L + per_square * rows * L**2`."""

    intercept: float = 0.0
    per_token: float = 1.0
    per_square: float = 0.0

    def __call__(self, rows: I64, padded_len: I64) -> F64:
        """Elementwise; 0 where there are no rows."""
        tokens = (rows * padded_len).astype(np.float64)
        time: F64 = self.intercept + self.per_token * tokens + self.per_square * tokens * padded_len
        return np.where(rows > 0, time, 0.0)

    @classmethod
    def fitted(cls, rows: F64, padded_len: F64, seconds: F64) -> StepTime:
        """Least squares over measured steps, without negative coefficients."""
        tokens = rows * padded_len
        terms = np.stack([np.ones_like(tokens), tokens, tokens * padded_len], axis=1)
        active = [0, 1, 2]
        while True:
            scale = np.abs(terms[:, active]).max(axis=0)
            found = np.linalg.lstsq(terms[:, active] / scale, seconds, rcond=None)[0] / scale
            if len(active) == 1 or (found >= 0).all():
                break
            del active[int(np.argmin(found))]
        out = np.zeros(3)
        out[active] = np.maximum(found, 0)
        return cls(*out.tolist())


def summarise(config: PlanConfig, trace: Trace) -> dict[str, Any]:
    """The figures of an epoch, JSON-ready."""
    num_steps, num_ranks = trace.costs.shape
    tokens, step_cost = int(trace.tokens.sum()), trace.costs.max(axis=1)
    total, slots = int(trace.costs.sum()), max(1, num_steps * num_ranks)
    return {
        "samples": int(trace.samples.sum()),
        "tokens": tokens,
        "ranks": num_ranks,
        "steps": num_steps,
        "optimizer_steps": -(-num_steps // config.grad_accum_steps),
        "step_efficiency": _share(tokens, num_ranks * int(step_cost.sum())),
        "padding": 1 - _share(tokens, total),
        "budget_fill": _share(tokens, slots * config.token_budget),
        "straggler_ratio": _share(int(step_cost.sum()) * num_ranks, total),
        "idle_share": float((trace.samples == 0).mean()) if num_steps else 0.0,
        "samples_per_step": _share(int(trace.samples.sum()), num_steps),
        "max_held_tokens": trace.max_held_tokens,
        "max_waiting_keys": trace.max_waiting_keys,
        "memory_bound_tokens": _memory_bound(config, trace),
        "rounds": trace.rounds,
        "max_age_rounds": trace.max_age,
        "length_autocorrelation": _autocorrelation(trace),
        "displacement": _displacement(trace),
        "seconds": trace.seconds,
    }


def _memory_bound(config: PlanConfig, trace: Trace) -> int:
    """A window, what is read ahead and what is emitted, by whichever limit closes windows; and finished batches."""
    held = max(trace.longest, min(config.max_held_tokens, config.window * trace.longest))
    return 3 * held + _READY_BATCHES * max(trace.longest, config.token_budget)


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 1.0


def _autocorrelation(trace: Trace) -> float:
    """Of the mean sample length of one step and the next; 0 where lengths come at random."""
    counts = trace.samples.sum(axis=1)
    mean = trace.tokens.sum(axis=1) / np.maximum(1, counts)
    if len(mean) < 3 or not np.ptp(mean):
        return 0.0
    return float(np.corrcoef(mean[:-1], mean[1:])[0, 1])


def _displacement(trace: Trace) -> dict[str, float | None]:
    """How far samples are emitted from their place in the sampler's order, in samples."""
    positions = np.flatnonzero(trace.step_of >= 0)
    if not len(positions):
        return {"mean": 0.0, "p99": 0.0, "max": 0.0, "bound": None}
    emitted = np.empty(len(trace.step_of), np.int64)
    emitted[positions[np.argsort(trace.step_of[positions], kind="stable")]] = np.arange(len(positions))
    moved = np.abs(emitted[positions] - positions)
    bound = None if trace.max_displacement < 0 else float(min(trace.max_displacement, len(trace.step_of) - 1))
    return {
        "mean": float(moved.mean()),
        "p99": float(np.quantile(moved, 0.99)),
        "max": float(moved.max()),
        "bound": bound,
    }


def epoch_time(steps: Steps, time: StepTime) -> float:
    """Of all steps, each as long as its slowest rank."""
    return float(time(steps.rows, steps.padded_len).max(axis=1).sum()) if len(steps.rows) else 0.0


def compared(config: PlanConfig, lengths: I64, name: str, steps: Steps, own: float, time: StepTime) -> dict[str, Any]:
    """Another way of batching in the same units, and how much faster ours is predicted to be."""
    cost = steps.rows * steps.padded_len
    tokens, num_ranks = int(lengths.sum()), steps.rows.shape[1]
    return {
        "name": name,
        "steps": len(steps.rows),
        "step_efficiency": _share(tokens, num_ranks * int(cost.max(axis=1).sum())),
        "budget_fill": _share(tokens, max(1, steps.rows.size) * config.token_budget),
        "predicted_speedup": _share(epoch_time(steps, time), own),
    }
