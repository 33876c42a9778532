"""Lightning: an ordinary module and Trainer; `attach` is all that odb adds.

torchrun --standalone --nproc-per-node 2 examples/lightning_fit.py
"""

from __future__ import annotations

import lightning as L
import torch
from tiny import Chats, LanguageModel

import odb
from odb.integrations.lightning import attach


class Module(L.LightningModule):
    """As it would be without odb."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Report(L.Callback):
    """Says what became of each epoch."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        print(
            f"rank {trainer.global_rank} epoch {trainer.current_epoch} steps {trainer.global_step} "
            f"samples {metrics['samples']:.0f} loss {metrics['train_loss']:.3f}",
            flush=True,
        )


def main() -> None:
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else 2,
        strategy="ddp",
        callbacks=[Report()],
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    with odb.ODBDataLoader(Chats(), token_budget=1024, num_workers=1, shuffle=True, grad_accum_steps=2) as loader:
        trainer.fit(Module(), attach(trainer, loader))


if __name__ == "__main__":
    main()
