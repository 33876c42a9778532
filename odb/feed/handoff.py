"""Objects to bytes and back, by value: how samples and batches cross from one process to another.

PyTorch's own way of sending tensors between processes takes a file descriptor or a name in /dev/shm for each storage.
Per sample that is one to two orders of magnitude slower than copying the bytes, and it runs out of descriptors when
batches are kept (pytorch/pytorch #973, #11201, #41465). Here every tensor travels as plain memory:

- `dumps_bytes` / `loads_bytes`: everything in one `bytes`, for a queue between processes;
- `dumps` / `loads`: a small pickle stream and the memory of tensors and arrays apart, for a channel that places it.

What arrives equals what was sent: types, nesting, dtypes, shapes, `requires_grad`. Tensors and arrays are contiguous
and writable whatever they were before. The same object twice in one message arrives as one object twice; two *different*
tensors over one storage arrive as two, so that a view of a huge tensor sends the view alone. Autograd history stays
behind. What can't be sent as memory (subclasses, sparse, quantized and CUDA tensors) is pickled by PyTorch, by value.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pickle import PickleBuffer
from reprlib import Repr
from types import MethodType
from typing import Any

import numpy as np
import torch

from odb.errors import SampleError

#: What may stand for one buffer when an object is rebuilt.
Buffer = bytes | bytearray | memoryview | PickleBuffer

#: Turns a freshly rebuilt CPU tensor into the one that is handed out, for example `torch.Tensor.pin_memory`.
Place = Callable[[torch.Tensor], torch.Tensor]

_PROTOCOL = 5
_NATIVE = frozenset(
    (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
)  # dtypes that NumPy has too; the others travel as bytes
_MAX_DEPTH = 64  # of the search for what can't be pickled

_short = Repr()
_short.maxstring = _short.maxother = 60


@dataclass(frozen=True, slots=True)
class Packed:
    """An object as a pickle stream and the buffers that it refers to, in order."""

    head: bytes
    buffers: Sequence[memoryview]  # contiguous bytes; they alias the object's memory until they are copied

    @property
    def num_bytes(self) -> int:
        """Size of everything, in bytes."""
        return len(self.head) + sum(len(buffer) for buffer in self.buffers)


def dumps(obj: Any, name: str = "object") -> Packed:
    """Packs `obj`; its tensors' memory is referred to, not copied.

    Args:
        obj: anything that can be pickled.
        name: what to call it in an error.

    Raises:
        SampleError: something in it can't be pickled; names the type and where it is, such as `batch['meta'].fn`.
    """
    buffers: list[PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, _PROTOCOL, buffer_callback=buffers.append).dump(obj)
    except Exception as error:
        raise _cannot_send(obj, name, error) from error
    return Packed(stream.getvalue(), [buffer.raw() for buffer in buffers])


def loads(head: Buffer, buffers: Iterable[Any], place: Place | None = None) -> Any:
    """Rebuilds an object on top of writable `buffers`, which live on as its tensors' memory.

    Args:
        head: `Packed.head`.
        buffers: as many as were packed, in their order.
        place: applied to every tensor that was sent as memory, once per tensor.

    Raises:
        SampleError: the object can't be rebuilt here.
    """
    try:
        if place is None:
            return pickle.loads(head, buffers=buffers)
        return _Unpickler(head, buffers, place).load()
    except Exception as error:
        raise _cannot_rebuild(error) from error


def dumps_bytes(obj: Any, name: str = "object") -> bytes:
    """Packs `obj` into one `bytes`. Arguments and errors as for `dumps`."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, _PROTOCOL).dump(obj)
    except Exception as error:
        raise _cannot_send(obj, name, error) from error
    return stream.getvalue()


def loads_bytes(data: Buffer) -> Any:
    """Rebuilds what `dumps_bytes` packed. Errors as for `loads`."""
    return loads(data, ())


class _Pickler(pickle.Pickler):
    """Protocol 5, with tensors and arrays as buffers."""

    def reducer_override(self, obj: Any) -> Any:
        # Runs for every object that is no plain container or number, so the commonest case is decided first.
        kind = type(obj)
        if kind is torch.Tensor:
            return _reduce_tensor(obj)
        if kind is np.ndarray:
            return _reduce_array(obj)
        return NotImplemented


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if tensor.dtype not in _NATIVE or tensor.__dict__:
        return _reduce_uncommon_tensor(tensor)
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # requires grad, conjugated, sparse, on a device: asking each time costs more
        return _reduce_uncommon_tensor(tensor)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return _tensor, (_buffer(array), array.dtype, array.shape)


