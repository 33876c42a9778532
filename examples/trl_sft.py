"""TRL's SFTTrainer on prompts and completions, with batches under a token budget: one call.

torchrun --standalone --nproc-per-node 2 examples/trl_sft.py
"""

from __future__ import annotations

import tempfile

from accelerate import PartialState
from datasets import Dataset
from tiny_llama import VOCABULARY, Chats, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, logging
from trl import SFTConfig, SFTTrainer

from odb.integrations.hf import enable_odb


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, made here so that nothing is fetched."""
    words = Tokenizer(models.WordLevel({f"w{i:03}": i for i in range(VOCABULARY)}, unk_token="w003"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w002", pad_token="w000", unk_token="w003")


def make_dataset() -> Dataset:
    rows = []
    for sample in (Chats()[i] for i in range(len(Chats()))):
        words = [f"w{token:03}" for token in sample["input_ids"]]
        prompt = sample["labels"].count(-100)
        rows.append({"prompt": " ".join(words[:prompt]), "completion": " " + " ".join(words[prompt:])})
    return Dataset.from_list(rows)


def main() -> None:
    logging.set_verbosity_error()
    args = SFTConfig(
        output_dir=tempfile.gettempdir() + "/odb-example-trl",
        num_train_epochs=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
        ddp_backend="gloo",
    )
    trainer = SFTTrainer(make_model(), args=args, train_dataset=make_dataset(), processing_class=make_tokenizer())
    enable_odb(trainer, token_budget=1024)  # TRL normalises the loss by tokens itself: odb leaves it alone
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    rank, steps, epoch = trainer.args.process_index, trainer.state.global_step, trainer.state.epoch
    print(f"rank {rank} epoch {epoch} steps {steps} loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
