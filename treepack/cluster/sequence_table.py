"""Tokenised trajectories as one Arrow table of fixed columns, which a shuffle can move between machines.

    Sequences(tokens, offsets, table) --sequence_table--> table     --table_sequences--> Sequences

    COLUMNS   the columns of the trajectories of a trie without tree_id and node_id, all of `schema.RECORDED`,
              `tokens` (the token ids) and `arrival` (order of reading: part << 32 | row of the part)

Every table has all columns, so tables of different parts can be concatenated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.files import schema
from treepack.sequences import Sequences, list_content
from treepack.trajectory import Int64

UInt64 = NDArray[np.uint64]

TOKENS, ARRIVAL = "tokens", "arrival"
_OF_TRIE = ("tree_id", "node_id")
COLUMNS = pa.schema(
    [
        *(field for field in schema.TRAJECTORIES if field.name not in _OF_TRIE),
        *schema.RECORDED,
        pa.field(TOKENS, pa.list_(pa.int32()), nullable=False),
        pa.field(ARRIVAL, pa.int64(), nullable=False),
    ]
)
_PART_BITS = 32  # of `arrival` below the number of the part


def sequence_table(sequences: Sequences, *, part: int, first_row: int) -> pa.Table:
    """Return the table of `sequences`, which are rows `first_row`, `first_row` + 1, ... of part number `part`."""
    table, count = sequences.table, len(sequences.offsets) - 1
    # Tokens [5 6 7], [5 8] -> values 5 6 7 5 8, offsets 0 3 5.
    tokens = pa.LargeListArray.from_arrays(sequences.offsets, pa.array(sequences.tokens)).cast(pa.list_(pa.int32()))
    arrival = (part << _PART_BITS) + first_row + np.arange(count, dtype=np.int64)
    own = {TOKENS: tokens, ARRIVAL: pa.array(arrival)}
    columns = [
        own[field.name]
        if field.name in own
        else table[field.name]
        if field.name in table.column_names
        else pa.nulls(count, field.type)
        for field in COLUMNS
    ]
    return pa.Table.from_arrays(columns, schema=COLUMNS)


def empty_table() -> pa.Table:
    """Return a table without rows."""
    return COLUMNS.empty_table()


def table_sequences(table: pa.Table) -> Sequences:
    """Return the sequences of a table of `COLUMNS`, in its order; their table still has `arrival`."""
    tokens, sizes = list_content(table[TOKENS])
    return Sequences(tokens, np.concatenate([[0], np.cumsum(sizes)]), table.drop_columns([TOKENS]))


def present_columns(table: pa.Table) -> frozenset[str]:
    """Return those columns of `schema.RECORDED` that have a value."""
    return frozenset(name for name in schema.RECORDED.names if table[name].null_count < table.num_rows)


def text_hashes(texts: Iterable[str]) -> UInt64:
    """Return a 64-bit hash of each of `texts`, the same on all machines; uint64 [num_texts]."""
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), np.dtype("<u8")).astype(np.uint64)


def group_hashes(table: pa.Table) -> UInt64:
    """Return the distinct 64-bit hashes of the (step, group) pairs of a table."""
    pairs = table.select(["step", "group_id"]).group_by(["step", "group_id"]).aggregate([])
    names = zip(pairs["step"].to_pylist(), pairs["group_id"].to_pylist(), strict=True)
    return np.unique(text_hashes(f"{step}\0{group}" for step, group in names))


def rows_of_hashes(table: pa.Table, hashes: UInt64) -> tuple[Int64, list[str], list[str]]:
    """Return arrival, id and source of the rows whose ids have one of `hashes`, which are sorted."""
    # Sorted hashes [3, 7], hashes of the rows [7, 5, 3] -> places [1, 1, 0] -> rows 0 and 2.
    own = text_hashes(table["trajectory_id"].to_pylist())
    at = np.minimum(np.searchsorted(hashes, own), max(len(hashes) - 1, 0))
    rows = np.flatnonzero(hashes[at] == own) if len(hashes) else np.zeros(0, np.int64)
    chosen = table.select(["trajectory_id", "source", ARRIVAL]).take(pa.array(rows))
    return (
        chosen[ARRIVAL].to_numpy().astype(np.int64),
        chosen["trajectory_id"].to_pylist(),
        chosen["source"].to_pylist(),
    )
