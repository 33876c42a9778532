"""A small decoder-only transformer: RMSNorm, rotary positions, causal attention, GELU, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .encoding import IGNORE_INDEX


@dataclass(frozen=True)
class ModelConfig:
    """Sizes; `width` is a multiple of `2 * num_heads`."""

    vocab_size: int
    width: int = 128
    num_layers: int = 2
    num_heads: int = 4


@dataclass
class Output:
    """What a forward pass gives: the mean loss (None without labels) and the logits, shape (rows, length, vocab)."""

    logits: Tensor
    loss: Tensor | None = None


class Transformer(nn.Module):
    """Padding must be on the right: causal attention keeps it away from every real token, and no mask is needed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)  # logits of about unit variance

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Logits and, with labels, their mean loss; both inputs int64, shape (rows, length)."""
        x = self.embedding(input_ids)
        positions = rotary(input_ids.shape[1], self.head_width, x)
        for block in self.blocks:
            x = block(x, positions)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return Output(logits, None if labels is None else mean_loss(logits, labels))


class Block(nn.Module):
    """Attention, then a multilayer perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """(rows, length, width) in, the same out."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(rows, length, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, positions), rotate(key, positions)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + cast(Tensor, self.mlp(self.norm_mlp(x)))


def rotary(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding (arXiv 2104.09864), each (length, head_width / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2, device=like.device) / head_width)
    angles = torch.arange(length, device=like.device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the two halves of every head by its position's angles."""
    cos, sin = (p.to(x.dtype) for p in positions)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def sum_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross entropy of each token given those before it; labels of -100 count nothing."""
    nexts = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # shifts the labels: the logits are large
    return F.cross_entropy(logits.flatten(0, 1).float(), nexts.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels that bear loss; 0 with a gradient of 0, not NaN, where none does."""
    return sum_loss(logits, labels) / num_loss_tokens(labels).clamp(min=1)


def num_loss_tokens(labels: Tensor) -> Tensor:
    """Labels that bear loss: after the shift, a row's first label never does."""
    return (labels[:, 1:] != IGNORE_INDEX).sum()
