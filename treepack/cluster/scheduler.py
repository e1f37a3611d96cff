"""Run tasks on many machines: the interface between `build-trie` and the program that runs them, `ray.RayScheduler`.

    run    function(*call) for each call    --> results, in this process
    share  a large value                    --> a handle for any number of calls

A task is a plain function of picklable arguments, and may run again after the process that ran it has died. So it
returns the same result for the same arguments, and files that it writes appear whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

Call = tuple[Any, ...]


class Scheduler(Protocol):
    """A program that runs tasks."""

    def share(self, value: Any) -> Any:
        """Return a handle of a large value; as an argument of any number of calls it is the value for the function."""

    def run(self, function: Callable[..., Any], calls: Iterable[Call]) -> Iterator[Any]:
        """Yield `function(*call)` for each of `calls`, in their order.

        Raises:
            TreepackError: a task raised it, or the processes that ran a task died several times.
        """
