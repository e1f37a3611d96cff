"""Tokenised trajectories as columns: one array of token ids and one Arrow table, no object per trajectory.

Trajectory, Trajectory, ... --as_columns--> Sequences(tokens, offsets, table) of one batch, ids as they were read
batch, batch, ...           --join-->       Sequences of all batches
Trajectory, Trajectory, ... --collect-->    Sequences of all trajectories, every id unique

    trajectories [5 6 7], [5 8]   ->   tokens 5 6 7 5 8   offsets 0 3 5   table of 2 rows
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.columns import COLUMNS, Column, Lists
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.column_views import FilledView, ListView, NoValues, View, number_column, ragged_column
from treepack.option_fields import expect_type
from treepack.trajectory import Float64, Int32, Int64, Routes, Tokens, Trajectory, is_recorded, missing_route

# Values of a list column after which its next chunk begins. A chunk has offsets of 32 bits, and the list that crosses
# this number must fit, too.
MAX_LIST_VALUES = 1 << 30
NO_TRAJECTORY = "no trajectory with a trained token was found; nothing to build"


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokenised trajectories in arrival order, as columns.

    `tokens` int32 [N_flat] and `offsets` int64 [num_trajectories + 1] contain the token ids. `table` has the columns
    of `schema.trajectory_columns` except tree_id and node_id. `routes` [N_flat, layers, k] are as in `Tokens`, None
    if no trajectory has some. `renamed` has the ids that `unique_ids` changed, None if they are as they were read.
    """

    tokens: Int32
    offsets: Int64
    table: pa.Table
    routes: Routes | None = None
    renamed: pa.Table | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the columns in bytes."""
        routes = 0 if self.routes is None else self.routes.nbytes
        return int(self.tokens.nbytes + self.offsets.nbytes + self.table.nbytes + routes)


def collect(trajectories: Iterable[Trajectory]) -> Sequences:
    """Gather tokenised trajectories into columns, with unique ids.

    Raises:
        TreepackError: there is no trajectory, or one is text.
    """
    return with_unique_ids(as_columns(list(trajectories)))


def as_columns(records: list[Trajectory]) -> Sequences:
    """Return the columns of tokenised `records`; their ids may repeat.

    Raises:
        TreepackError: there is no trajectory, or one is text.
    """
    if not records:
        raise TreepackError(NO_TRAJECTORY)
    contents = [_token_content(record) for record in records]
    # Lengths 3, 2 -> offsets 0 3 5. int64, because the tokens of all inputs together may exceed 2**31.
    offsets = np.zeros(len(records) + 1, np.int64)
    np.cumsum([len(content.tokens) for content in contents], out=offsets[1:])
    tokens = np.concatenate([content.tokens for content in contents])
    # Records before each multiple of the maximum: offsets 0 3 5 9, maximum 4 -> cuts at 0, 2 and 3.
    cuts = np.searchsorted(offsets, np.arange(0, offsets[-1], MAX_LIST_VALUES)).tolist()
    tables = [_table(records[a:b], contents[a:b]) for a, b in pairwise([*cuts, len(records)]) if a < b]
    routes = join_routes([(content.routes, len(content.tokens)) for content in contents])
    return Sequences(tokens, offsets, tables[0] if len(tables) == 1 else concatenate(tables), routes)


def join(batches: list[Sequences]) -> Sequences:
    """Concatenate `batches`, at least one, in their order."""
    if len(batches) == 1:
        return batches[0]
    tokens = np.concatenate([batch.tokens for batch in batches])
    # Offsets 0 3 5 and 0 4 -> lengths 3 2 4 -> offsets 0 3 5 9.
    offsets = np.zeros(1 + sum(len(batch.offsets) - 1 for batch in batches), np.int64)
    np.cumsum(np.concatenate([np.diff(batch.offsets) for batch in batches]), out=offsets[1:])
    routes = join_routes([(batch.routes, len(batch.tokens)) for batch in batches])
    return Sequences(tokens, offsets, concatenate([batch.table for batch in batches]).combine_chunks(), routes)


def join_routes(parts: list[tuple[Routes | None, int]]) -> Routes | None:
    """Concatenate the routes of parts with so many tokens each; a part without routes has none recorded.

    Raises:
        TreepackError: the routes have different layers, or numbers of experts per token.
    """
    shape = route_shape([None if routes is None else routes.shape[1:] for routes, _ in parts])
    if shape is None:
        return None
    kind = np.result_type(*{routes.dtype for routes, _ in parts if routes is not None})
    joined = np.full((sum(size for _, size in parts), *shape), np.iinfo(kind).max, kind)
    begin = 0
    for routes, size in parts:
        if routes is not None:
            fill_routes(joined[begin : begin + size], routes)
        begin += size
    return joined


def fill_routes(target: Routes, routes: Routes) -> None:
    """Write `routes` into `target` of the same shape, whose dtype may be wider and have another `missing_route`."""
    # uint8 [[3 255] [255 255]] -> uint16 [[3 255] [65535 65535]]
    target[...] = routes
    target[~is_recorded(routes)] = missing_route(target)


def route_shape(shapes: Iterable[tuple[int, ...] | None]) -> tuple[int, int] | None:
    """Return the layers and experts per token of recorded routes, None if all of `shapes` are None.

    Raises:
        TreepackError: they differ.
    """
    known = sorted({shape for shape in shapes if shape is not None})
    if len(known) > 1:
        texts = " and ".join(f"{layers} layers with {k} experts" for layers, k in known[:2])
        raise TreepackError(f"some rollouts have recorded routes of {texts}; build the trie of one model at a time")
    return (known[0][0], known[0][1]) if known else None


def concatenate(tables: list[pa.Table]) -> pa.Table:
    """Concatenate `tables` of trajectories; a column that only some of them have is null in the others."""
    names = dict.fromkeys(name for table in tables for name in table.column_names)
    if all(len(table.column_names) == len(names) for table in tables):
        return pa.concat_tables(tables)
    # Sorted, so that the order of columns does not depend on the order of batches.
    ordered = [name for name in names if name not in schema.OPTIONAL.names]
    ordered += [name for name in schema.OPTIONAL.names if name in names]
    return pa.concat_tables(tables, promote_options="default").select(ordered)


def _token_content(record: Trajectory) -> Tokens:
    expect_type(record, Trajectory, "build_trie: a trajectory", "trajectories_from_arrays")
    if not isinstance(record.content, Tokens):
        raise TreepackError(f"{record.source}: the trajectory is text; tokenise it first (--tokenizer)")
    return record.content


def _table(records: list[Trajectory], contents: list[Tokens]) -> pa.Table:
    columns = {
        "trajectory_id": [record.trajectory_id for record in records],
        # A trajectory without a group is compared with no other one.
        "group_id": [record.group_id or record.trajectory_id for record in records],
        "step": [record.step for record in records],
        "num_tokens": [len(content.tokens) for content in contents],
        "trained": _span_column(contents),
        "weight": [record.weight for record in records],
        "reward": [record.reward for record in records],
        # Sorted keys: the bytes of the output must not depend on the order of fields in the input.
        "metadata": [json.dumps(record.metadata, sort_keys=True, ensure_ascii=False) for record in records],
        "source": [record.source for record in records],
    }
    for name in schema.ROLLOUTS.names:
        if any(getattr(record, name) is not None for record in records):
            columns[name] = [getattr(record, name) for record in records]
    for column in COLUMNS:
        columns |= _cells(column, records, contents)
    fields = [field for field in schema.trajectory_columns(columns) if field.name in columns]
    given = [columns[field.name] for field in fields]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(given, fields, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _cells(column: Column, records: list[Trajectory], contents: list[Tokens]) -> dict[str, Any]:
    """Return the columns of a trie for one of the table; an optional one only if a trajectory has a value."""
    found: dict[str, Any] = {}
    if column.whole is not None:
        numbers = [getattr(record, column.whole) for record in records]
        if column.is_always or any(number is not None for number in numbers):
            found[column.whole] = numbers
    if column.stored is not None:
        cells = [getattr(content, column.name) for content in contents]
        if column.is_always or any(cell is not None for cell in cells):
            is_lists = isinstance(column.kind, Lists)
            found[column.stored] = (ragged_column if is_lists else number_column)(cells, column.kind.dtype)
    return found


def with_unique_ids(sequences: Sequences) -> Sequences:
    """Return `sequences` with unique ids: an id that occurs more than once gets its source as a suffix."""
    table = sequences.table
    column = table.schema.get_field_index("trajectory_id")
    ids, renamed = unique_ids(table["trajectory_id"], table["source"])
    return replace(sequences, table=table.set_column(column, table.schema.field(column), ids), renamed=renamed)


def unique_ids(ids: pa.ChunkedArray, sources: pa.ChunkedArray) -> tuple[pa.ChunkedArray, pa.Table | None]:
    """Return `ids`, in order of arrival, without repetitions, and a table of `schema.RENAMED`, None if none repeats.

    A repeated id gets `@` and its source, and then a number if it still repeats, by source, id and arrival. So the
    names do not depend on the order of files. Python looks only at the rows whose names collide; all others are handled
    by Arrow.
    """
    names = _unique_ids(ids, sources)
    if names is ids:
        return ids, None
    rows = np.flatnonzero(pc.not_equal(ids, names).to_numpy(zero_copy_only=False))
    changed = pa.table([names.take(pa.array(rows)), ids.take(pa.array(rows))], schema=schema.RENAMED)
    order = _by_source(sources.take(pa.array(rows)), changed["read_id"])
    return names, changed.take(pa.array(order))


def _by_source(sources: pa.ChunkedArray, ids: pa.ChunkedArray) -> Int64:
    """Return the order of rows by source and id; equal ones keep their order."""
    table = pa.table({"source": sources, "id": ids, "row": np.arange(len(ids))})
    keys = [(name, "ascending") for name in table.column_names]
    order: Int64 = pc.sort_indices(table, sort_keys=keys).to_numpy().astype(np.int64)
    return order


def _unique_ids(ids: pa.ChunkedArray, sources: pa.ChunkedArray) -> pa.ChunkedArray:
    repeated = _is_repeated(ids)
    if not repeated.any():
        return ids
    # ids a b a of sources f:1 f:2 g:1 -> a@f:1 b a@g:1. Two records of one source -> a@f:1 a@f:1 -> a@f:1 a@f:1#2.
    names = pc.if_else(pa.array(repeated), pc.binary_join_element_wise(ids, sources, "@"), ids)
    rows = np.flatnonzero(_is_repeated(names))
    while len(rows):
        rows = rows[_by_source(sources.take(pa.array(rows)), ids.take(pa.array(rows)))]
        texts = _with_numbers(names.take(pa.array(rows)).to_pylist())
        numbered = pa.array([texts[i] for i in np.argsort(rows)], names.type)
        is_row = np.zeros(len(names), np.bool_)
        is_row[rows] = True
        # A numbered name, such as a#2, may be the name of a different row of the input. Then that row joins `rows`, and
        # all of them are numbered again. The set only grows, so the loop ends.
        collides = is_row | pc.is_in(names, numbered).to_numpy(zero_copy_only=False)
        if collides.sum() == len(rows):
            return pc.replace_with_mask(names.combine_chunks(), pa.array(is_row), numbered)
        rows = np.flatnonzero(collides)
    return names


def _is_repeated(names: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return True for each of `names` that occurs more than once."""
    # a b a -> indices 0 1 0 -> counts 2 1 -> True False True.
    indices = text_codes(names)
    repeated: NDArray[np.bool_] = (np.bincount(indices) > 1)[indices]
    return repeated


