"""Lengths and label counts of a tokenized dataset, read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from odb.errors import ConfigError
from odb.plan.labels import count_labels
from odb.plan.types import I64

_CHUNK = 1024


def lengths_of(dataset: Any, column: str = "length") -> I64:
    """Tokens of each sample, shape (n,).

    Of the column `column` where the dataset has one (Hugging Face datasets), else of each sample's `column`, of its last
    `position_ids` + 1, or of its `input_ids`, for which every sample is read.

    Raises:
        ConfigError: a sample has none of them.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return np.asarray(dataset[column][:], np.int64)
    return np.array([_length(sample, number, column) for number, sample in enumerate(_samples(dataset))], np.int64)


def _length(sample: Any, number: int, column: str) -> int:
    if column in sample:
        return int(sample[column])
    if sample.get("position_ids") is not None and len(sample["position_ids"]):
        return int(np.max(_plain(sample["position_ids"]))) + 1
    if "input_ids" not in sample:
        raise ConfigError(f"sample {number} has no {column}, position_ids or input_ids: give its length")
    return len(sample["input_ids"])


def label_counts_of(dataset: Any, ignore_index: int = -100, *, masks_first: bool = True) -> tuple[I64, I64]:
    """Labels of each sample that bear loss, and its start, both of shape (n,).

    Args:
        dataset: samples with `labels`, or with `shift_labels`, which come shifted already and count as they are. Without
            either, as in pretraining, every token is a label.
        ignore_index: the label that bears no loss.
        masks_first: a sample's first label never counts: the collator masks it, or every sample has a row of its own and
            the model shifts. False: it is lost only where the sample opens a row, which `starts` says.

    Raises:
        ConfigError: labels that are no list of one number per token.
    """
    counts, starts = [], []
    for sample in _samples(dataset):
        comes_shifted = sample.get("shift_labels") is not None
        labels = sample["shift_labels"] if comes_shifted else sample.get("labels", sample.get("input_ids"))
        if labels is None:
            raise ConfigError("a sample has neither labels nor input_ids: nothing to count")
        count, start = count_labels(_plain(labels), ignore_index, label_shift=not comes_shifted)
        counts.append(count - start if masks_first else count)
        starts.append(0 if masks_first else start)
    return np.array(counts, np.int64), np.array(starts, np.int64)


def _plain(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values


def _samples(dataset: Any) -> Iterator[Any]:
    """One by one; a dataset of columns in slices, as it reads many rows at the price of few."""
    if not getattr(dataset, "column_names", None):
        for number in range(len(dataset)):
            yield dataset[number]
        return
    for start in range(0, len(dataset), _CHUNK):
        columns = dataset[start : start + _CHUNK]
        names = list(columns)
        for row in zip(*columns.values(), strict=True):
            yield dict(zip(names, row, strict=True))
