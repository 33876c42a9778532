"""What a transport between ranks is: two collectives on integers, a word about being busy, a word about failing.

A transport never sees a sample, and nothing that it receives is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from odb.plan.types import I64

#: Called in every slice of a wait, so that the caller can react to its own parent; may raise to leave the wait.
Poll = Callable[[], None]


@runtime_checkable
class Exchange(Protocol):
    """The ranks' meeting point. Calls are collective and come in the same order on all ranks."""

    rank: int
    world_size: int

    def all_gather(self, row: I64, poll: Poll | None = None) -> I64:
        """Gives this rank's row, shape (K,), and returns all rows, shape (W, K).

        Raises:
            PeerFailedError: another rank published a failure.
            PeerLostError: another rank is gone.
            ExchangeTimeout: a rank was silent beyond the time limit; names the ranks that are missing.
        """

    def all_reduce_sum(self, values: I64, poll: Poll | None = None) -> I64:
        """Sums an int64 array of any shape over all ranks. Raises as `all_gather` does."""

    def waiting_for_consumer(self) -> AbstractContextManager[None]:
        """While inside, peers are told that this rank waits for its own consumer, and wait on without limit."""

    def check(self) -> None:
        """Raises `PeerFailedError` if another rank has published a failure. Local and cheap; for waits elsewhere."""

    def explain_disagreement(self) -> str:
        """Which settings differ between which ranks, in words; "" where that can't be told. Never raises."""

    def publish_failure(self, text: str) -> None:
        """Tells all ranks why this one can't go on (bounded text). Never raises."""

    def linger(self, seconds: float) -> bool:
        """After a published failure: waits until all peers have seen it, at most so long. Never raises."""

    def close(self) -> None:
        """Leaves. Peers that still wait for this rank get an error that says that it left. Never raises."""
