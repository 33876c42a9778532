"""Fakes and checks for testing training code that uses `odb`: samples that carry their identity, and what must hold.

    dataset = LengthsDataset([5, 9, 7])
    steps = record(odb.ODBDataLoader(dataset, token_budget=10, collate_fn=collate))
    assert_each_once([steps], range(3))
    assert_within_budget([steps], 10)

Everything is module-level and picklable, so that it works with every start method and can travel between ranks. No test
framework is needed: a check that fails raises `AssertionError` with what was expected and what was seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from odb.step import STEP_INFO_KEY, ODBStepInfo

__all__ = [
    "IterableLengthsDataset",
    "LengthsDataset",
    "Seen",
    "assert_each_once",
    "assert_resumable",
    "assert_steps_aligned",
    "assert_within_budget",
    "collate",
    "make_sample",
    "record",
    "seen",
]

#: What labels that bear no loss hold.
IGNORE_INDEX = -100
_VOCABULARY = 97
_MAX_LISTED = 10


def make_sample(identity: int, length: int, num_prompt: int = 0) -> dict[str, Any]:
    """One processed sample.

    Args:
        identity: what `sample["id"]` holds; also decides the token values, so that two samples differ.
        length: tokens, >= 0.
        num_prompt: how many labels from the left are masked.

    Returns:
        `{"id": int, "input_ids": int64 (length,), "labels": int64 (length,)}`, token values in 1..96.
    """
    input_ids = (torch.arange(length, dtype=torch.int64) * 31 + identity * 7) % (_VOCABULARY - 1) + 1
    labels = input_ids.clone()
    labels[:num_prompt] = IGNORE_INDEX
    return {"id": identity, "input_ids": input_ids, "labels": labels}


class LengthsDataset(Dataset[Any]):
    """A map-style dataset in which sample `i` has `lengths[i]` tokens and carries `i` as its `"id"`.

    Args:
        lengths: tokens of each sample.
        prompt_fraction: share of a sample's labels that is masked, from the left and rounded down; one number for
            all, or one for each sample (1.0: a sample that bears no loss).
        sleep: how long making a sample takes, in seconds: a number is the most, and each sample takes a fixed
            pseudo-random part of it; a mapping gives single samples' times.
        fail_at: ids whose making raises `ValueError("bad sample <id>")`.
        none_at: ids that come out as None, as from a pipeline that throws bad samples away.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        *,
        prompt_fraction: float | Sequence[float] = 0.0,
        sleep: float | Mapping[int, float] = 0.0,
        fail_at: Collection[int] = (),
        none_at: Collection[int] = (),
    ) -> None:
        self.lengths = [int(length) for length in lengths]
        self.prompt_fraction = prompt_fraction
        self.sleep = sleep
        self.fail_at = frozenset(fail_at)
        self.none_at = frozenset(none_at)
        if not isinstance(prompt_fraction, (int, float)) and len(prompt_fraction) != len(self.lengths):
            raise ValueError(
                f"prompt_fraction needs one number, or one for each of the {len(self.lengths)} samples; "
                f"got {len(prompt_fraction)}"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"sample {index} of {len(self.lengths)}")
        if seconds := self.seconds(index):
            time.sleep(seconds)
        if index in self.fail_at:
            raise ValueError(f"bad sample {index}")
        if index in self.none_at:
            return None
        return make_sample(index, self.lengths[index], self.num_prompt(index))

    def num_prompt(self, index: int) -> int:
        """How many labels of sample `index` are masked."""
        fraction = self.prompt_fraction
        share = float(fraction) if isinstance(fraction, (int, float)) else float(fraction[index])
        return int(share * self.lengths[index])

    def num_loss_tokens(self, index: int) -> int:
        """Labels of sample `index` that bear loss when the first label of a row is never predicted."""
        length = self.lengths[index]
        return length - min(length, max(1, self.num_prompt(index)))

    def seconds(self, index: int) -> float:
        """How long making sample `index` takes."""
        if isinstance(self.sleep, Mapping):
            return float(self.sleep.get(index, 0.0))
        return float(self.sleep) * (index * 2654435761 % 1000) / 1000


class IterableLengthsDataset(IterableDataset[Any]):
    """The iterable twin of `LengthsDataset`: the same samples, as a stream that splits itself.

    Args:
        lengths: tokens of each sample, of all ranks.
        rank: whose share is streamed: samples `rank, rank + world_size, ...`.
        world_size: into how many shares the samples are split. A share is split once more over the workers.
        **options: as for `LengthsDataset`.
    """

    def __init__(self, lengths: Iterable[int], *, rank: int = 0, world_size: int = 1, **options: Any) -> None:
        self.samples = LengthsDataset(lengths, **options)
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        share = range(self.rank, len(self.samples), self.world_size)
        for index in share[number::count]:
            yield self.samples[index]


