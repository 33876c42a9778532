"""What a training loop learns of each batch, and the loss scale made of it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from odb.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: The key under which a batch that is a mapping carries its `ODBStepInfo`.
STEP_INFO_KEY = "odb_step_info"


@dataclass(frozen=True, slots=True)
class ODBStepInfo:
    """One batch as its rank and as all ranks see it. Counts are exact; `all_*` are sums over data-parallel ranks."""

    step: int  # index of this micro-step in the epoch
    all_samples_this_step: int
    local_samples: int
    local_tokens: int  # real tokens, without padding
    all_tokens: int
    local_loss_tokens: int  # labels that bear loss
    all_loss_tokens: int
    window_loss_tokens: int  # over all ranks and all micro-steps of the optimizer step
    padded_tokens: int  # rows x padded length of this rank's batch, 0 for a filler
    loss_scale: float  # what this rank's mean loss is multiplied by
    idle: bool  # a filler: a real sample again, with weight 0
    sample_ids: tuple[int, ...]  # identities of the samples, empty for a filler
    sync_gradients: bool  # True on the last micro-step of an optimizer step
    loss_scaling: str = "exact"

    def to(self, *_args: Any, **_kwargs: Any) -> ODBStepInfo:
        """Itself, so that loops which move every value of a batch to a device move this one too."""
        return self


def pop_step_info(batch: Any, loss_scaling: str | None = None) -> ODBStepInfo:
    """Takes the info out of a batch, so that the batch can go to the model.

    Args:
        batch: a batch that is a mapping, as the loader yielded it.
        loss_scaling: if given, the mode that the caller counts on ("approx" means "exact").

    Raises:
        ConfigError: the batch carries no info, or the loader scales in another mode than asked for.
    """
    if not isinstance(batch, MutableMapping):
        raise ConfigError(
            f"pop_step_info needs a batch that is a mapping, got {type(batch).__name__}; "
            "for other batches iterate `for batch, info in loader.steps()`"
        )
    info = batch.pop(STEP_INFO_KEY, None)
    if not isinstance(info, ODBStepInfo):
        raise ConfigError(
            "this batch carries no step info: it does not come from an odb loader, the info was taken out before, or "
            "the batch was rebuilt from chosen keys; take the info out first, or iterate `loader.steps()`"
        )
    if loss_scaling is not None and _normal(loss_scaling) != info.loss_scaling:
        raise ConfigError(
            f"pop_step_info(loss_scaling={loss_scaling!r}), but the loader was made with "
            f"loss_scaling={info.loss_scaling!r}: give the same to both"
        )
    return info


def _normal(mode: str) -> str:
    known = ("exact", "approx", "samples", "none")
    if mode not in known:
        raise ConfigError(f"loss_scaling must be one of {known}, got {mode!r}")
    return "exact" if mode == "approx" else mode


def scale_loss(loss: Tensor, info: Any, total: int | None = None, world_size: int | None = None) -> Tensor:
    """Weighs this rank's mean loss so that the gradient averaged over ranks is that of the global token mean.

    `loss * info.loss_scale`, and an exact zero (still part of the graph, so that every collective of the backward
    pass runs) where the scale is 0: a mean over no labels is NaN, and NaN times 0 stays NaN. With gradient
    accumulation do not divide by the number of micro-steps: the scale already spans the whole optimizer step.

    Args:
        loss: scalar tensor, the mean over this rank's loss-bearing labels.
        info: `ODBStepInfo`; or this rank's count, followed by `total` and `world_size`, the paper package's form:
            `loss * info / total * world_size`.
        total: count over all ranks, in the second form only.
        world_size: data-parallel ranks, in the second form only.

    Raises:
        ConfigError: neither of the two forms.
    """
    if isinstance(info, ODBStepInfo):
        if total is not None or world_size is not None:
            raise ConfigError("scale_loss(loss, info) takes no further arguments; got total or world_size too")
        scale = info.loss_scale
    elif total is None or world_size is None:
        raise ConfigError(
            "scale_loss takes (loss, ODBStepInfo) or (loss, local_count, total_count, world_size), got "
            f"(loss, {type(info).__name__}, {total!r}, {world_size!r})"
        )
    else:
        scale = float(info) / float(total) * float(world_size) if total else 0.0
    if scale == 0.0:
        return loss.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * 0.0
    return loss * scale
