"""Slices of a trie directory: trajectories whose last nodes are consecutive, for tasks that each read only their part.

    nodes          0  1  2  3 | 4  5  6 | 7  8      parent  -1 0 1 0 | 3 3 -1 | 6 6
    trajectories     t0  t1     t2 t3       t4      end at     2 3     4 5        8

    slice 1        chain 0 3, nodes 4 5 6, trajectories t2 t3      read_slice --> Trie with the nodes 0 .. 4

Nodes are depth-first and trajectories are sorted by their last node. So a cut after the last node of a
trajectory is a place in both. The ancestors of the first node, the chain, belong to an earlier slice; a slice that
needs them repeats their tokens. `trie_slices` reads footers, and single columns of the row groups near the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import read_manifest
from treepack.files.remote.address import AnyPath
from treepack.files.remote.location import DirectoryLocation, locate
from treepack.sequences import list_content, take_rows
from treepack.trajectory import Int32, Int64
from treepack.trie.nodes import subtree_ends
from treepack.trie.shape import check_nodes, check_trained
from treepack.trie.store.row_groups import PartGroups, TrieFooters, read_footers, read_groups
from treepack.trie.trie import Trie

# Share of a slice, before and after the place of an even cut, in which a better place is looked for. The second one is
# used if no cut is allowed in the first.
_WINDOWS = (1 / 16, 1 / 2)
_CACHED_GROUPS = 64  # row groups of nodes whose parents and depths stay in memory
# Columns of the trajectories that plans need. The others are lists with a value for each trained token, and texts.
_PLAN_COLUMNS = tuple("trajectory_id group_id step tree_id node_id num_tokens trained weight reward source".split())


@dataclass(frozen=True, slots=True)
class TrieSlice:
    """Trajectories `trajectories[0] .. trajectories[1] - 1` of a trie directory, and their row groups.

    Attributes:
        number: place of the slice among all slices.
        nodes: first and one past the last node that this slice has and no earlier slice has.
        trajectories: first and one past the last trajectory.
        chain: ancestors of the first node, from the root on; nodes of earlier slices.
        next_chain: chain of the next slice; nodes of this one, and of its chain.
        repeated_tokens: tokens of the chain, which earlier slices have too.
        share: as of the trie.
        columns: columns of the trajectories.
        node_groups: row groups that contain `nodes` and `chain`, in order.
        trajectory_groups: row groups that contain `trajectories`, in order.
    """

    number: int
    nodes: tuple[int, int]
    trajectories: tuple[int, int]
    chain: tuple[int, ...]
    next_chain: tuple[int, ...]
    repeated_tokens: int
    share: str
    columns: tuple[str, ...]
    node_groups: tuple[PartGroups, ...]
    trajectory_groups: tuple[PartGroups, ...]


def trie_slices(
    directory: str | AnyPath,
    count: int,
    *,
    whole_trees: bool = False,
    whole_groups: bool = False,
    footers: TrieFooters | None = None,
) -> list[TrieSlice]:
    """Cut a trie directory into `count` slices of about equal tokens, which together have each trajectory once.

    A cut is at the start of a training step if one is near, else at the start of a tree, else at the place that
    repeats the minimum of tokens. There may be fewer slices than asked for, if the trie has no more places for cuts;
    each slice has at least one trajectory.

    Args:
        directory: a trie directory, or its address.
        count: number of slices.
        whole_trees: cut only between trees. Groups of `share="group"` are always whole.
        whole_groups: cut only between groups.
        footers: the result of `read_footers` if the caller has it.

    Raises:
        TreepackError: `count` is below 1, a damaged directory, or `whole_groups` of a trie whose trees mix groups.
    """
    if count < 1:
        raise TreepackError(f"count is {count}; expected at least 1")
    location = locate(directory)
    share = read_manifest(location, schema.TRIE_FORMAT)["share"]
    footers = footers or read_footers(location)
    num_slices = min(count, footers.num_trajectories)  # each has a trajectory, so 10^12 of 32 trajectories end soon
    if num_slices > 1 and whole_groups and share != "group":
        raise TreepackError(
            f"{location}: its trees mix groups, so it cannot be cut between groups; build it with --share group, or "
            "pack it in one partition"
        )
    places = _Places(location, footers)
    cuts = [_Cut(0, 0)]
    for i in range(1, num_slices):
        whole = (whole_trees or share == "group", whole_groups or share == "group")
        cut = _best_cut(places, footers.num_tokens * i // num_slices, footers.num_tokens / num_slices, *whole)
        # Rounding can give neighbouring cuts the same place, if slices have about as many tokens as trajectories.
        if cut is not None and cut.node > cuts[-1].node:
            cuts.append(cut)
    ends = [*((cut.node, cut.trajectory) for cut in cuts[1:]), (footers.num_nodes, footers.num_trajectories)]
    chains = [*(places.ancestors(cut.node) for cut in cuts), ()]
    slices = []
    for number, (cut, (node_end, trajectory_end)) in enumerate(zip(cuts, ends, strict=True)):
        chain = chains[number]
        owned = np.concatenate([np.array(chain, np.int64), _one_of_each_group(footers.node_start, cut.node, node_end)])
        slices.append(
            TrieSlice(
                number,
                (cut.node, node_end),
                (cut.trajectory, trajectory_end),
                chain,
                chains[number + 1],
                cut.depth,
                share,
                footers.columns,
                footers.nodes_of(owned),
                footers.trajectories_of(_one_of_each_group(footers.trajectory_start, cut.trajectory, trajectory_end)),
            )
        )
    return slices


def _one_of_each_group(start: Int64, first: int, end: int) -> Int64:
    """Return one row of each row group that contains some of the rows [first, end)."""
    # Groups that start at [0, 4, 9], rows [2, 6) -> rows 2 and 4.
    return np.concatenate([[first], start[(start > first) & (start < end)]])


@dataclass(frozen=True, slots=True)
class _Cut:
    """The first node and the first trajectory of a slice, and the tokens of the ancestors of the node."""

    node: int
    trajectory: int
    depth: int = 0


def _best_cut(places: _Places, target: int, spacing: float, whole_trees: bool, whole_groups: bool) -> _Cut | None:
    """Return the best cut near token `target` of the trie, or None; slices have `spacing` tokens."""
    for window in _WINDOWS:
        # Even places of neighbouring cuts are `spacing` apart, so half of it keeps the cuts in order.
        reach = [places.node_at(target + side * spacing / 2) for side in (-1, 1)]
        near = [places.node_at(target + side * spacing * window) for side in (-1, 1)]
        first, end = max(reach[0], places.group_start(near[0])), min(reach[1], places.group_end(near[1]))
        cuts = places.cuts(first, end)
        allowed = np.ones(len(cuts.node), np.bool_)
        if whole_trees:
            allowed &= cuts.depth == 0
        if whole_groups:
            allowed &= cuts.new_group
        at = np.flatnonzero(allowed)
        if len(at):
            distance = np.abs(cuts.node - places.node_at(target))
            best = at[np.lexsort([distance[at], cuts.depth[at], ~cuts.new_step[at]])[0]]
            return _Cut(int(cuts.node[best]), int(cuts.trajectory[best]), int(cuts.depth[best]))
    return None


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Places for cuts: the first node and trajectory after each, and the tokens before this node on its path; int64.

    `new_step` and `new_group` are True if a training step or a group starts there.
    """

    node: Int64
    trajectory: Int64
    depth: Int64
    new_step: NDArray[np.bool_]
    new_group: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Trajectories:
    """Columns of the trajectories `range`, and all cuts among them: rows of `table`, and the nodes they are before."""

    range: tuple[int, int]
    table: pa.Table
    at: Int64
    nodes: Int64


