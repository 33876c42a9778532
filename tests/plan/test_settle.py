"""The target rule on hand-made reports: what all ranks do follows from the reports alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driver import make_config

from odb.errors import DisagreementError, PeerFailedError
from odb.plan import wire
from odb.plan.align import settle
from odb.plan.types import Report, Status, Verdict


def report(num_groups: int = 1, num_held: int = 100, status: Status = Status.RUNNING, **other: Any) -> Report:
    facts = {
        "epoch": 2,
        "round": 6,  # windows have grown to their limit
        "status": status,
        "num_held": num_held,
        "num_groups": num_groups,
        "held_tokens": 1000,
        "observed_samples": 0,
        "observed_tokens": 0,
        "emitted_samples": 0,
        "config_digest": 11,
        "agreement_digest": 12,
    }
    return Report(**(facts | other))


def dry(num_groups: int, num_held: int) -> Report:
    status = Status.EXHAUSTED if num_held else Status.DRAINED
    return report(num_groups, num_held, status)


def steps(reports: list[Report], **options: Any) -> tuple[int, bool]:
    agreement = settle(make_config(100, **options), tuple(reports))
    return agreement.num_steps, agreement.last


@pytest.mark.parametrize(
    ("groups", "held", "cap", "expected"),
    [
        ([5, 9, 7], [50, 90, 70], 100, 9),  # the largest
        ([5, 9, 7], [50, 90, 70], 8, 8),  # the cap
        ([5, 9, 7], [50, 90, 6], 100, 6),  # the smallest window, below which no non-empty groups can be formed
        ([5, 9, 0], [50, 90, 0], 100, 9),  # ranks without samples don't count
    ],
)
def test_the_published_target(groups: list[int], held: list[int], cap: int, expected: int) -> None:
    reports = [report(g, n) for g, n in zip(groups, held, strict=True)]
    assert steps(reports, policy="published", max_steps_per_round=cap) == (expected, False)


def test_ranks_that_are_alike_carry_their_worst_groups() -> None:
    assert steps([report(69), report(68), report(67)]) == (27, False)  # two fifths of 66
    assert steps([report(n) for n in (69, 68, 67, 69, 69)]) == (33, False)  # of more than four ranks, half
    assert steps([report(1), report(1)]) == (1, False)


def test_a_rank_of_shorter_samples_is_split_to_drain_with_the_others() -> None:
    long = report(64, observed_samples=10, observed_tokens=5000)
    short = report(10, observed_samples=100, observed_tokens=5000)
    assert steps([long, short]) == (64, False)


def test_windows_that_differ_by_chance_are_carried_not_split() -> None:
    one = report(20, observed_samples=100, observed_tokens=5000)
    two = report(14, observed_samples=100, observed_tokens=4600)
    assert steps([one, two]) == (6, False)  # two fifths of 13, rounded up
    assert steps([one, replace(two, num_groups=5)]) == (4, False)  # of 10: of half of what the largest holds


def test_a_running_rank_is_not_idle_while_it_can_have_more() -> None:
    assert steps([report(64), report(3, num_held=3)]) == (3, False)


def test_dry_ranks_do_not_raise_the_target_while_others_run() -> None:
    assert steps([report(9), dry(60, 100)]) == (4, False)


def test_in_the_end_everything_leaves() -> None:
    agreement = settle(make_config(100), (dry(3, 5), dry(7, 30), dry(0, 0)))
    assert (agreement.num_steps, agreement.last) == (7, True)
    assert agreement.num_emitting.tolist() == [5, 7, 0]
    assert steps([dry(3, 5), dry(7, 30)], max_steps_per_round=4) == (4, False)


def test_all_drained_is_the_end() -> None:
    agreement = settle(make_config(100), (dry(0, 0), dry(0, 0)))
    assert (agreement.verdict, agreement.num_steps, agreement.last) == (Verdict.END, 0, False)


@pytest.mark.parametrize(
    ("groups", "expected"), [([16, 16], 4), ([21, 21], 8), ([3, 3], 4)], ids=["down", "whole", "up"]
)
def test_rounds_hold_whole_accumulation_windows(groups: list[int], expected: int) -> None:
    assert steps([report(g) for g in groups], grad_accum_steps=4) == (expected, False)


def test_the_last_accumulation_window() -> None:
    reports = [dry(5, 30), dry(6, 6)]
    assert steps(reports, grad_accum_steps=4) == (6, True)
    assert steps(reports, grad_accum_steps=4, accum_tail="fill") == (8, True)


def test_a_cap_below_the_accumulation_steps_gives_way() -> None:
    assert steps([report(20)], grad_accum_steps=4, max_steps_per_round=2) == (4, False)


def test_dropping_the_tail_ends_before_the_first_idle_step() -> None:
    assert steps([dry(7, 30), dry(2, 5)], tail="drop") == (5, True)
    assert steps([report(9), dry(2, 3)], tail="drop") == (3, True)
    assert steps([report(9), dry(2, 50)], tail="drop") == (4, False)
    assert settle(make_config(100, tail="drop"), (report(9), dry(0, 0))).verdict == Verdict.END
    assert steps([dry(7, 30), dry(2, 7)], tail="drop", grad_accum_steps=4, accum_tail="fill") == (4, True)


def test_without_join_the_first_drained_rank_ends_the_epoch() -> None:
    assert settle(make_config(100, join=False), (report(9), dry(0, 0))).verdict == Verdict.END
    assert steps([report(9), report(9)], join=False) == (4, False)


def test_a_running_rank_without_samples_is_waited_for_where_idle_steps_are_not_allowed() -> None:
    assert steps([report(9), report(0, 0)], tail="drop") == (0, False)
    assert steps([report(9), report(0, 0)]) == (4, False)


def test_dropping_incomplete_groups_follows_the_smallest_rank() -> None:
    assert steps([report(5), report(3)], drop_last=True) == (3, False)
    assert steps([report(5), report(0)], drop_last=True) == (0, False)
    assert steps([report(5), dry(3, 50)], drop_last=True) == (3, True)
    assert steps([report(3), dry(5, 50)], drop_last=True) == (3, False)
    assert settle(make_config(100, drop_last=True), (report(5), dry(0, 9))).verdict == Verdict.END


def test_closed_ranks() -> None:
    closed = report(status=Status.CLOSED)
    agreement = settle(make_config(100), (report(9), closed, report(9)))
    assert (agreement.verdict, agreement.closed_ranks, agreement.num_steps) == (Verdict.PEER_CLOSED, (1,), 0)
    assert settle(make_config(100), (closed, closed)).verdict == Verdict.ALL_CLOSED


def test_a_failed_rank_is_named() -> None:
    with pytest.raises(PeerFailedError, match="1") as caught:
        settle(make_config(100), (report(), report(status=Status.FAILED)))
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize("field", ["epoch", "round", "config_digest", "agreement_digest", "num_keys", "next_key"])
def test_ranks_that_differ_are_named(field: str) -> None:
    same, other = report(), report(**{field: 99})
    with pytest.raises(DisagreementError, match=field) as caught:
        settle(make_config(100), (other, same, same))
    assert caught.value.ranks == (0,)
    assert "99" in str(caught.value)
    with pytest.raises(DisagreementError) as caught:  # no majority: rank 0 is the measure
        settle(make_config(100), (same, other))
    assert caught.value.ranks == (1,)


def test_errors_stay_short_with_many_ranks() -> None:
    with pytest.raises(DisagreementError, match="and 492 more") as caught:
        settle(make_config(100), (report(),) * 524 + (report(epoch=99),) * 500)
    assert len(caught.value.ranks) == 500 and len(str(caught.value)) < 500


def test_the_digest_depends_on_what_was_decided_and_on_the_past() -> None:
    base = settle(make_config(100), (report(9), report(9))).digest
    assert base == settle(make_config(100), (report(9), report(9))).digest
    for different in ((report(30), report(30)), (report(9), report(9, num_held=3)), (report(9, round=7),) * 2):
        assert base != settle(make_config(100), different).digest
    assert base != settle(make_config(100), (report(9, agreement_digest=13),) * 2).digest
    assert 0 <= base < 2**63


def test_a_row_of_another_version_or_width_is_refused() -> None:
    row = wire.encode(report())
    with pytest.raises(DisagreementError, match=r"rank 3.*version 7") as caught:
        wire.decode(np.concatenate([[7], row[1:]]), 3)
    assert caught.value.ranks == (3,)
    for bad in (row[:-1], np.concatenate([row, [0]]), row[:0]):
        with pytest.raises(DisagreementError, match="rank 2"):
            wire.decode(bad, 2)
    wrong_status = row.copy()
    wrong_status[3] = 77
    with pytest.raises(DisagreementError, match="status 77"):
        wire.decode(wrong_status, 0)


def test_rows_do_not_grow_with_the_window() -> None:
    assert wire.encode(report(1, 1)).shape == wire.encode(report(10**6, 10**9)).shape


def test_digests_ignore_the_order_of_facts_only() -> None:
    assert wire.digest_of({"a": "1", "b": "2"}) == wire.digest_of({"b": "2", "a": "1"})
    assert wire.digest_of({"a": "1", "b": "2"}) != wire.digest_of({"a": "2", "b": "1"})
    assert wire.digest_of({"a": "1\nb='2'"}) != wire.digest_of({"a": "1", "b": "2"})


def test_a_table_says_what_its_reports_say() -> None:
    reports = (report(9), dry(3, 50), report(12, 60, cost_quantiles=tuple(range(10, 18))))
    table = wire.decode_table(np.stack([wire.encode(one) for one in reports]))
    config = make_config(100)
    one, two = settle(config, reports), settle(config, table)
    assert one.digest == two.digest and one.num_steps == two.num_steps
    assert one.caps.tolist() == two.caps.tolist()
    wrong = np.stack([wire.encode(one) for one in reports])
    wrong[1, 3] = 77
    with pytest.raises(DisagreementError, match=r"rank 1.*status 77"):
        wire.decode_table(wrong)
    wrong[2, 0] = 1
    with pytest.raises(DisagreementError, match=r"rank 2.*version 1|rank 1.*status 77"):
        wire.decode_table(wrong)


def test_ranks_that_are_alike_get_common_caps() -> None:
    low, high = tuple(range(10, 90, 10)), tuple(range(30, 110, 10))
    reports = (report(21, cost_quantiles=low), report(21, cost_quantiles=high))
    caps = settle(make_config(100), reports).caps
    assert len(caps) == 8 and caps.tolist() == list(range(90, 10, -10))  # the mean of both, falling
    long = report(16, observed_samples=10, observed_tokens=5000, cost_quantiles=low)
    short = report(6, observed_samples=100, observed_tokens=5000, cost_quantiles=high)
    assert not len(settle(make_config(100), (long, short)).caps)  # shards of unlike samples drain together instead
    assert not len(settle(make_config(100), (dry(5, 9), dry(5, 9))).caps)  # all leaves
    assert not len(settle(make_config(100, policy="published"), reports).caps)


def test_while_windows_grow_less_leaves() -> None:
    early = report(17, round=0)
    assert steps([early] * 5) == (4, False)
    assert steps([early] * 4) == (8, False)  # few ranks: nobody shall wait for samples
