"""Options, `wrap`, `apply`, samplers: what goes in, and what is said where it is wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ranks
import torch
from scenarios import log_normal
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

import odb
from odb.testing import (
    IterableLengthsDataset,
    LengthsDataset,
    Seen,
    assert_each_once,
    assert_steps_aligned,
    assert_within_budget,
    collate,
    record,
)

pytestmark = pytest.mark.timeout(120)

LENGTHS = log_normal(40, 12, 0.6, 2, 60, seed=8)


def make(**options: Any) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(LengthsDataset(LENGTHS), **({"token_budget": 100, "collate_fn": collate} | options))


# ---- wrong names and values


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("token_budgte", "token_budget"),
        ("max_sample", "max_samples"),
        ("num_worker", "num_workers"),
        ("buffersize", "buffer_size"),
        ("loss_scale", "loss_scaling"),
        ("gradient_accumulation_steps", "grad_accum_steps"),
        ("colate_fn", "collate_fn"),
        ("pad_to_multiple", "pad_to_multiple_of"),
    ],
)
def test_a_mistyped_option_names_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong!r}.*did you mean {right!r}"):
        make(**{wrong: 1})


def test_the_budget_is_required() -> None:
    with pytest.raises(ValueError, match="token_budget is required"):
        odb.ODBDataLoader(LengthsDataset(LENGTHS))


INTEGERS = (
    "token_budget",
    "window",
    "buffer_size",
    "max_held_tokens",
    "max_held_bytes",
    "max_steps_per_round",
    "max_samples",
    "pad_to_multiple_of",
    "rows_multiple",
    "grad_accum_steps",
    "prefetch_factor",
)


@pytest.mark.parametrize("value", [0, -1, True, "8", 1.5])
@pytest.mark.parametrize("name", INTEGERS)
def test_a_wrong_count_is_refused_by_name_and_value(name: str, value: Any) -> None:
    shown = "window" if name == "buffer_size" else name
    with pytest.raises(ValueError, match=f"{shown}.*{value!r}"):
        make(num_workers=1, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_workers", -1),
        ("num_workers", True),
        ("num_workers", "2"),
        ("seed", -1),
        ("timeout_s", 0),
        ("timeout_s", True),
        ("timeout", -1),
        ("join", 1),
        ("drop_last", "no"),
        ("label_shift", 0),
        ("warmup_probe", None),
        ("layout", "flat"),
        ("policy", "best"),
        ("tail", "fill"),
        ("accum_tail", "filler"),
        ("sharding", "dynamic"),
        ("loss_scaling", "tokens"),
        ("on_empty", "raise"),
        ("on_oversize", "drop"),
        ("length_fn", 3),
        ("cost_fn", "linear"),
        ("ignore_index", None),
        ("dp_rank", -1),
    ],
)
def test_a_wrong_value_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{value!r}"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sample_quota": 5}, "sample_quota.*join=False"),
        ({"dp_rank": 0}, "dp_rank.*dp_world_size"),
        ({"dp_rank": 2, "dp_world_size": 2}, "dp_rank.*below dp_world_size=2"),
        ({"drop_last": True, "accum_tail": "fill"}, "drop_last.*accum_tail"),
        ({"window": 2, "grad_accum_steps": 4}, "window=2.*grad_accum_steps=4"),
        ({"window": 8, "buffer_size": 8}, "buffer_size and window"),
        ({"persistent_workers": True}, "persistent_workers.*num_workers"),
        ({"shuffle": True, "sampler": range(3)}, "sampler.*shuffle"),
        ({"batch_sampler": [[0]], "sampler": range(3)}, "sampler or batch_sampler"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**options)


def test_an_iterable_dataset_takes_no_order() -> None:
    with pytest.raises(ValueError, match=r"iterable dataset.*shuffle"):
        odb.ODBDataLoader(IterableLengthsDataset([5]), token_budget=10, shuffle=True)


@pytest.mark.parametrize("dataset", [7, iter([1])])
def test_what_is_no_dataset_is_refused(dataset: Any) -> None:
    with pytest.raises(ValueError, match="dataset must be"):
        odb.ODBDataLoader(dataset, token_budget=10)


def test_a_config_can_be_given_instead_of_options() -> None:
    config = odb.ODBConfig(token_budget=100, window=16)
    loader = odb.ODBDataLoader(LengthsDataset(LENGTHS), config=config, collate_fn=collate)
    assert loader.config is config
    assert_each_once([record(loader)], range(40))
    with pytest.raises(ValueError, match=r"config=.*or single options"):
        odb.ODBDataLoader(LengthsDataset(LENGTHS), config=config, window=3)


# ---- the documented quick start of the paper's package, word for word but for the model


def test_the_papers_quick_start_runs_unchanged() -> None:
    dataloader = odb.ODBDataLoader(
        LengthsDataset(LENGTHS),
        token_budget=16384,
        batch_size=1,
        shuffle=True,
        num_workers=4,
        prefetch_factor=64,
        collate_fn=collate,
        loss_scaling="exact",
        join=True,
    )
    emitted_samples = 0
    weight = torch.ones((), requires_grad=True)
    for batch in dataloader:
        info = odb.pop_step_info(batch, loss_scaling="exact")
        assert set(batch) == {"id", "input_ids", "labels", "attention_mask"}
        loss = weight * 1.0
        loss = loss * info.loss_scale
        loss.backward()
        emitted_samples += info.all_samples_this_step
    dataloader.close()
    assert emitted_samples == 40
    assert weight.grad is not None and weight.grad.item() == pytest.approx(1.0)


def test_the_papers_in_place_form_runs_unchanged() -> None:
    dataloader = DataLoader(
        LengthsDataset(LENGTHS), batch_size=1, shuffle=True, num_workers=4, prefetch_factor=64, collate_fn=collate
    )
    handle = odb.apply(dataloader, token_budget=16384, buffer_size=1024, max_patches=0, loss_scaling="exact", join=True)
    emitted_samples = 0
    for batch in dataloader:
        emitted_samples += odb.pop_step_info(batch, loss_scaling="exact").all_samples_this_step
    handle.close()
    assert emitted_samples == 40


# ---- wrap and apply


@pytest.mark.parametrize("num_workers", [0, 2])
def test_wrap_leaves_the_old_loader_untouched(num_workers: int) -> None:
    plain = DataLoader(LengthsDataset(LENGTHS), batch_size=4, num_workers=num_workers, collate_fn=collate)
    before = [batch["id"].tolist() for batch in plain]
    with odb.wrap(plain, token_budget=100) as loader:
        steps = record(loader)
    assert_each_once([steps], range(40))
    assert_within_budget([steps], 100)
    assert loader.dataset is plain.dataset and loader.num_workers == num_workers and loader.batch_size is None
    assert type(plain) is DataLoader
    assert [batch["id"].tolist() for batch in plain] == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_apply_works_in_place(num_workers: int) -> None:
    plain = DataLoader(LengthsDataset(LENGTHS), batch_size=4, num_workers=num_workers, collate_fn=collate)
    with odb.apply(plain, token_budget=100) as handle:
        assert isinstance(plain, DataLoader)
        for _ in range(2):
            steps = record(plain)
            assert_each_once([steps], range(40))
            assert_within_budget([steps], 100)
        assert handle.stats().emitted_samples == 80
        with pytest.raises(TypeError, match="not known"):
            len(plain)


class CountingLoader(DataLoader):
    """A user's own kind of loader."""

    def greet(self) -> str:
        return "hello"