@dataclass
class _Places:
    """The nodes and trajectories near a place, from single columns of single row groups."""

    location: DirectoryLocation
    footers: TrieFooters
    known: dict[int, tuple[Int32, Int32]] = field(default_factory=dict)  # by row group: parents and depths
    near: _Trajectories | None = None  # those of the last cut; the next cut often needs the same ones

    def node_at(self, token: float) -> int:
        """Return about the node that contains a token; nodes of a row group count as equally long."""
        starts, nodes = self.footers.token_start, self.footers.node_start
        # Row groups that start at tokens [0, 100] and nodes [0, 10], token 150 of 200, 30 nodes -> node 10 + 20 / 2.
        return int(np.interp(token, starts, nodes))

    def group_start(self, node: int) -> int:
        """Return the first node of the row group of `node`."""
        return int(self.footers.node_start[self._group(node)])

    def group_end(self, node: int) -> int:
        """Return one past the last node of the row group of `node`."""
        return int(self.footers.node_start[self._group(node) + 1])

    def _group(self, node: int) -> int:
        starts = self.footers.node_start
        return min(int(starts.searchsorted(node, "right")), len(starts) - 1) - 1

    def cuts(self, first: int, end: int) -> _Cuts:
        """Return all places for cuts before the nodes [first, end)."""
        start, stop = self.footers.trajectories_that_end_in(first - 1, end)
        near = self._trajectories(start, stop)
        # Ends [2, 3, 3, 5] of trajectories from 7 on -> cuts before the nodes [3, 4] and trajectories [8, 10].
        low, high = np.searchsorted(near.nodes, [max(first, 1), end]).tolist()
        at, nodes = near.at[low:high], near.nodes[low:high]
        before, after = near.table.take(pa.array(at - 1)), near.table.take(pa.array(at))

        def differs(name: str) -> NDArray[np.bool_]:
            pairs = zip(before[name].to_pylist(), after[name].to_pylist(), strict=True)
            return np.array([a != b for a, b in pairs], np.bool_)

        new_step = differs("step")
        return _Cuts(
            nodes,
            at + start,
            np.array([self.parent_and_depth(node)[1] for node in nodes.tolist()], np.int64),
            new_step,
            new_step | differs("group_id"),
        )

    def _trajectories(self, start: int, stop: int) -> _Trajectories:
        """Return the trajectories [start, stop), which fill whole row groups."""
        if self.near is None or self.near.range != (start, stop):
            groups = self.footers.trajectories_of(_one_of_each_group(self.footers.trajectory_start, start, stop))
            tables = [table for _, table in read_groups(self.location, groups, ["node_id", "step", "group_id"])]
            table = pa.concat_tables(tables)
            ends = table["node_id"].to_numpy().astype(np.int64)
            if (ends[1:] < ends[:-1]).any():
                raise _no_tree(self.location)
            at = np.flatnonzero(ends[1:] > ends[:-1]) + 1
            self.near = _Trajectories((start, stop), table, at, ends[at - 1] + 1)
        return self.near

    def parent_and_depth(self, node: int) -> tuple[int, int]:
        """Return the parent and the depth of a node."""
        starts, group = self.footers.node_start, self._group(node)
        if group not in self.known:
            groups = self.footers.nodes_of(starts[[group]])
            ((_, table),) = read_groups(self.location, groups, ["parent_id", "depth"])
            while len(self.known) >= _CACHED_GROUPS:
                del self.known[next(iter(self.known))]
            self.known[group] = table["parent_id"].to_numpy(), table["depth"].to_numpy()
        parents, depths = self.known[group]
        return int(parents[node - starts[group]]), int(depths[node - starts[group]])

    def ancestors(self, node: int) -> tuple[int, ...]:
        """Return the ancestors of a node from the root on.

        Raises:
            TreepackError: a node comes before its parent.
        """
        chain: list[int] = []
        while (parent := self.parent_and_depth(node)[0]) >= 0:
            if parent >= node:
                raise _no_tree(self.location)
            chain.append(parent)
            node = parent
        return tuple(chain[::-1])


