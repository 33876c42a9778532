"""Cost models that are wrong are refused when the loader is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import odb
from odb.errors import ConfigError
from odb.testing import LengthsDataset, collate, record


def falls(rows: Any, padded_len: Any) -> Any:
    return np.where(rows > 10, 1, rows * padded_len)


def in_place(rows: Any, padded_len: Any) -> Any:
    rows *= padded_len
    return rows


@pytest.mark.parametrize("bad", [falls, lambda rows, _: -rows, lambda rows, _: rows * np.nan, (1, -1, 0.0), (1, 1)])
def test_a_wrong_cost_model_is_refused_at_once(bad: Any) -> None:
    with pytest.raises(ConfigError, match="cost_fn"):
        odb.ODBConfig(token_budget=64, cost_fn=bad)


def test_a_cost_model_that_works_in_place_changes_nothing_else() -> None:
    with odb.ODBDataLoader(LengthsDataset([5] * 24), token_budget=60, cost_fn=in_place, collate_fn=collate) as loader:
        assert [len(step.ids) for step in record(loader)] == [12, 12]


def test_coefficients_are_part_of_what_ranks_compare() -> None:
    one, other = (odb.ODBConfig(token_budget=64, cost_fn=(0, 1, alpha)).plan_config() for alpha in (0.1, 0.2))
    assert one.signature() != other.signature()
