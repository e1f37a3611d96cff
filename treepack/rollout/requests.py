"""Requests to an engine with a limit on their number, attempts and time; and queries that run side by side.

Engine --LimitedEngine--> Engine      at most n requests under way, each repeated after a temporary failure
coroutines --run_queries--> results as they are complete
coroutines --all_or_none--> results in order, or the first error
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from treepack.rollout.engine import ABORT, Engine, EngineError, Segment, TemporaryError
from treepack.rollout.options import Sampling
from treepack.trajectory import Int32

FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled before each further one
LONGEST_PAUSE = 30.0

_Result = TypeVar("_Result")


class LimitedEngine:
    """An engine that lets at most `max_requests` calls through, and repeats calls that failed for now.

    A call has `timeout` seconds an attempt and `attempts` attempts. The repeated request is the same, seed included.
    Continuations that the engine aborted are asked for again.
    """

    def __init__(self, engine: Engine, *, max_requests: int, attempts: int, timeout: float) -> None:
        self.engine = engine
        self.attempts = attempts
        self.timeout = timeout
        self._room = asyncio.Semaphore(max_requests)

    @property
    def sampling(self) -> Sampling:
        """The distribution of the engine."""
        return self.engine.sampling

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Continue `ids` like the engine itself.

        Raises:
            EngineError: the last attempt failed, or an attempt failed for good.
        """
        pause = FIRST_PAUSE
        for attempt in range(1, self.attempts + 1):
            try:
                return await self._attempt(ids, count=count, max_tokens=max_tokens, seed=seed)
            except TemporaryError as error:
                if attempt == self.attempts:
                    raise EngineError(f"{error} ({attempt} attempts)" if attempt > 1 else str(error)) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("unreachable")

    async def _attempt(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        # The time counts from the start of the request, not from its place in the queue.
        async with self._room:
            try:
                async with asyncio.timeout(self.timeout):
                    segments = await self.engine.extend(ids, count=count, max_tokens=max_tokens, seed=seed)
            except TimeoutError as error:
                raise TemporaryError(
                    f"the engine has not answered within {self.timeout:g} seconds; give a longer --timeout"
                ) from error
        if any(segment.finish == ABORT for segment in segments):
            raise TemporaryError("the engine aborted a continuation; check that the server keeps running")
        return segments

    async def publish(self, version: str) -> None:
        """Announce new weights to the engine."""
        await self.engine.publish(version)

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()


async def run_queries(
    coroutines: Iterable[Callable[[], Awaitable[_Result]]], *, max_queries: int
) -> AsyncGenerator[_Result]:
    """Run at most `max_queries` coroutines at a time, and yield each result as soon as it is complete.

    If a coroutine raises, the others are cancelled and awaited before the error reaches the caller. Use it inside
    `contextlib.aclosing`: then the same happens when the caller leaves its loop or is cancelled. A cancelled caller
    never gets the results that were complete but not yielded yet; a coroutine that saves its result itself, as its
    last step, loses none.
    """
    assert max_queries > 0
    waiting = iter(coroutines)
    running: set[asyncio.Task[_Result]] = set()
    try:
        while True:
            while len(running) < max_queries and (start := next(waiting, None)) is not None:
                running.add(asyncio.ensure_future(_awaited(start)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            # Results first, so that the error of one query does not lose a tree that is complete.
            for task in sorted(done, key=lambda task: task.exception() is not None):
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _awaited(start: Callable[[], Awaitable[_Result]]) -> _Result:
    return await start()


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run `coroutines` side by side and return their results in order.

    When one raises, the others are cancelled, and awaited before its error reaches the caller (`asyncio.gather` leaves
    them running).
    """
    failure: BaseException | None = None
    tasks: list[asyncio.Task[_Result]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:
        raise failure
    return [task.result() for task in tasks]
