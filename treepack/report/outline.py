"""Lines and places of the nodes of some trajectories in a drawing of their tree, with the root at the left.

    Trie, trajectories, SortedRollouts --outline--> NodeBlock, NodeBlock, ...

A chain of nodes of the trie is one block if none of these trajectories branches or ends inside it. A rollout is one
line along its last trajectory, as on the page (layout.js). Branches of its earlier trajectories that nothing continues
are put into the line, before the block that follows them in time, so that no token is drawn twice.

    prompt --- history --- answer 2          prompt | answer 1 | history | answer 2
           \\
            answer 1
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from treepack.report.rollouts import SortedRollouts
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


@dataclass(slots=True)
class NodeBlock:
    """A chain of nodes of the trie: `size` tokens that start at `x` on the line, `rows` rows from `row` on.

    `is_branch`: it is a branch in a line, which nothing continues. `finals` are the rollouts whose last trajectory ends
    here, and `ends` (rollout, number) of all that end here. The other fields are the tree and its division into lines.
    """

    nodes: list[int]
    size: int
    parent: int
    x: int = 0
    row: int = 0
    rows: int = 1
    is_branch: bool = False
    is_main: bool = False
    last: int = 0  # one past the last block of its subtree
    ends: list[tuple[int, int]] = field(default_factory=list)
    finals: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


def outline(trie: Trie, members: Int64, rollouts: SortedRollouts) -> list[NodeBlock]:
    """Return the blocks of the nodes on the paths of the trajectories `members`, depth-first, with their places."""
    blocks = _blocks(trie, members, rollouts)
    for i in range(len(blocks) - 1, -1, -1):
        blocks[i].last = max(blocks[i].last, i + 1)
        if (up := blocks[i].parent) >= 0:
            blocks[up].last = max(blocks[up].last, blocks[i].last)
    finals: dict[int, tuple[int, int]] = {}
    for i, block in enumerate(blocks):
        for rollout, number in block.ends:
            finals[rollout] = max(finals.get(rollout, (-1, -1)), (number, i))
    for rollout, (_, at) in sorted(finals.items()):
        blocks[at].finals.append(rollout)
        while at >= 0 and not blocks[at].is_main:
            blocks[at].is_main = True
            at = blocks[at].parent
    children = defaultdict(list)
    for i, block in enumerate(blocks):
        children[block.parent].append(i)
    for i in range(len(blocks)):
        _divide(blocks, i, children[i], finals)
    _place(blocks, children[-1])
    return blocks


def _blocks(trie: Trie, members: Int64, rollouts: SortedRollouts) -> list[NodeBlock]:
    """Return the chains of nodes on the paths of `members`, depth-first, with their parents and ends."""
    nodes = np.flatnonzero(_on_paths(trie, members))
    place = dict(zip(nodes.tolist(), range(len(nodes)), strict=True))
    parent = [place.get(up, -1) for up in trie.parent[nodes].tolist()]
    children = np.bincount([up for up in parent if up >= 0], minlength=len(nodes))
    ends = defaultdict(list)
    for i in members.tolist():
        ends[int(trie.end_node[i])].append((int(rollouts.of[i]), int(rollouts.number[i])))
    blocks: list[NodeBlock] = []
    block_of: list[int] = []
    sizes = trie.node_length[nodes].tolist()
    for i, (node, up) in enumerate(zip(nodes.tolist(), parent, strict=True)):
        if up >= 0 and children[up] == 1 and not blocks[block_of[up]].ends:  # its parent's block is the last one
            blocks[-1].nodes.append(node)
            blocks[-1].size += sizes[i]
        else:
            blocks.append(NodeBlock([node], sizes[i], block_of[up] if up >= 0 else -1))
        blocks[-1].ends += ends.get(node, [])
        block_of.append(len(blocks) - 1)
    return blocks


def _divide(blocks: list[NodeBlock], at: int, children: list[int], finals: dict[int, tuple[int, int]]) -> None:
    """Divide the children of a block into lines, and branches before a line or after the block."""
    block = blocks[at]
    block.lines = [child for child in children if blocks[child].is_main]
    branches = [child for child in children if not blocks[child].is_main]
    for child in sorted(branches, key=lambda i: min(end[1] for b in blocks[i : blocks[i].last] for end in b.ends)):
        ends = {finals[rollout][1] for b in blocks[child : blocks[child].last] for rollout, _ in b.ends}
        # The line that contains the last end of each of its rollouts; None if that is elsewhere in the tree.
        hosts = {next((line for line in block.lines if line <= end < blocks[line].last), None) for end in ends}
        if not block.is_main or (None not in hosts and len(hosts) > 1):
            block.after.append(child)
        elif None in hosts:
            block.lines.append(child)
        else:
            blocks[next(host for host in hosts if host is not None)].before.append(child)


def _place(blocks: list[NodeBlock], roots: list[int]) -> None:
    """Set x, rows and branches of all blocks. No recursion, because trees can be thousands of nodes deep."""
    order: list[int] = []
    waiting = roots[::-1]
    right = [0] * len(blocks)
    row = 0
    while waiting:
        i = waiting.pop()
        order.append(i)
        block = blocks[i]
        block.x = _put(blocks, block.before, right[block.parent] if block.parent >= 0 else 0)
        right[i] = _put(blocks, block.after, block.x + block.size)
        if not block.lines:
            block.row, row = row, row + 1
        waiting += block.lines[::-1]
    for i in reversed(order):
        block = blocks[i]
        if block.lines:
            block.row, block.rows = blocks[block.lines[0]].row, sum(blocks[line].rows for line in block.lines)
        for branch in [*block.before, *block.after]:
            for b in blocks[branch : blocks[branch].last]:
                b.row, b.rows, b.is_branch = block.row, block.rows, True


def _put(blocks: list[NodeBlock], branches: list[int], x: int) -> int:
    """Put branches one after another from x on, and return their end."""
    for branch in branches:
        for block in blocks[branch : blocks[branch].last]:
            block.x = x
            x += block.size
    return x


def _on_paths(trie: Trie, members: Int64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of the nodes on the paths of `members`: an end is in the subtree of every node of its path."""
    # Nodes 0 to 3, node_end [4, 3, 3, 4], ends [2]: before each node [0, 0, 0, 1] ends, before its end [1, 1, 1, 1]
    # -> on the paths [1, 1, 1, 0].
    ends = np.sort(trie.end_node[members])
    first = np.searchsorted(ends, np.arange(trie.num_nodes), side="left")
    return np.asarray(first < np.searchsorted(ends, trie.node_end, side="left"))
