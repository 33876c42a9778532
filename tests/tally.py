"""What the explorer's tests explored, counted over a run; tests/conftest.py says it at the end."""

from __future__ import annotations

from collections import Counter

COUNTS: Counter[str] = Counter()


def count(what: str, number: int) -> None:
    """Adds to what the summary says."""
    COUNTS[what] += number
