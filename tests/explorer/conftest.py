"""How much was explored, at the end of the run."""

from __future__ import annotations

import pytest
from tally import COUNTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        text = ", ".join(f"{number:,} {what}" for what, number in sorted(COUNTS.items()))
        terminalreporter.write_line(f"explored: {text}")
