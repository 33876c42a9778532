"""What a worker makes in one task, as one block: a chunk of records on its way to the collate process.

Pickled one by one, the tensors of small samples cost more than making them. Samples that are plain dicts of the same
keys travel by column instead: all tensors (or arrays) of a key lie behind one another in one buffer, and a sample is put
together again, as views of the block, when a batch is made of it: until then it is a row number. Anything else is pickled,
see `odb.feed.handoff`.

What arrives equals what was sent, with one exception: where one tensor stands twice in a chunk, once directly under a
key and once elsewhere (deeper down, or in another sample), it arrives as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
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

    kind: str  # a key of `_BUILDERS`: in a buffer; "same": as those of another key; "pickled"
    dtype: str = ""  # of the buffer
    shapes: Any = None  # a list of lengths where all are one-dimensional, else of shapes
    values: Any = None  # pickled ones, or the position of the other key


def pack(records: list[Record]) -> Body:
    """A chunk as a block.

    Raises:
        SampleError: a sample can't be pickled; the text says what and where.
    """
    columns, parts = _columns([record.sample for record in records]) if _is_plain(records) else ([], [])
    if columns:
        table = np.array([(record.id, *record.measure) for record in records], np.int64)  # type: ignore[misc]
        parts.insert(0, [table.reshape(-1)])
        try:
            packed = handoff.dumps((list(records[0].sample), [tuple(column) for column in columns]))
        except SampleError:
            packed = handoff.dumps(records, "samples")  # raises, and says where it is
    else:
        packed = handoff.dumps(records, "samples")
    everything: list[Part] = [*packed.buffers, *parts]
    sizes = [sum(one.nbytes for one in part) if isinstance(part, list) else len(part) for part in everything]
    return Body(packed.head, everything, sizes)


def unpack(block: memoryview, num_head_bytes: int, num_buffers: int) -> list[Record]:
    """The records of a chunk. Samples that travelled by column alias the writable `block` and keep it alive."""
    head, buffers = body.split(block, num_head_bytes, num_buffers)
    # What was pickled gets memory of its own: a sample that stays must not keep the whole chunk.
    content = handoff.loads(head, map(bytearray, buffers))
    if isinstance(content, list):
        return content
    keys, columns = content
    flat = buffers[len(buffers) - 1 - sum(column[0] in _BUILDERS for column in columns) :]
    table = np.frombuffer(flat[0], np.int64).reshape(-1, 1 + len(Measure._fields)).tolist()
    chunk = Chunk(keys, _arrived([_Column(*column) for column in columns], flat[1:]), len(table))
    return [Record(row[0], Row(chunk, k), Measure(*row[1:])) for k, row in enumerate(table)]


class _Flat:
    """The values of one key in one buffer: row `k` is `array[starts[k]:ends[k]]`, of shape `shapes[k]` if there are any."""

    __slots__ = ("array", "build", "ends", "shapes", "starts")

    def __init__(self, array: np.ndarray[Any, Any], bounds: _Bounds, shapes: Any, kind: str) -> None:
        self.array = array
        self.starts, self.ends = bounds
        self.shapes = shapes
        self.build = _BUILDERS[kind]

    def move(self, rows: list[int]) -> None:
        """Copies these rows into memory of their own; the others are gone."""
        parts = [self.array[self.starts[row] : self.ends[row]] for row in rows]
        self.array = np.concatenate(parts)
        ends = list(accumulate(map(len, parts)))
        self.starts, self.ends = dict(zip(rows, [0, *ends], strict=False)), dict(zip(rows, ends, strict=True))


class Chunk:
    """The samples of a chunk, most of whose values lie in one block; each `Row` is one of them.

    Once less than a quarter of them is left, these get memory of their own, so that few samples never hold much memory.
    """

    __slots__ = ("_columns", "_is_left", "_keys", "_pickled", "is_block_alive", "num_left", "num_rows")

    def __init__(self, keys: list[Any], columns: list[_Flat | list[Any] | int], num_rows: int) -> None:
        self._keys = keys
        self._columns = columns
        self._pickled = [column for column in columns if isinstance(column, list)]
        self._is_left = bytearray(b"\1") * num_rows
        self.num_rows = self.num_left = num_rows
        self.is_block_alive = any(isinstance(column, _Flat) for column in columns)

    def sample(self, row: int) -> dict[Any, Any]:
        """One sample; its tensors alias the block. Runs once per sample and key: nothing is called that can be spared."""
        out = {}
        for key, column in zip(self._keys, self._columns, strict=True):
            if type(column) is _Flat:
                part = column.array[column.starts[row] : column.ends[row]]
                out[key] = column.build(part if column.shapes is None else part.reshape(column.shapes[row]))
            elif type(column) is int:
                out[key] = out[self._keys[column]]
            else:
                out[key] = column[row]  # type: ignore[index]  # narrowed by what is left
        return out

    def drop(self, row: int) -> None:
        """Nobody will ask for this row again."""
        self._is_left[row] = 0
        self.num_left -= 1
        for column in self._pickled:
            column[row] = None
        if self.is_block_alive and 4 * self.num_left < self.num_rows:
            self._leave_block()

    def _leave_block(self) -> None:
        self.is_block_alive = False
        rows = [row for row in range(self.num_rows) if self._is_left[row]]
        for column in self._columns:
            if isinstance(column, _Flat):
                if rows:
                    column.move(rows)
                else:
                    column.array = column.array[:0].copy()


class Row:
    """A sample of a chunk."""

    __slots__ = ("_chunk", "_number")

    def __init__(self, chunk: Chunk, number: int) -> None:
        self._chunk = chunk
        self._number = number

    def take(self) -> Any:
        """The sample: a new dict each time, of the same memory."""
        return self._chunk.sample(self._number)

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


def _flat(values: list[Any]) -> tuple[_Column, list[Any]] | None:
    """The values of a key as one-dimensional tensors or arrays of one dtype, None if they are nothing of the kind."""
    kind = type(values[0])
    if kind is torch.Tensor:
        dtype = values[0].dtype
        if dtype in _DTYPES and all(map(_is_plain_tensor, values, repeat(dtype))):
            return _column("bfloat16" if dtype is torch.bfloat16 else "tensors", _DTYPES[dtype], values)
    elif kind is np.ndarray and all(type(value) is np.ndarray for value in values):
        dtype = values[0].dtype
        if dtype.kind in "biufc" and dtype.isnative and all(value.dtype == dtype for value in values):
            return _column("arrays", dtype.str, values)
    return None


def _is_plain_tensor(value: Any, dtype: torch.dtype) -> bool:
    """Whether nothing is lost with a tensor's class, device, layout, gradient and attributes."""
    return (
        type(value) is torch.Tensor
        and value.dtype is dtype
        and value.is_cpu
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.__dict__
    )


