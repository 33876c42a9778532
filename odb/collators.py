"""Collate functions: from the samples of one group to a batch."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from odb.errors import ConfigError
from odb.plan.pack import Bounds, next_fit

_MASK = "attention_mask"
_SIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64}


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
        lengths = list(map(len, columns["input_ids"]))
        multiple = self.pad_to_multiple_of
        width = -(-max(lengths) // multiple) * multiple
        out: dict[str, Any] = {}
        for key, values in columns.items():
            is_sequence = all(map(_is_row, values, lengths))
            if key == "labels" and not is_sequence:
                _check_no_odd_labels(values, lengths)
            out[key] = self._padded(key, values, width) if is_sequence else _stacked(values)
        if _MASK not in first:
            out[_MASK] = self._padded(_MASK, [torch.ones(n, dtype=torch.int64) for n in lengths], width)
        return out

    def _padded(self, key: str, values: list[Any], width: int) -> torch.Tensor:
        rows = _of_one_dtype([value if type(value) is torch.Tensor else torch.as_tensor(value) for value in values])
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


def _of_one_dtype(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows as `torch.stack` takes them: of the dtype that holds them all. `pad_sequence` would cut them to the first's."""
    dtypes = {row.dtype for row in rows}
    if len(dtypes) < 2:
        return rows
    # (PyTorch promotes no unsigned integers beyond 8 bits.)
    widest = reduce(torch.promote_types, [_SIGNED.get(dtype, dtype) for dtype in dtypes])
    return [row.to(widest) for row in rows]


def _check_same_keys(samples: list[Any]) -> None:
    keys = samples[0].keys()
    for number, sample in enumerate(samples):
        if sample.keys() != keys:
            odd = sorted(map(str, set(keys) ^ set(sample)))
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
    if type(value) is torch.Tensor:
        return value.ndim == 1 and value.shape[0] == length
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim == 1 and len(value) == length
    return isinstance(value, (list, tuple)) and len(value) == length and all(isinstance(v, (int, float)) for v in value)


@dataclass(frozen=True)
class _PackedRow:
    """One packed row: its columns, flat, and where its samples end."""

    columns: dict[str, torch.Tensor]
    ends: list[int]  # of the samples, in tokens; the last is the row's length before padding


