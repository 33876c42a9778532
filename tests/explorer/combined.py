"""Every state of many more worlds: ranks combined freely.

`statespace` follows what all ranks *together* may hold, of which there are millions. Here each round has one set of
states in which *a* rank may be, and any of them meet: whatever can happen together is among these combinations, others
too. So a guarantee that holds in all of them holds in all that can happen; one that does not would have to be looked at
with `statespace`. (None came up: that ranks have lived through the same rounds is needed for none of the guarantees.)
Of what ranks have lived through together two numbers are kept, and only ranks that count alike meet: how many rounds
without a step lie behind them, else two could wait for one another for ever that never wait at a time; and, for a quota,
how many samples all ranks have emitted.

How a round goes depends on what ranks report, on the totals of their steps and on what the predicates read of them. Ranks
alike in these stand for one another where ranks meet; what becomes of each is followed and checked for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations_with_replacement, groupby, product
from math import comb
from typing import Any, NamedTuple

import predicates
from statespace import EVERY, Explorer, Settled

from odb.plan.types import Agreement, Plan

Nodes = tuple[int, ...]  # windows of one rank, by number


class Past(NamedTuple):
    """What lies behind all ranks of a round."""

    all_emitted_samples: int  # where there is a quota, else 0
    num_waits: int  # rounds without a step since the last one that had some


class Kind(NamedTuple):
    """What ranks in one agreement have in common that stand for one another."""

    agreed: int
    totals: bytes
    order: tuple[int, ...]
    status: int
    num_held: int
    dropped: tuple[int, ...]  # lengths


class Member(NamedTuple):
    """One of them: its window, and its plan with its number."""

    node: int
    plan: Plan
    number: int


@dataclass
class FreelyCombined(Explorer):
    """Explores one configuration, any states of a round's ranks together."""

    _kinds: dict[Kind, dict[int, Member]] = field(default_factory=dict)

    def _first(self, state: int) -> dict[Past, set[int]]:
        return {Past(0, 0): {state}}

    def _layer(self, frontier: dict[Past, set[int]]) -> dict[Past, set[int]]:
        after: defaultdict[Past, set[int]] = defaultdict(set)
        for past, states in frontier.items():
            for now, state in self._any_round(past, states):
                after[now].add(state)
        return after

    def _any_round(self, past: Past, states: set[int]) -> Iterator[tuple[Past, int]]:
        """All rounds of ranks in any of these states: the states after them, each with what then lies behind it."""
        nodes = sorted({node for state in states for node in self._draw(state)})
        world_size = self.bounds.world_size
        self.num_states += comb(len(nodes) + world_size - 1, world_size)
        self._kinds.clear()
        for kinds in self._meetings(nodes):
            yield from self._meet(past, kinds)

    def _meetings(self, nodes: list[int]) -> set[tuple[Kind, ...]]:
        """Which kinds of ranks may meet. Complete before any of them do: only then each kind has all its members."""
        found: set[tuple[Kind, ...]] = set()
        known: dict[tuple[int, int, tuple[int, ...]], list[Kind]] = {}
        for agreement, agreed, groups in self._agreements_of(tuple(nodes)):
            parts = []
            for rank, group in enumerate(groups):
                key = (agreed, rank, group)
                if key not in known:
                    known[key] = sorted({self._kind(rank, node, agreement, agreed) for node in group})
                parts.append(known[key])
            found.update(tuple(sorted(kinds)) for kinds in product(*parts))
        return found

    def _agreements_of(self, nodes: Nodes) -> Iterator[tuple[Agreement, int, tuple[Nodes, ...]]]:
        """What ranks with any of these windows agree on, and who they are: those whose reports look alike to `settle`."""
        todo: list[tuple[Settled, tuple[Nodes, ...]]] = [(self._settled, (nodes,) * self.bounds.world_size)]
        while todo:
            at, groups = todo.pop()
            if at.result is not None:
                self._look_again(at.result, groups)
                yield *at.result, groups
            elif at.column is None:
                self._settle_anew([group[0] for group in groups], None)
                todo.append((at, groups))
            else:
                for parts in self._split(groups, at.column):
                    values = tuple([self._cells_of(part[:1])[0][at.column] for part in parts])
                    todo.append((at.after.setdefault(values, Settled()), parts))

    def _split(self, groups: tuple[Nodes, ...], column: int) -> Iterator[tuple[Nodes, ...]]:
        """Groups whose reports have one value in this column, in all combinations, up to the order of equal groups."""
        choices = []
        for group, same in groupby(groups):
            by_value: defaultdict[Any, list[int]] = defaultdict(list)
            for node, cells in zip(group, self._cells_of(group), strict=True):
                by_value[cells[column]].append(node)
            parts = [tuple(by_value[value]) for value in sorted(by_value)]
            choices.append(list(combinations_with_replacement(parts, len(list(same)))))
        for chosen in product(*choices):
            yield tuple(chain.from_iterable(chosen))

    def _look_again(self, known: tuple[Agreement, int], groups: tuple[Nodes, ...]) -> None:
        """One in so many times, others of the same groups."""
        self.calls["agreed"] += 1
        if self.calls["agreed"] % EVERY == 0 or self.endings:
            self._settle_anew([group[-1] for group in groups], known)

    def _kind(self, rank: int, node: int, agreement: Agreement, agreed: int) -> Kind:
        plan, number = self._form(rank, node, agreement, agreed)
        dropped = sorted(plan.proposal.window.length[plan.dropped].tolist())
        report = plan.proposal.report
        order = predicates.order_in_time(self.config, plan)
        kind = Kind(agreed, plan.totals.tobytes(), order, report.status, report.num_held, tuple(dropped))
        self._kinds.setdefault(kind, {})[number] = Member(node, plan, number)
        return kind

    def _meet(self, past: Past, kinds: tuple[Kind, ...]) -> Iterator[tuple[Past, int]]:
        members = [list(self._kinds[kind].values()) for kind in kinds]
        totals = sum((same[0].plan.totals for same in members[1:]), members[0][0].plan.totals)
        data = totals.tobytes()
        for rank, same in enumerate(members):
            for member in same:
                outcome, number = self._conclude(rank, member.plan, member.number, totals, data)
                if not outcome.ended:
                    state = self._after_id(member.node, outcome, number)
                    num_waits = 0 if member.plan.groups else past.num_waits + 1
                    yield Past(self._between[state][0].all_emitted_samples, num_waits), state
        plans = [same[0].plan for same in members]
        outcomes = [
            self._conclude(rank, same[0].plan, same[0].number, totals, data)[0] for rank, same in enumerate(members)
        ]
        self._check_together(plans, outcomes)
