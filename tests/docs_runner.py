"""Runs one example of the documentation (`docs_runner.py FILE`) in the setting that the prose takes for granted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch


class Dataset(torch.utils.data.Dataset):
    """60 processed samples of 3 to 122 tokens; the first fifth of each bears no loss."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 3 + (index * 37) % 120
        ids = torch.arange(length) % 16
        labels = ids.clone()
        labels[: length // 5] = -100
        return {"input_ids": ids, "labels": labels}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([s["input_ids"] for s in samples], batch_first=True),
        "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=-100),
    }


class Model(torch.nn.Module):
    """Predicts the next token of 16; gives `.loss`, the mean over its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.embed(input_ids))
        # (rows, length - 1, 16) against (rows, length - 1)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


def main(path: str) -> None:
    dataset, model = Dataset(), Model()
    setting = {
        "__name__": "__main__",
        "dataset": dataset,
        "collate": collate,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "existing_dataloader": torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=collate),
    }
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), setting)


if __name__ == "__main__":
    main(sys.argv[1])
