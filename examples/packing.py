"""A tiny causal model trained on packed rows, without kernels for varying lengths: SDPA with a block-diagonal mask.

    torchrun --standalone --nproc-per-node 2 examples/packing.py

Each rank makes rows of whole samples under the budget, both run the same number of steps, and the gradient is that of the
mean over all labels of the step. With `FlattenCollator` (the default for one row a batch) hand `cu_seqlens` and
`max_seqlen` to your attention kernel instead; `transformers_names=True` adds the names that its models know.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import odb

VOCABULARY, WIDTH, HEADS, LONGEST = 64, 32, 4, 512


class Arithmetic(torch.utils.data.Dataset):
    """Counting sequences of very different lengths: what comes next can be learned in a minute."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        start, step = (int(torch.randint(1, 8, (), generator=draw)) for _ in range(2))
        length = int(torch.empty(()).log_normal_(4.0, 0.8, generator=draw).clamp(4, LONGEST))
        tokens = (start + step * torch.arange(length)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


class TinyModel(nn.Module):
    """One layer of attention that takes whatever mask the batch brings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=batch["attention_mask"])
        logits = self.out(x + attended.transpose(1, 2).flatten(-2))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rows-per-batch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = TinyModel()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = LONGEST * args.rows_per_batch
    collate = odb.collators.BlockMaskCollator(row_capacity=LONGEST)
    with odb.ODBDataLoader(
        Arithmetic(),
        token_budget=budget,
        layout="packed",
        rows_per_batch=args.rows_per_batch,
        balance="labels",
        collate_fn=collate,
        shuffle=True,
        num_workers=args.workers,
    ) as loader:
        for epoch in range(args.epochs):
            for batch in loader:
                info = odb.pop_step_info(batch)
                mean = model(batch)
                odb.scale_loss(mean, info).backward()
                optimizer.step()
                optimizer.zero_grad()
                if info.step % 20 == 0 and not (dist.is_initialized() and dist.get_rank()):
                    rows, width = batch["input_ids"].shape
                    print(f"epoch {epoch} step {info.step:3}: {rows} rows of {width}, mean loss {mean.item():.3f}")
        stats = loader.stats()
        print(f"{stats.emitted_samples} samples in {stats.steps} steps, {stats.padding:.1%} padding")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
