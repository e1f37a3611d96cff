r"""The pieces of a row: groups of tokens that run together, their order, and the places of their keys and values.

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

A trunk piece is a chain up to a fork, a token with two trunk children or more, and small branches of trunk after it,
up to `SPARE` tokens. So when another piece is pushed, all tokens of the stack are its ancestors, except for these few,
and the stack is hardly longer than the longest path and its gaps: each piece begins at a multiple of `ALIGNMENT`
places. Without the few, every fork would be a piece, and a pass over three tokens takes as long as one over a thousand.

    limit 7      0 - 1 - 2 - 3 .. 9       tokens 0, 1, 2, 10 and 11 are trunk, and token 1 is a fork
                      \                   trunk piece 0 1 2 10 11 | bundle 3 .. 9 | bundle 12 .. 18
                       10 - 11 - 12 .. 18

A branch comes after other tokens of the row, so a row in pieces numbers its tokens again, piece after piece. Within a
piece they keep the order of the row.

Everything here is numpy on columns of one row. Python loops run over pieces and over chains of trunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from treepack.trajectory import Int32, Int64

# Places of the stack at which a piece may begin: multiples of the query blocks of the attention kernels.
ALIGNMENT = 128
# Tokens after forks that may still belong to the trunk piece of the first fork.
SPARE = 1024

_Kind = Literal["bundle", "push", "pop"]


@dataclass(frozen=True)
class RowPiece:
    """Tokens of a row, as a trunk piece or a bundle: ranges [begin, end), ascending; a bundle has one."""

    ranges: tuple[tuple[int, int], ...]
    is_trunk: bool


@dataclass(frozen=True)
class PiecePass:
    """One run of the model over a piece.

    Attributes:
        kind: of the run, see the header.
        begin: the number of its first token.
        end: one past the number of its last token.
        first: the place of its first token among keys and values, a multiple of `ALIGNMENT`.
        stack: begin, end and first of the trunk pieces below it, from the root on.
    """

    kind: _Kind
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
        order: int64 [T], the tokens of the row by their numbers.
        places: places that keys and values of a layer need at any time, a multiple of `ALIGNMENT`.
        carried: the largest number of places of the stack, without the piece that runs.
    """

    passes: tuple[PiecePass, ...]
    order: Int64
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
        """Return the passes of a forward pass without gradients, which compute every token once."""
        return replace(self, passes=tuple(each for each in self.passes if each.kind != "pop"))


