"""Tokenised trajectories as columns: one array of token ids and one Arrow table, no object per trajectory.

Trajectory, Trajectory, ... --as_columns--> Sequences(tokens, offsets, table) of one batch, ids as they were read
batch, batch, ...           --join-->       Sequences of all
Trajectory, Trajectory, ... --collect-->    Sequences of all, every id unique
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.trajectory import Float32, Float64, Int32, Int64, Tokens, Trajectory

NO_TRAJECTORY = "no trajectory with a trained token was found; nothing to build"


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokenised trajectories in arrival order, as columns.

    `tokens` int32 [N_flat] and `offsets` int64 [num_trajectories + 1] hold the token ids; `table` the columns of
    `schema.TRAJECTORIES` except tree_id and node_id.
    """

    tokens: Int32
    offsets: Int64
    table: pa.Table

    @property
    def num_bytes(self) -> int:
        """Memory that the columns take."""
        return int(self.tokens.nbytes + self.offsets.nbytes + self.table.nbytes)


def collect(trajectories: Iterable[Trajectory]) -> Sequences:
    """Gather tokenised trajectories into columns.

    Raises:
        TreepackError: no trajectory at all.
    """
    sequences = as_columns(list(trajectories))
    return replace(sequences, table=with_unique_ids(sequences.table))


def as_columns(records: list[Trajectory]) -> Sequences:
    """The columns of tokenised `records`, whose ids may repeat.

    Raises:
        TreepackError: no trajectory at all.
    """
    if not records:
        raise TreepackError(NO_TRAJECTORY)
    contents = [_content(record) for record in records]
    offsets = np.zeros(len(records) + 1, np.int64)
    np.cumsum([len(content.tokens) for content in contents], out=offsets[1:])
    tokens = np.concatenate([content.tokens for content in contents])
    return Sequences(tokens, offsets, _table(records, contents))


def join(batches: list[Sequences]) -> Sequences:
    """All of `batches`, at least one, in their order."""
    if len(batches) == 1:
        return batches[0]
    tokens = np.concatenate([batch.tokens for batch in batches])
    offsets = np.zeros(1 + sum(len(batch.offsets) - 1 for batch in batches), np.int64)
    np.cumsum(np.concatenate([np.diff(batch.offsets) for batch in batches]), out=offsets[1:])
    return Sequences(tokens, offsets, pa.concat_tables([batch.table for batch in batches]).combine_chunks())


def _content(record: Trajectory) -> Tokens:
    if not isinstance(record.content, Tokens):
        raise TreepackError(f"{record.source}: the trajectory is text; tokenise it first (--tokenizer)")
    return record.content


