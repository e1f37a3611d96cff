"""Which queries to roll out next: those whose estimated pass rate is nearest to 0.5 (PROS, section 4).

    State --with_queries--> State             queries join, original ones and those derived from them
    State, rewards --forget_and_add--> State  passed, tried <- lambda * old + new, for every training step
    State, log-odds --nearest--> k queries

The state is one Parquet file, a line per query (`schema.QUERIES`), its format, version and number of updates in
the metadata.
The estimate itself is `pass_rates.estimate`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.directory import finished_file
from treepack.files.schema import QUERIES, SELECTION_FORMAT, SELECTION_VERSION
from treepack.trajectory import Float64, Int64

# A query of which less than this of a rollout is remembered has been forgotten.
FORGOTTEN = 1e-6


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered of n queries, sorted by id.

    `query_id` is an Arrow array of strings, `parent` int64 [n] the index of the query that one is derived from, -1 for
    an original one, `passed` <= `tried` float64 [n] its rollouts, those long ago counting less. `num_updates` counts
    the training steps.
    """

    query_id: pa.Array
    parent: Int64
    passed: Float64
    tried: Float64
    num_updates: int

    @property
    def num_queries(self) -> int:
        return len(self.parent)

    @property
    def parent_id(self) -> pa.Array:
        """Id of each query's parent, null for an original one."""
        return self.query_id.take(pa.array(self.parent, mask=self.parent < 0))


def empty_state() -> State:
    """A state without queries."""
    return State(pa.array([], pa.string()), np.zeros(0, np.int64), np.zeros(0), np.zeros(0), 0)


def indices_of(state: State, query_id: pa.Array) -> Int64:
    """Index of each query of `query_id` in the state, -1 where it has none; int64 [len(query_id)]."""
    found: Int64 = pc.index_in(query_id, value_set=state.query_id).fill_null(-1).to_numpy().astype(np.int64)
    return found


def with_queries(state: State, query_id: Sequence[str], parent_id: Sequence[str | None]) -> tuple[State, int]:
    """`state` and the queries that it does not know yet, and how many these are. `parent_id` None is an original one.

    Raises:
        TreepackError: a parent that nobody knows or that is derived itself, or a query whose parents differ.
    """
    given: dict[str, str | None] = {}
    for query, parent in zip(query_id, parent_id, strict=True):
        if given.setdefault(query, parent) != parent:
            raise _several_parents(query, parent, given[query])
    names, parents = pa.array(given.keys(), pa.string()), pa.array(given.values(), pa.string())
    at = indices_of(state, names)
    known = np.flatnonzero(at >= 0)
    for i, had in zip(known.tolist(), state.parent_id.take(pa.array(at[known])).to_pylist(), strict=True):
        if parents[i].as_py() != had:
            raise _several_parents(names[i].as_py(), parents[i].as_py(), had)
    new = pa.array(np.flatnonzero(at < 0))
    joined = State(
        pa.concat_arrays([state.query_id, names.take(new)]),
        np.concatenate([state.parent, np.full(len(new), -1)]),
        np.concatenate([state.passed, np.zeros(len(new))]),
        np.concatenate([state.tried, np.zeros(len(new))]),
        state.num_updates,
    )
    above = indices_of(joined, parents.take(new))
    derived = parents.take(new).is_valid().to_numpy(zero_copy_only=False)
    joined.parent[state.num_queries :] = above
    for i in np.flatnonzero(derived & ((above < 0) | (joined.parent[above] >= 0)))[:1].tolist():
        fault = "is not known" if above[i] < 0 else "is derived itself"
        query, parent = names.take(new)[i].as_py(), parents.take(new)[i].as_py()
        raise TreepackError(f"the group {parent}, parent of the query {query}, {fault}; add the original query")
    return _sorted(joined), len(new)


def _several_parents(query: str, parent: str | None, had: str | None) -> TreepackError:
    return TreepackError(f"the query {query} has the parent {parent} here and {had} before; give each query one parent")


def _sorted(state: State) -> State:
    order: Int64 = pc.sort_indices(state.query_id).to_numpy().astype(np.int64)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    parent = state.parent[order]
    return State(
        state.query_id.take(pa.array(order)),
        np.where(parent < 0, -1, place[parent]),
        state.passed[order],
        state.tried[order],
        state.num_updates,
    )


