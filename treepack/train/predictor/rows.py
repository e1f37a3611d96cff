"""Prompts and prefixes of rollouts as packed rows in which each is found exactly once.

    Trie, Anchors --anchor_prefixes--> Prefixes        where every node of the segment tree ends
    Prefixes, nodes --anchor_rows--> AnchorRow, ...    the tokens up to those ends, packed; nothing behind them

    1 2 3 | 4 5 | 6 7     a    row    1 2 3 4 5 8 9     ends of:  3 the prompt, 5 after turn 1 of a and b,
    1 2 3 | 4 5 | 8 9 | 1 b                ^   ^   ^              9 after turn 2 of b; what is behind an end, the
                                                                  last turns 6 7 and 1, is not computed

A causal model's hidden state at the last token of a prefix is that of the prefix alone, so one pass over a row values
all prefixes in it. Where rows repeat a prefix, each end in it still belongs to one trajectory and so to one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treepack.columns import SpanView
from treepack.errors import TreepackError
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.rl.trace.targets import Anchors
from treepack.trajectory import Int32, Int64, Tokens, Trajectory
from treepack.trie.build import build_trie
from treepack.trie.trie import Trie, sequences_of


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefix of every inner node of a `SegmentTree`: the first `num_tokens` tokens of trajectory `owner`.

    All int64 [num_inner], by node: groups first, whose prefixes are their prompts, then prefixes after turns. `owner`
    is the first trajectory of the trie that passes through the node, `num_trajectories` counts those that do.
    """

    trie: Trie
    owner: Int64
    num_tokens: Int64
    num_trajectories: Int64
    num_groups: int


class AnchorRow(NamedTuple):
    """A packed row, and the nodes whose prefixes end in it with the row index of their last `token`, int64 [n]."""

    row: Row
    node: Int64
    token: Int64


def anchor_prefixes(trie: Trie, found: Anchors) -> Prefixes:
    """Where the prefix of every inner node of `found.tree` ends.

    The prompt of a group is what all its trajectories have in common before their first trained token, whatever the
    segments are: what is known before any of them is sampled.

    Raises:
        TreepackError: a group whose trajectories have not even their first token in common.
    """
    tree = found.tree
    owner, num_tokens = np.zeros(tree.num_inner, np.int64), np.zeros(tree.num_inner, np.int64)
    nodes, first = np.unique(found.node, return_index=True)
    owner[nodes], num_tokens[nodes] = found.trajectory[first], found.num_tokens[first]
    owner[: tree.num_groups] = np.unique(found.group, return_index=True)[1]
    num_tokens[: tree.num_groups] = _prompt_lengths(trie, found)
    assert num_tokens[tree.num_groups :].all(), "some trajectory passes through every inner node"
    empty = np.flatnonzero(num_tokens == 0)
    if len(empty):
        row = trie.trajectories.slice(int(owner[empty[0]]), 1).to_pylist()[0]
        raise TreepackError(
            f"{row['source']}: the rollouts of group {row['group_id']!r} have no prompt in common, so there is nothing "
            "to value before they are sampled; give rollouts of different prompts different group ids"
        )
    passing = np.bincount(tree.node, minlength=tree.num_inner)[: tree.num_inner]
    return Prefixes(trie, owner, num_tokens, passing, tree.num_groups)


def _prompt_lengths(trie: Trie, found: Anchors) -> Int64:
    """Tokens that the trajectories of each group have in common before the first trained one, int64 [num_groups]."""
    spans = SpanView.of(trie.trajectories)
    prompts: list[Int32 | None] = [None] * found.tree.num_groups
    for i, tokens in enumerate(sequences_of(trie)):
        starts = spans[i][0]
        own = tokens[: starts[0] if len(starts) else None]
        group = int(found.group[i])
        known = prompts[group]
        if known is None:
            prompts[group] = own
            continue
        size = min(len(known), len(own))
        differing = np.flatnonzero(known[:size] != own[:size])
        prompts[group] = known[: differing[0] if len(differing) else size]
    return np.array([0 if prompt is None else len(prompt) for prompt in prompts], np.int64)


