"""Rollouts that became several trajectories: which trajectories of a table or a row belong to one rollout.

    table with rollout_id and source --rollout_codes--> a number for each rollout
    numbers and parts of a row       --rollout_places--> the first trajectory of each one's rollout
    table with rollout_id and source --rollout_numbers--> the same for any slice of the table: numbers from hashes

    rollout_id   q  q  r  q     source   1  1  1  2     codes   0  0  2  1      places   0  0  2  3

Readers and the tokenisation set `rollout_id` and `rollout_part` of a `Trajectory`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from treepack.sequences import text_codes
from treepack.trajectory import ON_SEVERAL_PATHS, Int32, Int64

# A count of `pack`: rollouts of several trajectories of which one or all do not fit the capacity.
LOST_PARTS = "rollouts that lost some of their samples"


def rollout_codes(table: pa.Table) -> Int64 | None:
    """Return a number for each row of a trajectory table, equal for the samples of one rollout; int64 [num_rows].

    It is None if every row is a separate rollout.
    """
    if "rollout_id" not in table.column_names or table["rollout_id"].null_count == table.num_rows:
        return None
    # One number for id and source: ids q q r of sources 1 2 1 -> pairs (0, 0) (0, 1) (1, 0) -> 0 1 2. A row without a
    # rollout_id gets a new number, after all others.
    is_sample = table["rollout_id"].is_valid().to_numpy()
    codes = np.arange(table.num_rows) + table.num_rows * table.num_rows
    rows = table.select(["rollout_id", "source"]).filter(pa.array(is_sample))
    codes[is_sample] = text_codes(rows["rollout_id"]) * table.num_rows + text_codes(rows["source"])
    numbers: Int64 = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    return numbers


def rollout_places(codes: Int64, parts: Int64) -> Int32:
    """Return the first trajectory of a row that belongs to the rollout of each, int32 [num_trajectories].

    `codes` are from `rollout_codes`, and `parts` the parts, both of the row. A turn of several paths gets -1.
    """
    # Codes [3, 3, 3], parts [-1, 0, 1]: the first one belongs to several rollouts, so the others name the second.
    is_shared = parts == ON_SEVERAL_PATHS
    apart = np.where(is_shared, -1, codes)
    return np.where(is_shared, -1, first_of_each(apart)).astype(np.int32)


def rollout_numbers(table: pa.Table, ids: Iterable[str]) -> Int64:
    """Return a number for each row of a trajectory table with rollouts; int64 [num_rows].

    Equal for the samples of one rollout, also in another slice of the table; -1 for a turn on several paths. `ids` are
    the trajectory ids of the rows.
    """
    rows = zip(table["rollout_id"].to_pylist(), table["source"].to_pylist(), ids, strict=True)
    # A rollout of one trajectory has the number of its trajectory id.
    texts = [own if rollout is None else f"{rollout}\n{source}" for rollout, source, own in rows]
    return np.where(rollout_parts(table) == ON_SEVERAL_PATHS, -1, numbers_of_texts(texts))


def numbers_of_texts(texts: Iterable[str]) -> Int64:
    """Return a number from 0 to 2^63 - 1 for each text by its SHA-256, so that only equal texts have equal ones.

    Of 10 million texts, two different ones have one number with a probability of 5e-6.
    """
    # 8 bytes, little-endian, without the highest bit, which is the sign
    digests = b"".join(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8] for text in texts)
    return np.frombuffer(digests, "<i8").astype(np.int64) & np.int64(2**63 - 1)


def rollout_parts(table: pa.Table) -> Int64:
    """Return the part of each trajectory of a table that has this column, 0 if it is missing; int64 [num_rows]."""
    parts: Int64 = table["rollout_part"].fill_null(0).to_numpy().astype(np.int64)
    return parts


def first_of_each(codes: Int64) -> Int64:
    """Return the index of the first entry of `codes` that equals each entry, int64 [num_codes]."""
    # codes [7, 4, 7] -> [0, 1, 0]
    _, first, number = np.unique(codes, return_index=True, return_inverse=True)
    return first[number].astype(np.int64)
