"""Compare packed rows with their trie: each trajectory exactly once, with its tokens, loss weights and terms.

    ids of the trie --IdIndex--> sorted hashes        ids of a row --find--> numbers of its trajectories
    numbers --ChunkedRows.take--> their columns, which are compared with the row token by token

Memory: 21 bytes for each trajectory and the factor of its loss weights. Tokens and columns are read row by row, and the
mapped pages are released in between.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.columns import COLUMNS, Column
from treepack.errors import TreepackError, quoted_value
from treepack.files import schema
from treepack.files.column_views import ChunkedRows, ColumnView, View
from treepack.files.manifest import Manifest
from treepack.pack.row import Row, RowTerms, rollout_places_of
from treepack.pack.weights import stored_times_trained, trajectory_factors
from treepack.rl.rollout_parts import rollout_codes, rollout_numbers, rollout_parts, rollout_places
from treepack.sequences import SpanView, values_of
from treepack.trajectory import Float64, Int32, Int64
from treepack.trie.nodes import path_to
from treepack.trie.storage import PageReleaser
from treepack.trie.trie import Trie

# Tokens of a page and its neighbours: the system maps 64 KB around the first token of a trajectory.
_MAPPED_TOKENS = 1 << 14


class IdIndex:
    """Numbers of the trajectories of a trie by their ids; 12 bytes for each."""

    def __init__(self, ids: pa.ChunkedArray) -> None:
        self._ids = ColumnView(ids)
        hashes = np.concatenate([np.zeros(0, np.uint64), *(_hashes(chunk) for chunk in ids.chunks)])
        self._order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._order]

    def find(self, names: list[str]) -> Int64:
        """Return the number of the trajectory of each name, the last one if an id repeats, -1 for an unknown name."""
        # Sorted hashes [3, 7, 7, 9]: the hash 7 is at places 1 and 2, the search from the right gives 3 - 1 = 2.
        hashes = _hashes(pa.array(names, pa.string()))
        places = np.searchsorted(self._hashes, hashes, side="right") - 1
        numbers = np.where(self._hashes[places] == hashes, self._order[places], -1).astype(np.int64)
        texts = self._ids.values(np.maximum(numbers, 0))
        if texts == names and (numbers >= 0).all():
            return numbers
        for i, (name, text) in enumerate(zip(names, texts, strict=True)):
            place = int(places[i])
            while numbers[i] >= 0 and text != name:  # another text with an equal hash
                place -= 1
                is_equal = place >= 0 and self._hashes[place] == hashes[i]
                numbers[i] = self._order[place] if is_equal else -1
                (text,) = self._ids.values(np.maximum(numbers[i : i + 1], 0))
        return numbers


def _hashes(texts: pa.Array) -> NDArray[np.uint64]:
    """Return a hash of each text, the same for equal texts of one process."""
    return pl.Series(pl.from_arrow(texts)).hash().to_numpy()


class ExpectedTrajectories:
    """The trajectories of a trie, which the rows of a packed directory must give back."""

    def __init__(self, trie: Trie, manifest: Manifest) -> None:
        options, table = manifest["options"], trie.trajectories
        self.trie = trie
        self.index = IdIndex(table["trajectory_id"])
        self.is_in_row = np.zeros(trie.num_trajectories, np.bool_)
        self.factors = trajectory_factors(trie, normalize=options["normalize"])
        self.counts: Int32 | None = None
        self.storage = trie.storage
        if options["semantics"] == "once":
            self.counts, self.storage = stored_times_trained(trie)
        # `treepack logprobs` replaces these columns, so they differ from the columns of the trie. The likeliest words
        # of a teacher belong to its log-probabilities.
        written = set(manifest.get("logprobs") or ())
        computed = {f"{name}_logprob" for name in written}
        computed |= {"teacher_topk_ids", "teacher_topk_logprobs"} if "teacher" in written else set()
        self.compared = [column for column in COLUMNS if column.name not in computed and column.stored is not None]
        facts = ["step", "group_id", "trained"]
        names = ["source", "weight", "reward", *schema.ROLLOUTS.names]
        names += [name for column in self.compared for name in column.sources]
        values = [name for name in names if name in table.column_names]
        self.facts, self.columns = ChunkedRows(table.select(facts)), ChunkedRows(table.select(facts + values))
        self.releaser = PageReleaser(self.storage)

    def check(self, row: Row) -> Float64:
        """Compare a row with the trie; return the loss weights that it should have, float64 [num_tokens].

        Raises:
            TreepackError: naming the row and the trajectory.
        """
        numbers = self.index.find(row.trajectory_ids)
        unknown = np.flatnonzero(numbers < 0)
        numbers = numbers[: unknown[0]] if len(unknown) else numbers
        known = _RowValues((self.facts if row.terms is None else self.columns).take(numbers), row, self.compared)
        paths = _RowPaths(row)
        weights = np.zeros(row.num_tokens)
        ends = row.trajectory_ends.tolist()
        for order, i in enumerate(numbers.tolist()):
            if self.is_in_row[i]:
                self._refuse(row, order, "a second time")
            self.is_in_row[i] = True
            path, slices = paths.to(ends[order]), _token_slices(self.trie, i)
            named = known.is_named(order) and _same_routes(row, path, self.trie, slices)
            if not (named and np.array_equal(row.input_ids[path], _concatenate(self.trie.tokens, slices))):
                raise TreepackError(
                    f"row {row.row_id}: trajectory {quoted_value(row.trajectory_ids[order])} differs from the trie's; "
                    "pack the trie again"
                )
            counts = None if self.counts is None else _concatenate(self.counts, slices)
            for start, end, weight in known.spans_of(order):
                share = self.factors[i] * weight
                weights[path[start:end]] += share if counts is None else share / counts[start:end]
            if row.terms is not None:
                known.check_terms(row.terms, order, path)
            self.releaser.count(len(path) + _MAPPED_TOKENS)
        if len(unknown):
            self._refuse(row, int(unknown[0]), "which the trie does not have")
        return weights

    def _refuse(self, row: Row, order: int, known: str) -> None:
        raise TreepackError(
            f"row {row.row_id}: holds trajectory {quoted_value(row.trajectory_ids[order])} {known}; pack the trie again"
        )

    def finish(self) -> None:
        """Check that each trajectory is in a row.

        Raises:
            TreepackError: naming the first one that is not, by its id.
        """
        missing = ~self.is_in_row
        if not missing.any():
            return
        names, first = [], 0
        for chunk in self.trie.trajectories["trajectory_id"].chunks:
            ids = chunk.filter(pa.array(missing[first : first + len(chunk)]))
            names += [pc.min(ids).as_py()] if len(ids) else []
            first += len(chunk)
        first_name, others = quoted_value(min(names)), int(missing.sum()) - 1
        raise TreepackError(f"trajectory {first_name} and {others} more are in no row; pack the trie again")


class _RowValues:
    """The trajectories of a row as the trie has them, in the order of the row."""

    def __init__(self, table: pa.Table, row: Row, compared: list[Column]) -> None:
        self.row = row
        self.steps, self.groups = table["step"].to_pylist(), table["group_id"].to_pylist()
        self.spans = SpanView.of(table)
        self.span_offsets = self.spans.offsets.tolist()
        self.values: dict[Column, View] = {}
        if row.terms is not None:
            self.own_terms = _terms_of_each(row.terms, len(row.trajectory_ids))
            self.rewards, self.weights = table["reward"].to_pylist(), table["weight"].to_pylist()
            codes = rollout_codes(table)
            own = np.arange(table.num_rows, dtype=np.int32)
            self.rollouts = own if codes is None else rollout_places(codes, rollout_parts(table))
            self.row_rollouts = rollout_places_of(row)
            self.has_other_number = np.zeros(table.num_rows, bool)
            if codes is not None and (numbers := row.terms.rollout_number) is not None:  # not of an older treepack
                self.has_other_number = rollout_numbers(table, row.trajectory_ids) != numbers
            for column in compared:
                known = values_of(table, column)
                if not known.is_missing or getattr(row.terms, column.name) is not None:
                    self.values[column] = known

    def is_named(self, order: int) -> bool:
        """Return True if trajectory number `order` has the same step and group in the row."""
        row = self.row
        return bool((row.step, row.trajectory_groups[order]) == (self.steps[order], self.groups[order]))

    def spans_of(self, order: int) -> list[tuple[int, int, float]]:
        """Return start, end and weight of the trained spans of a trajectory."""
        each = slice(self.span_offsets[order], self.span_offsets[order + 1])
        parts = (self.spans.starts[each], self.spans.ends[each], self.spans.weights[each])
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def check_terms(self, terms: RowTerms, order: int, path: Int64) -> None:
        """Check the terms of a trajectory, whose tokens are `path` in the row, token by token."""
        prefix = f"row {self.row.row_id}: trajectory {self.row.trajectory_ids[order]}"
        mine = self.own_terms[order]
        trained = np.concatenate([path[:0], *(path[start:end] for start, end, _ in self.spans_of(order))])
        if not np.array_equal(terms.token[mine], trained):
            raise TreepackError(f"{prefix} has terms that are not its trained tokens; pack the trie again")
        reward = None if terms.reward is None else float(terms.reward[order])
        if (None if reward is None or math.isnan(reward) else reward) != self.rewards[order]:
            raise TreepackError(f"{prefix} has another reward than in the trie; pack the trie again")
        if int(self.row_rollouts[order]) != self.rollouts[order] or self.has_other_number[order]:
            raise TreepackError(f"{prefix} belongs to another rollout than in the trie; pack the trie again")
        weight = 1.0 if terms.trajectory_weight is None else float(terms.trajectory_weight[order])
        if weight != self.weights[order]:
            raise TreepackError(f"{prefix} has another weight than in the trie; pack the trie again")
        for column, values in self.values.items():
            stored, known = getattr(terms, column.name), values[order]
            if stored is None and known is None:
                continue
            found = column.kind.filled(None if stored is None else stored[mine], len(trained))
            if len(found) != len(trained) or not column.kind.equal(found, column.kind.filled(known, len(trained))):
                raise TreepackError(f"{prefix} has another {column.packed} than in the trie; pack the trie again")


class _RowPaths:
    """Paths of one row. They consist of runs: consecutive tokens whose parent is the token before."""

    def __init__(self, row: Row) -> None:
        self.parent = row.parent
        # parent [-1, 0, 1, 2, 1, 4] -> runs start at [0, 4]; the path to token 5 is [4, 5] after [0, 1].
        self.starts = np.flatnonzero(row.parent != np.arange(-1, row.num_tokens - 1))
        self.starts = np.union1d(self.starts, [0])

    def to(self, end: int) -> Int64:
        runs = []
        while end >= 0:
            start = int(self.starts[np.searchsorted(self.starts, end, side="right") - 1])
            runs.append(np.arange(start, end + 1))
            end = int(self.parent[start])
        return np.concatenate(runs[::-1])


def _terms_of_each(terms: RowTerms, num_trajectories: int) -> list[Int64] | list[slice]:
    """Return the indices of the terms of each trajectory of a row, in their order."""
    order = np.argsort(terms.trajectory, kind="stable") if (np.diff(terms.trajectory) < 0).any() else None
    # Sorted trajectories [0, 0, 2] of 3 -> bounds [0, 2, 2, 3].
    owners = terms.trajectory if order is None else terms.trajectory[order]
    bounds = np.searchsorted(owners, np.arange(num_trajectories + 1)).tolist()
    slices = [slice(a, b) for a, b in pairwise(bounds)]
    return slices if order is None else [order[each] for each in slices]


def _same_routes(row: Row, path: Int64, trie: Trie, slices: list[slice]) -> bool:
    """Return True if the tokens of a trajectory, at `path` in the row, have the routes that the trie has."""
    if row.routes is None or trie.routes is None:
        return row.routes is trie.routes
    return np.array_equal(row.routes[path], np.concatenate([trie.routes[each] for each in slices]))


def _token_slices(trie: Trie, i: int) -> list[slice]:
    """Return the tokens of the nodes on the path of trajectory `i`, as slices of `trie.tokens` from the root on."""
    path = path_to(trie.parent, int(trie.end_node[i])).tolist()
    return [slice(trie.node_start[node], trie.node_start[node + 1]) for node in path]


def _concatenate(values: NDArray[Any], slices: list[slice]) -> NDArray[Any]:
    return np.concatenate([values[each] for each in slices])
