"""A round: `propose`, the exchange of reports, `settle`, `form`, the exchange of totals, `conclude`.

The one module of the planning core that processes call. Every function is pure; one rank's whole state between two
rounds is a `RoundState`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from odb.plan import group, packed
from odb.plan.align import settle, token_target
from odb.plan.cost import group_cost, oversize, padded_length, validate_cost_fn
from odb.plan.even_labels import even_labels
from odb.plan.group import Sorted
from odb.plan.order import by_cost, in_time
from odb.plan.types import (
    I64,
    NUM_QUANTILES,
    Agreement,
    Measures,
    Outcome,
    Plan,
    PlanConfig,
    Proposal,
    Report,
    Room,
    RoundState,
    Status,
    StepPlan,
    Verdict,
)
from odb.plan.weights import LOSS_TOKENS, SAMPLES, loss_scales, sync_flags, window_totals
from odb.plan.wire import decode_all, decode_table, digest_of, encode

__all__ = [
    "advance",
    "conclude",
    "decode_all",
    "decode_table",
    "digest_of",
    "encode",
    "fill_target",
    "form",
    "oversize",
    "propose",
    "refit",
    "replayed",
    "settle",
    "validate_cost_fn",
]

_NONE = np.empty(0, np.int64)
_EMPTY_REPORT = Report(0, 0, Status.RUNNING, 0, 0, 0, 0, 0, 0, 0, 0)


def fill_target(config: PlanConfig, state: RoundState) -> Room:
    """How many more samples, tokens and bytes this round's window takes; it closes before a sample that does not fit.

    The limits count what is carried. The token limit starts at one budget for each micro-step of an optimizer step
    and doubles with every round up to `max_held_tokens`, so that the first batch comes early. Where what is carried
    can't make a step (fewer samples than micro-steps; no complete group with `drop_last`), the limits give way.
    """
    window = state.window
    room = Room(
        config.window - len(window),
        token_target(config, state.round) - int(window.length.sum()),
        config.max_held_bytes - int(window.num_bytes.sum()),
    )
    if _can_step(config, window):
        return room
    # Where nothing fits as many again as are held: few rounds even where limits are far too small for one group.
    least = len(window) if room.is_full else 1
    return replace(room, must=max(1, least, config.grad_accum_steps - len(window)))


def _can_step(config: PlanConfig, window: Measures) -> bool:
    if len(window) < config.grad_accum_steps:
        return False
    if not config.drop_last:
        return True
    if config.layout == "packed":
        return packed.can_make(config, window, config.grad_accum_steps)
    samples = Sorted.of(window, config)
    return int(group.complete(samples, group.greedy(samples, config), config).sum()) >= config.grad_accum_steps


def propose(
    config: PlanConfig,
    state: RoundState,
    arrivals: Measures,
    *,
    exhausted: bool,
    closed: bool = False,
    config_digest: int = 0,
    num_used: int | None = None,
) -> Proposal:
    """This rank's window with what has arrived, the groups that it forms by itself, and its report.

    `exhausted`: the source has nothing more. `closed`: the consumer left the epoch. `config_digest`: of whatever must
    be equal on all ranks (see `digest_of`), the configuration's own `signature()` included. `num_used`: keys that gave
    the arrivals, those that were rejected included (default: as many as arrived).
    """
    window = Measures.concat([state.window, arrivals])
    age = np.concatenate([state.age, np.zeros(len(arrivals), np.int64)])
    assert not len(window) or window.length.min() >= 1, "empty samples are for the shell to reject"
    groups, costs = _formed(config, window, age)
    report = Report(
        epoch=state.epoch,
        round=state.round,
        status=_status(len(window), exhausted, closed),
        num_held=len(window),
        num_groups=len(groups),
        held_tokens=int(window.length.sum()),
        observed_samples=state.observed_samples + len(arrivals),
        observed_tokens=state.observed_tokens + int(arrivals.length.sum()),
        emitted_samples=state.emitted_samples,
        config_digest=config_digest,
        agreement_digest=state.agreement_digest,
        num_keys=state.num_keys,
        next_key=state.next_key,
        num_granted=state.num_granted,
        num_drawn=state.num_drawn + (len(arrivals) if num_used is None else num_used),
        cost_quantiles=_quantiles(costs),
    )
    return Proposal(state, window, age, groups, report)


def _formed(config: PlanConfig, window: Measures, age: I64) -> tuple[tuple[I64, ...], I64]:
    """The groups of a window, the complete ones with `drop_last`, and their costs."""
    if config.layout == "packed":
        rows = tuple(packed.propose(window, age, config))
        return rows, packed.costs(window, rows, config)
    samples = Sorted.of(window, config)
    ends = group.greedy(samples, config)
    if config.drop_last:
        ends = ends[: int(group.complete(samples, ends, config).sum())]
    return group.slices(samples, ends), group.slice_costs(samples, ends, config)


def _status(num_held: int, exhausted: bool, closed: bool) -> Status:
    if closed:
        return Status.CLOSED
    if not exhausted:
        return Status.RUNNING
    return Status.EXHAUSTED if num_held else Status.DRAINED


def _quantiles(costs: I64) -> tuple[int, ...]:
    """Quantiles of group costs, ascending, without the last group: that is what happened to be left over."""
    if not len(costs):
        return (0,) * NUM_QUANTILES
    ordered = np.sort(costs[:-1] if len(costs) > 1 else costs)
    at = np.linspace(0, len(ordered) - 1, NUM_QUANTILES)
    return tuple(np.interp(at, np.arange(len(ordered)), ordered).astype(np.int64).tolist())


def form(config: PlanConfig, proposal: Proposal, agreement: Agreement, rank: int) -> Plan:
    """This rank's part of a round: exactly `num_steps` slots, of which `num_emitting[rank]` hold a group."""
    everything = np.arange(len(proposal.window))
    if agreement.verdict != Verdict.RUN:
        over = agreement.verdict == Verdict.END
        carry, dropped = (_NONE, everything) if over else (everything, _NONE)
        return Plan(proposal, agreement, (), carry, dropped, np.zeros((0, 3), np.int64))
    groups = _choose(config, proposal, agreement, int(agreement.num_emitting[rank]))
    assert len(groups) == agreement.num_emitting[rank], (len(groups), agreement.num_emitting)
    if config.balance == "labels":
        groups = even_labels(config, proposal.window, groups)
    slots = _in_order(config, proposal.window, groups, agreement)
    left = np.setdiff1d(everything, np.concatenate([*groups, _NONE]), assume_unique=True)
    carry, dropped = (_NONE, left) if agreement.last else (left, _NONE)
    return Plan(proposal, agreement, slots, carry, dropped, _totals(proposal.window, slots))


