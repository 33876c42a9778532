"""Loaders whose surroundings change: another default group, a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import ranks
import torch.distributed as dist

import odb
from odb.testing import LengthsDataset, collate, record

pytestmark = pytest.mark.timeout(60)


def make(num_workers: int) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(LengthsDataset([5] * 101), token_budget=20, collate_fn=collate, num_workers=num_workers)


def epoch_before_and_after_the_group_goes(rank: int, world_size: int, num_workers: int) -> list[tuple[int, int]]:
    with make(num_workers) as loader:
        found = [record(loader)]
        dist.destroy_process_group()
        found.append(record(loader))
        return [(len(steps), sum(len(step.ids) for step in steps if not step.idle)) for steps in found]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_next_epoch_is_for_the_ranks_that_there_are_then(num_workers: int) -> None:
    results = ranks.values(2, epoch_before_and_after_the_group_goes, num_workers)
    ranks._worlds.discard(2)  # its default group is gone
    (first, alone), (second, alone_too) = results
    assert first[0] == second[0] and first[1] + second[1] == 101
    assert alone == alone_too == (26, 101)


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns or raises in a forked child."""
    out, into = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(into, text.encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


def fork_in_an_epoch(rank: int, world_size: int, num_workers: int) -> tuple[str, int]:
    with make(num_workers) as loader:
        steps = iter(loader)
        next(steps)
        return in_child(lambda: str(len(list(steps)))), len(list(steps))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_forked_child_can_not_continue_its_parents_epoch(num_workers: int) -> None:
    for said, num_left in ranks.values(2, fork_in_an_epoch, num_workers):
        assert said.startswith("RuntimeError: this epoch was begun in process") and "iter(loader)" in said
        assert num_left == 12
