"""The values that travel through the planning core, and nothing else.

Conventions, valid for the whole of `odb.plan`:

- every array is a C-contiguous numpy array of dtype int64 unless its comment says otherwise;
- `n` counts the samples in question, `T` the steps of a round, `W` the data-parallel ranks, `A` the micro-steps of
  one optimizer step;
- intervals are half open: `ends` of groups over a sorted window means that group `g` is `[ends[g-1], ends[g])`;
- lengths and costs are in tokens, sizes in bytes; a *group* is the samples of one rank's batch, a *step* one aligned
  position at which every rank emits one group or is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

#: `(rows, padded_len) -> cost`, elementwise over int64 arrays; must not fall when either argument grows.
CostFn = Callable[[I64, I64], npt.NDArray[Any]]

#: How many quantiles of its group costs a rank reports. A constant of the wire format, so that rows have a fixed width.
NUM_QUANTILES = 8


class Status(IntEnum):
    """What a rank says of itself in a round."""

    RUNNING = 0  # its source may give more samples
    EXHAUSTED = 1  # its source is dry, samples are left in its window
    DRAINED = 2  # nothing left at all
    CLOSED = 3  # its consumer left the epoch
    FAILED = 4  # it can't go on


class Verdict(IntEnum):
    """What a round comes to, the same on all ranks."""

    RUN = 0  # `T` steps are emitted, another round follows unless the plan says `last`
    END = 1  # every sample view has left: no step, the epoch is over
    PEER_CLOSED = 2  # some rank left the epoch, others have not: nothing more is planned
    ALL_CLOSED = 3  # every rank left the epoch: it is over


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Everything that a plan depends on besides lengths, epoch and round. The same on all ranks (see `digest`)."""

    token_budget: int  # B, cost units of one group
    window: int  # samples that a rank may hold
    max_held_tokens: int  # the same in tokens
    max_held_bytes: int  # the same in bytes
    max_steps_per_round: int  # `cap`
    layout: str = "padded"  # "padded" | "packed"
    rows_per_batch: int = 1  # packed rows of a group, each of capacity B / rows_per_batch
    balance: str | None = None  # None | "labels": exchanges within a round
    max_samples: int | None = None  # rows of a group; packed: samples of a row
    max_patches: int | None = None  # sum of patches of a group
    pad_to_multiple_of: int = 1
    rows_multiple: int = 1  # rows of a group are a multiple of this where that leaves any
    cost_fn: CostFn | None = None  # None: rows x padded_len
    policy: str = "odb"  # "odb" | "published": which target and which groups
    split_policy: str = "even"  # "even" | "published"
    join: bool = True
    sample_quota: int | None = None  # global count of samples that ends a non-join epoch
    tail: str = "filler"  # "filler" | "skip" | "drop"
    drop_last: bool = False
    accum_tail: str = "short"  # "short" | "fill"
    on_oversize: str = "alone"  # "alone" | "error" | "skip" | packed: "truncate" | "split"
    loss_scaling: str = "exact"  # "exact" | "samples" | "none"
    grad_accum_steps: int = 1  # A
    seed: int = 0
    max_age: int = 10  # rounds that a sample may be carried before it must leave first

    def signature(self) -> dict[str, str]:
        """Field name -> canonical text, for digests and for telling two configurations apart in an error."""
        out = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if is_dataclass(value):  # its text holds what it does
                value = repr(value)
            elif callable(value):  # identity differs between processes, the name does not
                value = (
                    f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
                )
            out[one.name] = repr(value)
        return out


@dataclass(frozen=True, slots=True)
class Measures:
    """What was observed of `n` processed samples. All arrays int64, shape (n,)."""

    ids: I64  # identity: position in the epoch's global order (of this rank's own order where shares are given)
    length: I64  # tokens, >= 1
    loss_tokens: I64  # labels that bear loss, 0 <= loss_tokens <= length
    patches: I64  # vision patches, 0 where there are none
    num_bytes: I64  # size of the processed sample

    @classmethod
    def empty(cls) -> Measures:
        """No samples."""
        none = np.empty(0, np.int64)
        return cls(none, none, none, none, none)

    @classmethod
    def concat(cls, parts: list[Measures]) -> Measures:
        """The samples of all parts, in their order."""
        return cls(
            *(
                np.concatenate([getattr(p, f.name) for p in parts]) if parts else np.empty(0, np.int64)
                for f in fields(cls)
            )
        )

    def take(self, index: npt.NDArray[Any] | slice) -> Measures:
        """The samples at `index` (integer positions, a boolean mask or a slice)."""
        return Measures(*(getattr(self, f.name)[index] for f in fields(Measures)))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Room:
    """What a round's window takes besides what it holds: samples as long as they fit, the first `must` in any case.

    It closes before the first sample that does not fit, so that its limits are never exceeded but by `must`.
    """

    samples: int
    tokens: int
    num_bytes: int
    must: int = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing is taken, whatever comes."""
        return self.must <= 0 and min(self.samples, self.tokens, self.num_bytes) <= 0

    def takes(self, length: int, num_bytes: int) -> bool:
        """Whether a sample of so many tokens and bytes is taken."""
        return self.must > 0 or not (self.is_full or length > self.tokens or num_bytes > self.num_bytes)

    def less(self, length: int, num_bytes: int, num_samples: int = 1) -> Room:
        """What is left once so many tokens and bytes were taken."""
        return Room(
            self.samples - num_samples, self.tokens - length, self.num_bytes - num_bytes, self.must - num_samples
        )

    def num_taken(self, lengths: I64, num_bytes: I64) -> int:
        """How many of the samples that come, in their order; arrays of shape (n,)."""
        fits = (np.cumsum(lengths) <= self.tokens) & (np.cumsum(num_bytes) <= self.num_bytes)
        number = 0 if self.is_full else min(self.samples, int(fits.sum()))
        return min(len(fits), max(self.must, number))


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's row in a round's exchange: fixed width whatever the window holds."""

    epoch: int
    round: int
    status: Status
    num_held: int  # n_r, samples in the window
    num_groups: int  # g_r, groups that they form (complete groups with drop_last)
    held_tokens: int
    observed_samples: int  # since the epoch began
    observed_tokens: int
    emitted_samples: int
    config_digest: int  # of PlanConfig and of whatever else must be equal
    agreement_digest: int  # of the last agreement: ranks that drifted apart are found one round later
    num_keys: int = -1  # of the order that all ranks share; -1: each rank has its own share
    next_key: int = 0  # the first of them that nobody was granted yet
    num_granted: int = 0  # keys that this rank was granted
    num_drawn: int = 0  # and of these the ones that it has used, rejected samples included
    cost_quantiles: tuple[int, ...] = (0,) * NUM_QUANTILES  # of this rank's group costs, ascending


