"""What was explored, counted over a run."""

from __future__ import annotations

from collections import Counter

COUNTS: Counter[str] = Counter()


def count(what: str, number: int) -> None:
    """Adds to what the summary at the end of the run says."""
    COUNTS[what] += number