def text_codes(texts: pa.ChunkedArray) -> Int64:
    """Return a number from 0 on for each of `texts`, equal for equal ones, by first appearance; int64 [num_texts]."""
    # All chunks get the same dictionary: [a b], [c a] -> a b c, 0 1 2 0. One chunk of all texts may exceed 2^31 bytes.
    chunks = texts.dictionary_encode().chunks
    return np.concatenate([np.zeros(0, np.int64), *(chunk.indices.to_numpy() for chunk in chunks)]).astype(np.int64)


def _with_numbers(names: list[str]) -> list[str]:
    """Return distinct names: a name that already occurred gets the smallest free number, from 2 on, as a suffix."""
    # a a#2 a a -> a a#2 a#3 a#4: `last` continues the search after the last number, which keeps it linear.
    taken: set[str] = set()
    last: dict[str, int] = {}
    results = []
    for name in names:
        chosen, number = name, last.get(name, 1)
        while chosen in taken:
            number += 1
            chosen = f"{name}#{number}"
        last[name] = number
        taken.add(chosen)
        results.append(chosen)
    return results


def _span_column(contents: list[Tokens]) -> pa.Array:
    # Two trajectories with the spans [1, 3), [5, 6) and [2, 4) -> offsets 0 2 3, starts 1 5 2, ends 3 6 4.
    offsets = np.zeros(len(contents) + 1, np.int32)
    np.cumsum([len(content.starts) for content in contents], out=offsets[1:])
    parts = [
        np.concatenate([getattr(content, name) for content in contents]) for name in ("starts", "ends", "span_weights")
    ]
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(parts, fields=list(schema.SPAN)))


