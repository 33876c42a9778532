"""DeepSpeed, ZeRO stage 2: its engine, odb's loader, a checkpoint that holds both.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 examples/deepspeed_loop.py

DS_ACCELERATOR is for machines without a GPU; at the first start on such a machine DeepSpeed compiles for half a minute.
"""

from __future__ import annotations

import tempfile

import deepspeed
import torch
import torch.distributed as dist
from tiny import Chats, LanguageModel

import odb
import odb.resume
from odb.integrations.deepspeed import batch_config, step

CONFIG = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}}


def main() -> None:
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    loader = odb.ODBDataLoader(Chats(), token_budget=1024, num_workers=1, shuffle=True, grad_accum_steps=2)
    model = LanguageModel()
    engine, *_ = deepspeed.initialize(model=model, config=batch_config(loader, CONFIG))
    with loader, tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        for epoch in range(2):
            train_epoch(engine, loader, epoch)
            engine.save_checkpoint(shared[0], client_state={"odb": odb.resume.gather(loader)})
        _, client_state = engine.load_checkpoint(shared[0])  # as a later run would
        loader.load_state_dict(client_state["odb"])
        dist.barrier()
    dist.destroy_process_group()


def train_epoch(engine: deepspeed.DeepSpeedEngine, loader: odb.ODBDataLoader, epoch: int) -> None:
    """One epoch; prints the token mean of its last optimizer step."""
    mean, last, num_steps = torch.zeros((), device=engine.device), 0.0, 0
    for batch in loader:
        info = odb.pop_step_info(batch)
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        mean += step(engine, engine(**batch), info)  # backward, and the optimizer's step where it is due
        num_steps += 1
        if info.sync_gradients:
            dist.all_reduce(mean)
            last = mean.item() / dist.get_world_size()
            mean.zero_()
    print(f"rank {dist.get_rank()} epoch {epoch} steps {num_steps} loss {last:.3f}", flush=True)


if __name__ == "__main__":
    main()