def _choose(config: PlanConfig, proposal: Proposal, agreement: Agreement, num_groups: int) -> tuple[I64, ...]:
    """Exactly `num_groups` groups of the window: all of it where that many can hold it and nothing may stay."""
    if not num_groups:
        return ()
    if config.layout == "packed":
        return tuple(packed.choose(config, proposal, agreement, num_groups))
    samples = Sorted.of(proposal.window, config)
    age = proposal.age[samples.position]
    is_more = len(proposal.groups) > num_groups
    if is_more and len(agreement.caps):
        return group.fill(samples, agreement.caps[:num_groups], age, config)
    if is_more or config.drop_last:
        return _overflow(config, samples, age, len(proposal.groups), num_groups)
    if not agreement.last:
        kept = samples.take(slice(0, len(samples) - _reserve(config, proposal, samples, num_groups, age)))
        # Where rows come in multiples, fewer samples may make more groups.
        samples = kept if len(group.greedy(kept, config, most=num_groups)) <= num_groups else samples
    return group.slices(samples, group.exactly(samples, num_groups, config))


def _overflow(config: PlanConfig, samples: Sorted, age: I64, num_formed: int, num_groups: int) -> tuple[I64, ...]:
    """More groups than steps: the best leave, those with overdue samples before all others; the rest waits."""
    ends = group.greedy(samples, config)[:num_formed]
    samples, late = samples.take(slice(0, ends[-1])), age[: ends[-1]] >= config.max_age
    with_late = np.add.reduceat(late.astype(np.int64), [0, *ends[:-1]]) > 0
    if int(with_late.sum()) > num_groups and not config.drop_last:
        return _overdue_first(config, samples, age, num_groups)
    # The published rule keeps the groups as they come: the longest samples first.
    value = (
        -np.arange(len(ends), dtype=np.float64) if config.policy == "published" else group.worth(samples, ends, config)
    )
    marked = _best(value, with_late, num_groups)
    taken, ends = group.chosen(samples, ends, marked)
    if config.drop_last or config.policy == "published":
        return group.slices(taken, ends)
    # One more plan of what leaves makes the groups' costs alike. With bounds besides cost it may need more groups.
    if len(group.greedy(taken, config, most=num_groups)) <= num_groups:
        ends = group.exactly(taken, num_groups, config)
    return group.slices(taken, ends)


