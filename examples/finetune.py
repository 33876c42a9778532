"""Fine-tunes a small language model three times on the same samples, and shows what the way of batching costs.

    torchrun --standalone --nproc-per-node 2 examples/finetune.py          # or: make demo
    python examples/finetune.py                                            # one process
    torchrun ... examples/finetune.py --data my_chats.jsonl                # {"messages": [...]} per line

Fixed batches, sorted batches and `odb`: the same samples, the same initial weights, the same optimizer, the same memory
bound. The lengths are unknown until a worker has applied the chat template, the tokenizer and a random truncation.
Writes `results.json` and `finetune.png`. CPU and Gloo; CUDA, bf16 and NCCL where they are there.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from finetuning.corpus import DataError, read_jsonl, split, stdlib_conversations
from finetuning.encoding import ChatDataset, load_tokenizer
from finetuning.methods import METHODS, Settings, accumulation_to_match
from finetuning.metrics import Run, describe_lengths
from finetuning.model import ModelConfig
from finetuning.progress import Reporter
from finetuning.ranks import Ranks, start_ranks
from finetuning.report import conclusions, make_table, write_json, write_png
from finetuning.train import HeldOut, TrainConfig, train
from rich.console import Console

CHECKOUT = Path(__file__).resolve().parent.parent
QUICK = {"samples": 512, "token_budget": 1024, "max_length": 256, "width": 64, "vocab_size": 1024, "heldout": 32}


@dataclass(frozen=True)
class Data:
    """What is trained on and what is held out."""

    train: ChatDataset
    heldout: ChatDataset
    vocab_size: int
    mean_length: float  # of a few samples, tokens


def main() -> int:
    """Returns the exit status: 0, or 2 where the arguments or the data are wrong."""
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 110)
    with start_ranks() as ranks:
        try:
            data = load_data(args, ranks)
        except DataError as error:
            if ranks.first:
                print(f"error: {error}", file=sys.stderr)
            return 2
        if ranks.first:
            announce(console, args, data, ranks)
        runs = run_methods(args, data, ranks, console)
        if ranks.first:
            conclude(console, args, runs, ranks)
    return 0


def load_data(args: argparse.Namespace, ranks: Ranks) -> Data:
    """Conversations, tokenizer, datasets; what takes time is cached for the next run."""
    with ranks.first_on_node_goes_first():
        conversations = read_jsonl(args.data) if args.data else stdlib_conversations(args.cache_dir)
        train_part, heldout_part = split(conversations, args.samples, args.heldout)
        tokenizer = load_tokenizer(train_part, args.vocab_size, args.cache_dir)
    dataset = ChatDataset(train_part, tokenizer, args.max_length, seed=args.seed, augment=True)
    heldout = ChatDataset(heldout_part, tokenizer, args.max_length, augment=False)
    probed = [len(dataset[i]["input_ids"]) for i in range(min(len(dataset), 256))]
    return Data(dataset, heldout, tokenizer.get_vocab_size(), sum(probed) / len(probed))


def run_methods(args: argparse.Namespace, data: Data, ranks: Ranks, console: Console) -> list[Run]:
    """One run per method, one after the other."""
    rows = args.token_budget // args.max_length
    accumulation = accumulation_to_match(args.token_budget, rows, data.mean_length)
    settings = Settings(data.train, ranks, args.token_budget, args.num_workers, args.seed, accumulation)
    config = TrainConfig(
        model=ModelConfig(data.vocab_size, width=args.width),
        epochs=args.epochs,
        seed=args.seed,
        learning_rate=args.learning_rate,
        num_evaluations=args.evaluations,
    )
    heldout = HeldOut(data.heldout, ranks, args.token_budget)
    runs = []
    with Reporter(console, len(data.train) * args.epochs, shown=ranks.first) as reporter:
        for name in args.methods:
            method = METHODS[name](settings)
            reporter.start(name)
            try:
                runs.append(train(method, len(data.train), heldout, config, ranks, reporter))
            finally:
                method.close()
    return runs


def announce(console: Console, args: argparse.Namespace, data: Data, ranks: Ranks) -> None:
    """Says what is about to run."""
    source = args.data or "documented functions of the Python standard library"
    console.print(f"{source}: {len(data.train)} samples to train on, {len(data.heldout)} held out", highlight=False)
    console.print(
        f"{ranks.world_size} rank(s) on {ranks.device.type}, {args.num_workers} worker(s) each; "
        f"set-up {time.perf_counter() - START:.1f} s",
        highlight=False,
    )


def conclude(console: Console, args: argparse.Namespace, runs: list[Run], ranks: Ranks) -> None:
    """Prints what was observed, and writes the files."""
    lengths = describe_lengths(list(chain.from_iterable(chain.from_iterable(log.lengths) for log in runs[0].logs)))
    console.print(
        f"\nLengths observed: mean {lengths.mean:.0f} tokens, CV {lengths.cv:.2f}, p50 {lengths.p50:.0f}, "
        f"p99 {lengths.p99:.0f}, longest {lengths.longest}",
        highlight=False,
    )
    console.print(make_table(runs, args.token_budget, ranks.world_size))
    for line in conclusions(runs):
        console.print(line, highlight=False, soft_wrap=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    settings |= {"world_size": ranks.world_size, "device": ranks.device.type}
    write_json(args.output / "results.json", settings, lengths, runs)
    write_png(args.output / "finetune.png", runs, lengths, args.token_budget)
    console.print(f"Wrote {args.output / 'results.json'} and {args.output / 'finetune.png'}", highlight=False)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with status 2 where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--data", type=Path, help='JSONL file, {"messages": [...]} per line (default: embedded data)')
    parser.add_argument("--methods", type=method_names, default=list(METHODS), help="comma separated (default: all)")
    parser.add_argument("--token-budget", type=positive, help="padded tokens per rank and batch (2048)")
    parser.add_argument("--max-length", type=positive, help="longest sample in tokens, the rest is cut off (512)")
    parser.add_argument("--samples", type=positive, help="samples to train on, at most (2560)")
    parser.add_argument("--heldout", type=positive, help="samples to hold out, at most (96)")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--num-workers", type=non_negative, default=1, help="workers per rank (default: 1)")
    parser.add_argument("--width", type=positive, help="of the model (128)")
    parser.add_argument("--vocab-size", type=positive, help="of the tokenizer (2048)")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--evaluations", type=positive, default=6, help="held-out losses per method")
    parser.add_argument("--seed", type=non_negative, default=0)
    parser.add_argument("--output", type=Path, default=CHECKOUT / "out")
    parser.add_argument("--cache-dir", type=Path, default=CHECKOUT / ".cache")
    parser.add_argument("--quick", action="store_true", help="small sizes where none are given: about 30 seconds")
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.max_length > args.token_budget:
        parser.error(
            f"--max-length {args.max_length} exceeds --token-budget {args.token_budget}: not one row would fit"
        )
    if args.max_length < 2 or args.width % 8 or args.vocab_size < 300:
        parser.error("--max-length must be at least 2, --width a multiple of 8, --vocab-size at least 300")
    return args


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def non_negative(text: str) -> int:
    """An integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def method_names(text: str) -> list[str]:
    """Names from `METHODS`, separated by commas."""
    names = text.split(",")
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METHODS)}")
    return names


FULL = {"samples": 2560, "token_budget": 2048, "max_length": 512, "width": 128, "vocab_size": 2048, "heldout": 96}
START = time.perf_counter()

if __name__ == "__main__":
    sys.exit(main())
