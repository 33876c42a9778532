"""Loss and gradient weight: small inputs on which systems of this kind failed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from scenarios import (
    Spec,
    TokenModel,
    assert_exact_gradients,
    causal_loss,
    flat_grad,
    iterate,
    log_normal,
    reference_grad,
    relative_error,
    train,
)
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

import odb
from odb.testing import IGNORE_INDEX, LengthsDataset, assert_each_once, collate, seen

pytestmark = pytest.mark.timeout(120)

#: Two samples of 100 tokens with 1 and 99 labels that bear loss: the first label of a row is never predicted.
UNEVEN = Spec([100, 100], token_budget=100, data={"prompt_fraction": [0.99, 0.0]})


def constant_losses(rank: int, world_size: int, spec: Spec) -> list[tuple[int, float, float, bool]]:
    """Loss tokens, scale, scaled loss and end of the optimizer step; the mean loss is 10.0 over one token, else 1.0."""
    out = []
    with spec.loader(rank, world_size) as loader:
        for batch in loader:
            info = odb.pop_step_info(batch)
            mean = torch.tensor(10.0 if info.local_loss_tokens == 1 else 1.0, dtype=torch.float64)
            scaled = odb.scale_loss(mean, info).item()
            out.append((info.local_loss_tokens, info.loss_scale, scaled, info.sync_gradients))
    return out


def test_c01_accumulated_means_weigh_by_their_tokens() -> None:
    steps = constant_losses(0, 1, UNEVEN.but(num_workers=0, options={"grad_accum_steps": 2}))
    assert sorted(step[0] for step in steps) == [1, 99]
    assert sum(step[2] for step in steps) == pytest.approx(1.09, abs=1e-14)
    assert [step[3] for step in steps] == [False, True]


def test_c01_the_accumulated_gradient_is_that_of_one_large_batch() -> None:
    spec = UNEVEN.but(options={"grad_accum_steps": 2})
    updates = ranks.values(1, train, spec)
    assert [update.num_micro_steps for update in updates[0]] == [2]
    assert_exact_gradients(spec, updates)


def test_c02_ranks_weigh_by_their_supervised_tokens() -> None:
    ((first,), (second,)) = ranks.values(2, constant_losses, UNEVEN)
    assert first[:2] == (1, pytest.approx(0.02, abs=1e-15))
    assert second[:2] == (99, pytest.approx(1.98, abs=1e-15))
    assert (first[2] + second[2]) / 2 == pytest.approx(1.09, abs=1e-14)


def test_c02_the_averaged_gradient_is_that_of_one_process() -> None:
    assert_exact_gradients(UNEVEN, ranks.values(2, train, UNEVEN))


# ---- C-04


def flatten(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """All samples in one row; the first label of each is masked, since it would be predicted from its neighbour."""
    labels = [sample["labels"].clone() for sample in samples]
    for row in labels:
        row[0] = IGNORE_INDEX
    ids = torch.tensor([sample["id"] for sample in samples])
    return {
        "id": ids,
        "input_ids": torch.cat([s["input_ids"] for s in samples])[None],
        "labels": torch.cat(labels)[None],
    }


@pytest.mark.parametrize("collate_fn", [collate, flatten])
def test_c04_a_label_that_is_never_predicted_is_not_counted(collate_fn: Any) -> None:
    dataset, model = LengthsDataset([5, 5]), TokenModel()
    ((batch, info),) = odb.ODBDataLoader(dataset, token_budget=10, collate_fn=collate_fn).steps()
    assert (info.local_loss_tokens, info.all_loss_tokens, info.window_loss_tokens) == (8, 8, 8)
    odb.scale_loss(causal_loss(model(batch["input_ids"]), batch["labels"]), info).backward()
    assert relative_error(flat_grad(model), reference_grad(dataset, [0, 1])) <= 1e-12


def test_c04_without_the_shift_every_label_counts() -> None:
    loader = odb.ODBDataLoader(LengthsDataset([5, 5]), token_budget=10, collate_fn=collate, label_shift=False)
    ((_, info),) = loader.steps()
    assert info.local_loss_tokens == 10


# ---- C-06


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("accum_tail", "ends", "num_idle"), [("short", [4, 8, 10], 0), ("fill", [4, 8, 12], 2)])
def test_c06_the_last_accumulation_window(world_size: int, accum_tail: str, ends: list[int], num_idle: int) -> None:
    spec = Spec(
        [10] * 10 * world_size, 10, options={"grad_accum_steps": 4, "accum_tail": accum_tail, "sharding": "static"}
    )
    outcomes = ranks.values(world_size, iterate, spec, 2)
    for epoch in range(2):
        per_rank = [outcome.epochs[epoch] for outcome in outcomes]
        assert_each_once(per_rank, range(10 * world_size))
        for steps in per_rank:
            assert [k + 1 for k, step in enumerate(steps) if step.info.sync_gradients] == ends
            assert [step.idle for step in steps] == [False] * 10 + [True] * num_idle
        start = 0
        for end in ends:
            scales = [step.info.loss_scale for steps in per_rank for step in steps[start:end]]
            assert sum(scales) / world_size == pytest.approx(1.0, abs=1e-14)
            start = end


# ---- C-09


def train_with_join(rank: int, world_size: int, spec: Spec) -> list[tuple[int, tuple[int, ...], float, Any]]:
    """DistributedDataParallel's own Join, which divides by the initial number of ranks."""
    model, out = DistributedDataParallel(TokenModel()), []
    with spec.loader(rank, world_size) as loader, Join([model], divide_by_initial_world_size=True):
        for batch in loader:
            info = odb.pop_step_info(batch)
            odb.scale_loss(causal_loss(model(batch["input_ids"]), batch["labels"]), info).backward()
            out.append((info.step, tuple(batch["id"].tolist()), info.loss_scale, flat_grad(model)))
            model.zero_grad()
    return out