def _best(value: npt.NDArray[np.float64], urgent: npt.NDArray[np.bool_], num: int) -> npt.NDArray[np.bool_]:
    marked = np.zeros(len(value), np.bool_)
    marked[np.lexsort((-value, ~urgent))[:num]] = True
    return marked


def _overdue_first(config: PlanConfig, samples: Sorted, age: I64, num_groups: int) -> tuple[I64, ...]:
    """Overdue samples lie in more groups than there are steps: they are grouped among themselves, the oldest leave."""
    late = age >= config.max_age
    overdue = samples.take(late)
    ends = group.greedy(overdue, config)
    if len(ends) >= num_groups:
        oldest = np.maximum.reduceat(age[late], [0, *ends[:-1]]).astype(np.float64)
        return group.slices(*group.chosen(overdue, ends, _best(oldest, np.zeros(len(ends), np.bool_), num_groups)))
    rest = samples.take(~late)
    others = group.greedy(rest, config)
    num_more = num_groups - len(ends)
    if len(others) >= num_more:
        marked = _best(group.worth(rest, others, config), np.zeros(len(others), np.bool_), num_more)
        return group.slices(overdue, ends) + group.slices(*group.chosen(rest, others, marked))
    # Bounds besides cost can make two parts need fewer groups than the whole: then all of it leaves, split up.
    num_more = min(num_more, len(rest))
    parts = ((overdue, num_groups - num_more), (rest, num_more))
    return tuple(g for part, num in parts for g in group.slices(part, group.exactly(part, num, config) if num else []))


def _reserve(config: PlanConfig, proposal: Proposal, samples: Sorted, num_groups: int, age: I64) -> int:
    """How many of the shortest samples stay although all could leave, so that this rank has some in the next round.

    A rank that is dry while others run keeps one group's worth: it costs no step, as the others have at least one to
    come, and saves fillers. With `accum_tail="fill"` a rank keeps as many as fill an optimizer step.
    """
    spare = len(samples) - num_groups
    if config.policy == "published" or spare <= 0:
        return 0
    if proposal.report.status == Status.EXHAUSTED:
        keep = group.longest_suffix(samples, config)
    else:
        keep = config.grad_accum_steps if config.grad_accum_steps > 1 and config.accum_tail == "fill" else 0
    late = np.flatnonzero(age >= config.max_age)
    young = len(samples) - 1 - int(late[-1]) if len(late) else len(samples)
    return min(spare, keep, young)


def _in_order(config: PlanConfig, window: Measures, groups: tuple[I64, ...], agreement: Agreement) -> tuple[I64, ...]:
    first_ids = np.array([window.ids[g[0]] for g in groups], np.int64)
    ranked = [groups[i] for i in by_cost(_costs(config, window, groups), first_ids)]
    ranked += [_NONE] * (agreement.num_steps - len(groups))
    num_full = int(agreement.num_emitting.min())
    return tuple(ranked[i] for i in in_time(agreement.num_steps, config, agreement.epoch, agreement.round, num_full))