def read_slice(directory: str | AnyPath, part: TrieSlice, *, tokens: bool = True) -> Trie:
    """Read a slice as a trie: its nodes are the chain and then the nodes of the slice, numbered from 0.

    Only the row groups of the slice are read. Their pages are checked by checksums, and the parts by their sizes.

    Args:
        directory: the trie directory, or its address.
        part: one of its slices.
        tokens: False leaves all tokens -1, and reads only `_PLAN_COLUMNS` of the trajectories.

    Raises:
        TreepackError: a part is missing, damaged, or has other columns.
    """
    location = locate(directory)
    first, end = part.nodes
    num_chain = len(part.chain)
    # Chain [0, 3] and nodes [4, 7) -> ids [0, 3, 4, 5, 6].
    ids = np.concatenate([np.array(part.chain, np.int64), np.arange(first, end)])
    nodes = _read_rows(location, part.node_groups, ["parent_id", "depth", *(["tokens"] if tokens else [])], ids)
    names = [name for name in part.columns if tokens or name in _PLAN_COLUMNS]
    table = _read_rows(location, part.trajectory_groups, names, np.arange(*part.trajectories))
    # Parents [-1, 0, 3, 3, -1] -> places in ids [-1, 0, 1, 1, -1].
    old = nodes["parent_id"].to_numpy()
    parent = np.where(old < 0, -1, np.searchsorted(ids, old)).astype(np.int32)
    ends = table["node_id"].to_numpy()
    end_node = (ends - first + num_chain).astype(np.int32)
    is_tree = (parent < np.arange(len(parent))).all() and (ids[parent[old >= 0]] == old[old >= 0]).all()
    if not (is_tree and (np.diff(ends) >= 0).all() and ends[0] >= first and ends[-1] == end - 1):
        raise _no_tree(location)
    depth, node_end = nodes["depth"].to_numpy().astype(np.int64), subtree_ends(parent)
    if tokens:
        values, sizes = list_content(nodes["tokens"])
    else:
        sizes = _node_lengths(depth, node_end, end_node, table["num_tokens"].to_numpy())
        values = np.broadcast_to(np.int32(-1), (int(sizes.sum()),))
    # End nodes [2, 2, 4], subtrees [0, 5), [1, 3), ... -> 3 - 0, 2 - 0, ... trajectories.
    num_passing = np.searchsorted(end_node, node_end) - np.searchsorted(end_node, np.arange(len(parent)))
    trie = Trie(
        tokens=values,
        node_start=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        node_end=node_end,
        parent=parent,
        depth=depth,
        num_passing=num_passing.astype(np.int32),
        end_node=end_node,
        trajectories=_renumber(table, parent, end_node),
        share=part.share,
    )
    try:
        check_nodes(trie)
        check_trained(table, table["num_tokens"].to_numpy())
    except TreepackError as error:
        raise TreepackError(f"{location}: {error}") from error
    return trie


