"""What the small examples share: made-up chats of many lengths, and a language model that trains in seconds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH = 64, 32


class Chats(torch.utils.data.Dataset):
    """Samples of 8 to 200 tokens that count upwards; the first third is the prompt and bears no loss."""

    def __init__(self, num_samples: int = 240) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = 8 + (index * index * 31) % 193
        ids = (torch.arange(length) + index) % VOCABULARY
        labels = ids.clone()
        labels[: length // 3] = -100
        return {"input_ids": ids, "labels": labels}


class LanguageModel(nn.Module):
    """Predicts the next token; gives the mean loss over the labels of its batch, as models of the field do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)  # (rows, length, WIDTH)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
