"""Requests have a limit, attempts and a time; queries that run side by side lose nothing at errors and cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial

import numpy as np
import pytest

from support import virtual_time
from support.tree_estimates import PROMPT, grow, grow_tree, two_speeds
from support.watched_engines import FailingEngine, Request, WatchedEngine, fingerprint
from treepack.rollout.engine import Engine, EngineError, Segment, TemporaryError
from treepack.rollout.options import TreeOptions
from treepack.rollout.requests import LONGEST_PAUSE, LimitedEngine, all_or_none, run_queries
from treepack.rollout.simulated import SimulatedEngine
from treepack.rollout.tree import Tree

OPTIONS = TreeOptions(width=3, segment=4, depth=None, max_tokens=12)


def simulated() -> SimulatedEngine:
    return SimulatedEngine(two_speeds())


def limited(engine: Engine, *, max_requests: int = 4, attempts: int = 3, timeout: float = 60) -> LimitedEngine:
    return LimitedEngine(engine, max_requests=max_requests, attempts=attempts, timeout=timeout)


async def ask(engine: Engine, seed: int = 1) -> list[Segment]:
    return await engine.extend(PROMPT, count=2, max_tokens=5, seed=seed)


async def time_of(engine: Engine) -> float:
    """Seconds until a request has failed or has its answer."""
    with suppress(EngineError):
        await ask(engine)
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("failure", ["lost", "slow", "abort"])
def test_temporary_failures_change_nothing_but_the_time(failure: str) -> None:
    failing = FailingEngine(simulated(), lambda number: failure if number % 3 else "")
    tree = virtual_time.run(grow_tree("q0", limited(failing), OPTIONS))
    assert fingerprint(tree) == fingerprint(grow(simulated(), OPTIONS)[0])
    assert failing.attempts > tree.usage.requests


def test_a_repeated_request_is_the_same_request() -> None:
    watched = WatchedEngine(simulated())
    failing = FailingEngine(watched, lambda number: "abort" if number < 2 else "")
    virtual_time.run(ask(limited(failing)))
    assert watched.requests == [Request((1,), 2, 5, 1)] * 3


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        ("lost", r"^the connection was lost \(3 attempts\)$"),
        ("slow", r"^the engine has not answered within 60 seconds; give a longer --timeout \(3 attempts\)$"),
        ("abort", r"^the engine aborted a continuation; check that the server keeps running \(3 attempts\)$"),
    ],
)
def test_the_error_of_the_last_attempt_is_the_error(failure: str, sentence: str) -> None:
    failing = FailingEngine(simulated(), lambda number: failure)
    with pytest.raises(EngineError, match=sentence) as caught:
        virtual_time.run(ask(limited(failing)))
    assert not isinstance(caught.value, TemporaryError)
    assert failing.attempts == 3


def test_a_single_attempt_is_not_counted_in_its_error() -> None:
    with pytest.raises(EngineError, match=r"^the connection was lost$"):
        virtual_time.run(ask(limited(FailingEngine(simulated(), lambda number: "lost"), attempts=1)))


def test_pauses_between_attempts_double_up_to_the_longest() -> None:
    for attempts, seconds in ((1, 0), (2, 0.5), (3, 1.5), (7, 31.5), (9, 31.5 + 2 * LONGEST_PAUSE)):
        engine = limited(FailingEngine(simulated(), lambda number: "lost"), attempts=attempts)
        assert virtual_time.run(time_of(engine)) == pytest.approx(seconds)


def test_a_failure_for_good_is_not_repeated() -> None:
    class Refusing(SimulatedEngine):
        calls = 0

        async def extend(self, *arguments: object, **options: object) -> list[Segment]:
            self.calls += 1
            raise EngineError("no such model")

    engine = Refusing(two_speeds())
    with pytest.raises(EngineError, match=r"^no such model$"):
        virtual_time.run(ask(limited(engine)))
    assert engine.calls == 1


def test_at_most_the_given_number_of_requests_is_under_way() -> None:
    watched = WatchedEngine(simulated(), order=np.random.default_rng(0))
    engine = limited(watched, max_requests=3)
    virtual_time.run(all_or_none(ask(engine, seed) for seed in range(20)))
    assert watched.most_under_way == 3


def test_time_in_the_queue_does_not_count_towards_the_timeout() -> None:
    async def one_second() -> None:
        await asyncio.sleep(1)

    engine = limited(SimulatedEngine(two_speeds(), pause=one_second), max_requests=1, attempts=1, timeout=1.5)
    assert len(virtual_time.run(all_or_none(ask(engine, seed) for seed in range(5)))) == 5


def test_a_request_that_failed_leaves_room_for_others_during_its_pause() -> None:
    engine = limited(FailingEngine(simulated(), lambda number: "lost" if number == 0 else ""), max_requests=1)

    async def both() -> list[float]:
        return await all_or_none([time_of(engine), time_of(engine)])

    assert virtual_time.run(both()) == [0.5, 0.0]


async def after(seconds: float, value: str, *, fails: bool = False) -> str:
    await asyncio.sleep(seconds)
    if fails:
        raise EngineError(value)
    return value


async def collect(*starts: Callable[[], Awaitable[object]], max_queries: int = 9) -> tuple[list[object], str | None]:
    """The results that were yielded, and the error after them."""
    results: list[object] = []
    try:
        async with aclosing(run_queries(starts, max_queries=max_queries)) as running:
            async for result in running:
                results.append(result)
    except EngineError as error:
        return results, str(error)
    return results, None


def test_results_are_yielded_in_the_order_in_which_they_are_complete() -> None:
    starts = [partial(after, seconds, f"{seconds}") for seconds in (3, 1, 2)]
    assert virtual_time.run(collect(*starts)) == (["1", "2", "3"], None)
    assert virtual_time.run(collect(*starts, max_queries=1)) == (["3", "1", "2"], None)


def test_results_that_are_complete_with_an_error_are_yielded_before_the_error() -> None:
    good = [partial(after, 1, f"good {i}") for i in range(12)]
    starts = [partial(after, 1, "broken", fails=True), *good, partial(after, 2, "late")]
    results, error = virtual_time.run(collect(*starts, max_queries=20))
    assert (sorted(map(str, results)), error) == (sorted(f"good {i}" for i in range(12)), "broken")


def test_an_error_cancels_the_other_queries_and_awaits_their_ends() -> None:
    watched = WatchedEngine(simulated(), order=np.random.default_rng(0))

    async def run() -> None:
        starts = [partial(grow_tree, f"q{i}", watched, OPTIONS) for i in range(4)]
        assert await collect(partial(after, 0.7, "broken", fails=True), *starts) == ([], "broken")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(run())
    assert watched.cancelled > 0
    assert watched.answered + watched.cancelled == len(watched.requests)


def test_leaving_the_loop_cancels_the_rest() -> None:
    watched = WatchedEngine(simulated(), order=np.random.default_rng(0))

    async def run() -> None:
        starts = [partial(grow_tree, f"q{i}", watched, OPTIONS) for i in range(6)]
        async with aclosing(run_queries(starts, max_queries=3)) as running:
            async for _ in running:
                break
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(run())
    assert watched.cancelled > 0
    assert watched.under_way == 0


class Campaign:
    """Trees of some queries, collected by the loop and saved by the coroutines themselves."""

    num_queries = 4

    def __init__(self) -> None:
        self.engine = WatchedEngine(simulated(), order=np.random.default_rng(0))
        self.limited = limited(FailingEngine(self.engine, lambda number: "lost" if number % 5 == 2 else ""))
        self.yielded: list[Tree] = []
        self.saved: list[Tree] = []

    async def one(self, key: str) -> Tree:
        tree = await grow_tree(key, self.limited, OPTIONS)
        self.saved.append(tree)
        return tree

    async def all(self) -> None:
        starts = [partial(self.one, f"q{i}") for i in range(self.num_queries)]
        async with aclosing(run_queries(starts, max_queries=2)) as running:
            async for tree in running:
                self.yielded.append(tree)
                await asyncio.sleep(0.01)

    async def cancelled_at(self, turn: int) -> bool:
        """Cancel the loop at this turn of the event loop, and return True if it was complete before."""
        task = asyncio.ensure_future(self.all())
        virtual_time.call_at_turn(turn, task.cancel)
        with suppress(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert self.engine.under_way == 0
        assert self.engine.answered + self.engine.cancelled == len(self.engine.requests)
        return not task.cancelled()


def check_cancels(turns: range) -> int:
    """Cancel at each of these turns, and return the number of cancels that the engine saw."""
    expected = {tree.query.key: fingerprint(tree) for tree in grow(simulated(), OPTIONS, Campaign.num_queries)}
    seen = 0
    for turn in turns:
        campaign = Campaign()
        complete = virtual_time.run(campaign.cancelled_at(turn))
        # Every tree that was yielded or saved is a whole one, and no yielded one is missing from the saved ones.
        for trees in (campaign.yielded, campaign.saved):
            assert all(fingerprint(tree) == expected[tree.query.key] for tree in trees)
        assert {id(tree) for tree in campaign.yielded} <= {id(tree) for tree in campaign.saved}
        seen += campaign.engine.cancelled
        if complete:
            assert len(campaign.yielded) == Campaign.num_queries
            return seen
    raise AssertionError("the queries take more turns than were tried")


def test_a_cancel_at_any_turn_loses_no_tree_and_leaves_no_task_running() -> None:
    assert check_cancels(range(1, 10_000, 3)) > 50
