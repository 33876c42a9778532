"""What the examples of Hugging Face's trainers share: made-up chats of many lengths, and a Llama of two small layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128


class Chats(torch.utils.data.Dataset):
    """Samples of 8 to 90 tokens that count upwards, as a tokenizer leaves them; the first third bears no loss."""

    def __init__(self, num_samples: int = 120) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length = 8 + (index * index * 31) % 83
        ids = [10 + (index + i) % 100 for i in range(length)]
        return {"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]}


def make_model() -> Any:
    """Random weights, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