@dataclass(frozen=True, slots=True)
class ReportTable:
    """The reports of all ranks by column, each an int64 array of shape (W,): cheap for thousands of ranks."""

    epoch: I64
    round: I64
    status: I64
    num_held: I64
    num_groups: I64
    held_tokens: I64
    observed_samples: I64
    observed_tokens: I64
    emitted_samples: I64
    config_digest: I64
    agreement_digest: I64
    num_keys: I64
    next_key: I64
    num_granted: I64
    num_drawn: I64
    cost_quantiles: I64  # (W, NUM_QUANTILES)

    @classmethod
    def of(cls, reports: Sequence[Report]) -> ReportTable:
        """The same from single reports."""
        return cls(*(np.array([getattr(report, f.name) for report in reports], np.int64) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.epoch)


@dataclass(frozen=True, slots=True)
class RoundState:
    """One rank's state between two rounds. A value: `conclude` returns the next one."""

    epoch: int
    round: int
    window: Measures  # carried samples, in the order in which they were observed
    age: I64  # (n,) rounds that each carried sample has been carried
    observed_samples: int = 0
    observed_tokens: int = 0
    emitted_samples: int = 0
    all_emitted_samples: int = 0  # over all ranks, for the quota
    step: int = 0  # steps emitted in this epoch
    agreement_digest: int = 0
    num_keys: int = -1  # this and the next three: see `Report`
    next_key: int = 0
    num_granted: int = 0
    num_drawn: int = 0

    @classmethod
    def start(cls, epoch: int) -> RoundState:
        """The state before the first round of an epoch whose shares are fixed; see `grants.start` for granted ones."""
        return cls(epoch=epoch, round=0, window=Measures.empty(), age=np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank brings into a round: its window, the groups that it forms by itself, and its report."""

    state: RoundState
    window: Measures  # carried and new samples
    age: I64  # (n,)
    groups: tuple[I64, ...]  # each: positions in `window`
    report: Report


@dataclass(frozen=True, slots=True)
class Agreement:
    """What everybody does in this round. A function of all reports alone; equal on all ranks."""

    verdict: Verdict
    epoch: int
    round: int
    num_steps: int  # T; 0 unless the verdict is RUN
    last: bool  # the epoch is over once these steps are emitted
    num_emitting: I64  # (W,) steps in which each rank emits a real group, the rest of its T are idle
    closed_ranks: tuple[int, ...]
    digest: int
    caps: I64 = field(default_factory=lambda: np.empty(0, np.int64))  # (T,) common cost caps, falling; or none
    grants: I64 = field(default_factory=lambda: np.empty(0, np.int64))  # (W,) keys that each rank gets next; or none
    first_key: int = 0  # rank 0's first of them: the ranks' blocks follow each other


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's part of a round: exactly T slots in emission order, and what stays behind."""

    proposal: Proposal
    agreement: Agreement
    groups: tuple[I64, ...]  # T entries: positions in `proposal.window`; empty where the rank is idle
    carry: I64  # positions in `proposal.window` that stay
    dropped: I64  # positions that leave unemitted by an option (drop_last, tail="drop", non-join), to be counted
    totals: I64  # (T, 3): this rank's samples, tokens, loss tokens of each step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as this rank runs it."""

    step: int  # index in the epoch
    ids: I64  # (rows,) sample identities, empty where idle
    idle: bool
    rows: int  # of the batch: samples, or packed rows
    padded_len: int  # of a row
    local_samples: int
    local_tokens: int
    local_loss_tokens: int
    all_samples: int
    all_tokens: int
    all_loss_tokens: int
    window_loss_tokens: int  # over all ranks and all micro-steps of the optimizer step
    window_samples: int
    loss_scale: float
    sync_gradients: bool
    cost: int  # 0 where idle


@dataclass(frozen=True, slots=True)
class Outcome:
    """A concluded round: the steps to emit, the state after it, and what left unemitted."""

    steps: tuple[StepPlan, ...]
    state: RoundState
    ended: bool
    dropped_ids: I64  # samples that leave unemitted by an option, counted in stats