def test_c09_a_rank_that_has_left_does_not_weaken_the_others() -> None:
    spec = Spec([10] * 3, 10, share=[[0, 1], [2]], options={"tail": "skip"})
    first, second = ranks.values(2, train_with_join, spec)
    assert [step[0] for step in first] == [0, 1]
    assert [step[0] for step in second] == [0]
    assert [step[2] for step in first] == [1.0, 2.0]
    assert relative_error(first[0][3], reference_grad(spec.dataset(), first[0][1] + second[0][1])) <= 1e-12
    assert relative_error(first[1][3], reference_grad(spec.dataset(), first[1][1])) <= 1e-12


# ---- exact gradients over worlds and accumulation


def uneven_spec(world_size: int, accum: int) -> Spec:
    """Shards of unequal totals; prompts masked by shares that differ; samples without a label that bears loss."""
    rng = np.random.default_rng(5)
    lengths = log_normal(14 * world_size, 14, 0.7, 2, 60, seed=6)
    fractions = rng.choice([0.0, 0.3, 0.8, 1.0], len(lengths)).tolist()
    cuts = [0, *np.cumsum([6 + 4 * r for r in range(world_size)]).tolist()]
    share = [list(range(a, min(b, len(lengths)))) for a, b in itertools.pairwise(cuts)]
    share[-1] += range(cuts[-1], len(lengths))
    options = {"grad_accum_steps": accum, "window": 8}
    return Spec(lengths, 64, share=share, data={"prompt_fraction": fractions}, options=options)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accum", [1, 4])
def test_guarantee_gradients_equal_those_of_one_process(world_size: int, accum: int) -> None:
    spec = uneven_spec(world_size, accum)
    updates = ranks.values(world_size, train, spec)
    assert sorted(i for rank_updates in updates for u in rank_updates for i in u.ids) == list(range(len(spec.lengths)))
    assert all(u.num_micro_steps == accum for rank_updates in updates for u in rank_updates[:-1])
    if world_size > 1:
        assert sum(u.num_idle for rank_updates in updates for u in rank_updates) > 0, (
            "no filler: the tail is not tested"
        )
    assert_exact_gradients(spec, updates)


