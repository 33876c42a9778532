"""How a loader's ranks find each other: run in the training process, through the default group's store alone.

No collective is run on the training group, which may be NCCL and in use. Rank 0 hosts one store per default group;
every rank publishes a record under its key in the default store, reads all records, and concludes the same from them.

Forking while peers connect is a trap: the store's server thread, in rank 0's training process, resolves the name of
every peer that connects, under a lock of the C library that a child forked at that moment inherits locked for ever. So
where collate processes are forked, rank 0 lets its peers go on only once its own one is there (see `admit_peers`), and
forks for its next loader only once the peers of the one before have connected.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from odb.errors import ConfigError, ExchangeTimeout, PeerFailedError, PeerLostError
from odb.exchange import _private, hosts
from odb.exchange.base import Poll
from odb.exchange.gloo import GlooAddress, note_hosted
from odb.exchange.monitor import first_line
from odb.exchange.watch import bounded, name_ranks

dist: Any = torch.distributed  # its stubs leave out the stores

_numbers = itertools.count()
_texts = itertools.count()
_connecting: list[tuple[str, int]] = []  # rank 0: prefix and size of exchanges whose ranks may not have connected yet
_hosted: tuple[weakref.ref[Any], Any] | None = None  # the default store for which we host, and what we host


#: Where a rank's program that fails says so, and how often those look that wait for it (seconds).
_FAILED = "odb/failed"
_LOOK_S = 1.0
#: How long rank 0 waits with its next fork for peers that are about to connect (seconds).
_CONNECT_S = 10.0


@dataclass(frozen=True)
class Record:
    """What one global rank publishes of itself."""

    dp_rank: int
    dp_world_size: int
    host: str  # see `hosts.identity`
    addresses: tuple[str, ...]  # see `hosts.own_addresses`
    port: int = 0  # rank 0: of the store that it hosts
    store_name: str = ""  # rank 0: the name by which all ranks reached it already, if any
    error: str = ""  # why this rank can't take part

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(self.__dict__)

    @classmethod
    def decode(cls, raw: bytes) -> Record:
        """The inverse of `encode`."""
        fields = json.loads(raw)
        return cls(**{**fields, "addresses": tuple(fields["addresses"])})


def rendezvous(
    dp_rank: int | None = None,
    dp_world_size: int | None = None,
    timeout_s: float = 600.0,
    fingerprint: Mapping[str, str] | None = None,
    loader_number: int | None = None,
    forks: bool = False,
    poll: Poll | None = None,
) -> GlooAddress | None:
    """Finds the other ranks of this loader. Collective over the default group's ranks, in the same order on all.

    Args:
        dp_rank: this rank among the data-parallel ranks; default: the global rank.
        dp_world_size: how many those are; given together with `dp_rank`.
        timeout_s: for the slowest rank to come, and later for a peer that is silent (seconds).
        fingerprint: settings, compared by `GlooExchange.explain_disagreement`.
        loader_number: which loader this is, equal on all ranks (see `next_loader_number`); default: the next one.
        forks: this process is about to fork the one that connects; `admit_peers` must be called once it did.
        poll: called while waiting.

    Returns:
        What `GlooExchange.connect` needs, once; None where there is nobody to meet: no default group, or one rank.

    Raises:
        ConfigError: the interface, the addresses or the data-parallel ranks can't be right.
        ExchangeTimeout: ranks did not come; names them.
        PeerFailedError: another rank can't take part.
        PeerLostError: the default group's store is gone.
    """
    if (dp_rank is None) != (dp_world_size is None):
        raise ConfigError(f"dp_rank={dp_rank} and dp_world_size={dp_world_size}: give both or neither")
    if not (dist.is_available() and dist.is_initialized()):
        if dp_world_size is not None and dp_world_size > 1:
            raise ConfigError(f"dp_world_size={dp_world_size}, but torch.distributed is not initialised")
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1 or dp_world_size == 1:
        return None
    claim = (rank, world_size) if dp_rank is None or dp_world_size is None else (dp_rank, dp_world_size)
    number = next_loader_number() if loader_number is None else loader_number
    default = _private.default_store()
    with _default_store_answers():
        _publish(default, f"odb/{number}", rank, claim)
    wait = _Wait(default, f"odb/{number}", number, timeout_s, poll)
    records = wait.for_records(world_size)
    address = resolve(records, rank, number, timeout_s, dict(fingerprint or {}))
    if rank != 0:
        wait.for_admission()
        return address
    if forks:
        wait.for_connections(_hosted_store(default))
    _connecting.extend(_exchanges(records, number))
    if not forks:
        admit_peers(address)
    return address


def admit_peers(address: GlooAddress) -> None:
    """Lets the other ranks connect to what this process hosts; does nothing on ranks that host nothing.

    To be called after `rendezvous(forks=True)`, once the process that connects has been forked.
    """
    if dist.get_rank() == 0:
        with _default_store_answers():
            _private.default_store().set(f"odb/{address.loader_number}/open", "1")


def refuse(reason: str, dp_rank: int | None = None, dp_world_size: int | None = None) -> None:
    """Tells ranks that will wait for this one's next loader why it does not come. Local; arguments as in `rendezvous`."""
    if not is_initialised() or dp_world_size == 1 or dist.get_world_size() == 1:
        return
    rank = dist.get_rank()
    own, size = (rank, dist.get_world_size()) if dp_rank is None or dp_world_size is None else (dp_rank, dp_world_size)
    record = Record(own, size, "", (), error=bounded(reason, 2000))
    with suppress(dist.DistError):  # where they are gone, there is nobody to tell
        _write(_private.default_store(), f"odb/{next_loader_number()}", rank, record)


