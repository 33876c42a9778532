"""Two ranks of TRL's SFTTrainer on prompts and completions; says what it saw as JSON."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from tiny_chats import Chats, indices_of, leave, make_model, of_all_ranks, reference, relative_error, say
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from odb.integrations.common import peek_info
from odb.integrations.hf import ODBTrainerMixin

FOLDER = Path(os.environ["ODB_TEST_FOLDER"])


class Watched(ODBTrainerMixin, SFTTrainer):
    """Remembers what it was given to train on. The mixin, where test_hf.py has the call."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        info = peek_info(inputs)
        assert info is not None
        self.given.append([] if info.idle else indices_of(inputs))
        return super().training_step(model, inputs, num_items_in_batch)


def tokenizer() -> PreTrainedTokenizerFast:
    """The word "w005" is token 5."""
    words = Tokenizer(models.WordLevel({word(i): i for i in range(128)}, unk_token=word(3)))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=word(2), pad_token=word(0), unk_token=word(3))


def word(token: int) -> str:
    return f"w{token:03}"


def conversations(chats: Chats) -> Dataset:
    """The same samples as text; TRL adds the token of the end to each."""
    rows = []
    for i in range(len(chats)):
        ids, prompt = chats[i]["input_ids"], chats.prompts[i]
        rows.append(
            {"prompt": " ".join(map(word, ids[:prompt])), "completion": " " + " ".join(map(word, ids[prompt:]))}
        )
    return Dataset.from_list(rows)


class Ended(Chats):
    """What TRL makes of `Chats`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {"input_ids": [*sample["input_ids"], 2], "labels": [*sample["labels"], 2]}


def make(name: str, num_samples: int = 30, odb: dict[str, Any] | None = None, **changes: Any) -> Watched:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "optim": "sgd",
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "ddp_backend": "gloo",
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "model_init_kwargs": None,
    }
    trainer = Watched(
        model=make_model(),
        args=SFTConfig(output_dir=str(FOLDER / name), **(settings | changes)),
        train_dataset=conversations(Chats(num_samples)),
        processing_class=tokenizer(),
        odb={"token_budget": 170} if odb is None else odb,
    )
    trainer.given = []
    return trainer


def given(trainer: Watched) -> list[int]:
    return sorted(i for rank in of_all_ranks(trainer.given) for batch in rank for i in batch)


def exactness() -> dict[str, Any]:
    out = {}
    for accumulation, num_samples in ((1, 30), (4, 30), (4, 5)):
        trainer = make("exact", num_samples, max_steps=1, gradient_accumulation_steps=accumulation)
        trainer.train()
        loss, gradients = reference(Ended(num_samples), given(trainer))
        logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        error = relative_error(trainer.model, gradients, rate=1.0)
        out[f"{accumulation}-{num_samples}"] = {"error": error, "loss": loss, "logged": logged}
    return out


def whole_run() -> dict[str, Any]:
    """Two epochs, saved on the way, then once more from the middle."""
    changes = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    whole = make("run", save_strategy="steps", save_steps=1, **changes)
    whole.train()
    rest = make("run", **changes)
    rest.train(resume_from_checkpoint=str(FOLDER / "run" / "checkpoint-1"))
    logs = [[(e["loss"], e["learning_rate"]) for e in t.state.log_history if "loss" in e] for t in (whole, rest)]
    return {
        "given": given(whole),
        "epoch": whole.state.epoch,
        "same_batches": rest.given == whole.given[2:],
        "same_logs": logs[0] == logs[1],
        "metrics": sorted(whole.state.log_history[0]),
    }


def main() -> None:
    transformers.logging.set_verbosity_error()
    begun = time.time()
    say(exactness=exactness())
    say(whole=whole_run(), seconds=time.time() - begun)
    leave()


if __name__ == "__main__":
    main()
