"""`PadCollator` against a plain reading of what it says, on rows of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odb.collators import PadCollator

DTYPES = ["i8", "i4", "i2", "u1", "f4", "f8", "?"]


def row_of(values: list[int], dtype: str, kind: str) -> Any:
    array = np.array(values).astype(dtype)
    return {
        "tensor": lambda: torch.from_numpy(array),
        "array": lambda: array,
        "list": array.tolist,
        "row of a tensor": lambda: torch.from_numpy(array)[None],
        "row of lists": lambda: [array.tolist()],
    }[kind]()


rows = st.tuples(
    st.lists(st.integers(0, 100), min_size=2, max_size=8),
    st.sampled_from(DTYPES),
    st.sampled_from(["tensor", "array", "list", "row of a tensor", "row of lists"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4), st.sampled_from(["left", "right"]), st.sampled_from([1, 3, 8]))
def test_every_value_arrives_whatever_its_row_is(rows: list[Any], side: str, multiple: int) -> None:
    samples = [{"input_ids": torch.arange(len(row[0])), "weights": row_of(*row)} for row in rows]
    batch = PadCollator(side=side, pad_to_multiple_of=multiple, pad_values={"weights": 1})(samples)
    width = -(-max(len(values) for values, _, _ in rows) // multiple) * multiple
    assert batch["weights"].shape == batch["attention_mask"].shape == (len(rows), width)
    for got, mask, (values, dtype, _) in zip(batch["weights"], batch["attention_mask"], rows, strict=True):
        place = slice(0, len(values)) if side == "right" else slice(width - len(values), width)
        wanted = np.ones(width)
        wanted[place] = np.array(values).astype(dtype)
        assert got.double().tolist() == wanted.tolist()
        assert mask.nonzero().flatten().tolist() == list(range(width))[place]


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        ([1, 1], [0.5, 0.25, 1.0], torch.float32),
        (torch.ones(2, dtype=torch.bool), torch.tensor([0.5, 2.0, 3.0]), torch.float32),
        (np.ones(2, np.uint16), [70_000, 1, 2], torch.int64),
    ],
)
def test_rows_of_several_dtypes_are_not_cut_to_the_first(first: Any, second: Any, dtype: torch.dtype) -> None:
    """Weights from JSON: `[1, 1]` are integers, `[0.5, 0.25, 1.0]` are not."""
    samples = [{"input_ids": [1, 2], "w": first}, {"input_ids": [1, 2, 3], "w": second}]
    batch = PadCollator()(samples)
    assert batch["w"].dtype == dtype
    assert batch["w"].tolist() == [[1, 1, 0], torch.as_tensor(second).tolist()]
