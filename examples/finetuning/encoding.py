"""From a conversation to token ids and labels; runs in the workers, on the fly.

Chat template, byte-level BPE, labels that are -100 outside the assistant's answers, and random truncation as
augmentation: nobody knows a sample's length before a worker has made it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from .corpus import ROLES, Conversation, fingerprint, write_atomically

PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
PAD_ID = 0  # occurs as padding only: text that spells a special token is encoded as plain text
IGNORE_INDEX = -100
TRUNCATED_SHARE = 0.5  # of the samples, the augmentation cuts
SHORTEST_CUT = 0.25  # of a sample's tokens, it leaves at least


class Sample(TypedDict):
    """One processed sample: two int64 tensors of shape (length,)."""

    input_ids: Tensor
    labels: Tensor


def load_tokenizer(conversations: list[Conversation], vocab_size: int, cache_dir: Path) -> Tokenizer:
    """A byte-level BPE tokenizer trained on `conversations`, from `cache_dir` where it is there already."""
    cached = cache_dir / f"bpe-{vocab_size}-{fingerprint(conversations)}.json"
    if not cached.exists():
        write_atomically(cached, _train_tokenizer(conversations, vocab_size).to_str())
    tokenizer = Tokenizer.from_file(str(cached))
    tokenizer.encode_special_tokens = True  # a user who writes "<|end|>" has not ended anything
    return tokenizer


def _train_tokenizer(conversations: list[Conversation], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes: nothing is ever unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for c in conversations for m in c), trainer)
    return tokenizer


def encode(conversation: Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids and labels of a whole conversation. Each message reads `<|role|>` content `<|end|>`.

    The labels are the ids of every assistant content and of the `<|end|>` behind it, and -100 everywhere else.
    """
    special = {text: id_ for id_, text in enumerate(SPECIAL_TOKENS)}  # the trainer numbers them first
    ids: list[int] = []
    labels: list[int] = []
    for message in conversation:
        content = [*tokenizer.encode(message["content"]).ids, special[END]]
        ids += [special[f"<|{message['role']}|>"], *content]
        answer = message["role"] == "assistant"
        labels += [IGNORE_INDEX, *(content if answer else [IGNORE_INDEX] * len(content))]
    return ids, labels


class ChatDataset(Dataset[Sample]):
    """Encodes one conversation per index, and cuts about half of them at random.

    The cut depends on (seed, epoch, index) alone, not on which worker makes the sample or when, so that different
    ways of batching train on the very same tokens. The epoch lies in shared memory: `set_epoch` reaches workers that
    already run.
    """

    def __init__(
        self, conversations: list[Conversation], tokenizer: Tokenizer, max_length: int, *, seed: int = 0, augment: bool
    ) -> None:
        self.conversations = conversations
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.seed = seed
        self.augment = augment
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Sample:
        ids, labels = encode(self.conversations[index], self.tokenizer)
        length = min(len(ids), self.max_length)
        if self.augment:
            length = self._cut(length, index)
        return {"input_ids": torch.tensor(ids[:length]), "labels": torch.tensor(labels[:length])}

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch's cuts."""
        self._epoch.fill_(epoch)

    def _cut(self, length: int, index: int) -> int:
        rng = random.Random(f"{self.seed}/{int(self._epoch)}/{index}")
        if rng.random() >= TRUNCATED_SHARE:
            return length
        return max(2, int(length * rng.uniform(SHORTEST_CUT, 1.0)))


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Pads on the right to the longest sample: `input_ids` and `labels`, int64, shape (rows, longest length)."""
    fill = {"input_ids": PAD_ID, "labels": IGNORE_INDEX}
    return {
        key: torch.nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=value)  # type: ignore[literal-required]
        for key, value in fill.items()
    }


def row_lengths(input_ids: Tensor) -> Tensor:
    """Real tokens of each row, shape (rows,)."""
    return (input_ids != PAD_ID).sum(dim=1)
