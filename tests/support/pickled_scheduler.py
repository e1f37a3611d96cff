"""A scheduler in this process that sends every function, argument and result through pickle, as other machines do."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from treepack.cluster.scheduler import Call, TableHandle


def pickled_copy(value: Any) -> Any:
    """Return a copy of `value` by way of pickle."""
    return pickle.loads(pickle.dumps(value))


@dataclass
class PickledScheduler:
    """`LocalScheduler` with pickled calls; `num_rows` are the rows of the largest table that each function handled."""

    num_rows: dict[str, int] = field(default_factory=dict)

    def share(self, value: Any) -> Any:
        return pickled_copy(value)

    def run(self, function: Callable[..., Any], calls: Iterable[Call]) -> Iterator[Any]:
        for call in calls:
            result = pickled_copy(pickled_copy(function)(*pickled_copy(call)))
            tables = [each for each in (*call, *_parts(result)) if isinstance(each, pa.Table)]
            name = function.__name__
            self.num_rows[name] = max([self.num_rows.get(name, 0), *(each.num_rows for each in tables)])
            yield result

    def keep(
        self, function: Callable[..., tuple[pa.Table, Any]], calls: Iterable[Call]
    ) -> Iterator[tuple[TableHandle, Any]]:
        return self.run(function, calls)


def _parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