def refuse_at_exit(reason: str) -> None:
    """The same at the end of a program that failed: ranks that wait for this one, or will, learn why it won't come.

    Waits for nobody: a store whose host is stopped would keep this process from ending.
    """
    if not is_initialised() or dist.get_world_size() == 1:
        return
    with suppress(dist.DistError):
        _private.default_store().set(_FAILED, json.dumps([dist.get_rank(), bounded(reason)]))


def is_initialised() -> bool:
    """Whether this process belongs to a default group."""
    return bool(dist.is_available() and dist.is_initialized())


def global_rank_and_size() -> tuple[int, int]:
    """(rank, size) of the default group, (0, 1) without one. Local."""
    return (dist.get_rank(), dist.get_world_size()) if is_initialised() else (0, 1)


def exchange_texts(text: str, rank: int, world_size: int, timeout_s: float) -> list[str]:
    """The texts of all data-parallel ranks, in rank order. Collective; through the default group's store.

    Raises:
        ExchangeTimeout: ranks did not come; names them.
        PeerFailedError: another rank's program has failed.
        PeerLostError: the default group's store is gone.
    """
    if world_size == 1 or not is_initialised():
        return [text]
    with _default_store_answers():
        return _texts_of_all(text, next(_texts), rank, world_size, timeout_s)


def _texts_of_all(text: str, number: int, rank: int, world_size: int, timeout_s: float) -> list[str]:
    store = dist.PrefixStore(f"odb/texts/{number}", _private.default_store())
    store.set(str(rank), text)
    missing, deadline = set(range(world_size)), time.monotonic() + timeout_s
    check_all_live = _LiveCheck(_private.default_store())
    while missing:
        missing -= {other for other in missing if store.check([str(other)])}
        if missing and time.monotonic() > deadline:
            raise ExchangeTimeout(
                f"{name_ranks(sorted(missing))} did not call this within {timeout_s:g} s: it is a collective, call it "
                "on all ranks",
                tuple(sorted(missing)),
            )
        if missing:
            check_all_live()
            time.sleep(0.02)
    # Whoever came here has read the texts of the time before: they can go.
    dist.PrefixStore(f"odb/texts/{number - 1}", _private.default_store()).delete_key(str(rank))
    return [store.get(str(other)).decode() for other in range(world_size)]


def next_loader_number() -> int:
    """A number for a loader: how many this process made before. For loaders that first iterate in another order."""
    return next(_numbers)


