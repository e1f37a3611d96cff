"""A scheduler in this process that sends every function, argument and result through pickle, as other machines do."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from treepack.cluster.scheduler import Call


def pickled_copy(value: Any) -> Any:
    """Return a copy of `value` by way of pickle."""
    return pickle.loads(pickle.dumps(value))


class PickledScheduler:
    """A scheduler that runs each call here, one after the other."""

    def share(self, value: Any) -> Any:
        return pickled_copy(value)

    def run(self, function: Callable[..., Any], calls: Iterable[Call]) -> Iterator[Any]:
        for call in calls:
            yield pickled_copy(pickled_copy(function)(*pickled_copy(call)))