def test_a_rank_whose_labels_are_all_masked_in_a_step_weighs_nothing() -> None:
    spec = Spec([20] * 4, 20, share=[[0, 1], [2, 3]], data={"prompt_fraction": [0.5, 0.5, 1.0, 1.0]})
    updates = ranks.values(2, train, spec)
    assert [u.losses for u in updates[1]] == [(0.0,), (0.0,)]
    assert_exact_gradients(spec, updates)


@pytest.mark.parametrize("accum", [1, 2])
def test_a_step_without_any_label_that_bears_loss_is_zero_and_not_nan(accum: int) -> None:
    spec = Spec([20] * 8, 20, data={"prompt_fraction": 1.0}, options={"grad_accum_steps": accum})
    updates = ranks.values(2, train, spec)
    for rank_updates in updates:
        assert all(loss == 0.0 for update in rank_updates for loss in update.losses)
        assert all(np.all(update.grad == 0.0) for update in rank_updates)


# ---- the other scales


def scales(rank: int, world_size: int, spec: Spec) -> list[tuple[float, int, int]]:
    with spec.loader(rank, world_size) as loader:
        return [(s.info.loss_scale, s.info.local_samples, s.info.all_samples_this_step) for s in map(seen, loader)]


def test_loss_scaling_by_samples_and_none() -> None:
    base = Spec([10] * 9, 30, share=[range(6), range(6, 9)], data={"prompt_fraction": [0.9] * 6 + [0.0] * 3})
    for rank_scales in ranks.values(2, scales, base.but(options={"loss_scaling": "samples"})):
        for scale, local, total in rank_scales:
            assert scale == pytest.approx(2 * local / total, abs=1e-15)
    for rank_scales in ranks.values(2, scales, base.but(options={"loss_scaling": "none"})):
        assert all(scale == (1.0 if local else 0.0) for scale, local, _ in rank_scales)


def test_scale_loss_takes_the_papers_form_too() -> None:
    loss = torch.tensor(3.0, dtype=torch.float64)
    assert odb.scale_loss(loss, 5, 20, 4).item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match="scale_loss"):
        odb.scale_loss(loss, 5)


def test_pop_step_info_raises_where_the_modes_differ() -> None:
    for batch in odb.ODBDataLoader(LengthsDataset([5]), token_budget=5, loss_scaling="samples"):
        with pytest.raises(ValueError, match=r"'exact'.*'samples'"):
            odb.pop_step_info(dict(batch), loss_scaling="exact")
        assert odb.pop_step_info(batch, loss_scaling="samples").idle is False
        with pytest.raises(ValueError, match="no step info"):
            odb.pop_step_info(batch)


# ---- counting again after collation


def collate_and_mask(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Masks more labels than the dataset did, as a completion-only collator does."""
    batch = collate(samples)
    batch["labels"][:, :3] = IGNORE_INDEX
    return batch


def all_but_three(sample: dict[str, Any]) -> int:
    return max(0, len(sample["labels"]) - 3)


def test_a_collator_that_changes_the_labels_is_found_out() -> None:
    loader = odb.ODBDataLoader(LengthsDataset([9, 8, 7]), token_budget=30, collate_fn=collate_and_mask)
    with pytest.raises(odb.errors.MeasureError, match="loss_tokens_fn"):
        list(loader)


def test_a_collator_that_changes_the_labels_is_right_with_its_own_count() -> None:
    options: dict[str, Any] = {"collate_fn": collate_and_mask, "loss_tokens_fn": all_but_three}
    ((_, info),) = odb.ODBDataLoader(LengthsDataset([9, 8, 7]), token_budget=30, **options).steps()
    assert info.local_loss_tokens == 15


def test_padding_on_the_left_changes_the_count_and_is_found_out() -> None:
    left = odb.collators.PadCollator(side="left")
    with pytest.raises(odb.errors.MeasureError, match="loss_tokens_fn"):
        list(odb.ODBDataLoader(LengthsDataset([9, 8, 7]), token_budget=30, collate_fn=left))
