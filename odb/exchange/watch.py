"""Who is late, who is busy, who left: the rules by which a transport tells a slow rank from a lost one.

Pure: no clock, no I/O, no torch. A transport feeds in what it saw and when, and raises what comes out.

- Every rank publishes a *beat* about twice a second: a counter that grows while its process runs, the number of the
  collective that it entered last, and whether it waits for its own consumer.
- A rank is late in a collective when it has not entered it and was neither seen busy nor had the time limit left. A
  busy rank counts only while its counter grows: a stopped process is not busy.
- Every rank that leaves for a reason appends an *event* to one common log, so that all ranks read the same first cause.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from odb.errors import ExchangeError, ExchangeTimeout, PeerClosedError, PeerFailedError, PeerLostError

#: Bytes of a published text. Tracebacks end with what matters and begin with where it came from: the middle is cut.
MAX_TEXT_BYTES = 16_000

FAILED, TIMEOUT, LOST, CLOSED = "failed", "timeout", "lost", "closed"
_ERRORS: dict[str, type[ExchangeError]] = {TIMEOUT: ExchangeTimeout, LOST: PeerLostError, FAILED: PeerFailedError}


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's sign of life."""

    counter: int  # grows with every beat
    call: int  # collectives entered so far
    busy: bool  # waits for its own consumer
    seen: int  # events of the common log that it has read

    def encode(self) -> str:
        """As JSON, for a store."""
        return json.dumps([self.counter, self.call, int(self.busy), self.seen])

    @classmethod
    def decode(cls, raw: bytes) -> Beat:
        """The inverse of `encode`."""
        counter, call, busy, seen = json.loads(raw)
        return cls(int(counter), int(call), bool(busy), int(seen))


@dataclass(frozen=True, slots=True)
class Event:
    """Why a rank does not go on. Its text, if any, is stored apart from it."""

    rank: int  # who says so
    kind: str  # FAILED, TIMEOUT, LOST or CLOSED
    call: int  # collectives that the rank had entered by then
    ranks: tuple[int, ...]  # whom it is about

    def encode(self) -> str:
        """As one line of JSON: lines can be appended to each other."""
        return json.dumps([self.rank, self.kind, self.call, list(self.ranks)]) + "\n"

    @classmethod
    def decode_all(cls, raw: bytes) -> list[Event]:
        """The events of a log, in the order in which they were appended."""
        rows = [json.loads(line) for line in raw.splitlines() if line.strip()]
        return [cls(int(rank), str(kind), int(call), tuple(int(r) for r in ranks)) for rank, kind, call, ranks in rows]

    def error(self, text: str, name: str) -> ExchangeError:
        """What a peer raises that reads this. `name` is how it calls the rank that said so."""
        if self.kind == CLOSED:
            return PeerClosedError(f"{name} has closed its loader, and this rank still waits for it", (self.rank,))
        if self.kind == FAILED:
            return PeerFailedError(f"{name} failed:\n{text}", (self.rank,))
        return _ERRORS[self.kind](f"{text} (reported by {name})", self.ranks)


def kind_of(error: ExchangeError) -> str:
    """The event's kind under which an error that a rank found by itself is passed on."""
    return TIMEOUT if isinstance(error, ExchangeTimeout) else LOST


def bounded(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """A text of at most `limit` bytes of UTF-8; of a longer one the middle is cut out."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode()
    mark = b"\n[...]\n"
    head = limit // 4
    return (raw[:head] + mark + raw[len(raw) - (limit - head - len(mark)) :]).decode("utf-8", "ignore")


def name_ranks(ranks: Sequence[int], global_ranks: Sequence[int] = ()) -> str:
    """`rank 1`, `ranks 1, 3`; with the global rank where it differs. A long list is cut."""
    if not ranks:
        return "no rank"
    parts = [_name_rank(rank, global_ranks) for rank in ranks[:16]]
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts) + more


def _name_rank(rank: int, global_ranks: Sequence[int]) -> str:
    if rank >= len(global_ranks) or global_ranks[rank] == rank:
        return str(rank)
    return f"{rank} (global rank {global_ranks[rank]})"


class Lateness:
    """How long each rank has kept this one waiting in the current collective.

    `timeout_s` bounds the time in which a rank is neither there nor busy. `margin_s` is added before anybody is
    blamed: beats are old by that much, and a rank that came in at the last moment must not be named.
    """

    def __init__(self, world_size: int, timeout_s: float, margin_s: float = 0.0, silent_s: float = 2.0) -> None:
        self.timeout_s = timeout_s
        self._margin_s = margin_s
        self._silent_s = silent_s
        self._world_size = world_size
        self.begin(0, 0.0)

    def begin(self, call: int, now: float) -> None:
        """This rank entered collective number `call` at `now` (seconds of any monotonic clock)."""
        self._call = call
        self._clock = [now] * self._world_size  # when each rank's time limit began to run
        self._grew = [now] * self._world_size  # when each rank's counter last grew
        self._counter = [-1] * self._world_size
        self._here = [False] * self._world_size

    def observe(self, beats: Sequence[Beat], now: float) -> None:
        """Takes in every rank's last beat as read at `now`."""
        for rank, beat in enumerate(beats):
            grew = beat.counter > self._counter[rank]
            here = beat.call >= self._call
            if grew:
                self._counter[rank], self._grew[rank] = beat.counter, now
            if (grew and beat.busy and not here) or here > self._here[rank]:
                self._clock[rank] = now
            self._here[rank] = here

    def overdue(self, now: float) -> tuple[int, ...] | None:
        """The ranks whose time is up at `now`; None while nobody's is.

        Empty when every rank is there and alive and the collective still does not end: a network that drops packets.
        """
        up = [rank for rank in range(self._world_size) if now - self._clock[rank] > self.timeout_s + self._margin_s]
        absent = [rank for rank in up if not self._here[rank]]
        if absent:
            return tuple(absent)
        if not all(self._here) or len(up) < self._world_size:
            return None
        return tuple(rank for rank in up if now - self._grew[rank] > self._silent_s)

    def error(self, ranks: tuple[int, ...], global_ranks: Sequence[int] = ()) -> ExchangeTimeout:
        """What to raise when `overdue` named these ranks."""
        limit = f"{self.timeout_s:g} s"
        if not ranks:
            text = f"all ranks entered exchange {self._call}, yet it did not finish within {limit}: check the network"
            return ExchangeTimeout(text)
        text = (
            f"{name_ranks(ranks, global_ranks)} did not come to exchange {self._call} within {limit} (timeout_s) and "
            f"did not say that it waits for its consumer: slow preprocessing, a stopped process or a hang there; "
            f"raise timeout_s if that much time is expected"
        )
        return ExchangeTimeout(text, ranks)
