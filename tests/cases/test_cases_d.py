"""The packed layout through the loader: small inputs on which systems of this kind failed. Collators: tests/collators."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from scenarios import Spec, TokenModel, flat_grad, log_normal, reference_grad, relative_error
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import odb
from odb.collators import FlattenCollator, PadCollator, per_sample
from odb.errors import ConfigError, MeasureError
from odb.plan import pack
from odb.testing import LengthsDataset, make_sample

pytestmark = pytest.mark.timeout(120)


def packed_spec(lengths: list[int], token_budget: int, **options: Any) -> Spec:
    return Spec(lengths, token_budget, options={"layout": "packed", "collate_fn": None} | options)


def batches(spec: Spec) -> tuple[list[dict], Any]:
    """One epoch in this process: batches, infos inside, and the loader's counts."""
    with spec.but(num_workers=0).loader(0, 1) as loader:
        return list(loader), loader.stats()


def ids(batch: dict) -> list[int]:
    return batch["id"].tolist()


def test_d01_rows_come_flattened() -> None:
    out, stats = batches(packed_spec([3, 2, 1], 6))
    (batch,) = out
    info = odb.pop_step_info(batch)
    assert batch["input_ids"].shape == (1, 6) and "attention_mask" not in batch
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert (batch["labels"][0, [0, 3, 5]] == -100).all()
    assert (info.local_samples, info.local_tokens, info.local_loss_tokens, info.padded_tokens) == (3, 6, 3, 6)
    assert stats.padding == 0.0


def test_c04_a_flattened_row_has_the_loss_tokens_of_its_samples() -> None:
    for layout in ("padded", "packed"):
        out, _ = batches(Spec([5, 5], 10, options={"layout": layout, "collate_fn": None}))
        assert [odb.pop_step_info(batch).all_loss_tokens for batch in out] == [8]


def test_first_labels_are_masked_even_where_the_model_does_not_shift() -> None:
    out, _ = batches(packed_spec([5, 5], 10, label_shift=False))
    info = odb.pop_step_info(out[0])
    assert info.local_loss_tokens == int((out[0]["labels"] != -100).sum()) == 8


def test_b01_packed_cost_is_a_hard_bound() -> None:
    out, _ = batches(packed_spec([7] * 8, 8))
    assert [batch["input_ids"].shape for batch in out] == [(1, 7)] * 8


def test_d10_the_packer_does_not_give_up_at_odd_capacities() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.normal(4096, 512, 3000), 1, 8192).astype(np.int64)
    rows = {b: pack.first_fit_decreasing(lengths, pack.Bounds(b)) for b in (8192, 8193)}
    assert abs(len(rows[8193]) - len(rows[8192])) <= 0.01 * len(rows[8192])
    for found in rows.values():
        alone = sorted(int(lengths[row[0]]) for row in found if len(row) == 1)
        assert all(a + b > 8192 for a, b in pairwise(alone)), "two samples that fit together have a row each"


CUT = [4, 2, 3, 1]


def test_d11_longer_than_the_row_is_an_error_by_default() -> None:
    with pytest.raises(MeasureError, match=r"sample 0 has 4 tokens .* token_budget=3 .*'truncate', 'split'"):
        batches(packed_spec(CUT, 3))
    out, stats = batches(packed_spec(CUT, 3, on_oversize="skip"))
    assert sorted(i for batch in out for i in ids(batch)) == [1, 2, 3] and stats.rejected["oversize"] == 1
    out, stats = batches(packed_spec(CUT, 3, on_oversize="alone"))
    assert sorted(i for batch in out for i in ids(batch)) == [0, 1, 2, 3]
    assert [ids(batch) for batch in out if batch["input_ids"].shape[1] > 3] == [[0]]


def test_d11_truncated_samples_and_tokens_are_counted() -> None:
    out, stats = batches(packed_spec(CUT, 3, on_oversize="truncate"))
    assert sum(batch["input_ids"].numel() for batch in out) == 9
    assert stats.cut == {"truncated_samples": 1, "truncated_tokens": 1}
    row = next(batch for batch in out if 0 in ids(batch))
    assert row["input_ids"].tolist() == [make_sample(0, 4)["input_ids"][:3].tolist()]


