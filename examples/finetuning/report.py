"""The end of a run: a table, a PNG and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.table import Table

from .corpus import write_atomically
from .metrics import LengthFigures, Run, RunFigures

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLORS = {"fixed": "#b3543b", "sorted": "#8a8f98", "odb": "#1f6fb4"}
_ROWS: list[tuple[str, Callable[[RunFigures], str]]] = [
    ("samples", lambda f: f"{f.samples:,}"),
    ("optimizer steps", lambda f: f"{f.optimizer_steps:,}"),
    ("batches per rank", lambda f: f"{f.batches:,}"),
    ("seconds", lambda f: f"{f.seconds:.1f}"),
    ("  of these waiting for batches", lambda f: f"{f.wait_seconds:.1f}"),
    ("pre-pass over all lengths, seconds", lambda f: f"{f.prepass_seconds:.1f}" if f.prepass_seconds else "not needed"),
    ("samples/s", lambda f: f"{f.samples_per_second:.1f}"),
    ("samples/s, pre-pass counted", lambda f: f"{f.samples_per_second_with_prepass:.1f}"),
    ("real tokens/s", lambda f: f"{f.real_tokens_per_second:,.0f}"),
    ("padding", lambda f: f"{f.padding:.1%}"),
    ("step efficiency", lambda f: f"{f.step_efficiency:.3f}"),
    ("idle steps", lambda f: f"{f.idle_steps}"),
    ("largest batch, padded tokens", lambda f: f"{f.peak_padded_tokens:,}"),
    ("held-out loss, all samples seen", lambda f: f"{f.heldout_loss:.4f}"),
]


def make_table(runs: Sequence[Run], token_budget: int, world_size: int) -> Table:
    """Methods beside each other, figures below each other."""
    title = f"Same samples, same memory bound: {token_budget:,} padded tokens per rank and batch, {world_size} rank(s)"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.figures.method, justify="right")
    for label, text in _ROWS:
        table.add_row(label, *(text(run.figures) for run in runs))
    return table


def conclusions(runs: Sequence[Run]) -> list[str]:
    """What the table says, in sentences made from its numbers."""
    figures = {run.figures.method: run.figures for run in runs}
    lines = []
    if len({(f.checksum, f.samples) for f in figures.values()}) == 1 and len(figures) > 1:
        lines.append(
            "All methods trained on exactly the same tokens, every sample once per epoch (checksums are equal)."
        )
    for other in (figures[name] for name in ("fixed", "sorted") if "odb" in figures and name in figures):
        ours = figures["odb"]
        speed = ours.samples_per_second_with_prepass / other.samples_per_second_with_prepass
        efficiency = ours.step_efficiency / other.step_efficiency
        lines.append(
            f"odb / {other.method}: samples/s x {speed:.2f} (pre-pass counted), step efficiency x {efficiency:.2f}, "
            f"held-out loss {ours.heldout_loss - other.heldout_loss:+.3f}."
        )
    return lines


def write_json(path: Path, settings: dict[str, Any], lengths: LengthFigures, runs: Sequence[Run]) -> None:
    """Everything that was measured, and under which settings."""
    content = {"settings": settings, "observed_lengths": asdict(lengths), "runs": [run.as_json() for run in runs]}
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def write_png(path: Path, runs: Sequence[Run], lengths: LengthFigures, token_budget: int) -> None:
    """The same as a picture: loss against samples and seconds, where computed tokens go, tokens per step and rank."""
    rc: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11}
    with plt.rc_context(rc):
        figure = plt.figure(figsize=(13, 8), layout="constrained")
        upper, lower = (figure.subfigures(2, 1, height_ratios=[1, 0.95], squeeze=False)[i, 0] for i in range(2))
        left, middle, right = upper.subplots(1, 3)
        draw_loss(left, runs, "samples", "samples seen, all ranks")
        draw_loss(middle, runs, "seconds", "seconds of training")
        draw_tokens(right, runs)
        axes = lower.subplots(1, len(runs), sharey=True, squeeze=False)[0]
        for ax, run in zip(axes, runs, strict=True):
            draw_steps(ax, run, token_budget)
        axes[0].set_ylabel("padded tokens of a batch")
        figure.suptitle(
            f"Lengths observed: mean {lengths.mean:.0f} tokens, CV {lengths.cv:.2f}, median {lengths.p50:.0f}, "
            f"99th percentile {lengths.p99:.0f}, longest {lengths.longest}",
            fontsize=12,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def draw_loss(ax: Axes, runs: Sequence[Run], against: str, label: str) -> None:
    """Held-out loss of every method."""
    for run in runs:
        x = [getattr(point, against) for point in run.curve]
        y = [point.loss for point in run.curve]
        ax.plot(x, y, "o-", markersize=3.5, label=run.figures.method, color=COLORS[run.figures.method])
    ax.set(title=f"Held-out loss against {against}", xlabel=label, ylabel="loss per answer token")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)


def draw_tokens(ax: Axes, runs: Sequence[Run]) -> None:
    """What the ranks' time went to: real tokens, padding, waiting for the most expensive rank. Shares of the whole."""
    names = [run.figures.method for run in runs]
    real, padded, waited = (np.array(part) for part in zip(*(_shares(run) for run in runs), strict=True))
    ax.barh(names, real, color=[COLORS[n] for n in names])
    ax.barh(names, padded, left=real, color="#d9d4cb", hatch="///", edgecolor="white", label="padding")
    ax.barh(names, waited, left=real + padded, color="#efece6", label="waiting for a slower rank")
    for y, share in enumerate(real):
        ax.text(share - 0.01, y, f"{share:.1%} real", va="center", ha="right", color="white", fontweight="bold")
    ax.invert_yaxis()
    ax.set(
        title="Where the computed tokens go", xlim=(0, 1), xlabel="share of ranks x steps (real part: step efficiency)"
    )
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _shares(run: Run) -> tuple[float, float, float]:
    padded = np.array([log.padded_tokens for log in run.logs])
    whole = padded.shape[0] * padded.max(axis=0).sum()
    real = run.figures.step_efficiency
    computed = float(padded.sum() / whole)
    return real, computed - real, 1 - computed


def draw_steps(ax: Axes, run: Run, token_budget: int) -> None:
    """Padded tokens of every batch of every rank, in the order in which they ran."""
    for rank, log in enumerate(run.logs):
        shade = 0.9 - 0.5 * rank / max(1, len(run.logs) - 1)
        ax.plot(log.padded_tokens, ".", markersize=4, alpha=shade, color=COLORS[run.figures.method])
    ax.axhline(token_budget, color="black", linewidth=0.8, linestyle="--")
    ax.text(0, token_budget * 1.02, "token budget", va="bottom", fontsize=9)
    ax.set(title=f"{run.figures.method}: {run.figures.batches} batches per rank", xlabel="batch (one shade per rank)")
    ax.set_ylim(0, token_budget * 1.12)
    ax.grid(alpha=0.25)