def test_apply_keeps_the_users_class() -> None:
    plain = CountingLoader(LengthsDataset(LENGTHS), collate_fn=collate)
    with odb.apply(plain, token_budget=100):
        assert isinstance(plain, CountingLoader) and plain.greet() == "hello"
        assert_each_once([record(plain)], range(40))


def test_the_batch_size_of_an_existing_loader_is_said_to_be_ignored_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="odb"):
        record(odb.wrap(DataLoader(LengthsDataset(LENGTHS), batch_size=4, collate_fn=collate), token_budget=100))
    assert len([line for line in caplog.messages if "batch_size" in line]) == 1


def test_without_a_collate_function_samples_are_padded() -> None:
    for plain in (DataLoader(LengthsDataset(LENGTHS)), DataLoader(LengthsDataset(LENGTHS), batch_size=None)):
        steps = record(odb.wrap(plain, token_budget=100))
        assert_each_once([steps], range(40))
        assert all(step.real_tokens == step.info.local_tokens for step in steps)


class EveryThird(Sampler):
    """A user's own batch sampler."""

    def __iter__(self) -> Any:
        yield from ([i, i + 3] for i in range(0, 36, 6))

    def __len__(self) -> int:
        return 6


def test_a_batch_sampler_is_flattened() -> None:
    expected = [i for pair in EveryThird() for i in pair]
    plain = DataLoader(LengthsDataset(LENGTHS), batch_sampler=EveryThird(), collate_fn=collate)
    assert_each_once([record(odb.wrap(plain, token_budget=100))], expected)
    assert_each_once([record(make(batch_sampler=EveryThird()))], expected)


def test_drop_last_of_an_existing_loader_is_kept() -> None:
    plain = DataLoader(LengthsDataset([10] * 11), batch_size=4, drop_last=True, collate_fn=collate)
    loader = odb.wrap(plain, token_budget=40, max_samples=4)
    assert [step.shape for step in record(loader)] == [(4, 10), (4, 10)]
    assert loader.stats().num_dropped == 3


def test_what_an_existing_loader_decides_is_not_taken_again() -> None:
    plain = DataLoader(LengthsDataset(LENGTHS), collate_fn=collate)
    with pytest.raises(ValueError, match=r"num_workers.*existing DataLoader"):
        odb.wrap(plain, token_budget=100, num_workers=3)


@pytest.mark.parametrize("entry", [odb.wrap, odb.apply])
def test_a_loader_is_not_batched_twice(entry: Any) -> None:
    with pytest.raises(ValueError, match="already"):
        entry(make(), token_budget=100)
    plain = DataLoader(LengthsDataset(LENGTHS), collate_fn=collate)
    with odb.apply(plain, token_budget=100), pytest.raises(ValueError, match="already"):
        entry(plain, token_budget=100)
    with pytest.raises(ValueError, match=r"needs a torch.utils.data.DataLoader, got list"):
        entry([1, 2], token_budget=100)


