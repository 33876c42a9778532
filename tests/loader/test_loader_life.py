"""A loader's life: epochs, breaks, several at once, workers, kinds of batches, the end."""

from __future__ import annotations

import gc
import os
import pickle
import random
import sys
import threading
import time
import traceback
import weakref
from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import ranks
import torch
from scenarios import Spec, iterate, log_normal
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import odb
from odb.exchange.monitor import Monitor
from odb.testing import LengthsDataset, Seen, assert_each_once, assert_steps_aligned, collate, make_sample, record, seen

pytestmark = pytest.mark.timeout(120)

LENGTHS = log_normal(40, 12, 0.6, 2, 60, seed=8)
SPEC = Spec(LENGTHS, 100, options={"window": 16})


def children() -> list[int]:
    return ranks.children_of(os.getpid())


# ---- several loaders, several epochs


def train_and_evaluate(rank: int, world_size: int) -> tuple[list[list[Seen]], list[list[Seen]]]:
    """A training loader whose epoch is interrupted by whole passes over an evaluation loader."""
    trained, evaluated = [], []
    with SPEC.loader(rank, world_size) as train, SPEC.but(lengths=[7] * 9).loader(rank, world_size) as evaluation:
        for _ in range(2):
            steps = []
            for batch in train:
                steps.append(seen(batch))
                if len(steps) in (1, 2):
                    evaluated.append(record(evaluation))
            trained.append(steps)
    return trained, evaluated


@pytest.mark.parametrize("world_size", [1, 2])
def test_several_loaders_live_side_by_side(world_size: int) -> None:
    per_rank = ranks.values(world_size, train_and_evaluate)
    for epoch in range(2):
        assert_each_once([trained[epoch] for trained, _ in per_rank], range(40))
        assert_steps_aligned([trained[epoch] for trained, _ in per_rank])
    for number in range(4):
        assert_each_once([evaluated[number] for _, evaluated in per_rank], range(9))


def interleaved(rank: int, world_size: int) -> list[list[Seen]]:
    """Two loaders of one process consumed in turns."""
    with SPEC.loader(rank, world_size) as one, SPEC.but(options={"seed": 4}).loader(rank, world_size) as two:
        pairs = [(seen(a), seen(b)) for a, b in zip(one, two, strict=True)]
    return [list(side) for side in zip(*pairs, strict=True)]


def test_two_loaders_can_be_consumed_in_turns() -> None:
    per_rank = ranks.values(2, interleaved)
    for side in range(2):
        assert_each_once([out[side] for out in per_rank], range(40))


def second_iterator(rank: int, world_size: int) -> tuple[list[Seen], int]:
    with SPEC.loader(rank, world_size) as loader:
        first = iter(loader)
        next(first)
        whole = record(loader)
        return whole, len(list(first))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_second_iterator_ends_the_first(num_workers: int) -> None:
    per_rank = ranks.values(2, second_iterator)
    assert_each_once([whole for whole, _ in per_rank], range(40))
    assert [left for _, left in per_rank] == [0, 0]


def break_everywhere(rank: int, world_size: int, num_workers: int) -> list[list[Seen]]:
    """An epoch broken off after every possible number of steps, and what the next one gives."""
    out = []
    with SPEC.but(num_workers=num_workers).loader(rank, world_size) as loader:
        total = len(record(loader))
        for num_steps in range(total + 1):
            record(loader, num_steps)
            out.append(record(loader))
    return out


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_can_be_left_after_any_step(num_workers: int) -> None:
    per_rank = ranks.values(2, break_everywhere, num_workers)
    assert len({len(out) for out in per_rank}) == 1
    for steps in zip(*per_rank, strict=True):
        assert_each_once(steps, range(40))


def exception_in_the_loop(rank: int, world_size: int) -> list[Seen]:
    """The training loop raises; the next epoch works."""
    with SPEC.loader(rank, world_size) as loader:
        try:
            for number, _ in enumerate(loader):
                if number == 1:
                    raise RuntimeError("the loss is not finite")
        except RuntimeError:
            return record(loader)
    raise AssertionError("the loop did not raise")


def test_an_exception_in_the_training_loop_leaves_a_usable_loader() -> None:
    assert_each_once(ranks.values(2, exception_in_the_loop), range(40))


# ---- the end


def forget(rank: int, world_size: int, how: str) -> tuple[int, int, bool]:
    """Processes while an epoch is open, and after the loader is given up; whether the object is gone."""
    loader = SPEC.but(lengths=[10] * 4000, num_workers=2).loader(rank, world_size)
    batches = iter(loader)
    next(batches)
    during, alive = len(children()), weakref.ref(loader)
    if how == "close":
        loader.close()
        loader.close()
    elif how == "del":
        del loader, batches
    else:
        loader.myself = (loader, batches)  # type: ignore[attr-defined]
        del loader, batches
        gc.collect()
    ranks.wait_until(lambda: not children(), 5)
    return during, len(children()), alive() is None