def _costs(config: PlanConfig, window: Measures, groups: tuple[I64, ...]) -> I64:
    if config.layout == "packed":
        return packed.costs(window, groups, config)
    rows = np.array([len(g) for g in groups], np.int64)
    return group_cost(rows, padded_length(np.array([window.length[g].max() for g in groups], np.int64), config), config)


def _totals(window: Measures, slots: tuple[I64, ...]) -> I64:
    totals = np.array([(len(g), window.length[g].sum(), window.loss_tokens[g].sum()) for g in slots], np.int64)
    return totals.reshape(len(slots), 3)


def conclude(config: PlanConfig, plan: Plan, all_totals: I64, world_size: int, rank: int) -> Outcome:
    """The steps to emit, from the totals of all ranks (shape (T, 3): samples, tokens, loss tokens), and the next state.

    `rank` says whose grants are booked; a rank's own steps are in its plan already.
    """
    assert all_totals.shape == plan.totals.shape, (all_totals.shape, plan.totals.shape, rank)
    num_steps, met = _until_quota(config, plan.proposal.state, all_totals)
    carry = _NONE if met else plan.carry
    dropped = np.concatenate([plan.dropped, *plan.groups[num_steps:], plan.carry]) if met else plan.dropped
    state = _next_state(plan, carry, num_steps, all_totals[:num_steps], rank)
    steps = _steps(config, plan, all_totals[:num_steps], world_size)
    return Outcome(steps, state, met or _is_over(plan), plan.proposal.window.ids[np.sort(dropped)])


def advance(config: PlanConfig, plan: Plan, all_totals: I64, rank: int) -> tuple[int, bool, RoundState]:
    """What `conclude` comes to without the steps themselves: how many are emitted, whether the epoch is over, the state."""
    num_steps, met = _until_quota(config, plan.proposal.state, all_totals)
    state = _next_state(plan, _NONE if met else plan.carry, num_steps, all_totals[:num_steps], rank)
    return num_steps, met or _is_over(plan), state


def _is_over(plan: Plan) -> bool:
    return plan.agreement.last or plan.agreement.verdict in (Verdict.END, Verdict.ALL_CLOSED)


def refit(config: PlanConfig, window: Measures, slots: tuple[I64, ...]) -> tuple[tuple[I64, ...], I64, I64]:
    """Makes groups that were planned with other lengths keep the bounds: what is too much in a group leaves it.

    Args:
        config: as for planning.
        window: measures as they are now.
        slots: positions in `window` of each group, empty where this rank is idle.

    Returns:
        the slots, positions that left their group (ascending), and the (len(slots), 3) totals of what is left. Groups
        that keep the bounds stay as they are; of others the part with the most samples stays.
    """
    kept = tuple(_within_bounds(config, window, positions) for positions in slots)
    left = np.setdiff1d(np.concatenate([*slots, _NONE]), np.concatenate([*kept, _NONE]), assume_unique=True)
    return kept, left, _totals(window, kept)


def _within_bounds(config: PlanConfig, window: Measures, positions: I64) -> I64:
    if config.layout == "packed":
        return packed.within_bounds(config, window, positions)
    samples = Sorted.of(window.take(positions), config)
    cost = group_cost(np.array([len(positions)]), samples.padded[:1], config)
    patches = config.max_patches is not None and samples.patches.sum() > config.max_patches
    if len(positions) < 2 or not (patches or cost[0] > config.token_budget):
        return positions
    parts = group.slices(samples, group.greedy(samples, config))
    return positions[max(parts, key=len)]