def resolve(
    records: Sequence[Record], rank: int, number: int, timeout_s: float, fingerprint: dict[str, str]
) -> GlooAddress:
    """What global rank `rank` concludes from all records. Pure; `rendezvous` lists what it raises."""
    failed = [other for other, record in enumerate(records) if record.error]
    if failed:
        raise PeerFailedError(
            f"{name_ranks(failed)} can't start the exchange: {records[failed[0]].error}", tuple(failed)
        )
    members = exchange_members([(record.dp_rank, record.dp_world_size) for record in records], rank)
    all_hosts = [record.host for record in records]
    addresses = [hosts.pick_address(record.addresses, all_hosts) for record in records]
    store_host = records[0].store_name or addresses[0]
    hosts.check_reachable(all_hosts, addresses, store_host)
    return GlooAddress(
        host=store_host,
        port=records[0].port,
        prefix=_prefix(number, members),
        rank=records[rank].dp_rank,
        world_size=len(members),
        timeout_s=timeout_s,
        own_address=addresses[rank],
        interfaces=hosts.chosen_interfaces(),
        host_rank=records[0].dp_rank,
        loader_number=number,
        global_ranks=members,
        fingerprint=tuple(sorted(fingerprint.items())),
    )


def _prefix(number: int, members: Sequence[int]) -> str:
    return f"odb/{number}/{members[0]}"


def _exchanges(records: Sequence[Record], number: int) -> list[tuple[str, int]]:
    """Prefix and number of ranks of every exchange of a loader: one, or as many as there are model-parallel partners."""
    claims = [(record.dp_rank, record.dp_world_size) for record in records]
    firsts = [rank for rank, (dp_rank, _) in enumerate(claims) if dp_rank == 0]
    return [(_prefix(number, [first]), claims[0][1]) for first in firsts]


def exchange_members(claims: Sequence[tuple[int, int]], rank: int) -> tuple[int, ...]:
    """The global ranks of the exchange that `rank` is in, by data-parallel rank.

    `claims`: (dp_rank, dp_world_size) of every global rank. Ranks with equal dp_rank are model-parallel partners: the
    first of each make one exchange, the second of each another, and so on.

    Raises:
        ConfigError: the claims contradict each other; names the ranks.
    """
    sizes: dict[int, list[int]] = defaultdict(list)
    partners: dict[int, list[int]] = defaultdict(list)
    for other, (dp_rank, dp_world_size) in enumerate(claims):
        sizes[dp_world_size].append(other)
        partners[dp_rank].append(other)
    if len(sizes) > 1:
        said = "; ".join(f"{size} on {name_ranks(who)}" for size, who in sorted(sizes.items()))
        raise ConfigError(f"the ranks do not agree on dp_world_size: {said}")
    (size,) = sizes
    outside = [other for other, (dp_rank, _) in enumerate(claims) if not 0 <= dp_rank < size]
    if outside:
        given = ", ".join(str(claims[other][0]) for other in outside[:16])
        raise ConfigError(f"dp_rank must lie in [0, dp_world_size={size}): {name_ranks(outside)} gave {given}")
    count = len(claims) // size
    uneven = {dp_rank: partners[dp_rank] for dp_rank in range(size) if len(partners[dp_rank]) != count}
    if uneven or count * size != len(claims):
        said = "; ".join(f"dp_rank {dp_rank}: {name_ranks(who)}" for dp_rank, who in sorted(uneven.items())[:8])
        raise ConfigError(
            f"{len(claims)} ranks with dp_world_size={size} need {len(claims) / size:g} ranks for every dp_rank, but "
            f"the global ranks are {said}"
        )
    replica = partners[claims[rank][0]].index(rank)
    return tuple(partners[dp_rank][replica] for dp_rank in range(size))


def _publish(default: Any, prefix: str, rank: int, claim: tuple[int, int]) -> None:
    """Writes this rank's record; also when this rank finds that it can't take part, so that nobody waits for it."""
    try:
        record = _own_record(default, rank, claim)
    except Exception as error:
        _write(default, prefix, rank, Record(*claim, "", (), error=bounded(str(error), 2000)))
        raise
    _write(default, prefix, rank, record)


def _write(default: Any, prefix: str, rank: int, record: Record) -> None:
    default.set(f"{prefix}/{rank}", record.encode())
    default.add(f"{prefix}/count", 1)


def _own_record(default: Any, rank: int, claim: tuple[int, int]) -> Record:
    store_host = _host_of(default)
    addresses = tuple(hosts.own_addresses(hosts.chosen_interfaces(), store_host))
    if rank != 0:
        return Record(*claim, hosts.identity(), addresses)
    known = store_host if store_host is not None and hosts.is_ours(store_host) else ""
    return Record(*claim, hosts.identity(), addresses, _hosted_store(default).port, known)


