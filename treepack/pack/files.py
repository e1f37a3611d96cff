"""A packed directory: `part-*.parquet` and, last, `manifest.json`.

    write_packed(rows, directory, capacity=...)      read_rows(directory) -> Row, Row, ...

    write_rows(rows, output, columns), ...           tasks, on any machine
    write_packed_manifest(directory, their results)  the command that started them

Equal rows give equal bytes. Readers refuse other formats and versions, and parts that are missing or damaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from treepack.columns import BY_PACKED
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.column_views import ragged_lists
from treepack.files.manifest import Manifest, Provenance, complete_manifest, read_manifest, write_manifest
from treepack.files.manifest_entries import FileEntry
from treepack.files.parts import PART_TOKENS, ColumnEncoding, PartWriter, open_part
from treepack.files.remote.address import AnyPath, as_path
from treepack.files.remote.cache import local_copy
from treepack.files.routes import route_array
from treepack.files.task_output import TaskOutput
from treepack.pack.options import PackOptions
from treepack.pack.row import Row, RowTerms, row_counts, row_totals
from treepack.pack.row_group import RowGroup, row_schema
from treepack.pack.row_shape import check_shape
from treepack.trajectory import Int64

# Tokens per row group, which is the unit that a reader decodes: some megabytes of columns.
GROUP_TOKENS = 1 << 18
# Terms that end a row group early. A list column has offsets of 32 bits, so it cannot contain 2^31 values.
GROUP_TERMS = 1 << 26
# Bytes of recorded routes that do: some hundred for each token, so that a row of random order is read fast.
_GROUP_ROUTE_BYTES = 1 << 26
# Token ids are 97 % of the bytes, the other columns take 80 % of the time; so only token ids are worth a higher level.
# On real rollouts they are 12 % larger at level 1 of zstd than at level 3, and 5 % at level 2; on random ones level 3
# takes twice the time of level 2. Measured for each other column: differences, a dictionary, or nothing but zstd, which
# is the fastest where long runs repeat one value. BYTE_STREAM_SPLIT of integers is faster still, but many readers of
# Parquet lack it.
_ENCODING = ColumnEncoding(
    level=1,
    levels={"input_ids": 2},
    delta=("position_ids", "parent", "trajectory_ends", "term_token"),
    dictionary=("loss_weight", "trajectory_groups"),
    list_statistics=False,
)
_COLUMNS = frozenset(schema.PACKED.names)
# Columns that have a value, and in a list only values, in each row. In the others, null means a missing value.
_WITHOUT_NULLS = frozenset(field.name for field in schema.PACKED if not field.nullable)


def write_packed(
    rows: Iterable[Row],
    directory: Path,
    *,
    capacity: int,
    provenance: Provenance | Callable[[], Provenance] = Provenance(),  # noqa: B008 (immutable)
) -> Manifest:
    """Write `rows` of at most `capacity` tokens into an existing empty `directory`, the manifest last; return it.

    `provenance` is the rest of the manifest, or a function that returns it after the last row. Its options must name
    the `semantics` and `normalize` that the loss weights of the rows were made with; without these names the defaults
    of `PackOptions` are recorded.

    Raises:
        TreepackError: there is no row.
    """
    written = _write_parts(rows, directory)
    known = provenance() if callable(provenance) else provenance
    return write_packed_manifest(directory, [written], capacity=capacity, provenance=known)


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows that a task has written: the entries of their parts, their summed `row_counts`, and the largest token id."""

    entries: tuple[FileEntry, ...]
    counted: Counter[str]
    max_token_id: int


def write_rows(
    rows: Iterable[Row], output: TaskOutput, columns: pa.Schema, *, first_row: int = 0, first_part: int = 0
) -> WrittenRows:
    """Write `rows` as parts of a packed directory that several tasks write; they appear when all are complete.

    Args:
        rows: in the order of the directory; there may be none. Their `row_id` is counted from `first_row` on.
        output: the directory.
        columns: the result of `packed_columns`, the same in every task.
        first_row: number of rows before them in the directory.
        first_part: number of their first part. `num_parts` counts the parts that they need.

    Raises:
        TreepackError: the output cannot be written.
    """
    numbered = (replace(row, row_id=first_row + i) for i, row in enumerate(rows))
    with output.folder() as folder:
        return _write_parts(numbered, folder, columns, first_part=first_part)


