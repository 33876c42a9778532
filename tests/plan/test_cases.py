"""Small inputs with known answers, on which systems of this kind failed elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from driver import Epoch, blocks, drive_epoch, make_config, make_measures, strided


def num_steps(epoch: Epoch) -> list[int]:
    return [len(rank) for rank in epoch.steps]


def rows(epoch: Epoch, rank: int) -> list[int]:
    return [step.rows for step in epoch.steps[rank]]


@pytest.fixture(params=[True, False], ids=["lookahead", "no-lookahead"])
def lookahead(request: pytest.FixtureRequest) -> bool:
    """Whether sources know that they are dry before they are asked in vain."""
    return bool(request.param)


def test_a_rank_with_few_tokens_is_spread_over_the_steps_of_the_other() -> None:
    epoch = drive_epoch(make_config(100), strided([90, 10] * 8, 2))
    assert num_steps(epoch) == [8, 8]
    assert epoch.num_idle() == [0, 0]
    assert epoch.emitted() == list(range(16))


def test_the_last_block_is_split_so_that_no_rank_is_short(lookahead: bool) -> None:
    epoch = drive_epoch(make_config(1000, max_samples=4), blocks([5, 5, 5, 2], 10), lookahead=lookahead)
    assert num_steps(epoch) == [2, 2, 2, 2]
    assert rows(epoch, 3) == [1, 1]
    assert epoch.num_idle() == [0, 0, 0, 0]
    assert epoch.emitted() == list(range(17))


@pytest.mark.parametrize("token_budget", [160, 500, 10_000])
def test_incomplete_groups_are_dropped_and_counted(token_budget: int, lookahead: bool) -> None:
    config = make_config(token_budget, max_samples=16, drop_last=True)
    epoch = drive_epoch(config, blocks([49, 49, 47], 10), lookahead=lookahead)
    assert num_steps(epoch) == [2, 2, 2]
    assert len(epoch.emitted()) == 96
    dropped = epoch.all_dropped() + [i for rank in epoch.undrawn for i in rank]  # the last rank's end is seen first
    assert len(dropped) == 49
    assert sorted(epoch.emitted() + dropped) == list(range(145))


@pytest.mark.parametrize("token_budget", [160, 500, 10_000])
def test_the_same_blocks_without_dropping_take_four_steps(token_budget: int, lookahead: bool) -> None:
    epoch = drive_epoch(make_config(token_budget, max_samples=16), blocks([49, 49, 47], 10), lookahead=lookahead)
    assert num_steps(epoch) == [4, 4, 4]
    assert epoch.emitted() == list(range(145))
    assert epoch.num_idle() == [0, 0, 0]


def test_ranks_with_fewer_samples_than_steps_are_idle_in_the_rest(lookahead: bool) -> None:
    epoch = drive_epoch(make_config(10), blocks([6, 4], 10), lookahead=lookahead)
    assert num_steps(epoch) == [6, 6]
    assert epoch.num_idle() == [0, 2]
    assert epoch.emitted() == list(range(10))


def test_a_data_set_smaller_than_world_and_window(lookahead: bool) -> None:
    epoch = drive_epoch(make_config(10), strided([5, 9, 7], 2), lookahead=lookahead)
    assert num_steps(epoch) == [2, 2]
    assert epoch.num_idle() == [0, 1]
    assert epoch.emitted() == [0, 1, 2]


def test_idle_steps_count_nowhere(lookahead: bool) -> None:
    shards = [make_measures([50] * 7, range(7)), make_measures([30] * 2, range(7, 9))]
    epoch = drive_epoch(make_config(50), shards, lookahead=lookahead)
    steps = [step for rank in epoch.steps for step in rank]
    assert num_steps(epoch) == [7, 7]
    assert sum(step.local_samples for step in steps) == 9
    assert sum(step.local_tokens for step in steps) == sum(step.local_loss_tokens for step in steps) == 410
    for zero in (step for step in steps if step.idle):
        assert (zero.rows, zero.cost, zero.loss_scale, zero.local_loss_tokens) == (0, 0, 0.0, 0)
    # A loss of 1.0 per token, averaged over ranks, weighs 1.0 in every step.
    for pair in zip(*epoch.steps, strict=True):
        assert sum(step.loss_scale for step in pair) / 2 == pytest.approx(1.0, abs=1e-12)


def test_budget_below_two_samples_gives_groups_of_one() -> None:
    epoch = drive_epoch(make_config(8), [make_measures([7] * 8)])
    assert rows(epoch, 0) == [1] * 8
    epoch = drive_epoch(make_config(1), [make_measures([1] * 5)])
    assert rows(epoch, 0) == [1] * 5


def test_row_multiple_never_loses_a_short_rest() -> None:
    epoch = drive_epoch(make_config(100, rows_multiple=8), [make_measures([1] * 3)])
    assert epoch.emitted() == [0, 1, 2]
    assert all(step.rows for step in epoch.steps[0])


def test_an_oversized_sample_stands_alone() -> None:
    epoch = drive_epoch(make_config(512), strided([100, 513, 100, 100], 2))
    assert epoch.emitted() == [0, 1, 2, 3]
    alone = [step for step in epoch.steps[1] if 1 in step.ids]
    assert [step.rows for step in alone] == [1]


def test_twice_the_budget_halves_the_steps_unless_rows_are_capped() -> None:
    for budget, max_samples, expected in ((64, None, 16), (128, None, 8), (64, 4, 16), (128, 4, 16)):
        epoch = drive_epoch(make_config(budget, max_samples=max_samples), [make_measures([16] * 64)])
        assert num_steps(epoch) == [expected]


def test_no_rank_is_padded_to_the_longest_sample_of_another() -> None:
    shards = [make_measures([2048]), make_measures([2] * 1024, range(1, 1025))]
    epoch = drive_epoch(make_config(2048), shards)
    shapes = [(step.rows, step.padded_len) for rank in epoch.steps for step in rank]
    assert (1, 2048) in shapes
    assert all(r * length <= 2048 for r, length in shapes)
    assert epoch.emitted() == list(range(1025))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_last_accumulation_window_is_short_or_filled(world_size: int) -> None:
    shards = blocks([10] * world_size, 10)
    for accum_tail, expected in (("short", [4, 8, 10]), ("fill", [4, 8, 12])):
        epoch = drive_epoch(make_config(10, grad_accum_steps=4, accum_tail=accum_tail), shards)
        for rank in epoch.steps:
            assert [k for k, step in enumerate(rank, 1) if step.sync_gradients] == expected
        losses = np.array([[step.loss_scale for step in rank] for rank in epoch.steps]).mean(axis=0)
        starts = [0, *expected[:-1]]
        for start, end in zip(starts, expected, strict=True):
            assert losses[start:end].sum() == pytest.approx(1.0, abs=1e-12)


def test_the_last_window_is_completed_by_splits_before_fillers(lookahead: bool) -> None:
    config = make_config(20, grad_accum_steps=4, accum_tail="fill")
    epoch = drive_epoch(config, [make_measures([10] * 10)], lookahead=lookahead)
    assert len(epoch.steps[0]) == 8
    assert epoch.num_idle() == [0]
    assert epoch.emitted() == list(range(10))
    epoch = drive_epoch(config, [make_measures([10] * 3)], lookahead=lookahead)
    assert len(epoch.steps[0]) == 4
    assert epoch.num_idle() == [1]


def test_loss_weights_undo_the_mean_over_ranks() -> None:
    shards = [make_measures([99], [0], [1]), make_measures([99], [1], [99])]
    epoch = drive_epoch(make_config(1000), shards)
    assert [rank[0].loss_scale for rank in epoch.steps] == pytest.approx([0.02, 1.98], abs=1e-15)


def test_a_rank_that_is_idle_leaves_the_whole_weight_to_the_others() -> None:
    epoch = drive_epoch(make_config(10), blocks([2, 1], 10))
    assert sorted(step.loss_scale for step in epoch.steps[0]) == [1.0, 2.0]


def test_neighbouring_batches_are_as_unlike_as_in_a_random_order() -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(5, 0.8, 4096), 16, 2048).astype(np.int64)
        epoch = drive_epoch(make_config(4096, window=256, seed=seed), [make_measures(lengths.tolist())])
        mean = np.array([step.local_tokens / step.rows for step in epoch.steps[0]])
        assert abs(np.corrcoef(mean[:-1], mean[1:])[0, 1]) <= 0.2
        quarter = len(mean) // 4
        first, last = (
            sum(s.local_tokens for s in part) / sum(s.rows for s in part)
            for part in (epoch.steps[0][:quarter], epoch.steps[0][-quarter:])
        )
        assert first == pytest.approx(last, rel=0.1)


def test_a_quota_ends_with_the_optimizer_step_that_reaches_it() -> None:
    config = make_config(20, join=False, sample_quota=50, grad_accum_steps=2)
    epoch = drive_epoch(config, strided([10] * 400, 2))
    assert sum(step.local_samples for rank in epoch.steps for step in rank) == 56  # 8 samples an optimizer step
    assert num_steps(epoch) == [14, 14]
    assert [len(state.window) for state in epoch.final] == [0, 0]
    assert [step.sync_gradients for step in epoch.steps[0]] == [False, True] * 7
    undrawn = [i for rank in epoch.undrawn for i in rank]
    assert sorted(epoch.emitted() + epoch.all_dropped() + undrawn) == list(range(400))


def test_without_quota_or_join_the_first_rank_that_is_drained_ends_the_epoch() -> None:
    epoch = drive_epoch(make_config(10, join=False), blocks([20, 3], 10))
    assert num_steps(epoch) == [3, 3]
    assert epoch.num_idle() == [0, 0]


def test_dropping_the_tail_leaves_no_idle_step() -> None:
    epoch = drive_epoch(make_config(10, tail="drop"), blocks([6, 4], 10))
    assert num_steps(epoch) == [4, 4]
    assert epoch.num_idle() == [0, 0]
    undrawn = [i for rank in epoch.undrawn for i in rank]
    assert len(epoch.all_dropped()) + len(undrawn) == 2


def efficiency_and_fill(policy: str, seed: int) -> tuple[float, float]:
    """Real tokens over what all ranks spend while the dearest works, and over the whole budget of all steps."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6, 1.2, 4000), 16, 4096).astype(np.int64).tolist()
    config = make_config(8192, policy=policy, split_policy="even" if policy == "odb" else "published", window=10**6)
    epoch = drive_epoch(config, strided(lengths, 4))
    dearest = np.array([[step.cost for step in rank] for rank in epoch.steps]).max(axis=0)
    return sum(lengths) / (4 * dearest.sum()), sum(lengths) / (4 * len(dearest) * 8192)


def test_ours_beats_the_published_rule_in_efficiency_and_fill() -> None:
    ours = np.mean([efficiency_and_fill("odb", seed) for seed in range(4)], axis=0)
    published = np.mean([efficiency_and_fill("published", seed) for seed in range(4)], axis=0)
    assert (ours > published + 0.01).all()
