"""What was observed, and the figures made from it. Nothing here knows which method made the batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class RankLog:
    """One rank's record of one run: an entry per batch, in the order in which they ran."""

    padded_tokens: list[int] = field(default_factory=list)  # 0 where the rank was idle: its batch was a filler
    lengths: list[list[int]] = field(default_factory=list)  # real tokens of each row; empty where idle
    optimizer_steps: int = 0
    checksum: int = 0  # of all samples' tokens, whatever their order
    wait_seconds: float = 0.0  # for the next batch


@dataclass(frozen=True)
class LossPoint:
    """The held-out loss at one point of a run."""

    samples: int  # over all ranks
    seconds: float  # of training, evaluation excluded
    loss: float  # mean over the held-out labels


@dataclass(frozen=True)
class RunFigures:
    """One method's line of the table."""

    method: str
    samples: int
    optimizer_steps: int
    batches: int  # that every rank ran, gradient accumulation included
    seconds: float  # of training: start of the workers to the last step; evaluation and pre-pass excluded
    prepass_seconds: float  # reading all lengths beforehand, where a method needs them
    wait_seconds: float  # of the seconds, the first rank waited for batches
    samples_per_second: float
    samples_per_second_with_prepass: float
    real_tokens: int
    real_tokens_per_second: float
    padding: float  # 1 - real / padded tokens
    step_efficiency: float  # real tokens / (ranks x sum over steps of the most expensive rank's padded tokens)
    idle_steps: int  # of a rank: batches without a real sample
    peak_padded_tokens: int  # the largest batch
    heldout_loss: float  # after the last step
    checksum: int  # equal for two methods that trained on the same tokens


@dataclass(frozen=True)
class LengthFigures:
    """The shape of a distribution of lengths, in tokens."""

    count: int
    mean: float
    cv: float  # standard deviation / mean
    p50: float
    p99: float
    longest: int


@dataclass(frozen=True)
class Run:
    """One method's whole run: the figures, the loss curve and what every rank did."""

    figures: RunFigures
    curve: list[LossPoint]
    logs: list[RankLog]

    def as_json(self) -> dict[str, Any]:
        """For `results.json`."""
        padded = [log.padded_tokens for log in self.logs]
        return {**asdict(self.figures), "curve": [asdict(p) for p in self.curve], "padded_tokens_per_rank": padded}


def summarize(method: str, logs: Sequence[RankLog], curve: Sequence[LossPoint], prepass_seconds: float) -> RunFigures:
    """The figures of one run. `logs` holds every rank's, `curve` ends with the last step."""
    padded = np.array([log.padded_tokens for log in logs])  # (ranks, batches)
    lengths = [row for log in logs for rows in log.lengths for row in rows]
    real, seconds = sum(lengths), curve[-1].seconds
    return RunFigures(
        method=method,
        samples=len(lengths),
        optimizer_steps=logs[0].optimizer_steps,
        batches=padded.shape[1],
        seconds=seconds,
        prepass_seconds=prepass_seconds,
        wait_seconds=logs[0].wait_seconds,
        samples_per_second=len(lengths) / seconds,
        samples_per_second_with_prepass=len(lengths) / (seconds + prepass_seconds),
        real_tokens=real,
        real_tokens_per_second=real / seconds,
        padding=padding(real, padded),
        step_efficiency=step_efficiency(real, padded),
        idle_steps=int((padded == 0).sum()),
        peak_padded_tokens=int(padded.max()),
        heldout_loss=curve[-1].loss,
        checksum=sum(log.checksum for log in logs),
    )


def padding(real_tokens: int, padded: npt.NDArray[np.int64]) -> float:
    """The share of all computed tokens that are padding; `padded` has shape (ranks, steps)."""
    return 1.0 - real_tokens / int(padded.sum())


def step_efficiency(real_tokens: int, padded: npt.NDArray[np.int64]) -> float:
    """Padding and stragglers in one number: every step lasts as long as its most expensive rank; 1.0 is perfect."""
    return float(real_tokens / (padded.shape[0] * int(padded.max(axis=0).sum())))


def describe_lengths(lengths: Sequence[int]) -> LengthFigures:
    """Mean, coefficient of variation and quantiles of some lengths."""
    values = np.asarray(lengths)
    p50, p99 = np.percentile(values, [50, 99])
    mean = float(values.mean())
    return LengthFigures(len(values), mean, float(values.std()) / mean, float(p50), float(p99), int(values.max()))
