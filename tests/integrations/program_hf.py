"""Two ranks of a real Trainer, through everything that its integration promises; says what it saw as JSON."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tiny_chats import (
    Chats,
    Stream,
    collate,
    indices_of,
    leave,
    make_model,
    of_all_ranks,
    reference,
    relative_error,
    say,
)
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import odb
from odb.integrations.common import peek_info
from odb.integrations.hf import configure_trainer, enable_odb

FOLDER = Path(os.environ["ODB_TEST_FOLDER"])
OURS = (
    "dataset_size",
    "sample_budget",
    "max_optimizer_steps",
    "scheduler_progress",
    "scheduler_total",
    "on_empty",
    "dp_rank",
    "dp_world_size",
    "trainer_loss",
    "layout",
    "sharding",
)


class Watched(Trainer):
    """Remembers what it was given to train on."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        info = peek_info(inputs)
        assert info is not None
        self.given.append([] if info.idle else indices_of(inputs))
        self.fillers += info.idle
        return super().training_step(model, inputs, num_items_in_batch)


class Holes(Chats):
    """Every tenth sample is empty."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [], "labels": []} if index % 10 == 0 else super().__getitem__(index)


def arguments(name: str, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": False,
        "lr_scheduler_type": "constant",
    }
    return TrainingArguments(output_dir=str(FOLDER / name), **(settings | changes))


def make(name: str, num_samples: int = 60, dataset: Any = None, **changes: Any) -> Any:
    ours = {key: changes.pop(key) for key in OURS if key in changes}
    dropout = changes.pop("dropout", 0.0)
    model = make_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    plain = dataset if dataset is not None else Chats(num_samples)
    trainer = Watched(
        model=model,
        args=arguments(name, **changes),
        train_dataset=None if isinstance(plain, Stream) and "max_steps" not in changes else plain,
        eval_dataset=Chats(7, seed=5),
        data_collator=None if ours.get("layout") == "packed" else collate,  # the default: odb's takes its place
    )
    enable_odb(trainer, token_budget=160, train_dataset=plain, **ours)
    return reset(trainer)


def reset(trainer: Any) -> Any:
    trainer.given, trainer.fillers = [], 0
    return trainer


def given(trainer: Any) -> list[int]:
    """The samples that all ranks trained on, sorted."""
    return sorted(i for rank in of_all_ranks(trainer.given) for batch in rank for i in batch)


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def exactness() -> dict[str, Any]:
    """One optimizer step, with each way in which a Trainer may normalise the loss by itself."""
    out = {}
    for accumulation, num_samples in ((1, 60), (4, 60), (4, 5)):  # the last with three fillers
        for kind in ("global", "local", "mean", "function", "packed"):
            trainer = make(
                "exact",
                num_samples,
                max_steps=1,
                gradient_accumulation_steps=accumulation,
                average_tokens_across_devices=kind != "local",
                layout="packed" if kind == "packed" else "padded",
                sharding="static",  # so that it is known who fills in for whom
            )
            if kind == "mean":
                trainer.model_accepts_loss_kwargs = False
            if kind == "function":
                trainer.compute_loss_func = summed
            trainer.train()
            loss, gradients = reference(trainer.train_dataset, given(trainer))
            error = relative_error(trainer.model, gradients, rate=1.0)
            values = {"error": error, "loss": loss, "logged": logged(trainer, "loss")[0]}
            out[f"{kind}-{accumulation}-{num_samples}"] = values | {"fillers": sum(of_all_ranks(trainer.fillers))}
    return out


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss function as users give it to a Trainer."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


#: Of the run that is interrupted: what must be the same before and after.
RUN: dict[str, Any] = {
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.25,
    "learning_rate": 0.5,
    "dropout": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 2,
}


def whole_run() -> tuple[Any, dict[str, Any]]:
    """Two epochs by samples, with evaluation and a checkpoint after each step."""
    trainer = make(
        "run",
        61,
        **RUN,
        save_strategy="steps",
        save_steps=1,
        include_num_input_tokens_seen="non_padding",
    )
    result = trainer.train()
    plain = Trainer(trainer.model, trainer.args, data_collator=collate, eval_dataset=Chats(7, seed=5))
    state = trainer.state
    return trainer, {
        "given": given(trainer),
        "samples": [int(n) for n in logged(trainer, "odb/all_samples")],
        "rates": [entry["learning_rate"] for entry in state.log_history if "learning_rate" in entry],
        "epochs": [entry["epoch"] for entry in state.log_history if "loss" in entry],
        "tokens": state.num_input_tokens_seen,
        "all_tokens": 2 * sum(Chats(61).lengths),
        "state": [state.epoch, state.max_steps, state.global_step, state.num_train_epochs],
        "per_second": result.metrics["train_samples_per_second"] * result.metrics["train_runtime"],
        "evaluated": logged(trainer, "eval_loss")[-1],
        "evaluated_plainly": plain.evaluate()["eval_loss"],
        "fillers": sum(of_all_ranks(trainer.fillers)),
        "eval_loader": type(trainer.get_eval_dataloader()).__name__,
    }


def resumed(whole: Any) -> dict[str, Any]:
    """The same run from two of its checkpoints: in the middle of an epoch, and exactly at the end of the first."""
    samples = [int(n) for n in logged(whole, "odb/all_samples")]
    out: dict[str, Any] = {}
    for step in (2, 1 + samples.index(61)):
        trainer = make("run", 61, **RUN)
        torch.manual_seed(step)
        trainer.train(resume_from_checkpoint=str(FOLDER / "run" / f"checkpoint-{step}"))
        pairs = zip(trainer.model.parameters(), whole.model.parameters(), strict=True)
        keys = ("loss", "learning_rate", "epoch")
        tails = [[[e[k] for k in keys] for e in t.state.log_history if "loss" in e][step:] for t in (trainer, whole)]
        out[f"from {step}"] = {
            "same_batches": trainer.given == whole.given[2 * step :],
            "same_weights": all(torch.equal(one, other) for one, other in pairs),
            "same_logs": tails[0] == tails[1],
            "steps": trainer.state.global_step - step,
            "epochs": [trainer.state.epoch, trainer.state.num_train_epochs],
        }
    return out


def other_lengths() -> dict[str, Any]:
    """Streams, budgets, numbers of steps, samples that are left out."""
    out: dict[str, Any] = {}
    stream = make("stream", dataset=Stream(30), dataset_size=30, num_train_epochs=2, dataloader_num_workers=1)
    stream.train()
    out["stream"] = {"given": given(stream), "epoch": stream.state.epoch}
    try:
        make("unknown", dataset=Stream(30), num_train_epochs=2).train()
    except odb.errors.ConfigError as error:
        out["unknown"] = str(error)
    steps = make("steps", max_steps=9, lr_scheduler_type="linear")
    steps.train()
    out["max_steps"] = {"steps": steps.state.global_step, "rates": logged(steps, "learning_rate")}
    budget = make("budget", sample_budget=40, lr_scheduler_type="linear", warmup_steps=2)
    budget.train()
    out["budget"] = {"samples": logged(budget, "odb/all_samples"), "rates": logged(budget, "learning_rate")}
    holes = make(
        "holes",
        dataset=Holes(60),
        on_empty="skip",
        num_train_epochs=2,
        save_strategy="steps",
        gradient_accumulation_steps=4,
    )
    holes.train()
    out["holes"] = {
        "given": given(holes),
        "state": [holes.state.epoch, holes.state.global_step],
        "saved": sorted(path.name for path in (FOLDER / "holes").iterdir()),
    }
    return out


def papers_form() -> dict[str, Any]:
    """A loader of the user's, with its sampler, through the calls of the paper's package; and no state to go on from."""
    dataset = Chats(40)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size=1, sampler=sampler, num_workers=1, collate_fn=collate)
    handle = odb.apply(loader, token_budget=160, loss_scaling="exact", join=True, sharding="static")
    trainer = Watched(make_model(), arguments("paper", num_train_epochs=2), train_dataset=dataset)
    bridge = configure_trainer(
        reset(trainer), dataloader=loader, handle=handle, sample_budget=80, max_steps_policy="overwrite"
    )
    trainer.train()
    out: dict[str, Any] = {
        "given": given(trainer),
        "mine": sum(map(len, trainer.given)),
        "emitted": bridge.state.samples,
    }
    handle.close()
    bare = make("bare", max_steps=2)
    bare.save_model(str(FOLDER / "bare" / "checkpoint-1"))
    try:
        bare.train(resume_from_checkpoint=str(FOLDER / "bare" / "checkpoint-1"))
    except odb.errors.ConfigError as error:
        out["no_state"] = str(error)
    return out


def refused() -> dict[str, str]:
    """What can't be done, in words that name it."""
    out = {}
    bare = odb.ODBDataLoader(Chats(8), token_budget=100, collate_fn=collate)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "auto_find_batch_size": ({"auto_find_batch_size": True}, {"token_budget": 100}),
        "eval_steps": ({"eval_steps": 0.5}, {"token_budget": 100}),
        "token_budget": ({}, {}),
        "max_sample": ({}, {"token_budget": 100, "max_sample": 3}),
        "grad_accum_steps": ({"gradient_accumulation_steps": 2}, {"dataloader": bare}),
        "scheduler_total": ({"max_steps": 3}, {"token_budget": 100, "scheduler_progress": "tokens"}),
        "replace_train_dataloader": ({}, {"token_budget": 100, "replace_train_dataloader": False}),
    }
    for name, (changes, options) in cases.items():
        trainer = Trainer(make_model(), arguments("refused", **changes), train_dataset=Chats(8), data_collator=collate)
        try:
            enable_odb(trainer, **options)
            trainer.train()
        except odb.errors.ConfigError as error:
            out[name] = str(error)
    bare.close()
    return out


