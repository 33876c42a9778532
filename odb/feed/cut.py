"""Samples longer than a packed row: cut to its capacity, or into pieces that are samples of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from odb.errors import MeasureError

#: Identities of one epoch lie below this; piece `p` of sample `i` has identity `i + p * PIECE`, its first piece `i`.
PIECE = 1 << 48


def sample_of(identity: int) -> int:
    """The identity of the sample that a piece was cut from."""
    return identity % PIECE


def pieces(sample: Any, length: int, capacity: int) -> list[Any]:
    """A sample cut into consecutive pieces of at most `capacity` tokens, the last one shorter.

    Values with one entry per token are cut, positions start at 0 in each piece, everything else stays as it is.

    Raises:
        MeasureError: no mapping with `input_ids` of `length` tokens, or one with images, whose tokens can't be told apart.
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        raise MeasureError(
            f"can't cut a sample of type {type(sample).__name__}: only mappings with input_ids can be truncated or split; "
            "cut it in the dataset, or give on_oversize='error' or 'skip'"
        )
    if _tokens(sample["input_ids"]) != length:
        raise MeasureError(
            f"can't cut a sample whose length_fn says {length} tokens while its input_ids have "
            f"{_tokens(sample['input_ids'])}: cut it in the dataset, or give on_oversize='error' or 'skip'"
        )
    if any(key.startswith(("pixel_values", "image_", "video_")) for key in map(str, sample)):
        raise MeasureError(
            "can't cut a sample with images or videos, as their tokens have to stay together: make it shorter in the "
            "dataset, or give on_oversize='error' or 'skip'"
        )
    return [
        {key: _part(str(key), value, length, first, first + capacity) for key, value in sample.items()}
        for first in range(0, length, capacity)
    ]


def _tokens(ids: Any) -> int:
    return int(ids.shape[-1]) if hasattr(ids, "shape") else len(ids)


def _part(key: str, value: Any, length: int, first: int, end: int) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim and value.shape[-1] == length:
        part = value[..., first:end]
        return part - part[..., :1] if key == "position_ids" else part
    if isinstance(value, (list, tuple)) and len(value) == length:
        cut = value[first:end]
        return [one - cut[0] for one in cut] if key == "position_ids" else cut
    return value