def test_d11_split_samples_keep_every_token() -> None:
    out, stats = batches(packed_spec(CUT, 3, on_oversize="split"))
    assert sum(batch["input_ids"].numel() for batch in out) == 10
    assert stats.cut == {"split_samples": 1}
    found = sorted(i for batch in out for i in ids(batch))
    assert found == [0, 0, 1, 2, 3]
    assert sorted(i for batch in out for i in odb.pop_step_info(batch).sample_ids) == found
    pieces = [
        (batch["input_ids"][0, a:b].tolist(), batch["position_ids"][0, a].item(), batch["labels"][0, a].item())
        for batch in out
        for (a, b), i in zip(pairwise(batch["cu_seqlens"].tolist()), ids(batch), strict=True)
        if i == 0
    ]
    tokens = make_sample(0, 4)["input_ids"].tolist()
    assert sorted(pieces, key=lambda one: -len(one[0])) == [(tokens[:3], 0, -100), (tokens[3:], 0, -100)]


class WithImages(LengthsDataset):
    def __getitem__(self, index: int) -> dict:
        return make_sample(index, self.lengths[index]) | {"pixel_values": torch.zeros(2, 3)}


def test_d11_what_cannot_be_cut_says_so() -> None:
    options: dict[str, Any] = {"layout": "packed", "on_oversize": "split", "token_budget": 3}
    for dataset, extra, text in (
        (WithImages([4]), {}, "sample 0 has 4 tokens: can't cut a sample with images"),
        (LengthsDataset([2]), {"length_fn": lambda _: 4}, "length_fn says 4 tokens while its input_ids have 2"),
        ([torch.ones(4)], {"collate_fn": list}, "only mappings with input_ids can be truncated or split"),
    ):
        with odb.ODBDataLoader(dataset, **(options | extra)) as loader, pytest.raises(MeasureError, match=text):
            list(loader)


def test_rows_layout_has_rows_of_fixed_capacity() -> None:
    lengths = log_normal(200, 30, 0.7, 1, 64, seed=1)
    out, stats = batches(packed_spec(lengths, 256, rows_per_batch=4, pad_to_multiple_of=8))
    for batch in out:
        info = odb.pop_step_info(batch)
        rows, width = batch["input_ids"].shape
        assert rows <= 4 and width <= 64 and width % 8 == 0
        assert batch["attention_mask"].shape == (rows, 1, width, width)
        assert info.padded_tokens == rows * width
        assert int((batch["seq_idx"] >= 0).sum()) == info.local_tokens
    assert sorted(i for batch in out for i in ids(batch)) == list(range(200))
    assert stats.padding < 0.1


def test_the_probe_fills_the_rows() -> None:
    out, _ = batches(packed_spec([30, 20, 10], 64, warmup_probe=True))
    assert [batch["input_ids"].shape[1] for batch in out] == [64, 60]
    assert odb.pop_step_info(out[0]).loss_scale == 0.0
    rows, _ = batches(packed_spec([30, 20, 10], 128, warmup_probe=True, rows_per_batch=2))
    assert rows[0]["input_ids"].shape == (2, 64)


def test_which_bound_closed_a_row_is_counted() -> None:
    for options, name in (({}, "token_budget"), ({"max_samples": 2}, "max_samples")):
        _, stats = batches(packed_spec([10] * 40, 50, **options))
        assert stats.binding_limit == name


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layout": "padded", "rows_per_batch": 2}, r"rows_per_batch=2 is for layout='packed'"),
        ({"layout": "padded", "on_oversize": "split"}, r"on_oversize='split' is for layout='packed'"),
        ({"policy": "published"}, r"policy='published' is for layout='padded'"),
        ({"rows_multiple": 2}, r"rows_multiple=2 is for layout='padded'"),
        ({"rows_per_batch": 2, "cost_fn": (0, 1, 1)}, r"can't be used with cost_fn"),
        ({"rows_per_batch": 2, "on_oversize": "alone"}, r"on_oversize='alone' needs rows_per_batch=1"),
        ({"rows_per_batch": 20, "pad_to_multiple_of": 8}, r"less than pad_to_multiple_of=8: no row fits"),
        ({"on_oversize": "split", "cost_fn": (0, 1, 1)}, r"cuts by tokens"),
        ({"balance": "labels", "max_patches": 3}, r"balance='labels' .* can't be used with max_patches"),
        ({"balance": "tokens"}, r"balance must be one of 'labels', got 'tokens'"),
        ({"collate_fn": PadCollator()}, r"PadCollator does not make batches of layout='packed'"),
        ({"collate_fn": per_sample(list)}, r"per_sample takes it as then=..."),
        (
            {"layout": "padded", "collate_fn": FlattenCollator()},
            r"FlattenCollator does not make batches of layout='padded'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        odb.ODBDataLoader(LengthsDataset([3]), token_budget=100, **({"layout": "packed"} | options))


def test_processors_in_the_collator_work_packed_too() -> None:
    def process(raw: list[int]) -> dict:
        return {"input_ids": torch.full((1, raw[0]), raw[0])}

    with odb.ODBDataLoader(
        [3, 2, 1], token_budget=6, layout="packed", collate_fn=per_sample(process, FlattenCollator())
    ) as loader:
        (batch,) = list(loader)
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6]