def _column(kind: str, dtype: str, values: list[Any]) -> tuple[_Column, list[Any]]:
    if all(value.ndim == 1 for value in values):
        return _Column(kind, dtype, [value.shape[0] for value in values]), values
    return _Column(kind, dtype, [tuple(value.shape) for value in values]), [value.reshape(-1) for value in values]


#: What tensors travel as, for NumPy. It lacks bfloat16: these are the integers that they are in memory.
_DTYPES = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int16: "=i2",
    torch.int32: "=i4",
    torch.int64: "=i8",
    torch.float16: "=f2",
    torch.bfloat16: "=i2",
    torch.float32: "=f4",
    torch.float64: "=f8",
}


# Unpacking


def _arrived(columns: list[_Column], buffers: Sequence[memoryview]) -> list[_Flat | list[Any] | int]:
    """Columns as a `Chunk` has them: those in a buffer, pickled values, or the position of the same column."""
    out: list[_Flat | list[Any] | int] = []
    flat = iter(buffers)
    known: list[tuple[Any, _Bounds]] = []  # keys of a sample often have values of one length
    for column in columns:
        if column.kind in _BUILDERS:
            shapes = column.shapes
            bounds = next((one for others, one in known if others == shapes), None)
            if bounds is None:
                bounds = _bounds(shapes)
                known.append((shapes, bounds))
            array = np.frombuffer(next(flat), np.dtype(column.dtype))
            is_simple = not shapes or type(shapes[0]) is int
            out.append(_Flat(array, bounds, None if is_simple else shapes, column.kind))
        else:
            out.append(column.values)
    return out


def _bounds(shapes: list[Any]) -> _Bounds:
    sizes = shapes if not shapes or type(shapes[0]) is int else map(math.prod, shapes)
    ends = list(accumulate(sizes))
    return [0, *ends[:-1]], ends


#: Where each row starts and ends in a buffer.
_Bounds = tuple[Any, Any]


def _itself(array: np.ndarray[Any, Any]) -> Any:
    return array


def _bfloat16(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array).view(torch.bfloat16)


_BUILDERS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "tensors": torch.from_numpy,
    "arrays": _itself,
    "bfloat16": _bfloat16,
}