def forget_and_add(
    state: State, query: Int64, success: NDArray[np.bool_], *, step: Int64 | None = None, forgetting: float
) -> State:
    """`state` after the rollouts of a training step, or of each of several in turn, have been counted.

    Before new rollouts are added, the counts of every query are multiplied by `forgetting`, lambda in (0, 1]: PROS,
    section 4. `query` int64 [m] is the query of each rollout, `step` int64 [m] its training step as a rank from 0.
    """
    if not 0 < forgetting <= 1:
        raise TreepackError(f"forgetting is {forgetting}; expected a factor in (0, 1], where 1 forgets nothing")
    ranks = np.zeros(len(query), np.int64) if step is None else step
    num_steps = int(ranks.max(initial=0)) + 1
    weight = forgetting ** (num_steps - 1.0 - ranks)
    size, old = state.num_queries, forgetting**num_steps
    tried = old * state.tried + np.bincount(query, weights=weight, minlength=size)
    passed = old * state.passed + np.bincount(query, weights=weight * success, minlength=size)
    kept = tried >= FORGOTTEN
    return replace(
        state,
        passed=np.where(kept, np.minimum(passed, tried), 0.0),
        tried=np.where(kept, tried, 0.0),
        num_updates=state.num_updates + num_steps,
    )


def nearest(log_odds: Float64, k: int, *, seed: int = 0) -> Int64:
    """The `k` queries whose pass rate is nearest to 0.5, nearest first; of equals, those that the seed draws.

    |sigmoid(x) - 1/2| grows with |x|, so it is the log-odds nearest to 0. O(n log n).

    Raises:
        TreepackError: there are fewer than `k`.
    """
    if not 1 <= k <= len(log_odds):
        raise TreepackError(f"k is {k}; expected 1 to {len(log_odds)}, the number of queries")
    ties = np.random.default_rng(seed).permutation(len(log_odds))
    order: Int64 = np.lexsort((ties, np.abs(log_odds)))[:k].astype(np.int64)
    return order


def write_state(state: State, path: Path) -> None:
    """Write `state`, whole or not at all; equal states give equal bytes.

    Raises:
        TreepackError: the disk fails.
    """
    columns = [state.query_id, state.parent_id, pa.array(state.passed), pa.array(state.tried)]
    about = json.dumps({"format": SELECTION_FORMAT, "version": SELECTION_VERSION, "num_updates": state.num_updates})
    table = pa.Table.from_arrays(columns, schema=QUERIES.with_metadata({b"treepack": about.encode()}))
    with finished_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_state(path: Path) -> State:
    """Read what `write_state` wrote.

    Raises:
        TreepackError: no such file, of another format or version, or damaged.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            about = json.loads((file.schema_arrow.metadata or {}).get(b"treepack", b"{}"))
            _check_version(about, path)
            table = file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise TreepackError(
            f"{path}: is no state of treepack select ({reason}); make one with select update"
        ) from error
    try:
        table = table.cast(QUERIES)
    except (pa.ArrowException, ValueError) as error:
        raise TreepackError(f"{path}: is damaged (it has the columns {table.column_names}); make it anew") from error
    return _checked(table, int(about["num_updates"]), path)


def _check_version(about: dict[str, object], path: Path) -> None:
    if about.get("format") != SELECTION_FORMAT:
        raise TreepackError(f"{path}: is no state of treepack select; make one with select update")
    if (version := about.get("version")) != SELECTION_VERSION:
        raise TreepackError(
            f"{path}: has {SELECTION_FORMAT} version {version}; this treepack reads version {SELECTION_VERSION}, so "
            "use the treepack that wrote it or make it anew"
        )


def _checked(table: pa.Table, num_updates: int, path: Path) -> State:
    query_id, parent_id = table["query_id"].combine_chunks(), table["parent_id"].combine_chunks()
    passed, tried = table["passed"].to_numpy(), table["tried"].to_numpy()
    parent = pc.index_in(parent_id, value_set=query_id, skip_nulls=True).fill_null(-1).to_numpy().astype(np.int64)
    faults = {
        "a query is there twice": len(pc.unique(query_id)) < len(query_id),
        "counts are not 0 <= passed <= tried": not ((passed >= 0) & (passed <= tried) & np.isfinite(tried)).all(),
        "a parent is missing": bool((parent < 0).sum() > parent_id.null_count),
        "a parent is derived itself": bool((parent[parent[parent >= 0]] >= 0).any()),
    }
    for fault, found in faults.items():
        if found:
            raise TreepackError(f"{path}: is damaged ({fault}); make it anew")
    return State(query_id, parent, passed, tried, num_updates)