# ---- two ranks


def packed_loss(model: Any, batch: dict) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def train_packed(rank: int, world_size: int, spec: Spec) -> list[tuple[list[int], np.ndarray, list[int]]]:
    """Per optimizer step: this rank's samples, the reduced gradient, and the tokens of its batches."""
    model = DistributedDataParallel(TokenModel())
    out, own, sizes = [], [], []
    with spec.loader(rank, world_size) as loader:
        for batch in loader:
            info = odb.pop_step_info(batch)
            model.require_backward_grad_sync = info.sync_gradients
            odb.scale_loss(packed_loss(model, batch), info).backward()
            own += [] if info.idle else ids(batch)
            sizes.append(batch["input_ids"].numel())
            if info.sync_gradients:
                out.append((own, flat_grad(model), sizes))
                model.zero_grad()
                own, sizes = [], []
    return out


UNLIKE = log_normal(60, 40, 0.9, 2, 128, seed=5)


@pytest.mark.parametrize("options", [{}, {"rows_per_batch": 2, "grad_accum_steps": 3, "balance": "labels"}])
def test_two_ranks_have_the_exact_gradient_of_all_samples_once(options: dict) -> None:
    spec = packed_spec(UNLIKE, 256, **options).but(data={"prompt_fraction": [(i % 5) / 5 for i in range(60)]})
    results = ranks.values(2, train_packed, spec)
    assert len(results[0]) == len(results[1])
    assert sorted(i for result in results for own, _, _ in result for i in own) == list(range(60))
    for first, second in zip(*results, strict=True):
        expected = reference_grad(spec.dataset(), first[0] + second[0])
        for _, gradient, sizes in (first, second):
            assert relative_error(gradient, expected) <= 1e-12
            assert max(sizes) <= 256


def interrupted(rank: int, world_size: int, spec: Spec, stop: int) -> tuple[list, list]:
    """An epoch in one go, and one that goes on from a state after `stop` steps; samples and boundaries of each step."""

    def look(batch: dict) -> tuple:
        info = odb.pop_step_info(batch)
        return info.sample_ids, batch["cu_seqlens"].tolist(), batch["input_ids"].tolist(), info.loss_scale

    with spec.loader(rank, world_size) as loader:
        whole = [look(batch) for batch in loader]
    with spec.loader(rank, world_size) as loader:
        steps = iter(loader)
        first = [look(next(steps)) for _ in range(stop)]
        state = loader.state_dict()
    with spec.loader(rank, world_size) as loader:
        loader.load_state_dict(state)
        return whole, first + [look(batch) for batch in loader]


@pytest.mark.parametrize("stop", [1, 6])
def test_a_packed_epoch_goes_on_where_it_was_interrupted(stop: int) -> None:
    spec = packed_spec(UNLIKE, 100, on_oversize="split", balance="labels", shuffle=True, window=24)
    for whole, resumed in ranks.values(2, interrupted, spec, stop):
        assert resumed == whole


def test_split_samples_do_not_go_on_with_other_ranks() -> None:
    with packed_spec(UNLIKE, 100, on_oversize="split").but(num_workers=0).loader(0, 1) as loader:
        next(iter(loader))
        state = loader.state_dict()
        states = {"version": state["version"], "ranks": [state, state | {"rank": 1}]}
        states["ranks"] = [one | {"world_size": 2} for one in states["ranks"]]
        with pytest.raises(ConfigError, match=r"on_oversize='split' cut samples into pieces"):
            loader.load_state_dict(states)