@pytest.mark.parametrize("how", ["close", "del", "gc"])
def test_no_process_outlives_its_loader(how: str) -> None:
    for during, after, is_gone in ranks.values(2, forget, how):
        assert (during, after) == (3, 0)
        assert is_gone or how == "close"


def collect_in_own_thread(rank: int, world_size: int) -> tuple[list[str], bool]:
    """The loader is garbage that its own exchange's thread finds: what goes wrong unraised, and whether it closes."""
    gone_wrong: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: gone_wrong.append(repr(unraisable.exc_value))
    gc.disable()
    try:
        loader = SPEC.but(num_workers=0).loader(rank, world_size)
        record(loader)
        loader.myself = loader  # type: ignore[attr-defined]
        del loader
        monitor = next(thread for thread in threading.enumerate() if isinstance(thread, Monitor))
        monitor.submit(gc.collect, 10.0)
        closed = ranks.wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("odb-")], 10)
        return gone_wrong, closed
    finally:
        gc.enable()
        sys.unraisablehook = hook


def test_a_loader_may_be_collected_in_its_own_thread() -> None:
    assert ranks.values(2, collect_in_own_thread) == [([], True)] * 2


def test_the_exit_waits_for_a_loader_that_a_daemon_collects() -> None:
    code = """
import gc, threading, time
import odb.loader
from odb.feed import backend
from odb.testing import LengthsDataset, collate

begun = threading.Event()

class Slow(backend.InlineBackend):
    def close(self, failure=""):
        if not self._is_shut:
            super().close(failure)
            begun.set()
            time.sleep(1.0)
            print("closed", flush=True)

if __name__ == "__main__":
    odb.loader.InlineBackend = Slow
    loader = odb.ODBDataLoader(LengthsDataset([4] * 8), token_budget=8, collate_fn=collate)
    assert sum(1 for _ in loader) == 4
    gc.disable()
    loader.myself = loader
    del loader
    threading.Thread(target=gc.collect, daemon=True).start()
    assert begun.wait(20)
"""
    done = ranks.run_script(code, timeout=60.0)
    assert (done.returncode, "".join(done.stdout)) == (0, "closed\n"), done.output


def test_a_closed_loader_says_so() -> None:
    for num_workers in (0, 1):
        loader = SPEC.but(num_workers=num_workers).loader(0, 1)
        record(loader)
        loader.close()
        with pytest.raises(RuntimeError, match="closed"):
            iter(loader)


def close_one_side(rank: int, world_size: int) -> str:
    """Rank 0 closes its loader while rank 1 goes on."""
    with SPEC.but(lengths=[10] * 400, options={"max_steps_per_round": 4}).loader(rank, world_size) as loader:
        for number, _ in enumerate(loader):
            if rank == 0 and number == 2:
                break
    return "done"


def test_closing_on_one_rank_alone_ends_the_others_with_its_name() -> None:
    first, second = ranks.run_ranks(2, close_one_side, timeout=20)
    assert first.value == "done"
    assert second.error is not None
    assert "ExchangeError" in second.error.bases and second.error.ranks == (0,) and "rank 0" in second.error.text


def stats_add_up(rank: int, world_size: int) -> Any:
    with SPEC.loader(rank, world_size) as loader:
        steps = [record(loader), record(loader)]
        return steps, loader.stats(), loader.stats() + loader.stats()


def test_stats_count_what_was_handed_over() -> None:
    for epochs, stats, doubled in ranks.values(2, stats_add_up):
        steps = epochs[0] + epochs[1]
        real = [step for step in steps if not step.idle]
        assert stats.steps == len(steps)
        assert stats.idle_steps == len(steps) - len(real)
        assert stats.emitted_samples == sum(step.shape[0] for step in real)
        assert stats.real_tokens == sum(step.real_tokens for step in real)
        assert stats.padded_tokens == sum(step.padded_tokens for step in real)
        assert stats.padding == pytest.approx(1 - stats.real_tokens / stats.padded_tokens)
        assert stats.wait_s > 0 and stats.rounds >= 2
        assert doubled.steps == 2 * stats.steps
        assert pickle.loads(pickle.dumps(stats.as_dict()))["steps"] == stats.steps


# ---- workers


class AsksItsWorker(Dataset):
    """Samples that tell which worker made them, and what `worker_init_fn` left there."""

    def __init__(self) -> None:
        self.mark = -1

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        worker, count = (-1, 0) if info is None else (info.id, info.num_workers)
        return make_sample(index, 5) | {"worker": worker, "count": count, "mark": self.mark, "pid": os.getpid()}


