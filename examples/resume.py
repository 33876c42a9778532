"""A training script that may be stopped anywhere and goes on exactly: plain PyTorch, `torch.save`, `odb.checkpoint`.

    torchrun --standalone --nproc-per-node 2 examples/resume.py --folder /tmp/run                 # trains two epochs
    torchrun --standalone --nproc-per-node 2 examples/resume.py --folder /tmp/run --stop-after 9  # is killed on its way
    torchrun --standalone --nproc-per-node 2 examples/resume.py --folder /tmp/run                 # goes on: same numbers
    torchrun --standalone --nproc-per-node 3 examples/resume.py --folder /tmp/run                 # or on other ranks

Each rank prints a line for each optimizer step: which samples, and the loss summed over ranks. A run that was stopped
prints after its resume what the uninterrupted one would have printed. On another number of ranks the batches differ and
each sample that was left still comes once. `--fresh-data` takes up the model alone and starts the epoch's data anew.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import odb
from odb import checkpoint
from odb.seeding import sample_rng

VOCABULARY, SEED = 64, 7


class Augmented(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts of random length, cut at random: by seed, epoch and index alone, so that a resume cuts them alike."""

    fingerprint = "random texts, first edition"  # a resume with another one is warned of
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Told by the loader, in every worker."""
        self.epoch = epoch

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = sample_rng(SEED, 0, index).integers(0, VOCABULARY, 10 + index * 37 % 90)
        ids = torch.from_numpy(text[: int(sample_rng(SEED, 1 + self.epoch, index).integers(8, len(text) + 1))])
        return {"input_ids": ids, "labels": ids.clone(), "index": torch.tensor(index)}


class Model(torch.nn.Module):
    """Predicts the next token; gives the mean loss over the batch's labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(input_ids))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Training:
    """Model, optimizer and loader of one rank, and what of them a checkpoint holds."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        torch.manual_seed(SEED)
        self.model = DistributedDataParallel(Model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader = odb.ODBDataLoader(
            Augmented(),
            token_budget=512,
            shuffle=True,
            seed=SEED,
            grad_accum_steps=2,
            window=32,
            num_workers=num_workers,
            collate_fn=odb.collators.PadCollator(),
        )
        self.folder = folder
        self.num_updates = 0

    def save(self) -> None:
        """Rank 0 writes the model, every rank its place in the data. `done` says that all of it is there."""
        target = self.folder / f"update-{self.num_updates:05d}"
        target.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, target / "model.pt")
        checkpoint.save(target, self.loader, extra={"num_updates": self.num_updates})
        dist.barrier()
        (target / "done").touch()

    def load(self, fresh_data: bool) -> int:
        """Takes up the newest whole checkpoint, if there is one. Returns the epoch in which training goes on."""
        found = sorted(mark.parent for mark in self.folder.glob("update-*/done"))
        if not found:
            return 0
        state = torch.load(found[-1] / "model.pt", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        position = checkpoint.restore(found[-1], self.loader, restore_position=not fresh_data)
        if position is None:
            return 0
        self.num_updates = position.extra["num_updates"]
        return position.resume_epoch

    def epoch(self, number: int, save_every: int, stop_after: int | None) -> None:
        """One epoch, or what is left of it."""
        self.loader.set_epoch(number)
        total, seen = torch.zeros(()), []
        for batch in self.loader:
            info = odb.pop_step_info(batch)
            seen += [] if info.idle else batch.pop("index").tolist()
            with nullcontext() if info.sync_gradients else self.model.no_sync():
                loss = odb.scale_loss(self.model(batch["input_ids"], batch["labels"]), info)
                loss.backward()
            total += loss.detach() / dist.get_world_size()
            if info.sync_gradients:
                self.update(number, total, seen)
                total, seen = torch.zeros(()), []
                if self.num_updates % save_every == 0:
                    self.save()
                if self.num_updates == stop_after:
                    os._exit(3)  # as if the machine had gone

    def update(self, epoch: int, total: torch.Tensor, seen: list[int]) -> None:
        """An optimizer step, and the line that tells of it."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1
        dist.all_reduce(total)
        where = f"epoch {epoch} update {self.num_updates} rank {dist.get_rank()}"
        say(f"{where} loss {total.item():.9f} samples {sorted(seen)}")


def say(line: str) -> None:
    """One write for a line and its end: ranks share the output."""
    print(f"{line}\n", end="", flush=True)


def digest(model: Any) -> str:
    """Every bit of the weights, in one short text."""
    raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()[:16]


def main() -> None:
    """Trains from the newest checkpoint, or from the start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=4, help="optimizer steps")
    parser.add_argument("--stop-after", type=int, help="optimizer steps: leaves without a word, as a crash does")
    parser.add_argument("--fresh-data", action="store_true", help="take up the model, not the place in the data")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(args.folder, args.workers)
    with training.loader:
        for number in range(training.load(args.fresh_data), args.epochs):
            training.epoch(number, args.save_every, args.stop_after)
    say(f"done rank {dist.get_rank()} weights {digest(training.model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
