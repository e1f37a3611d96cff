"""Run a coroutine on a clock that jumps: sleeps and timeouts take no time, and happen in the order of their times."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting for `timeout` seconds, move the clock."""

    now = 0.0
    turns = 0
    event: tuple[int, Callable[[], object]] = (-1, lambda: None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self.turns += 1
        if self.turns == self.event[0]:
            self.event[1]()
        elif not ready:
            assert timeout is not None, "every task waits for another one"
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _Jumping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Like asyncio.run; `asyncio.get_running_loop().time()` starts at 0."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)


def call_at_turn(turn: int, callback: Callable[[], object]) -> None:
    """Call `callback` before so many turns of the running loop from now, between two steps of tasks."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.clock.event = (loop.clock.turns + turn, callback)
