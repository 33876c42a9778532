"""Samples that reach `collate_fn` more than once (fillers, the warm-up probe) are copies: collators change what they get."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

import odb
from odb.collators import FlattenCollator, PadCollator

pytestmark = pytest.mark.timeout(60)


class Numbered(torch.utils.data.Dataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(4) + index
        return {"input_ids": ids, "labels": ids.clone(), "note": [index]}


def greedy_collate(samples: list[Any], inner: Any = None) -> Any:
    """Takes a key out of each sample, and writes into what it leaves there."""
    notes = [sample.pop("note") for sample in samples]
    for note in notes:
        note.append("seen")
    batch = (inner or PadCollator())(samples)
    for sample in samples:
        sample["input_ids"].add_(1000)
    return {**batch, "notes": notes}


def batches_of_uneven_ranks(rank: int, world_size: int) -> list[tuple[bool, list[int], list[Any]]]:
    loader = odb.ODBDataLoader(
        Numbered(12 if rank == 0 else 3),
        sampler=range(12 if rank == 0 else 3),
        token_budget=4,
        num_workers=0,
        collate_fn=greedy_collate,
        timeout_s=20,
    )
    return [(info.idle, batch["input_ids"][0].tolist(), batch["notes"]) for batch, info in loader.steps()]


def test_fillers_stay_what_they_were() -> None:
    long, short = ranks.values(2, batches_of_uneven_ranks)
    assert len(long) == len(short) == 12
    fillers = [(ids, notes) for idle, ids, notes in short if idle]
    assert len(fillers) == 9
    for ids, notes in fillers:
        assert ids == [ids[0] + k for k in range(4)] and ids[0] < 3 and notes == [[ids[0], "seen"]]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_probe_leaves_the_first_batch_as_it_is(layout: str) -> None:
    inner = FlattenCollator() if layout == "packed" else PadCollator()
    loader = odb.ODBDataLoader(
        Numbered(20),
        token_budget=16,
        layout=layout,
        num_workers=0,
        warmup_probe=True,
        collate_fn=lambda samples: greedy_collate(samples, inner),
    )
    seen = [number for batch, info in loader.steps() if info.step >= 0 for (number, _) in batch["notes"]]
    assert sorted(seen) == list(range(20))
