"""One function applied to many tasks, in this process or in several.

    tasks --unordered-->   worker, worker, ... --> (number of the task, result), as soon as each task is finished
    tasks --in_order-->    worker, worker, ... --> result, each one held back until all earlier ones are yielded
    tasks --ProcessTeam--> workers that keep a state between tasks, for several rounds of tasks

A worker is a fresh interpreter (the start method "spawn" is safe with threads and works the same on Linux and macOS).
A worker ignores Ctrl-C, never imports torch, and ends at once when this process ends, even if this process is killed.
`in_order` bounds memory: at most `WINDOW` tasks per worker are in the pool or wait for an earlier result.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from treepack.errors import TreepackError, described

_Job = TypeVar("_Job")
_State = TypeVar("_State")
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

# Pieces sent to a worker of `in_order`: the one in work and the next, so that the worker never waits for this process.
_MAX_QUEUED = 2
# Pieces per worker from the first unfinished one on. With 4, the other workers continue while one task is slow.
WINDOW = 4


def in_order(
    prepare: Callable[[_Job], Callable[[_Task], _Result]],
    job: _Job,
    tasks: Iterable[_Task],
    *,
    workers: int = 1,
    min_tasks: int = 1,
) -> Iterator[_Result]:
    """Yield `prepare(job)(task)` for each of `tasks`, in their order; each process calls `prepare` once.

    With several `workers`, all arguments and results are pickled, and the calling script needs its
    `if __name__ == "__main__":` guard. This process does all the work if there are fewer than `min_tasks` tasks.
    An exception from a task, or from the iterator `tasks`, is raised after the results of all earlier tasks.

    Raises:
        TreepackError: a worker died.
    """
    with ProcessTeam(prepare, [job] * workers) as team:
        yield from team.in_order(_call, tasks, min_size=min_tasks)


def unordered(
    prepare: Callable[[_Job], Callable[[_Task], _Result]], job: _Job, tasks: Iterable[_Task], *, workers: int = 1
) -> Iterator[tuple[int, _Result]]:
    """Yield the number of each of `tasks` and `prepare(job)(task)`, in the order in which they are finished.

    A worker gets its next task when it returns a result, so the last tasks should be the cheapest ones. Otherwise as
    `in_order`, but the first exception is raised at once, and memory is bounded by the number of tasks only.

    Raises:
        TreepackError: a worker died.
    """
    with ProcessTeam(prepare, [job] * workers) as team:
        yield from team.unordered(_call, tasks)


def _call(work: Callable[[_Task], _Result], task: _Task) -> _Result:
    return work(task)


def batched(items: Iterable[_Task]) -> Iterator[list[_Task]]:
    """Yield `items` in lists of 16; the last list may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, 16)):
        yield batch


def _take(
    tasks: Iterator[_Task], total: int, size: Callable[[_Task], int] = lambda task: 1
) -> tuple[list[_Task], Exception | None]:
    """Return the first of `tasks` whose sizes reach `total`, and the exception that ended them (or StopIteration)."""
    taken: list[_Task] = []
    try:
        while total > 0:
            taken.append(next(tasks))
            total -= size(taken[-1])
    except Exception as error:
        return taken, error
    return taken, None


def _raise_unless_ended(failure: Exception | None) -> None:
    if failure is not None and not isinstance(failure, StopIteration):
        raise failure


