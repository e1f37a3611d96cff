"""A forest as lines: the place of each token at the left, then the tree, then what a node holds.

    0  * 3 tokens x3                      the trunk
       | 7 8 9
    3  |-* 2 tokens, 2 trained  = a       a branch off it
       | | [1 2]
    3  * 4 tokens x2, 4 trained           the trunk goes on with the child that has most below it
       | [3 4 5 6]
    7  |-* 1 token, 1 trained  = b
       | | [7]
    7  '-* 2 tokens, 2 trained  = c       only where all children are leaves is none of them the trunk
         [8 9]

A branch that branches again has at most half of the tokens below its trunk, so that n tokens are never drawn deeper
than log2(n). Of large forests the nodes with most tokens below them are drawn; others are counted where they belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from treepack.analysis.show.bodies import Look
from treepack.analysis.show.figures import counted
from treepack.analysis.show.forest import DrawnForest
from treepack.analysis.show.nodes import Nodes
from treepack.analysis.show.wrapping import Line

LEVELS = 12  # by which nodes of a row are indented


def tree_lines(forest: DrawnForest, look: Look) -> Iterator[Line]:
    """The trees of a forest one below the other, as trunks with branches; their training steps if these differ."""
    tree = _TreeDrawing(forest, look)
    roots = tree.children[-1]
    steps = forest.endings.step
    for root in roots:
        if tree.nodes.shown[root]:
            step = steps[forest.endings.within(root, int(forest.node_end[root]))[0]]
            yield from tree.trunk(root, "", "", notes=[f"step {step}"] if len(set(steps)) > 1 else [])
    yield from tree.missing(roots, "", "tree")


class _TreeDrawing:
    """Trunks and branches of a forest, whose `nodes` draw themselves; the children of -1 are the roots."""

    def __init__(self, forest: DrawnForest, look: Look) -> None:
        """Gather the children of each node."""
        self.forest = forest
        self.nodes = Nodes(forest, look, forest.depth)
        self.children: dict[int, list[int]] = {}
        for node, up in enumerate(forest.parent.tolist()):
            self.children.setdefault(up, []).append(node)

    def trunk(self, node: int, first: str, prefix: str, *, notes: Iterable[str] = ()) -> Iterator[Line]:
        """A node and all below it; `first` stands before its first line, `prefix` before all others."""
        shown = self.nodes.shown
        while True:
            children = self.children.get(node, [])
            branches, largest = self._split(children)
            yield from self.nodes.node(node, first, prefix + ("| " if children else "  "), notes=notes)
            drawn = [child for child in branches if shown[child]]
            for child in drawn:
                last = largest is None and child == drawn[-1] and len(drawn) == len(branches)
                yield from self.trunk(child, prefix + ("'-" if last else "|-"), prefix + ("  " if last else "| "))
            yield from self.missing(branches, prefix + ("'-" if largest is None else "|-"), "branch")
            if largest is None:
                return
            node, first, notes = largest, prefix, ()

    def _split(self, children: list[int]) -> tuple[list[int], int | None]:
        """The branches off a node and the child that goes on with the trunk, if any."""
        if not children:
            return [], None
        largest = max(children, key=lambda child: int(self.nodes.subtree[child]))
        if not self.nodes.shown[largest] or (len(children) > 1 and largest not in self.children):
            return children, None
        return [child for child in children if child != largest], largest

    def missing(self, siblings: list[int], prefix: str, noun: str) -> Iterator[Line]:
        """A line for those of `siblings` that are not drawn, if any."""
        hidden = [node for node in siblings if not self.nodes.shown[node]]
        if hidden:
            what = counted(len(hidden), f"more {noun}")
            yield self.nodes.left_out(prefix, what, [(node, int(self.forest.node_end[node])) for node in hidden])


def row_lines(forest: DrawnForest, look: Look) -> Iterator[Line]:
    """The nodes of a packed row in its order, with the interval `[first token, subtree_end)` of each at the left."""
    nodes = Nodes(forest, look, forest.start[:-1], intervals=True)
    level = [0] * forest.num_nodes
    children = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.num_nodes)
    for node, up in enumerate(forest.parent.tolist()):
        level[node] = 0 if up < 0 else level[up] + (children[up] > 1)
    node = 0
    while node < forest.num_nodes:
        indent = "  " * min(level[node], LEVELS)
        if nodes.shown[node]:
            yield from nodes.node(node, indent, indent + "  ", notes=_whereabouts(forest, node))
            node += 1
            continue
        stop = node
        while stop < forest.num_nodes and not nodes.shown[stop]:
            stop += 1
        yield nodes.left_out(indent, counted(stop - node, "more node"), [(node, stop)])
        node = stop


def _whereabouts(forest: DrawnForest, node: int) -> list[str]:
    """The position and the parent of a node's first token where they are not what the token's index says."""
    first, position, up = int(forest.start[node]), int(forest.depth[node]), int(forest.parent[node])
    parts = [f"position {position}"] if position != first else []
    if up >= 0 and forest.start[up + 1] != first:
        parts.append(f"parent {forest.start[up + 1] - 1}")
    return parts


def path_lines(forest: DrawnForest, look: Look) -> Iterator[Line]:
    """One trajectory turn by turn: each node of its path, and each run of trained and of other tokens in it."""
    nodes = Nodes(forest, look, forest.depth, by_turn=True)
    for node in range(forest.num_nodes):
        if forest.num_nodes > 1:
            yield from nodes.header(node, "", "")
        yield from nodes.body(node, "")
