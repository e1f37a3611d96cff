"""One form for everything that is drawn: nodes of tokens, their loss weights, and the trajectories that end in them.

    whole trie or group   forest_of_trie(trie)             weights and endings of all trajectories
    one trajectory        path_of_trie(trie, rollout, u)   the nodes on its path, its own weights
                          forest_of_trajectory(rollout)    one node
    packed row            forest_of_row(row)               nodes in the order of the row
                          path_of_row(row, i)              the nodes of one of its trajectories

Every loss weight is the sum over the trajectories shown, as in the column `loss_weight` of packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.analysis.part_notes import part_notes
from treepack.columns import COLUMNS, Column, Numbers
from treepack.pack.row import Row
from treepack.sequences import SpanView
from treepack.trajectory import Float64, Int32, Int64, Tokens, Trajectory, positions
from treepack.trie.nodes import path_to, paths
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class _EndingTrajectories:
    """The trajectories of a forest, sorted by the node in which they end; an unknown reward or advantage is NaN.

    `notes` are from `part_notes`, if they are known.
    """

    node: Int64
    trajectory_ids: list[str]
    step: list[int | None]
    reward: Float64
    advantage: Float64
    notes: list[str] | None = None

    def within(self, first: int, stop: int) -> range:
        """Return the indices of the trajectories that end in the nodes `first .. stop - 1`."""
        # node [0, 2, 2, 5], nodes 1 .. 3 -> searchsorted [1, 4] -> [1, 3] -> indices 1, 2
        a, b = np.searchsorted(self.node, [first, stop]).tolist()
        return range(a, b)


@dataclass(frozen=True, slots=True)
class DrawnForest:
    """Nodes in depth-first order; node u owns the tokens `start[u] .. start[u + 1] - 1`.

    `tokens` int32 and `loss_weight` float64 are [num_tokens]; a loss weight is the sum, over the trajectories shown, of
    their own weight at the token. `depth[u]` tokens come before the node on its path, its subtree is the nodes
    `u .. node_end[u] - 1`, `num_passing[u]` trajectories pass through it, `parent[u]` is -1 at a root. `values` are
    further figures per token, NaN for a token without one.
    """

    tokens: Int32
    loss_weight: Float64
    start: Int64
    depth: Int64
    parent: Int64
    node_end: Int64
    num_passing: Int64
    endings: _EndingTrajectories
    values: dict[str, Float64]

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def size(self) -> Int64:
        """Return the number of tokens of each node."""
        return np.diff(self.start)

    def path_before(self, node: int, count: int) -> list[int]:
        """Return the last token ids, at most `count`, before the node on its path."""
        ids: list[int] = []
        while (node := int(self.parent[node])) >= 0 and len(ids) < count:
            missing = count - len(ids)
            last = self.tokens[max(self.start[node], self.start[node + 1] - missing) : self.start[node + 1]]
            ids = last.tolist() + ids
        return ids


def num_trained_runs(loss_weight: Float64) -> int:
    """Return the number of runs of trained tokens; if whole turns are trained, that is the number of turns."""
    trained = loss_weight != 0
    # trained [0, 1, 1, 0, 1], shifted [0, 0, 1, 1, 0] -> a run begins at [0, 1, 0, 0, 1]
    return int((trained & ~np.concatenate([[False], trained[:-1]])).sum())


def forest_of_trie(trie: Trie) -> DrawnForest:
    """Return all trees of `trie`, every token with the sum of its loss weights over all trajectories."""
    spans, weight = SpanView.of(trie.trajectories), trie.trajectories["weight"].to_numpy()
    loss_weight = np.zeros(trie.tokens_tree)
    for i, path in enumerate(paths(trie.end_node, trie.node_start, trie.depth)):
        starts, ends, span_weights = spans[i]
        # A path visits a token once, so no index repeats, and += adds every weight.
        loss_weight[path[positions(starts, ends)]] += np.repeat(span_weights, ends - starts) * weight[i]
    return DrawnForest(
        tokens=trie.tokens,
        loss_weight=loss_weight,
        start=trie.node_start,
        depth=trie.depth,
        parent=trie.parent.astype(np.int64),
        node_end=trie.node_end.astype(np.int64),
        num_passing=trie.num_passing.astype(np.int64),
        endings=_EndingTrajectories(
            trie.end_node.astype(np.int64),
            trie.trajectories["trajectory_id"].to_pylist(),
            trie.trajectories["step"].to_pylist(),
            _numbers(trie.trajectories["reward"]),
            _numbers(trie.trajectories["advantage"]),
            part_notes(trie),
        ),
        values={},
    )


def path_of_trie(trie: Trie, trajectory: Trajectory, node: int) -> DrawnForest:
    """Return the path of `trajectory`, which ends in `node`; `num_passing` counts trajectories of the whole trie."""
    index = path_to(trie.parent, node)
    # Nodes of 3, 2 and 4 tokens: depth [0, 3, 5] and path_length 9 -> start [0, 3, 5, 9]
    start = np.concatenate([trie.depth[index], [trie.path_length[node]]])
    return _chain(trajectory, start, trie.num_passing[index].astype(np.int64))


def forest_of_trajectory(trajectory: Trajectory) -> DrawnForest:
    """Return one tokenised rollout alone, as a single node."""
    content = trajectory.content
    assert isinstance(content, Tokens)
    return _chain(trajectory, np.array([0, len(content.tokens)]), np.ones(1, np.int64))


def _chain(trajectory: Trajectory, start: Int64, num_passing: Int64) -> DrawnForest:
    """Return a trajectory cut into nodes that begin at `start`, each the only child of the one before it."""
    content = trajectory.content
    assert isinstance(content, Tokens)
    at = positions(content.starts, content.ends)  # spans [1, 3) and [5, 6) -> [1, 2, 5]
    loss_weight = np.zeros(len(content.tokens))
    loss_weight[at] = np.repeat(content.span_weights, content.ends - content.starts) * trajectory.weight
    num = len(num_passing)
    values = {}
    for column in COLUMNS:
        entries = getattr(content, column.name, None)
        if entries is not None and isinstance(column.kind, Numbers):
            values[_label(column)] = numbers = np.full(len(content.tokens), np.nan)
            numbers[at] = entries
    return DrawnForest(
        tokens=content.tokens,
        loss_weight=loss_weight,
        start=start,
        depth=start[:-1],
        parent=np.arange(num) - 1,
        node_end=np.full(num, num),
        num_passing=num_passing,
        endings=_EndingTrajectories(
            np.array([num - 1]),
            [trajectory.trajectory_id],
            [trajectory.step],
            _numbers([trajectory.reward]),
            _numbers([trajectory.advantage]),
        ),
        values=values,
    )


def forest_of_row(row: Row) -> DrawnForest:
    """Return the nodes of a packed row: maximal runs of tokens of one `subtree_end`, each the child of the one before.

    A trajectory that ends inside such a run ends a node, too.
    """
    ends_here = np.zeros(row.num_tokens, bool)
    ends_here[row.trajectory_ends] = True
    # parent [-1, 0, 1, 1, 3], subtree_end [5, 5, 3, 5, 5] -> begins [1, 0, 1, 1, 0]: nodes 0-1, 2, 3-4
    begins = np.ones(row.num_tokens, bool)
    begins[1:] = (row.parent[1:] != np.arange(row.num_tokens - 1)) | (np.diff(row.subtree_end) != 0) | ends_here[:-1]
    start = np.append(np.flatnonzero(begins), row.num_tokens).astype(np.int64)
    node_of = np.cumsum(begins) - 1  # [1, 0, 1, 1, 0] -> [0, 0, 1, 2, 2]
    above = row.parent[start[:-1]]
    rewards = None if row.terms is None else row.terms.reward
    missing = np.full(len(row.trajectory_ids), np.nan)
    return DrawnForest(
        tokens=row.input_ids,
        loss_weight=row.loss_weight,
        start=start,
        depth=row.position_ids[start[:-1]].astype(np.int64),
        parent=np.where(above < 0, -1, node_of[above]).astype(np.int64),
        # subtree_end counts tokens, node_end nodes: start [0, 2, 3, 5], subtree_end 5 -> node 3
        node_end=np.searchsorted(start, row.subtree_end[start[:-1]]).astype(np.int64),
        num_passing=row.scale[start[:-1]].astype(np.int64),
        endings=_EndingTrajectories(
            node_of[row.trajectory_ends].astype(np.int64),
            list(row.trajectory_ids),
            [row.step] * len(row.trajectory_ids),
            missing if rewards is None else rewards.astype(np.float64),
            _common_advantages(row),
        ),
        values={},
    )


def path_of_row(row: Row, trajectory: int) -> DrawnForest:
    """Return the path of one trajectory of a row, with the weights of the trajectory if the row has terms.

    Without terms, a token has the sum of the weights of all trajectories that share it.
    """
    whole = forest_of_row(row)
    index = path_to(whole.parent, int(whole.endings.node[trajectory]))
    # Row indices of the path: nodes of rows [0, 3) and [5, 7) -> [0, 1, 2, 5, 6]
    tokens = np.concatenate([np.arange(whole.start[u], whole.start[u + 1]) for u in index.tolist()])
    loss_weight, values = row.loss_weight[tokens], {}
    if row.terms is not None:
        mine = row.terms.trajectory == trajectory
        # Row indices to places on the path: tokens [0, 1, 5, 6], terms of [1, 6] -> [1, 3]
        at = np.searchsorted(tokens, row.terms.token[mine])
        loss_weight = np.zeros(len(tokens))
        loss_weight[at] = row.terms.weight[mine]
        for column in COLUMNS:
            entries = getattr(row.terms, column.name)
            if entries is not None and isinstance(column.kind, Numbers):
                values[_label(column)] = numbers = np.full(len(tokens), np.nan)
                numbers[at] = entries[mine]
    num = len(index)
    return DrawnForest(
        tokens=row.input_ids[tokens],
        loss_weight=loss_weight,
        start=np.concatenate([[0], np.cumsum(whole.size[index])]),
        depth=whole.depth[index],
        parent=np.arange(num) - 1,
        node_end=np.full(num, num),
        num_passing=whole.num_passing[index],
        endings=_EndingTrajectories(
            np.array([num - 1]),
            [row.trajectory_ids[trajectory]],
            [row.step],
            whole.endings.reward[[trajectory]],
            whole.endings.advantage[[trajectory]],
        ),
        values=values,
    )


def _label(column: Column) -> str:
    return column.packed.removeprefix("term_")


def _common_advantages(row: Row) -> Float64:
    """Return the advantage of each trajectory whose terms all have the same one, and NaN for the others."""
    common = np.full(len(row.trajectory_ids), np.nan)
    if row.terms is not None and row.terms.advantage is not None:
        for i in range(len(common)):
            advantages = row.terms.advantage[row.terms.trajectory == i]
            if len(advantages) and (advantages == advantages[0]).all():
                common[i] = advantages[0]
    return common


def _numbers(values: Any) -> Float64:
    """Return the numbers of a list or column, with NaN for None."""
    numbers = values if isinstance(values, list) else values.to_pylist()
    return np.array([np.nan if value is None else value for value in numbers], np.float64)
