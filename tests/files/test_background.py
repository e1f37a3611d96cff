"""Calls in a second thread: one at a time, in order, and no exception is lost."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from treepack.files.background import BackgroundThread


def test_a_call_runs_beside_this_thread() -> None:
    started, released = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert released.wait(timeout=60)

    with BackgroundThread() as background:
        background.call(wait)
        assert started.wait(timeout=60)  # the call runs, although this thread has not waited for it
        released.set()


def test_calls_run_one_at_a_time_and_in_order() -> None:
    running: list[int] = []
    finished: list[int] = []

    def work(number: int) -> None:
        running.append(number)
        assert running == [number]
        finished.append(running.pop())

    with BackgroundThread() as background:
        for number in range(100):
            background.call(work, number)
            assert len(finished) >= number  # so at most this call is unfinished
    assert finished == list(range(100))


def fail(reason: str) -> None:
    raise ValueError(reason)


def call_all(*reasons: str) -> None:
    with BackgroundThread() as background:
        for reason in reasons:
            background.call(fail, reason)


@pytest.mark.parametrize("reasons", [("first", "second"), ("first",)])
def test_the_next_call_or_the_end_raises_the_exception_of_a_call(reasons: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="first"):
        call_all(*reasons)


@pytest.mark.parametrize("error", [KeyboardInterrupt, CancelledError, ValueError])
def test_an_exception_of_the_block_waits_for_the_running_call(error: type[BaseException]) -> None:
    released = threading.Event()
    finished: list[int] = []

    def work() -> None:
        released.wait(timeout=60)
        finished.append(1)

    def leave(background: BackgroundThread) -> None:
        background.call(work)
        threading.Timer(0.05, released.set).start()
        raise error("of the block")

    with pytest.raises(error, match="of the block"), BackgroundThread() as background:
        leave(background)
    assert finished == [1]
