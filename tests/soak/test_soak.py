"""A long run: a million samples through four real ranks; every one arrives once, and nothing grows.

`ODB_SOAK_SAMPLES=50000` makes it shorter.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import odb

NUM_SAMPLES = int(os.environ.get("ODB_SOAK_SAMPLES", "1000000"))
NUM_EPOCHS = 10  # the first is the start-up; what an epoch leaves behind adds up over the others
NUM_LOOKS = 100
MIB = 1 << 20


class Cheap(Dataset[Any]):
    """Samples of 4 to 67 tokens that cost next to nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = np.full(4 + index * 2654435761 % 64, index % 97, np.int64)
        return {"id": index, "input_ids": ids, "labels": ids}


def ids_and_padding(samples: list[dict[str, Any]]) -> dict[str, Any]:
    width = max(len(sample["input_ids"]) for sample in samples)
    padded = np.zeros((len(samples), width), np.int64)
    for row, sample in zip(padded, samples, strict=True):
        row[: len(sample["input_ids"])] = sample["input_ids"]
    return {"id": np.array([sample["id"] for sample in samples]), "input_ids": torch.from_numpy(padded)}


@dataclass
class Look:
    """What a rank's processes hold at one moment; the entries of a dictionary are one for each of them."""

    done: float  # share of all samples
    resident: dict[str, int] = field(default_factory=dict)  # bytes
    threads: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    shm: int = 0


def look(done: float) -> Look:
    here = psutil.Process()
    (collate,) = map(psutil.Process, ranks.children_of(here.pid, recursive=False))
    roles = {"training": here, "collate": collate}
    roles |= {f"worker {i}": child for i, child in enumerate(sorted(collate.children(), key=lambda p: p.pid))}
    seen = Look(done, shm=len(ranks.shm_files()))
    for role, process in roles.items():
        seen.resident[role] = process.memory_info().rss
        seen.threads[role] = process.num_threads()
        seen.files[role] = process.num_fds()
    return seen


def run(rank: int, world_size: int, num_samples: int) -> tuple[list[Look], list[int], int, float]:
    """Looks taken, how often samples arrived (once, twice, ...), number of steps and seconds."""
    per_epoch = num_samples // NUM_EPOCHS
    counts = torch.ones(NUM_EPOCHS, per_epoch, dtype=torch.int32)  # in memory from the start
    looks: list[Look] = []
    num_steps, num_seen, start = 0, 0, time.monotonic()
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "collate_workers": 0, "shuffle": True}
    with odb.ODBDataLoader(Cheap(per_epoch), token_budget=1024, collate_fn=ids_and_padding, **options) as loader:
        for epoch in range(NUM_EPOCHS):
            for batch in loader:
                info = odb.pop_step_info(batch)
                num_steps += 1
                num_seen += info.all_samples_this_step
                if not info.idle:
                    np.add.at(counts[epoch].numpy(), batch["id"], 1)
                if num_seen * NUM_LOOKS >= (len(looks) + 1) * num_samples and num_seen % per_epoch:
                    looks.append(look(num_seen / num_samples))
        assert sum(loader.stats().rejected.values()) == 0
    seconds = time.monotonic() - start
    counts -= 1
    dist.all_reduce(counts)
    return looks, torch.bincount(counts.flatten()).tolist(), num_steps, seconds


def middle(looks: list[Look], name: str, role: str) -> float:
    return float(np.median([getattr(one, name)[role] for one in looks]))


def assert_flat(rank: int, looks: list[Look]) -> dict[str, str]:
    """Nothing grows after the first tenth: the last tenth against the second. Returns each tenth's memory, in words."""
    early = [one for one in looks if 0.1 <= one.done < 0.2]
    late = [one for one in looks if one.done >= 0.9]
    memory = {}
    for role in early[0].resident:
        before, after = middle(early, "resident", role), middle(late, "resident", role)
        tenths = [[one for one in looks if k <= 10 * one.done < k + 1] for k in range(1, 10)]
        memory[role] = " ".join(f"{middle(some, 'resident', role) / MIB:.1f}" for some in tenths) + " MiB"
        assert after <= 1.02 * before + 4 * MIB, f"rank {rank}, {role}: {memory[role]}"
        for name in ("threads", "files"):
            most = max(getattr(one, name)[role] for one in early)
            now = middle(late, name, role)
            assert now <= most, f"rank {rank}, {role}: {name} grew from {most} to {now}"
    assert max(one.shm for one in late) <= max(one.shm for one in early)
    return memory


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_samples_through_four_ranks_arrive_once_and_nothing_grows() -> None:
    results = ranks.values(4, run, NUM_SAMPLES, timeout=7000)
    for _, arrivals, num_steps, _ in results:
        assert arrivals == [0, NUM_SAMPLES // NUM_EPOCHS * NUM_EPOCHS], "samples that came not once"
        assert num_steps == results[0][2]
    memory = {rank: assert_flat(rank, looks) for rank, (looks, *_) in enumerate(results)}
    print(f"\n{NUM_SAMPLES:,} samples, {results[0][2]:,} steps on each of 4 ranks, {results[0][3]:.0f} s")
    for rank, roles in memory.items():
        print(f"rank {rank}: {roles}")
