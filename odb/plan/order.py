"""Which group runs when: groups of similar cost at the same time on all ranks, in an order in time that is random."""

from __future__ import annotations

import hashlib

import numpy as np

from odb.plan.types import I64, PlanConfig


def generator(config: PlanConfig, epoch: int, round: int, purpose: str) -> np.random.Generator:
    """A random generator that every rank builds alike; streams of different rounds and purposes are independent."""
    text = f"{config.seed}/{epoch}/{round}/{purpose}".encode()
    key = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), dtype="<u8")
    return np.random.Generator(np.random.Philox(key=key))


def by_cost(costs: I64, first_ids: I64) -> I64:
    """(g,) order of a rank's groups: cost descending, ties by the first id, so that step k costs the same everywhere."""
    return np.lexsort((first_ids, -costs))


def in_time(num_steps: int, config: PlanConfig, epoch: int, round: int, num_full: int | None = None) -> I64:
    """(T,) the cost rank that runs at each step. The same on all ranks: it depends on shared numbers and the seed alone.

    The `num_full` steps in which every rank has a group (None: all) come first, in random order. Those in which some
    rank is idle come last, as they are: with `tail="skip"` a rank's own k-th batch must be the others' k-th too, and a
    completed accumulation window ends with its fillers.
    """
    order = generator(config, epoch, round, "order").permutation(num_steps).astype(np.int64)
    if num_full is None:
        return order
    return np.concatenate([order[order < num_full], np.arange(num_full, num_steps, dtype=np.int64)])
