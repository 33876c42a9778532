"""Collation shared out to several processes: the same batches in the same order, errors with their traceback."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch

import odb
from odb.collators import PadCollator
from odb.errors import ConfigError, MeasureError, ProcessDied
from odb.feed import pool as pool_module

pytestmark = pytest.mark.timeout(120)
NUM_SAMPLES = 60


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(5 + index * 7 % 20)
        return {"input_ids": ids, "labels": ids.clone(), "id": index}


def collate(samples: list[Any]) -> dict[str, Any]:
    """Pads, says which process it was, and draws from all three global generators."""
    batch = PadCollator()(samples)
    batch["pid"] = os.getpid()
    batch["drawn"] = (float(torch.rand(())), random.random(), float(np.random.rand()))
    return batch


def slow_collate(samples: list[Any]) -> dict[str, Any]:
    time.sleep(2 * pool_module.SLOW_S)
    return collate(samples)


def failing_collate(samples: list[Any]) -> Any:
    if any(sample["id"] == 17 for sample in samples):
        raise KeyError("a broken image")
    return collate(samples)


def fatal_collate(samples: list[Any]) -> Any:
    if any(sample["id"] == 17 for sample in samples):
        os.kill(os.getpid(), signal.SIGKILL)
    return collate(samples)


def masking_collate(samples: list[Any]) -> Any:
    batch = collate(samples)
    batch["labels"][:, 1] = -100
    return batch


def make_loader(collate_fn: Any = collate, **options: Any) -> odb.ODBDataLoader:
    defaults: dict[str, Any] = {"token_budget": 64, "num_workers": 2, "shuffle": True, "max_steps_per_round": 8}
    return odb.ODBDataLoader(Samples(), collate_fn=collate_fn, **(defaults | options))


def epoch(loader: odb.ODBDataLoader) -> tuple[list[Any], set[int]]:
    """What an epoch gives, without the processes, and these."""
    pids, out = set(), []
    for batch, info in loader.steps():
        pids.add(batch.pop("pid"))
        out.append(([batch[key].tolist() for key in ("input_ids", "labels", "id")], batch["drawn"], info))
    return out, pids


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_batches_of_a_pool_are_those_of_one_process_in_the_same_order(method: str) -> None:
    with (
        make_loader(collate_workers=0) as alone,
        make_loader(collate_workers=2, multiprocessing_context=method) as pool,
    ):
        for _ in range(2):  # the second epoch with the same processes
            expected, one = epoch(alone)
            got, several = epoch(pool)
            assert got == expected
            assert len(one) == 1 and len(several) == 2 and not one & several


def test_every_step_draws_numbers_of_its_own() -> None:
    with make_loader(collate_workers=2) as loader:
        steps = epoch(loader)[0] + epoch(loader)[0]
    assert len({drawn for _, drawn, _ in steps}) == len(steps)


def test_slow_collation_is_shared_out_by_itself() -> None:
    with make_loader(slow_collate) as loader:
        first = epoch(loader)
        second = epoch(loader)
    assert len(first[1] | second[1]) == 3  # the collate process began, two went on
    assert sorted(i for _, _, info in first[0] for i in info.sample_ids) == list(range(NUM_SAMPLES))


def test_collation_that_is_not_slow_stays_where_it_is() -> None:
    with make_loader() as loader:
        assert len(epoch(loader)[1] | epoch(loader)[1]) == 1


def test_an_exception_arrives_with_its_type_and_traceback() -> None:
    with (
        make_loader(failing_collate, collate_workers=2) as loader,
        pytest.raises(KeyError, match="a broken image") as caught,
    ):
        epoch(loader)
    assert "failing_collate" in str(caught.value.__cause__)


def test_a_process_that_dies_is_named_with_the_signal() -> None:
    with make_loader(fatal_collate, collate_workers=2) as loader, pytest.raises(ProcessDied, match="SIGKILL"):
        epoch(loader)


def test_labels_are_counted_again_in_the_pool() -> None:
    with make_loader(masking_collate, collate_workers=2) as loader, pytest.raises(MeasureError, match="loss-bearing"):
        epoch(loader)


def test_an_epoch_that_was_left_leaves_nothing_in_the_next_one() -> None:
    with make_loader(collate_workers=2) as loader, make_loader(collate_workers=0) as alone:
        for batch in loader:
            assert batch["pid"] != os.getpid()
            break
        alone.set_epoch(1)
        assert epoch(loader)[0] == epoch(alone)[0]


def test_a_saved_state_goes_on_with_any_number_of_collate_processes() -> None:
    with make_loader(collate_workers=2) as loader:
        whole = epoch(loader)[0]
    with make_loader(collate_workers=2) as loader:
        steps = loader.steps()
        for _ in range(5):
            next(steps)
        state = loader.state_dict()
    with make_loader(collate_workers=0) as loader:
        loader.load_state_dict(state)
        assert epoch(loader)[0] == whole[5:]


def test_closing_ends_the_processes() -> None:
    loader = make_loader(collate_workers=2)
    pids = epoch(loader)[1]
    loader.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("value", [-1, "all", True, 1.5])
def test_wrong_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="collate_workers"):
        make_loader(collate_workers=value)


def test_a_pool_starts_by_itself_only_where_slow_batches_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited, started = False, []
    pool = pool_module.CollatePool(
        None,  # type: ignore[arg-type]  # nothing is collated
        2,
        is_auto=True,
        start_method=None,
        poll=lambda: None,
        is_awaited=lambda: awaited,
    )
    monkeypatch.setattr(pool, "_start", lambda: started.append(True))
    slow, quick = 2 * pool_module.SLOW_S, pool_module.SLOW_S / 2
    for _ in range(20):
        pool.note(slow)
    assert not started
    awaited = True
    for seconds in [quick, quick, slow, slow] * 5:
        pool.note(seconds)
    assert not started
    for _ in range(6):
        pool.note(slow)
    assert started
