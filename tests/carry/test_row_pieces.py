"""Pieces cover a row once, obey their limit, and run in an order in which every token finds its ancestors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.carry import pieces
from treepack.carry.pieces import ALIGNMENT, PiecePass, RowPiece, cut_row, local_ends, plan_row
from treepack.trajectory import Int64

# Parents of a forest in depth-first order: each token hangs on the path of the one before it, or is a root.
FOREST = st.lists(st.integers(0, 12), min_size=1, max_size=60)


def forest(steps: list[int]) -> tuple[Int64, Int64]:
    """subtree_end and parent of a row in which token i begins `steps[i]` tokens higher on the path, if it can."""
    parent, path = [], []  # type: ignore[var-annotated]
    end = np.arange(1, len(steps) + 1)
    for token, step in enumerate(steps):
        # Most steps continue the path: 0 to 8 leave nothing.
        path = path[: len(path) - max(0, step - 8)]
        parent.append(path[-1] if path else -1)
        path.append(token)
        end[path] = token + 1
    return end, np.array(parent)


def depths(parent: Int64) -> list[int]:
    found: list[int] = []
    for each in parent.tolist():
        found.append(found[each] + 1 if each >= 0 else 1)
    return found


def test_the_row_of_the_picture() -> None:
    parent = np.array([-1, 0, 1, 2, 3, 2, 5, 1, 7, 1])
    end = np.array([10, 10, 7, 5, 5, 7, 7, 9, 9, 10])
    assert [(piece.ranges, piece.is_trunk) for piece in cut_row(end, parent, 4)] == [
        (((0, 3),), True),
        (((3, 7),), False),
        (((7, 10),), False),
    ]
    assert [(each.kind, each.begin) for each in plan_row(end, parent, 4).passes] == [
        ("push", 0),
        ("bundle", 3),
        ("bundle", 7),
        ("pop", 0),
    ]


def test_the_piece_with_branches_of_the_picture() -> None:
    parent = np.array([-1, 0, 1, *range(2, 9), 1, 10, *range(11, 18)])
    end = np.array([19, 19, *[10] * 8, *[19] * 9])
    plan = plan_row(end, parent, 7)
    assert plan.order.tolist() == [0, 1, 2, 10, 11, *range(3, 10), *range(12, 19)]
    assert [(each.kind, each.begin, each.end) for each in plan.passes] == [
        ("push", 0, 5),
        ("bundle", 5, 12),
        ("bundle", 12, 19),
        ("pop", 0, 5),
    ]
    chains = plan_row(end, parent, 7, chains=True)
    assert chains.order.tolist() == list(range(19))
    assert [(each.kind, each.begin, each.end) for each in chains.passes if each.kind != "pop"] == [
        ("push", 0, 3),
        ("bundle", 3, 10),
        ("push", 10, 12),
        ("bundle", 12, 19),
    ]


@given(FOREST, st.integers(1, 20), st.booleans())
def test_pieces_cover_a_row_once_within_their_limit(steps: list[int], limit: int, chains: bool) -> None:
    end, parent = forest(steps)
    cut = cut_row(end, parent, limit, chains=chains)
    assert sorted(token for piece in cut for token in tokens_of(piece)) == list(range(len(end)))
    assert [piece.ranges[0] for piece in cut] == sorted(piece.ranges[0] for piece in cut)
    for piece in cut:
        tokens = tokens_of(piece)
        assert 1 <= len(tokens) <= limit
        assert all((end[token] - token > limit) == piece.is_trunk for token in tokens)
        if not piece.is_trunk:  # whole subtrees
            assert max(end[token] for token in tokens) == piece.ranges[0][1]
        else:  # connected
            assert all(parent[token] in tokens for token in tokens[1:])
        if chains or not piece.is_trunk:
            assert len(piece.ranges) == 1


def tokens_of(piece: RowPiece) -> list[int]:
    return [token for begin, end in piece.ranges for token in range(begin, end)]


@given(FOREST, st.integers(1, 20))
def test_every_token_runs_backward_once_and_trunk_forward_twice(steps: list[int], limit: int) -> None:
    end, parent = forest(steps)
    plan = plan_row(end, parent, limit)
    trunk = sum(int(end[token]) - token > limit for token in range(len(end)))
    assert plan.tokens_backward == len(end)
    assert plan.tokens_forward == len(end) + trunk
    assert plan.without_backward().tokens_forward == len(end)


@given(FOREST, st.integers(1, 20))
def test_every_token_sees_its_ancestors_and_nothing_else(steps: list[int], limit: int) -> None:
    end, parent = forest(steps)
    plan = plan_row(end, parent, limit)
    for each in plan.passes:
        places = places_of(each, plan.order)
        ends = local_ends(end, plan.order, each)
        assert all(ends[token] >= token + 1 for token in range(len(ends)))
        for number in range(each.begin, each.end):
            token, query = int(plan.order[number]), each.first + number - each.begin
            seen = [key for key in range(query + 1) if query < ends[key]]
            path = []
            while token >= 0:
                path.append(token)
                token = int(parent[token])
            assert [places[key] for key in seen] == path[::-1]


def places_of(each: PiecePass, order: Int64) -> dict[int, int]:
    """The row token at each place of a pass."""
    ranges = (*each.stack, (each.begin, each.end, each.first))
    return {at + number - begin: int(order[number]) for begin, end, at in ranges for number in range(begin, end)}


@given(FOREST, st.integers(1, 20), st.integers(0, 6))
def test_the_stack_of_a_pushed_piece_is_its_path_and_few_spare_tokens(steps: list[int], limit: int, spare: int) -> None:
    end, parent = forest(steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SPARE", spare)
        plan = plan_row(end, parent, limit)
    for each in plan.passes:
        assert each.first % ALIGNMENT == 0
        if each.kind == "push":
            token = int(plan.order[each.begin])
            for begin, last, _ in each.stack:
                others = [above for above in plan.order[begin:last] if not above < token < end[above]]
                assert len(others) <= spare
    # No more places than the longest path, with a gap and spare tokens after each piece.
    deepest = max((len(each.stack) for each in plan.passes), default=0) + 1
    assert plan.carried <= max(depths(parent)) + deepest * (ALIGNMENT - 1 + spare)
    assert plan.places >= max(each.first + each.size for each in plan.passes)


@given(FOREST, st.integers(1, 20))
def test_spare_tokens_save_pieces_and_compute_nothing_more(steps: list[int], limit: int) -> None:
    end, parent = forest(steps)
    merged = plan_row(end, parent, limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SPARE", 0)
        single = plan_row(end, parent, limit)
    assert len(merged.passes) <= len(single.passes)
    assert (merged.tokens_forward, merged.tokens_backward) == (single.tokens_forward, single.tokens_backward)


def test_a_piece_continues_after_a_fork_by_spare_tokens() -> None:
    # A root token, from which two of three tokens fork; each ends with a fork of two leaves of 5 tokens.
    sizes, above = [1, 3, 5, 5, 3, 5, 5], [-1, 0, 1, 1, 0, 4, 4]
    first = np.cumsum([0, *sizes])
    parent = np.arange(-1, first[-1] - 1)
    parent[first[1:-1]] = first[1:][above[1:]] - 1
    total = np.array([27, 13, 5, 5, 13, 5, 5])
    end = np.concatenate([np.full(size, first[i] + total[i]) for i, size in enumerate(sizes)])
    assert [piece.ranges for piece in cut_row(end, parent, 5) if piece.is_trunk] == [((0, 4),), ((14, 17),)]
    # A limit with room for the second branch too.
    assert [piece.ranges for piece in cut_row(end, parent, 7) if piece.is_trunk] == [((0, 4), (14, 17))]


@given(FOREST, st.integers(1, 20))
def test_pieces_are_pushed_and_popped_in_order(steps: list[int], limit: int) -> None:
    end, parent = forest(steps)
    stack: list[int] = []
    for each in plan_row(end, parent, limit).passes:
        assert [begin for begin, _, _ in each.stack] == (stack[:-1] if each.kind == "pop" else stack)
        if each.kind == "push":
            stack.append(each.begin)
        if each.kind == "pop":
            assert stack.pop() == each.begin
    assert stack == []


@pytest.mark.parametrize("limit", [1, 3, 128])
def test_a_chain_is_trunk_but_for_its_last_tokens(limit: int) -> None:
    parent = np.arange(-1, 999)
    plan = plan_row(np.full(1000, 1000), parent, limit)
    assert plan.tokens_forward == 1000 + 1000 - limit
    assert plan.carried <= 1000 + ALIGNMENT * len(plan.passes)
