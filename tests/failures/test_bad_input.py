"""What datasets and samplers should not give, and do: each has a policy, an error that says what to do, and a count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
from scenarios import Spec, iterate

import odb
from odb.errors import ConfigError, MeasureError
from odb.testing import IterableLengthsDataset, LengthsDataset, assert_each_once, assert_steps_aligned, collate, record

pytestmark = pytest.mark.timeout(60)


def infos(samples: Any, **options: Any) -> tuple[list[Any], list[odb.ODBStepInfo], Any]:
    """Batches, infos and counts of one epoch without workers."""
    with odb.ODBDataLoader(samples, **({"token_budget": 12} | options)) as loader:
        pairs = list(loader.steps())
        return [batch for batch, _ in pairs], [info for _, info in pairs], loader.stats()


def ids_of(length: int) -> torch.Tensor:
    return torch.arange(1, length + 1)


def same(samples: list[Any]) -> Any:
    return {"samples": samples}


# ---- policies: refused by default, left out and counted where that is asked for

REFUSED: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "no tokens": ({"input_ids": ids_of(0)}, r"index 1 .*no tokens.*on_empty='skip'", {"on_empty": "skip"}, "empty"),
    "None": (None, r"None for index 1 .*on_empty='skip'", {"on_empty": "skip"}, "empty"),
    "above the budget": (
        {"input_ids": ids_of(13)},
        r"sample 1 has 13 tokens .*token_budget=12 .*'alone' or 'skip'",
        {"on_oversize": "skip"},
        "oversize",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_sample_is_an_error_or_left_out_and_counted(name: str) -> None:
    bad, words, skipping, counted = REFUSED[name]
    samples = [{"input_ids": ids_of(3)}, bad, {"input_ids": ids_of(4)}]
    with pytest.raises(MeasureError, match=words):
        infos(samples, on_oversize="error")
    _, steps, stats = infos(samples, **skipping)
    assert sorted(i for info in steps for i in info.sample_ids) == [0, 2]
    assert dict(stats.rejected) == {counted: 1} and stats.num_rejected == 1


def test_above_the_budget_goes_alone_by_default_and_is_counted() -> None:
    _, steps, stats = infos([{"input_ids": ids_of(3)}, {"input_ids": ids_of(13)}, {"input_ids": ids_of(4)}])
    assert (1,) in [info.sample_ids for info in steps]
    assert stats.bound_by["oversize"] == 1 and stats.num_rejected == 0


def test_a_sample_that_raises_can_be_left_out_and_is_counted() -> None:
    dataset = LengthsDataset([4] * 9, fail_at=(2, 5))
    with pytest.raises(ValueError, match="bad sample 2"):
        infos(dataset)
    _, steps, stats = infos(dataset, on_sample_error="skip")
    assert sorted(i for info in steps for i in info.sample_ids) == [0, 1, 3, 4, 6, 7, 8]
    assert dict(stats.rejected) == {"sample_error": 2}


# ---- what can't be measured, whatever the policies: an error that names the sample and the way out


@dataclass
class NoTokens:
    """An object without what is looked for."""

    text: str = "words"


UNMEASURABLE: dict[str, tuple[Any, str]] = {
    "a dict without input_ids": ({"text": "words"}, r"index 0.*\['text'\].*no input_ids.*length_fn.*per_sample"),
    "a string": ("words", r"index 0.*type str.*length_fn"),
    "a number": (7, r"index 0.*type int.*length_fn"),
    "an object": (NoTokens(), r"index 0.*type NoTokens.*length_fn"),
    "a matrix": ({"input_ids": torch.zeros(3, 4)}, r"index 0.*shape \(3, 4\).*length_fn"),
    "nested lists": ({"input_ids": [[1, 2], [3]]}, r"index 0.*got list.*length_fn"),
    "three parts": ((ids_of(3), ids_of(3), ids_of(3)), r"index 0.*tuple of 3.*loss_tokens_fn"),
}


@pytest.mark.parametrize("policy", [{}, {"on_sample_error": "skip", "on_empty": "skip"}])
@pytest.mark.parametrize("name", UNMEASURABLE)
def test_what_has_no_length_is_an_error_whatever_the_policies(name: str, policy: dict[str, Any]) -> None:
    sample, words = UNMEASURABLE[name]
    with pytest.raises(MeasureError, match=f"(?s){words}"):
        infos([sample], collate_fn=same, **policy)


def nan(_: Any) -> Any:
    return float("nan")


WRONG_MEASURES: list[tuple[str, Callable[[Any], Any]]] = [
    (name, fn)
    for name in ("length_fn", "loss_tokens_fn", "patches_fn")
    for fn in (
        nan,
        lambda _: float("inf"),
        lambda _: -1,
        lambda _: 2**62,
        lambda _: 2.5,
        lambda _: "three",
        lambda _: None,
    )
]


@pytest.mark.parametrize(("name", "fn"), WRONG_MEASURES)
def test_a_measure_that_is_no_count_is_an_error_by_name(name: str, fn: Callable[[Any], Any]) -> None:
    with pytest.raises(MeasureError, match=rf"index 0\): {name} must return an integer"):
        infos([{"input_ids": ids_of(3)}], **{name: fn})


# ---- unusual, and fine


class Pair(NamedTuple):
    input_ids: Any
    labels: Any


@dataclass
class Tokens:
    input_ids: Any
    labels: Any


def as_dict_of_arrays(length: int) -> Any:
    return {"input_ids": np.arange(length), "labels": np.arange(length)}


KINDS: dict[str, Callable[[int], Any]] = {
    "arrays": as_dict_of_arrays,
    "lists": lambda n: {"input_ids": list(range(n)), "labels": list(range(n))},
    "int32": lambda n: {"input_ids": np.arange(n, dtype=np.int32), "labels": np.arange(n, dtype=np.int32)},
    "one row": lambda n: {"input_ids": ids_of(n)[None], "labels": ids_of(n)[None]},
    "tuple": lambda n: (ids_of(n), ids_of(n)),
    "named tuple": lambda n: Pair(ids_of(n), ids_of(n)),
    "object": lambda n: Tokens(ids_of(n), ids_of(n)),
    "tensor": ids_of,
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_any_kind_are_measured_alike(kind: str) -> None:
    lengths = [3, 1, 5, 2]
    _, steps, stats = infos([KINDS[kind](n) for n in lengths], collate_fn=same)
    assert sorted(i for info in steps for i in info.sample_ids) == [0, 1, 2, 3]
    assert (stats.real_tokens, stats.loss_tokens) == (11, 7)


@pytest.mark.parametrize("kind", ["arrays", "lists", "int32", "one row"])
def test_the_default_collator_takes_them(kind: str) -> None:
    batches, steps, _ = infos([KINDS[kind](n) for n in (3, 1, 5, 2)])
    assert sum(int(batch["attention_mask"].sum()) for batch in batches) == 11
    assert sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches) == 7
    assert all(info.loss_scale == 1.0 for info in steps)


def test_all_labels_masked_weighs_nothing_and_is_no_nan() -> None:
    samples = [{"input_ids": ids_of(3), "labels": torch.full((3,), -100)}] * 3
    _, steps, stats = infos(samples)
    assert [info.loss_scale for info in steps] == [0.0]
    assert float(odb.scale_loss(torch.tensor(float("nan")), steps[0])) == 0.0
    assert (stats.loss_tokens, stats.emitted_samples) == (0, 3)


def test_numbers_that_are_not_finite_are_the_users_own_and_arrive_as_they_are() -> None:
    values = [float("nan"), float("inf"), -float("inf"), 1.0]
    samples = [{"input_ids": ids_of(3), "weight": value, "noise": torch.tensor([value] * 3)} for value in values]
    batches, _, _ = infos(samples)
    (batch,) = batches
    order = batch["weight"].tolist()
    assert sorted(map(str, order)) == sorted(map(str, values))
    assert [str(row) for row in batch["noise"][:, 0].tolist()] == list(map(str, order))


def padded_apart(samples: list[Any]) -> Any:
    """As for a model with an encoder and a decoder: labels are a sequence of their own."""
    rows = [sample["labels"] for sample in samples]
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": ids, "labels": labels}


def cut_to_the_inputs(samples: list[Any]) -> Any:
    batch = padded_apart(samples)
    return batch | {"labels": batch["labels"][:, : batch["input_ids"].shape[1]]}


LONGER_LABELS = [{"input_ids": ids_of(n), "labels": ids_of(n + 4)} for n in (3, 2, 4)]


def test_labels_longer_than_the_inputs_count_as_they_are() -> None:
    _, _, stats = infos(LONGER_LABELS, collate_fn=padded_apart, label_shift=False)
    assert stats.loss_tokens == 3 + 2 + 4 + 3 * 4


def test_labels_longer_than_the_inputs_are_never_cut_quietly() -> None:
    with pytest.raises(MeasureError, match=r"6 loss-bearing labels, its samples had 17 .*truncates.*loss_tokens_fn"):
        infos(LONGER_LABELS[:2] + LONGER_LABELS[:1], collate_fn=cut_to_the_inputs, label_shift=True, max_samples=3)


def test_the_default_collator_refuses_labels_of_another_length() -> None:
    with pytest.raises(ConfigError, match="labels"):
        infos(LONGER_LABELS)


# ---- how much there is


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("count", [0, 1])
def test_almost_nothing_is_fine(count: int, num_workers: int) -> None:
    with odb.ODBDataLoader(LengthsDataset([5] * count), token_budget=12, num_workers=num_workers) as loader:
        assert [len(list(loader)), len(list(loader))] == [count, count]


def test_an_empty_shard_runs_fillers() -> None:
    spec = Spec([5] * 6, 5, share=[range(6), []])
    outcomes = ranks.values(2, iterate, spec)
    assert_each_once([o.steps for o in outcomes], range(6))
    assert_steps_aligned([o.steps for o in outcomes])
    assert [sum(step.idle for step in o.steps) for o in outcomes] == [0, 6]


def empty_stream(rank: int, world_size: int, filler: bool) -> list[Any]:
    dataset = IterableLengthsDataset([5] * (6 if rank == 0 else 0))
    options: dict[str, Any] = {"filler_fn": one_sample} if filler else {}
    with odb.ODBDataLoader(dataset, token_budget=5, num_workers=1, collate_fn=collate, **options) as loader:
        return record(loader)


def one_sample() -> Any:
    return LengthsDataset([5])[0]


def test_an_empty_stream_has_nothing_to_stand_in_and_says_so_on_all_ranks() -> None:
    first, second = ranks.run_ranks(2, empty_stream, False, timeout=30)
    assert first.error is not None and second.error is not None
    assert second.error.type_name == "ConfigError" and "filler_fn" in second.error.text
    assert first.error.ranks == (1,) and "filler_fn" in first.error.text
    steps = ranks.values(2, empty_stream, True)
    assert_each_once(steps, range(6))
    assert_steps_aligned(steps)


def test_an_endless_sampler_ends_at_its_quota() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(4))

    dataset = LengthsDataset([5] * 4)
    with odb.ODBDataLoader(
        dataset, token_budget=5, sampler=Endless(), join=False, sample_quota=10, window=4, collate_fn=collate
    ) as loader:
        assert sum(len(step.ids) for step in record(loader)) == 10


# ---- samplers


def test_indices_that_a_sampler_repeats_come_as_often_and_are_told_apart() -> None:
    spec = Spec([5] * 4, 10, share=[[0, 0, 1, 1, 1], [3, 2, 3]])
    outcomes = ranks.values(2, iterate, spec)
    seen = sorted(i for o in outcomes for step in o.steps if not step.idle for i in step.ids)
    assert seen == [0, 0, 1, 1, 1, 2, 3, 3]
    views = [i for o in outcomes for step in o.steps if not step.idle for i in step.info.sample_ids]
    assert len(views) == len(set(views)) == 8
    assert_steps_aligned([o.steps for o in outcomes])


class Breaks:
    """A sampler that raises on rank 1, in the epoch that it is told."""

    def __init__(self, rank: int, epoch: int) -> None:
        self.rank, self.breaks_in, self.epoch = rank, epoch, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield 0
        if self.rank == 1 and self.epoch > self.breaks_in:
            raise LookupError("no further index, says the sampler")
        yield 1


def with_a_broken_sampler(rank: int, world_size: int, epoch: int, num_workers: int) -> None:
    options: dict[str, Any] = {"sampler": Breaks(rank, epoch), "num_workers": num_workers, "timeout_s": 5.0}
    with odb.ODBDataLoader(LengthsDataset([5] * 2), token_budget=5, collate_fn=collate, **options) as loader:
        for _ in range(3):
            record(loader)


@pytest.mark.parametrize(("epoch", "num_workers"), [(0, 1), (1, 1), (0, 0), (1, 0)])
def test_a_sampler_that_raises_ends_all_ranks(epoch: int, num_workers: int) -> None:
    first, second = ranks.run_ranks(2, with_a_broken_sampler, epoch, num_workers, timeout=30)
    assert first.error is not None and second.error is not None
    assert second.error.type_name == "LookupError" and "says the sampler" in second.error.text
    assert first.error.type_name == "PeerFailedError" and first.error.ranks == (1,)
    assert "LookupError" in first.error.text and "says the sampler" in first.error.text
    assert first.seconds < 5


@pytest.mark.parametrize("index", [99, -1, "seven"])
def test_an_index_that_the_dataset_does_not_have_is_its_own_error_with_the_index(index: Any) -> None:
    with pytest.raises((IndexError, TypeError)) as caught:
        infos(LengthsDataset([5] * 4), sampler=[0, index])
    notes = getattr(caught.value, "__notes__", ["raised by the dataset at index " + repr(index)])
    assert any(f"at index {index!r}" in note for note in notes)
