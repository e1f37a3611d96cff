"""Pieces cover a row once, obey their limit, and run in an order in which every token finds its ancestors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.carry import pieces
from treepack.carry.pieces import ALIGNMENT, Pass, cut_row, local_ends, plan_row
from treepack.trajectory import Int64

# Parents of a forest in depth-first order: each token hangs on the path of the one before it, or is a root.
FOREST = st.lists(st.integers(0, 12), min_size=1, max_size=60)


def forest(steps: list[int]) -> tuple[Int64, Int64]:
    """subtree_end and parent of a row in which token i leaves `steps[i]` tokens of the path behind, if it has them."""
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
    assert [(piece.begin, piece.end, piece.is_trunk) for piece in cut_row(end, parent, 4)] == [
        (0, 3, True),
        (3, 7, False),
        (7, 10, False),
    ]
    assert [(each.kind, each.begin) for each in plan_row(end, parent, 4).passes] == [
        ("push", 0),
        ("bundle", 3),
        ("bundle", 7),
        ("pop", 0),
    ]


@given(FOREST, st.integers(1, 20))
def test_pieces_cover_a_row_once_within_their_limit(steps: list[int], limit: int) -> None:
    end, parent = forest(steps)
    cut = cut_row(end, parent, limit)
    assert [piece.begin for piece in cut] == [0, *(piece.end for piece in cut[:-1])]
    assert cut[-1].end == len(end)
    for piece in cut:
        tokens = range(piece.begin, piece.end)
        assert 1 <= len(tokens) <= limit
        assert all((end[token] - token > limit) == piece.is_trunk for token in tokens)
        if not piece.is_trunk:  # whole subtrees
            assert max(end[token] for token in tokens) == piece.end


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
    for each in plan_row(end, parent, limit).passes:
        places = places_of(each)
        ends = local_ends(end, each)
        assert all(ends[token] >= token + 1 for token in range(len(ends)))
        for token in range(each.begin, each.end):
            query = each.first + token - each.begin
            seen = [key for key in range(query + 1) if query < ends[key]]
            path = []
            while token >= 0:
                path.append(token)
                token = int(parent[token])
            assert [places[key] for key in seen] == path[::-1]


def places_of(each: Pass) -> dict[int, int]:
    """The row token at each place of a pass."""
    ranges = (*each.stack, (each.begin, each.end, each.first))
    return {at + token - begin: token for begin, end, at in ranges for token in range(begin, end)}


@given(FOREST, st.integers(1, 20), st.integers(0, 6))
def test_the_stack_of_a_pushed_piece_is_its_path_and_few_spare_tokens(steps: list[int], limit: int, spare: int) -> None:
    end, parent = forest(steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SPARE", spare)
        plan = plan_row(end, parent, limit)
    for each in plan.passes:
        assert each.first % ALIGNMENT == 0
        if each.kind == "push":
            for begin, last, _ in each.stack:
                ancestors = [token for token in range(begin, last) if end[token] > each.begin]
                assert ancestors == list(range(begin, begin + len(ancestors)))
                assert last - begin - len(ancestors) <= spare
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
    assert [(piece.begin, piece.end) for piece in cut_row(end, parent, 5) if piece.is_trunk] == [(0, 4), (14, 17)]


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
