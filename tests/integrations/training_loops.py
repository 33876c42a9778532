"""Training loops as their users write them, and the gradient that each must give. Run by rank processes."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scenarios import Spec, TokenModel, Update, causal_loss, ddp_sync, flat_grad, relative_error, updates_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import odb
from odb.testing import LengthsDataset

#: Rank 1 has a fifth of the work: rank 0 runs alone at the tail. Every third prompt bears no loss at all.
LENGTHS = [5 + (i * 37) % 60 for i in range(30)]
UNEVEN = [[i for i in range(30) if i % 5], [i for i in range(30) if not i % 5]]
PROMPTS = [(0.2, 0.7, 1.0)[i % 3] for i in range(30)]


def uneven(grad_accum_steps: int = 1, **options: Any) -> Spec:
    """Unequal shares, masked prompts, a window of two batches' worth, so that there are several rounds."""
    common = {"grad_accum_steps": grad_accum_steps, "max_held_tokens": 600, "timeout_s": 30.0}
    return Spec(LENGTHS, 120, share=UNEVEN, data={"prompt_fraction": PROMPTS}, options=common | options)


# ---- loops with gradients to look at


def ddp_model() -> tuple[torch.nn.Module, Callable[[bool], Any]]:
    model = DistributedDataParallel(TokenModel())
    return model, ddp_sync(model)


def fsdp2_model() -> tuple[torch.nn.Module, Callable[[bool], Any]]:
    model = fully_shard(TokenModel(), mesh=init_device_mesh("cpu", (2,)))

    @contextlib.contextmanager
    def syncing(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    return model, syncing


MODELS = {"ddp": ddp_model, "fsdp2": fsdp2_model}


def train(rank: int, world_size: int, kind: str, spec: Spec) -> list[Update]:
    """One epoch; what each optimizer step saw and its gradient, of all shards."""
    model, syncing = MODELS[kind]()
    return updates_of(rank, world_size, spec, model, syncing, whole_grad)


def whole_grad(model: torch.nn.Module) -> Any:
    for parameter in model.parameters():
        if hasattr(parameter.grad, "full_tensor"):
            parameter.grad = parameter.grad.full_tensor().as_subclass(torch.Tensor)
    return flat_grad(model)


# ---- loops of which parameters are known, before and after


def reference_step(
    weights: Sequence[torch.Tensor], dataset: LengthsDataset, ids: Sequence[int]
) -> tuple[np.ndarray[Any, Any], float]:
    """Gradient at these weights of the mean over all loss-bearing tokens of the samples, and that mean."""
    model = TokenModel()
    num_tokens, mean = sum(dataset.num_loss_tokens(i) for i in ids), 0.0
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    for i in ids:
        sample: Any = dataset[i]
        total = causal_loss(model(sample["input_ids"][None]), sample["labels"][None], reduction="sum")
        (total / max(1, num_tokens)).backward()
        mean += total.item() / max(1, num_tokens)
    return flat_grad(model), mean


def update_error(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], lr: float, dataset: LengthsDataset, ids: list[int]
) -> tuple[float, float]:
    """How far an SGD step is from the exact one, as a share of it; and the exact token mean."""
    grad, mean = reference_step(before, dataset, ids)
    moved = torch.cat([(b.double() - a.double()).flatten() for b, a in zip(before, after, strict=True)]).numpy()
    return relative_error(moved / lr, grad), mean


def deepspeed_main() -> None:
    """Program: `loops.py deepspeed '{"stages": [..], "accumulation": [..]}'`; rank 0 prints one JSON line per run."""
    import deepspeed

    wanted = json.loads(sys.argv[2])
    # Gloo instead of an operator of DeepSpeed's own that it compiles at the first start on a machine, for half a minute.
    deepspeed.ops.__compatible_ops__ = dict.fromkeys(["deepspeed_shm_comm"], False)
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in wanted["stages"]:
        for accumulation in wanted["accumulation"]:
            run = deepspeed_epoch(stage, accumulation, wanted.get("config", {}))
            if torch.distributed.get_rank() == 0:
                print("RUN", json.dumps(run), flush=True)
    torch.distributed.destroy_process_group()


def deepspeed_epoch(stage: int, accumulation: int, config: dict[str, Any], lr: float = 10.0) -> dict[str, Any]:
    """Two epochs of `engine.backward` and `engine.step`, compared at each update."""
    import deepspeed

    from odb.integrations.deepspeed import batch_config, step

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    spec = uneven(accumulation)
    model = TokenModel().float()
    with spec.loader(rank, world_size) as loader:
        full = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True} | config
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=batch_config(loader, full))
        errors, loss_errors, num_idle, num_micro, mine, share = [], [], 0, [], [], torch.zeros(())
        before = whole_weights(model)
        for _ in range(2):
            count = 0
            for batch in loader:
                info = odb.pop_step_info(batch)
                share += step(engine, causal_loss(engine(batch["input_ids"]), batch["labels"]), info)
                num_idle, count = num_idle + info.idle, count + 1
                mine += [] if info.idle else batch["id"].tolist()
                if info.sync_gradients:
                    after, ids = whole_weights(model), all_ids(mine)
                    error, mean = update_error(before, after, lr, spec.dataset(), ids)
                    torch.distributed.all_reduce(share)
                    errors.append(error)
                    loss_errors.append(abs(share.item() / world_size - mean))
                    before, mine, share = after, [], torch.zeros(())
            num_micro.append(all_ids([count]))
    idle = sum(all_ids([num_idle]))
    numbers = {"micro": num_micro, "updates": len(errors), "steps": engine.global_steps, "idle": idle}
    return {"stage": stage, "accumulation": accumulation, "error": max(errors), "loss": max(loss_errors), **numbers}


def whole_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def all_ids(mine: list[int]) -> list[int]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return [one for ids in everyone for one in ids]


if __name__ == "__main__":
    {"deepspeed": deepspeed_main}[sys.argv[1]]()
