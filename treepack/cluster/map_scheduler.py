"""Run tasks by the ordered map of any program: Spark, Dask, a process pool, a job array.

    MapScheduler(map_tasks, scratch)    map_tasks(function, items) -> results in order    the program
                                        scratch/TABLE.arrow, scratch/VALUE.pickle         for later tasks

The program needs a folder that all machines see, or a prefix in an object store. A task writes its table there under a
new name, so a task that runs twice harms nothing, and only the name comes back.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from treepack.cluster.scheduler import Call, TableHandle
from treepack.errors import TreepackError
from treepack.files.remote.address import AnyPath, as_output
from treepack.files.remote.stored_files import make_folder, read_stored, remove_folder, write_stored
from treepack.trajectory import Int64

MapTasks = Callable[[Callable[[Any], Any], list[Any]], Iterable[Any]]


class MapScheduler:
    """The scheduler that `map_tasks` makes; a context manager that removes its files at the end."""

    def __init__(self, map_tasks: MapTasks, scratch: str | Path) -> None:
        """Make a new folder in `scratch`.

        Args:
            map_tasks: `map_tasks(function, items)` returns `function(item)` for each item, in order. Functions and
                items can be pickled; an exception of `function` should be raised as it is.
            scratch: a folder that all machines see, or an address. It holds the tokens of the input about three times.

        Raises:
            TreepackError: the folder cannot be made.
        """
        self._map = map_tasks
        self._folder: AnyPath = as_output(scratch, option="scratch") / f"treepack-{secrets.token_hex(8)}"
        try:
            make_folder(self._folder)
        except OSError as error:
            raise TreepackError(
                f"{scratch}: cannot be written ({error.strerror or error}); choose another scratch folder"
            ) from error

    def __enter__(self) -> MapScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all tables and values."""
        remove_folder(self._folder)

    def share(self, value: Any) -> Any:
        """Write `value` once, and return its handle."""
        return _StoredValue(_write(self._folder, pickle.dumps(value), "pickle"))

    def run(self, function: Callable[..., Any], calls: Iterable[Call]) -> Iterator[Any]:
        """Yield `function(*call)` for each of `calls`, in their order; see `Scheduler`."""
        return self._results(_RunTask(function), calls)

    def keep(
        self, function: Callable[..., tuple[pa.Table, Any]], calls: Iterable[Call]
    ) -> Iterator[tuple[TableHandle, Any]]:
        """Yield a handle of the table and the summary of each of `calls`, in their order; see `Scheduler`."""
        return self._results(_KeepTask(function, self._folder), calls)

    def _results(self, function: Callable[[Any], Any], calls: Iterable[Call]) -> Iterator[Any]:
        waiting = list(calls)
        return iter(self._map(function, waiting)) if waiting else iter(())  # Spark has no list of nothing

    def exchange(
        self, tables: Sequence[TableHandle], assign: Callable[..., Int64], arguments: Call, num_ranges: int
    ) -> list[TableHandle]:
        """Return handles of `num_ranges` tables; see `Scheduler`. Each task writes a file for each range it has."""
        split = _SplitTask(assign, arguments, num_ranges, self._folder)
        pieces = list(self._map(split, [(table,) for table in tables]))
        columns = pieces[0][0].columns
        return [
            _StoredTable(columns, tuple(name for own in pieces for name in own[i].files)) for i in range(num_ranges)
        ]


@dataclass(frozen=True, slots=True)
class _StoredValue:
    file: AnyPath

    def load(self) -> Any:
        return pickle.loads(_read(self.file))


@dataclass(frozen=True, slots=True)
class _StoredTable:
    """A table in several files; `columns` is its schema, which a table without files needs."""

    columns: bytes
    files: tuple[AnyPath, ...]

    def load(self) -> pa.Table:
        tables = [_open(file) for file in self.files]
        return pa.concat_tables([pa.ipc.read_schema(pa.py_buffer(self.columns)).empty_table(), *tables])


def _store(folder: AnyPath, table: pa.Table) -> _StoredTable:
    columns = table.schema.serialize().to_pybytes()
    if not len(table):
        return _StoredTable(columns, ())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return _StoredTable(columns, (_write(folder, memoryview(sink.getvalue()), "arrow"),))


def _load_all(call: Call) -> list[Any]:
    return [each.load() if isinstance(each, _StoredValue | _StoredTable) else each for each in call]


@dataclass(frozen=True, slots=True)
class _RunTask:
    function: Callable[..., Any]

    def __call__(self, call: Call) -> Any:
        return self.function(*_load_all(call))


@dataclass(frozen=True, slots=True)
class _KeepTask:
    function: Callable[..., tuple[pa.Table, Any]]
    folder: AnyPath

    def __call__(self, call: Call) -> tuple[_StoredTable, Any]:
        table, summary = self.function(*_load_all(call))
        return _store(self.folder, table), summary


@dataclass(frozen=True, slots=True)
class _SplitTask:
    assign: Callable[..., Int64]
    arguments: Call
    num_ranges: int
    folder: AnyPath

    def __call__(self, call: Call) -> list[_StoredTable]:
        """Write the rows of each range of the table; return a handle for each range."""
        (table,) = _load_all(call)
        ranges = self.assign(table, *_load_all(self.arguments))
        return [_store(self.folder, table.take(pa.array(np.flatnonzero(ranges == i)))) for i in range(self.num_ranges)]


def _write(folder: AnyPath, content: bytes | memoryview, suffix: str) -> AnyPath:
    """Write a new file in `folder`; it appears whole."""
    path = folder / f"{secrets.token_hex(8)}.{suffix}"
    try:
        write_stored(path, content)
    except OSError as error:
        raise TreepackError(
            f"{folder}: a worker cannot write there ({error.strerror or error}); give a scratch folder with room that "
            "all machines share, or an address (s3://...)"
        ) from error
    return path


def _read(path: AnyPath) -> bytes:
    content = read_stored(path)
    if content is None:
        raise _missing(path)
    return content


def _open(path: AnyPath) -> pa.Table:
    """Return the table in a file; a local file is mapped."""
    if not isinstance(path, Path):
        return pa.ipc.open_stream(_read(path)).read_all()
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except FileNotFoundError as error:
        raise _missing(path) from error


def _missing(path: AnyPath) -> TreepackError:
    return TreepackError(
        f"{path}: another worker wrote it, but this one does not see it; give a scratch folder that all machines "
        "share, or an address (s3://...)"
    )