def collate(samples: Sequence[Mapping[str, Any]], pad_to_multiple_of: int = 1) -> dict[str, Any]:
    """Pads on the right and keeps the ids: the collate function of these tests, and a template for one's own.

    Args:
        samples: of the kind that `make_sample` makes, at least one.
        pad_to_multiple_of: the padded length is a multiple of this (`functools.partial` sets it).

    Returns:
        `{"id": (rows,), "input_ids", "labels", "attention_mask": (rows, padded length)}`, all int64. Padding is 0,
        in `labels` -100.
    """
    longest = max(len(sample["input_ids"]) for sample in samples)
    width = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    shape = (len(samples), width)
    input_ids, attention_mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        input_ids[row, :length] = sample["input_ids"]
        labels[row, :length] = sample["labels"]
        attention_mask[row, :length] = 1
    ids = torch.tensor([sample["id"] for sample in samples], dtype=torch.int64)
    return {"id": ids, "input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


@dataclass(frozen=True)
class Seen:
    """What one step delivered, without its tensors: small, comparable, picklable.

    Attributes:
        ids: `"id"` of every row, in the batch's order; of a filler too, whose rows were seen before or will be.
        shape: rows and padded length of `input_ids`.
        real_tokens: sum of `attention_mask`.
        info: the step's info.
    """

    ids: tuple[int, ...]
    shape: tuple[int, int]
    real_tokens: int
    info: ODBStepInfo

    @property
    def idle(self) -> bool:
        """Whether it is a filler."""
        return self.info.idle

    @property
    def padded_tokens(self) -> int:
        """Rows x padded length."""
        return self.shape[0] * self.shape[1]


def seen(batch: Any, info: ODBStepInfo | None = None) -> Seen:
    """What a batch of `collate`'s kind delivers.

    Args:
        batch: a mapping as the loader yields it, with its info or, once that is taken out, with `info` beside it.
        info: the step's info where the batch no longer carries it.
    """
    found = batch.get(STEP_INFO_KEY) if info is None else info
    if not isinstance(found, ODBStepInfo):
        raise ValueError("this batch carries no step info; give it as second argument")
    rows, width = batch["input_ids"].shape
    ids = tuple(int(identity) for identity in batch["id"])
    return Seen(ids, (int(rows), int(width)), int(batch["attention_mask"].sum()), found)


def record(loader: Any, num_steps: int | None = None) -> list[Seen]:
    """Iterates one epoch of a loader and returns what it saw; leaves after `num_steps` where that is given."""
    steps: list[Seen] = []
    if num_steps == 0:
        return steps
    for batch in loader:
        steps.append(seen(batch))
        if len(steps) == num_steps:
            break
    return steps


def assert_each_once(batches_per_rank: Sequence[Iterable[Seen]], expected_ids: Iterable[int]) -> None:
    """Every expected sample was delivered exactly once over all ranks, and nothing else was; fillers don't count.

    Args:
        batches_per_rank: what each rank saw, as `record` gives it.
        expected_ids: ids of the samples that have to come.
    """
    counts: Counter[int] = Counter()
    for steps in batches_per_rank:
        for step in steps:
            counts.update(() if step.idle else step.ids)
    expected = set(expected_ids)
    missing = sorted(expected - set(counts))
    repeated = sorted(identity for identity, count in counts.items() if count > 1)
    unknown = sorted(set(counts) - expected)
    problems = [
        f"{len(ids)} {what}: {_listed(ids)}"
        for what, ids in (("missing", missing), ("seen more than once", repeated), ("not expected", unknown))
        if ids
    ]
    if problems:
        raise AssertionError(f"of {len(expected)} samples: " + "; ".join(problems))


def assert_steps_aligned(batches_per_rank: Sequence[Iterable[Seen]]) -> None:
    """All ranks ran the same number of steps, and agree on what each step and each optimizer step holds in sum."""
    per_rank = [list(steps) for steps in batches_per_rank]
    counts = [len(steps) for steps in per_rank]
    if len(set(counts)) > 1:
        raise AssertionError(f"ranks ran different numbers of steps: {counts}")
    for position, slot in enumerate(zip(*per_rank, strict=True)):
        infos = [step.info for step in slot]
        for name in (
            "step",
            "all_samples_this_step",
            "all_tokens",
            "all_loss_tokens",
            "window_loss_tokens",
            "sync_gradients",
        ):
            values = [getattr(info, name) for info in infos]
            if len(set(values)) > 1:
                raise AssertionError(f"step {position}: ranks hold different {name}: {values}")
        for name, total in (
            ("local_samples", "all_samples_this_step"),
            ("local_tokens", "all_tokens"),
            ("local_loss_tokens", "all_loss_tokens"),
        ):
            found, stated = sum(getattr(info, name) for info in infos), getattr(infos[0], total)
            if found != stated:
                raise AssertionError(f"step {position}: {total} is {stated}, but the ranks' {name} sum up to {found}")


def assert_within_budget(
    batches_per_rank: Sequence[Iterable[Seen]],
    token_budget: int,
    cost_fn: Callable[[int, int], float] = int.__mul__,
) -> None:
    """No batch of two or more samples costs more than the budget, and no batch is empty.

    Args:
        batches_per_rank: what each rank saw, as `record` gives it.
        token_budget: the bound.
        cost_fn: (rows, padded length) -> cost; their product by default.
    """
    for rank, steps in enumerate(batches_per_rank):
        for position, step in enumerate(steps):
            rows, width = step.shape
            if rows == 0:
                raise AssertionError(f"rank {rank}, step {position}: a batch without rows")
            if rows > 1 and cost_fn(rows, width) > token_budget:
                raise AssertionError(
                    f"rank {rank}, step {position}: {rows} rows of {width} cost {cost_fn(rows, width)}, "
                    f"more than the budget of {token_budget}"
                )


def _listed(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:_MAX_LISTED]))
    return shown if len(ids) <= _MAX_LISTED else f"{shown}, ..."