@dataclass(frozen=True, slots=True)
class SpanView:
    """Trained spans of a trajectory table as arrays: `view[i]` is starts int32, ends int32 and weights float64."""

    offsets: Int64
    starts: Int32
    ends: Int32
    weights: Float64

    @classmethod
    def of(cls, table: pa.Table) -> SpanView:
        # By chunks, here and below: one chunk fits the int32 offsets of a list array, the whole column may not.
        chunks = table["trained"].chunks or [pa.array([], table.schema.field("trained").type)]
        spans = [chunk.flatten() for chunk in chunks]
        parts = [_joined([piece.field(name).to_numpy() for piece in spans]) for name in ("start", "end", "weight")]
        sizes = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
        return cls(np.concatenate([[0], np.cumsum(np.concatenate(sizes), dtype=np.int64)]), *parts)

    def __getitem__(self, i: int) -> tuple[Int32, Int32, Float64]:
        a, b = self.offsets[i], self.offsets[i + 1]
        return self.starts[a:b], self.ends[a:b], self.weights[a:b]

    def total(self, values: Float64) -> Float64:
        """Sum `values` [num_spans] over the spans of each trajectory; float64 [num_trajectories]."""
        # Offsets 0 2 3 -> owner 0 0 1; values 5 6 7 -> sums 11 7.
        owner = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        sums: Float64 = np.bincount(owner, weights=values, minlength=len(self.offsets) - 1).astype(np.float64)
        return sums

    @property
    def sizes(self) -> Int32:
        return self.ends - self.starts


