"""DeepSpeed: batch numbers that fit, a loss that its engine does not divide twice, and the end of an optimizer step.

    engine, *_ = deepspeed.initialize(model=model, config=batch_config(loader, ds_config), optimizer=optimizer)
    for batch in loader:                      # no training_data=, no engine.train_batch(): odb's loader is the loader
        info = odb.pop_step_info(batch)
        loss = engine(**batch).loss
        step(engine, loss, info)              # scales, runs backward, steps where the optimizer step ends

The engine is used through its public methods alone; nothing of DeepSpeed is imported here. Stages 0 to 3 of ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from odb.errors import ConfigError
from odb.loader import ODBDataLoader
from odb.step import ODBStepInfo
from odb.step import scale_loss as scale_mean

if TYPE_CHECKING:
    from torch import Tensor

_MICRO, _ACCUM, _TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def batch_config(loader: ODBDataLoader, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a DeepSpeed configuration whose batch numbers fit a loader of batches of many sizes.

    DeepSpeed wants `train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks`. The micro
    batch size is bookkeeping only, and 1 here: what DeepSpeed reports as samples then counts micro-steps.

    Args:
        loader: gives `grad_accum_steps` and the number of data-parallel ranks.
        config: everything else; batch numbers in it must be absent, "auto", or the same.

    Raises:
        ConfigError: the configuration accumulates otherwise than the loader, or sets another batch size.
    """
    steps, world_size = loader.config.grad_accum_steps, loader.world_size
    numbers = {_MICRO: 1, _ACCUM: steps, _TRAIN: steps * world_size}
    given = dict(config or {})
    for name, right in numbers.items():
        if given.get(name, "auto") not in ("auto", right):
            raise ConfigError(
                f"the DeepSpeed configuration has {name}={given[name]!r}, odb's loader needs {right}: {_why(name)}"
            )
    return given | numbers


def _why(name: str) -> str:
    if name == _ACCUM:
        return "give the same number to the loader, as grad_accum_steps"
    return "token_budget decides how many samples a batch holds; leave this one out or say 'auto'"


def scale_loss(engine: Any, loss: Tensor, info: ODBStepInfo) -> Tensor:
    """What to give to `engine.backward`, so that the optimizer step's gradient is that of the global token mean.

    The engine divides by its `gradient_accumulation_steps()`, which this undoes, and averages gradients over ranks
    unless its configuration says `"gradient_allreduce_op": "sum"`.

    Args:
        engine: a `DeepSpeedEngine`.
        loss: scalar, the mean over this rank's loss-bearing labels.
        info: of the same batch.
    """
    factor = float(engine.gradient_accumulation_steps())
    if not getattr(engine, "gradient_average", True):
        factor /= engine.dp_world_size
    return scale_mean(loss, info) * factor


def step(engine: Any, loss: Tensor, info: ODBStepInfo) -> Tensor:
    """One micro-step: `backward` of the scaled loss, and the optimizer's step where `info.sync_gradients` says so.

    The boundary is told to the engine rather than counted by it, so that a short last window steps too, and nothing of
    it leaks into the next epoch. Call it for fillers as well.

    Returns:
        The micro-step's share of the token mean, detached: averaged over ranks and summed over the optimizer step's
        micro-steps it is the mean over all loss-bearing tokens.
    """
    share = scale_mean(loss, info)
    engine.set_gradient_accumulation_boundary(info.sync_gradients)
    engine.backward(scale_loss(engine, loss, info))
    engine.step()
    return share.detach()


def lr_factor(num_tokens: float, reference_tokens: float, rule: str = "linear") -> float:
    """What to multiply a learning rate by that was tuned for optimizer steps of another size.

    Args:
        num_tokens: of this optimizer step: the sum of `info.all_tokens` (or `info.window_loss_tokens`).
        reference_tokens: of the steps that the rate was tuned for, in the same unit.
        rule: "linear", or "sqrt" (which suits Adam-like optimizers), or "none".

    Raises:
        ConfigError: an unknown rule, or a count that is no positive number.
    """
    if not (num_tokens >= 0 and reference_tokens > 0):
        raise ConfigError(
            f"lr_factor needs num_tokens >= 0 and reference_tokens > 0, got {num_tokens!r} and {reference_tokens!r}"
        )
    ratio = num_tokens / reference_tokens
    rules = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    if rule not in rules:
        raise ConfigError(f"rule must be one of {', '.join(map(repr, rules))}, got {rule!r}")
    return rules[rule]
