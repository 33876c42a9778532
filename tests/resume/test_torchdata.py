"""The protocol of torchdata's `StatefulDataLoader`: the same calls on both loaders do the same."""

from __future__ import annotations

from typing import Any

import pytest

import odb
from odb.testing import LengthsDataset, collate

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*set_vital.*")]

DATASET = LengthsDataset([5] * 12)


def theirs(num_workers: int) -> Any:
    return stateful.StatefulDataLoader(DATASET, batch_size=2, collate_fn=collate, num_workers=num_workers)


def ours(num_workers: int) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(DATASET, token_budget=10, window=2, collate_fn=collate, num_workers=num_workers)


def ids(loader: Any, num_steps: int | None = None) -> list[list[int]]:
    out: list[list[int]] = []
    for batch in loader if num_steps != 0 else ():
        out.append(sorted(batch["id"].tolist()))
        if len(out) == num_steps:
            break
    return out


def transcript(make: Any, num_workers: int) -> list[Any]:
    """What one loader does in each of the protocol's situations."""
    out: list[Any] = [ids(make(num_workers))]
    for stop in (0, 1, 5, 6, None):  # None: past the end, where the next epoch comes
        loader, fresh = make(num_workers), make(num_workers)
        head = ids(loader, stop)
        state = loader.state_dict()
        fresh.load_state_dict(state)
        out.append((head, fresh.state_dict() == state, ids(fresh), ids(fresh)))
    broken = make(num_workers)
    ids(broken, 2)
    out.append(ids(broken, 1))  # a new pass of the same loader begins anew
    loader = make(num_workers)
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    next(running)
    loader.load_state_dict(state)
    out.append((sorted(next(running)["id"].tolist()), ids(loader)))  # the old pass goes on, the next one is resumed
    return out


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_same_calls_do_the_same(num_workers: int) -> None:
    expected = transcript(theirs, num_workers)
    assert len(expected[0]) == 6
    assert transcript(ours, num_workers) == expected
    assert isinstance(ours(0), stateful.Stateful)


def test_an_empty_state_is_refused_where_theirs_is_ignored() -> None:
    """A restart that nobody notices reads samples twice; `set_epoch` says that it is meant."""
    loader = theirs(0)
    loader.load_state_dict({})
    assert len(ids(loader)) == 6
    with pytest.raises(odb.errors.ConfigError, match="no state of an odb loader"):
        ours(0).load_state_dict({})
