"""What every test shares."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
import tally
from hypothesis import HealthCheck, settings

# One thread per process: the multi-process tests share few cores. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A TCP store's client looks up the name of ::ffff:127.0.0.1; a name server that drops the question costs five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A job in the background of a script ignores Ctrl-C, and so would every program that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Same examples in every run, so that a red run can be repeated; `HYPOTHESIS_PROFILE=explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session", autouse=True)
def rank_processes() -> Iterator[None]:
    """The pool of rank processes ends with the session."""
    yield
    ranks.shutdown()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test process among several leaves its counts to the one that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["explored"] = dict(tally.COUNTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The one that prints the summary takes the counts of a test process that has ended."""
    tally.COUNTS.update(getattr(node, "workeroutput", {}).get("explored", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much was explored."""
    if tally.COUNTS:
        text = ", ".join(f"{number:,} {what}" for what, number in sorted(tally.COUNTS.items()))
        terminalreporter.write_line(f"explored: {text}")
