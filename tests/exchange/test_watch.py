"""Who is blamed, and when: the rules without any process."""

from __future__ import annotations

import pytest

from odb.errors import ExchangeTimeout, PeerClosedError, PeerFailedError, PeerLostError
from odb.exchange.watch import CLOSED, FAILED, LOST, TIMEOUT, Beat, Event, Lateness, bounded, kind_of, name_ranks


def beats(*calls: int, counter: int = 1, busy: tuple[int, ...] = ()) -> list[Beat]:
    return [Beat(counter, call, rank in busy, 0) for rank, call in enumerate(calls)]


def lateness(world_size: int = 3, timeout_s: float = 10.0) -> Lateness:
    late = Lateness(world_size, timeout_s, margin_s=1.0, silent_s=2.0)
    late.begin(5, 100.0)
    return late


def test_absent_rank_is_late_only_beyond_limit_and_margin() -> None:
    late = lateness()
    late.observe(beats(5, 4, 5), 101.0)
    assert late.overdue(110.9) is None
    assert late.overdue(111.1) == (1,)


def test_busy_rank_is_not_late_while_its_counter_grows() -> None:
    late = lateness()
    for i in range(50):
        late.observe(beats(5, 4, 5, counter=i, busy=(1,)), 101.0 + i)
        assert late.overdue(101.0 + i) is None
    assert late.overdue(150.0 + 11.1) == (1,), "a counter that stands still is not busy"


def test_working_rank_is_late_though_its_counter_grows() -> None:
    late = lateness()
    for i in range(20):
        late.observe(beats(5, 4, 5, counter=i), 101.0 + i)
    assert late.overdue(120.0) == (1,)


def test_rank_that_arrived_is_not_blamed() -> None:
    late = lateness()
    late.observe(beats(5, 4, 4), 101.0)
    late.observe(beats(5, 4, 5, counter=2), 110.5)
    assert late.overdue(111.5) == (1,)


def test_stopped_rank_that_had_arrived_is_named_by_its_silence() -> None:
    late = lateness()
    for i in range(20):
        now = [Beat(i, 5, False, 0), Beat(3, 5, False, 0), Beat(i, 5, False, 0)]
        late.observe(now, 101.0 + i)
    assert late.overdue(120.0) == (1,)


def test_all_there_and_alive_blames_the_network() -> None:
    late = lateness()
    for i in range(20):
        late.observe(beats(5, 5, 5, counter=i), 101.0 + i)
    assert late.overdue(120.0) == ()
    assert "network" in str(late.error(()))


def test_error_names_ranks_limit_and_call() -> None:
    error = lateness().error((1, 2), global_ranks=(0, 4, 8))
    assert isinstance(error, ExchangeTimeout)
    assert error.ranks == (1, 2)
    assert "ranks 1 (global rank 4), 2 (global rank 8)" in str(error)
    assert "10 s" in str(error)
    assert "exchange 5" in str(error)


@pytest.mark.parametrize(
    ("kind", "expected", "ranks"),
    [(FAILED, PeerFailedError, (3,)), (CLOSED, PeerClosedError, (3,)), (TIMEOUT, ExchangeTimeout, (1,))],
)
def test_events_survive_their_log_and_become_errors(
    kind: str, expected: type[Exception], ranks: tuple[int, ...]
) -> None:
    event = Event(3, kind, 7, (1,))
    assert Event.decode_all((event.encode() * 2).encode()) == [event, event]
    error = event.error("the text", "rank 3")
    assert type(error) is expected
    assert error.ranks == ranks
    assert "rank 3" in str(error)


def test_what_a_rank_found_is_passed_on_as_what_it_is() -> None:
    assert kind_of(ExchangeTimeout("x")) == TIMEOUT
    assert kind_of(PeerLostError("x")) == LOST


def test_beat_survives_the_store() -> None:
    beat = Beat(3, 4, True, 5)
    assert Beat.decode(beat.encode().encode()) == beat


def test_text_is_bounded_at_both_ends_and_valid() -> None:
    text = "ValueError\n" + "é" * 30_000 + "\nline 7"
    cut = bounded(text)
    assert len(cut.encode()) <= 16_000
    assert cut.startswith("ValueError")
    assert cut.endswith("line 7")
    assert bounded("short \ud800") == "short ?"


def test_long_lists_of_ranks_are_cut() -> None:
    assert name_ranks([4]) == "rank 4"
    assert name_ranks(list(range(20))).endswith("15 and 4 more")