def _joined(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate `pieces`, at least one; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def num_trained(table: pa.Table) -> int:
    """Count the trained tokens of a trajectory table, without copies."""
    total = 0
    for chunk in table["trained"].chunks:
        spans = chunk.flatten()
        starts, ends = (spans.field(name).to_numpy() for name in ("start", "end"))
        total += int((ends - starts).sum(dtype=np.int64))
    return total


def list_values(table: pa.Table, name: str) -> ListView | NoValues:
    """Return the rows of a nullable list column, and None for a null or if `table` lacks the column."""
    return ListView(table[name]) if name in table.column_names else NoValues(table.num_rows)


def values_of(table: pa.Table, column: Column) -> View:
    """Return the entries of each trajectory in a column of the table, and None for a trajectory without one.

    They are one array or `RaggedArray` for each trajectory, with an entry for each trained token, or an array without
    dimensions if one number is stored for the whole trajectory.
    """
    lists = NoValues(table.num_rows) if column.stored is None else list_values(table, column.stored)
    if column.whole is None or column.whole not in table.column_names:
        return lists
    return FilledView(lists, table[column.whole], column.kind.dtype)


def list_content(column: pa.ChunkedArray) -> tuple[NDArray[Any], Int64]:
    """Return the values of all lists of a column without nulls, and the number of values of each list, int64 [rows]."""
    # Lists 5 6 and 7 8 9 in two chunks -> values 5 6 7 8 9, sizes 2 3.
    chunks = column.chunks or [pa.array([], column.type)]
    values = _joined([chunk.flatten().to_numpy() for chunk in chunks])
    return values, _joined([chunk.value_lengths().to_numpy() for chunk in chunks]).astype(np.int64)


def take_rows(table: pa.Table, rows: Int64 | Int32) -> pa.Table:
    """Return the rows `rows` of `table`, in this order.

    `Table.take` first makes one array of all chunks, which fails beyond 2^31 values in a list column, even if `rows`
    is short. Such a table gets a chunk for each row.
    """
    lists = [column for column in table.columns if pa.types.is_list(column.type)]
    if max((_num_values(column) for column in lists), default=0) <= MAX_LIST_VALUES:
        return table.take(pa.array(rows))
    return pa.concat_tables([table.schema.empty_table(), *(table.slice(i, 1) for i in rows.tolist())])


def _num_values(column: pa.ChunkedArray) -> int:
    """Return the number of values in the lists, also under nulls."""
    offsets = [chunk.offsets for chunk in column.chunks]
    return sum(each[-1].as_py() - each[0].as_py() for each in offsets)


# The column of a trie for each field of `Tokens` with a number, or a list of numbers, per trained token.
STORED = {column.name: column.stored for column in COLUMNS if column.stored}
PER_TOKEN = tuple(STORED.values())
