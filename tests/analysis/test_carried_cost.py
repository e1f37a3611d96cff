"""Trunk tokens against the definition on rows, and operations against the table of ways to compute a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import strategies
from support.oracle import path_of
from support.strategies import make
from treepack.analysis.carried_cost import (
    TrunkCounter,
    TrunkTokens,
    executed_in_pieces,
    executed_in_rows,
    plan_trunks,
    trie_trunks,
)
from treepack.carry.pieces import plan_row
from treepack.costs.model_cost import FlopCount, ModelShape
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie

PIECES = (1, 2, 3, 5, 8, 1000)
SHAPE = ModelShape("made", weights=90, output=11, scores=3, scans=10)


def slow_trunks(rows: list[Row]) -> tuple[TrunkTokens, ...]:
    """Return the trunk by its definition: every token counts the tokens whose path it is on."""
    counted = []
    for row in rows:
        paths = [path_of(row.parent.tolist(), end) for end in range(row.num_tokens)]
        counted.append((paths, np.bincount(np.concatenate(paths), minlength=row.num_tokens).tolist()))
    trunks = []
    for piece in PIECES:
        tokens = sum(size > piece for _, sizes in counted for size in sizes)
        longest = max(sum(sizes[token] > piece for token in path) for paths, sizes in counted for path in paths)
        trunks.append(TrunkTokens(piece, tokens, longest))
    return tuple(trunks)


@given(rollouts=strategies.trajectories(), capacity=st.integers(9, 40), share=st.sampled_from(["all", "none"]))
def test_trunk_of_a_plan_is_that_of_its_rows(rollouts: list[Trajectory], capacity: int, share: str) -> None:
    trie = build_trie(rollouts, share=share)
    plan = plan_rows(trie, capacity=capacity, method="heuristic")
    rows = list(pack_rows(trie, plan))
    expected = slow_trunks(rows)
    assert plan_trunks(trie, plan.row_of, PIECES) == expected
    counter = TrunkCounter(PIECES)
    assert list(counter.over(rows)) == rows
    assert counter.trunks == expected
    assert (counter.row_tokens, counter.longest) == (max(row.num_tokens for row in rows), int(trie.lengths.max()))


@given(strategies.trajectories(steps=False))
def test_trunk_of_a_trie_is_that_of_one_row_with_all_of_it(rollouts: list[Trajectory]) -> None:
    trie = build_trie(rollouts)
    (row,) = pack_rows(trie, plan_rows(trie, capacity=1000))
    assert trie_trunks(trie, PIECES) == slow_trunks([row])
    # The same from the column of the row, as the trainer cuts it.
    sizes = row.subtree_end - np.arange(row.num_tokens)
    assert [trunk.tokens for trunk in trie_trunks(trie, PIECES)] == [int((sizes > piece).sum()) for piece in PIECES]


@given(rollouts=strategies.trajectories(), capacity=st.integers(9, 40), piece=st.integers(1, 20))
def test_the_trainer_computes_the_tokens_that_are_forecast(
    rollouts: list[Trajectory], capacity: int, piece: int
) -> None:
    trie = build_trie(rollouts)
    plan = plan_rows(trie, capacity=capacity, method="contiguous")
    packed = list(pack_rows(trie, plan))
    rows, chains = (
        [plan_row(row.subtree_end, row.parent.astype(np.int64), piece, chains=chains) for row in packed]
        for chains in (False, True)
    )
    (trunk,) = plan_trunks(trie, plan.row_of, (piece,))
    tokens = sum(row.tokens_backward for row in rows)
    assert sum(row.tokens_forward for row in rows) == tokens + trunk.tokens
    # Ancestors on the stack in each pass of chains, without the gaps between pieces and the spare tokens after a fork.
    stacks = [
        sum(int((ends[begin:end] > each.begin).sum()) for begin, end, _ in each.stack)
        + (each.size if each.kind == "push" else 0)
        for ends, row in zip((row.subtree_end for row in packed), chains, strict=True)
        for each in row.passes
    ]
    assert max(stacks) == trunk.path


def test_trunk_ends_inside_a_node() -> None:
    trie = build_trie([make("a", [0, 1, 2, 3, 4]), make("b", [0, 1, 2, 5, 6, 7])])
    # Subtrees of 0, 1, 2: 8, 7 and 6 tokens. Of 3, 4: 2 and 1. Of 5, 6, 7: 3, 2 and 1.
    assert trie_trunks(trie, (6, 2)) == (TrunkTokens(6, 2, 2), TrunkTokens(2, 4, 4))


def test_a_large_trie_needs_no_column_of_tokens() -> None:
    trie = build_trie([make(f"t{i}", [1] * 4000 + [i] * 10) for i in range(3)])
    trunks = trie_trunks(trie, (30, 16))
    # 4,030 tokens: 30 below the prompt. Pieces of 16: the prompt, and nothing of the answers of 10.
    assert trunks == (TrunkTokens(30, 4000, 4000), TrunkTokens(16, 4000, 4000))


def test_operations_of_pieces_lie_between_rows_that_recompute_all_layers_and_none() -> None:
    work = FlopCount(tokens=1000, pairs=50_000, targets=400)
    attention, output = 7 * 3 * 50_000, 8 * 11 * 400
    assert executed_in_rows(SHAPE, work, 1) == 8 * 100 * 1000 + attention + output
    assert executed_in_rows(SHAPE, work, 0.25) == 6.5 * 100 * 1000 + attention + output
    assert executed_in_pieces(SHAPE, work, TrunkTokens(10, 300, 50)) == (6 * 1000 + 2 * 300) * 100 + attention + output
    for trunk, share in ((0, 0), (1000, 1)):
        assert executed_in_pieces(SHAPE, work, TrunkTokens(10, trunk, 0)) == executed_in_rows(SHAPE, work, share)


def test_windows_bound_the_pairs_of_pieces() -> None:
    windows = ModelShape("windows", weights=100, output=0, scores=0, windows=((8, 3),))
    work = FlopCount(tokens=10, pairs=1000, targets=0)
    assert executed_in_pieces(windows, work, TrunkTokens(1, 0, 0)) == pytest.approx(6 * 100 * 10 + 7 * 3 * 80)
