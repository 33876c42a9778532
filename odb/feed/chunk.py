"""What a worker makes in one task, as one block: a chunk of records on its way to the collate process.

Pickled one by one, the tensors of small samples cost more than making them. Samples that are plain dicts of the same
keys travel by column instead: all tensors (or arrays) of a key lie behind one another in one buffer, and a sample is put
together again, as views of the block, when a batch is made of it. Anything else is pickled, see `odb.feed.handoff`.

What arrives equals what was sent, with one exception: where one tensor stands twice in a chunk, once directly under a
key and once elsewhere (deeper down, or in another sample), it arrives as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from odb.errors import SampleError
from odb.feed import body, handoff
from odb.feed.body import Body, Part
from odb.feed.measure import Measure


class Record(NamedTuple):
    """One sample view: its identity, the processed sample, its measure; or why it was rejected.

    A tuple, since there is one per sample: a frozen dataclass costs several times as much.
    """

    id: int
    sample: Any  # or a `Row`; ask `take`
    measure: Measure | None
    rejected: str = ""  # reason: "empty" or "sample_error"
    text: str = ""  # of the error

    def take(self) -> Any:
        """The processed sample itself."""
        sample = self.sample
        return sample.take() if type(sample) is Row else sample


class _Column(NamedTuple):
    """How the values of one key travel."""

    kind: str  # "tensors" and "arrays": in a buffer; "same": as those of another key; "pickled"
    dtype: str = ""
    shapes: Any = None  # a list of lengths where all are one-dimensional, else of shapes
    values: Any = None  # pickled ones, or the position of the other key


def pack(records: list[Record]) -> Body:
    """A chunk as a block.

    Raises:
        SampleError: a sample can't be pickled; the text says what and where.
    """
    columns, parts = _columns([record.sample for record in records]) if _is_plain(records) else ([], [])
    if columns:
        rows = [(record.id, *record.measure) for record in records]  # type: ignore[misc]
        try:
            packed = handoff.dumps((rows, list(records[0].sample), [tuple(column) for column in columns]))
        except SampleError:
            packed = handoff.dumps(records, "samples")  # raises, and says where it is
    else:
        packed = handoff.dumps(records, "samples")
    everything: list[Part] = [*packed.buffers, *parts]
    sizes = [sum(a.nbytes for a in part) if isinstance(part, list) else len(part) for part in everything]
    return Body(packed.head, everything, sizes)


def unpack(block: memoryview, num_head_bytes: int, num_buffers: int) -> list[Record]:
    """The records of a chunk. Samples that travelled by column alias the writable `block` and keep it alive."""
    head, buffers = body.split(block, num_head_bytes, num_buffers)
    # What was pickled gets memory of its own: a sample that stays must not keep the whole chunk.
    content = handoff.loads(head, map(bytearray, buffers))
    if isinstance(content, list):
        return content
    rows, keys, columns = content
    values = _values([_Column(*column) for column in columns], buffers)
    chunk = Chunk([dict(zip(keys, row, strict=True)) for row in zip(*values, strict=True)])
    return [Record(row[0], Row(chunk, k), Measure(*row[1:])) for k, row in enumerate(rows)]


class Chunk:
    """The samples of a chunk, whose values are views of one block; each `Row` is one of them.

    Once less than a quarter of them is left, these get memory of their own, so that few samples never hold much memory.
    """

    __slots__ = ("is_block_alive", "num_left", "num_rows", "samples")

    def __init__(self, samples: list[dict[Any, Any] | None]) -> None:
        self.samples = samples
        self.num_rows = self.num_left = len(samples)
        self.is_block_alive = True

    def drop(self, row: int) -> None:
        """Nobody will ask for this row again."""
        self.samples[row] = None
        self.num_left -= 1
        if self.is_block_alive and 4 * self.num_left < self.num_rows:
            self.is_block_alive = False
            for sample in self.samples:
                if sample is not None:
                    _own(sample)


def _own(sample: dict[Any, Any]) -> None:
    """Copies a sample's values out of the block, in place; one value under two keys stays one."""
    copies: dict[int, Any] = {}
    for key, value in sample.items():
        kind = type(value)
        if kind is torch.Tensor or kind is np.ndarray:
            if id(value) not in copies:
                copies[id(value)] = value.clone() if kind is torch.Tensor else value.copy()
            sample[key] = copies[id(value)]