def mark_dataset(worker_id: int) -> None:
    get_worker_info().dataset.mark = 100 + worker_id


def ask_workers(rank: int, world_size: int, num_workers: int) -> list[tuple[int, int, int]]:
    out = []
    init = mark_dataset if num_workers else None
    with odb.ODBDataLoader(AsksItsWorker(), token_budget=20, num_workers=num_workers, worker_init_fn=init) as loader:
        for batch in loader:
            assert (os.getpid() in batch["pid"].tolist()) == (num_workers == 0)
            out += zip(batch["worker"].tolist(), batch["count"].tolist(), batch["mark"].tolist(), strict=True)
    return out


def test_worker_init_fn_and_worker_info_are_pytorchs_own() -> None:
    (asked,) = ranks.values(1, ask_workers, 2)
    assert set(asked) == {(0, 2, 100), (1, 2, 101)}
    assert set(ask_workers(0, 1, 0)) == {(-1, 0, -1)}


class Draws(Dataset):
    """Samples with a random number of their worker's."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return make_sample(index, 5) | {"drawn": torch.rand(()).item()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_generator_seeds_the_workers(num_workers: int) -> None:
    def run(seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"num_workers": num_workers, "generator": generator}
        with odb.ODBDataLoader(Draws(), token_budget=20, **options) as loader:
            return [x for batch in loader for x in batch["drawn"].tolist()]

    if num_workers:
        assert run(1) == run(1) != run(2)
    else:  # in this process, the user's own random state rules, as in PyTorch
        torch.manual_seed(1)
        first = run(1)
        torch.manual_seed(1)
        assert run(1) == first


def test_iterating_leaves_the_callers_random_state_alone() -> None:
    def numbers(num_workers: int) -> tuple[float, float]:
        torch.manual_seed(5)
        random.seed(5)
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "shuffle": True, "num_workers": num_workers}
        with odb.ODBDataLoader(LengthsDataset(LENGTHS), token_budget=100, **options) as loader:
            list(loader)
        return torch.rand(()).item(), random.random()

    torch.manual_seed(5)
    random.seed(5)
    untouched = torch.rand(()).item(), random.random()
    assert numbers(0) == numbers(1) == untouched


class Stuck(LengthsDataset):
    """Sample 5 takes for ever."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            time.sleep(1000)
        return super().__getitem__(index)


def stuck(rank: int, world_size: int) -> None:
    options: dict[str, Any] = {"token_budget": 10, "num_workers": 1, "timeout": 1, "sharding": "static"}
    with odb.ODBDataLoader(Stuck([10] * 12), collate_fn=collate, **options) as loader:
        record(loader)


def test_timeout_is_pytorchs_limit_for_a_worker() -> None:
    first, second = ranks.run_ranks(2, stuck, timeout=20)
    assert second.error is not None and "timed out after 1" in second.error.text
    assert first.error is not None and first.error.ranks == (1,) and "timed out" in first.error.text


class TakesChunks(LengthsDataset):
    """A dataset that reads several samples at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] | {"together": len(indices)} for i in indices]


def test_a_datasets_own_getitems_is_used() -> None:
    with odb.ODBDataLoader(TakesChunks([10] * 64), token_budget=640, num_workers=1) as loader:
        together = [n for batch in loader for n in batch["together"].tolist()]
    assert len(together) == 64 and max(together) > 1


def test_prefetch_factor_counts_samples_and_changes_nothing() -> None:
    runs = []
    for prefetch in (1, 3, None):
        spec = SPEC.but(options={"prefetch_factor": prefetch}, num_workers=2)
        runs.append([step.ids for step in iterate(0, 1, spec).steps])
    assert runs[0] == runs[1] == runs[2]


# ---- kinds of batches


@dataclass
class Fields:
    id: torch.Tensor
    input_ids: torch.Tensor


class Named(NamedTuple):
    id: torch.Tensor
    input_ids: torch.Tensor


class BatchOfEncodings(UserDict):
    """Dict-like, with attribute access, as tokenizers return."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data = state["data"]


def as_dataclass(samples: list[Any]) -> Fields:
    batch = collate(samples)
    return Fields(batch["id"], batch["input_ids"])


def as_named_tuple(samples: list[Any]) -> Named:
    batch = collate(samples)
    return Named(batch["id"], batch["input_ids"])


