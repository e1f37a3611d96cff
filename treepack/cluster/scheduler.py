"""Run tasks on many machines, or in this process: the one interface between the stages and the program that runs them.

    run    function(*call) for each call                --> results, in this process
    keep   function(*call) -> (table, summary)          --> a handle of each table, which stays there; its summary
    share  a large value                                --> a handle for any number of calls

A stage is a plain function of picklable arguments, and may run again after the process that ran it has died. So it
returns the same result for the same arguments, and files that it writes appear whole (`files.task_output`).

`LocalScheduler` runs everything in this process, and `ray.RayScheduler` on a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import pyarrow as pa

Call = tuple[Any, ...]
TableHandle = Any
"""A table that stays on the machine that made it; as an argument of a call, the function gets the table itself."""


class Scheduler(Protocol):
    """A program that runs tasks."""

    def share(self, value: Any) -> Any:
        """Return a handle of a large value; as an argument of any number of calls it is the value for the function."""

    def run(self, function: Callable[..., Any], calls: Iterable[Call]) -> Iterator[Any]:
        """Yield `function(*call)` for each of `calls`, in their order.

        Raises:
            TreepackError: a task raised it, or the processes that ran a task died several times.
        """

    def keep(
        self, function: Callable[..., tuple[pa.Table, Any]], calls: Iterable[Call]
    ) -> Iterator[tuple[TableHandle, Any]]:
        """Yield for each of `calls`, in their order, a handle of the table and the summary that `function` returns.

        Raises:
            TreepackError: as `run`.
        """


class LocalScheduler:
    """The scheduler that runs every task in this process; the slow twin of all others."""

    def share(self, value: Any) -> Any:
        """Return `value`."""
        return value

    def run(self, function: Callable[..., Any], calls: Iterable[Call]) -> Iterator[Any]:
        """Yield `function(*call)` for each of `calls`."""
        for call in calls:
            yield function(*call)

    def keep(
        self, function: Callable[..., tuple[pa.Table, Any]], calls: Iterable[Call]
    ) -> Iterator[tuple[TableHandle, Any]]:
        """Yield `function(*call)` for each of `calls`."""
        return self.run(function, calls)
