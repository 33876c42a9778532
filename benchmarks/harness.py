"""What the benchmarks share: contenders in turn, each in a fresh process, several times; medians, ranges, JSON, a plot."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Measure = Callable[[str, argparse.Namespace], dict[str, float]]


def main(module: str, about: str, contenders: list[str], metric: str, measure: Measure, argv: list[str] | None) -> None:
    """Command line of a benchmark.

    Args:
        module: its name, for `python -m`.
        about: what it measures.
        contenders: the first one is what the others are divided by.
        metric: key of what `measure` returns that the ratio is made of.
        measure: one run of one contender in this process.
        argv: arguments, None: those of the command line.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("-w", "--workers", type=int, default=2)
    parser.add_argument("-r", "--repeats", type=int, default=5)
    parser.add_argument("-n", "--num-samples", type=int, default=0, help="0: as many as this benchmark needs")
    parser.add_argument("--output", type=Path, default=Path("out") / f"{module.rpartition('.')[2]}.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(args.repeats):
        for name in contenders:
            runs[name].append(run_once(module, name, args))
    table = [row(name, runs, contenders[0], metric) for name in contenders]
    show(table, metric)
    write(table, metric, args.output)


def run_once(module: str, name: str, args: argparse.Namespace) -> dict[str, float]:
    """One contender in a fresh process."""
    command = [sys.executable, "-m", module, "--one", name, "-w", str(args.workers), "-n", str(args.num_samples)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def row(name: str, runs: dict[str, list[dict[str, float]]], base: str, metric: str) -> dict[str, Any]:
    """Medians of everything that was measured; range of the metric, and its ratio run by run against the first."""
    own = runs[name]
    ratios = sorted(a[metric] / b[metric] for a, b in zip(own, runs[base], strict=True))
    values = sorted(run[metric] for run in own)
    medians = {key: statistics.median(run[key] for run in own) for key in own[0]}
    return {
        "contender": name,
        **medians,
        "range": [values[0], values[-1]],
        "ratio": statistics.median(ratios),
        "ratio_range": [ratios[0], ratios[-1]],
    }


def show(table: list[dict[str, Any]], metric: str) -> None:
    """The table as Markdown."""
    keys = [key for key in table[0] if key not in ("contender", "range", "ratio", "ratio_range")]
    print("| contender |", " | ".join(keys), f"| ratio of {metric} (range) |")
    print("| --- |" + " ---: |" * (len(keys) + 1))
    for line in table:
        low, high = line["ratio_range"]
        print(
            f"| {line['contender']} |",
            " | ".join(f"{line[key]:.4g}" for key in keys),
            f"| {line['ratio']:.2f} ({low:.2f} to {high:.2f}) |",
        )


def write(table: list[dict[str, Any]], metric: str, output: Path) -> None:
    """JSON, and beside it a plot where matplotlib is installed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(table, indent=1))
    print(f"written: {output}")
    plot(table, metric, output.with_suffix(".png"))


def plot(table: list[dict[str, Any]], metric: str, output: Path) -> None:
    """Bars of the metric with their ranges."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [str(line.get("contender") or f"{line['loader']}, {line['workers']} workers") for line in table]
    values = [line[metric] for line in table]
    low = [max(0.0, value - line["range"][0]) for value, line in zip(values, table, strict=True)]
    high = [max(0.0, line["range"][1] - value) for value, line in zip(values, table, strict=True)]
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.4 * len(table)))
    axes.barh(names, values, xerr=[low, high])
    axes.invert_yaxis()
    axes.set_xlabel(metric)
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    print(f"written: {output}")
