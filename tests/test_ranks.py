"""The pool of rank processes itself: what the other multi-process tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = pytest.mark.timeout(120)


def summed(rank: int, world_size: int, offset: int) -> tuple[int, int, int]:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return int(total), dist.get_world_size(), os.getpid()


def raise_on(rank: int, world_size: int, culprit: int) -> str:
    if rank == culprit:
        raise ValueError(f"no good on {rank}")
    return "fine"


def hang_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        a_place_to_hang()


def a_place_to_hang() -> None:
    threading.Event().wait()


def die_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        print("my last words", flush=True)
        os._exit(3)
    a_place_to_hang()


def leave_process(rank: int, world_size: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


def leave_orphan(rank: int, world_size: int) -> None:
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.wait()


def leave_thread(rank: int, world_size: int) -> None:
    threading.Thread(target=time.sleep, args=(1000,), name="left-over", daemon=True).start()


def leave_shm(rank: int, world_size: int, name: str) -> None:
    Path("/dev/shm", name).write_bytes(b"x")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_a_gloo_group_and_live_on_from_call_to_call(world_size: int) -> None:
    first = ranks.values(world_size, summed, 10)
    again = ranks.values(world_size, summed, 20)
    assert [r[:2] for r in first] == [(sum(range(world_size)) + 10 * world_size, world_size)] * world_size
    assert [r[2] for r in first] == [r[2] for r in again]


def test_an_exception_comes_back_with_type_text_and_traceback() -> None:
    fine, bad = ranks.run_ranks(2, raise_on, 1)
    assert fine.value == "fine"
    assert bad.error is not None
    assert (bad.error.type_name, bad.error.text) == ("ValueError", "no good on 1")
    assert "raise_on" in bad.error.traceback and "Exception" in bad.error.bases
    with pytest.raises(AssertionError, match="no good on 1"):
        _ = bad.value


def test_a_hanging_rank_fails_in_time_with_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(ranks.RankTimeout, match=r"ranks \[1\] not done after 0.5 s(?s:.*)a_place_to_hang"):
        ranks.run_ranks(2, hang_on, 1, timeout=0.5)
    assert time.monotonic() - start < 20
    assert ranks.values(2, summed, 0)[0][0] == 1  # a new world stands


def test_a_dead_rank_fails_at_once_with_its_output() -> None:
    start = time.monotonic()
    with pytest.raises(ranks.RankTimeout, match=r"rank 0 died(?s:.*)my last words"):
        ranks.run_ranks(2, die_on, 0, timeout=50)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("fn", "args", "match"),
    [
        (leave_process, (), "processes outlived"),
        (leave_orphan, (), "processes outlived"),
        (leave_shm, ("odb_test_left_over",), "odb_test_left_over"),
    ],
)
def test_what_is_left_behind_fails_the_run(fn, args, match, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ranks, "SETTLE_S", 0.3)
    try:
        with pytest.raises(AssertionError, match=match):
            ranks.run_ranks(1, fn, *args)
    finally:
        Path("/dev/shm/odb_test_left_over").unlink(missing_ok=True)
    assert ranks.values(1, summed, 0)[0][:2] == (0, 1)


def test_a_leaked_thread_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SETTLE_S", 0.3)
    (result,) = ranks.run_ranks(1, leave_thread)
    assert result.error is not None and "left-over" in result.error.text


def test_everything_goes_when_the_driver_is_killed() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(ranks.__file__).parent)!r})\n" + (
        "import ranks, test_ranks, time\n"
        "if __name__ == '__main__':\n"
        "    ranks.values(2, test_ranks.summed, 0)\n"
        "    print('pool', ranks._worlds._nursery.marker)\n"
        "    time.sleep(1000)\n"
    )
    with ranks.script(code, timeout=50) as running:
        ranks.wait_for_line(running, "pool")
        marker = running.stdout[-1].split()[1]
        assert len(ranks.marked_pids(marker)) == 3
        running.process.kill()
        assert ranks.wait_until(lambda: not ranks.marked_pids(marker), 5)


HELLO = """
import os, sys
print("rank", os.environ.get("RANK"), flush=True)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 7 * (os.environ.get("RANK") == "1"))
"""


def test_a_script_under_torchrun_comes_back_with_output_and_exit_status() -> None:
    done = ranks.run_script(HELLO, nproc=2)
    assert done.returncode == 1
    assert sorted(line.strip() for line in done.stdout) == ["rank 0", "rank 1"]


def test_a_script_that_hangs_is_reported_and_killed() -> None:
    with pytest.raises(AssertionError, match="not done after 1"):
        ranks.run_script("import time; time.sleep(1000)", timeout=1)