def _host_of(store: Any) -> str | None:
    """Under which name the default store was reached; None where it is no TCP store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else None


def _hosted_store(default: Any) -> Any:
    """The store that this process hosts for the current default group: one for all loaders.

    It lives until the process ends or another default group is in use: peers may still say why they failed.
    """
    global _hosted
    if _hosted is None or _hosted[0]() is not default:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        _connecting.clear()
        _hosted = (weakref.ref(default), store)
        note_hosted(store)
    return _hosted[1]


def _default_store_gone(why: str) -> PeerLostError:
    text = f"the default group's store can't be reached any more ({why}): "
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return PeerLostError(text + "torchrun, which hosts it, is gone")
    return PeerLostError(text + "rank 0, which hosts it, is gone", (0,))


@contextmanager
def _default_store_answers() -> Iterator[None]:
    """Says who is gone where the store's own error says only that a connection broke."""
    try:
        yield
    except dist.DistError as gone:
        raise _default_store_gone(first_line(gone)) from None


class _LiveCheck:
    """Raises where the program of another rank has failed meanwhile, see `refuse_at_exit`. Asks seldom."""

    def __init__(self, default: Any) -> None:
        self._default = default
        self._asked_at = 0.0

    def __call__(self) -> None:
        if time.monotonic() - self._asked_at < _LOOK_S:
            return
        self._asked_at = time.monotonic()
        if self._default.check([_FAILED]):
            rank, text = json.loads(self._default.get(_FAILED))
            raise PeerFailedError(f"{name_ranks([rank])} failed and will not come:\n{text}", (rank,))


class _Wait:
    """Waits on the default store. Asks for one small value until it is there: cheap for the store, quiet in the log."""

    def __init__(self, default: Any, prefix: str, number: int, timeout_s: float, poll: Poll | None) -> None:
        self._default, self._prefix, self._number = default, prefix, number
        self._timeout_s, self._poll = timeout_s, poll
        self._check_all_live = _LiveCheck(default)

    def for_records(self, world_size: int) -> list[Record]:
        """All ranks' records."""

        def late() -> ExchangeTimeout:
            missing = [rank for rank in range(world_size) if not self._default.check([f"{self._prefix}/{rank}"])]
            return ExchangeTimeout(
                f"{name_ranks(missing)} has not started its loader number {self._number} within {self._timeout_s:g} s "
                f"(timeout_s): every rank must iterate its loaders in the same order, and a loader that only some "
                f"ranks use needs dp_world_size=1",
                tuple(missing),
            )

        self._until(lambda: self._are_all_here(world_size), late)
        with _default_store_answers():
            return [Record.decode(self._default.get(f"{self._prefix}/{rank}")) for rank in range(world_size)]

    def _are_all_here(self, world_size: int) -> bool:
        self._check_all_live()  # first, since a rank may have been here and failed since
        return bool(self._default.add(f"{self._prefix}/count", 0) >= world_size)

    def for_admission(self) -> None:
        """Rank 0's word that peers may connect."""

        def late() -> ExchangeTimeout:
            return ExchangeTimeout(
                f"rank 0 has not started the process of its loader number {self._number} within {self._timeout_s:g} s",
                (0,),
            )

        self._until(lambda: self._default.check([f"{self._prefix}/open"]), late)

    def for_connections(self, hosted: Any) -> None:
        """All ranks of earlier exchanges have connected. A rank that doesn't is no reason to wait for long."""
        deadline = time.monotonic() + min(self._timeout_s, _CONNECT_S)
        while _connecting and time.monotonic() < deadline:
            _connecting[:] = [(prefix, size) for prefix, size in _connecting if hosted.add(f"{prefix}/here", 0) < size]
            if _connecting:
                if self._poll is not None:
                    self._poll()
                time.sleep(0.005)
        _connecting.clear()

    def _until(self, there: Callable[[], bool], late: Callable[[], ExchangeTimeout]) -> None:
        began, pause = time.monotonic(), 0.001
        with _default_store_answers():
            while not there():
                if time.monotonic() - began > self._timeout_s:
                    raise late()
                if self._poll is not None:
                    self._poll()
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
