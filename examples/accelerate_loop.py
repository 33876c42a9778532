"""A loop of one's own with Accelerate and gradient accumulation, batches under a token budget.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from tiny_llama import Chats, make_model
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from odb.integrations.accelerate import ODBAccelerateBridge, configure_accelerator


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    dataloader = DataLoader(Chats(), shuffle=True, num_workers=1)  # over the whole dataset, as Accelerate takes it
    bridge = configure_accelerator(accelerator, dataloader, token_budget=1024)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    total = 2 * len(Chats())
    scheduler = bridge.follow(get_cosine_schedule_with_warmup(optimizer, total // 10, total), total=total)
    means: list[float] = []
    for _ in range(2):
        train_epoch(accelerator, bridge, model, optimizer, scheduler, means)
    steps, epochs = bridge.state.optimizer_steps, bridge.state.epochs
    rank = accelerator.process_index
    print(f"rank {rank} epoch {epochs} steps {steps} loss {means[0]:.3f} -> {means[-1]:.3f}", flush=True)
    bridge.close()
    accelerator.end_training()


def train_epoch(
    accelerator: Accelerator,
    bridge: ODBAccelerateBridge,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    means: list[float],
) -> None:
    """One epoch; adds the mean over all tokens of each optimizer step."""
    part = torch.zeros(())
    for batch in bridge.dataloader:
        with accelerator.accumulate(model):
            info = bridge.consume_batch(batch)
            part += bridge.backward(model(**batch).loss, info)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            scheduler.step()  # to the sample that was reached; not prepared, so that it is one step
            means.append(accelerator.reduce(part, "mean").item())
            part = torch.zeros(())


if __name__ == "__main__":
    main()
