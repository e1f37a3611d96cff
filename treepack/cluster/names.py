"""Unique ids of the trajectories of all parts, from hashes: only ids that may repeat are looked up.

    hashes of the ids of all parts --> hashes that occur twice
    hashes --rows_of_hashes, in tasks--> ids, sources --> UniqueNames

The names are equal to the names by `sequences.unique_ids` for all trajectories in their order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa

from treepack.cluster.sequence_table import UInt64, text_hashes
from treepack.cluster.trie_ranges import UniqueNames
from treepack.sequences import unique_ids
from treepack.trajectory import Int64

LookUp = Callable[[UInt64], Iterable[tuple[Int64, list[str], list[str]]]]


def repeated_names(ids: Sequence[UInt64], look_up: LookUp) -> UniqueNames | None:
    """Return the unique ids of the trajectories whose ids change, None if there is none.

    `ids` are the hashes of the ids of each part. `look_up` returns for sorted hashes arrival, ids and sources of the
    rows that have one of them, from one part after the other, see `rows_of_hashes`.
    """
    # Hashes [2, 5, 5, 9] -> 5 occurs twice.
    every = np.sort(np.concatenate(ids))
    wanted = np.unique(every[1:][every[1:] == every[:-1]])
    if not len(wanted):
        return None
    rows: dict[int, tuple[str, str]] = {}
    done = np.zeros(0, np.uint64)
    while len(wanted):
        for numbers, texts, sources in look_up(wanted):
            rows |= zip(numbers.tolist(), zip(texts, sources, strict=True), strict=True)
        done = np.union1d(done, wanted)
        arrival = np.array(sorted(rows), np.int64)
        given = [rows[i][0] for i in arrival.tolist()]
        names = _unique(given, [rows[i][1] for i in arrival.tolist()])
        # A new name, such as a@f:1, may be the id of a row that was not looked up. Then this row belongs to them, too.
        # It is enough to compare the last names: every name that a step of `unique_ids` assigns, some row keeps.
        new = np.unique(text_hashes(names))
        wanted = np.setdiff1d(np.intersect1d(new, every), done)
    is_new = [name != old for name, old in zip(names, given, strict=True)]
    return UniqueNames(
        arrival[np.array(is_new)], [name for name, changed in zip(names, is_new, strict=True) if changed]
    )


def _unique(ids: list[str], sources: list[str]) -> list[str]:
    columns = (pa.chunked_array([texts], pa.string()) for texts in (ids, sources))
    names: list[str] = unique_ids(*columns)[0].to_pylist()
    return names
