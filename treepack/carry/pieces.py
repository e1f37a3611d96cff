r"""The pieces of a row: which tokens run together, in which order, and where their keys and values lie.

    subtree_end, parent, limit --cut_row--> pieces --plan_row--> passes, in the order in which they run

A row has its tokens in depth-first order. A token is trunk if more than `limit` tokens, itself included, are in its
subtree. A trunk piece is a run of trunk tokens, which is always a chain. Between the trunk pieces, a bundle is a run of
whole subtrees. A piece has at most `limit` tokens.

    limit 4      0 - 1 - 2 - 3 - 4        tokens 0, 1 and 2 are trunk: their subtrees have 10, 9 and 5 tokens
                     |    \
                     |     5 - 6          trunk piece 0 1 2 | bundle 3 4 5 6 | bundle 7 8 9
                     | \
                     9  7 - 8

A bundle runs forward and backward at once. A trunk piece is pushed: it runs forward without a graph, and its keys and
values stay on a stack. It is popped when everything that hangs on it is done: then it runs forward again and backward.
So the backward computes each token once, and the forward computes trunk tokens twice. Last in, first out: the stack is
a path of the tree.

No cut into pieces of at most `limit` tokens runs fewer tokens twice: a trunk token has descendants in another piece,
which need its keys and values before its backward pass.

A trunk piece ends after a token that has two trunk children or more, or at most `SPARE` tokens later. So when another
piece is pushed, all tokens of the stack are its ancestors, except for these few, and the stack is hardly longer than
the longest path and its gaps: each piece begins at a multiple of `ALIGNMENT` places. Without the few, a piece ends at
every fork, and a pass over three tokens takes as long as one over a thousand.

Everything here is numpy on columns of one row. The only Python loop runs over pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from treepack.trajectory import Int32, Int64

# Places of the stack at which a piece may begin: multiples of the query blocks of the attention kernels.
ALIGNMENT = 128
# Tokens after a fork that may still belong to the trunk piece of the fork.
SPARE = 1024

Kind = Literal["bundle", "push", "pop"]


@dataclass(frozen=True)
class Piece:
    """The tokens [begin, end) of a row, as a trunk piece or a bundle."""

    begin: int
    end: int
    is_trunk: bool


@dataclass(frozen=True)
class Pass:
    """One run of the model over a piece.

    Attributes:
        kind: what happens to the piece.
        begin: its first token in the row.
        end: one past its last token.
        first: the place of its first token among keys and values, a multiple of `ALIGNMENT`.
        stack: begin, end and first of the trunk pieces below it, from the root on.
    """

    kind: Kind
    begin: int
    end: int
    first: int
    stack: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.end - self.begin


@dataclass(frozen=True)
class RowPlan:
    """All passes of a row, in order.

    Attributes:
        passes: the passes.
        places: places that keys and values of a layer need at any time, a multiple of `ALIGNMENT`.
        carried: the largest number of places of the stack, without the piece that runs.
    """

    passes: tuple[Pass, ...]
    places: int
    carried: int

    @property
    def tokens_forward(self) -> int:
        """Tokens that run forward: all tokens of the row, and the trunk a second time."""
        return sum(each.size for each in self.passes)

    @property
    def tokens_backward(self) -> int:
        """Tokens that run backward: all tokens of the row."""
        return sum(each.size for each in self.passes if each.kind != "push")

    @property
    def has_pops(self) -> bool:
        """True if trunk pieces run a second time."""
        return any(each.kind == "pop" for each in self.passes)

    def without_backward(self) -> RowPlan:
        """Return the passes that compute every token once, for a forward pass without gradients."""
        return RowPlan(tuple(each for each in self.passes if each.kind != "pop"), self.places, self.carried)


def align(places: int) -> int:
    """Return the first multiple of `ALIGNMENT` that is not below a number of places."""
    # 0 -> 0, 1 -> 128, 128 -> 128, 129 -> 256
    return -(-places // ALIGNMENT) * ALIGNMENT


def cut_row(subtree_end: Int32 | Int64, parent: Int64, limit: int) -> list[Piece]:
    """Cut a row into pieces of at most `limit` tokens.

    Args:
        subtree_end: [T], one past the last token of each token's subtree.
        parent: [T], the index of each token's parent, -1 for a root.
        limit: at least 1.
    """
    count = len(subtree_end)
    index = np.arange(count)
    is_trunk = subtree_end - index > limit
    # Trunk tokens with two trunk children: parents [-1 0 1 1] of trunk tokens -> children of 0 and 1: 1, 2
    parents = parent[is_trunk]
    forks = np.bincount(parents[parents >= 0], minlength=count) > 1
    # A bundle may end at a token before which all of its subtrees have ended.
    # subtree_end [4 4 4 4 6 6], no trunk -> latest [4 4 4 4 6 6] -> tops 0 and 4
    latest = np.maximum.accumulate(np.where(is_trunk, 0, subtree_end))
    before = np.concatenate([[0], latest[:-1]])
    # Begins of whole subtrees and of trunk tokens, and the end of the row: the places at which a bundle may end.
    borders = np.append(np.flatnonzero(is_trunk | (before <= index)), count)
    trunk = np.append(np.flatnonzero(is_trunk), count)
    # The places at which a trunk piece may end: after a fork, or before a token that is not trunk, where it must.
    is_last = is_trunk & ~np.append(is_trunk[1:], False)
    stops = np.append(np.flatnonzero(forks | is_last) + 1, count)
    borders_of_trunk = np.append(np.flatnonzero(is_last) + 1, count)
    pieces, begin = [], 0
    while begin < count:
        if is_trunk[begin]:
            first_stop = int(stops[np.searchsorted(stops, begin, side="right")])
            last = min(begin + limit, int(borders_of_trunk[np.searchsorted(borders_of_trunk, begin, side="right")]))
            # stops 30 40 2000 of a run that ends at 2000, last 1500 -> 40, which is near enough to 30
            near = min(last, first_stop + SPARE)
            end = last if first_stop >= last else int(stops[np.searchsorted(stops, near, side="right") - 1])
        else:
            last = min(begin + limit, int(trunk[np.searchsorted(trunk, begin)]))
            end = int(borders[np.searchsorted(borders, last, side="right") - 1])
        pieces.append(Piece(begin, end, bool(is_trunk[begin])))
        begin = end
    return pieces


def plan_row(subtree_end: Int32 | Int64, parent: Int64, limit: int) -> RowPlan:
    """Return the passes of a row in pieces of at most `limit` tokens; arguments as in `cut_row`."""
    passes: list[Pass] = []
    stack: list[tuple[int, int, int]] = []
    places = carried = 0
    for piece in cut_row(subtree_end, parent, limit):
        first = _next_place(stack)
        below = tuple(stack)
        kind: Kind = "push" if piece.is_trunk else "bundle"
        passes.append(Pass(kind, piece.begin, piece.end, first, below))
        places = max(places, align(first + piece.end - piece.begin))
        if piece.is_trunk:
            stack.append((piece.begin, piece.end, first))
            carried = max(carried, _next_place(stack))
        # The first token of a trunk piece is an ancestor of the others, so its subtree ends last.
        while stack and subtree_end[stack[-1][0]] <= piece.end:
            begin, end, at = stack.pop()
            passes.append(Pass("pop", begin, end, at, tuple(stack)))
    assert not stack, "subtree_end ends beyond the row"
    return RowPlan(tuple(passes), places, carried)


def local_ends(subtree_end: Int32 | Int64, each: Pass) -> Int32:
    """Return `subtree_end` of the local row of a pass, int32 [first + size].

    The local row has the stack, and then the tokens of the piece. Gaps between pieces, and places whose tokens are no
    ancestors of the piece, see only themselves and are seen by nobody.

    Args:
        subtree_end: [T] of the row.
        each: the pass.
    """
    ends = np.arange(1, each.first + each.size + 1, dtype=np.int32)
    # Row tokens 40 ... 49 at first 128; a carried token that ends at 45 -> 133, one that ends at 60 -> 138
    shift = each.first - each.begin
    for begin, end, at in (*each.stack, (each.begin, each.end, each.first)):
        row_ends = subtree_end[begin:end]
        place = slice(at, at + end - begin)
        is_seen = row_ends > each.begin
        ends[place] = np.where(is_seen, np.minimum(row_ends, each.end) + shift, ends[place])
    return ends


def _next_place(stack: list[tuple[int, int, int]]) -> int:
    # pieces of 3 and 200 tokens -> at 0 and 128, and the next one at 384
    if not stack:
        return 0
    begin, end, first = stack[-1]
    return align(first + end - begin)