class Row:
    """A sample of a chunk."""

    __slots__ = ("_chunk", "_number")

    def __init__(self, chunk: Chunk, number: int) -> None:
        self._chunk = chunk
        self._number = number

    def take(self) -> Any:
        """The sample; the same object each time."""
        return self._chunk.samples[self._number]

    def __del__(self) -> None:
        self._chunk.drop(self._number)


# Packing by column


def _is_plain(records: list[Record]) -> bool:
    """Whether all samples are plain dicts of the same keys in the same order. An empty chunk is none."""
    if not records:
        return False
    first = records[0].sample
    if type(first) is not dict:
        return False
    keys = list(first)
    return all(r.measure is not None and type(r.sample) is dict and list(r.sample) == keys for r in records)


def _columns(samples: list[dict[Any, Any]]) -> tuple[list[_Column], list[Part]]:
    """How each key travels, and the buffers; nothing if they have to be pickled as they are."""
    columns: list[_Column] = []
    parts: list[Part] = []
    owners: list[tuple[int, list[Any]]] = []  # columns in buffers
    for number, key in enumerate(samples[0]):
        values = [sample[key] for sample in samples]
        if (same := _twin(values, owners)) >= 0:
            columns.append(_Column("same", values=same))
        elif (flat := _flat(values)) is None:
            columns.append(_Column("pickled", values=values))
        else:
            columns.append(flat[0])
            parts.append(flat[1])
            owners.append((number, values))
    objects = [id(value) for _, values in owners for value in values]
    if len(set(objects)) < len(objects) and _is_shared_within(samples, [values for _, values in owners]):
        return [], []
    return columns, parts


def _twin(values: list[Any], owners: list[tuple[int, list[Any]]]) -> int:
    """The column that consists of the very same objects, -1 if there is none."""
    for number, others in owners:
        if values[0] is others[0] and all(a is b for a, b in zip(values, others, strict=True)):
            return number
    return -1


def _is_shared_within(samples: list[Any], columns: list[list[Any]]) -> bool:
    """Whether one sample has the same object under two keys that don't travel as one."""
    return any(len({id(column[row]) for column in columns}) < len(columns) for row in range(len(samples)))


def _flat(values: list[Any]) -> tuple[_Column, list[np.ndarray[Any, Any]]] | None:
    """The values of a key as one-dimensional arrays of one dtype, None if they are nothing of the kind."""
    kind = type(values[0])
    if kind is torch.Tensor:
        arrays = _arrays_of(values)
    elif kind is np.ndarray and all(type(value) is np.ndarray for value in values):
        arrays = values
    else:
        return None
    if arrays is None:
        return None
    dtype = arrays[0].dtype
    if dtype.hasobject or dtype.kind not in "biufc" or not dtype.isnative or any(a.dtype != dtype for a in arrays):
        return None
    name = "tensors" if kind is torch.Tensor else "arrays"
    if all(a.ndim == 1 for a in arrays):
        return _Column(name, dtype.str, [len(a) for a in arrays]), arrays
    shapes = [a.shape for a in arrays]
    return _Column(name, dtype.str, shapes), [a.reshape(-1) for a in arrays]


def _arrays_of(tensors: list[Any]) -> list[np.ndarray[Any, Any]] | None:
    arrays = []
    try:
        for tensor in tensors:
            if type(tensor) is not torch.Tensor or tensor.__dict__:
                return None
            arrays.append(tensor.numpy())
    except (RuntimeError, TypeError):  # requires grad, conjugated, sparse, on a device, or a dtype that NumPy lacks
        return None
    return arrays


# Unpacking


def _values(columns: list[_Column], buffers: Sequence[memoryview]) -> list[list[Any]]:
    num_flat = sum(column.kind in _BUILDERS for column in columns)
    flat = iter(buffers[len(buffers) - num_flat :])
    out: list[list[Any]] = []
    for column in columns:
        if column.kind == "pickled":
            out.append(column.values)
        elif column.kind == "same":
            out.append(out[column.values])
        else:
            out.append(_rows(column, next(flat)))
    return out


def _rows(column: _Column, buffer: memoryview) -> list[Any]:
    build = _BUILDERS[column.kind]
    flat = np.frombuffer(buffer, np.dtype(column.dtype))
    rows, start = [], 0
    for shape in column.shapes:
        if type(shape) is int:
            end = start + shape
            rows.append(build(flat[start:end]))
        else:
            end = start + math.prod(shape)
            rows.append(build(flat[start:end].reshape(shape)))
        start = end
    return rows


def _itself(array: np.ndarray[Any, Any]) -> Any:
    return array


_BUILDERS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {"tensors": torch.from_numpy, "arrays": _itself}
