"""What the guarantees say of one round, as predicates. They are written from docs/protocol.md: none calls the code under
test, and each computes costs, counts and ends by itself.

What a group costs here is its rows x the longest row: the explorer runs the default cost without padding to multiples.
A row is a sample, in the packed layout what follows each other in the group's order and fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from odb.plan.types import Agreement, Outcome, Plan, PlanConfig, Report, Status, StepPlan, Verdict


class Broken(AssertionError):
    """A guarantee does not hold; the text says which."""


def require(holds: bool, guarantee: str, *facts: object) -> None:
    if not holds:
        raise Broken(f"{guarantee}: {facts}")


def gives_nothing_up(config: PlanConfig) -> bool:
    """Whether no option lets a sample leave unemitted."""
    return config.join and config.tail != "drop" and not config.drop_last


def may_draw(config: PlanConfig, carried: Sequence[int], held: Sequence[int]) -> None:
    """The window: a rank draws beyond its limits only where what it carries can't make a step."""
    if len(held) == len(carried) or config.drop_last:
        return
    if len(carried) < config.grad_accum_steps and len(held) <= max(config.grad_accum_steps, 2 * len(carried), 1):
        return
    require(len(held) <= config.window, "window: samples", carried, held)
    require(sum(held) <= config.max_held_tokens, "window: tokens", carried, held)


def rank_keeps_its_samples(config: PlanConfig, plan: Plan, outcome: Outcome) -> None:
    """Conservation on one rank in one round, and the age of what stays."""
    window, age = plan.proposal.window, plan.proposal.age
    before = window.ids.tolist()
    emitted = [i for step in outcome.steps for i in step.ids.tolist()]
    stays = outcome.state.window.ids.tolist()
    dropped = outcome.dropped_ids.tolist()
    require(sorted([*emitted, *stays, *dropped]) == sorted(before), "conservation", before, emitted, stays, dropped)
    require(not dropped or not gives_nothing_up(config), "conservation: dropped", before, dropped)
    require(not outcome.ended or not stays, "conservation: the end leaves nothing behind", stays)
    old = dict(zip(before, zip(age.tolist(), window.length.tolist(), strict=True), strict=True))
    kept = zip(stays, outcome.state.age.tolist(), outcome.state.window.length.tolist(), strict=True)
    for sample, now, length in kept:
        require((now, length) == (old[sample][0] + 1, old[sample][1]), "ageing", sample, now, old[sample])
    overdue = {i for i in before if old[i][0] >= config.max_age}
    if overdue & set(stays) and not config.drop_last:
        first = all(overdue & set(step.ids.tolist()) for step in outcome.steps if not step.idle)
        require(first, "no deferral for ever: overdue samples leave first", overdue, emitted, stays)


def rows_of(config: PlanConfig, lengths: Sequence[int]) -> list[list[int]]:
    """The rows of a group: each sample, or, packed, as many samples one after the other as a row takes."""
    if config.layout == "padded":
        return [[n] for n in lengths]
    capacity = config.token_budget // config.rows_per_batch
    rows: list[list[int]] = []
    for n in lengths:
        if rows and sum(rows[-1]) + n <= capacity and len(rows[-1]) < (config.max_samples or len(lengths)):
            rows[-1].append(n)
        else:
            rows.append([n])
    return rows


def cost_of(config: PlanConfig, lengths: Sequence[int]) -> int:
    """Of a group in its order."""
    rows = rows_of(config, lengths)
    return len(rows) * max(map(sum, rows), default=0)


def keeps_the_bounds(config: PlanConfig, lengths: Sequence[int]) -> bool:
    """Whether samples may be one group."""
    if len(lengths) < 2:
        return True
    bound = config.rows_per_batch if config.layout == "packed" else config.max_samples
    return cost_of(config, lengths) <= config.token_budget and len(rows_of(config, lengths)) <= (bound or len(lengths))


def rank_keeps_the_budget(config: PlanConfig, plan: Plan, outcome: Outcome) -> None:
    """The budget, the bound on rows, and that a step says what it holds."""
    length = dict(zip(plan.proposal.window.ids.tolist(), plan.proposal.window.length.tolist(), strict=True))
    for step in outcome.steps:
        held = [length[i] for i in step.ids.tolist()]
        told = step.idle, step.rows, step.local_samples, step.local_tokens
        require(told == (not held, len(rows_of(config, held)), len(held), sum(held)), "steps tell the truth", step)
        require(keeps_the_bounds(config, held), "budget", held)


