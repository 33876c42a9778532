"""Epochs that are interrupted and resumed, on one rank or on several: module-level, so that ranks can run it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from scenarios import Prints, Spec, prints

from odb import resume
from odb.testing import Seen, seen


def through_json(state: Any) -> Any:
    """The state as a file would give it back."""
    return json.loads(json.dumps(state))


def chain(
    rank: int, world_size: int, spec: Spec, stops: Sequence[int], epoch: int = 0, num_more: int = 0
) -> list[Prints]:
    """One epoch in parts: `stops[0]` steps, then a new loader for `stops[1]` steps and so on, the last one to the end.

    Returns what all parts gave in sum, and then `num_more` whole epochs of the last loader.
    """
    out: Prints = []
    state = None
    for stop in (*stops, None):
        with spec.loader(rank, world_size) as loader:
            loader.set_epoch(epoch)
            if state is not None:
                loader.load_state_dict(state)
            part = prints(loader, stop)
            out += part
            state = through_json(loader.state_dict())
            if stop is None or len(part) < stop:  # the epoch was over before
                return [out, *(prints(loader) for _ in range(num_more))]
    raise AssertionError


def broken(
    rank: int, world_size: int, spec: Spec, all_stops: Sequence[Sequence[int]] | None, epoch: int = 0
) -> tuple[int, int, list[Any]]:
    """Which interruptions change the epoch: (steps, idle steps, stops that did not give the uninterrupted epoch).

    `all_stops`: None for one interruption at every step.
    """
    (whole,) = chain(rank, world_size, spec, (), epoch)
    num_idle = sum("idle=True" in step["info"] for step in whole)
    if all_stops is None:
        all_stops = [(k,) for k in range(len(whole) + 1)]
    bad = [stops for stops in all_stops if chain(rank, world_size, spec, stops, epoch) != [whole]]
    return len(whole), num_idle, bad


def saved_at(
    rank: int, world_size: int, spec: Spec, stop: int, states: Any = None, epoch: int = 0
) -> tuple[list[Seen], Any]:
    """Runs from an epoch's start, or from a merged state, and gathers the state after `stop` steps (-1: to the end)."""
    steps: list[Seen] = []
    with spec.loader(rank, world_size) as loader:
        loader.set_epoch(epoch)
        if states is not None:
            loader.load_state_dict(states)
        if stop:
            for batch in loader:
                steps.append(seen(batch))
                if len(steps) == stop:
                    break
        return steps, through_json(resume.gather(loader))


def refused_on_one(rank: int, world_size: int, spec: Spec, state: Any, iterates_first: bool) -> str:
    """Loads one rank's state everywhere; what the error says, of loading or of the iteration behind it."""
    with spec.loader(rank, world_size) as loader:
        if iterates_first:
            prints(loader)
        with contextlib.suppress(StopIteration):
            try:
                loader.load_state_dict(state)
                prints(loader)
            except (ValueError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
    return "nothing was raised"
