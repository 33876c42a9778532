"""Everything that can go wrong in a run, with real processes: every rank gets an error that says who and why, and ends.

`program.FAILURES` is the table; each row is run here on two ranks, some on three, and under `make soak` all of them on
two and three ranks, with every start method, without workers, and under torchrun.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from failing import Launcher, Result, run_under_torchrun
from program import FAILURES, NUM_SAMPLES, TIMEOUT_S, Sees, failure_named
from variants import ONCE_WRONG, VARIANTS

pytestmark = pytest.mark.timeout(120)

LIMIT_S = 60.0
ON_THREE = (
    "dataset raises",
    "training process killed",
    "training process of rank 0 killed",
    "another dataset length",
    "training loop raises",
)
#: Mostly waiting.
SLOW = ("all of rank 0 stopped",)
METHODS = ("fork", "spawn", "forkserver", "inline")
#: How long processes may take to start that have to import everything, before their time limits begin.
STARTS_S = {"spawn": 20.0, "forkserver": 20.0}


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


def check(name: str, result: Result, has_statuses: bool = True, starts_s: float = 0.0) -> None:
    """Every rank saw what it must, in time, and nothing is left of its loader."""
    failure, world_size = failure_named(name), len(result.reports)
    if any(report and "can't mount" in report["text"] for report in result.reports):
        pytest.skip("a /dev/shm of its own needs the right to mount")
    culprit = failure.rank_of_culprit(world_size)
    for rank, report in enumerate(result.reports):
        expected = failure.culprit if rank == culprit else failure.peers
        if expected is None:
            assert report is None, result
            assert not has_statuses or result.statuses[rank] == -9, result
            continue
        if report is None and not has_statuses and rank == culprit and result.event["what"]:
            continue  # torchrun ended it when it had just been woken
        assert report is not None, f"rank {rank} wrote no report\n{result}"
        check_report(report, expected, culprit, f"rank {rank}\n{result}")
        if rank != culprit and failure.names_culprit and expected.types:
            assert culprit in report["ranks"], f"rank {rank} does not name rank {culprit}\n{result}"
        if has_statuses:
            assert (result.statuses[rank] != 0) == bool(expected.types), f"status of rank {rank}\n{result}"
    waits = failure.before or failure.limit_s > TIMEOUT_S + 3
    check_times(result, culprit, failure.limit_s + (starts_s if waits else 0))
    if failure.peers.types == ():
        ids = [i for report in result.reports if report for i in report["ids"]]
        assert sorted(ids) == list(range(NUM_SAMPLES)), result


def check_report(report: dict, expected: Sees, culprit: int, context: str) -> None:
    if not expected.types:
        assert report["types"] == [], context
    else:
        assert set(expected.types) & set(report["types"]), f"{expected.types} is not what was raised on {context}"
    missing = [word for word in expected.words if word.replace("{c}", str(culprit)) not in report["text"]]
    assert not missing, f"{missing} is missing on {context}"
    assert report["left"] == [], f"left behind: {report['left']} on {context}"


def check_times(result: Result, culprit: int, limit_s: float) -> None:
    """From the failure to the error, on all ranks but one that was stopped and can't see anything before it is woken."""
    if not result.event:  # nothing happens at a certain moment: ranks that disagree learn it when they first meet
        return
    for rank, report in enumerate(result.reports):
        if report is None or (result.event["what"] and rank == culprit):
            continue
        seconds = report["at"] - result.event["at"]
        assert seconds < limit_s, f"rank {rank} took {seconds:.1f} s\n{result}"


@pytest.mark.parametrize("name", [name for name in FAILURES if name not in SLOW])
def test_two_ranks(launcher: Launcher, name: str) -> None:
    check(name, launcher.run(name, 2, "fork", LIMIT_S))


@pytest.mark.parametrize("name", ON_THREE)
def test_three_ranks(launcher: Launcher, name: str) -> None:
    check(name, launcher.run(name, 3, "fork", LIMIT_S))


@pytest.mark.parametrize(("name", "world_size", "method"), ONCE_WRONG)
def test_what_was_wrong_once(launcher: Launcher, name: str, world_size: int, method: str) -> None:
    check(name, launcher.run(name, world_size, method, LIMIT_S), starts_s=STARTS_S.get(method, 0.0))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "world_size", "method"), VARIANTS)
def test_other_ranks_places_and_options(launcher: Launcher, name: str, world_size: int, method: str) -> None:
    check(name, launcher.run(name, world_size, method, LIMIT_S), starts_s=STARTS_S.get(method, 0.0))


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", FAILURES)
def test_every_start_method(launcher: Launcher, name: str, world_size: int, method: str) -> None:
    if method == "inline" and not FAILURES[name].inline:
        pytest.skip("there is no such process without workers")
    result = launcher.run(name, world_size, method, LIMIT_S)
    check(name, result, starts_s=STARTS_S.get(method, 0.0))


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", FAILURES)
def test_under_torchrun(name: str, world_size: int) -> None:
    result, status = run_under_torchrun(name, world_size, "fork", 100)
    check(name, result, has_statuses=False)
    assert (status != 0) == bool(FAILURES[name].peers.types), result
