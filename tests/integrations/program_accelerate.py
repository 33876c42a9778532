"""Two ranks of loops with a real Accelerator; says what it saw as JSON."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
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
from transformers import get_linear_schedule_with_warmup

import odb
from odb.integrations.accelerate import ODBAccelerateBridge, configure_accelerator

FOLDER = Path(os.environ["ODB_TEST_FOLDER"])


def make(accumulation: int = 1, sync_with_dataloader: bool = True, **loading: Any) -> Accelerator:
    plugin = GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=sync_with_dataloader)
    return Accelerator(
        cpu=True, gradient_accumulation_plugin=plugin, dataloader_config=DataLoaderConfiguration(**loading)
    )


class Run:
    """A user's loop."""

    def __init__(self, accelerator: Accelerator, bridge: ODBAccelerateBridge, dropout: float = 0.0) -> None:
        self.accelerator, self.bridge = accelerator, bridge
        model = make_model()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = dropout
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        prepared = accelerator.prepare(model, self.optimizer, bridge.dataloader)
        self.model, self.optimizer, self.loader = prepared
        self.batches: list[list[int]] = []
        self.losses: list[float] = []
        self.part = 0.0

    def epoch(self, scheduler: Any = None, most_steps: int = 10**9, save_at: dict[int, Path] | None = None) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                info = self.bridge.consume_batch(batch)
                self.batches.append([] if info.idle else indices_of(batch))
                self.part += float(self.bridge.backward(self.model(**batch).loss, info))
                assert self.accelerator.sync_gradients == info.sync_gradients
                self.optimizer.step()
                if scheduler is not None and info.sync_gradients:
                    scheduler.step()
                self.optimizer.zero_grad()
            if info.sync_gradients:
                parts = of_all_ranks(self.part)
                self.losses.append(sum(parts) / len(parts))
                self.part = 0.0
                if save_at and len(self.losses) in save_at:
                    self.accelerator.save_state(str(save_at[len(self.losses)]))
                if len(self.losses) >= most_steps:
                    return

    def given(self) -> list[int]:
        return sorted(i for rank in of_all_ranks(self.batches) for batch in rank for i in batch)


def plain(num_samples: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Chats(num_samples), batch_size=4, collate_fn=collate, **settings)


def everywhere(mine: list[int]) -> list[int]:
    return sorted(i for rank in of_all_ranks(mine) for i in rank)


def exactness() -> dict[str, Any]:
    """One optimizer step: even ones, one with fillers to the full number, one that is short."""
    out = {}
    for accumulation, num_samples, sync in ((1, 60, True), (4, 60, True), (4, 5, True), (4, 5, False)):
        accelerator = make(accumulation, sync)
        bridge = configure_accelerator(
            accelerator, plain(num_samples, shuffle=True), token_budget=160, sharding="static"
        )
        run = Run(accelerator, bridge)
        run.epoch(most_steps=1)
        loss, gradients = reference(Chats(num_samples), run.given())
        error = relative_error(run.model, gradients, rate=1.0)
        values = {"error": error, "loss": loss, "logged": run.losses[0], "micro_steps": len(run.batches)}
        out[f"{accumulation}-{num_samples}-{sync}"] = values
        bridge.close()
    return out


