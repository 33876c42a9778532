"""Epochs that must not end early, silently, or never."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks

import odb
from odb.errors import ConfigError, MeasureError, ProcessDied, SampleError
from odb.testing import IterableLengthsDataset, LengthsDataset, collate, record

pytestmark = pytest.mark.timeout(60)


class Stops(LengthsDataset):
    """Raises StopIteration, as a bare `next()` in user code does."""

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index == 7:
            raise StopIteration
        return super().__getitem__(index)


class StopsInChunks(Stops):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 7 in indices:
            raise StopIteration
        return [super(Stops, self).__getitem__(i) for i in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Stops, StopsInChunks])
def test_stop_iteration_in_the_dataset_is_an_error_and_no_end(kind: type[LengthsDataset], num_workers: int) -> None:
    with (
        odb.ODBDataLoader(kind([5] * 40), token_budget=64, collate_fn=collate, num_workers=num_workers) as loader,
        pytest.raises(RuntimeError, match="StopIteration"),
    ):
        record(loader)


@pytest.mark.parametrize(
    "data, options",
    [
        ({"none_at": range(6)}, {"on_empty": "skip"}),
        ({"fail_at": range(6)}, {"on_sample_error": "skip"}),
        ({}, {"on_oversize": "skip", "token_budget": 4}),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_quota_that_no_sample_can_fill_is_an_error(
    data: dict[str, Any], options: dict[str, Any], num_workers: int
) -> None:
    options = {"token_budget": 64, "join": False, "sample_quota": 10, "num_workers": num_workers} | options
    loader = odb.ODBDataLoader(LengthsDataset([5] * 6, **data), collate_fn=collate, **options)
    with loader, pytest.raises(MeasureError, match=r"sample_quota=10 can't be reached"):
        record(loader)


class RebuiltByMessageError(Exception):
    """PyTorch rebuilds what has a `message` by that keyword, which this one does not take."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.message = f"code {code}"

    message = "no code"


def stop() -> None:
    next(iter(()))


def time_out() -> None:
    raise TimeoutError("the socket timed out")


def raise_by_message() -> None:
    raise RebuiltByMessageError(404)


def raise_local() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("of a class that nobody can import")


DEEDS: list[tuple[Callable[[], None], type[Exception], str]] = [
    (stop, RuntimeError, "StopIteration"),
    (time_out, TimeoutError, "the socket timed out"),
    (raise_by_message, SampleError, "RebuiltByMessageError: 404"),
    (raise_local, SampleError, "LocalError: of a class that nobody can import"),
]


class Does(LengthsDataset):
    """Does something in place of its sample 7."""

    def __init__(self, deed: Callable[[], None]) -> None:
        super().__init__([5] * 40)
        self.deed = deed

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index == 7:
            self.deed()
        return super().__getitem__(index)


class DoesInStream(IterableLengthsDataset):
    def __init__(self, deed: Callable[[], None]) -> None:
        super().__init__([5] * 40)
        self.deed = deed

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(super().__iter__(), 7)
        self.deed()


@pytest.mark.parametrize("where", [Does, DoesInStream, "worker_init_fn"])
@pytest.mark.parametrize(("deed", "kind", "words"), DEEDS)
def test_whatever_a_worker_raises_arrives(
    where: Any, deed: Callable[[], None], kind: type[Exception], words: str
) -> None:
    dataset = LengthsDataset([5] * 40) if where == "worker_init_fn" else where(deed)
    init = (lambda _: deed()) if where == "worker_init_fn" else None
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "worker_init_fn": init}
    with (
        odb.ODBDataLoader(dataset, token_budget=64, collate_fn=collate, **options) as loader,
        pytest.raises(kind, match=rf"(?s){words}"),
    ):
        record(loader)


@pytest.mark.parametrize(
    ("leave", "kind", "words"),
    [(lambda: sys.exit(0), SampleError, "SystemExit: 0"), (lambda: os._exit(0), ProcessDied, "exit code 0")],
)
@pytest.mark.parametrize("collate_workers", [0, 1])
def test_a_collate_fn_that_exits_does_not_end_the_program_as_if_all_were_well(
    leave: Callable[[], None], kind: type[Exception], words: str, collate_workers: int
) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "collate_workers": collate_workers}
    expected = (kind, words) if not collate_workers else (ProcessDied, "exit code 0")
    with (
        odb.ODBDataLoader(LengthsDataset([5] * 40), token_budget=64, collate_fn=lambda _: leave(), **options) as loader,
        pytest.raises(expected[0], match=expected[1]),
    ):
        record(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_that_broke_does_not_look_like_one_that_is_over(num_workers: int) -> None:
    with odb.ODBDataLoader(Does(time_out), token_budget=5, collate_fn=collate, num_workers=num_workers) as loader:
        batches = iter(loader)
        for _ in range(50):
            try:
                next(batches)
            except TimeoutError:
                break
        for again in (batches, batches, loader):
            with pytest.raises(TimeoutError, match="the socket timed out"):
                next(iter(again))


class Sleeps(LengthsDataset):
    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index:
            time.sleep(30)
        return super().__getitem__(index)


def alarmed(rank: int, world_size: int, kind: type[BaseException]) -> float:
    """How long a batch is waited for whose user has set an alarm of half a second."""

    def handler(*_: Any) -> None:
        raise kind("of the user's own watch")

    signal.signal(signal.SIGALRM, handler)
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 1, "sampler": [0, 1, 2], "collate_fn": collate}
    with odb.ODBDataLoader(Sleeps([5] * 3), token_budget=5, window=1, **options) as loader:
        batches = iter(loader)
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(kind, match="of the user's own watch"):
            for _ in batches:
                pass
        seconds = time.monotonic() - began
        with pytest.raises((kind, RuntimeError)):
            next(batches)
    return seconds


