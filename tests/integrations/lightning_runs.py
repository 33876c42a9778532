"""Lightning runs on two ranks. Program: `lightning_runs.py FOLDER`; leaves what all ranks found in result.json."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from scenarios import Spec, TokenModel, causal_loss
from torch.utils.data import DataLoader
from training_loops import all_ids, uneven, update_error

import odb
from odb.integrations.lightning import ODBCallback, attach
from odb.testing import collate, make_sample

LR = 1.0


class Module(L.LightningModule):
    """A user's module: plain batches, the mean loss of each."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TokenModel()
        self.ids: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        assert sorted(batch) == ["attention_mask", "id", "input_ids", "labels"] or "flag" in batch
        self.ids.append(batch["id"].tolist())
        return causal_loss(self.model(batch["input_ids"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Watch(L.Callback):
    """Compares each optimizer step with the exact one."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.mine: list[int] = []
        self.errors: list[float] = []
        self.means: list[float] = []
        self.real: list[list[int]] = []
        self.bar: dict[str, float] = {}
        self.num_idle = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.before = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        info = next(c for c in trainer.callbacks if isinstance(c, ODBCallback)).info
        self.num_idle += info.idle
        self.real.append([] if info.idle else batch["id"].tolist())
        self.mine += self.real[-1]
        if info.sync_gradients:
            after = [p.detach().clone() for p in module.parameters()]
            error, mean = update_error(self.before, after, LR, self.spec.dataset(), all_ids(self.mine))
            self.errors.append(error)
            self.means.append(mean)
            self.before, self.mine = after, []
        self.bar = {k: float(v) for k, v in trainer.progress_bar_metrics.items()}


class Memory(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    name, version = "memory", "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({k: float(v) for k, v in metrics.items()} | {"at": float(step or 0)})


def make_trainer(folder: str, callbacks: list[Any] | None = None, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "log_every_n_steps": 1}
    quiet |= {"default_root_dir": folder, "accelerator": "cpu", "devices": 2, "strategy": "ddp", "num_nodes": 1}
    quiet |= {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks or [])}
    return L.Trainer(callbacks=callbacks, **(quiet | options))


def rank() -> int:
    return int(os.environ["RANK"])


def exact(folder: str) -> dict[str, Any]:
    """Two epochs each with accumulation 1 and 4, real progress bar and logger."""
    out = {}
    for accumulation in (1, 4):
        spec = uneven(accumulation)
        watch, memory = Watch(spec), Memory()
        trainer = make_trainer(
            folder,
            [watch],
            max_epochs=2,
            accumulate_grad_batches=accumulation,
            logger=memory,
            enable_progress_bar=True,
        )
        with spec.loader(rank(), 2) as loader:
            trainer.fit(Module(), attach(trainer, loader))
        logged = [row["train_loss"] for row in memory.rows if "train_loss" in row]
        out[str(accumulation)] = {
            "errors": watch.errors,
            "means": watch.means,
            "logged": logged,
            "global_step": trainer.global_step,
            "micro": len(watch.real),
            "idle": watch.num_idle,
            "ids": [i for step in watch.real for i in step],
            "samples": watch.bar["samples"],
            "telemetry": sorted({k for row in memory.rows for k in row if k.startswith("odb/")}),
        }
    return out


def run(folder: str, spec: Spec, callbacks: list[Any], ckpt: str | None = None, **options: Any) -> dict[str, Any]:
    watch = Watch(spec)
    accumulation = spec.options["grad_accum_steps"]
    trainer = make_trainer(
        folder, [watch, *callbacks], **({"max_epochs": 2, "accumulate_grad_batches": accumulation} | options)
    )
    module = Module()
    with spec.loader(rank(), 2) as loader:
        trainer.fit(module, attach(trainer, loader), ckpt_path=ckpt)
    odb_callback = next(c for c in trainer.callbacks if isinstance(c, ODBCallback))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return {
        "real": watch.real,
        "global_step": trainer.global_step,
        "samples": odb_callback.progress.samples,
        "weights": weights.tolist(),
    }


def resumed(folder: str) -> dict[str, Any]:
    """Checkpoints after optimizer steps 1, 2, ... of two epochs, and the rest of the run from each of them."""
    spec = uneven(2, seed=3).but(share=None)
    spec.options["shuffle"] = True
    saver = ModelCheckpoint(dirpath=f"{folder}/steps", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(folder, spec, [saver])
    out = {"whole": whole, "rest": {}}
    for step in range(1, whole["global_step"]):
        out["rest"][str(step)] = run(folder, spec, [], f"{folder}/steps/step={step}.ckpt")
    saver = ModelCheckpoint(dirpath=f"{folder}/epochs", filename="{epoch}", save_top_k=-1)
    run(folder, spec, [saver], max_epochs=1)
    out["epoch"] = run(folder, spec, [], f"{folder}/epochs/epoch=0.ckpt")
    return out


class Stream(torch.utils.data.IterableDataset):
    """30 samples over two ranks."""

    def __iter__(self) -> Any:
        return (make_sample(i, 4 + i % 9) for i in range(rank(), 30, 2))


class WithMeta(torch.utils.data.Dataset):
    """Samples with fields that are no tensors."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 4 + index % 7
        return {"input_ids": torch.arange(length), "labels": torch.arange(length), "id": index, "name": f"s{index}"}


def collate_meta(samples: list[dict[str, Any]]) -> dict[str, Any]:
    plain = [{k: v for k, v in s.items() if k != "name"} for s in samples]
    return collate(plain) | {"names": [s["name"] for s in samples], "flag": True, "meta": {"n": len(samples)}}


def cases(folder: str) -> dict[str, Any]:
    """Loaders that Lightning would replace the sampler of, and fields that it would move."""
    seen: list[Any] = []

    class Looks(Module):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            kinds = [type(batch[k]).__name__ for k in ("names", "flag", "meta")]
            seen.append([batch["id"].tolist(), batch["names"], kinds, batch["meta"]["n"]])
            return super().training_step(batch, batch_idx)

    plain = DataLoader(WithMeta(), batch_size=4, collate_fn=collate_meta)
    trainer = make_trainer(folder, max_epochs=1)

    class FromHook(Looks):
        def train_dataloader(self) -> Any:
            sampler = torch.utils.data.DistributedSampler(WithMeta(), shuffle=False)
            wrapped = DataLoader(WithMeta(), batch_size=4, sampler=sampler, collate_fn=collate_meta)
            return attach(self.trainer, wrapped, token_budget=20, timeout_s=30.0)

    trainer.fit(FromHook())
    applied = odb.apply(plain, token_budget=20)
    error = ""
    trainer = make_trainer(folder, max_epochs=1)
    try:
        trainer.fit(Looks(), plain)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    applied.close()
    mismatch = ""
    trainer = make_trainer(folder, max_epochs=1, accumulate_grad_batches=2)
    with uneven(3).loader(rank(), 2) as loader:
        try:
            trainer.fit(Module(), attach(trainer, loader))
        except odb.errors.ConfigError as problem:
            mismatch = str(problem)
    trainer = make_trainer(folder, max_epochs=2)
    module = Module()
    stream = DataLoader(Stream(), batch_size=1, collate_fn=collate)
    trainer.fit(module, attach(trainer, stream, token_budget=60, timeout_s=30.0))
    samples = next(c for c in trainer.callbacks if isinstance(c, ODBCallback)).progress.samples
    stream_run = [sorted({i for ids in module.ids for i in ids}), samples, trainer.current_epoch]
    return {"hook": seen, "applied": error, "mismatch": mismatch, "stream": stream_run}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.distributed.init_process_group("gloo")
    folder = sys.argv[1]
    result = {one.__name__: one(folder) for one in (exact, resumed, cases)}
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, result)
    if rank() == 0:
        Path(folder, "result.json").write_text(json.dumps(everyone))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
