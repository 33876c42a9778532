"""A rank that is slow in one round holds nobody up before the steps that were agreed on are used up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

import odb
from odb.collators import PadCollator

pytestmark = pytest.mark.timeout(60)

BUDGET, LENGTH, WINDOW = 40, 10, 16  # four samples a group, four groups a window, of which half leave
SLOW, FLAG_AFTER = 64, 12


class OneSlow(torch.utils.data.Dataset[Any]):
    """Rank 1 gets one of its samples only when rank 0 has been handed `FLAG_AFTER` steps."""

    def __init__(self, flag: Path, rank: int) -> None:
        self.flag = flag
        self.rank = rank

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.rank == 1 and index == 2 * SLOW + 1:
            while not self.flag.exists():
                time.sleep(0.01)
        return {"input_ids": torch.full((LENGTH,), index)}


def steps_with_a_slow_peer(rank: int, world_size: int, folder: str, num_workers: int) -> int:
    """Steps of an epoch; rank 0 raises the flag on its way, which no timeout would do for it."""
    flag = Path(folder) / f"flag-{num_workers}"
    loader = odb.ODBDataLoader(
        OneSlow(flag, rank),
        token_budget=BUDGET,
        window=WINDOW,
        sharding="static",
        num_workers=num_workers,
        prefetch_factor=8,
        timeout_s=20,
        collate_fn=PadCollator(),
    )
    num = 0
    for num, _ in enumerate(loader, 1):
        if rank == 0 and num == FLAG_AFTER:
            flag.touch()
    return num


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_others_get_what_was_planned_before_the_slow_sample(num_workers: int, tmp_path: Path) -> None:
    # A window holds 16 samples, of which 8 leave: before the 64th of its rank is needed, at least 48 have left on each
    # rank, which are 12 steps of 4.
    assert ranks.values(2, steps_with_a_slow_peer, str(tmp_path), num_workers) == [50, 50]
