"""Learning-rate schedules by what was consumed, for runs whose number of steps nobody knows.

A schedule made for N units (samples or tokens) is asked once per optimizer step, at the unit that the run has reached:
no loop of scheduler steps, and a scheduler that counts optimizer steps as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from odb.errors import ConfigError


@dataclass
class Position:
    """Where on a schedule of `warmup_steps + total` units a run stands.

    A warm-up given in optimizer steps takes as many steps; what is left of the schedule then spreads over what is left
    of the run.

    Attributes:
        done: gives the units consumed so far.
        total: units of the whole run, >= 1.
        warmup_steps: optimizer steps of a warm-up that is counted in steps; 0 where it is a share of the run.
        start: units consumed when that warm-up was over.
    """

    done: Callable[[], float]
    total: int
    warmup_steps: int = 0
    start: float | None = None

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ConfigError(f"a schedule needs a total of at least 1 unit, got {self.total!r}")

    def __call__(self, steps: int) -> float:
        """After `steps` optimizer steps."""
        if steps < self.warmup_steps:
            return float(steps)
        if self.start is None:
            self.start = self.done() if self.warmup_steps else 0.0
        if not self.start:
            return self.warmup_steps + min(self.done(), float(self.total))
        rest = max(1.0, self.total - self.start)
        return self.warmup_steps + self.total * min(1.0, (self.done() - self.start) / rest)

    @property
    def units(self) -> int:
        """For how many units the schedule must be made."""
        return self.warmup_steps + self.total


def follow(scheduler: LambdaLR, position: Callable[[int], float]) -> None:
    """Makes a `LambdaLR` take its factors at `position(optimizer steps)`. Its state stays what it was.

    Raises:
        ConfigError: another kind of scheduler, whose steps have no closed form.
    """
    if not isinstance(scheduler, LambdaLR):
        raise ConfigError(
            f"only a torch LambdaLR can follow samples or tokens, got {type(scheduler).__name__}: give one, or let it go by "
            'optimizer steps (scheduler_progress="optimizer_steps")'
        )
    scheduler.lr_lambdas = [_moved(factor, position) for factor in scheduler.lr_lambdas]


def _moved(factor: Callable[[Any], float], position: Callable[[int], float]) -> Callable[[int], float]:
    # A plain function, because LambdaLR saves the attributes of callable objects in checkpoints.
    def at(steps: int) -> float:
        return factor(position(steps))

    return at