def _read_rows(location: DirectoryLocation, groups: Sequence[PartGroups], columns: list[str], rows: Int64) -> pa.Table:
    """Return the ascending `rows`, numbered over all parts, of the row groups that contain them."""
    pieces = []
    for start, table in read_groups(location, groups, columns):
        # Row group [90, 100), rows [41, 48, 95, .. 99] -> rows [5, .. 9] of it.
        first, stop = np.searchsorted(rows, [start, start + table.num_rows]).tolist()
        own = rows[first:stop] - start
        is_run = len(own) > 0 and own[-1] - own[0] == len(own) - 1
        pieces.append(table.slice(int(own[0]), len(own)) if is_run else take_rows(table, own))
    return pa.concat_tables(pieces)


def _node_lengths(depth: Int64, node_end: Int32, end_node: Int32, num_tokens: Int32) -> Int64:
    """Return the tokens of each node, int64 [num_nodes], without reading them.

    A node ends where its first child begins. A node without a child ends at the end of a trajectory.
    """
    # depth [0, 2, 4, 2], node_end [4, 3, 3, 4] -> ends [2, 4, ., .]; lengths [5, 3] of the ends [2, 3] -> [2, 4, 5, 3]
    stop = np.append(depth[1:], 0)
    childless = node_end == np.arange(1, len(depth) + 1)
    at = np.searchsorted(end_node, np.flatnonzero(childless))
    stop[childless] = num_tokens[at]
    return np.asarray(stop - depth, np.int64)


def _renumber(table: pa.Table, parent: Int32, end_node: Int32) -> pa.Table:
    """Return the trajectories with the trees and nodes of the slice."""
    tree = (np.cumsum(parent < 0) - 1).astype(np.int32)[end_node]
    for name, values in (("tree_id", tree), ("node_id", end_node)):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(at), pa.array(values))
    return table


def _no_tree(location: DirectoryLocation) -> TreepackError:
    return TreepackError(f"{location}: its nodes and trajectories do not form trees; build the trie again")
