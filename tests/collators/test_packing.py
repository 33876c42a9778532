"""Packed batches: their contract, and that no sample sees another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from odb.collators import (
    BlockMaskCollator,
    FlattenCollator,
    PadCollator,
    block_diagonal_mask,
    packed_mask_mod,
)
from odb.errors import ConfigError


def sample(*ids: int, **others: Any) -> dict:
    return {"input_ids": torch.tensor(ids), **others}


THREE = [sample(10, 11, 12), sample(20, 21), sample(30)]


def test_d01_the_flattened_contract() -> None:
    batch = FlattenCollator()(THREE)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 30]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6]
    assert batch["max_seqlen"] == 3


def test_d02_given_labels_are_kept() -> None:
    one = sample(1, 2, 3, 4, labels=[-100, -100, 3, 4])
    two = sample(5, 6, labels=[-100, 6])
    assert FlattenCollator()([one, two])["labels"].tolist() == [[-100, -100, 3, 4, -100, 6]]
    assert one["labels"] == [-100, -100, 3, 4]
    tensors = [sample(1, 2, labels=torch.tensor([1, 2]))]
    assert FlattenCollator()(tensors)["labels"].tolist() == [[-100, 2]]
    assert tensors[0]["labels"].tolist() == [1, 2], "the dataset's own tensor must not change"


def test_d02_one_label_per_sample_is_no_column() -> None:
    for label in (torch.tensor(1), 1):
        batch = FlattenCollator()([sample(1, 2, 3, labels=label), sample(4, 5, labels=label)])
        assert batch["labels"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="labels"):
        FlattenCollator()([sample(1, 2, 3, labels=[1, 2])])


def test_d04_a_packed_row_has_no_mask_of_ones() -> None:
    with_masks = [one | {"attention_mask": torch.ones(len(one["input_ids"]))} for one in THREE]
    flat = FlattenCollator()(with_masks)
    assert "attention_mask" not in flat
    blocks = BlockMaskCollator()(with_masks)
    assert blocks["attention_mask"].shape == (1, 1, 6, 6) and blocks["attention_mask"].dtype == torch.bool
    padded = PadCollator()(with_masks)
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert "position_ids" not in padded
    hidden = [sample(1, 2, attention_mask=torch.tensor([1, 0]))]
    with pytest.raises(ConfigError, match="attention_mask hides some of its tokens"):
        FlattenCollator()(hidden)


def test_d05_padding_is_a_segment_of_its_own() -> None:
    batch = FlattenCollator(pad_to_multiple_of=8, pad_token_id=7)(THREE)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21, 30, 7, 7]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, -1, -1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6, 8]
    long_tail = FlattenCollator(pad_to_multiple_of=16)(THREE)
    assert long_tail["max_seqlen"] == 10 and long_tail["cu_seqlens"].tolist() == [0, 3, 5, 6, 16]


def test_d07_positions_on_three_axes() -> None:
    first, second = (torch.arange(3 * n).reshape(3, n) for n in (4, 3))
    samples = [sample(1, 2, 3, 4, position_ids=first), sample(5, 6, 7, position_ids=second)]
    flat = FlattenCollator()(samples)
    assert flat["position_ids"].shape == (3, 1, 7)
    assert flat["cu_seqlens"].tolist() == [0, 4, 7]
    assert torch.equal(flat["position_ids"][:, 0], torch.cat([first, second], dim=1))
    rows = BlockMaskCollator(row_capacity=4)(samples)
    assert rows["position_ids"].shape == (3, 2, 4)
    assert torch.equal(rows["position_ids"][:, 1, :3], second)


def test_d09_types_at_the_kernels_door() -> None:
    for batch in (FlattenCollator()(THREE), FlattenCollator(pad_to_multiple_of=8)(THREE)):
        bounds = batch["cu_seqlens"]
        assert type(batch["max_seqlen"]) is int
        assert bounds.dtype == torch.int32 and bounds.ndim == 1 and bounds.is_contiguous()
        assert bounds[0] == 0 and bounds[-1] == batch["input_ids"].shape[1] and (bounds.diff() > 0).all()
    named = FlattenCollator(transformers_names=True)(THREE)
    assert named["cu_seq_lens_q"].tolist() == named["cu_seq_lens_k"].tolist() == [0, 3, 5, 6]
    assert named["max_length_q"] == named["max_length_k"] == 3


def test_the_diagram_of_twelve_samples_in_one_row() -> None:
    lengths = [11, 6, 7, 4, 8, 5, 3, 4, 3, 4, 5, 3]
    batch = FlattenCollator(pad_to_multiple_of=64)([sample(*range(n)) for n in lengths])
    assert batch["input_ids"].shape == (1, 64)
    assert batch["cu_seqlens"].tolist() == [0, 11, 17, 24, 28, 36, 41, 44, 48, 51, 55, 60, 63, 64]


def test_other_keys() -> None:
    one = sample(1, 2, weights=[0.5, 1.0], source="a", pixel_values=torch.ones(2, 3), length=2)
    two = sample(3, weights=[2.0], source="b", pixel_values=torch.zeros(1, 3), length=1)
    for collate in (FlattenCollator(), BlockMaskCollator()):
        batch = collate([one, two])
        assert batch["weights"].tolist() == [[0.5, 1.0, 2.0]]
        assert batch["source"] == ["a", "b"]
        assert batch["pixel_values"].shape == (3, 3)
        assert "length" not in batch


def test_rows_are_cut_as_they_were_planned() -> None:
    samples = [sample(*range(n)) for n in (3, 2, 4, 1, 1)]
    batch = BlockMaskCollator(row_capacity=5, pad_to_multiple_of=2)(samples)
    # Rows of 4 tokens: a multiple of 2 within 5.
    assert batch["seq_idx"].tolist() == [[0, 0, 0, -1], [0, 0, -1, -1], [0, 0, 0, 0], [0, 1, -1, -1]]
    most = BlockMaskCollator(row_capacity=5, max_samples=1)(samples)
    assert most["input_ids"].shape == (5, 4)


def test_d03_the_mask_of_two_samples() -> None:
    mask = block_diagonal_mask(torch.tensor([[0, 0, 1]]))
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    additive = block_diagonal_mask(torch.tensor([[0, 0, 1]]), torch.float32)
    assert torch.equal(additive == 0, mask) and additive.min() == torch.finfo(torch.float32).min
    assert torch.isfinite(additive).all()


@pytest.mark.parametrize("wrong", [{"pad_to_multiple_of": 0}])
def test_wrong_options(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="pad_to_multiple_of must be >= 1"):
        FlattenCollator(**wrong)
    with pytest.raises(ConfigError, match="packing collators take mappings with input_ids, got Tensor"):
        FlattenCollator()([torch.ones(3)])
    with pytest.raises(ConfigError, match="different keys"):
        FlattenCollator()([sample(1), sample(2, other=1)])


# ---- no sample sees another


class TinyModel(nn.Module):
    """Two layers of causal attention with positions, in float64; how attention is done is passed in."""

    def __init__(self, vocabulary: int = 50, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.mix = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(2)])
        self.out = nn.Linear(width, vocabulary)
        self.double()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)
        for layer in self.mix:
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
            x = x + attend(q, k, v).transpose(1, 2).flatten(-2)
        return self.out(x)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )


def separate(model: TinyModel, samples: list[dict]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each sample alone: its logits, and the sum of all losses."""
    logits, losses = [], []
    for one in samples:
        ids = one["input_ids"].unsqueeze(0)
        out = model(
            ids, torch.arange(ids.shape[1]), lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        logits.append(out[0])
        losses.append(model.loss(out, ids))
    return logits, torch.stack(losses).sum()


def by_mask(batch: dict) -> Any:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=batch["attention_mask"])


