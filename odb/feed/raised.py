"""What a worker raises, so that it arrives: PyTorch carries an exception's type and text, and not every type can go.

A type that can't be pickled (a class made inside a function, as clients of web services do) is lost in the worker's queue,
and whoever waits for the sample waits for ever. A type with an attribute `message` is rebuilt by that keyword, and where its
constructor doesn't take it the error of that hides the real one. `StopIteration` looks like the end of the data.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any

from torch.utils.data import get_worker_info

from odb.errors import SampleError


class Arriving:
    """Context of the user's code in a worker: where what it raises would not arrive, another exception is raised from it.

    Args:
        what: the user's part, for the text.
        keys: of the chunk that it works on, (epoch, identity, index).
    """

    __slots__ = ("_keys", "_what")

    def __init__(self, what: str, keys: Sequence[tuple[int, int, Any]] = ()) -> None:
        self._what, self._keys = what, keys

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(f"{self} raised StopIteration") from error
        if isinstance(error, Exception) and get_worker_info() is not None and not _arrives(type(error)):
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            raise SampleError(f"{self} raised an exception that can't be rebuilt in another process: {text}") from error

    def __str__(self) -> str:
        where = ", ".join(repr(key) for _, _, key in self._keys[:8])
        return f"{self._what} (for one of the indices {where})" if where else self._what


def _arrives(kind: type[Exception]) -> bool:
    """Whether `torch._utils.ExceptionWrapper` can be pickled with this type, and raises it or names it on the other side."""
    try:
        pickle.dumps(kind)
        if getattr(kind, "message", None):
            kind(message="")  # type: ignore[call-arg]
    except Exception:  # a user's class may refuse in any way
        return False
    return True
