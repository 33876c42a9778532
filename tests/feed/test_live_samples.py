"""The memory formula of docs/performance.md, with every live sample of the collate process counted."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

import odb
from odb.collators import PadCollator
from odb.feed.chunk import Row
from odb.feed.node import Node
from odb.feed.source import Order

pytestmark = pytest.mark.timeout(60)
WINDOW, PREFETCH, NUM_SAMPLES = 64, 8, 600


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(1 + index % 30)}


def num_live_rows() -> int:
    return sum(type(obj) is Row for obj in gc.get_objects())


def test_the_collate_process_holds_two_windows_and_what_is_in_the_hand() -> None:
    """Runs the collate process's node here, where its objects can be counted."""
    loader = odb.ODBDataLoader(
        Samples(), token_budget=256, window=WINDOW, num_workers=2, prefetch_factor=PREFETCH, collate_fn=PadCollator()
    )
    node = Node(loader._make_spec(forks=True), os.getpid(), use_signal=False, poll=lambda: None)
    chunk = node.spec.source.chunk
    bound = 2 * WINDOW + 3 * chunk
    try:
        most = num_emitted = 0
        for delivery in node.begin(Order(0, num_samples=NUM_SAMPLES), 0, lambda: False):
            num_emitted += delivery.info.local_samples
            del delivery
            most = max(most, num_live_rows())
        node.finish()
        assert num_emitted == NUM_SAMPLES
        assert WINDOW // 2 < most <= bound, (most, bound)
        assert num_live_rows() == 0
    finally:
        assert node.close(5.0)
