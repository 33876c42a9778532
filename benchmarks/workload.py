"""Cheap samples of random length: what is measured is the loader, not the dataset."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import torch
from torch.utils.data import Dataset


class CheapSamples(Dataset[Any]):
    """`num_samples` samples of three int64 tensors; lengths lognormal (mean 600, CV 0.5), clipped to 50..2000."""

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        draw = random.Random(seed)
        sigma = math.sqrt(math.log(1 + 0.5**2))
        mu = math.log(600) - sigma * sigma / 2
        self.lengths = [min(2000, max(50, int(draw.lognormvariate(mu, sigma)))) for _ in range(num_samples)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(self.lengths[index])
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


class SlowSamples(CheapSamples):
    """The same samples, each of which takes `seconds` to make (waiting: a disk, a network, another core)."""

    def __init__(self, num_samples: int, seconds: float, seed: int = 0) -> None:
        super().__init__(num_samples, seed)
        self.seconds = seconds

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        return super().__getitem__(index)

    def num_for(self, num_tokens: int) -> int:
        """Samples, in order, that hold `num_tokens`."""
        total = 0
        for number, length in enumerate(self.lengths, 1):
            total += length
            if total >= num_tokens:
                return number
        return len(self.lengths)


PAD = {"input_ids": 0, "labels": -100, "attention_mask": 0}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads to the longest sample of the batch; the same function for every loader that is compared."""
    return {
        key: torch.nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=fill)
        for key, fill in PAD.items()
    }


def rows(batch: Any) -> int:
    """Samples of a batch."""
    return int(batch["input_ids"].shape[0])