def rank_is_idle_only_with_nothing(config: PlanConfig, plan: Plan) -> None:
    """Exactly T slots, real groups first; a rank idles only in steps that its samples can't fill."""
    held, steps = len(plan.proposal.window), plan.agreement.num_steps
    filled = [len(group) > 0 for group in plan.groups]
    require(len(filled) == steps, "step alignment: T slots", filled, steps)
    require(filled == sorted(filled, reverse=True), "idle steps come last", filled)
    require(sum(filled) == min(held, steps), "idle only with nothing to emit", filled, held)
    if not gives_nothing_up(config):
        require(all(filled), "options that drop never idle", filled)


def report_is_true(config: PlanConfig, report: Report, lengths: Sequence[int], dry: bool) -> None:
    """What a rank says of itself."""
    status = Status.RUNNING if not dry else Status.EXHAUSTED if lengths else Status.DRAINED
    said = report.status, report.num_held, report.held_tokens
    require(said == (status, len(lengths), sum(lengths)), "reports tell the truth", said, lengths, dry)
    fewest = 0 if config.drop_last or not lengths else 1
    require(fewest <= report.num_groups <= len(lengths), "reports tell the truth: groups", report, lengths)


def target_can_be_filled(config: PlanConfig, plans: Sequence[Plan]) -> None:
    """No rank that will have more samples idles, but to complete an accumulation window."""
    accum = config.grad_accum_steps
    for report in (plan.proposal.report for plan in plans):
        if report.status == Status.RUNNING and report.num_held:
            most = -(-report.num_held // accum) * accum
            require(plans[0].agreement.num_steps <= most, "the target can be filled by whoever goes on", report)


def order_in_time(config: PlanConfig, plan: Plan) -> tuple[int, ...]:
    """Which of the rank's groups, counted from the most expensive, runs at each step where no rank is idle."""
    length, ids = plan.proposal.window.length, plan.proposal.window.ids
    real = [group for group in plan.groups if len(group)]
    key = [(-cost_of(config, length[group].tolist()), int(ids[group[0]])) for group in real]
    rank = {k: i for i, k in enumerate(sorted(key))}
    return tuple(rank[k] for k in key)


def ranks_do_the_same(config: PlanConfig, plans: Sequence[Plan], outcomes: Sequence[Outcome]) -> None:
    """Step alignment: as many steps, the same ends of optimizer steps, the same pairing; one end for all."""
    shared = {
        (outcome.ended, outcome.state.agreement_digest, outcome.state.round, outcome.state.all_emitted_samples,
         tuple((s.step, s.sync_gradients) for s in outcome.steps))
        for outcome in outcomes
    }  # fmt: skip
    require(len(shared) == 1, "step alignment", shared)
    num_full = min(sum(len(group) > 0 for group in plan.groups) for plan in plans)
    orders = {order_in_time(config, plan)[:num_full] for plan in plans}
    require(len(orders) == 1, "equal costs meet: one permutation", orders)
    steps, accum = outcomes[0].steps, config.grad_accum_steps
    most = -(-config.max_steps_per_round // accum) * accum
    require(len(steps) <= most, "a round has at most `max_steps_per_round` steps", len(steps))
    for k, step in enumerate(steps):
        require(step.sync_gradients == ((k + 1) % accum == 0 or k + 1 == len(steps)), "accumulation windows end", k)
    if not outcomes[0].ended or config.accum_tail == "fill":
        require(len(steps) % accum == 0, "no accumulation window crosses a round", len(steps))


def totals_are_true(config: PlanConfig, plans: Sequence[Plan], outcomes: Sequence[Outcome]) -> None:
    """Each step's totals are the sums over all ranks, and the scales of an optimizer step sum to the world size."""
    by_step = list(zip(*(outcome.steps for outcome in outcomes), strict=True))
    rows = [(_sum(s, "local_samples"), _sum(s, "local_tokens"), _sum(s, "local_loss_tokens")) for s in by_step]
    for together, (samples, tokens, loss) in zip(by_step, rows, strict=True):
        seen = {(s.all_samples, s.all_tokens, s.all_loss_tokens) for s in together}
        require(seen == {(samples, tokens, loss)}, "totals", seen, (samples, tokens, loss))
        require(samples > 0 or config.grad_accum_steps > 1, "a step holds a sample somewhere", together)
    for start in range(0, len(rows), config.grad_accum_steps):
        window = by_step[start : start + config.grad_accum_steps]
        loss = sum(row[2] for row in rows[start : start + config.grad_accum_steps])
        scale = sum(step.loss_scale for together in window for step in together)
        require(abs(scale - (len(plans) if loss else 0)) < 1e-9, "exact loss: scales", scale, loss)


def _sum(steps: Sequence[StepPlan], name: str) -> int:
    return sum(int(getattr(step, name)) for step in steps)


def round_makes_progress(config: PlanConfig, plans: Sequence[Plan], outcomes: Sequence[Outcome]) -> None:
    """Bounded termination: a sample leaves; where nothing is left anywhere, it is over."""
    statuses = [plan.proposal.report.status for plan in plans]
    held = sum(len(plan.proposal.window) for plan in plans)
    emitted = sum(step.local_samples for outcome in outcomes for step in outcome.steps)
    if all(status == Status.DRAINED for status in statuses):
        require(outcomes[0].ended, "termination: nothing is left", statuses)
    if gives_nothing_up(config) and held:
        require(emitted > 0, "termination: a sample leaves in every round", held, statuses)
    if not emitted and not outcomes[0].ended:
        require(Status.RUNNING in statuses, "termination: a round without steps waits for samples", statuses)


def end_is_right(config: PlanConfig, plans: Sequence[Plan], outcomes: Sequence[Outcome], before: int) -> None:
    """The epoch ends when it may and not before; `before` counts what all ranks emitted in earlier rounds."""
    ended, accum = outcomes[0].ended, config.grad_accum_steps
    dry = [plan.proposal.report.status in (Status.EXHAUSTED, Status.DRAINED) for plan in plans]
    if config.sample_quota is not None:
        sums = [before]
        for step in outcomes[0].steps:
            sums.append(sums[-1] + step.all_samples)
        require(ended == (sums[-1] >= config.sample_quota), "quota is reached", sums)
        require(not ended or len(outcomes[0].steps) % accum == 0, "quota ends an optimizer step", sums)
        last = (len(sums) - 2) // accum * accum
        require(not ended or sums[last] < config.sample_quota, "quota overshoots by less than a step", sums)
    elif ended and gives_nothing_up(config):
        require(all(dry), "the end waits for every source", dry)
    elif ended and config.drop_last:
        # The tight rank has at most one group left, and that could take one more: of its longest, a row of its shortest.
        one_of = min if config.layout == "packed" else max
        rest = [_dropped(plan, outcome) for plan, outcome in zip(plans, outcomes, strict=True)]
        spent = [d and (not r or keeps_the_bounds(config, [*r, one_of(r)])) for d, r in zip(dry, rest, strict=True)]
        require(any(spent) or (accum > 1 and any(dry)), "drop_last ends with a rank's complete groups", rest)
    elif ended:
        least = min((len(o.dropped_ids) for d, o in zip(dry, outcomes, strict=True) if d), default=99)
        slack = accum if config.accum_tail == "fill" else 1
        require(least < slack or (slack > 1 and any(dry)), "ends before the first idle step", least, dry)


def _dropped(plan: Plan, outcome: Outcome) -> list[int]:
    gone = set(outcome.dropped_ids.tolist())
    window = plan.proposal.window
    return [n for i, n in zip(window.ids.tolist(), window.length.tolist(), strict=True) if i in gone]


def verdict_on_closing(agreement: Agreement, closed: tuple[int, ...], world_size: int) -> None:
    """All ranks learn who left; the epoch is over once all have."""
    expected = Verdict.ALL_CLOSED if len(closed) == world_size else Verdict.PEER_CLOSED
    require(agreement.verdict == expected, "closing: verdict", agreement, closed)
    require(agreement.closed_ranks == closed, "closing: names who left", agreement, closed)
    require(agreement.num_steps == 0, "closing: nothing more is planned", agreement)
