"""Cheap samples of random length: what is measured is the loader, not the dataset."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset


class CheapSamples(Dataset[Any]):
    """Samples of three int64 tensors; lengths lognormal (CV 0.5), clipped to mean / 12 and mean * 10 / 3."""

    def __init__(self, num_samples: int, seed: int = 0, mean: int = 600) -> None:
        draw = random.Random(seed)
        sigma = math.sqrt(math.log(1 + 0.5**2))
        mu = math.log(mean) - sigma * sigma / 2
        lengths = (int(draw.lognormvariate(mu, sigma)) for _ in range(num_samples))
        self.lengths = [min(mean * 10 // 3, max(mean // 12, length)) for length in lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(self.lengths[index])
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


class Lists(CheapSamples):
    """The same as lists of Python integers, as tokenizers give them."""

    def __getitem__(self, index: int) -> Any:
        return {key: value.tolist() for key, value in super().__getitem__(index).items()}


class Embedded(CheapSamples):
    """Token ids, and 64 bfloat16 features per token, names and nested settings beside them."""

    def __getitem__(self, index: int) -> Any:
        sample: dict[str, Any] = dict(super().__getitem__(index))
        sample["features"] = torch.zeros(self.lengths[index], 64, dtype=torch.bfloat16)
        return sample | {"name": f"sample {index}", "meta": {"source": "benchmark", "weights": [0.5, 1.0]}}


class Images(CheapSamples):
    """Token ids and one picture, float32 of 3 x 224 x 224 (600 kB)."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | {"pixel_values": torch.zeros(3, 224, 224)}


#: Kinds of samples -> what makes a dataset of them.
KINDS: dict[str, Callable[[int], CheapSamples]] = {
    "tokens": CheapSamples,
    "short": partial(CheapSamples, mean=60),
    "long": partial(CheapSamples, mean=4000),
    "lists": Lists,
    "features": Embedded,
    "images": Images,
}


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


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads to the longest sample of the batch, stacks pictures; the same function for every loader that is compared."""
    batch: dict[str, Any] = {
        key: torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(sample[key]) for sample in samples], batch_first=True, padding_value=fill
        )
        for key, fill in PAD.items()
    }
    if "features" in samples[0]:
        batch["features"] = torch.nn.utils.rnn.pad_sequence([one["features"] for one in samples], batch_first=True)
        batch["names"] = [sample["name"] for sample in samples]
    if "pixel_values" in samples[0]:
        batch["pixel_values"] = torch.stack([sample["pixel_values"] for sample in samples])
    return batch


def rows(batch: Any) -> int:
    """Samples of a batch."""
    return int(batch["input_ids"].shape[0])
