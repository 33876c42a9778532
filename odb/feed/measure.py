"""What is observed of one processed sample: its length, its loss-bearing labels, its vision patches, its size.

Runs where the sample is made, in the worker, once per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from odb.errors import MeasureError

_REMEDY = (
    "give length_fn=... (sample -> tokens); if samples only get their tokens inside collate_fn, "
    "wrap it in odb.collators.per_sample(fn), which runs it in the workers, one sample at a time"
)
#: Of one sample; a window of them over many ranks still sums up in 64 bits.
MAX_COUNT = 1 << 40
_GRIDS = ("image_grid_thw", "video_grid_thw")


class Measure(NamedTuple):
    """Of one sample: tokens, loss-bearing labels, vision patches, bytes. A tuple, since it is pickled per sample."""

    length: int
    loss_tokens: int
    patches: int
    num_bytes: int


@dataclass(frozen=True)
class Measurer:
    """`sample -> Measure`, by the user's functions where given. Raises `MeasureError` where it can't."""

    length_fn: Callable[[Any], int] | None = None
    loss_tokens_fn: Callable[[Any], int] | None = None
    patches_fn: Callable[[Any], int] | None = None
    ignore_index: int = -100
    label_shift: bool = True

    def __call__(self, sample: Any) -> Measure:
        """Measures one processed sample."""
        length = self._call(self.length_fn, "length_fn", sample) if self.length_fn else default_length(sample)
        if self.loss_tokens_fn:
            loss_tokens = self._call(self.loss_tokens_fn, "loss_tokens_fn", sample)
        else:
            loss_tokens = self._default_loss_tokens(sample, length)
        patches = self._call(self.patches_fn, "patches_fn", sample) if self.patches_fn else default_patches(sample)
        return Measure(length, loss_tokens, patches, size_in_bytes(sample))

    def _default_loss_tokens(self, sample: Any, length: int) -> int:
        labels = _part(sample, "labels", 1)
        if labels is None:  # a collator that makes labels of the inputs: every token but the first of the row
            return max(0, length - 1) if self.label_shift else length
        shift = self.label_shift and not (length > 1 and is_one_label(labels))
        return count_loss_labels(labels, self.ignore_index, shift)

    @staticmethod
    def _call(fn: Callable[[Any], int], name: str, sample: Any) -> int:
        value = fn(sample)
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise MeasureError(f"{name} must return an integer, got {value!r} ({type(value).__name__})") from None
        if not 0 <= number <= MAX_COUNT or number != value:
            raise MeasureError(f"{name} must return an integer from 0 to {MAX_COUNT}, got {value!r}")
        return number


def _part(sample: Any, key: str, position: int) -> Any:
    """The value under `key` of a mapping, the attribute of an object, or the item at `position` of a tuple."""
    if isinstance(sample, (dict, Mapping)):  # asking for dict first spares the slow check of an abstract class
        return sample.get(key)
    if isinstance(sample, (tuple, list)) and not hasattr(sample, key):
        if position and len(sample) > 2:
            raise MeasureError(
                f"can't tell which part of a {type(sample).__name__} of {len(sample)} holds the labels: only (tokens, "
                "labels) is understood. Give loss_tokens_fn=... (sample -> labels that bear loss)"
            )
        return sample[position] if len(sample) > position else None
    return getattr(sample, key, None)


def default_length(sample: Any) -> int:
    """Tokens of a sample: of `input_ids` (key or attribute), of a tuple's first part, or of a 1-D tensor itself.

    Raises:
        MeasureError: none of these is there, or it is no sequence of tokens.
    """
    ids = sample if hasattr(sample, "ndim") else _part(sample, "input_ids", 0)
    if ids is None:
        raise MeasureError(
            f"can't measure a sample of type {type(sample).__name__}{_keys(sample)}: no input_ids; {_REMEDY}"
        )
    shape = getattr(ids, "shape", None)
    if shape is None:
        if isinstance(ids, (list, tuple)) and not (ids and isinstance(ids[0], (list, tuple))):
            return len(ids)
    elif len(shape) == 1 or (len(shape) == 2 and shape[0] == 1):
        return int(shape[-1])
    what = f"shape {tuple(shape)}" if shape is not None else type(ids).__name__
    raise MeasureError(f"can't measure a sample: input_ids must be one sequence of tokens, got {what}; {_REMEDY}")


def _keys(sample: Any) -> str:
    return f" with keys {sorted(map(str, sample))[:20]}" if isinstance(sample, Mapping) else ""


def is_one_label(labels: Any) -> bool:
    """Whether there is one label for all tokens of a sample (a class): then there is nothing to shift."""
    shape = getattr(labels, "shape", None)
    if shape is None:
        return isinstance(labels, (list, tuple)) and len(labels) == 1
    return len(shape) > 0 and shape[-1] == 1


def count_loss_labels(labels: Any, ignore_index: int, label_shift: bool) -> int:
    """Labels that bear loss, of one sample (1-D or scalar) or of a batch (rows x length, or one per row).

    With the causal shift a row's first label is never predicted, so it does not count. Labels without a time axis
    (a class per sample) all count. Source: public issues on wrong denominators, e.g. huggingface/transformers#46204.
    """
    array = _as_array(labels)
    if array.ndim == 0:
        return int(array != ignore_index)
    if label_shift:
        array = array[1:] if array.ndim == 1 else array[..., 1:]
    return int(np.count_nonzero(array != ignore_index))


def _as_array(values: Any) -> Any:
    """As a numpy array, which is several times quicker than a tensor for a few hundred numbers."""
    if isinstance(values, torch.Tensor):
        try:
            return values.numpy()
        except (RuntimeError, TypeError):  # on a device, requires grad: asking each time costs more
            return values.detach().cpu().numpy()
    return np.asarray(values)


def default_patches(sample: Any) -> int:
    """Vision patches: of `image_grid_thw` / `video_grid_thw` (rows of t, h, w), else rows of `pixel_values`."""
    if not isinstance(sample, (dict, Mapping)):
        return 0
    grids = [sample[key] for key in _GRIDS if sample.get(key) is not None]
    if grids:
        return int(sum(np.prod(np.asarray(grid).reshape(-1, 3), axis=1).sum() for grid in grids))
    pixels = sample.get("pixel_values")
    return int(pixels.shape[0]) if pixels is not None and getattr(pixels, "ndim", 0) >= 2 else 0


def size_in_bytes(sample: Any) -> int:
    """Bytes of the tensors and arrays of a sample, two levels deep; other values count as 64."""
    if isinstance(sample, (dict, Mapping)):
        return sum(map(_nbytes_deep, sample.values()))
    if isinstance(sample, (tuple, list)):
        return sum(_nbytes(value) for value in sample)
    return _nbytes(sample)


def _nbytes_deep(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return size_in_bytes(value) if isinstance(value, (dict, Mapping)) else _nbytes(value)


def _nbytes(value: Any) -> int:
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(value, (str, bytes)):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple)) else 64
