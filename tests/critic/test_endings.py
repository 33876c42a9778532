"""Epochs that must not end early, silently, or never."""

from __future__ import annotations

from typing import Any

import pytest

import odb
from odb.testing import LengthsDataset, collate, record

pytestmark = pytest.mark.timeout(60)


class Stops(LengthsDataset):
    """Raises StopIteration, as a bare `next()` in user code does."""

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        if index == 7:
            raise StopIteration
        return super().__getitem__(index)


class StopsInChunks(Stops):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        if 7 in indices:
            raise StopIteration
        return [super(Stops, self).__getitem__(i) for i in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Stops, StopsInChunks])
def test_stop_iteration_in_the_dataset_is_an_error_and_no_end(kind: type[LengthsDataset], num_workers: int) -> None:
    with (
        odb.ODBDataLoader(kind([5] * 40), token_budget=64, collate_fn=collate, num_workers=num_workers) as loader,
        pytest.raises(RuntimeError, match="StopIteration"),
    ):
        record(loader)