def prepared() -> dict[str, Any]:
    """What `prepare` gives back, with every setting that reshapes other loaders, and what an epoch then holds."""
    out: dict[str, Any] = {}
    for name, loading in {
        "default": {},
        "split": {"split_batches": True},
        "uneven": {"even_batches": False, "use_seedable_sampler": True},
    }.items():
        accelerator = make(**loading)
        bridge = configure_accelerator(accelerator, plain(20, num_workers=1), token_budget=100)
        run = Run(accelerator, bridge)
        run.epoch()
        out[name] = {
            "same": run.loader is bridge.dataloader,
            "given": run.given(),
            "steps": of_all_ranks(len(run.batches)),
        }
        bridge.close()
    accelerator = make()
    bare = odb.ODBDataLoader(Chats(20), token_budget=100, collate_fn=collate)
    applied = plain(40, sampler=DistributedSampler(Chats(40)))
    handle = odb.apply(applied, token_budget=100, sharding="static")
    assert accelerator.prepare(bare) is bare and accelerator.prepare(applied) is applied
    mine = [i for batch in applied for i in indices_of(batch)]
    out["applied"] = {"mine": len(mine), "all": everywhere(mine)}
    bridge = configure_accelerator(accelerator, accelerator.prepare(plain(40)), token_budget=100, sharding="static")
    again = [i for batch in bridge.dataloader for i in indices_of(batch)]
    out["prepared_before"] = {"mine": len(again), "all": everywhere(again)}
    stream = DataLoader(Stream(30), collate_fn=collate, num_workers=1)
    streamed = configure_accelerator(accelerator, stream, token_budget=100)
    seen = [i for batch in streamed.dataloader for i in indices_of(batch)]
    out["stream"] = {"all": everywhere(seen)}
    for one in (bare, handle, bridge, streamed):
        one.close()
    try:
        configure_accelerator(make(dispatch_batches=True), stream, token_budget=100)
    except odb.errors.ConfigError as error:
        out["dispatch"] = str(error)
    return out


def odd_fields() -> dict[str, Any]:
    """Batches with values that are no tensors."""

    def labelled(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return collate(samples) | {"ids": [str(len(s["input_ids"])) for s in samples], "flag": True, "meta": {"n": 1}}

    bridge = configure_accelerator(make(), DataLoader(Chats(6), collate_fn=labelled), token_budget=60)
    batch = next(iter(bridge.dataloader))
    bridge.consume_batch(batch)
    values = [
        batch["ids"] == [str(int(n)) for n in batch["attention_mask"].sum(1)],
        batch["flag"] is True,
        batch["meta"],
    ]
    bridge.close()
    return {"same": values[:2], "meta": values[2], "keys": sorted(batch)}


def resumed() -> dict[str, Any]:
    """Two epochs with two checkpoints, then on from each; weights bit for bit, dropout and all."""

    def fresh() -> tuple[Run, Any]:
        accelerator = make(2)
        bridge = configure_accelerator(accelerator, plain(31, shuffle=True), token_budget=120, sample_budget=62)
        run = Run(accelerator, bridge, dropout=0.1)
        scheduler = bridge.follow(get_linear_schedule_with_warmup(run.optimizer, 10, 62))
        accelerator.register_for_checkpointing(scheduler)
        return run, scheduler

    torch.manual_seed(7)
    whole, schedule = fresh()
    whole.epoch(schedule, save_at={2: FOLDER / "middle"})
    num_first = len(whole.losses)
    whole.accelerator.save_state(str(FOLDER / "boundary"))
    whole.epoch(schedule)
    assert whole.bridge.should_stop
    out: dict[str, Any] = {
        "given": whole.given(),
        "rate": schedule.get_last_lr()[0],
        "epochs": whole.bridge.state.epochs,
    }
    for name, step in (("middle", 2), ("boundary", num_first)):
        run, schedule = fresh()
        run.accelerator.load_state(str(FOLDER / name))
        for _ in range(run.bridge.state.epoch, 2):
            run.epoch(schedule)
        pairs = zip(run.model.parameters(), whole.model.parameters(), strict=True)
        out[name] = {
            "same_losses": run.losses == whole.losses[step:],
            "same_batches": run.batches == whole.batches[len(whole.batches) - len(run.batches) :],
            "same_weights": all(torch.equal(one, other) for one, other in pairs),
            "rate": schedule.get_last_lr()[0],
        }
        run.bridge.close()
    whole.bridge.close()
    return out


def main() -> None:
    begun = time.time()
    Accelerator(cpu=True)
    logging.basicConfig(level=logging.WARNING)
    say(exactness=exactness())
    say(prepared=prepared(), fields=odd_fields())
    say(resumed=resumed(), seconds=time.time() - begun)
    leave()


if __name__ == "__main__":
    main()
