"""What a loader counts, in the logger that a run has already, and a warning that names the option to change.

    telemetry = Telemetry(loader, tensorboard(writer), every=50)
    for batch in loader:
        ...
        telemetry.step()

A sink is any `(values, step) -> None`: a trainer's `log`, `run.log` of Weights & Biases, `SummaryWriter.add_scalar` for
each value, a text file for Prometheus. Nothing here talks to other ranks: values are this rank's.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from odb.errors import ConfigError
from odb.integrations.common import Advisor, flat_stats
from odb.loader import ODBDataLoader
from odb.metrics import LoaderStats

#: Takes values by name and the number of the step that they were taken after.
Sink = Callable[[dict[str, float], int], None]

_MAXIMA = ("max_held_tokens", "first_batch_s")


@dataclass(frozen=True)
class Interval:
    """What came about between two reports.

    Attributes:
        stats: counts of the interval alone.
        elapsed_s: its length in seconds, training included.
        wait_s: of these, seconds that the loop waited for batches; the first of an epoch, which nothing can be read
            ahead for, is left out.
    """

    stats: LoaderStats
    elapsed_s: float
    wait_s: float

    def values(self, prefix: str = "odb/interval/") -> dict[str, float]:
        """Shares (0 to 1), rates (per second) and means (per real batch)."""
        stats, seconds = self.stats, max(self.elapsed_s, 1e-9)
        real_steps = stats.steps - stats.idle_steps
        named = {
            "padding": stats.padding,
            "idle_share": stats.idle_steps / stats.steps if stats.steps else 0.0,
            "wait_share": self.wait_s / seconds,
            "samples_per_s": stats.emitted_samples / seconds,
            "real_tokens_per_s": stats.real_tokens / seconds,
            "samples_per_batch": stats.emitted_samples / real_steps if real_steps else 0.0,
            "real_tokens_per_batch": stats.real_tokens / real_steps if real_steps else 0.0,
        }
        return {prefix + name: float(value) for name, value in named.items()}


def difference(now: LoaderStats, before: LoaderStats) -> LoaderStats:
    """Counts that came in between; the two that are maxima stay what they are now."""
    out: dict[str, Any] = {}
    for f in fields(LoaderStats):
        value, old = getattr(now, f.name), getattr(before, f.name)
        if isinstance(value, Counter):
            out[f.name] = Counter({k: n - old[k] for k, n in value.items() if n != old[k]})
        else:
            out[f.name] = value if f.name in _MAXIMA else value - old
    return LoaderStats(**out)


class Telemetry:
    """Reports a loader's counts every so many steps, and says in the log what is high and which option changes it.

    Values are `odb/...`, everything since the loader was made (see `odb.LoaderStats`), and `odb/interval/...`, the time
    since the last report (see `Interval.values`). Advice is given once per kind, of intervals of at least 20 steps.

    Args:
        loader: this rank's.
        *sinks: each gets every report.
        every: calls of `step` from one report to the next.
        advise: whether to warn.

    Raises:
        ConfigError: `every` is no positive integer, or a sink can't be called.
    """

    def __init__(self, loader: ODBDataLoader, *sinks: Sink, every: int = 50, advise: bool = True) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every must be an integer >= 1 (steps from report to report), got {every!r}")
        for sink in sinks:
            if not callable(sink):
                raise ConfigError(
                    f"a sink is a function of (values, step), got {type(sink).__name__}: see tensorboard(), wandb(), "
                    "prometheus_file() in odb.integrations.telemetry"
                )
        self._loader, self._sinks, self._every = loader, sinks, every
        self._advisor = Advisor() if advise else None
        self._calls = 0
        self._before, self._since = loader.stats(), time.perf_counter()

    def step(self, step: int | None = None) -> dict[str, float] | None:
        """Call it once per batch; `step` is what sinks are told (None: how often this was called).

        Returns:
            The values, where this call reported.
        """
        self._calls += 1
        if self._calls % self._every:
            return None
        return self.report(self._calls if step is None else step)

    def report(self, step: int) -> dict[str, float]:
        """Reports now: also good at the end of a run."""
        interval, now = self._interval(), self._loader.stats()
        values = flat_stats(now) | interval.values()
        for sink in self._sinks:
            sink(dict(values), step)
        if self._advisor is not None:
            stats = interval.stats
            stats.wait_s = interval.wait_s
            self._advisor.check(stats, interval.elapsed_s, self._loader.num_workers)
        return values

    def _interval(self) -> Interval:
        now, clock = self._loader.stats(), time.perf_counter()
        stats, elapsed = difference(now, self._before), clock - self._since
        is_new_epoch = now.first_batch_s != self._before.first_batch_s
        wait = max(0.0, stats.wait_s - (now.first_batch_s if is_new_epoch else 0.0))
        self._before, self._since = now, clock
        return Interval(stats, elapsed, wait)


# ---- sinks


def tensorboard(writer: Any) -> Sink:
    """For a `torch.utils.tensorboard.SummaryWriter`."""

    def sink(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return sink


def wandb(run: Any, step_name: str | None = None) -> Sink:
    """For a run of Weights & Biases (online or offline).

    Args:
        run: what `wandb.init` gave.
        step_name: log the step under this name, and leave the run's own step to the rest of the program. None: it is
            the run's step, which must then never go back.
    """

    def sink(values: dict[str, float], step: int) -> None:
        if step_name is None:
            run.log(values, step=step)
        else:
            run.log(values | {step_name: step})

    return sink


def prometheus_file(path: str | os.PathLike[str], loader: ODBDataLoader, **labels: str) -> Sink:
    """Rewrites a text file at each report, whole or not at all: for the node exporter's textfile collector.

    Args:
        path: ends in `.prom` by that collector's convention; one per rank.
        loader: whose counts are written.
        **labels: of every sample, as `rank="0"`.
    """

    def sink(_values: dict[str, float], _step: int) -> None:
        part = Path(f"{os.fspath(path)}.part")
        part.write_text(prometheus_text(loader.stats(), labels), encoding="utf-8")
        os.replace(part, path)

    return sink


#: Field of the stats -> metric, its kind, and what it is; those with a label per key last.
_METRICS = (
    ("steps", "odb_steps_total", "counter", "Micro-steps handed over, fillers included."),
    ("idle_steps", "odb_idle_steps_total", "counter", "Micro-steps that were fillers."),
    ("rounds", "odb_rounds_total", "counter", "Rounds agreed on with the other ranks."),
    ("emitted_samples", "odb_samples_total", "counter", "Samples in real batches."),
    ("real_tokens", "odb_real_tokens_total", "counter", "Tokens in real batches, without padding."),
    ("padded_tokens", "odb_padded_tokens_total", "counter", "Rows x padded length of real batches."),
    ("loss_tokens", "odb_loss_tokens_total", "counter", "Loss-bearing labels of real batches."),
    ("wait_s", "odb_wait_seconds_total", "counter", "Seconds that the loop waited for batches."),
    ("max_held_tokens", "odb_max_held_tokens", "gauge", "Most tokens held and not yet assigned to a step."),
    ("first_batch_s", "odb_first_batch_seconds", "gauge", "Seconds until the first batch of the last epoch."),
    ("padding", "odb_padding_ratio", "gauge", "Share of padding in the tokens of real batches."),
)
_LABELLED = (
    ("rejected", "odb_rejected_samples_total", "reason", "Samples that never entered a plan."),
    ("dropped", "odb_dropped_samples_total", "reason", "Samples that entered a plan and left unemitted."),
    ("bound_by", "odb_batches_total", "bound", "Batches by the bound that closed them."),
)


def prometheus_text(stats: LoaderStats, labels: Mapping[str, str] | None = None) -> str:
    """The counts in Prometheus' text format, version 0.0.4.

    Args:
        stats: of a loader.
        labels: of every sample.
    """
    labels, lines = dict(labels or {}), []
    for field, metric, kind, text in _METRICS:
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
        lines.append(f"{metric}{_label_set(labels)} {_number(getattr(stats, field))}")
    for field, metric, label, text in _LABELLED:
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} counter"]
        lines += [f"{metric}{_label_set(labels | {label: k})} {n}" for k, n in sorted(getattr(stats, field).items())]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def _label_set(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = {k: str(v).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
