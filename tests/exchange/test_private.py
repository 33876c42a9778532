"""Notices when PyTorch changes one of the private names that `odb.exchange._private` isolates."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import odb.exchange
from odb.exchange import _private


@pytest.mark.timeout(30)
def test_default_store_is_the_one_that_the_default_group_was_made_with() -> None:
    mine: Any = dist.HashStore()
    dist.init_process_group("gloo", store=mine, rank=0, world_size=1)
    try:
        store = _private.default_store()
        assert store is _private.default_store(), "its identity tells one default group from the next"
        before = mine.num_keys()
        store.set("odb-test", "1")
        assert mine.num_keys() == before + 1
        assert store.get("odb-test") == b"1"
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(30)
def test_gloo_group_is_made_on_the_given_device_with_the_given_limit() -> None:
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    group = _private.gloo_group(dist.HashStore(), 0, 1, [device], timedelta(seconds=7))
    value = torch.ones(1, dtype=torch.int64)
    group.allreduce([value]).wait()
    assert (group.rank(), group.size(), value.item()) == (0, 1, 1)
    assert group.options._timeout == timedelta(seconds=7)
    assert len(group.options._devices) == 1


def test_no_other_file_uses_private_names_of_pytorch() -> None:
    for path in Path(odb.exchange.__file__).parent.glob("*.py"):
        if path.name == "_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                base = node.value
                assert isinstance(base, ast.Name), f"{path.name}:{node.lineno}: {ast.unparse(node)}"
                assert base.id not in ("dist", "torch"), f"{path.name}:{node.lineno}: {ast.unparse(node)}"
