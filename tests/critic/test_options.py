"""Options that contradict each other."""

from __future__ import annotations

import pytest

import odb
from odb.errors import ConfigError


def test_skipped_steps_do_not_go_with_accumulation() -> None:
    # A rank whose optimizer step ends in skipped micro-steps would never see sync_gradients.
    with pytest.raises(ConfigError, match=r"tail='skip'.*grad_accum_steps=3.*tail='filler'"):
        odb.ODBConfig(token_budget=8, tail="skip", grad_accum_steps=3)
