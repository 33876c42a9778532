"""A process that is stopped, not dead: nothing breaks, nothing answers."""

from __future__ import annotations

import os
import signal

import pytest

import odb
from odb.errors import ProcessDied
from odb.testing import LengthsDataset, collate


@pytest.mark.timeout(60)
def test_a_stopped_collate_process_is_an_error_after_the_time_limit() -> None:
    with odb.ODBDataLoader(
        LengthsDataset([50] * 400), token_budget=200, num_workers=1, collate_fn=collate, timeout_s=1.0
    ) as loader:
        batches = iter(loader)
        next(batches)
        os.kill(loader._backend.pid, signal.SIGSTOP)
        with pytest.raises(ProcessDied, match=r"is stopped .*timeout_s=1"):
            for _ in range(400):  # more than there can be
                next(batches)
