"""A packed directory: `part-*.parquet` and, last, `manifest.json`.

    write_packed(rows, directory, capacity=...)      read_rows(directory) -> Row, Row, ...

Equal rows give equal bytes. Readers refuse other formats and versions, and parts that are missing or damaged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from treepack.columns import BY_PACKED
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.column_views import ragged_lists
from treepack.files.manifest import Manifest, Provenance, complete_manifest, read_manifest, write_manifest
from treepack.files.parts import ColumnEncoding, PartWriter, open_part
from treepack.files.remote.address import AnyPath, as_path
from treepack.files.remote.cache import local_copy
from treepack.files.routes import route_array
from treepack.pack.options import PackOptions
from treepack.pack.row import Row, RowTerms, row_counts, row_totals
from treepack.pack.row_group import RowGroup, row_schema
from treepack.pack.row_shape import check_shape

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
    counted: Counter[str] = Counter()
    entries = _write_parts(rows, directory, counted)
    if not counted["num_rows"]:
        raise TreepackError(f"{directory}: there is no row to write")
    known = provenance() if callable(provenance) else provenance
    return write_manifest(directory, packed_manifest(counted, capacity=capacity, provenance=known, entries=entries))


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


def _write_parts(rows: Iterable[Row], directory: Path, counted: Counter[str]) -> dict[str, Any]:
    """Write `rows` as parts and add their `row_counts` to `counted`; return the entries of the manifest for them."""
    parts: PartWriter | None = None
    max_token_id = 0
    # Encoding takes most of the time and releases the GIL, so the rows of the next group are made meanwhile.
    writing: Future[None] | None = None
    with ThreadPoolExecutor(max_workers=1) as background:
        for group in _row_groups(rows, counted):
            if parts is None:
                parts = PartWriter(directory, "part", group.columns, _ENCODING)
            table = group.table()
            max_token_id = max(max_token_id, pc.max(pc.list_flatten(table["input_ids"])).as_py())
            if writing is not None:
                writing.result()
            writing = background.submit(parts.write, table, tokens=group.num_tokens)
        if writing is not None:
            writing.result()
    return {"max_token_id": max_token_id, "files": [] if parts is None else parts.entries()}


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


def _row_groups(rows: Iterable[Row], counted: Counter[str]) -> Iterator[RowGroup]:
    """Yield `rows` in groups of `GROUP_TOKENS` tokens, and add their `row_counts` to `counted`.

    A group is valid until the next but one is requested: two take turns.
    """
    group, other = None, None
    for row in rows:
        group = group or RowGroup(row_schema(row))
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