# ---- samplers


def test_a_users_sampler_is_this_ranks_share_and_draws_anew_each_epoch() -> None:
    generator = torch.Generator().manual_seed(3)
    dataset = LengthsDataset(LENGTHS)
    loader = make(sampler=RandomSampler(dataset, generator=generator), window=8)
    first, second = record(loader), record(loader)
    for steps in (first, second):
        assert_each_once([steps], range(40))
    assert [s.ids for s in first] != [s.ids for s in second]


def sampled(rank: int, world_size: int, kind: str, epochs: list[int], told: str) -> list[list[Seen]]:
    """Epochs with a `DistributedSampler`, whose epoch the loader is told, or the sampler by its user."""
    dataset = LengthsDataset(LENGTHS)
    sampler = DistributedSampler(dataset, shuffle=True, seed=5)
    plain = DataLoader(dataset, sampler=sampler, collate_fn=collate, num_workers=1)
    out = []
    make_loader = odb.wrap if kind == "wrap" else odb.apply
    with make_loader(plain, token_budget=100, sharding="static") as loader:
        for epoch in epochs:
            target = {"loader": loader, "loader.sampler": loader.sampler, "sampler": sampler}[told]
            target.set_epoch(epoch)
            out.append(record(loader))
    return out


@pytest.mark.parametrize("told", ["loader", "loader.sampler", "sampler"])
@pytest.mark.parametrize("kind", ["wrap", "apply"])
def test_a_distributed_sampler_keeps_its_seed_and_epoch(kind: str, told: str) -> None:
    dataset, epochs = LengthsDataset(LENGTHS), [4, 0, 4]
    per_rank = ranks.values(2, sampled, kind, epochs, told)
    for position in range(len(epochs)):
        steps = [out[position] for out in per_rank]
        assert_each_once(steps, range(40))
        assert_steps_aligned(steps)
    for rank, out in enumerate(per_rank):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=True, seed=5)
        for epoch, steps in zip(epochs, out, strict=True):
            sampler.set_epoch(epoch)
            assert {i for step in steps if not step.idle for i in step.ids} == set(sampler)


def plain_sampler(rank: int, world_size: int, kind: str) -> list[str]:
    """What is logged where every rank has a sampler over the whole dataset."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("odb")
    log.addHandler(handler)
    dataset = LengthsDataset(LENGTHS)
    order = {"random": RandomSampler(dataset), "sequential": SequentialSampler(dataset), "own": None}[kind]
    try:
        with odb.ODBDataLoader(dataset, token_budget=100, sampler=order, collate_fn=collate) as loader:
            for _ in range(2):
                record(loader)
    finally:
        log.removeHandler(handler)
    return [line for line in lines if "DistributedSampler" in line]


@pytest.mark.parametrize(("kind", "count"), [("random", 1), ("sequential", 1), ("own", 0)])
def test_a_sampler_over_the_whole_dataset_on_every_rank_is_warned_of_once(kind: str, count: int) -> None:
    assert [len(lines) for lines in ranks.values(2, plain_sampler, kind)] == [count, count]


def test_one_order_is_shared_without_duplicates_where_no_sampler_is_given() -> None:
    per_rank = ranks.values(3, shared_order)
    for epoch in range(2):
        assert_each_once([out[epoch] for out in per_rank], range(40))
    assert [s.ids for s in per_rank[0][0]] != [s.ids for s in per_rank[0][1]]


def shared_order(rank: int, world_size: int) -> list[list[Seen]]:
    with make(shuffle=True, seed=9) as loader:
        return [record(loader) for _ in range(2)]


def disagree(rank: int, world_size: int, name: str, options: list[dict[str, Any]]) -> None:
    if name == "dataset":
        record(odb.ODBDataLoader(LengthsDataset([5] * (10 + rank)), token_budget=10))
    record(make(**options[rank]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("token_budget", [{"token_budget": 100}, {"token_budget": 120}]),
        ("grad_accum_steps", [{}, {"grad_accum_steps": 2}]),
        ("seed", [{"shuffle": True}, {"shuffle": True, "seed": 3}]),
        ("dataset", [{}, {}]),
    ],
)
def test_ranks_that_disagree_are_told_on_what(name: str, options: list[dict[str, Any]]) -> None:
    named = "num_samples" if name == "dataset" else name
    for result in ranks.run_ranks(2, disagree, name, options, timeout=20):
        assert result.error is not None
        assert result.error.type_name == "DisagreementError", result.error.traceback
        assert named in result.error.text


def test_buffer_size_is_another_word_for_window() -> None:
    assert make(buffer_size=7).config.window == 7


def test_step_ids_say_which_views_they_are() -> None:
    loader = make(batch_sampler=BatchSampler(SequentialSampler(LENGTHS), 4, drop_last=False), window=8)
    identities = [i for step in record(loader) for i in step.info.sample_ids]
    assert sorted(identities) == list(range(40))
