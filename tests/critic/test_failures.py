"""Failures that every rank must learn of, whatever it does at that moment."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ranks

import odb
from odb.testing import LengthsDataset, collate, record

pytestmark = pytest.mark.timeout(60)


def draw_slowly_while_a_peer_fails(rank: int, world_size: int, num_workers: int) -> None:
    # Rank 1 draws for half a minute before its first window is full; rank 0 fails meanwhile.
    dataset = LengthsDataset([5] * 600, sleep=dict.fromkeys(range(1, 600, 2), 0.1), fail_at=[0])
    with odb.ODBDataLoader(dataset, token_budget=10**6, collate_fn=collate, num_workers=num_workers) as loader:
        record(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rank_that_draws_learns_of_a_peers_failure(num_workers: int) -> None:
    failed, drawing = ranks.run_ranks(2, draw_slowly_while_a_peer_fails, num_workers, timeout=50)
    assert failed.error is not None and "bad sample 0" in failed.error.text
    assert drawing.error is not None and drawing.error.type_name == "PeerFailedError"
    assert drawing.seconds < 15


class EndsItsWorker(LengthsDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 1:
            os._exit(3)
        return super().__getitem__(index)


def lose_a_worker_while_the_ranks_meet(rank: int, world_size: int) -> None:
    with odb.ODBDataLoader(EndsItsWorker([5] * 40), token_budget=64, collate_fn=collate, num_workers=1) as loader:
        record(loader)


def test_a_worker_that_dies_while_the_ranks_meet_ends_all_ranks_soon() -> None:
    peer, culprit = ranks.run_ranks(2, lose_a_worker_while_the_ranks_meet, timeout=25)
    assert culprit.error is not None and "exit code 3" in culprit.error.text
    assert peer.error is not None and "exit code 3" in peer.error.text
