"""Requests to an engine with a limit on their number, attempts and time; and queries that run side by side.

Engine --with_limits--> Engine        at most n requests under way, each repeated after a temporary failure
queries, sample --run_queries--> results as they are complete
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from treepack.rollout.engine import ABORT, Engine, EngineError, Sampling, Segment, TemporaryError
from treepack.trajectory import Int32

FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled before each further one
LONGEST_PAUSE = 30.0

Result = TypeVar("Result")


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
                    raise EngineError(f"{error} ({attempt} attempts)") from error
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
    coroutines: Iterable[Callable[[], Awaitable[Result]]], *, max_queries: int
) -> AsyncIterator[Result]:
    """Run at most `max_queries` coroutines at a time, and yield each result as soon as it is there.

    When the caller stops or a coroutine raises, the others are cancelled, and awaited before the error goes on.
    """
    waiting = iter(coroutines)
    running: set[asyncio.Task[Result]] = set()
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


async def _awaited(start: Callable[[], Awaitable[Result]]) -> Result:
    return await start()
