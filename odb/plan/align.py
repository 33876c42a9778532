"""All reports of a round -> what everybody does. The only copy of the target rule.

`settle` does not know which rank it runs on; all ranks run it on the same reports and get the same agreement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb.errors import DisagreementError, PeerFailedError
from odb.plan import grants
from odb.plan.types import I64, Agreement, PlanConfig, Report, ReportTable, Status, Verdict
from odb.plan.wire import digest

#: The reports' fields that must be equal on all ranks, and what a difference means to a user.
_MUST_AGREE = (
    ("epoch", "they run different epochs; call set_epoch with the same value on all ranks"),
    ("round", "they are in different rounds; iterate the loader the same number of times on all ranks"),
    ("config_digest", "their options or data sets differ; build the loader alike on all ranks"),
    (
        "num_keys",
        "their orders have different lengths; give all ranks the same data set and sampler, and resume all or none",
    ),
    ("next_key", "their ledgers of the shared order differ; the same reports gave different grants"),
    ("agreement_digest", "their plans drifted apart; the same inputs gave different plans"),
)

_NONE = np.empty(0, np.int64)
_MOST_NAMED = 8  # ranks in one error

#: Shards are alike where the fewest groups of a rank, or its mean length so far, are within a fifth of the most.
_ALIKE = 5

#: Of the groups that every rank can fill, half leave: those that fit the round's common costs best. What stays makes the
#: next window denser where samples are rare. While windows still grow and are poor, a quarter leaves; and where the
#: shared order runs out, next to nothing until all of it is seen: then what is left is planned at once.
#: Few ranks wait little for one another, so they must not wait for samples either: windows that grow while half of them
#: leave need workers three times as fast as the steps, with a quarter five times. Once they are grown two fifths leave:
#: with half, the epoch's first batches have samples some per cent longer than the last ones have. Late on, a quarter costs
#: hardly a step. The most ranks that it is meant for, and the part.
_FEW_RANKS = {"early": (4, 1 / 2), "grown": (4, 2 / 5), "late": (8, 1 / 4)}
_MANY_RANKS = {"early": 1 / 4, "grown": 1 / 2, "late": 1 / 64}

#: Optimizer steps that a rank must be able to fill for anything to leave while the last keys are granted.
_FEW = 4


@dataclass(frozen=True, slots=True)
class _Windows:
    """What ranks hold, by column. All arrays shape (W,)."""

    table: ReportTable
    running: npt.NDArray[np.bool_]  # may get more samples
    is_elastic: bool
    is_early: bool  # windows still grow from round to round
    is_late: bool  # elastic: what is not yet observed can't fill the windows any more
    will_grow: bool  # keys are granted just now

    @classmethod
    def of(cls, config: PlanConfig, table: ReportTable, granted: I64) -> _Windows:
        is_elastic = bool(table.num_keys[0] >= 0)
        is_late = False
        running = table.status == Status.RUNNING
        if is_elastic:  # what a rank was granted just now it could not know of
            left = table.num_keys[0] - table.next_key[0] - granted.sum()
            running = (table.num_granted + granted > table.num_drawn) | (left > 0)
            used = table.num_drawn.sum()
            mean = table.observed_tokens.sum() / max(1, used)
            unseen = (table.num_keys[0] - used) * mean
            is_late = bool(table.held_tokens.sum() + unseen < len(table) * config.max_held_tokens)
        is_early = token_target(config, int(table.round[0])) < config.max_held_tokens
        return cls(table, running, is_elastic, is_early, is_late, bool(granted.any()))

    @property
    def held(self) -> I64:
        return self.table.num_held

    @property
    def groups(self) -> I64:
        return self.table.num_groups

    @property
    def cost_quantiles(self) -> I64:
        """(W, NUM_QUANTILES)."""
        return self.table.cost_quantiles

    def mean_length(self, ranks: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Tokens of a sample, over all that each of these ranks observed in this epoch."""
        mean: npt.NDArray[np.float64] = self.table.observed_tokens[ranks] / np.maximum(
            1, self.table.observed_samples[ranks]
        )
        return mean


def token_target(config: PlanConfig, round_: int) -> int:
    """Tokens that a window may hold in a round: one budget for each micro-step at first, doubling with every round."""
    ramp: int = config.grad_accum_steps * config.token_budget << min(round_, 40)
    return min(config.max_held_tokens, ramp)


