"""All reports of a round -> what everybody does. The only copy of the target rule.

`settle` does not know which rank it runs on; all ranks run it on the same reports and get the same agreement.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odb.errors import DisagreementError, PeerFailedError
from odb.plan.types import I64, Agreement, PlanConfig, Report, Status, Verdict
from odb.plan.wire import digest

#: The reports' fields that must be equal on all ranks, and what a difference means to a user.
_MUST_AGREE = (
    ("epoch", "they run different epochs; call set_epoch with the same value on all ranks"),
    ("round", "they are in different rounds; iterate the loader the same number of times on all ranks"),
    ("config_digest", "their options or data sets differ; build the loader alike on all ranks"),
    ("agreement_digest", "their plans drifted apart; the same inputs gave different plans"),
)

_MOST_NAMED = 8  # ranks in one error

#: Shards are alike where the fewest groups of a rank, or its mean length so far, are within a fifth of the most.
_ALIKE = 5

#: Of the groups that every rank can fill, 7/8 leave. Less padding and fuller budgets outweigh the few more rounds; at
#: 3/4 and below, ranks choose ever more differently and the steps' costs drift apart.
_LEAVING, _OF = 7, 8


@dataclass(frozen=True, slots=True)
class _Table:
    """The reports, by column. All arrays shape (W,)."""

    held: I64
    groups: I64
    mean_length: npt.NDArray[np.float64]  # tokens of a sample, over all that a rank observed in this epoch
    running: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, reports: tuple[Report, ...]) -> _Table:
        return cls(
            np.array([r.num_held for r in reports], np.int64),
            np.array([r.num_groups for r in reports], np.int64),
            np.array([r.observed_tokens / max(1, r.observed_samples) for r in reports], np.float64),
            np.array([r.status == Status.RUNNING for r in reports], np.bool_),
        )


def settle(config: PlanConfig, reports: tuple[Report, ...]) -> Agreement:
    """What every rank does in this round; `reports[r]` is rank `r`'s.

    Raises:
        DisagreementError: epoch, round, configuration or plans differ; names the ranks and what differs.
        PeerFailedError: a rank reports that it can't go on.
    """
    _check_equal(reports)
    failed = tuple(rank for rank, report in enumerate(reports) if report.status == Status.FAILED)
    if failed:
        raise PeerFailedError(f"rank(s) {_names(failed)} failed and can't go on", failed)
    closed = tuple(rank for rank, report in enumerate(reports) if report.status == Status.CLOSED)
    if closed:
        verdict = Verdict.ALL_CLOSED if len(closed) == len(reports) else Verdict.PEER_CLOSED
        return _agreement(verdict, 0, False, closed, reports)
    num_steps, last = _target(config, _Table.of(reports))
    verdict = Verdict.END if last and not num_steps else Verdict.RUN
    return _agreement(verdict, num_steps, last, (), reports)


def _names(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more


def _check_equal(reports: tuple[Report, ...]) -> None:
    for field, meaning in _MUST_AGREE:
        values = [getattr(report, field) for report in reports]
        counts = Counter(values).most_common(2)
        if len(counts) == 1:
            continue
        # Without a majority, as with two ranks, rank 0 is what the others are compared with.
        common = values[0] if counts[0][1] == counts[1][1] else counts[0][0]
        odd = tuple(rank for rank, value in enumerate(values) if value != common)
        other = ", ".join(f"rank {rank}: {values[rank]}" for rank in odd[:_MOST_NAMED])
        raise DisagreementError(
            f"rank(s) {_names(odd)} differ from the others in {field} ({other}; the others: {common}): {meaning}", odd
        )


def _agreement(
    verdict: Verdict, num_steps: int, last: bool, closed: tuple[int, ...], reports: tuple[Report, ...]
) -> Agreement:
    emitting = np.minimum(np.array([report.num_held for report in reports], np.int64), num_steps)
    first = reports[0]
    last = last and verdict == Verdict.RUN
    # The chain over rounds makes ranks that once differed differ for ever after.
    facts = (first.agreement_digest, first.epoch, first.round, verdict.name, num_steps, last, emitting.tolist(), closed)
    return Agreement(verdict, first.epoch, first.round, num_steps, last, emitting, closed, digest(repr(facts)))


def _target(config: PlanConfig, table: _Table) -> tuple[int, bool]:
    """The number of steps, and whether the epoch is over behind them."""
    if not table.running.any() and not table.held.any():
        return 0, True
    if config.drop_last:
        return _complete_steps(config, table)
    steps = _published_steps(config, table) if config.policy == "published" else _odb_steps(config, table)
    if config.tail == "drop" or not config.join:
        return _steps_without_idle(config, table, steps)
    if not _all_leaves(table, steps):
        return _whole_windows(config, steps), False
    return (_up(steps, config) if config.accum_tail == "fill" else steps), True


def _up(steps: int, config: PlanConfig) -> int:
    return -(-steps // config.grad_accum_steps) * config.grad_accum_steps


def _down(steps: int, config: PlanConfig) -> int:
    return steps - steps % config.grad_accum_steps


def _whole_windows(config: PlanConfig, steps: int) -> int:
    """A multiple of the accumulation steps: what is left over is carried (ours), or more groups are split (published)."""
    return _up(steps, config) if config.policy == "published" else _down(steps, config) or _up(steps, config)


def _all_leaves(table: _Table, steps: int) -> bool:
    return not table.running.any() and steps >= table.groups.max()


def _published_steps(config: PlanConfig, table: _Table) -> int:
    """Max-based: the largest group count of an active rank, bounded by the cap and by the smallest active window."""
    active = table.held > 0
    if not active.any():
        return 0
    most = min(_up(config.max_steps_per_round, config), _up(int(table.held[active].min()), config))
    return max(1, min(int(table.groups[active].max()), most))


def _odb_steps(config: PlanConfig, table: _Table) -> int:
    """Most of what every rank can fill, while they may get more samples; in the end, what the largest rank needs.

    Shards of unlike samples (not just windows that differ by chance) are drained together instead: all that the
    largest rank holds leaves, and the others split. Ranks that are dry don't raise the target: what they hold beyond
    it costs no step as long as others run on.
    """
    cap = _up(config.max_steps_per_round, config)
    steering = table.running & (table.held > 0)
    if not steering.any():
        return min(int(table.groups.max()), cap)
    steps = int(table.groups[steering].max())
    if _alike(table, steering):
        # The last group is what happened to be left over. Half of what the largest holds leaves in any case.
        full = max(1, int(table.groups[steering].min()) - 1, steps // 2)
        steps = -(-full * _LEAVING // _OF)
    return min(steps, cap, _up(int(table.held[steering].min()), config))


def _alike(table: _Table, ranks: npt.NDArray[np.bool_]) -> bool:
    groups, mean = table.groups[ranks], table.mean_length[ranks]
    same_groups = groups.min() >= groups.max() - groups.max() // _ALIKE
    same_lengths = mean.min() * _ALIKE >= mean.max() * (_ALIKE - 1)
    return bool(same_groups or same_lengths)


def _steps_without_idle(config: PlanConfig, table: _Table, steps: int) -> tuple[int, bool]:
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


def _complete_steps(config: PlanConfig, table: _Table) -> tuple[int, bool]:
    """drop_last: the smallest number of complete groups; over once a rank that is dry has no more of them."""
    steps = min(int(table.groups.min()), _up(config.max_steps_per_round, config))
    dry = table.groups[~table.running]
    last = bool(len(dry)) and int(dry.min()) == steps
    if last and config.accum_tail == "short":
        return steps, True
    return _down(steps, config), last
