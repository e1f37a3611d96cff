"""What is drawn, whatever it was read from: nodes of tokens, what of them is trained, and the trajectories that end.

    whole trie or group   forest_of_trie(trie)             weights and endings of all trajectories
    one trajectory        path_of_trie(trie, rollout, u)   the nodes that it passes, its own weights
                          forest_of_trajectory(rollout)    one node
    packed row            forest_of_row(row)               nodes in the order of the row
                          path_of_row(row, i)              the nodes of one of its trajectories

Every loss weight is the sum over the trajectories shown, as in the column `loss_weight` of packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.columns import SpanView
from treepack.pack.row import Row
from treepack.trajectory import Float64, Int32, Int64, Tokens, Trajectory, positions
from treepack.trie.trie import Trie, paths


@dataclass(frozen=True, slots=True)
class Endings:
    """The trajectories of a forest by the node in which they end, which never decreases; NaN where nothing is known."""

    node: Int64
    trajectory_ids: list[str]
    step: list[int | None]
    reward: Float64
    advantage: Float64

    def within(self, first: int, stop: int) -> range:
        """Indices of those that end in the nodes `first .. stop - 1`."""
        a, b = np.searchsorted(self.node, [first, stop]).tolist()
        return range(a, b)


@dataclass(frozen=True, slots=True)
class DrawnForest:
    """Nodes in depth-first order; node u owns the tokens `start[u] .. start[u + 1] - 1`.

    `tokens` int32 and `loss_weight` float64 are [num_tokens], the latter the sum over the trajectories shown of their
    own weight at the token. `depth[u]` tokens come before the node on its path, its subtree is the nodes
    `u .. node_end[u] - 1`, `num_passing[u]` trajectories pass through it, `parent[u]` is -1 at a root. `values` are
    further figures per token, NaN where a token has none.
    """

    tokens: Int32
    loss_weight: Float64
    start: Int64
    depth: Int64
    parent: Int64
    node_end: Int64
    num_passing: Int64
    endings: Endings
    values: dict[str, Float64]

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def size(self) -> Int64:
        """Tokens of each node."""
        return np.diff(self.start)

    @property
    def subtree_tokens(self) -> Int64:
        """Tokens of each node and everything below it."""
        return self.start[self.node_end] - self.start[:-1]

    def path_before(self, node: int, count: int) -> list[int]:
        """The last token ids, at most `count`, before the node on its path."""
        found: list[int] = []
        while (node := int(self.parent[node])) >= 0 and len(found) < count:
            missing = count - len(found)
            own = self.tokens[max(self.start[node], self.start[node + 1] - missing) : self.start[node + 1]]
            found = own.tolist() + found
        return found


def trained_runs(loss_weight: Float64) -> int:
    """How many runs of trained tokens there are, which are turns where turns are trained."""
    trained = loss_weight != 0
    return int((trained & ~np.concatenate([[False], trained[:-1]])).sum())


def forest_of_trie(trie: Trie) -> DrawnForest:
    """All trees of `trie`, every token with the sum of its loss weights."""
    spans, weight = SpanView.of(trie.trajectories), trie.trajectories["weight"].to_numpy()
    loss_weight = np.zeros(trie.tokens_tree)
    for i, path in enumerate(paths(trie.end_node, trie.node_start, trie.depth)):
        starts, ends, own = spans[i]
        loss_weight[path[positions(starts, ends)]] += np.repeat(own, ends - starts) * weight[i]
    return DrawnForest(
        tokens=trie.tokens,
        loss_weight=loss_weight,
        start=trie.node_start,
        depth=trie.depth,
        parent=trie.parent.astype(np.int64),
        node_end=trie.node_end.astype(np.int64),
        num_passing=trie.num_passing.astype(np.int64),
        endings=Endings(
            trie.end_node.astype(np.int64),
            trie.trajectories["trajectory_id"].to_pylist(),
            trie.trajectories["step"].to_pylist(),
            _numbers(trie.trajectories["reward"]),
            _numbers(trie.trajectories["advantage"]),
        ),
        values={},
    )


def path_of_trie(trie: Trie, trajectory: Trajectory, node: int) -> DrawnForest:
    """The path of `trajectory`, which ends in `node`, with the trajectories of the whole trie that share each part."""
    nodes = [node]
    while (up := int(trie.parent[nodes[-1]])) >= 0:
        nodes.append(up)
    index = np.array(nodes[::-1])
    start = np.concatenate([trie.depth[index], [trie.path_length[node]]])
    return _chain(trajectory, start, trie.num_passing[index].astype(np.int64))


def forest_of_trajectory(trajectory: Trajectory) -> DrawnForest:
    """One tokenised rollout by itself, as a single node."""
    content = trajectory.content
    assert isinstance(content, Tokens)
    return _chain(trajectory, np.array([0, len(content.tokens)]), np.ones(1, np.int64))


def _chain(trajectory: Trajectory, start: Int64, num_passing: Int64) -> DrawnForest:
    content = trajectory.content
    assert isinstance(content, Tokens)
    at = positions(content.starts, content.ends)
    loss_weight = np.zeros(len(content.tokens))
    loss_weight[at] = np.repeat(content.span_weights, content.ends - content.starts) * trajectory.weight
    num = len(num_passing)
    values = {}
    for name in ("advantages", "sampling_logprobs", "old_logprobs", "ref_logprobs"):
        given = getattr(content, name)
        if given is not None:
            values[name.removesuffix("s")] = column = np.full(len(content.tokens), np.nan)
            column[at] = given
    return DrawnForest(
        tokens=content.tokens,
        loss_weight=loss_weight,
        start=start,
        depth=start[:-1],
        parent=np.arange(num) - 1,
        node_end=np.full(num, num),
        num_passing=num_passing,
        endings=Endings(
            np.array([num - 1]),
            [trajectory.trajectory_id],
            [trajectory.step],
            _numbers([trajectory.reward]),
            _numbers([trajectory.advantage]),
        ),
        values=values,
    )


def forest_of_row(row: Row) -> DrawnForest:
    """The nodes of a packed row: runs of tokens along which neither the parent nor `subtree_end` jumps."""
    ends_here = np.zeros(row.num_tokens, bool)
    ends_here[row.trajectory_ends] = True
    begins = np.ones(row.num_tokens, bool)
    begins[1:] = (row.parent[1:] != np.arange(row.num_tokens - 1)) | (np.diff(row.subtree_end) != 0) | ends_here[:-1]
    start = np.append(np.flatnonzero(begins), row.num_tokens).astype(np.int64)
    node_of = np.cumsum(begins) - 1
    above = row.parent[start[:-1]]
    rewards = None if row.terms is None else row.terms.trajectory_rewards
    missing = np.full(len(row.trajectory_ids), np.nan)
    return DrawnForest(
        tokens=row.input_ids,
        loss_weight=row.loss_weight,
        start=start,
        depth=row.position_ids[start[:-1]].astype(np.int64),
        parent=np.where(above < 0, -1, node_of[above]).astype(np.int64),
        node_end=np.searchsorted(start, row.subtree_end[start[:-1]]).astype(np.int64),
        num_passing=row.scale[start[:-1]].astype(np.int64),
        endings=Endings(
            node_of[row.trajectory_ends].astype(np.int64),
            list(row.trajectory_ids),
            [row.step] * len(row.trajectory_ids),
            missing if rewards is None else rewards.astype(np.float64),
            _one_advantage_each(row),
        ),
        values={},
    )


def path_of_row(row: Row, trajectory: int) -> DrawnForest:
    """The path of one trajectory of a row; its own weights where the row has terms, else those of all that pass."""
    whole = forest_of_row(row)
    nodes = [int(whole.endings.node[trajectory])]
    while (up := int(whole.parent[nodes[-1]])) >= 0:
        nodes.append(up)
    index = np.array(nodes[::-1])
    tokens = np.concatenate([np.arange(whole.start[u], whole.start[u + 1]) for u in index.tolist()])
    loss_weight, values = row.loss_weight[tokens], {}
    if row.terms is not None:
        mine = row.terms.trajectory == trajectory
        at = np.searchsorted(tokens, row.terms.token[mine])
        loss_weight = np.zeros(len(tokens))
        loss_weight[at] = row.terms.weight[mine]
        for name in ("advantage", "sampling_logprob", "old_logprob", "ref_logprob", "entropy"):
            given = getattr(row.terms, name)
            if given is not None:
                values[name] = column = np.full(len(tokens), np.nan)
                column[at] = given[mine]
    num = len(index)
    return DrawnForest(
        tokens=row.input_ids[tokens],
        loss_weight=loss_weight,
        start=np.concatenate([[0], np.cumsum(whole.size[index])]),
        depth=whole.depth[index],
        parent=np.arange(num) - 1,
        node_end=np.full(num, num),
        num_passing=whole.num_passing[index],
        endings=Endings(
            np.array([num - 1]),
            [row.trajectory_ids[trajectory]],
            [row.step],
            whole.endings.reward[[trajectory]],
            whole.endings.advantage[[trajectory]],
        ),
        values=values,
    )


def _one_advantage_each(row: Row) -> Float64:
    """The advantage of each trajectory whose terms all have the same one."""
    found = np.full(len(row.trajectory_ids), np.nan)
    if row.terms is not None and row.terms.advantage is not None:
        for i in range(len(found)):
            own = row.terms.advantage[row.terms.trajectory == i]
            if len(own) and (own == own[0]).all():
                found[i] = own[0]
    return found


def _numbers(values: Any) -> Float64:
    """Numbers of a list or column, NaN where one is missing."""
    given = values if isinstance(values, list) else values.to_pylist()
    return np.array([np.nan if value is None else value for value in given], np.float64)