def on_one_rank() -> dict[str, Any]:
    """Goes on alone where two ranks stopped: here each of the two takes itself for the only one."""
    trainer = make(
        "run", 61, num_train_epochs=1, gradient_accumulation_steps=2, dp_rank=0, dp_world_size=1, trainer_loss="mean"
    )
    trainer.train(resume_from_checkpoint=str(FOLDER / "run" / "checkpoint-2"))
    return {"given": sorted(i for batch in trainer.given for i in batch), "epoch": trainer.state.epoch}


class Breaks(TrainerCallback):
    """From the first step on, one rank's loader can't say where it is."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        if dist.get_rank() == 1:
            self.trainer.odb.handle.state_dict = self.fail

    def fail(self) -> None:
        raise RuntimeError("no state today")


def unsaved() -> dict[str, Any]:
    """A checkpoint whose data position could not be saved: the model is there, and an exact resume says why not."""
    trainer = make("unsaved", 61, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.add_callback(Breaks(trainer))
    trainer.train()
    folder = FOLDER / "unsaved" / "checkpoint-2"
    out: dict[str, Any] = {"files": sorted(path.name for path in folder.iterdir())}
    try:
        make("unsaved", 61, max_steps=3).train(resume_from_checkpoint=str(folder))
    except odb.errors.ConfigError as error:
        out["error"] = str(error)
    again = make("unsaved", 61, max_steps=3, ignore_data_skip=True)
    again.train(resume_from_checkpoint=str(folder))
    return out | {"steps": again.state.global_step, "batches": len(again.given)}


def main() -> None:
    transformers.logging.set_verbosity_error()
    begun = time.time()
    logging.basicConfig(level=logging.INFO if os.environ["RANK"] == "0" else logging.WARNING, stream=sys.stdout)
    say(exactness=exactness(), seconds_exactness=time.time() - begun)
    trainer, values = whole_run()
    say(whole=values)
    say(resumed=resumed(trainer), one_rank=on_one_rank(), seconds_resumed=time.time() - begun)
    say(lengths=other_lengths(), refused=refused(), unsaved=unsaved())
    say(paper=papers_form(), seconds=time.time() - begun)
    del trainer  # its model under DDP holds the group
    leave()


if __name__ == "__main__":
    main()
