"""Ranks as real processes: what the tests of the Gloo exchange run on."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from odb.exchange.gloo import GlooAddress, GlooExchange

_prefixes = itertools.count()


@dataclass(frozen=True)
class Result:
    """What a rank's process came to."""

    value: Any = None
    error: BaseException | None = None  # what its body raised
    seconds: float = 0.0  # that the body took


class Rank:
    """A process that runs `body(pipe, ...)` once told to, and sends home what it gives or raises, and words in between.

    Told to, since nothing may connect to a store of this process while it forks (see `odb.exchange.rendezvous`).
    """

    def __init__(self, body: Callable[..., Any], *args: Any, method: str = "fork") -> None:
        context = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, body, args))
        self.process.start()
        theirs.close()

    def say(self, word: str) -> Rank:
        """Sends a word to the process; the first one starts its body."""
        self._pipe.send(word)
        return self

    def hear(self, limit_s: float = 30.0) -> Any:
        """The next thing that the process says."""
        assert self._pipe.poll(limit_s), f"process {self.process.pid} said nothing within {limit_s} s"
        return self._pipe.recv()

    def result(self, limit_s: float = 30.0) -> Result:
        """What the body came to, once the process is over."""
        word = self.hear(limit_s)
        while not isinstance(word, Result):
            word = self.hear(limit_s)
        self.process.join(limit_s)
        assert self.process.exitcode == 0
        return word

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Makes sure that nothing is left."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self._pipe.close()


def _run(pipe: Connection, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.recv()
    began = time.monotonic()
    try:
        result = Result(value=body(pipe, *args), seconds=time.monotonic() - began)
    except Exception as error:
        result = Result(error=error, seconds=time.monotonic() - began)
    pipe.send(result)
    pipe.close()


class World:
    """The addresses of ranks whose store is hosted here; and their processes, which end with the world."""

    def __init__(
        self, num_ranks: int, timeout_s: float = 30.0, fingerprints: list[dict[str, str]] | None = None
    ) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.fingerprints = fingerprints or [{}] * num_ranks
        self._ranks: list[Rank] = []

    def addresses(self) -> list[GlooAddress]:
        """One for each rank, of a new exchange."""
        prefix = f"test/{next(_prefixes)}"
        return [
            GlooAddress(
                host="127.0.0.1",
                port=self.store.port,
                prefix=prefix,
                rank=rank,
                world_size=self.num_ranks,
                timeout_s=self.timeout_s,
                own_address="127.0.0.1",
                fingerprint=tuple(settings.items()),
            )
            for rank, settings in enumerate(self.fingerprints)
        ]

    def start(self, body: Callable[..., Any], *args: Any, method: str = "fork") -> list[Rank]:
        """Runs `body(exchange, pipe, *args)` as every rank."""
        return self.run([(connected, address, body, *args) for address in self.addresses()], method)

    def run(self, bodies: list[tuple[Any, ...]], method: str = "fork") -> list[Rank]:
        """Runs every `(body, *args)` as `body(pipe, *args)` in a process."""
        ranks = [Rank(*body, method=method) for body in bodies]
        self._ranks += ranks
        return [rank.say("start") for rank in ranks]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.end()


def connected(pipe: Connection, address: GlooAddress, body: Callable[..., Any], *args: Any) -> Any:
    """The body of a rank with an exchange."""
    exchange = GlooExchange.connect(address)
    try:
        return body(exchange, pipe, *args)
    finally:
        exchange.close()


def free_port() -> int:
    """A port that nobody listens on now."""
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
