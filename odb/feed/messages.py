"""What the training process and its collate process say to each other. One module, so that the protocol can be read.

    training process                              collate process
      Begin(generation, order, base_seed)  ->       starts an epoch, may send `ready_batches` batches
                                           <-       Delivered(generation, delivery, counts)   one step
      Taken(generation)                    ->       one more may be sent
                                           <-       PeersLeft(generation, ranks)   nothing more can be planned
      End(generation)                      ->       the consumer left the epoch: discard, close, keep answering peers
                                           <-       Finished(generation, counts)   the epoch is over on all ranks
                                           <-       Failed(error, text)            nothing follows
      Shutdown(failure)                    ->       exits; tells the other ranks why, where the training loop failed

A generation numbers the epochs begun by this loader; what belongs to an older one than the current is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from odb.errors import SampleError
from odb.feed.assemble import Delivery
from odb.feed.engine import ResumePoint, RoundMark
from odb.feed.handoff import dumps_bytes, loads_bytes
from odb.feed.source import Order


@dataclass(frozen=True, slots=True)
class Counts:
    """Running counts of an epoch, as far as they are not in the deliveries themselves, and the round's mark."""

    rejected: dict[str, int]
    dropped: dict[str, int]
    rounds: int
    max_held_tokens: int
    mark: RoundMark | None = field(default=None, compare=False)  # a new one comes with a new count of rounds
    cut: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begin:
    """Start an epoch."""

    generation: int
    order: Order
    base_seed: int
    resume: ResumePoint | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The training loop took one batch."""

    generation: int


@dataclass(frozen=True, slots=True)
class End:
    """The training loop left the epoch."""

    generation: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The loader is closed."""

    failure: str = ""  # the exception that ended the training loop, with its traceback


@dataclass(frozen=True, slots=True)
class Delivered:
    """One step."""

    generation: int
    delivery: Delivery
    counts: Counts | None  # None: as before


@dataclass(frozen=True, slots=True)
class PeersLeft:
    """Other ranks left the epoch; there will be no further batch."""

    generation: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The epoch is over on all ranks."""

    generation: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Failed:
    """The collate process can't go on. `error` is the pickled exception where it could be pickled."""

    error: bytes | None
    text: str


Message = Any  # one of the above


def pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, None where it does not survive pickling."""
    try:
        data: bytes = dumps_bytes(error)
    except Exception:  # user exceptions may refuse in any way
        return None
    return data


def rebuilt(message: Failed, where: str = "collate process") -> Exception:
    """Another process's exception, of its own type where possible, caused by the original traceback's text."""
    cause = SampleError(f"in the {where}:\n{message.text}")
    if message.error is not None:
        try:
            error = loads_bytes(message.error)
        except Exception:  # user exceptions may refuse in any way
            error = None
        if isinstance(error, Exception):  # `sys.exit()` there must not end the training process, as if all were well
            error.__cause__ = cause
            return error
    return cause