def by_segments(batch: dict) -> Any:
    """What kernels for varying lengths do with cu_seqlens."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sizes = batch["cu_seqlens"].diff().tolist()
        parts = zip(*(one.split(sizes, dim=2) for one in (q, k, v)), strict=True)
        return torch.cat([scaled_dot_product_attention(*part, is_causal=True) for part in parts], dim=2)

    return attend


def by_flex(batch: dict) -> Any:
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no flex_attention")
    rows, width = batch["input_ids"].shape
    mask = flex.create_block_mask(packed_mask_mod(batch["seq_idx"]), rows, None, width, width, device="cpu")
    # Its CPU version has no backward pass.
    return lambda q, k, v: flex.flex_attention(q.detach(), k.detach(), v.detach(), block_mask=mask)


LAYOUTS = {
    "flattened": (FlattenCollator(), by_segments),
    "flattened, padded": (FlattenCollator(pad_to_multiple_of=16), by_segments),
    "flattened, flex": (FlattenCollator(pad_to_multiple_of=16), by_flex),
    "one row, mask": (BlockMaskCollator(), by_mask),
    "rows, mask": (BlockMaskCollator(row_capacity=12, pad_to_multiple_of=4), by_mask),
    "rows, additive mask": (BlockMaskCollator(row_capacity=12, mask_dtype=torch.float64), by_mask),
    "rows, flex": (BlockMaskCollator(row_capacity=12), by_flex),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # flex_attention says that it runs without a compiler
@pytest.mark.parametrize(("collate", "attention"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_d03_a_packed_forward_pass_is_the_separate_ones(collate: Any, attention: Any) -> None:
    torch.manual_seed(1)
    samples = [{"input_ids": torch.randint(0, 50, (n,))} for n in (3, 5, 1, 7, 4, 2)]
    model = TinyModel()
    alone, reference = separate(model, samples)
    gradients = torch.autograd.grad(reference, list(model.parameters()))
    batch = collate(samples)
    logits = model(batch["input_ids"], batch["position_ids"], attention(batch))
    real = batch["seq_idx"] >= 0
    # Samples lie in the batch in their order, row by row.
    assert (logits[real] - torch.cat(alone)).abs().max() <= 1e-12
    loss = model.loss(logits, batch["labels"])
    assert loss.item() == pytest.approx(reference.item(), rel=1e-12)
    if attention is by_flex:
        return
    for mine, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
        assert (mine - theirs).abs().max() <= 1e-12


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("collate", "attention"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_d03_changing_one_sample_leaves_the_others_exactly_as_they_are(collate: Any, attention: Any) -> None:
    model = TinyModel()
    outputs = []
    for first in ([1, 2, 3], [9, 9, 9]):
        batch = collate([sample(*first), sample(4, 5, 6, 7, 8)])
        logits = model(batch["input_ids"], batch["position_ids"], attention(batch))
        outputs.append(logits[batch["seq_idx"] >= 0][3:])
    assert (outputs[0] - outputs[1]).abs().max() == 0.0


def test_c04_both_layouts_have_the_same_loss_tokens_and_gradient() -> None:
    samples = [{"input_ids": torch.arange(5) + n, "labels": torch.arange(5) + n} for n in (0, 10)]
    model = TinyModel()
    padded, flat = PadCollator()(samples), FlattenCollator()(samples)
    assert (padded["labels"][:, 1:] != -100).sum() == (flat["labels"][:, 1:] != -100).sum() == 8

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    losses = [
        model.loss(model(padded["input_ids"], torch.arange(5), causal), padded["labels"]) / 8,
        model.loss(model(flat["input_ids"], flat["position_ids"], by_segments(flat)), flat["labels"]) / 8,
    ]
    first, second = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    assert max((a - b).abs().max().item() for a, b in zip(first, second, strict=True)) <= 1e-12
