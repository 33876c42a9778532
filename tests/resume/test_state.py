"""The state's format: small, plain, checked when it comes back, and refused where any option would change the plan."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interrupted import saved_at, through_json
from scenarios import Spec, log_normal, raises_with

import odb
from odb import resume
from odb.config import ODBConfig
from odb.errors import ConfigError
from odb.resume import decode_ids, encode_ids
from odb.testing import LengthsDataset, record

pytestmark = pytest.mark.timeout(120)

SPEC = Spec(log_normal(120, 20, 0.6, 3, 60, seed=4), 100, num_workers=0, options={"window": 24, "shuffle": True})


# ---- identities


@given(st.lists(st.integers(0, 2**53)))
def test_identities_survive(values: list[int]) -> None:
    text = encode_ids(values)
    assert decode_ids(text).tolist() == values
    assert decode_ids(json.loads(json.dumps(text))).dtype == np.int64


@given(st.integers(0, 2**40), st.integers(1, 2**20), st.integers(2, 10_000))
def test_a_run_is_one_entry(first: int, step: int, count: int) -> None:
    text = encode_ids(range(first, first + step * count, step))
    assert len(text.split()) <= 2
    assert len(decode_ids(text)) == count


def test_identities_read_well() -> None:
    assert encode_ids([]) == ""
    assert encode_ids([100, 102, 104, 106]) == "100 2x3"
    assert encode_ids([7, 7, 7, 3]) == "7 0x2 -4"


# ---- size


def test_a_state_of_a_large_window_is_small() -> None:
    """A window of 8192: nearly all of it planned, in the order of its rows, which is as good as random."""
    lengths = log_normal(30_000, 8, 0.8, 2, 2000, seed=1)
    options: dict[str, Any] = {"window": 8192, "max_held_tokens": 1 << 40, "shuffle": True}
    loader = odb.ODBDataLoader(LengthsDataset(lengths), token_budget=32768, collate_fn=len_of, **options)
    largest, held = 0, 0
    for _ in zip(range(40), loader, strict=False):
        state = loader.state_dict()
        size = len(json.dumps(state))
        if size > largest:
            largest, held = size, sum(len(decode_ids(text)) for text in (*state["pending"], state["carry"]))
    assert held > 7000
    assert largest < 4 * 8192


def len_of(samples: list[Any]) -> dict[str, int]:
    return {"rows": len(samples)}


# ---- damage


def test_damaged_values_are_refused() -> None:
    states = (saved_at(0, 1, SPEC, step)[1]["ranks"][0] for step in range(2, 12))
    state = next(state for state in states if state["pending"] and state["carry"])
    loader = SPEC.loader(0, 1)
    wrong: dict[str, list[Any]] = {
        "epoch": [-1, "0", None, 1.0, True],
        "rank": [-1],
        "step": [2.5],
        "is_last": [0, "no"],
        "round": ["1"],
        "cursor": [None],
        "pending": ["", [[1, 2]], ["1 b"], None],
        "carry": [[1, 2], "1 -2", "1x", 5],
        "age": ["0"],
        "partial": [[[1, 2]], [1]],
        "levels": [[[1]], [[[4], [1]]], {}],
        "settings": [{"seed": 0}, []],
        "sampler_epoch": ["0", -1],
        "agreement_digest": [1.5],
        "order_digest": [7],
    }
    for key, values in wrong.items():
        for value in values:
            with raises_with(ConfigError, "damaged", key):
                loader.load_state_dict(state | {key: value})
    loader.load_state_dict(state)
    assert loader.state_dict() == state


def test_every_key_is_checked() -> None:
    state = SPEC.loader(0, 1).state_dict()
    for key in set(state) - {"version"}:
        with raises_with(ConfigError):
            SPEC.loader(0, 1).load_state_dict(state | {key: object()})


def test_what_is_loaded_and_what_is_given_are_copies() -> None:
    _, merged = saved_at(0, 1, SPEC, 3)
    before = copy.deepcopy(merged)
    loader = SPEC.loader(0, 1)
    loader.load_state_dict(merged)
    given_out = loader.state_dict()
    given_out["pending"].clear()
    given_out["settings"].clear()
    assert merged == before
    merged["ranks"][0]["pending"].clear()
    assert loader.state_dict() == before["ranks"][0]
    record(loader, 1)
    given_out = loader.state_dict()
    given_out["settings"].clear()
    assert loader.state_dict()["settings"]


# ---- options


def tokens_of(sample: Any) -> int:
    return len(sample["input_ids"])


#: Another value of each option; of those in `FREE` the plan does not depend.
OTHER: dict[str, Any] = {
    "token_budget": 120,
    "window": 25,
    "max_held_tokens": 4000,
    "max_held_bytes": 1 << 20,
    "max_steps_per_round": 7,
    "max_samples": 5,
    "max_patches": 9,
    "pad_to_multiple_of": 8,
    "rows_multiple": 2,
    "cost_fn": (0.0, 1.0, 0.001),
    "policy": "published",
    "split_policy": "published",
    "join": False,
    "sample_quota": 60,
    "tail": "drop",
    "drop_last": True,
    "accum_tail": "fill",
    "loss_scaling": "samples",
    "grad_accum_steps": 2,
    "ignore_index": -1,
    "label_shift": False,
    "length_fn": tokens_of,
    "loss_tokens_fn": tokens_of,
    "patches_fn": tokens_of,
    "on_oversize": "skip",
    "seed": 1,
    "balance": "labels",
    "rows_per_batch": 2,
    "layout": "packed",
    "collate_workers": 2,
    "on_empty": "skip",
    "on_sample_error": "skip",
    "warmup_probe": True,
    "filler_fn": dict,
    "timeout_s": 5.0,
}
FREE = {"collate_workers", "on_empty", "on_sample_error", "warmup_probe", "filler_fn", "timeout_s"}
#: Refused in words of their own, or with one value only.
OWN_CHECK = {"dp_rank", "dp_world_size", "sharding"}
TOGETHER: dict[str, dict[str, Any]] = {"sample_quota": {"join": False}, "rows_per_batch": {"layout": "packed"}}


def test_every_option_is_told_to_change_plans_or_not() -> None:
    assert {field.name for field in fields(ODBConfig)} == set(OTHER) | OWN_CHECK


@pytest.mark.parametrize("name", OTHER)
def test_options_that_change_plans_are_refused(name: str) -> None:
    _, state = saved_at(0, 1, SPEC, 3)
    options = {name: OTHER[name]} | TOGETHER.get(name, {})
    loader = SPEC.but(token_budget=options.pop("token_budget", 100), options=options).loader(0, 1)
    if name in FREE:
        loader.load_state_dict(through_json(state))
        assert len(record(loader)) > 5
    else:
        with raises_with(ConfigError, f"{name}: saved ", ", now ", "Use the saved settings"):
            loader.load_state_dict(state)


def test_versions_are_told_apart() -> None:
    state = SPEC.loader(0, 1).state_dict()
    assert state["version"] == resume.STATE_VERSION
    for version in (1, 3, "2", None):
        with raises_with(ConfigError, f"version {version!r}", "reads version 2", "set_epoch"):
            SPEC.loader(0, 1).load_state_dict(state | {"version": version})