def _reduce_uncommon_tensor(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        return NotImplemented
    if tensor.requires_grad or tensor.__dict__:
        return _decorated, (tensor.detach(), tensor.requires_grad, dict(tensor.__dict__))
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if plain.dtype in _NATIVE:
        array = plain.numpy()
        return _tensor, (_buffer(array), array.dtype, array.shape)
    flat = plain.reshape(-1)
    if flat.stride(0) != 1:  # counts as contiguous with less than two elements, but can't be viewed as bytes
        flat = flat.new_empty(flat.shape).copy_(flat)
    raw = flat.view(torch.uint8).numpy()
    return _tensor_of_bytes, (_buffer(raw), plain.dtype, tuple(plain.shape))


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    flags = array.flags
    if (
        array.dtype.hasobject
        or array.dtype.kind not in "biufcSUV"
        or not array.dtype.isnative
        or _has_times(array.dtype)
    ):
        return NotImplemented  # no buffer of these: NumPy sends them in the stream
    if not (flags.c_contiguous and flags.writeable):
        array = np.array(array, order="C", copy=True)  # a read-only one would arrive read-only
    return _array, (_buffer(array), array.dtype, array.shape)


def _has_times(dtype: np.dtype[Any]) -> bool:
    """Whether a structured dtype has a part, at any depth, that no buffer can hold."""
    if dtype.kind != "V":
        return dtype.kind in "mM"
    parts = [dtype.fields[name][0] for name in dtype.names or ()] if dtype.fields is not None else []
    parts += [dtype.subdtype[0]] if dtype.subdtype is not None else []
    return any(map(_has_times, parts))


#: NumPy's stubs don't say that arrays have the buffer protocol.
_buffer: Callable[[np.ndarray[Any, Any]], PickleBuffer] = PickleBuffer  # type: ignore[assignment]


def _tensor(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.ndarray(shape, dtype, buffer))


def _tensor_of_bytes(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(buffer, np.uint8)).view(dtype).reshape(shape)


def _array(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer)
    return array


def _decorated(tensor: torch.Tensor, requires_grad: bool, attributes: dict[str, Any]) -> torch.Tensor:
    tensor.__dict__.update(attributes)
    return tensor.requires_grad_(requires_grad)


_BUILDERS: dict[str, Callable[..., torch.Tensor]] = {"_tensor": _tensor, "_tensor_of_bytes": _tensor_of_bytes}


class _Unpickler(pickle.Unpickler):
    """Rebuilds tensors where `place` puts them."""

    def __init__(self, head: Buffer, buffers: Iterable[Any], place: Place) -> None:
        super().__init__(io.BytesIO(head), buffers=buffers)
        self._place = place

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in _BUILDERS:
            return partial(self._build, _BUILDERS[name])
        return super().find_class(module, name)

    def _build(self, builder: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        return self._place(builder(*args))


def locate_unpicklable(obj: Any, name: str, can_pickle: Callable[[Any], bool] | None = None) -> tuple[str, Any]:
    """The innermost part of `obj` that can't be pickled, and where it is.

    Args:
        obj: something of which `can_pickle` says False.
        name: what to call it; the path starts with it.
        can_pickle: the judge; that of `dumps` by default.

    Returns:
        Path and part, such as `("batch['meta'].fn", <function <lambda>>)`.
    """
    judge = can_pickle or _can_pickle
    seen = {id(obj)}
    for _ in range(_MAX_DEPTH):
        culprit = next(((p, part) for p, part in _parts(obj) if id(part) not in seen and not judge(part)), None)
        if culprit is None:
            break
        name, obj = name + culprit[0], culprit[1]
        seen.add(id(obj))
    return name, obj


def _can_pickle(obj: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), _PROTOCOL, buffer_callback=lambda _: None).dump(obj)
    except Exception:  # whatever it is, it can't be pickled
        return False
    return True


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts that a pickle of `obj` would hold, each with what to append to a path."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{_short.repr(key)}]", value
            yield f".keys()[{_short.repr(key)}]", key
    elif isinstance(obj, list | tuple | set | frozenset):
        for i, value in enumerate(obj):
            yield f"[{i}]", value
    elif isinstance(obj, partial):
        yield ".func", obj.func
        yield ".args", obj.args
        yield ".keywords", obj.keywords
    elif isinstance(obj, MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(getattr(obj, "__dict__", None), dict):
        yield from ((f".{key}", value) for key, value in obj.__dict__.items())
    for slot in _slots(type(obj)):
        if hasattr(obj, slot):
            yield f".{slot}", getattr(obj, slot)


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _cannot_send(obj: Any, name: str, error: Exception) -> SampleError:
    path, part = locate_unpicklable(obj, name)
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    return SampleError(
        f"{path} is {_short.repr(part)}, a {kind}, which can't be sent to another process "
        f"({type(error).__name__}: {error}). Return data that can be pickled: tensors, arrays, numbers, strings, "
        "containers of them, and instances of classes and functions that are defined at the top of a module"
    )


def _cannot_rebuild(error: Exception) -> SampleError:
    return SampleError(
        f"an object that another process sent can't be rebuilt in this one ({type(error).__name__}: {error}). "
        "Its class must be importable here, under the same name, and must survive pickling"
    )