def _value(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


class ProcessTeam(Generic[_State]):
    """Processes with a state each, which they keep from one task to the next, and between several rounds of tasks.

    `jobs` has the argument of `prepare` for each worker, and `prepare` returns the state. Workers start when there is
    work for them. With one job, and if the first round is small, this process is the only member of the team.
    """

    def __init__(self, prepare: Callable[[_Job], _State], jobs: Sequence[_Job]) -> None:
        """Start no process yet."""
        self._prepare, self._jobs = prepare, jobs
        self._here: _State | None = None  # the state, if this process does the work
        # For each worker the numbers of the tasks that it has, in the order of its results.
        self._queues: dict[Connection, deque[int]] = {}
        self._processes = contextlib.ExitStack()

    def __enter__(self) -> ProcessTeam[_State]:
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers, in the middle of a task if they have one."""
        self._processes.close()

    @property
    def here(self) -> _State | None:
        """The state if this process does the work; None if workers do it, or nothing has been done."""
        return self._here

    @property
    def size(self) -> int:
        """Number of processes that work, at least one."""
        return max(1, len(self._queues))

    def in_order(
        self,
        work: Callable[[_State, _Task], _Result],
        tasks: Iterable[_Task],
        *,
        min_size: int = 1,
        size: Callable[[_Task], int] = lambda task: 1,
    ) -> Iterator[_Result]:
        """Yield `work(state, task)` for each of `tasks`, in their order.

        No worker starts if the sizes of all tasks of the first round add up to less than `min_size`. An exception from
        a task, or from the iterator `tasks`, is raised after the results of all earlier tasks.

        Raises:
            TreepackError: a worker died.
        """
        rest = iter(tasks)
        is_open = len(self._jobs) > 1 and self._here is None and not self._queues
        first, failure = _take(rest, min_size if is_open else 0, size)
        if len(self._jobs) == 1 or self._here is not None or failure is not None:
            for task in chain(first, rest if failure is None else ()):
                yield work(self._state(), task)
            _raise_unless_ended(failure)
            return
        # Results come as 1, 0, 2 and wait here: {1: b} -> yield 0, 1 -> {} -> yield 2.
        waiting: dict[int, Any] = {}
        num_yielded = 0
        tasks = chain(first, rest)
        for number, result in self._results(work, tasks, max_queued=_MAX_QUEUED, window=WINDOW * len(self._jobs)):
            waiting[number] = result
            while num_yielded in waiting:
                yield _value(waiting.pop(num_yielded))
                num_yielded += 1

    def unordered(
        self, work: Callable[[_State, _Task], _Result], tasks: Iterable[_Task]
    ) -> Iterator[tuple[int, _Result]]:
        """Yield the number of each of `tasks` and `work(state, task)`, in the order in which they are finished.

        Raises:
            TreepackError: a worker died.
        """
        if len(self._jobs) == 1 or self._here is not None:
            for number, task in enumerate(tasks):
                yield number, work(self._state(), task)
            return
        for number, result in self._results(work, iter(tasks), max_queued=1, window=None):
            yield number, _value(result)

    def each(self, work: Callable[[_State, None], _Result]) -> list[_Result]:
        """Return `work(state, None)` of every process that has worked before.

        Raises:
            TreepackError: a worker died.
        """
        if self._here is not None:
            return [work(self._here, None)]
        with _death_of_a_worker_is_an_error():
            for worker in self._queues:
                worker.send((work, None))
            return [_value(worker.recv()) for worker in self._queues]

    def _state(self) -> _State:
        if self._here is None:
            self._here = self._prepare(self._jobs[0])
        return self._here

    def _results(
        self, work: Any, tasks: Iterator[Any], *, max_queued: int, window: int | None
    ) -> Iterator[tuple[int, Any]]:
        """Yield number and result of each task as soon as it is finished; the exception of a task is a result.

        A worker has at most `max_queued` tasks at a time. A task is taken from `tasks` only if a worker can have it
        and it is less than `window` tasks after the first unfinished one.
        """
        queues = self._queues
        waiting: deque[tuple[int, Any]] = deque()  # tasks that no worker has yet
        unfinished: set[int] = set()
        num_taken = 0
        failure: Exception | None = None
        with _death_of_a_worker_is_an_error():
            while True:
                # An error from `tasks` is raised at the end, after the results of the tasks before it.
                if failure is None:
                    room = len(self._jobs) - len(waiting)
                    if window is not None:
                        # Pieces 3, 5, 6 of 7 unfinished -> 7 - 3 = 4 of the window are in use.
                        room = min(room, window - (num_taken - min(unfinished, default=num_taken)))
                    taken, failure = _take(tasks, room)
                    waiting.extend(enumerate(taken, num_taken))
                    unfinished.update(range(num_taken, num_taken + len(taken)))
                    num_taken += len(taken)
                # All workers are started before any result is awaited: a start takes longer than a small task.
                while len(queues) < len(self._jobs) and len(waiting) > sum(not numbers for numbers in queues.values()):
                    queues[_start_worker(self._prepare, self._jobs[len(queues)], self._processes)] = deque()
                while waiting and len(queues[idlest := min(queues, key=lambda each: len(queues[each]))]) < max_queued:
                    number, task = waiting.popleft()
                    idlest.send((work, task))
                    queues[idlest].append(number)
                if not unfinished:
                    break
                for ready in wait([worker for worker, numbers in queues.items() if numbers]):
                    assert isinstance(ready, Connection)
                    number = queues[ready].popleft()
                    result = ready.recv()
                    unfinished.remove(number)
                    yield number, result
        _raise_unless_ended(failure)


def _start_worker(prepare: Any, job: Any, stack: contextlib.ExitStack) -> Connection:
    """Start a process that runs `_serve`, and return the connection to it; `stack` ends the process."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    resource_tracker.ensure_running()  # it changes the signal mask when it starts, so start it before the mask is set
    process = context.Process(target=_serve, args=(theirs, prepare, job), daemon=True)
    # The new interpreter inherits this mask. A Ctrl-C during its start then waits until `_serve` ignores it, and does
    # not print the traceback of a half-imported module.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    # ExitStack calls these in reverse order: close the connection, terminate, join.
    for end in (process.join, process.terminate, ours.close):
        stack.callback(end)
    return ours


@contextlib.contextmanager
def _death_of_a_worker_is_an_error() -> Iterator[None]:
    """Turn a broken connection to a worker into a TreepackError of one sentence."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise TreepackError(
            "a worker process died; if memory ran out, use fewer workers or one, and if your own script starts the "
            "workers, put its code under `if __name__ == '__main__':`"
        ) from None


def _prepare_process() -> None:
    """Make a worker ignore Ctrl-C, start without torch, and tokenise in one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the process that started this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # None makes `import torch` fail: transformers imports torch if it can, which costs 2 s and 200 MB per worker.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or each worker has as many threads as there are cores


def _serve(connection: Connection, prepare: Any, job: Any) -> None:
    """Run in a worker: return the result of each task until the other side is gone."""
    _prepare_process()
    tasks: SimpleQueue[Any] = SimpleQueue()
    # A thread receives, for two reasons. With large tasks and results, each side would otherwise block in `send` until
    # the other side receives. The second reason: the thread notices during a task that the other side has ended.
    Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    states: list[Any] = []
    while True:
        work, task = tasks.get()
        try:
            if not states:
                states.append(prepare(job))  # inside `try`: a failing `prepare` is the result of the first task
            result: Any = work(states[0], task)
        except BaseException as error:  # the other side raises it; Ctrl-C never comes here
            result = error if isinstance(error, Exception) else RuntimeError(described(error))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(pickle.dumps(result, protocol=5))  # 5: arrays without another copy


def _receive(connection: Connection, tasks: SimpleQueue[Any]) -> None:
    try:
        while True:
            tasks.put(connection.recv())
    except (EOFError, ConnectionResetError):
        os._exit(0)  # not sys.exit, which would end this thread only


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a stage of a command.

    Attributes:
        stage: its name, such as "reading".
        done: units so far.
        total: units in total, None if it is unknown.
        unit: name of a unit in the plural; empty for a stage that counts nothing.
        share: share of the stage that is done, if it follows from something other than `done` and `total`: bytes of
            the input, or the sizes of trees.
    """

    stage: str
    done: int
    total: int | None
    unit: str
    share: float | None = None


ReportProgress = Callable[[Progress], None]


def with_progress(
    items: Iterable[_Task],
    progress: ReportProgress | None,
    stage: str,
    *,
    unit: str,
    total: int | None = None,
    size: Callable[[_Task], int] = lambda item: 1,
    share: Callable[[], float | None] = lambda: None,
) -> Iterator[_Task]:
    """Yield `items`, and after each one call `progress` with the sum of their sizes so far and the present `share`."""
    done = 0
    for item in items:
        yield item
        if progress is not None:
            done += size(item)
            progress(Progress(stage, done, total, unit, share()))