def write_packed_manifest(
    directory: Path,
    results: Iterable[WrittenRows],
    *,
    capacity: int,
    provenance: Provenance = Provenance(),  # noqa: B008 (immutable)
) -> Manifest:
    """Write the manifest of rows that tasks have written, in the order of the directory; see `write_packed`.

    Raises:
        TreepackError: there is no row.
    """
    every = [*results]
    counted: Counter[str] = Counter()
    for each in every:
        counted.update(each.counted)  # unlike a sum, it keeps counts of 0
    if not counted["num_rows"]:
        raise TreepackError(f"{directory}: there is no row to write")
    entries = {
        "max_token_id": max(each.max_token_id for each in every),
        "files": [entry for each in every for entry in each.entries],
    }
    return write_manifest(
        directory, packed_manifest(counted, capacity=capacity, provenance=provenance, entries=entries)
    )


def training_steps(directory: AnyPath, manifest: Manifest) -> set[int]:
    """Return the training steps of the rows of a packed directory; none of a store, or of parts that are damaged."""
    if not isinstance(directory, Path):
        return set()
    names = [entry["name"] for entry in manifest["files"]]
    try:
        columns = [parquet.read_table(directory / name, columns=["step"])["step"] for name in names]
    except (pa.ArrowException, OSError):  # `data.part_reader` names the fault when the rows are opened
        return set()
    return {step for column in columns for step in pc.unique(column.drop_null()).to_pylist()}


def num_parts(tokens: Int64, terms: Int64) -> int:
    """Return the number of parts that rows of so many `tokens` and `terms`, int64 [num_rows], are written to."""
    ends, term_ends = np.cumsum(tokens), np.cumsum(terms)
    row, parts, part_tokens = 0, 0, PART_TOKENS
    while row < len(tokens):
        # Rows of [3, 4, 9, 1] tokens, 6 tokens to a row group -> row groups end after the rows 1, 2 and 3.
        before, terms_before = (int(values[row - 1]) if row else 0 for values in (ends, term_ends))
        full = (ends.searchsorted(before + GROUP_TOKENS), term_ends.searchsorted(terms_before + GROUP_TERMS))
        row = min(int(min(full)) + 1, len(tokens))
        if part_tokens >= PART_TOKENS:
            parts, part_tokens = parts + 1, 0
        part_tokens += int(ends[row - 1]) - before
    return parts


def _write_parts(
    rows: Iterable[Row], directory: Path, columns: pa.Schema | None = None, *, first_part: int = 0
) -> WrittenRows:
    """Write `rows` of `columns`, by default the columns of the first row, as parts from number `first_part` on."""
    parts: PartWriter | None = None
    counted: Counter[str] = Counter()
    max_token_id = 0
    # Encoding takes most of the time and releases the GIL, so the rows of the next group are made meanwhile.
    writing: Future[None] | None = None
    with ThreadPoolExecutor(max_workers=1) as background:
        for group in _row_groups(rows, counted, columns):
            if parts is None:
                parts = PartWriter(directory, "part", group.columns, _ENCODING, first=first_part)
            table = group.table()
            max_token_id = max(max_token_id, pc.max(pc.list_flatten(table["input_ids"])).as_py())
            if writing is not None:
                writing.result()
            writing = background.submit(parts.write, table, tokens=group.num_tokens)
        if writing is not None:
            writing.result()
    return WrittenRows(tuple(parts.entries()) if parts is not None else (), counted, max_token_id)


def packed_manifest(
    counted: Counter[str],
    *,
    capacity: int,
    provenance: Provenance = Provenance(),  # noqa: B008 (immutable)
    entries: Mapping[str, Any] | None = None,
) -> Manifest:
    """Return the manifest of rows whose summed `row_counts` are `counted`; `entries` describe their files."""
    usual = PackOptions()
    defaults = {"semantics": usual.semantics, "normalize": usual.normalize}
    provenance = replace(
        provenance,
        options={**defaults, **provenance.options},
        totals={**provenance.totals, **row_totals(counted, capacity=capacity)},
    )
    return complete_manifest(schema.PACKED_FORMAT, provenance, {"capacity": capacity, **(entries or {})})


