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


def in_time(num_steps: int, config: PlanConfig, epoch: int, round: int) -> I64:
    """(T,) the cost rank that runs at each step. The same on all ranks: it depends on `num_steps` and the seed alone."""
    return generator(config, epoch, round, "order").permutation(num_steps).astype(np.int64)
