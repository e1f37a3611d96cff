"""Prompts and prefixes of rollouts as packed rows; each of them ends in exactly one row.

    Trie, TurnPrefixes --anchor_prefixes--> NodePrefixes  the end of every node of the segment tree
    NodePrefixes, nodes --anchor_rows--> AnchorRow, ...  the tokens up to these ends, packed, and no later tokens

    1 2 3 | 4 5 | 6 7     a    row    1 2 3 4 5 8 9     ends:  3 of the prompt, 5 of turn 1 of a and b,
    1 2 3 | 4 5 | 8 9 | 1 b                ^   ^   ^           9 of turn 2 of b; tokens after the last end,
                                                               here the last turns 6 7 and 1, are not computed

The hidden state of a causal model at the last token of a prefix does not depend on later tokens, so one pass over a row
gives the values of all prefixes in it. If several rows repeat a prefix, only one of them has its end: the row of the
trajectory to which the end belongs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.research.trace.targets import TurnPrefixes
from treepack.sequences import SpanView
from treepack.trajectory import Int32, Int64, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie, sequences_of


@dataclass(frozen=True, slots=True)
class NodePrefixes:
    """The prefix of every inner node of a `SegmentTree`: the first `num_tokens` tokens of trajectory `owner`.

    All arrays are int64 [num_inner], by node: first the groups, whose prefixes are their prompts, then the prefixes
    after turns. `owner` is the first trajectory of the trie that passes through the node, and `num_trajectories` is the
    number of trajectories that pass through it.
    """

    trie: Trie
    owner: Int64
    num_tokens: Int64
    num_trajectories: Int64
    num_groups: int


class AnchorRow(NamedTuple):
    """A packed row, the nodes whose prefixes end in it, and the row index of the last `token` of each; int64 [n]."""

    row: Row
    node: Int64
    token: Int64


def anchor_prefixes(trie: Trie, ends: TurnPrefixes) -> NodePrefixes:
    """Return the prefix of every inner node of `ends.tree`.

    The prompt of a group is the longest common prefix of its trajectories before their first trained token: the tokens
    that are known before any of the trajectories is sampled. It does not depend on the kind of segments.

    Raises:
        TreepackError: the trajectories of a group differ in their first token.
    """
    tree = ends.tree
    owner, num_tokens = np.zeros(tree.num_inner, np.int64), np.zeros(tree.num_inner, np.int64)
    # Several trajectories pass through a node and the first represents it: node [2, 3, 2] -> nodes [2, 3], first [0, 1]
    nodes, first = np.unique(ends.node, return_index=True)
    owner[nodes], num_tokens[nodes] = ends.trajectory[first], ends.num_tokens[first]
    owner[: tree.num_groups] = np.unique(ends.group, return_index=True)[1]
    num_tokens[: tree.num_groups] = _prompt_lengths(trie, ends)
    assert num_tokens[tree.num_groups :].all(), "some trajectory passes through every inner node"
    empty = np.flatnonzero(num_tokens == 0)
    if len(empty):
        row = trie.trajectories.slice(int(owner[empty[0]]), 1).to_pylist()[0]
        raise TreepackError(
            f"{row['source']}: the rollouts of group {row['group_id']!r} have no prompt in common, so there is nothing "
            "to value before they are sampled; give rollouts of different prompts different group ids"
        )
    num_trajectories = np.bincount(tree.node, minlength=tree.num_inner)[: tree.num_inner]
    return NodePrefixes(trie, owner, num_tokens, num_trajectories, tree.num_groups)


def _prompt_lengths(trie: Trie, ends: TurnPrefixes) -> Int64:
    """Return the length of the common prefix of each group before its first trained token, int64 [num_groups]."""
    spans = SpanView.of(trie.trajectories)
    prompts: list[Int32 | None] = [None] * ends.tree.num_groups
    for i, tokens in enumerate(sequences_of(trie)):
        starts = spans[i][0]
        untrained = tokens[: starts[0] if len(starts) else None]
        group = int(ends.group[i])
        prompt = prompts[group]
        if prompt is None:
            prompts[group] = untrained
            continue
        # prompt [1, 2, 3, 4], untrained [1, 2, 5] -> size 3, differing [2] -> prompt [1, 2]
        size = min(len(prompt), len(untrained))
        differing = np.flatnonzero(prompt[:size] != untrained[:size])
        prompts[group] = prompt[: differing[0] if len(differing) else size]
    return np.array([0 if prompt is None else len(prompt) for prompt in prompts], np.int64)


def draw_nodes(prefixes: NodePrefixes, *, prefix_share: float, seed: int) -> Int64:
    """Draw all prompts, and random prefixes until they are `prefix_share` of the drawn nodes; return ascending nodes.

    If there are too few prefixes, all are drawn. One or more are drawn unless the share is 0. TRACE (arXiv 2606.11119)
    uses roots and "informative internal nodes" (section 4.3); the latter are 0.06 of the total (appendix E.6). Here a
    prefix is informative if two or more trajectories pass through it, so that its target is more than the outcome of
    one trajectory. Other prefixes are drawn only if these are too few. Mixed outcomes are not required, because that
    would bias values towards 0.5.
    """
    num_groups, num_prefixes = prefixes.num_groups, len(prefixes.owner) - prefixes.num_groups
    # share = n / (n + num_groups), so n = share / (1 - share) * num_groups: 0.06 and 100 groups -> ceil(6.38) = 7
    num_drawn = num_prefixes if prefix_share == 1 else math.ceil(prefix_share / (1 - prefix_share) * num_groups)
    drawn = num_groups + np.random.default_rng(seed).permutation(num_prefixes)
    # A stable sort by "fewer than 2 trajectories" puts informative prefixes first and keeps the random order otherwise.
    drawn = drawn[np.argsort(prefixes.num_trajectories[drawn] < 2, kind="stable")][:num_drawn]
    return np.concatenate([np.arange(num_groups), np.sort(drawn)])


def anchor_rows(prefixes: NodePrefixes, nodes: Int64, *, capacity: int) -> list[AnchorRow]:
    """Pack the prefixes of `nodes` (ascending) into rows of at most `capacity` tokens; each node ends in one row.

    Each owner becomes one trajectory as long as its longest prefix; its shorter prefixes end inside it. Groups and
    training steps share their common tokens.

    Raises:
        TreepackError: a prefix is longer than the capacity.
    """
    _refuse_too_long(prefixes, nodes, capacity)
    order = nodes[np.argsort(prefixes.owner[nodes], kind="stable")]
    # owners of nodes 0 to 3 [5, 7, 5, 5] -> order [0, 2, 3, 1], owners [5, 7] from [0, 3] -> {5: [0, 2, 3], 7: [1]}
    owners, starts = np.unique(prefixes.owner[order], return_index=True)
    nodes_of = dict(zip(owners.tolist(), np.split(order, starts[1:]), strict=True))
    trie = build_trie(_longest_prefixes(prefixes, nodes_of))
    plan = plan_rows(trie, capacity=capacity)
    return [_anchor_row(prefixes, row, nodes_of) for row in pack_rows(trie, plan)]


def _longest_prefixes(prefixes: NodePrefixes, nodes_of: dict[int, Int64]) -> Iterator[Trajectory]:
    """Yield the longest prefix of each owner as a trajectory, whose id is the owner's number."""
    nothing = np.zeros(0, np.int32)
    for i, tokens in enumerate(sequences_of(prefixes.trie)):
        if i in nodes_of:
            cut = tokens[: prefixes.num_tokens[nodes_of[i]].max()].copy()  # a view would keep the whole rollout
            yield Trajectory(str(i), str(i), Tokens(cut, nothing, nothing, np.zeros(0, np.float64)))