def _row_groups(rows: Iterable[Row], counted: Counter[str], columns: pa.Schema | None = None) -> Iterator[RowGroup]:
    """Yield `rows` in groups of `GROUP_TOKENS` tokens, and add their `row_counts` to `counted`.

    A group is valid until the next but one is requested: two take turns.
    """
    group, other = None, None
    for row in rows:
        group = group or RowGroup(row_schema(row) if columns is None else columns)
        group.append(row)
        counted.update(row_counts(row))
        is_full = group.num_tokens >= GROUP_TOKENS or group.num_terms >= GROUP_TERMS
        if is_full or group.num_route_bytes >= _GROUP_ROUTE_BYTES:
            yield group
            group, other = other or RowGroup(group.columns), group
            group.clear()
    if group is not None and group.num_rows:
        yield group


def read_rows(directory: str | AnyPath) -> Iterator[Row]:
    """Yield the rows of a packed directory, on this machine or in an object store, in order.

    Raises:
        TreepackError: see `read_manifest`, `open_part` and `row_of_table`; or there is no row.
    """
    directory, num_rows = local_copy(as_path(directory)), 0
    for entry in read_manifest(directory, schema.PACKED_FORMAT)["files"]:
        part = open_part(directory, entry, schema.PACKED)
        for group in range(len(part.group_sizes)):
            table = part.read_group(group)
            num_rows += table.num_rows
            for i in range(table.num_rows):
                yield row_of_table(table, i)
    if not num_rows:
        raise TreepackError(f"{directory}: contains no row; pack the trie again")


def row_of_table(table: pa.Table, i: int) -> Row:
    """Return row `i` of a table of packed rows.

    Raises:
        TreepackError: a column is missing, its lists do not have the lengths and indices of one row, or a stored sum
            does not match the columns it sums.
    """
    has_terms = any(name in schema.TERMS.names for name in table.column_names)
    has_routes = any(name in schema.ROUTES.names for name in table.column_names)
    required = schema.ROWS.names + [name for name in schema.TERMS.names if name in _WITHOUT_NULLS and has_terms]
    required += schema.ROUTES.names if has_routes else []
    missing = [name for name in required if name not in table.column_names]
    if missing:
        raise TreepackError(
            f"its rows have no column {missing[0]}, so an older treepack wrote them; pack the trie again"
        )
    values: dict[str, Any] = {name: _cell(table, name, i) for name in table.column_names if name in _COLUMNS}
    terms = None
    if "term_token" in values:
        columns: dict[str, Any] = {
            BY_PACKED[name].name if name in BY_PACKED else name.removeprefix("term_"): values.get(name)
            for name in schema.TERMS.names
        }
        terms = RowTerms(**columns)
    derived = {name: values.pop(name) for name in ("num_tokens", "num_pairs", "total_weight")}
    routes = None
    if "routes" in values:
        shape = (len(values["input_ids"]), values["route_layers"], values["route_experts"])
        routes = route_array(values["routes"], shape, f"row {values['row_id']}")
    columns = {name: values[name] for name in schema.ROWS.names if name not in derived}
    row = Row(terms=terms, routes=routes, **columns)
    check_shape(row)
    # total_weight is a sum of float64, so a file of a different program may differ by rounding.
    for name, stored in derived.items():
        if not math.isclose(stored, getattr(row, name), rel_tol=1e-9):
            raise TreepackError(
                f"row {row.row_id}: {name} is {stored} and its other columns give {getattr(row, name)}; "
                "pack the trie again"
            )
    return row


def _cell(table: pa.Table, name: str, i: int) -> Any:
    cell = table[name][i]
    is_list = pa.types.is_list(cell.type)
    has_null = not cell.is_valid or (is_list and cell.values.null_count > 0)
    is_index = is_list and cell.is_valid and pa.types.is_integer(cell.type.value_type)
    if has_null and (name in _WITHOUT_NULLS or is_index):
        raise TreepackError(f"its row {i} has a null in {name}; pack the trie again")
    if not is_list or not cell.is_valid:
        return cell.as_py()
    if pa.types.is_string(cell.type.value_type):
        return cell.values.to_pylist()
    if schema.is_ragged(cell.type):
        return ragged_lists(cell)
    return cell.values.to_numpy(zero_copy_only=False)