def as_tuple(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = collate(samples)
    return batch["id"], batch["input_ids"]


def as_tensor(samples: list[Any]) -> torch.Tensor:
    return collate(samples)["id"]


def as_dict_like(samples: list[Any]) -> BatchOfEncodings:
    return BatchOfEncodings(collate(samples))


def with_other_values(samples: list[Any]) -> dict[str, Any]:
    return collate(samples) | {"names": [str(s["id"]) for s in samples], "flag": True, "meta": {"a": [1, "b", None]}}


def ids_of(batch: Any) -> list[int]:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, (dict, UserDict)):
        return batch["id"].tolist()
    return (batch[0] if isinstance(batch, tuple) else batch.id).tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("collate_fn", "kind"),
    [
        (collate, dict),
        (as_dict_like, BatchOfEncodings),
        (as_dataclass, Fields),
        (as_named_tuple, Named),
        (as_tuple, tuple),
        (as_tensor, torch.Tensor),
    ],
)
def test_steps_give_batches_of_any_kind_with_their_info(collate_fn: Any, kind: type, num_workers: int) -> None:
    with SPEC.but(num_workers=num_workers, options={"collate_fn": collate_fn}).loader(0, 1) as loader:
        pairs = list(loader.steps())
    assert sorted(i for batch, _ in pairs for i in ids_of(batch)) == list(range(40))
    for batch, info in pairs:
        assert type(batch) is kind
        assert isinstance(info, odb.ODBStepInfo) and info.local_samples == len(ids_of(batch))
        assert not isinstance(batch, (dict, UserDict)) or set(batch) == {"id", "input_ids", "labels", "attention_mask"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_plain_iteration_gives_what_the_collate_function_made(num_workers: int) -> None:
    for collate_fn, kind in ((as_tuple, tuple), (as_tensor, torch.Tensor), (as_dataclass, Fields)):
        with SPEC.but(num_workers=num_workers, options={"collate_fn": collate_fn}).loader(0, 1) as loader:
            batches = list(loader)
        assert {type(batch) for batch in batches} == {kind}
        with pytest.raises(ValueError, match=r"loader\.steps\(\)"):
            odb.pop_step_info(batches[0])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dict_like_batch_carries_its_info(num_workers: int) -> None:
    with SPEC.but(num_workers=num_workers, options={"collate_fn": as_dict_like}).loader(0, 1) as loader:
        for batch in loader:
            assert isinstance(batch, BatchOfEncodings)
            info = odb.pop_step_info(batch)
            assert info.local_samples == len(batch.id)
            assert set(batch) == {"id", "input_ids", "labels", "attention_mask"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_values_that_are_no_tensors_arrive_unchanged(num_workers: int) -> None:
    with SPEC.but(num_workers=num_workers, options={"collate_fn": with_other_values}).loader(0, 1) as loader:
        for batch in loader:
            assert batch["names"] == [str(i) for i in batch["id"].tolist()]
            assert batch["flag"] is True
            assert batch["meta"] == {"a": [1, "b", None]}


def failing_collate(samples: list[Any]) -> Any:
    raise KeyError("pixel_values")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_collate_function_comes_with_its_traceback(num_workers: int) -> None:
    spec = SPEC.but(num_workers=num_workers, options={"collate_fn": failing_collate})
    with pytest.raises(KeyError, match="pixel_values") as caught:
        iterate(0, 1, spec)
    shown = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "in failing_collate" in shown


class UnpicklableError(Exception):
    """An exception of the kind that does not survive the way between processes."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"needs {one} and {two}")


class RaisesUnpicklable(LengthsDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise UnpicklableError(1, 2)
        return super().__getitem__(index)


def test_an_exception_that_cannot_travel_still_arrives_in_words() -> None:
    with (
        odb.ODBDataLoader(RaisesUnpicklable([10] * 8), token_budget=10, num_workers=1, collate_fn=collate) as loader,
        pytest.raises(Exception, match=r"UnpicklableError(?s:.*)needs 1 and 2"),
    ):
        record(loader)


class Infinite(IterableDataset):
    """A stream without an end."""

    def __iter__(self) -> Any:
        number = 0
        while True:
            yield make_sample(number, 10)
            number += 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_endless_stream_can_be_left(num_workers: int) -> None:
    with odb.ODBDataLoader(Infinite(), token_budget=40, num_workers=num_workers, collate_fn=collate) as loader:
        for _ in range(2):
            assert len(record(loader, num_steps=5)) == 5


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_endless_stream_ends_at_its_quota(num_workers: int) -> None:
    options: dict[str, Any] = {"join": False, "sample_quota": 100, "num_workers": num_workers}
    with odb.ODBDataLoader(Infinite(), token_budget=40, collate_fn=collate, **options) as loader:
        assert sum(step.shape[0] for step in record(loader)) == 100


def many_epochs(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Open files and processes after each of eight epochs."""
    out = []
    with SPEC.but(num_workers=2).loader(rank, world_size) as loader:
        for _ in range(8):
            record(loader)
            out.append((len(os.listdir("/proc/self/fd")), len(children())))
    return out


def test_epochs_leave_no_files_or_processes() -> None:
    for counts in ranks.values(2, many_epochs):
        assert len(set(counts[1:])) == 1, counts
