"""What the adapters' tests train: a dataset that says which sample is which, a model of two small layers, a reference."""

from __future__ import annotations

import gc
import json
import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

VOCAB = 128


class Chats(torch.utils.data.Dataset):
    """Samples of 6 to 40 tokens. The first two say the index, a prompt of random length bears no loss."""

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.lengths = [rng.randint(6, 40) for _ in range(num_samples)]
        self.prompts = [rng.randint(2, n - 2) for n in self.lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(index)
        ids = [index // 100, index % 100, *(rng.randrange(VOCAB) for _ in range(self.lengths[index] - 2))]
        labels = [-100] * self.prompts[index] + ids[self.prompts[index] :]
        return {"input_ids": ids, "labels": labels}


class Stream(torch.utils.data.IterableDataset):
    """The same as a stream of unknown length."""

    def __init__(self, num_samples: int) -> None:
        self.chats = Chats(num_samples)

    def __iter__(self) -> Any:
        return (self.chats[i] for i in range(len(self.chats)))


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads on the right."""
    width = max(len(sample["input_ids"]) for sample in samples)

    def rows(key: str, fill: int) -> torch.Tensor:
        return torch.tensor([list(s[key]) + [fill] * (width - len(s[key])) for s in samples])

    mask = torch.tensor([[1] * len(s["input_ids"]) + [0] * (width - len(s["input_ids"])) for s in samples])
    return {"input_ids": rows("input_ids", 0), "labels": rows("labels", -100), "attention_mask": mask}


def indices_of(batch: Any) -> list[int]:
    """Which samples of `Chats` a batch holds, padded or packed into one row."""
    if "cu_seqlens" in batch:
        ids, starts = batch["input_ids"][0], batch["cu_seqlens"][:-1]
        return [int(ids[i]) * 100 + int(ids[i + 1]) for i in starts.tolist()]
    return (batch["input_ids"][:, 0] * 100 + batch["input_ids"][:, 1]).tolist()


def make_model(seed: int = 0) -> Any:
    """A Llama of two layers of width 32, random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def token_mean(model: Any, dataset: Chats, indices: list[int]) -> torch.Tensor:
    """The mean loss over all loss-bearing tokens of some samples, one at a time, in this process alone."""
    total, count = torch.zeros(()), 0
    for index in indices:
        sample = dataset[index]
        ids, labels = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])
        logits = model(input_ids=ids).logits[0, :-1]
        total = total + cross_entropy(logits, labels[1:], reduction="sum")
        count += int((labels[1:] != -100).sum())
    return total / count


def reference(dataset: Chats, indices: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of `make_model()` over these samples."""
    model = make_model()
    model.eval()
    loss = token_mean(model, dataset, indices)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def relative_error(model: Any, gradients: dict[str, torch.Tensor], rate: float) -> float:
    """How far an SGD step of `rate` from `make_model()` is from minus the gradients: largest difference over largest."""
    before = dict(make_model().named_parameters())
    worst = largest = 0.0
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        update = (before[name] - parameter.detach()) / rate
        worst = max(worst, (update - gradients[name]).abs().max().item())
        largest = max(largest, float(gradients[name].abs().max()))
    return worst / largest


def of_all_ranks(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def say(**values: Any) -> None:
    """Prints a line of JSON for the test to read, from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("TOLD " + json.dumps(values), flush=True)


def leave() -> None:
    """The end of a program: destroys the process group, which models under DDP would keep alive.

    A thread of a group that still lives at the interpreter's exit can make it abort (see docs/failures.md), and what
    transformers' Trainer made lives on whatever we do: its threads get the time to let go of the last collective.
    """
    gc.collect()
    time.sleep(0.2)
    if dist.is_initialized():
        dist.destroy_process_group()


def told(output: str) -> dict[str, Any]:
    """What a program said."""
    out: dict[str, Any] = {}
    for line in output.splitlines():
        if "TOLD " in line:
            out |= json.loads(line.split("TOLD ", 1)[1])
    return out
