"""One object laid out in one block of memory: sizes of the buffers (int64), pickle stream, buffers, each at 64 bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 64  # bytes: a cache line, and enough for every vector instruction
_ZEROS = bytes(_ALIGN)

Bytes = npt.NDArray[np.uint8]
#: One buffer: contiguous bytes, or one-dimensional arrays or tensors of one dtype that are to lie behind one another.
Part = memoryview | list[np.ndarray[Any, Any]] | list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Body:
    """What one message or chunk consists of. Refers to the object's memory; nothing is copied before it is written."""

    head: bytes
    parts: Sequence[Part]
    sizes: list[int]  # of the parts, in bytes

    @property
    def num_bytes(self) -> int:
        """Of the whole block, padding included."""
        return sum(size + -size % _ALIGN for size in (8 * len(self.sizes), len(self.head), *self.sizes))

    def write_into(self, target: Bytes) -> None:
        """Copies everything into `target`, which has at least `num_bytes`."""
        start = 0
        table = np.array(self.sizes, np.int64).view(np.uint8)
        for part, size in zip((table, self.head, *self.parts), (len(table), len(self.head), *self.sizes), strict=True):
            if size:
                _copy(part, target[start : start + size])
            start += size + -size % _ALIGN

    def pieces(self) -> Iterator[Any]:
        """The block piece by piece, as bytes-like objects, none of them empty."""
        table = np.array(self.sizes, np.int64).tobytes()
        for part in (table, self.head, *self.parts):
            piece = _joined(part) if isinstance(part, list) else part
            if len(piece):
                yield piece
            if len(piece) % _ALIGN:
                yield _ZEROS[: -len(piece) % _ALIGN]


def _copy(part: Any, target: Bytes) -> None:
    if not isinstance(part, list):
        target[:] = np.frombuffer(part, np.uint8)
    elif isinstance(part[0], torch.Tensor):
        torch.cat(part, out=torch.from_numpy(target).view(part[0].dtype))
    else:
        np.concatenate(part, out=target.view(part[0].dtype))


def _joined(part: list[Any]) -> memoryview:
    if isinstance(part[0], torch.Tensor):
        return torch.cat(part).view(torch.uint8).numpy().data
    whole: memoryview = np.concatenate(part).view(np.uint8).data
    return whole


def split(block: memoryview, num_head_bytes: int, num_buffers: int) -> tuple[memoryview, list[memoryview]]:
    """Stream and buffers of a block; they alias it."""
    sizes = np.frombuffer(block[: 8 * num_buffers], np.int64).tolist()
    parts, start = [], 0
    for size in (8 * num_buffers, num_head_bytes, *sizes):
        parts.append(block[start : start + size])
        start += size + -size % _ALIGN
    return parts[1], parts[2:]