def _anchor_row(prefixes: NodePrefixes, row: Row, nodes_of: dict[int, Int64]) -> AnchorRow:
    """Return the row with the nodes that end in it and their last tokens."""
    nodes, tokens = [], []
    for name, end in zip(row.trajectory_ids, row.trajectory_ends.tolist(), strict=True):
        row_nodes = nodes_of[int(name)]
        # The tokens whose subtree contains `end` are its ancestors and itself, in order: the path of the trajectory.
        # subtree_end [4, 2, 4, 4], end 3: token 1 is on another branch -> path [0, 2, 3]
        path = np.flatnonzero(row.subtree_end[: end + 1] > end)
        nodes.append(row_nodes)
        tokens.append(path[prefixes.num_tokens[row_nodes] - 1])
    return AnchorRow(row, np.concatenate(nodes), np.concatenate(tokens))


def _refuse_too_long(prefixes: NodePrefixes, nodes: Int64, capacity: int) -> None:
    """Refuse prefixes that do not fit in a row.

    Raises:
        TreepackError: with the number of tokens of the longest prefix.
    """
    longest = int(nodes[prefixes.num_tokens[nodes].argmax()])
    if prefixes.num_tokens[longest] > capacity:
        name = prefixes.trie.trajectories["trajectory_id"][int(prefixes.owner[longest])].as_py()
        raise TreepackError(
            f"a prefix of trajectory {name!r} has {prefixes.num_tokens[longest]:,} tokens and rows hold {capacity:,}; "
            f"give --capacity {prefixes.num_tokens[longest]} or more"
        )


def tokens_alone(prefixes: NodePrefixes, nodes: Int64) -> int:
    """Return the number of tokens to compute if each prefix of `nodes` were encoded alone."""
    return int(prefixes.num_tokens[nodes].sum())
