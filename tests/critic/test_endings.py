"""Epochs that must not end early, silently, or never."""

from __future__ import annotations

from typing import Any

import pytest

import odb
from odb.errors import MeasureError
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


@pytest.mark.parametrize(
    "data, options",
    [
        ({"none_at": range(6)}, {"on_empty": "skip"}),
        ({"fail_at": range(6)}, {"on_sample_error": "skip"}),
        ({}, {"on_oversize": "skip", "token_budget": 4}),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_quota_that_no_sample_can_fill_is_an_error(
    data: dict[str, Any], options: dict[str, Any], num_workers: int
) -> None:
    options = {"token_budget": 64, "join": False, "sample_quota": 10, "num_workers": num_workers} | options
    loader = odb.ODBDataLoader(LengthsDataset([5] * 6, **data), collate_fn=collate, **options)
    with loader, pytest.raises(MeasureError, match=r"sample_quota=10 can't be reached"):
        record(loader)