def _table(records: list[Trajectory], contents: list[Tokens]) -> pa.Table:
    columns = {
        "trajectory_id": [record.trajectory_id for record in records],
        "group_id": [record.group_id or record.trajectory_id for record in records],
        "step": [record.step for record in records],
        "num_tokens": [len(content.tokens) for content in contents],
        "trained": _span_column(contents),
        "weight": [record.weight for record in records],
        "reward": [record.reward for record in records],
        "advantage": [record.advantage for record in records],
        "advantages": _list_column([content.advantages for content in contents], pa.float64()),
        "sampling_logprobs": _list_column([content.sampling_logprobs for content in contents], pa.float32()),
        "old_logprobs": _list_column([content.old_logprobs for content in contents], pa.float32()),
        "ref_logprobs": _list_column([content.ref_logprobs for content in contents], pa.float32()),
        "metadata": [json.dumps(record.metadata, sort_keys=True, ensure_ascii=False) for record in records],
        "source": [record.source for record in records],
    }
    fields = [schema.TRAJECTORIES.field(name) for name in columns]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for column, field in zip(columns.values(), fields, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def with_unique_ids(table: pa.Table) -> pa.Table:
    """`table` with ids that occur more than once made unique by their source."""
    column = table.schema.get_field_index("trajectory_id")
    ids = unique_ids(table["trajectory_id"], table["source"])
    return table.set_column(column, table.schema.field(column), ids)


def unique_ids(ids: pa.ChunkedArray, sources: pa.ChunkedArray) -> pa.ChunkedArray:
    """`ids`, those that occur more than once with `@` and their source; what then still repeats is numbered in order.

    Only rows whose names meet are looked at one by one.
    """
    repeated = _repeated(ids)
    if not repeated.any():
        return ids
    names = pc.if_else(pa.array(repeated), pc.binary_join_element_wise(ids, sources, "@"), ids)
    rows = np.flatnonzero(_repeated(names))
    while len(rows):
        numbered = pa.array(_numbered(names.take(pa.array(rows)).to_pylist()), names.type)
        is_row = np.zeros(len(names), np.bool_)
        is_row[rows] = True
        met = is_row | pc.is_in(names, numbered).to_numpy(zero_copy_only=False)
        if met.sum() == len(rows):
            return pc.replace_with_mask(names.combine_chunks(), pa.array(is_row), numbered)
        rows = np.flatnonzero(met)  # a number has made a name that another row had from the first
    return names


def _repeated(names: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Which of `names` occur more than once."""
    indices = names.combine_chunks().dictionary_encode().indices.to_numpy()
    repeated: NDArray[np.bool_] = (np.bincount(indices) > 1)[indices]
    return repeated


def _numbered(names: list[str]) -> list[str]:
    """`names`, each that is taken already with the least number from 2 on that makes it free."""
    taken: set[str] = set()
    last: dict[str, int] = {}
    found = []
    for name in names:
        chosen, number = name, last.get(name, 1)
        while chosen in taken:
            number += 1
            chosen = f"{name}#{number}"
        last[name] = number
        taken.add(chosen)
        found.append(chosen)
    return found


def _span_column(contents: list[Tokens]) -> pa.Array:
    offsets = np.zeros(len(contents) + 1, np.int32)
    np.cumsum([len(content.starts) for content in contents], out=offsets[1:])
    parts = [
        np.concatenate([getattr(content, name) for content in contents]) for name in ("starts", "ends", "span_weights")
    ]
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(parts, fields=list(schema.SPAN)))


def _list_column(values: list[Float64 | None] | list[Float32 | None], kind: pa.DataType) -> pa.Array:
    missing = np.array([value is None for value in values])
    if missing.all():
        return pa.nulls(len(values), pa.list_(kind))
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    flat = np.concatenate([value for value in values if value is not None])
    return pa.ListArray.from_arrays(offsets, pa.array(flat, kind), mask=pa.array(missing))


@dataclass(frozen=True, slots=True)
class SpanView:
    """Trained spans of a trajectory table as arrays: `view[i]` gives starts, ends int32 and weights float64."""

    offsets: Int32
    starts: Int32
    ends: Int32
    weights: Float64

    @classmethod
    def of(cls, table: pa.Table) -> SpanView:
        column = table["trained"].combine_chunks()
        spans = column.flatten()
        parts = [spans.field(name).to_numpy(zero_copy_only=False) for name in ("start", "end", "weight")]
        offsets = np.concatenate([[0], np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))])
        return cls(offsets.astype(np.int32), *parts)

    def __getitem__(self, i: int) -> tuple[Int32, Int32, Float64]:
        a, b = self.offsets[i], self.offsets[i + 1]
        return self.starts[a:b], self.ends[a:b], self.weights[a:b]

    def total(self, values: Float64) -> Float64:
        """Sum over each trajectory's spans of `values` [num_spans], float64 [num_trajectories]."""
        owner = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        sums: Float64 = np.bincount(owner, weights=values, minlength=len(self.offsets) - 1).astype(np.float64)
        return sums

    @property
    def sizes(self) -> Int32:
        return self.ends - self.starts


def num_trained(table: pa.Table) -> int:
    """Trained tokens of a trajectory table, which may be too large for a `SpanView`."""
    total = 0
    for chunk in table["trained"].chunks:
        spans = chunk.flatten()
        starts, ends = (spans.field(name).to_numpy() for name in ("start", "end"))
        total += int((ends - starts).sum(dtype=np.int64))
    return total


def list_values(table: pa.Table, name: str) -> list[NDArray[Any] | None]:
    """Rows of a nullable list column as arrays; None where null."""
    column = table[name].combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    valid = column.is_valid().to_pylist()
    sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    return [flat[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]


LOGPROBS = ("sampling_logprobs", "old_logprobs", "ref_logprobs")