def draw_nodes(prefixes: Prefixes, *, prefix_share: float, seed: int) -> Int64:
    """All prompts, and at random so many prefixes that they are `prefix_share` of what is drawn; ascending nodes.

    All prefixes, where there are not enough, and one at least unless the share is 0. TRACE (arXiv 2606.11119) has
    roots and "informative internal nodes" (section 4.3), 0.06 of all being the latter (appendix E.6). Here a prefix
    informs if two or more trajectories pass through it, so that its target says more than how one of them ended; others
    are drawn only where these are too few. Whether outcomes are mixed plays no part: it would bend values towards 0.5.
    """
    num_groups, num_prefixes = prefixes.num_groups, len(prefixes.owner) - prefixes.num_groups
    wanted = num_prefixes if prefix_share == 1 else math.ceil(prefix_share / (1 - prefix_share) * num_groups)
    drawn = num_groups + np.random.default_rng(seed).permutation(num_prefixes)
    drawn = drawn[np.argsort(prefixes.num_trajectories[drawn] < 2, kind="stable")][:wanted]
    return np.concatenate([np.arange(num_groups), np.sort(drawn)])


def anchor_rows(prefixes: Prefixes, nodes: Int64, *, capacity: int) -> list[AnchorRow]:
    """Rows of at most `capacity` tokens that hold the prefixes of `nodes`, ascending; each node is in one row.

    Each owner gives one trajectory, as long as its longest prefix; the shorter ones end on its way. Groups and training
    steps share what they have in common.

    Raises:
        TreepackError: a prefix longer than the capacity.
    """
    _refuse_too_long(prefixes, nodes, capacity)
    order = nodes[np.argsort(prefixes.owner[nodes], kind="stable")]
    owners, begin = np.unique(prefixes.owner[order], return_index=True)
    held = dict(zip(owners.tolist(), np.split(order, begin[1:]), strict=True))
    trie = build_trie(_owned(prefixes, held))
    plan = plan_rows(trie, capacity=capacity)
    return [_with_ends(prefixes, row, held) for row in pack_rows(trie, plan)]


def _owned(prefixes: Prefixes, held: dict[int, Int64]) -> Iterator[Trajectory]:
    nothing = np.zeros(0, np.int32)
    for i, tokens in enumerate(sequences_of(prefixes.trie)):
        if i in held:
            cut = tokens[: prefixes.num_tokens[held[i]].max()].copy()  # a view would keep the whole rollout
            yield Trajectory(str(i), str(i), Tokens(cut, nothing, nothing, np.zeros(0, np.float64)))


def _with_ends(prefixes: Prefixes, row: Row, held: dict[int, Int64]) -> AnchorRow:
    nodes, tokens = [], []
    for name, end in zip(row.trajectory_ids, row.trajectory_ends.tolist(), strict=True):
        own = held[int(name)]
        path = np.flatnonzero(row.subtree_end[: end + 1] > end)
        nodes.append(own)
        tokens.append(path[prefixes.num_tokens[own] - 1])
    return AnchorRow(row, np.concatenate(nodes), np.concatenate(tokens))


def _refuse_too_long(prefixes: Prefixes, nodes: Int64, capacity: int) -> None:
    longest = int(nodes[prefixes.num_tokens[nodes].argmax()])
    if prefixes.num_tokens[longest] > capacity:
        name = prefixes.trie.trajectories["trajectory_id"][int(prefixes.owner[longest])].as_py()
        raise TreepackError(
            f"a prefix of trajectory {name!r} has {prefixes.num_tokens[longest]:,} tokens and rows hold {capacity:,}; "
            f"give --capacity {prefixes.num_tokens[longest]} or more"
        )


def tokens_alone(prefixes: Prefixes, nodes: Int64) -> int:
    """Tokens of the prefixes of `nodes` if each were encoded by itself."""
    return int(prefixes.num_tokens[nodes].sum())
