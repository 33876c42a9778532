"""From a planned step to what the training loop gets: collation, fillers, the info, the recount of labels."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from odb.errors import ConfigError, MeasureError
from odb.feed.cut import pieces, sample_of
from odb.feed.engine import Emission
from odb.feed.measure import count_loss_labels
from odb.feed.source import add_note
from odb.plan import cost, packed
from odb.plan.types import PlanConfig, StepPlan
from odb.step import ODBStepInfo

logger = logging.getLogger("odb")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One batch on its way to the training loop, with its info and which bound closed its group."""

    batch: Any
    info: ODBStepInfo
    bound: str


class Pool(Protocol):
    """Processes that collate (see `odb.feed.pool`)."""

    depth: int

    @property
    def is_running(self) -> bool:
        """Whether `submit` may be called."""

    def note(self, seconds: float) -> None:
        """How long a collation took in this process."""

    def submit(self, samples: list[Any], plan: StepPlan) -> None:
        """Has a batch made."""

    def result(self, plan: StepPlan) -> Any:
        """The batch of a step that was submitted; in the order of submission."""


class Assembler:
    """Makes the batches of one rank. Remembers a cheap sample of the last real group, to stand in where it is idle."""

    def __init__(
        self,
        config: PlanConfig,
        collate_fn: Callable[[list[Any]], Any],
        *,
        recount: bool,
        ignore_index: int,
        label_shift: bool,
        filler_fn: Callable[[], Any] | None,
        first_sample: Callable[[], Any | None],
    ) -> None:
        self.config = config
        self.collate_fn = collate_fn
        self.recount = recount
        self.ignore_index = ignore_index
        self.label_shift = label_shift
        self.filler_fn = filler_fn
        self.first_sample = first_sample
        #: Where random numbers of `collate_fn` come from: (seed, epoch, rank), None: from wherever they are.
        self.address: tuple[int, int, int] | None = None
        self._cheapest: Any = None
        self._has_cheapest = False
        self._has_warned = False

    def forget(self) -> None:
        """Another epoch, or another place in one: what stands in must not depend on what this process did before."""
        self._cheapest, self._has_cheapest = None, False

    def deliver(self, emission: Emission) -> Delivery | None:
        """The batch of a step; None where this rank is idle and idle steps are skipped (`tail="skip"`)."""
        samples = self.prepare(emission)
        if samples is None:
            return None
        return self.labelled(self.batch(samples, emission.plan), emission)

    def prepare(self, emission: Emission) -> list[Any] | None:
        """The samples that a step's batch is made of: its group, or what stands in for one."""
        if emission.plan.idle:
            return None if self.config.tail == "skip" else [self._filler()]
        lengths = [measure.length for measure in emission.measures]
        self._cheapest = own_copy(emission.samples[lengths.index(min(lengths))])
        self._has_cheapest = True
        return emission.samples

    def batch(self, samples: list[Any], plan: StepPlan) -> Any:
        """Collates a step's samples and counts its labels again. Depends on nothing that other steps have left here."""
        if self.address is not None:
            seed_generators((*self.address, plan.step))
        batch = self.collate(samples)
        if not plan.idle:
            self._check(batch, plan)
        return batch

    def labelled(self, batch: Any, emission: Emission) -> Delivery:
        """A batch with its info."""
        bound = "idle" if emission.plan.idle else self._bound(emission)
        return Delivery(batch, step_info(emission.plan, self.config.loss_scaling), bound)

    def alone(self) -> Assembler:
        """A copy that can be sent to another process and knows `batch` alone."""
        other = copy(self)
        other.filler_fn, other.first_sample = None, _no_sample
        other.forget()
        return other

    def collate(self, samples: list[Any]) -> Any:
        """The user's `collate_fn`, run on the samples of one group."""
        try:
            return self.collate_fn(samples)
        except Exception as error:
            add_note(error, f"raised by collate_fn on a group of {len(samples)} samples")
            raise

    def _filler(self) -> Any:
        if self.filler_fn is not None:
            sample = self.filler_fn()
            if sample is None:
                raise ConfigError(
                    "filler_fn returned None: it must return one processed sample, as the dataset gives them"
                )
            return sample
        if not self._has_cheapest:
            self._cheapest = self.first_sample()
            self._has_cheapest = self._cheapest is not None
        if not self._has_cheapest:
            raise ConfigError(
                "this rank has to run a step without a sample of its own and never had one: give it data, or give "
                "filler_fn=... (() -> a processed sample), or tail='drop'"
            )
        return own_copy(self._cheapest)

    def _check(self, batch: Any, plan: StepPlan) -> None:
        labels = _field(batch, "labels")
        if self.recount and labels is not None and hasattr(labels, "ndim"):
            counted = count_loss_labels(labels, self.ignore_index, self.label_shift and not _are_classes(batch, plan))
            if counted != plan.local_loss_tokens:
                raise MeasureError(
                    f"the collated batch has {counted} loss-bearing labels, its samples had {plan.local_loss_tokens} "
                    f"when they were measured (step {plan.step}, ignore_index={self.ignore_index}, "
                    f"label_shift={self.label_shift}): collate_fn pads labels on the left or with another value, masks, "
                    "truncates or makes labels of its own, and the loss would be weighed wrongly. Mend it, or give "
                    "loss_tokens_fn=... (sample -> labels that bear loss after collation)"
                )
        ids = _field(batch, "input_ids")
        if self._has_warned or getattr(ids, "ndim", 0) != 2 or self.config.cost_fn is not None:
            return
        rows, width = int(ids.shape[0]), int(ids.shape[1])
        if rows > 1 and rows * width > max(plan.cost, self.config.token_budget):
            self._has_warned = True
            logger.warning(
                "collate_fn padded a batch to %d x %d = %d tokens, above token_budget=%d: it pads further than to the "
                "longest sample (pad_to_multiple_of tells odb of a multiple)",
                *(rows, width, rows * width, self.config.token_budget),
            )

    def _bound(self, emission: Emission) -> str:
        """Which bound kept another sample of the group's own width out of it."""
        config, plan = self.config, emission.plan
        if plan.cost > config.token_budget:
            return "oversize"
        if config.layout == "packed":
            return _packed_bound(config, emission)
        if config.max_samples is not None and plan.rows >= config.max_samples:
            return "max_samples"
        one_more = cost.group_cost(np.array([plan.rows + 1]), np.array([plan.padded_len]), config)
        if int(one_more[0]) > config.token_budget:
            return "token_budget"
        patches = [measure.patches for measure in emission.measures]
        if config.max_patches is not None and sum(patches) + min(patches) > config.max_patches:
            return "max_patches"
        return "window"

    def probe(self, sample: Any, measure_length: int) -> Any:
        """A batch of copies of one sample, padded to exactly the token budget.

        It runs before the first step with weight 0, so that a budget too large for the device fails at once.
        """
        if self.config.layout == "packed":
            return self.collate(_full_rows(sample, measure_length, self.config))
        rows, width = probe_shape(self.config.token_budget, measure_length)
        return pad_batch(self.collate([own_copy(sample) for _ in range(rows)]), rows, width, self.ignore_index)


