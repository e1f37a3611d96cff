"""A forest as lines: the place of the first token at the left, then the tree, then the lines of a node.

    0  * 3 tokens x3                      the trunk
       | 7 8 9
    3  |-* 2 tokens, 2 trained  = a       a branch off it
       |   [1 2]
    3  * 4 tokens x2, 4 trained           the trunk continues with the child that has the largest subtree
       | [3 4 5 6]
    7  |-* 1 token, 1 trained  = b
       |   [7]
    7  '-* 2 tokens, 2 trained  = c       if all children are leaves, none of them is the trunk
           [8 9]

A branch that branches again has at most half of the tokens below its trunk, so n tokens are never drawn deeper than
log2(n). Of large forests, the nodes with the largest subtrees are drawn; the others are counted at their parents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from rich.text import Text

from treepack.analysis.show.bodies import DrawingOptions
from treepack.analysis.show.figures import quantity_in_digits
from treepack.analysis.show.forest import DrawnForest
from treepack.analysis.show.nodes import NodeLines

# rich.tree.Tree cannot replace this: it indents every child, so a chain of a thousand turns would be drawn a thousand
# levels deep, it has no gutter for places, and it holds and walks the whole tree before the first line.

_MAX_INDENT = 12  # levels by which the nodes of a row are indented: 24 columns, a quarter of a usual terminal


def draw_trees(forest: DrawnForest, look: DrawingOptions) -> Iterator[Text]:
    """Yield the trees of a forest one below the other, as trunks with branches, and their steps if these differ."""
    tree = _TreeDrawing(forest, look)
    roots = tree.children[-1]
    steps = forest.endings.step
    for root in roots:
        if tree.nodes.shown[root]:
            step = steps[forest.endings.within(root, int(forest.node_end[root]))[0]]
            yield from tree.trunk(root, "", "", notes=[f"step {step}"] if len(set(steps)) > 1 else [])
    yield from tree.missing(roots, "", "tree")


class _TreeDrawing:
    """The trunks and branches of a forest; `nodes` draws single nodes, and `children[-1]` are the roots."""

    def __init__(self, forest: DrawnForest, look: DrawingOptions) -> None:
        """Gather the children of each node."""
        self.forest = forest
        self.nodes = NodeLines(forest, look, forest.depth)
        self.children: dict[int, list[int]] = {}
        for node, up in enumerate(forest.parent.tolist()):
            self.children.setdefault(up, []).append(node)

    def trunk(self, node: int, first: str, prefix: str, *, notes: Iterable[str] = ()) -> Iterator[Text]:
        """Yield a node and its subtree, the first line after the text `first`, all others after `prefix`."""
        shown = self.nodes.shown
        # A loop along the trunk and recursion into branches: the depth of recursion is log2 of the number of tokens.
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
        """Return the branches off a node and the child that continues the trunk, if any."""
        if not children:
            return [], None
        largest = max(children, key=lambda child: int(self.nodes.subtree[child]))
        # Leaves stay branches, so that siblings without children look alike.
        if not self.nodes.shown[largest] or (len(children) > 1 and largest not in self.children):
            return children, None
        return [child for child in children if child != largest], largest

    def missing(self, siblings: list[int], prefix: str, noun: str) -> Iterator[Text]:
        """Yield a line that counts the `siblings` that are not drawn, if there are any."""
        hidden = [node for node in siblings if not self.nodes.shown[node]]
        if hidden:
            what = quantity_in_digits(len(hidden), f"more {noun}")
            yield self.nodes.left_out(prefix, what, [(node, int(self.forest.node_end[node])) for node in hidden])


def row_lines(forest: DrawnForest, look: DrawingOptions) -> Iterator[Text]:
    """Yield the nodes of a packed row in its order, each with its interval `[first token, subtree_end)` at the left."""
    nodes = NodeLines(forest, look, forest.start[:-1], intervals=True)
    # Only a node with siblings is one level deeper than its parent, so a chain of turns stays at the left.
    level = [0] * forest.num_nodes
    children = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.num_nodes)
    for node, up in enumerate(forest.parent.tolist()):
        level[node] = 0 if up < 0 else level[up] + (children[up] > 1)
    node = 0
    while node < forest.num_nodes:
        indent = "  " * min(level[node], _MAX_INDENT)
        if nodes.shown[node]:
            yield from nodes.node(node, indent, indent + "  ", notes=_notes(forest, node))
            node += 1
            continue
        # One line for a run of nodes that are not drawn.
        stop = node
        while stop < forest.num_nodes and not nodes.shown[stop]:
            stop += 1
        yield nodes.left_out(indent, quantity_in_digits(stop - node, "more node"), [(node, stop)])
        node = stop


def _notes(forest: DrawnForest, node: int) -> list[str]:
    """Return the position of a node's first token if it is not its index, and its parent if not the token before."""
    first, position, up = int(forest.start[node]), int(forest.depth[node]), int(forest.parent[node])
    parts = [f"position {position}"] if position != first else []
    if up >= 0 and forest.start[up + 1] != first:
        parts.append(f"parent {forest.start[up + 1] - 1}")
    return parts


def path_lines(forest: DrawnForest, look: DrawingOptions) -> Iterator[Text]:
    """Yield one trajectory turn by turn: the nodes of its path, and in each the runs of trained and other tokens."""
    nodes = NodeLines(forest, look, forest.depth, by_turn=True)
    for node in range(forest.num_nodes):
        if forest.num_nodes > 1:
            yield from nodes.header(node, "", "")
        yield from nodes.body(node, "")
