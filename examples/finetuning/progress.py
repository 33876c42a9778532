"""Live progress on a terminal, one plain line per held-out loss elsewhere, nothing on any rank but the first."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .metrics import LossPoint


class Reporter:
    """Shows one run after the other."""

    def __init__(self, console: Console, total_samples: int, *, shown: bool) -> None:
        self.console = console
        self.total = total_samples
        self.shown = shown
        self.live = shown and console.is_terminal
        self.progress = Progress(
            TextColumn("[bold]{task.description:<7}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self.live,
        )

    def __enter__(self) -> Reporter:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def start(self, method: str) -> None:
        """A new run begins."""
        self.method = method
        self.heldout = float("nan")
        self.task = self.progress.add_task(method, total=self.total, figures="")

    def step(self, samples: int, loss: float, seconds: float) -> None:
        """A batch is done: samples so far over all ranks, this rank's loss of the batch, seconds of training."""
        if self.live:
            figures = f"{samples / seconds:6.1f} samples/s  loss {loss:.3f}  held-out {self.heldout:.3f}"
            self.progress.update(self.task, completed=samples, figures=figures)

    def heldout_loss(self, point: LossPoint) -> None:
        """A held-out loss is known."""
        self.heldout = point.loss
        if self.shown and not self.live:
            self.console.print(
                f"{self.method:<7} {point.samples:>6}/{self.total} samples  {point.seconds:6.1f} s  "
                f"{point.samples / max(point.seconds, 1e-9):6.1f} samples/s  held-out loss {point.loss:.4f}",
                highlight=False,
            )
