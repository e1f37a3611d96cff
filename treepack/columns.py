"""Tokenised trajectories as columns: one array of token ids and one Arrow table, no object per trajectory.

Trajectory, Trajectory, ... --collect--> Sequences(tokens [N_flat], offsets, table)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack import schema
from treepack.errors import TreepackError
from treepack.trajectory import Float32, Float64, Int32, Int64, Tokens, Trajectory


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokenised trajectories in arrival order, as columns.

    `tokens` int32 [N_flat] and `offsets` int64 [num_trajectories + 1] hold the token ids; `table` the columns of
    `schema.TRAJECTORIES` except tree_id and node_id.
    """

    tokens: Int32
    offsets: Int64
    table: pa.Table


def collect(trajectories: Iterable[Trajectory]) -> Sequences:
    """Gather tokenised trajectories into columns.

    Raises:
        TreepackError: no trajectory at all.
    """
    records = list(trajectories)
    if not records:
        raise TreepackError("no trajectory with a trained token was found; nothing to build")
    contents = [_content(record) for record in records]
    offsets = np.zeros(len(records) + 1, np.int64)
    np.cumsum([len(content.tokens) for content in contents], out=offsets[1:])
    tokens = np.concatenate([content.tokens for content in contents])
    table = _table(records, contents)
    return Sequences(tokens, offsets, table)


def _content(record: Trajectory) -> Tokens:
    if not isinstance(record.content, Tokens):
        raise TreepackError(f"{record.source}: the trajectory is text; tokenise it first (--tokenizer)")
    return record.content


def _table(records: list[Trajectory], contents: list[Tokens]) -> pa.Table:
    columns = {
        "trajectory_id": unique_ids(records),
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


def unique_ids(records: list[Trajectory]) -> list[str]:
    """Ids of `records`, those that occur more than once made unique by their source, whatever the order."""
    counts = Counter(record.trajectory_id for record in records)
    named = [r.trajectory_id if counts[r.trajectory_id] == 1 else f"{r.trajectory_id}@{r.source}" for r in records]
    taken: set[str] = set()
    for i, name in enumerate(named):
        number = 1
        while named[i] in taken:
            number += 1
            named[i] = f"{name}#{number}"
        taken.add(named[i])
    return named


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


def list_values(table: pa.Table, name: str) -> list[NDArray[Any] | None]:
    """Rows of a nullable list column as arrays; None where null."""
    column = table[name].combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    valid = column.is_valid().to_pylist()
    sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    return [flat[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]
