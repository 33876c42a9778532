"""One optimizer step of LLaMA-Factory on two ranks. Program: `llamafactory_run.py FOLDER KIND`; leaves result.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from llamafactory.train.sft import workflow
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from odb.integrations.llamafactory import run_exp

LR = 0.5
kept: list[Any] = []


class Kept(workflow.CustomSeq2SeqTrainer):
    """So that the test can look at the trainer; KIND "mean" is what LLaMA-Factory does to multimodal models' losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if sys.argv[2] == "mean":
            self.model_accepts_loss_kwargs = False
        kept.append(self)


def make_inputs(folder: Path) -> None:
    """A tokenizer, a model of random weights and 24 samples of many lengths."""
    rows = [
        {"instruction": f"count to {3 * n}", "input": "", "output": " ".join(str(i) for i in range(1, 3 * n + 1))}
        for n in range(1, 25)
    ]
    (folder / "counting.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"counting": {"file_name": "counting.json"}}))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([row["output"] for row in rows], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(fast), **sizes)).save_pretrained(folder / "model")


def arguments(folder: Path) -> dict[str, Any]:
    """Of one epoch that is one optimizer step of two micro-steps, plain SGD."""
    return {
        "model_name_or_path": str(folder / "model"),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "default",
        "dataset": "counting",
        "dataset_dir": str(folder),
        "cutoff_len": 512,
        "overwrite_cache": True,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": LR,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 1.0,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "odb": {"token_budget": 8192, "timeout_s": 60.0},
    }


def reference(folder: Path, dataset: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Weights before, gradient of the token mean, the token mean; one sample at a time."""
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    labels = [torch.tensor(row["labels"]) for row in dataset]
    total, mean = sum(int((one[1:] != -100).sum()) for one in labels), 0.0
    for row, one in zip(dataset, labels, strict=True):
        logits = model(torch.tensor(row["input_ids"])[None]).logits[0, :-1]
        loss = cross_entropy(logits, one[1:], reduction="sum") / total
        loss.backward()
        mean += loss.item()
    weights, grads = zip(*((p.detach().flatten(), p.grad.flatten()) for p in model.parameters()), strict=True)
    return torch.cat(weights), torch.cat(grads), mean


def main() -> None:
    folder = Path(sys.argv[1])
    workflow.CustomSeq2SeqTrainer = Kept
    run_exp(arguments(folder))
    trainer = kept[0]
    if os.environ["RANK"] == "0":
        before, grad, mean = reference(folder, trainer.train_dataset)
        after = torch.cat([p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()])
        moved = (before - after) / LR
        result = {
            "error": float((moved - grad).norm() / grad.norm()),
            "steps": trainer.state.global_step,
            "epoch": trainer.state.epoch,
            "loss": trainer.state.log_history[0]["loss"],
            "mean": mean,
            "samples": trainer.odb.state.samples,
            "collator": type(trainer.data_collator).__name__,
        }
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