def _packed_bound(config: PlanConfig, emission: Emission) -> str:
    """Which bound kept another sample like the shortest of a packed group out of it."""
    length = np.array([measure.length for measure in emission.measures], np.int64)
    sizes = cost.packed_size(length, config)
    ends = packed.rows_of(sizes, config)
    most = config.max_samples
    if most is not None and all(b - a >= most for a, b in pairwise([0, *ends])):
        return "max_samples"
    one_more = packed.rows_of(np.append(sizes, sizes.min()), config)
    if len(one_more) > config.rows_per_batch:
        return "token_budget"
    patches = [measure.patches for measure in emission.measures]
    if config.max_patches is not None and sum(patches) + min(patches) > config.max_patches:
        return "max_patches"
    return "window"


def _full_rows(sample: Any, length: int, config: PlanConfig) -> list[Any]:
    """Copies of a sample that fill the rows of a packed batch, the last of each row cut to what is left."""
    capacity = cost.row_capacity(replace(config, cost_fn=None))
    if config.max_samples is not None:
        capacity = min(capacity, config.max_samples * length)
    row = [sample] * (capacity // length)
    try:
        rest = pieces(sample, length, capacity % length)[:1] if capacity % length else []
    except MeasureError:  # what can't be cut leaves the row that much short
        rest = []
    return [own_copy(one) for _ in range(config.rows_per_batch) for one in row + rest or [sample]]


def own_copy(sample: Any) -> Any:
    """A sample that may be given to `collate_fn` once more: collators take keys out of samples, and write into tensors."""
    if not isinstance(sample, dict):
        return copy(sample)
    out = copy(sample)
    for key, value in sample.items():
        if isinstance(value, torch.Tensor):
            out[key] = value.clone()
        elif isinstance(value, (np.ndarray, list, dict)):
            out[key] = copy(value)
    return out


def _no_sample() -> None:
    return None


def seed_generators(address: tuple[int, ...]) -> None:
    """Seeds this process's global generators, so that a `collate_fn` that draws gives a step the same in any process."""
    words = np.random.SeedSequence(address).generate_state(3, np.uint64).tolist()
    random.seed(words[0])
    np.random.seed(words[1] & 0xFFFFFFFF)
    torch.default_generator.manual_seed(words[2] >> 1)


def probe_shape(budget: int, length: int) -> tuple[int, int]:
    """Rows and width whose product is `budget`: the most rows whose width is at least `length` and that divide it."""
    rows = max(1, budget // max(1, length))
    while budget % rows:
        rows -= 1
    return rows, budget // rows


def pad_batch(batch: Any, rows: int, width: int, ignore_index: int) -> Any:
    """Widens the (rows, length) tensors of a mapping to `width`: labels by `ignore_index`, all else by 0."""
    if not isinstance(batch, Mapping):
        return batch
    ids = batch.get("input_ids")
    now = int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.ndim == 2 else -1
    for key, value in list(batch.items()):
        if isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape == (rows, now) and now < width:
            fill = ignore_index if key == "labels" else 0
            batch[key] = torch.nn.functional.pad(value, (0, width - now), value=fill)  # type: ignore[index]
    return batch


def _are_classes(batch: Any, plan: StepPlan) -> bool:
    """Whether a batch has one label a row, of shape (rows,) or (rows, 1), beside sequences: no causal shift there."""
    labels, ids = _field(batch, "labels"), _field(batch, "input_ids")
    if getattr(ids, "ndim", 0) < 2 or ids.shape[-1] == 1:
        return False
    number = plan.local_samples or plan.rows
    return tuple(labels.shape) in ((number,), (number, 1))


def _field(batch: Any, key: str) -> Any:
    return batch.get(key) if isinstance(batch, Mapping) else getattr(batch, key, None)


def step_info(plan: StepPlan, loss_scaling: str) -> ODBStepInfo:
    """What the training loop learns of a step."""
    return ODBStepInfo(
        step=plan.step,
        all_samples_this_step=plan.all_samples,
        local_samples=plan.local_samples,
        local_tokens=plan.local_tokens,
        all_tokens=plan.all_tokens,
        local_loss_tokens=plan.local_loss_tokens,
        all_loss_tokens=plan.all_loss_tokens,
        window_loss_tokens=plan.window_loss_tokens,
        padded_tokens=plan.rows * plan.padded_len,
        loss_scale=plan.loss_scale,
        idle=plan.idle,
        sample_ids=tuple(map(sample_of, plan.ids.tolist())),
        sync_gradients=plan.sync_gradients,
        loss_scaling=loss_scaling,
    )


def deliveries(
    items: Iterator[Any],
    assembler: Assembler,
    *,
    warmup_probe: bool,
    is_closed: Callable[[], bool],
    pool: Pool | None = None,
) -> Iterator[Any]:
    """Emissions as deliveries, in order; other items (`PeersClosed`) pass through.

    Nothing is collated once the consumer left. With a pool as many steps are under way as it takes, but never steps of
    two rounds: the next round may have to wait for other ranks, which must not keep back what is ready.
    """
    under_way: deque[Emission] = deque()
    for item in items:
        if not isinstance(item, Emission):
            yield item
            continue
        if is_closed():
            under_way.clear()
            continue
        if warmup_probe:
            warmup_probe = False
            yield probe_delivery(item, assembler)
        samples = assembler.prepare(item)
        if pool is None or not pool.is_running:
            if samples is not None:
                yield _collated_here(assembler, samples, item, pool)
            continue
        if samples is not None:
            pool.submit(samples, item.plan)
            under_way.append(replace(item, samples=[]))
        del samples
        most = pool.depth if item.more else 0
        while len(under_way) > most and not is_closed():
            yield assembler.labelled(pool.result(under_way[0].plan), under_way.popleft())


def _collated_here(assembler: Assembler, samples: list[Any], item: Emission, pool: Pool | None) -> Delivery:
    began = time.perf_counter()
    batch = assembler.batch(samples, item.plan)
    if pool is not None:
        pool.note(time.perf_counter() - began)
    return assembler.labelled(batch, item)


def probe_delivery(first: Emission, assembler: Assembler) -> Delivery:
    """The warm-up probe, made of the first step's longest sample; weight 0, counted nowhere."""
    lengths = [measure.length for measure in first.measures] or [1]
    sample = first.samples[lengths.index(max(lengths))] if first.samples else assembler._filler()
    batch = assembler.probe(sample, max(lengths))
    info = ODBStepInfo(
        step=-1,
        all_samples_this_step=0,
        local_samples=0,
        local_tokens=0,
        all_tokens=0,
        local_loss_tokens=0,
        all_loss_tokens=0,
        window_loss_tokens=0,
        padded_tokens=assembler.config.token_budget,
        loss_scale=0.0,
        idle=True,
        sample_ids=(),
        sync_gradients=assembler.config.grad_accum_steps == 1,
        loss_scaling=assembler.config.loss_scaling,
    )
    return Delivery(batch, info, "probe")