def settle(config: PlanConfig, reports: Sequence[Report] | ReportTable) -> Agreement:
    """What every rank does in this round; `reports[r]`, or row `r` of a table, is rank `r`'s.

    Raises:
        DisagreementError: epoch, round, configuration or plans differ; names the ranks and what differs.
        PeerFailedError: a rank reports that it can't go on.
    """
    table = reports if isinstance(reports, ReportTable) else ReportTable.of(reports)
    _check_equal(table)
    failed = tuple(np.flatnonzero(table.status == Status.FAILED).tolist())
    if failed:
        raise PeerFailedError(f"rank(s) {_names(failed)} failed and can't go on", failed)
    closed = tuple(np.flatnonzero(table.status == Status.CLOSED).tolist())
    if closed:
        verdict = Verdict.ALL_CLOSED if len(closed) == len(table) else Verdict.PEER_CLOSED
        return _agreement(verdict, 0, False, closed, table)
    granted = _grants(config, table)
    windows = _Windows.of(config, table, granted)
    num_steps, last, caps = _target(config, windows)
    verdict = Verdict.END if last and not num_steps else Verdict.RUN
    return _agreement(verdict, num_steps, last, (), table, granted, caps)


def _names(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more


def _check_equal(table: ReportTable) -> None:
    for field, meaning in _MUST_AGREE:
        column: I64 = getattr(table, field)
        if (column == column[0]).all():
            continue
        values = column.tolist()
        counts = Counter(values).most_common(2)
        # Without a majority, as with two ranks, rank 0 is what the others are compared with.
        common = values[0] if counts[0][1] == counts[1][1] else counts[0][0]
        odd = tuple(rank for rank, value in enumerate(values) if value != common)
        other = ", ".join(f"rank {rank}: {values[rank]}" for rank in odd[:_MOST_NAMED])
        raise DisagreementError(
            f"rank(s) {_names(odd)} differ from the others in {field} ({other}; the others: {common}): {meaning}", odd
        )


def _agreement(
    verdict: Verdict,
    num_steps: int,
    last: bool,
    closed: tuple[int, ...],
    table: ReportTable,
    granted: I64 = _NONE,
    caps: I64 = _NONE,
) -> Agreement:
    emitting = np.minimum(table.num_held, num_steps)
    last = last and verdict == Verdict.RUN
    before, epoch, round_, first_key = (
        int(column[0]) for column in (table.agreement_digest, table.epoch, table.round, table.next_key)
    )
    # The chain over rounds makes ranks that once differed differ for ever after.
    facts = (before, epoch, round_, verdict.name, num_steps, last, closed, first_key)
    chain = digest(repr(facts), emitting.tobytes(), caps.tobytes(), granted.tobytes())
    return Agreement(verdict, epoch, round_, num_steps, last, emitting, closed, chain, caps, granted, first_key)


def _grants(config: PlanConfig, table: ReportTable) -> I64:
    """(W,) what each rank is granted now; nothing where shares are fixed."""
    if table.num_keys[0] < 0:
        return _NONE
    return grants.decide(config, table, token_target(config, int(table.round[0]) + 1))


def _target(config: PlanConfig, table: _Windows) -> tuple[int, bool, I64]:
    """The number of steps, whether the epoch is over behind them, and common cost caps (none: each rank for itself)."""
    if not table.running.any() and not table.held.any():
        return 0, True, _NONE
    if _waits(config, table):
        return 0, False, _NONE
    if config.drop_last:
        return *_complete_steps(config, table), _NONE
    if config.policy == "published":
        steps, has_caps = _published_steps(config, table), False
    else:
        steps, has_caps = _odb_steps(config, table)
    if config.tail == "drop" or not config.join:
        steps, last = _steps_without_idle(config, table, steps)
    elif not _all_leaves(table, steps):
        steps, last = _whole_windows(config, steps), False
    else:
        steps, last = (_up(steps, config) if config.accum_tail == "fill" else steps), True
    return steps, last, _common_caps(table, steps) if has_caps and not last else _NONE


def _waits(config: PlanConfig, table: _Windows) -> bool:
    """Some of a shared order's last keys were granted just now, and some rank can fill but a few optimizer steps.

    What it holds would leave in groups that are not full, or it would be idle. As every such round grants keys, there
    are few of them.
    """
    few = _FEW * config.grad_accum_steps
    return table.is_late and table.will_grow and bool((table.groups[table.running] <= few).any())


def _up(steps: int, config: PlanConfig) -> int:
    return -(-steps // config.grad_accum_steps) * config.grad_accum_steps


def _down(steps: int, config: PlanConfig) -> int:
    return steps - steps % config.grad_accum_steps


def _whole_windows(config: PlanConfig, steps: int) -> int:
    """A multiple of the accumulation steps: what is left over is carried (ours), or more groups are split (published)."""
    return _up(steps, config) if config.policy == "published" else _down(steps, config) or _up(steps, config)


def _all_leaves(table: _Windows, steps: int) -> bool:
    return not table.running.any() and steps >= table.groups.max()


def _published_steps(config: PlanConfig, table: _Windows) -> int:
    """Max-based: the largest group count of an active rank, bounded by the cap and by the smallest active window."""
    active = table.held > 0
    if not active.any():
        return 0
    most = min(_up(config.max_steps_per_round, config), _up(int(table.held[active].min()), config))
    return max(1, min(int(table.groups[active].max()), most))


def _odb_steps(config: PlanConfig, table: _Windows) -> tuple[int, bool]:
    """A part of what every rank can fill, under common caps; in the end, what the largest rank needs, without.

    Fixed shards of unlike samples (not just windows that differ by chance) are drained together instead: all that the
    largest rank holds leaves, and the others split. Ranks that are dry don't raise the target: what they hold beyond
    it costs no step as long as others run on.
    """
    cap = _up(config.max_steps_per_round, config)
    steering = table.running & (table.held > 0)
    if not steering.any():
        return min(int(table.groups.max()), cap), False
    most, least = int(table.groups[steering].max()), int(table.groups[steering].min())
    by_held = _up(int(table.held[steering].min()), config)
    if not (table.is_elastic or _alike(table, steering)):
        return min(most, cap, by_held), False
    # The last group is what happened to be left over. A quarter of what the largest holds leaves in any case.
    full = max(1, least - 1, most // 2)
    return min(math.ceil(full * _part(table)), cap, by_held), True


def _part(table: _Windows) -> float:
    """Which part of the groups leaves in this round."""
    phase = "late" if table.is_late else "early" if table.is_early else "grown"
    most, few = _FEW_RANKS[phase]
    return few if len(table.held) <= most else _MANY_RANKS[phase]


def _common_caps(table: _Windows, num_steps: int) -> I64:
    """(num_steps,) what a group may cost in each step, the same on all ranks, falling.

    The quantiles of a rank's group costs, averaged over the ranks and interpolated: every rank fills the steps with
    those of its samples that fit best, and nobody waits for the one that happens to have dearer groups.
    """
    steering = table.running & (table.held > 0)
    profile = table.cost_quantiles[steering].mean(axis=0)
    at = np.linspace(len(profile) - 1, 0, num_steps)
    caps: I64 = np.interp(at, np.arange(len(profile)), profile).astype(np.int64)
    return caps


def _alike(table: _Windows, ranks: npt.NDArray[np.bool_]) -> bool:
    groups = table.groups[ranks]
    if groups.min() >= groups.max() - groups.max() // _ALIKE:
        return True
    mean = table.mean_length(ranks)
    return bool(mean.min() * _ALIKE >= mean.max() * (_ALIKE - 1))


def _steps_without_idle(config: PlanConfig, table: _Windows, steps: int) -> tuple[int, bool]:
    """tail="drop" and non-join: the epoch is over before the first step in which a rank would have nothing."""
    fed, dry = table.held[table.running], table.held[~table.running]
    if len(fed) and fed.min() < config.grad_accum_steps:
        return 0, False  # it will have more
    over = _all_leaves(table, steps)
    if not over:
        steps = min([_whole_windows(config, steps), *(_down(int(held), config) for held in fed)])
    elif config.accum_tail == "fill":
        steps = _up(steps, config)
    if over or (len(dry) and dry.min() <= steps):
        steps = min(steps, int(dry.min()))
        return (_down(steps, config) if config.accum_tail == "fill" else steps), True
    return steps, False


def _complete_steps(config: PlanConfig, table: _Windows) -> tuple[int, bool]:
    """drop_last: the smallest number of complete groups; over once a rank that is dry has no more of them."""
    steps = min(int(table.groups.min()), _up(config.max_steps_per_round, config))
    dry = table.groups[~table.running]
    last = bool(len(dry)) and int(dry.min()) == steps
    if last and config.accum_tail == "short":
        return steps, True
    return _down(steps, config), last