def align(places: int) -> int:
    """Return the first multiple of `ALIGNMENT` that is not below a number of places."""
    # 0 -> 0, 1 -> 128, 128 -> 128, 129 -> 256
    return -(-places // ALIGNMENT) * ALIGNMENT


def cut_row(subtree_end: Int32 | Int64, parent: Int64, limit: int, *, chains: bool = False) -> list[RowPiece]:
    """Cut a row into pieces of at most `limit` tokens, in the order of their first tokens.

    Args:
        subtree_end: [T], one past the last token of each token's subtree.
        parent: [T], the index of each token's parent, -1 for a root.
        limit: at least 1.
        chains: True for trunk pieces that are chains, whose tokens follow each other in the row.
    """
    count = len(subtree_end)
    index = np.arange(count)
    is_trunk = subtree_end - index > limit
    # A bundle may end at a token before which all of its subtrees have ended.
    # subtree_end [4 4 4 4 6 6], no trunk -> latest [4 4 4 4 6 6] -> tops 0 and 4
    latest = np.maximum.accumulate(np.where(is_trunk, 0, subtree_end))
    before = np.concatenate([[0], latest[:-1]])
    # Begins of whole subtrees and of trunk tokens, and the end of the row: the places at which a bundle may end.
    borders = np.append(np.flatnonzero(is_trunk | (before <= index)), count)
    trunk = np.append(np.flatnonzero(is_trunk), count)
    runs = _runs_of_trunk(is_trunk, parent)
    # Begin and end of the branches of trunk pieces, which the walk along the row meets later.
    branches = dict[int, int]()
    pieces, begin = [], 0
    while begin < count:
        if begin in branches:
            begin = branches[begin]
            continue
        if is_trunk[begin]:
            ranges = _grow(runs, begin, limit, chains=chains)
            branches |= ranges[1:]
        else:
            last = min(begin + limit, int(trunk[np.searchsorted(trunk, begin)]))
            ranges = [(begin, int(borders[np.searchsorted(borders, last, side="right") - 1]))]
        pieces.append(RowPiece(tuple(ranges), bool(is_trunk[begin])))
        begin = ranges[0][1]
    return pieces


@dataclass(frozen=True)
class _TrunkRuns:
    """Chains of trunk tokens that follow each other in the row, up to a fork.

    Attributes:
        begins: the first tokens, ascending.
        ends: one past the last tokens.
        children: the runs that hang on the last token of each run, ascending.
    """

    begins: Int64
    ends: Int64
    children: dict[int, list[int]]


def _runs_of_trunk(is_trunk: npt.NDArray[np.bool_], parent: Int64) -> _TrunkRuns:
    parents = parent[is_trunk]
    forks = np.bincount(parents[parents >= 0], minlength=len(parent)) > 1
    # A trunk token is not a leaf, so the next token is its child.
    # trunk [1 1 1 0 1], fork [0 1 0 0 0] -> begins 0 2 4, ends 2 3 5
    begins = np.flatnonzero(is_trunk & ~np.append(False, is_trunk[:-1] & ~forks[:-1]))
    ends = np.flatnonzero(is_trunk & ~np.append(is_trunk[1:] & ~forks[:-1], False)) + 1
    children = dict[int, list[int]]()
    above = np.searchsorted(begins, parent[begins], side="right") - 1  # -1 for a root
    for run, over in enumerate(above.tolist()):
        children.setdefault(over, []).append(run)
    return _TrunkRuns(begins, ends, children)


def _grow(runs: _TrunkRuns, begin: int, limit: int, *, chains: bool) -> list[tuple[int, int]]:
    """Return the ranges of the trunk piece that starts at `begin`, in a run or at its begin."""
    run = int(np.searchsorted(runs.begins, begin, side="right")) - 1
    end = min(begin + limit, int(runs.ends[run]))
    ranges = [(begin, end)]
    room, waiting = min(SPARE, begin + limit - end), [run] if end == runs.ends[run] else []
    # The nearest branches first: all branches of a run before the branches of these.
    for above in waiting:
        for child in runs.children.get(above, []):
            first, last = int(runs.begins[child]), int(runs.ends[child])
            if last - first <= room and (not chains or first == runs.ends[above]):
                room -= last - first
                ranges.append((first, last))
                waiting.append(child)
    return _joined(sorted(ranges))


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ascending ranges that follow each other, and return all ranges."""
    # (0 2) (2 3) (5 7) -> (0 3) (5 7)
    joined = ranges[:1]
    for first, last in ranges[1:]:
        if first == joined[-1][1]:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def plan_row(subtree_end: Int32 | Int64, parent: Int64, limit: int, *, chains: bool = False) -> RowPlan:
    """Return the passes of a row in pieces of at most `limit` tokens; arguments as in `cut_row`."""
    passes, order = list[PiecePass](), list[Int64]()
    # Of the trunk pieces that wait for their pop: numbers and places, and the first token in the row.
    stack, roots = list[tuple[int, int, int]](), list[int]()
    begin = places = carried = 0
    for piece in cut_row(subtree_end, parent, limit, chains=chains):
        order += [np.arange(*each) for each in piece.ranges]
        end = begin + sum(last - first for first, last in piece.ranges)
        first = _next_place(stack)
        passes.append(PiecePass("push" if piece.is_trunk else "bundle", begin, end, first, tuple(stack)))
        places = max(places, align(first + end - begin))
        if piece.is_trunk:
            stack.append((begin, end, first))
            roots.append(piece.ranges[0][0])
            carried = max(carried, _next_place(stack))
        # All tokens of a trunk piece are in the subtree of its first one. A subtree ends with a leaf, in a bundle.
        while not piece.is_trunk and roots and subtree_end[roots[-1]] <= piece.ranges[0][1]:
            roots.pop()
            passes.append(PiecePass("pop", *stack.pop(), tuple(stack)))
        begin = end
    assert not stack, "subtree_end ends beyond the row"
    return RowPlan(tuple(passes), np.concatenate(order), places, carried)


def local_ends(subtree_end: Int32 | Int64, order: Int64, each: PiecePass) -> Int32:
    """Return `subtree_end` of the local row of a pass, int32 [first + size].

    The local row has the stack, and then the tokens of the piece. Gaps between pieces, and places whose tokens are not
    ancestors of the piece, see only themselves, and no other place sees them.

    Args:
        subtree_end: [T] of the row.
        order: [T], the tokens of the row by their numbers.
        each: the pass.
    """
    ends = np.arange(1, each.first + each.size + 1, dtype=np.int32)
    own = order[each.begin : each.end]
    for begin, end, at in (*each.stack, (each.begin, each.end, each.first)):
        tokens = order[begin:end]
        last = subtree_end[tokens]
        # Ancestors of tokens of the piece are before its first token in the row, or in the piece.
        is_seen = (last > own[0]) & ((tokens < own[0]) | (at == each.first))
        # own [40 41 47], first 128: a token whose subtree ends at 45 -> 130, at 60 -> 131
        place = slice(at, at + end - begin)
        ends[place] = np.where(is_seen, each.first + np.searchsorted(own, last), ends[place])
    return ends


def _next_place(stack: list[tuple[int, int, int]]) -> int:
    # pieces of 3 and 200 tokens -> at 0 and 128, and the next one at 384
    if not stack:
        return 0
    begin, end, first = stack[-1]
    return align(first + end - begin)
