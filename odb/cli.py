"""The command line: `odb simulate` and `odb tune`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from odb.config import ODBConfig
from odb.errors import ConfigError
from odb.plan.types import I64, PlanConfig
from odb.sim import baselines, lengths, plots, summary, sweep, world
from odb.sim.baselines import Steps

_ROWS = (
    ("samples", "samples", "{:,}"),
    ("steps", "steps", "{:,}"),
    ("rounds", "rounds", "{:,}"),
    ("samples_per_step", "samples per step", "{:.1f}"),
    ("step_efficiency", "step efficiency", "{:.4f}"),
    ("padding", "padding", "{:.4f}"),
    ("budget_fill", "budget fill", "{:.4f}"),
    ("straggler_ratio", "straggler ratio", "{:.4f}"),
    ("idle_share", "idle share", "{:.4%}"),
    ("max_held_tokens", "most held tokens of a rank", "{:,}"),
    ("memory_bound_tokens", "memory bound, tokens of a rank", "{:,}"),
    ("length_autocorrelation", "autocorrelation of step lengths", "{:+.3f}"),
    ("max_age_rounds", "most rounds that a sample waits", "{:,}"),
    ("seconds", "seconds of simulation", "{:.2f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 where all went well, 2 where something given is wrong."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"odb {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="odb", description="Online dynamic batching for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_simulate(commands.add_parser("simulate", help="what an epoch would come to, from lengths alone"))
    _add_tune(commands.add_parser("tune", help="token budgets and window depths side by side, from lengths alone"))
    return parser


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--lengths", metavar="FILE", help=".npy or .jsonl with the tokens of each sample, in order")
    given.add_argument("--distribution", choices=lengths.DISTRIBUTIONS, help="of drawn lengths")
    parser.add_argument("--samples", type=int, default=100_000, help="to draw (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn lengths, and of the order (default 0)")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks (default %(default)s)")
    parser.add_argument("--layout", default="padded", help="padded (default) or packed")
    parser.add_argument(
        "--sharding", choices=("elastic", "static"), help="default: elastic, with --policy published static"
    )
    parser.add_argument(
        "--policy",
        choices=("odb", "published"),
        default="odb",
        help="odb (default) or published: the rule of the paper",
    )
    parser.add_argument("--grad-accum-steps", type=int, default=1, help="micro-steps of an optimizer step (default 1)")
    parser.add_argument(
        "--step-times", metavar="FILE", help=".jsonl with rows, padded_len and seconds of measured steps"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    _add_lengths(parser)
    parser.add_argument("--budgets", default="8192..65536", help="8192,16384 or 8192..65536 (default %(default)s)")
    parser.add_argument(
        "--depths", default="8..128", help="tokens that a rank may hold, in budgets (default %(default)s)"
    )
    parser.set_defaults(run=_tune)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_lengths(parser)
    parser.add_argument("--budget", type=int, default=16384, help="token budget of a batch (default %(default)s)")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--window", type=int, help="samples that a rank may hold")
    limit.add_argument("--max-held-tokens", type=int, help="tokens that a rank may hold (default: 64 budgets)")
    parser.add_argument("--plots", metavar="FOLDER", help="draw pictures into this folder (needs matplotlib)")
    parser.set_defaults(run=_simulate)


def _simulate(args: argparse.Namespace) -> int:
    config = _config(args)
    given = _lengths(args)
    step_time = _step_time(args.step_times) if args.step_times else summary.StepTime()
    trace = world.simulate(config, given, args.ranks, sharding=args.sharding)
    own = summary.epoch_time(Steps(trace.rows, trace.padded_len), step_time)
    result = summary.summarise(config, trace)
    result |= {"sharding": args.sharding, "policy": args.policy, "layout": args.layout, "budget": args.budget}
    result["compared"] = [
        summary.compared(config, given, name, batches(config, given, args.ranks), own, step_time)
        for name, batches in (("fixed", baselines.fixed), ("sorted", baselines.by_length), ("oracle", baselines.oracle))
    ]
    if args.plots:
        names = plots.save(trace, config.token_budget, args.plots)
        print("\n".join(map(str, names)), file=sys.stderr)
    print(json.dumps(result)) if args.json else _show(result)
    return 0


def _tune(args: argparse.Namespace) -> int:
    try:
        budgets, depths = sweep.powers(args.budgets), sweep.powers(args.depths)
    except ValueError as error:
        raise ConfigError(f"--budgets and --depths: {error}") from None
    args.budget, args.window, args.max_held_tokens = budgets[0], None, None
    config, given = _config(args), _lengths(args)
    step_time = _step_time(args.step_times) if args.step_times else summary.StepTime()
    rows = sweep.sweep(
        config, given, args.ranks, budgets=budgets, depths=depths, sharding=args.sharding, step_time=step_time
    )
    best = sweep.advice(rows)
    result = {"lengths": sweep.spread(given), "rows": rows, "advice": best}
    print(json.dumps(result)) if args.json else _show_tuned(result, args)
    return 0


def _show_tuned(result: dict[str, Any], args: argparse.Namespace) -> None:
    spread = result["lengths"]
    title = (
        f"{args.ranks} ranks; lengths: mean {spread['mean_length']:.0f}, CV {spread['coefficient_of_variation']:.2f}, "
        f"{spread['short_share']:.0%} shorter than half the mean"
    )
    header = ("budget", "depth", "steps", "step efficiency", "budget fill", "samples per step", "over fixed")
    rows = [
        (f"{r['budget']:,}", f"{r['depth']}", f"{r['steps']:,}", f"{r['step_efficiency']:.4f}",
         f"{r['budget_fill']:.4f}", f"{r['samples_per_step']:.1f}", f"{r['speedup_over_fixed']:.2f}x")
        for r in result["rows"]
    ]  # fmt: skip
    _table(title, header, rows)
    best = result["advice"]
    print(
        f"token_budget={best['budget']}, max_held_tokens={best['budget'] * best['depth']}: within 1 % of the fastest "
        "with the least memory, as far as the lengths tell"
        + ("" if args.step_times else " (a step's time taken as proportional to its tokens; --step-times gives yours)")
    )


def _config(args: argparse.Namespace) -> PlanConfig:
    # A loader with the published rule has static shares; elastic ones can be tried here.
    args.sharding = args.sharding or ("static" if args.policy == "published" else "elastic")
    for name in ("ranks", "samples"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    options: dict[str, Any] = {
        "token_budget": args.budget,
        "window": args.window,
        "max_held_tokens": args.max_held_tokens,
        "layout": args.layout,
        "policy": args.policy,
        "grad_accum_steps": args.grad_accum_steps,
        "seed": args.seed,
    }
    if args.window:  # then samples alone bound the window
        options |= {"max_held_tokens": 2**40}
    return ODBConfig(**options).plan_config()


def _lengths(args: argparse.Namespace) -> I64:
    if args.lengths:
        return lengths.load(args.lengths)
    return lengths.draw(args.distribution, args.samples, args.seed)


def _step_time(path: str) -> summary.StepTime:
    try:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        table = np.array([[row[k] for k in ("rows", "padded_len", "seconds")] for row in rows], np.float64)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--step-times {path}: expected a line of JSON with rows, padded_len and seconds for each measured step, "
            f"got {type(error).__name__}: {error}"
        ) from None
    if len(table) < 3:
        raise ConfigError(f"--step-times {path}: a fit needs at least three measured steps, got {len(table)}")
    return summary.StepTime.fitted(*table.T)


def _show(result: dict[str, Any]) -> None:
    moved = result["displacement"]
    bound = "" if moved["bound"] is None else f" (bound {moved['bound']:,.0f})"
    rows = [(label, form.format(result[key])) for key, label, form in _ROWS]
    rows.append(("distance from the sampler's order", f"mean {moved['mean']:,.0f}, most {moved['max']:,.0f}{bound}"))
    title = f"{result['ranks']} ranks, budget {result['budget']}, {result['sharding']}, {result['policy']}"
    _table(title, ("figure", "value"), rows)
    compared = [
        (c["name"], f"{c['steps']:,}", f"{c['step_efficiency']:.4f}", f"{c['budget_fill']:.4f}",
         f"{c['predicted_speedup']:.2f}x")
        for c in result["compared"]
    ]  # fmt: skip
    _table("Against", ("batching", "steps", "step efficiency", "budget fill", "predicted speed-up"), compared)


def _table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """By rich where it is installed, else as plain text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
        print(f"\n{title}")
        for row in (header, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left")
    for k, name in enumerate(header):
        table.add_column(name, justify="right" if k else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