@dataclass(frozen=True)
class _Packing:
    """What the packing collators share: samples are concatenated, positions restart, first labels are masked.

    Attributes:
        pad_token_id: what `input_ids` are padded with.
        ignore_index: label of a sample's first token, which its neighbour's last would have to predict, and of padding.
        pad_to_multiple_of: a row's length is a multiple of this; give the loader the same number. The padding is a
            segment of its own.
        cat_keys: keys whose tensors are concatenated along their first axis (what images bring).
    """

    pad_token_id: int = 0
    ignore_index: int = -100
    pad_to_multiple_of: int = 1
    cat_keys: tuple[str, ...] = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of must be >= 1, got {self.pad_to_multiple_of!r}")

    def _checked(self, samples: list[Any]) -> list[dict[str, Any]]:
        """Samples as plain dicts of single rows, with labels and position_ids, without masks and lengths."""
        first = samples[0]
        if not isinstance(first, Mapping) or "input_ids" not in first:
            raise ConfigError(
                f"odb's packing collators take mappings with input_ids, got {type(first).__name__}: give collate_fn=... "
                "(list of samples -> batch)"
            )
        _check_same_keys(samples)
        out = []
        for sample in samples:
            plain = {
                key: value if key in self.cat_keys else _single_row(value)
                for key, value in sample.items()
                if key not in (_MASK, "length")
            }
            ids = torch.as_tensor(plain["input_ids"])
            if _MASK in sample and not bool(torch.as_tensor(_single_row(sample[_MASK])).all()):
                raise ConfigError(
                    "a sample's attention_mask hides some of its tokens; packed rows have no such mask: leave padding out "
                    "of the samples"
                )
            plain["input_ids"] = ids
            plain.setdefault("position_ids", torch.arange(len(ids)))
            plain.setdefault("labels", ids)
            out.append(plain)
        return out

    def _per_token(self, samples: list[dict[str, Any]]) -> list[str]:
        """Keys whose values have one entry per token in every sample, or positions on several axes."""
        lengths = [len(sample["input_ids"]) for sample in samples]

        def is_column(key: str) -> bool:
            values = [sample[key] for sample in samples]
            return all(map(_is_row, values, lengths)) or (key == "position_ids" and all(map(_is_grid, values, lengths)))

        return [key for key in samples[0] if is_column(key)]

    def _row(self, samples: list[dict[str, Any]], keys: list[str], width: int | None) -> _PackedRow:
        """The columns `keys` of one row, padded to `width` (None: to the multiple)."""
        ends = np.cumsum([len(sample["input_ids"]) for sample in samples]).tolist()
        multiple = self.pad_to_multiple_of
        missing = (-(-ends[-1] // multiple) * multiple if width is None else width) - ends[-1]
        columns = {}
        for key in keys:
            rows = [torch.as_tensor(sample[key]) for sample in samples]
            if key == "labels":
                rows = [_without_first(row, self.ignore_index) for row in rows]
            columns[key] = self._padded_row(key, torch.cat(rows, dim=-1), missing)
        return _PackedRow(columns, ends)

    def _padded_row(self, key: str, row: torch.Tensor, missing: int) -> torch.Tensor:
        if not missing:
            return row
        if key == "position_ids":  # a segment of its own starts at 0 too
            tail = torch.arange(missing, dtype=row.dtype).expand(*row.shape[:-1], missing)
            return torch.cat([row, tail], dim=-1)
        fill = {"input_ids": self.pad_token_id, "labels": self.ignore_index}.get(key, 0)
        return torch.nn.functional.pad(row, (0, missing), value=fill)

    def _others(self, samples: list[dict[str, Any]], per_token: Container[str]) -> dict[str, Any]:
        """What is not per token: concatenated, or stacked as `default_collate` does, or a list where that can't."""
        out: dict[str, Any] = {}
        for key in samples[0]:
            if key in per_token:
                continue
            values = [sample[key] for sample in samples]
            if key == "labels":
                _check_no_odd_labels(values, [len(sample["input_ids"]) for sample in samples])
            is_tensor = all(isinstance(value, torch.Tensor) and value.ndim for value in values)
            out[key] = torch.cat(values) if key in self.cat_keys and is_tensor else _stacked(values)
        return out


@dataclass(frozen=True)
class FlattenCollator(_Packing):
    """Concatenates the samples of a group into one row, for attention over varying lengths.

    Attributes:
        transformers_names: adds `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, the arguments that
            models of transformers hand to their attention.

    Returns:
        A dict of (1, tokens) tensors `input_ids`, `labels` (the inputs where a sample has none), `position_ids` that
        restart at 0 with each sample (a sample's own are kept; of shape (axes, length) they become (axes, 1, tokens)),
        `seq_idx` (number of the sample, int32; -1: padding); `cu_seqlens`, int32, shape (segments + 1,), from 0 to the
        row's length; `max_seqlen`, an int. No `attention_mask`: one of all ones would switch the isolation off.
    """

    transformers_names: bool = False

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Collates mapping samples that have `input_ids`."""
        plain = self._checked(samples)
        row = self._row(plain, self._per_token(plain), None)
        width = row.columns["input_ids"].shape[-1]
        bounds = [0, *row.ends] + ([width] if width > row.ends[-1] else [])
        out: dict[str, Any] = {key: value.unsqueeze(-2) for key, value in row.columns.items()}
        out |= self._others(plain, row.columns)
        out["seq_idx"] = _segments(row.ends, width).unsqueeze(0)
        out["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
        out["max_seqlen"] = max(b - a for a, b in pairwise(bounds))
        if self.transformers_names:
            out |= {f"cu_seq_lens_{one}": out["cu_seqlens"] for one in "qk"}
            out |= {f"max_length_{one}": out["max_seqlen"] for one in "qk"}
        return out


@dataclass(frozen=True)
class BlockMaskCollator(_Packing):
    """Packs the samples of a group into rows of fixed capacity, with a block-diagonal causal mask for each row.

    For models without attention over varying lengths (SDPA, eager attention). Rows are cut as the loader and
    `MultipackBatchSampler` cut them: a row closes when the next sample does not fit.

    Attributes:
        row_capacity: tokens of a row; None: one row.
        max_samples: samples of a row at most.
        mask_dtype: of the mask. None: bool, True where a token may look; a float dtype: 0 there, its smallest value
            elsewhere, to be added to scores.

    Returns:
        A dict of (rows, longest row) tensors as `FlattenCollator` gives them, `attention_mask` of shape (rows, 1, longest,
        longest), and `seq_idx`, by which `packed_mask_mod` gives the same mask to `flex_attention`. Padding looks at
        padding, so that no line of the mask is empty.
    """

    row_capacity: int | None = None
    max_samples: int | None = None
    mask_dtype: torch.dtype | None = None

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Collates mapping samples that have `input_ids`."""
        plain = self._checked(samples)
        parts = [plain[a:b] for a, b in pairwise([0, *self._row_ends(plain)])]
        longest = max(sum(len(sample["input_ids"]) for sample in part) for part in parts)
        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        columns = self._per_token(plain)
        rows = [self._row(part, columns, width) for part in parts]
        # (rows, width); (axes, rows, width) for positions on several axes
        out: dict[str, Any] = {key: torch.stack([row.columns[key] for row in rows], dim=-2) for key in columns}
        out |= self._others(plain, columns)
        out["seq_idx"] = torch.stack([_segments(row.ends, width) for row in rows])
        out[_MASK] = block_diagonal_mask(out["seq_idx"], self.mask_dtype)
        return out

    def _row_ends(self, samples: list[dict[str, Any]]) -> list[int]:
        if self.row_capacity is None:
            return [len(samples)]
        lengths = np.array([len(sample["input_ids"]) for sample in samples], np.int64)
        capacity = self.row_capacity - self.row_capacity % self.pad_to_multiple_of
        return next_fit(lengths, Bounds(capacity, self.max_samples))


def _segments(ends: list[int], width: int) -> torch.Tensor:
    """(width,) int32: the number of the sample at each place, -1 behind the last."""
    out = torch.full((width,), -1, dtype=torch.int32)
    for number, (a, b) in enumerate(pairwise([0, *ends])):
        out[a:b] = number
    return out


def block_diagonal_mask(seq_idx: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The causal mask of packed rows: each token sees the tokens of its own sample up to itself.

    Args:
        seq_idx: (rows, length), as the packing collators give it.
        dtype: None: bool, True where a token may look; a float dtype: 0 there, its smallest value elsewhere.

    Returns:
        (rows, 1, length, length), over (query, key).
    """
    same = seq_idx[:, :, None] == seq_idx[:, None, :]
    mask = (same & torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril()).unsqueeze(1)
    if dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def packed_mask_mod(seq_idx: torch.Tensor) -> Callable[[Any, Any, Any, Any], Any]:
    """The same mask for `torch.nn.attention.flex_attention.create_block_mask`; `seq_idx` as the collators give it."""

    def mask_mod(row: Any, _head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (seq_idx[row, query] == seq_idx[row, key])

    return mask_mod


def _without_first(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    out = labels.clone()
    out[..., :1] = ignore_index
    return out


def _is_grid(value: Any, length: int) -> bool:
    """Positions on several axes: (axes, length)."""
    return (
        isinstance(value, (torch.Tensor, np.ndarray))
        and value.ndim == 2
        and value.shape[0] in (3, 4)
        and (value.shape[1] == length)
    )


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
    if type(value) is torch.Tensor and value.ndim == 1:
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 2 and value.shape[0] == 1:
        return value[0]
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        return value[0]
    return value
