"""A plain loop with FSDP2 (`fully_shard`) and gradient accumulation. DDP differs in two lines, which are marked.

torchrun --standalone --nproc-per-node 2 examples/fsdp2_loop.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from tiny import Chats, LanguageModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import odb


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs: odb makes a Gloo group of its own either way
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = LanguageModel()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # DDP: model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = odb.ODBDataLoader(Chats(), token_budget=1024, num_workers=1, shuffle=True, grad_accum_steps=2)
    with loader:
        for epoch in range(2):
            report(epoch, *train_epoch(model, optimizer, loader))
    dist.destroy_process_group()


def train_epoch(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: odb.ODBDataLoader
) -> tuple[list[float], int]:
    """Token means of the epoch's optimizer steps, and the number of micro-steps."""
    means, mean, num_steps = [], torch.zeros(()), 0
    for batch in loader:  # the same number of times on every rank
        info = odb.pop_step_info(batch)
        model.set_requires_gradient_sync(info.sync_gradients)  # DDP: `with model.no_sync():` where it is False
        loss = odb.scale_loss(model(**batch), info)  # not divided by the number of micro-steps
        loss.backward()
        mean += loss.detach()
        num_steps += 1
        if info.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean)
            means.append(mean.item() / dist.get_world_size())
            mean = torch.zeros(())
    return means, num_steps


def report(epoch: int, means: list[float], num_steps: int) -> None:
    """One line per rank; the number of steps is the same."""
    print(f"rank {dist.get_rank()} epoch {epoch} steps {num_steps} loss {means[0]:.3f} -> {means[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
