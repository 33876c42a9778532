"""The ranks of this run: one process alone, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Ranks:
    """Who this process is, where it computes, and the group through which it exchanges small integers."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None  # Gloo, whatever the training group is; None when alone

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a CPU tensor, in place."""
        if self.control is not None:
            dist.all_reduce(values, group=self.control)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if self.control is None:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    @contextmanager
    def first_on_node_goes_first(self) -> Iterator[None]:
        """Runs the block on one rank of each node, then on the others: the first fills a cache, the rest read it."""
        if self.local_rank > 0:
            self.gather(None)
        yield
        if self.local_rank == 0:
            self.gather(None)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Moves the model to this rank's device and puts it under DDP, where there is more than one rank."""
        model = model.to(self.device)
        return model if self.control is None else DistributedDataParallel(model)


@contextmanager
def start_ranks() -> Iterator[Ranks]:
    """Joins the group that torchrun describes in the environment, or stands alone.

    Backend: NCCL where every local rank has a GPU of its own, Gloo otherwise. When the block raises, the group is left
    as it is: taking it down could wait for peers, while a quick death lets torchrun end them.
    """
    rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in _ENVIRONMENT)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", local_rank % num_gpus) if num_gpus else torch.device("cpu")
    if num_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # one core per rank: more threads than cores would only get in each other's way
    control = None
    if "RANK" in os.environ and world_size > 1:
        dist.init_process_group("nccl" if num_gpus >= local_world_size else "gloo", timeout=TIMEOUT)
        control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    yield Ranks(rank, local_rank, world_size, device, control)
    if control is not None:
        dist.destroy_process_group()


_ENVIRONMENT = (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
