"""The planning core, each function called once per distinct input: worlds that agree so far share what comes of it.

The functions are pure (the state space runs `settle` again and again to see that), so that a known result stands for
another call. Inputs are compared by value: arrays by their bytes. What a function returned is known by its identity, so
that a chain of calls is not compared from its beginning. Errors are not kept: such a call is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import numpy as np

from odb.plan import round as rounds
from odb.plan.types import PlanConfig

PURE = ("fill_target", "propose", "encode", "decode_table", "settle", "form", "conclude")
#: Results kept before all are forgotten: bounds the memory.
MOST = 200_000


class Memo:
    """Known results, by function and input."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._made: dict[int, Any] = {}  # by identity: objects that are kept, so that no other one gets theirs

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its results kept."""

        def call(*args: Any, **options: Any) -> Any:
            self._forget_too_many()
            key = (name, *map(self._key, args), *options.items())
            if key not in self._known:
                self._known[key] = self._keep(function(*args, **options))
            return self._known[key]

        return call

    def _forget_too_many(self) -> None:
        if len(self._known) > MOST:
            self._known.clear()
            self._made.clear()

    def _keep(self, result: Any) -> Any:
        if is_dataclass(result):
            self._made[id(result)] = result
            state = getattr(result, "state", None)
            if state is not None:
                self._made[id(state)] = state
        return result

    def _key(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.shape, value.tobytes()
        if id(value) in self._made:
            return "kept", id(value)
        if isinstance(value, PlanConfig):
            self._made[id(value)] = value
            return "kept", id(value)
        if is_dataclass(value):
            return type(value), *(self._key(getattr(value, f.name)) for f in fields(value))
        return value


@contextmanager
def each_input_once() -> Iterator[None]:
    """While inside, the planning core's functions keep their results."""
    memo = Memo()
    with ExitStack() as stack:
        for name in PURE:
            stack.enter_context(mock.patch.object(rounds, name, memo.wrap(name, getattr(rounds, name))))
        yield