def assert_resumable(make_loader: Callable[[], Any], num_positions: int | None = None, epoch: int = 0) -> None:
    """An epoch of this loader, interrupted and resumed, gives the same batches as one that was not, bit for bit.

    The epoch is run twice without interruption, so that what repeats by itself is known; then, for each position, up to
    there, its state through JSON, and the rest from a new loader. With several ranks, call it on all of them.

    Args:
        make_loader: gives a new, equal `ODBDataLoader` each time; closed again here.
        num_positions: how many positions to try, spread evenly from before the first batch to behind the last one;
            None: all.
        epoch: which epoch.

    Raises:
        AssertionError: says where and in what the batches differ, and what that is likely to come from.
    """
    reference, again = (_prints(make_loader, epoch)[0] for _ in range(2))
    _assert_same(
        again,
        reference,
        "two runs without interruption differ: the dataset, its sampler or collate_fn draw random numbers that do not "
        "depend on (seed, epoch, index) alone; see odb.seeding",
    )
    for position in _positions(len(reference), num_positions):
        head, state = _prints(make_loader, epoch, stop=position)
        tail, _ = _prints(make_loader, epoch, state=json.loads(json.dumps(state)))
        _assert_same(
            head + tail,
            reference,
            f"resumed behind batch {position}: a sample must depend on (seed, epoch, index) alone, not on what its "
            "worker read before; see odb.seeding",
        )


def _positions(num_steps: int, num_positions: int | None) -> list[int]:
    if num_positions is not None and num_positions < 1:
        raise ValueError(f"num_positions must be >= 1 or None, got {num_positions}")
    if num_positions is None or num_positions > num_steps:
        return list(range(num_steps + 1))
    return sorted({round(x) for x in np.linspace(0, num_steps, num_positions)})


def _prints(
    make_loader: Callable[[], Any], epoch: int, stop: int | None = None, state: Any = None
) -> tuple[list[dict[str, str]], Any]:
    """Fingerprints of a loader's batches from a state (or the epoch's start) on, and its state after `stop` of them."""
    out: list[dict[str, str]] = []
    with contextlib.closing(make_loader()) as loader:
        loader.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        if stop != 0:
            for batch, info in loader.steps():
                out.append(fingerprint(batch) | {"info": repr(info)})
                if len(out) == stop:
                    break
        return out, loader.state_dict()


def fingerprint(batch: Any, name: str = "batch") -> dict[str, str]:
    """Place in a nested batch -> dtype, shape and hash of a tensor or array, `repr` of anything else."""
    if isinstance(batch, Mapping):
        return {k: v for key in batch for k, v in fingerprint(batch[key], f"{name}[{key!r}]").items()}
    if isinstance(batch, (list, tuple)):
        return {k: v for i, part in enumerate(batch) for k, v in fingerprint(part, f"{name}[{i}]").items()}
    if isinstance(batch, torch.Tensor):
        raw = batch.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {name: f"{batch.dtype} {tuple(batch.shape)} {hashlib.sha256(raw).hexdigest()}"}
    if isinstance(batch, np.ndarray) and batch.dtype != object:
        return {name: f"{batch.dtype} {batch.shape} {hashlib.sha256(batch.tobytes()).hexdigest()}"}
    if is_dataclass(batch) and not isinstance(batch, type):
        return fingerprint({f.name: getattr(batch, f.name) for f in fields(batch)}, name)
    return {name: repr(batch)}


def _assert_same(found: list[dict[str, str]], expected: list[dict[str, str]], meaning: str) -> None:
    for number, (one, other) in enumerate(zip_longest(found, expected)):
        if one is None or other is None:
            raise AssertionError(f"{len(found)} batches instead of {len(expected)}; {meaning}")
        places = [place for place in one.keys() | other.keys() if one.get(place) != other.get(place)]
        if places:
            raise AssertionError(f"batch {number} differs in {_named(sorted(places))}; {meaning}")


def _named(places: Sequence[str]) -> str:
    shown = ", ".join(places[:_MAX_LISTED])
    return shown if len(places) <= _MAX_LISTED else f"{shown}, ..."
