"""Collate functions: from the samples of one group to a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from odb.errors import ConfigError

_MASK = "attention_mask"


@dataclass(frozen=True)
class PadCollator:
    """Pads the sequences of mapping samples to the longest of the group and stacks everything else.

    A value counts as a sequence when it is one-dimensional and as long as the sample's `input_ids`. `labels` are padded
    with `ignore_index`, `attention_mask` (added where there is none) with 0, other keys with `pad_values[key]` or 0.

    Attributes:
        pad_token_id: what `input_ids` are padded with.
        side: "right" or "left". Padded on the left, only a row without padding loses its first label.
        pad_to_multiple_of: the padded length is a multiple of this; give the loader the same number.

    Returns:
        A dict: sequences as (rows, padded length) tensors, other values as `default_collate` makes them, and lists
        where that can't.
    """

    pad_token_id: int = 0
    ignore_index: int = -100
    side: str = "right"
    pad_to_multiple_of: int = 1
    pad_values: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise ConfigError(f"side must be 'right' or 'left', got {self.side!r}")
        if self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of must be >= 1, got {self.pad_to_multiple_of!r}")

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Collates mapping samples that have `input_ids`."""
        first = samples[0]
        if not isinstance(first, Mapping) or "input_ids" not in first:
            raise ConfigError(
                "odb's padding collator takes mappings with input_ids, got "
                f"{type(first).__name__}: give collate_fn=... (list of samples -> batch)"
            )
        _check_same_keys(samples)
        columns = {key: [_single_row(sample[key]) for sample in samples] for key in first}
        lengths = [len(ids) for ids in columns["input_ids"]]
        multiple = self.pad_to_multiple_of
        width = -(-max(lengths) // multiple) * multiple
        out: dict[str, Any] = {}
        for key, values in columns.items():
            is_sequence = all(_is_row(value, n) for value, n in zip(values, lengths, strict=True))
            if key == "labels" and not is_sequence:
                _check_no_odd_labels(values, lengths)
            out[key] = self._padded(key, values, width) if is_sequence else _stacked(values)
        if _MASK not in first:
            out[_MASK] = self._padded(_MASK, [torch.ones(n, dtype=torch.int64) for n in lengths], width)
        return out

    def _padded(self, key: str, values: list[Any], width: int) -> torch.Tensor:
        rows = [torch.as_tensor(value) for value in values]
        # (rows, longest)
        out = pad_sequence(rows, batch_first=True, padding_value=self._fill(key), padding_side=self.side)
        missing = width - out.shape[1]
        if not missing:
            return out
        # (rows, width)
        sides = (0, missing) if self.side == "right" else (missing, 0)
        return torch.nn.functional.pad(out, sides, value=self._fill(key))

    def _fill(self, key: str) -> float:
        if key in self.pad_values:
            return self.pad_values[key]
        return {"input_ids": self.pad_token_id, "labels": self.ignore_index}.get(key, 0)


def _check_same_keys(samples: list[Any]) -> None:
    keys = set(samples[0])
    for number, sample in enumerate(samples):
        if set(sample) != keys:
            odd = sorted(map(str, keys ^ set(sample)))
            raise ConfigError(
                f"the samples of a group have different keys: sample {number} differs from sample 0 in {odd}. Give every "
                "sample the same keys in the dataset, or give collate_fn=... (list of samples -> batch)"
            )


def _check_no_odd_labels(values: list[Any], lengths: list[int]) -> None:
    for value, length in zip(values, lengths, strict=True):
        is_sequence = isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1
        if is_sequence and len(value) not in (1, length):
            raise ConfigError(
                f"a sample has {len(value)} labels for {length} input_ids: labels are one per token (shifted by the "
                "model), or one per sample; mend the dataset, or give collate_fn=..."
            )


def _is_row(value: Any, length: int) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim == 1 and len(value) == length
    return isinstance(value, (list, tuple)) and len(value) == length and all(isinstance(v, (int, float)) for v in value)


def _stacked(values: list[Any]) -> Any:
    try:
        return default_collate(values)
    except (TypeError, RuntimeError, KeyError):
        return values


@dataclass(frozen=True)
class PerSample:
    """See `per_sample`."""

    fn: Callable[[list[Any]], Any]
    then: Callable[[list[Any]], Any]

    def process(self, sample: Any) -> Any:
        """What a worker does with one raw sample: `fn` of it alone, without the row dimension."""
        batch = self.fn([sample])
        if not isinstance(batch, Mapping):
            raise ConfigError(f"the function given to per_sample must return a mapping, got {type(batch).__name__}")
        return {key: _single_row(value) for key, value in batch.items()}

    def __call__(self, samples: list[Any]) -> Any:
        """Collates samples that `fn` has processed in the workers."""
        return self.then(samples)


def per_sample(fn: Callable[[list[Any]], Any], then: Callable[[list[Any]], Any] | None = None) -> PerSample:
    """For pipelines whose tokens only appear in `collate_fn`: runs `fn` in the workers, one sample at a time.

    Args:
        fn: `[raw sample] -> processed batch of one row`, a processor in a collator, say.
        then: processed samples -> batch. None: the row dimension of each sample's tensors is taken off, and
            `PadCollator` pads.
    """
    return PerSample(fn, then if then is not None else PadCollator())


def _single_row(value: Any) -> Any:
    """A (1, length) row as a sequence: what processors that are asked for tensors give."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 2 and value.shape[0] == 1:
        return value[0]
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        return value[0]
    return value
