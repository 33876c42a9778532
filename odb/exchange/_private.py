"""The names of PyTorch that are not public and that this package can't do without. Nothing else may be used.

`tests/exchange/test_private.py` fails when one of them changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # its stubs leave out what is used here


def default_store() -> Any:
    """The store through which the default group was made, as this process's own client of it.

    Why: the address of our own store must reach all ranks without a collective on the training group, which may be NCCL
    and may be in use; there is no public way to ask for the store that `init_process_group` made itself.
    """
    return dist.distributed_c10d._get_default_store()


def gloo_group(store: Any, rank: int, world_size: int, devices: Sequence[Any], timeout: timedelta) -> Any:
    """A Gloo group that no other part of PyTorch knows of, on given devices (see `ProcessGroupGloo.create_device`).

    Why: without options the constructor takes the address that the host's name resolves to, which on many hosts is
    loopback or nothing; the options' type and its fields have a leading underscore.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = list(devices)
    return dist.ProcessGroupGloo(store, rank, world_size, options)
