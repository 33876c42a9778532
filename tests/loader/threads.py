"""Ranks as threads of one process: whole loaders, without a network, fast enough to interrupt at every step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import odb
from odb.exchange.memory import thread_exchanges
from odb.feed.node import Node
from odb.testing import LengthsDataset, collate

Body = Callable[[odb.ODBDataLoader, int], Any]


def together(world_size: int, body: Body, lengths: Any, make_sampler: Any = None, **options: Any) -> list[Any]:
    """`body(loader, rank)` on each rank, with a loader over samples of these lengths; what each returned."""
    exchanges = thread_exchanges(world_size, timeout_s=30)

    def connect(node: Node) -> Any:
        node.exchange = exchanges[node.spec.options.dp_rank or 0]
        return node.exchange

    def one(rank: int) -> Any:
        dataset = LengthsDataset(lengths)
        sampler = None if make_sampler is None else make_sampler(dataset, rank)
        place = {"dp_rank": rank, "dp_world_size": world_size, "sampler": sampler}
        with odb.ODBDataLoader(dataset, collate_fn=collate, **(place | options)) as loader:
            return body(loader, rank)

    with (
        mock.patch("odb.loader.rendezvous", lambda **_: None),
        mock.patch.object(Node, "connect", connect),
        ThreadPoolExecutor(world_size) as pool,
    ):
        futures = [pool.submit(one, rank) for rank in range(world_size)]
        return [future.result(timeout=60) for future in futures]
