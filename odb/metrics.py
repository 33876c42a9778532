"""Counters of a loader: data first, text second."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class LoaderStats:
    """What one rank's loader has handed over since it was made. Adds up with `+`, over ranks or loaders.

    Attributes:
        steps: micro-steps handed over, fillers included.
        idle_steps: of these, fillers.
        rounds: rounds agreed on with the other ranks.
        emitted_samples: sample views in real batches.
        real_tokens: their tokens, without padding.
        padded_tokens: rows x padded length of real batches.
        loss_tokens: their loss-bearing labels.
        max_held_tokens: the most tokens held observed and not yet assigned to a step, samples read ahead not counted.
        wait_s: seconds that the caller waited for batches.
        first_batch_s: of these, for the first batch of the last epoch begun.
        rejected: reason -> sample views that never entered a plan ("empty", "sample_error", "oversize").
        dropped: reason -> sample views that entered one and left unemitted ("tail", "closed").
        bound_by: which bound kept another sample out of a group -> groups ("token_budget", "max_samples",
            "max_patches", "oversize", or "window": there was no other sample to add).
        cut: what `on_oversize` did to samples longer than a packed row ("truncated_samples", "truncated_tokens",
            "split_samples").
    """

    steps: int = 0
    idle_steps: int = 0
    rounds: int = 0
    emitted_samples: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    loss_tokens: int = 0
    max_held_tokens: int = 0
    wait_s: float = 0.0
    first_batch_s: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    bound_by: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)

    @property
    def padding(self) -> float:
        """Share of padding in the tokens of real batches, 0 to 1."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def num_rejected(self) -> int:
        """Sample views that never entered a plan."""
        return sum(self.rejected.values())

    @property
    def num_dropped(self) -> int:
        """Sample views that entered a plan and left unemitted, by an option or because the epoch was left early."""
        return sum(self.dropped.values())

    @property
    def binding_limit(self) -> str:
        """The bound that closed most groups, "" before the first one."""
        real = Counter({k: v for k, v in self.bound_by.items() if k not in ("idle", "probe")})
        return real.most_common(1)[0][0] if real else ""

    def __add__(self, other: LoaderStats) -> LoaderStats:
        if not isinstance(other, LoaderStats):
            return NotImplemented
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        for name in ("max_held_tokens", "first_batch_s"):
            merged[name] = max(getattr(self, name), getattr(other, name))
        return LoaderStats(**merged)

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, derived ones included, for loggers."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            out[f.name] = dict(value) if isinstance(value, Counter) else value
        return out | {"padding": self.padding, "binding_limit": self.binding_limit}