def replayed(
    config: PlanConfig,
    state: RoundState,
    window: Measures,
    slots: tuple[I64, ...],
    partial: I64,
    all_totals: I64,
    world_size: int,
) -> tuple[StepPlan, ...]:
    """Steps that were agreed on before an interruption, planned again with the groups that they had.

    Args:
        config: as it was.
        state: the state *after* these steps.
        window: measures of their samples.
        slots: positions in `window` of each step, empty where this rank is idle.
        partial: (j, 3) totals of the j micro-steps of their first optimizer step that were taken before.
        all_totals: (len(slots), 3) over all ranks.
        world_size: data-parallel ranks.
    """
    num_before = len(partial)
    first = replace(state, step=state.step - len(slots) - num_before)
    groups = (_NONE,) * num_before + slots
    proposal = Proposal(first, window, np.zeros(len(window), np.int64), slots, _EMPTY_REPORT)
    agreement = Agreement(Verdict.RUN, state.epoch, state.round, len(groups), False, _NONE, (), state.agreement_digest)
    plan = Plan(proposal, agreement, groups, _NONE, _NONE, _totals(window, groups))
    return _steps(config, plan, np.concatenate([partial, all_totals]), world_size)[num_before:]


def _until_quota(config: PlanConfig, state: RoundState, all_totals: I64) -> tuple[int, bool]:
    """How many steps are emitted, and whether the quota is met by them: whole optimizer steps only."""
    if config.join or config.sample_quota is None or not len(all_totals):
        return len(all_totals), False
    so_far = state.all_emitted_samples + np.cumsum(all_totals[:, SAMPLES])
    closes = sync_flags(len(all_totals), config.grad_accum_steps)
    enough = np.flatnonzero(closes & (so_far >= config.sample_quota))
    return (int(enough[0]) + 1, True) if len(enough) else (len(all_totals), False)


def _next_state(plan: Plan, carry: I64, num_steps: int, all_totals: I64, rank: int) -> RoundState:
    proposal, agreement = plan.proposal, plan.agreement
    granted = int(agreement.grants[rank]) if len(agreement.grants) else 0
    old = proposal.state
    return replace(
        old,
        round=old.round + 1,
        window=proposal.window.take(carry),
        age=proposal.age[carry] + 1,
        observed_samples=proposal.report.observed_samples,
        observed_tokens=proposal.report.observed_tokens,
        emitted_samples=old.emitted_samples + int(plan.totals[:num_steps, SAMPLES].sum()),
        all_emitted_samples=old.all_emitted_samples + int(all_totals[:, SAMPLES].sum()),
        step=old.step + num_steps,
        agreement_digest=agreement.digest,
        next_key=old.next_key + int(agreement.grants.sum()),
        num_granted=old.num_granted + granted,
        num_drawn=proposal.report.num_drawn,
    )


def _steps(config: PlanConfig, plan: Plan, all_totals: I64, world_size: int) -> tuple[StepPlan, ...]:
    num_steps = len(all_totals)
    totals = plan.totals[:num_steps]
    scales = loss_scales(totals, all_totals, world_size, config)
    windows = window_totals(all_totals, config.grad_accum_steps)
    syncs = sync_flags(num_steps, config.grad_accum_steps)
    steps = []
    for k, positions in enumerate(plan.groups[:num_steps]):
        rows, width, cost = _shape(config, plan.proposal.window.length[positions])
        local, everyone = totals[k].tolist(), all_totals[k].tolist()
        steps.append(
            StepPlan(
                step=plan.proposal.state.step + k,
                ids=plan.proposal.window.ids[positions],
                idle=not len(positions),
                rows=rows,
                padded_len=width,
                local_samples=local[0],
                local_tokens=local[1],
                local_loss_tokens=local[2],
                all_samples=everyone[0],
                all_tokens=everyone[1],
                all_loss_tokens=everyone[2],
                window_loss_tokens=int(windows[k, LOSS_TOKENS]),
                window_samples=int(windows[k, SAMPLES]),
                loss_scale=float(scales[k]),
                sync_gradients=bool(syncs[k]),
                cost=cost,
            )
        )
    return tuple(steps)


def _shape(config: PlanConfig, length: I64) -> tuple[int, int, int]:
    """Rows, padded row length and cost of a batch whose samples have these lengths; zeros for none."""
    if config.layout == "packed":
        return *packed.shape(length, config), packed.cost(length, config)
    rows = len(length)
    padded = padded_length(length.max(initial=0, keepdims=True), config)
    return rows, int(padded[0]), int(group_cost(np.array([rows]), padded, config)[0]) if rows else 0
