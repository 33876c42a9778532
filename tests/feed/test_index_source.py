"""How the inner loader's tasks are cut: every key once, in order, small ones first, workers with equal amounts."""

from __future__ import annotations

import pytest

from odb.feed.source import IndexSource, Order


def chunks(num_keys: int, num_workers: int, head: tuple[int, ...] = (), cursor: int = 0) -> list[list[int]]:
    source = IndexSource(32, num_workers)
    source.order = Order(epoch=0, num_samples=num_keys, head=head, cursor=cursor)
    return [[identity for _, identity, _ in chunk] for chunk in source]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("num_keys", [0, 1, 2, 5, 40, 63, 64, 65, 100, 1600, 5000])
def test_every_key_once_and_no_worker_is_left_with_more(num_keys: int, num_workers: int) -> None:
    got = chunks(num_keys, num_workers)
    assert [i for chunk in got for i in chunk] == list(range(num_keys))
    sizes = list(map(len, got))
    assert max(sizes, default=0) <= 32 and all(size <= 2 for size in sizes[: 4 * num_workers])
    loads = [sum(sizes[worker::num_workers]) for worker in range(num_workers)]
    assert max(loads) - min(loads) <= num_workers


def test_resumed_epochs_count_what_is_left() -> None:
    got = chunks(1000, 2, head=(3, 7), cursor=990)
    assert [i for chunk in got for i in chunk] == [3, 7, *range(990, 1000)]
    assert [len(chunk) for chunk in got] == [2, 2, 2, 2, 2, 2]


def test_elastic_grants_are_shared_out_too() -> None:
    source = IndexSource(32, 2)
    source.order = Order(epoch=0, num_samples=1000, is_elastic=True)
    source.granted.start((range(10),), 0, is_complete=False)
    tasks = iter(source)
    assert [len(next(tasks)) for _ in range(6)] == [2, 2, 2, 2, 1, 1]
    assert next(tasks) == []
    source.granted.add(range(10, 16), is_complete=True)
    assert [len(chunk) for chunk in tasks] == [2, 2, 1, 1]
