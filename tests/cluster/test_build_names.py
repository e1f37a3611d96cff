"""Unique ids of many parts are those of one process, though only ids that may repeat are looked up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import make
from treepack.cluster.names import repeated_names
from treepack.cluster.sequence_table import UInt64, rows_of_hashes, sequence_table, text_hashes
from treepack.sequences import as_columns, unique_ids
from treepack.trajectory import Int64

IDS = ["a", "b", "a@f", "a@g", "a@f#2", "a#2", "b@f", "b@f#2", "b@f#2#2"]
ROWS = st.lists(st.tuples(st.sampled_from(IDS), st.sampled_from(["f", "g"])), min_size=1, max_size=12)


@given(parts=st.lists(ROWS, min_size=1, max_size=4))
def test_names_of_parts_are_those_of_all_rows(parts: list[list[tuple[str, str]]]) -> None:
    tables = [
        sequence_table(
            as_columns([replace(make(name, [1, 2]), source=source) for name, source in rows]), part=i, first_row=0
        )
        for i, rows in enumerate(parts)
    ]
    num_rows: list[int] = []

    def look_up(wanted: UInt64) -> Iterator[tuple[Int64, list[str], list[str]]]:
        for table in tables:
            result = rows_of_hashes(table, wanted)
            num_rows.append(len(result[0]))
            yield result

    names = repeated_names([text_hashes(table["trajectory_id"].to_pylist()) for table in tables], look_up)
    whole = pa.concat_tables(tables)
    expected = unique_ids(whole["trajectory_id"], whole["source"])[0].to_pylist()
    result = whole["trajectory_id"].to_pylist()
    if names is not None:
        at = np.searchsorted(whole["arrival"].to_numpy(), names.arrival)
        for i, name in zip(at.tolist(), names.names, strict=True):
            assert result[i] != name
            result[i] = name
    assert result == expected
    assert sum(num_rows) <= whole.num_rows
