"""Pictures of a simulated epoch. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from odb.errors import ConfigError
from odb.sim.world import Trace

_MOST_RANKS = 64  # as lines of a picture


def save(trace: Trace, token_budget: int, folder: str | Path) -> list[Path]:
    """Draws step costs over time, the histogram of fills, and who waits for whom, into PNG files of `folder`.

    Raises:
        ConfigError: matplotlib is not installed, or there can't be such a folder.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"plots can't be written to {folder}: {error}") from None
    names = []
    for name, draw in (("step-cost", _step_cost), ("fill", _fill), ("waits", _waits)):
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        draw(axes, trace, token_budget)
        names.append(folder / f"{name}.png")
        figure.savefig(names[-1], dpi=120)
        pyplot.close(figure)
    return names


def _step_cost(axes: object, trace: Trace, token_budget: int) -> None:
    for cost in trace.costs.T[:_MOST_RANKS]:
        axes.plot(cost, linewidth=0.5, alpha=0.5)  # type: ignore[attr-defined]
    axes.plot(trace.costs.max(axis=1), color="black", linewidth=0.8, label="most expensive rank")  # type: ignore[attr-defined]
    axes.axhline(token_budget, color="gray", linestyle=":", label="budget")  # type: ignore[attr-defined]
    axes.set(xlabel="step", ylabel="cost (padded tokens)", title="Step cost of each rank")  # type: ignore[attr-defined]
    axes.legend()  # type: ignore[attr-defined]


def _fill(axes: object, trace: Trace, token_budget: int) -> None:
    real = trace.samples > 0
    for values, label in ((trace.tokens, "real tokens"), (trace.costs, "padded tokens")):
        axes.hist(values[real] / token_budget, bins=60, alpha=0.6, label=label)  # type: ignore[attr-defined]
    axes.set(xlabel="share of the budget", ylabel="batches", title="How full batches are")  # type: ignore[attr-defined]
    axes.legend()  # type: ignore[attr-defined]


def _waits(axes: object, trace: Trace, token_budget: int) -> None:
    ranks = np.arange(trace.costs.shape[1])
    most = trace.costs.max(axis=1, keepdims=True)
    waits = (most - trace.costs).sum(axis=0) / max(1, int(most.sum()))
    causes = np.bincount(trace.costs.argmax(axis=1), minlength=len(ranks)) / max(1, len(trace.costs))
    axes.bar(ranks - 0.2, waits, 0.4, label="share of its time that a rank waits")  # type: ignore[attr-defined]
    axes.bar(ranks + 0.2, causes, 0.4, label="share of steps in which it is waited for")  # type: ignore[attr-defined]
    axes.set(xlabel="rank", ylabel="share", title=f"Who waits for whom (budget {token_budget})")  # type: ignore[attr-defined]
    axes.legend()  # type: ignore[attr-defined]
