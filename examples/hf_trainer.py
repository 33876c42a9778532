"""The Hugging Face Trainer with batches under a token budget: one call. It stops on the way and goes on from there.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile

from accelerate import PartialState
from tiny_llama import Chats, make_model
from transformers import Trainer, TrainingArguments, logging

from odb.integrations.hf import enable_odb


def make_trainer(folder: str) -> Trainer:
    args = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,  # no max_steps: an epoch ends with the data, the schedule goes by samples
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    trainer = Trainer(model=make_model(), args=args, train_dataset=Chats())  # odb's collator pads, a user's own stays
    enable_odb(trainer, token_budget=1024)
    return trainer


def main() -> None:
    logging.set_verbosity_error()
    folder = tempfile.gettempdir() + "/odb-example-hf"
    whole = make_trainer(folder)
    whole.train()
    again = make_trainer(folder)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    losses = [[e["loss"] for e in trainer.state.log_history if "loss" in e] for trainer in (whole, again)]
    same = "the same" if losses[0] == losses[1] else "other"
    rank, steps, epoch = whole.args.process_index, whole.state.global_step, whole.state.epoch
    print(f"rank {rank} epoch {epoch} steps {steps} loss {losses[0][0]:.3f} -> {losses[0][-1]:.3f}", flush=True)
    print(f"rank {rank} resumed after 2 steps: {same} losses", flush=True)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