@pytest.mark.parametrize("kind", [TimeoutError, KeyboardInterrupt])
def test_an_alarm_of_the_users_own_ends_the_wait_for_a_batch(kind: type[BaseException]) -> None:
    assert ranks.values(1, alarmed, kind, timeout=25)[0] < 5


class Endless:
    """Has a length all the same, for progress bars."""

    def __init__(self, is_batched: bool) -> None:
        self.is_batched = is_batched

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle([[0, 1], [2, 3]] if self.is_batched else range(4))


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_an_endless_sampler_with_a_length_needs_a_quota(kind: str) -> None:
    options: dict[str, Any] = {kind: Endless(kind == "batch_sampler"), "token_budget": 5, "collate_fn": collate}
    dataset = LengthsDataset([5] * 4)
    with (
        odb.ODBDataLoader(dataset, **options) as loader,
        pytest.raises(ConfigError, match=r"says that it has 4 .*quota"),
    ):
        iter(loader)
    with odb.ODBDataLoader(dataset, **options, join=False, sample_quota=10, window=4) as loader:
        assert sum(len(step.ids) for step in record(loader)) == 10


def test_a_sampler_longer_than_it_says_is_used_whole() -> None:
    class Modest(list[int]):
        def __len__(self) -> int:
            return 2

    with odb.ODBDataLoader(
        LengthsDataset([5] * 4), token_budget=5, sampler=Modest([0, 1, 2, 3]), collate_fn=collate
    ) as loader:
        assert len(record(loader)) == 4


def test_an_order_without_end_has_nothing_left_over() -> None:
    """What a quota leaves of a further pass is not dropped: nobody asked for it."""
    for result in ranks.values(2, dropped_at_quota):
        assert result <= 8


def dropped_at_quota(rank: int, world_size: int) -> int:
    options: dict[str, Any] = {"join": False, "sample_quota": 10, "window": 8, "collate_fn": collate}
    with odb.ODBDataLoader(LengthsDataset([5] * 20), token_budget=5, **options) as loader:
        record(loader)
        return sum(loader.stats().dropped.values())


# ---- said in the log


def test_an_iterator_as_sampler_is_used_up_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with odb.ODBDataLoader(
        LengthsDataset([5] * 4), token_budget=5, sampler=iter(range(4)), collate_fn=collate
    ) as loader:
        assert [len(record(loader)), len(caplog.messages), len(record(loader))] == [4, 0, 0]
    assert "gave no index for epoch 1 and 4 before" in caplog.text


def test_a_stream_that_ends_before_the_quota_says_so(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"join": False, "collate_fn": collate, "token_budget": 5}
    for quota in (5, 100):
        with odb.ODBDataLoader(IterableLengthsDataset([5] * 7), sample_quota=quota, **options) as loader:
            record(loader)
    assert [line for line in caplog.messages if "quota" in line] == [
        "epoch 0 ended after 7 samples, before sample_quota=100: a stream has no more"
    ]


def test_the_first_sample_of_an_epoch_that_is_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    dataset = LengthsDataset([5] * 9, fail_at=(2, 5), none_at=(7,))
    with odb.ODBDataLoader(
        dataset, token_budget=5, collate_fn=collate, on_sample_error="skip", on_empty="skip"
    ) as loader:
        assert len(record(loader)) == 6
    told = [line for line in caplog.messages if "left out" in line]
    assert len(told) == 2 and "index 2: ValueError: bad sample 2" in told[0] and "None for index 7" in told[1]


@pytest.mark.parametrize(("given", "is_told"), [({}, True), ({"dp_rank": 0, "dp_world_size": 1}, False)])
def test_a_rank_without_its_default_group_says_that_it_reads_everything(
    given: dict[str, Any], is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        caplog.at_level(logging.WARNING, logger="odb"),
        odb.ODBDataLoader(LengthsDataset([5] * 4), token_budget=5, collate_fn=collate, **given) as loader,
    ):
        record(loader)
    assert ("torch.distributed is not initialised" in caplog.text) == is_told
