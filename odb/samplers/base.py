"""What the batch samplers share: one plan per epoch, the ranks' shares of it, its length, its state."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from odb.errors import ConfigError
from odb.plan.labels import Microbatch
from odb.plan.types import I64

logger = logging.getLogger("odb")

STATE_VERSION = 1


@dataclass(frozen=True)
class EpochPlan:
    """One epoch on all ranks.

    Attributes:
        batches: microbatches of the common plan, a multiple of the ranks; rank `r` runs `r, r + W, ...`.
        stats: what it looks like, plain values by name.
        label_metrics: the same before and after each pass of label balancing, where there is any.
    """

    batches: list[Microbatch]
    stats: dict[str, Any]
    label_metrics: dict[str, dict[str, Any]] = field(default_factory=dict)


class PlannedBatchSampler(Sampler[list[int]]):
    """A batch sampler that plans epochs as a whole.

    Args:
        num_samples: of the dataset.
        rank: which of the ranks' shares to yield.
        world_size: data-parallel ranks; model-parallel partners get the same rank.
        shard: False yields the whole common plan, for frameworks that deal out batches round robin themselves
            (Accelerate's `prepare`); `world_size` still counts them, so that each gets the same number.
        grad_accum_steps: micro-steps of an optimizer update.
        shuffle: by seed and epoch; False keeps the dataset's order where the sampler has a say in it.
        drop_last: leave out what does not make a full microbatch on every rank, counted in `stats()["dropped"]`. False:
            microbatches are split until every rank has one more; with fewer samples than ranks, the first ones of the
            epoch come again, counted in `stats()["repeated"]`.
        seed: together with the epoch the only source of randomness.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shard: bool = True,
        grad_accum_steps: int = 1,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int = 0,
    ) -> None:
        check_positive(world_size=world_size, grad_accum_steps=grad_accum_steps)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ConfigError(f"rank must be an integer from 0 to world_size - 1 = {world_size - 1}, got {rank!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seed must be an integer >= 0, got {seed!r}")
        if not num_samples:
            raise ConfigError("lengths is empty: a sampler needs at least one sample")
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.shard = shard
        self.grad_accum_steps = grad_accum_steps
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0
        self._plan: EpochPlan | None = None
        self._start = 0  # batches of the next pass that were consumed before a restart
        self._yielded = 0

    # ---- to be given by each sampler

    @abstractmethod
    def _make_plan(self, order: I64, rng: np.random.Generator) -> EpochPlan:
        """The plan of the epoch that goes through the samples in `order`, shape (num_samples,)."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What besides the common settings a plan depends on, digests of lengths and labels included."""

    # ---- the sampler protocol

    @property
    def width(self) -> int:
        """Microbatches of an optimizer update over all ranks."""
        return self.world_size * self.grad_accum_steps

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches of the current epoch: dataset indices, row by row."""
        share = self._share()
        start, self._start = self._start, 0
        for number in range(start, len(share)):
            self._yielded = number + 1
            yield [sample for row in share[number] for sample in row]

    def __len__(self) -> int:
        """Batches of this rank in the current epoch; another epoch may have another number."""
        return len(self._share())

    def _share(self) -> list[Microbatch]:
        batches = self.plan().batches
        return batches[self.rank :: self.world_size] if self.shard else batches

    def plan(self) -> EpochPlan:
        """The current epoch's plan, the same on all ranks; made once."""
        if self._plan is None:
            rng = np.random.default_rng([self.seed, self.epoch])
            order = rng.permutation(self.num_samples) if self.shuffle else np.arange(self.num_samples)
            self._plan = self._make_plan(order, rng)
            self._log(self._plan)
        return self._plan

    def _log(self, plan: EpochPlan) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in plan.stats.items())
        logger.info("%s, epoch %d: %s", type(self).__name__, self.epoch, facts)
        for stage, metrics in plan.label_metrics.items():
            logger.info("labels %s: %s", stage, metrics)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch `epoch`, from its first batch; a pass that was resumed stays so in its own epoch."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"set_epoch needs an integer >= 0, got {epoch!r}")
        if epoch != self.epoch:
            self.epoch, self._plan, self._start, self._yielded = epoch, None, 0, 0

    def stats(self) -> dict[str, Any]:
        """What the current epoch's plan looks like, over all ranks."""
        return dict(self.plan().stats)

    # ---- state

    def settings(self) -> dict[str, Any]:
        """Everything that the plan of an epoch depends on, plain values by name."""
        common = ("num_samples", "world_size", "shard", "grad_accum_steps", "shuffle", "drop_last", "seed")
        return {"sampler": type(self).__name__} | {name: getattr(self, name) for name in common} | self._settings()

    def state_dict(self, num_consumed: int | None = None) -> dict[str, Any]:
        """Where this rank is, as JSON.

        Args:
            num_consumed: batches of this epoch that were trained on. None: all that were yielded, which a `DataLoader`
                with workers asks for ahead of their use.
        """
        consumed = self._yielded if num_consumed is None else num_consumed
        if isinstance(consumed, bool) or not isinstance(consumed, int) or not 0 <= consumed <= len(self):
            raise ConfigError(f"num_consumed must be an integer from 0 to {len(self)}, got {num_consumed!r}")
        return {"version": STATE_VERSION, "epoch": self.epoch, "consumed": consumed, "settings": self.settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on behind the batch that the state describes. Loading the end of an epoch: nothing is left.

        Raises:
            ConfigError: no state of a sampler, or one of other settings, lengths or labels; shows both sides.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise ConfigError(f"this is no state of version {STATE_VERSION} of an odb sampler: {state!r:.200}")
        saved, now = state["settings"], self.settings()
        differing = [name for name in sorted(saved.keys() | now.keys()) if saved.get(name) != now.get(name)]
        if differing:
            sides = "; ".join(f"{name}: saved {saved.get(name)!r}, now {now.get(name)!r}" for name in differing)
            raise ConfigError(
                f"the state was saved with other settings ({sides}), so that its position means nothing here: use the "
                "saved ones, or start the epoch anew with set_epoch"
            )
        self.epoch, self._plan = state["epoch"], None
        if not 0 <= state["consumed"] <= len(self):
            raise ConfigError(f"the state is at batch {state['consumed']} of an epoch of {len(self)}")
        self._start = self._yielded = state["consumed"]


def check_positive(**values: Any) -> None:
    """Refuses what is no integer >= 1.

    Raises:
        ConfigError: names the first that is wrong.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")


def checked_lengths(lengths: Any) -> I64:
    """Lengths as int64, shape (n,).

    Raises:
        ConfigError: no list of integers >= 1.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ConfigError(f"lengths must be a list of integers, got {array.dtype} of shape {array.shape}")
    if len(array) and array.min() < 1:
        place = int(np.argmin(array))
        raise ConfigError(f"lengths must be >= 1, sample {place} has {array[place]}: leave empty samples out")
    return array.astype(np.int64)


def digest(*arrays: I64) -> str:
    """A short name for what is in arrays."""
    out = hashlib.blake2b(digest_size=8)
    for array in arrays:
        out.update(np.ascontiguousarray(array, np.int64).tobytes())
        out.update(b"|")
    return out.hexdigest()


def aligned(
    batches: list[Microbatch], world_size: int, drop_last: bool, order: I64
) -> tuple[list[Microbatch], dict[str, int]]:
    """As many microbatches as every rank gets the same number of, and the samples that were dropped or repeated for it."""
    missing = -len(batches) % world_size
    if not missing:
        return batches, {"dropped": 0, "repeated": 0}
    if drop_last:
        kept = len(batches) - len(batches) % world_size
        dropped = sum(len(row) for batch in batches[kept:] for row in batch)
        return batches[:kept], {"dropped": dropped, "repeated": 0}
    out = list(batches)
    for _ in range(missing):
        if not _split_one(out):
            break
    repeated = -len(out) % world_size
    out += [[[int(order[i % len(order)])]] for i in range(repeated)]
    return out, {"dropped": 0, "repeated": repeated}


def _split_one(batches: list[Microbatch]) -> bool:
    """Cuts the microbatch with the most samples in two, in place; the second half goes to the end."""
    sizes = [sum(map(len, batch)) for batch in batches]
    place = len(sizes) - 1 - sizes[::-1].index(max(sizes))
    if sizes[place] < 2:
        return False
    batch = batches[place]
    if len(batch) > 1:
        halves: tuple[Microbatch, Microbatch] = (batch[: len(batch) // 2], batch[len(batch) // 2 :])
    else:
        row = batch[0]
        halves = ([row[: len(row) // 2]], [row[len(row) // 2 :]])
    batches[place] = halves[0]
    batches.append(halves[1])
    return True
