"""The order of children: tile counts equal a count over the attention mask, and no order changes a trajectory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle, strategies
from support.manifests import manifest_of
from treepack.pack import child_order
from treepack.pack.check import check_packed
from treepack.pack.placement import unordered_tiles
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row, row_counts
from treepack.pack.rows import pack_rows
from treepack.trajectory import Int64, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Blocks of 4 tokens, so that rows of a few tokens have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_order, "BLOCK", 4)
        yield


@st.composite
def rows(draw: st.DrawFn, *, max_nodes: int = 9, max_size: int = 7) -> tuple[Int64, Int64]:
    """Sizes and parents of the nodes of a row in depth-first order, of one tree or several."""
    parent = [-1]
    for node in range(1, draw(st.integers(1, max_nodes))):
        # The parent of the next node is the last node, one of its ancestors, or none.
        above = [-1, node - 1]
        while above[-1] >= 0:
            above.append(parent[above[-1]])
        parent.append(draw(st.sampled_from(above)))
    size = draw(st.lists(st.integers(1, max_size), min_size=len(parent), max_size=len(parent)))
    return np.array(size), np.array(parent)


def ends_of(size: Int64, parent: Int64) -> Int64:
    stops: list[int] = np.cumsum(size).tolist()
    for node in range(len(size) - 1, 0, -1):
        if parent[node] >= 0:
            stops[parent[node]] = max(stops[parent[node]], stops[node])
    return np.array(stops)


@given(rows())
def test_tiles_are_counted_as_pair_by_pair(row: tuple[Int64, Int64]) -> None:
    size, parent = row
    ends = ends_of(size, parent)
    begin = np.cumsum(size) - size
    expected = oracle.tiles(np.repeat(ends, size).tolist(), child_order.BLOCK)
    assert child_order.tile_counts(np.repeat(ends, size)) == expected
    assert child_order.node_tiles(begin, ends, int(size.sum())) == expected


@given(rows(max_nodes=14))
def test_an_arranged_row_is_the_same_forest_in_another_order(row: tuple[Int64, Int64]) -> None:
    size, parent = row
    begin, end = child_order.arrange(size, parent)
    order = np.argsort(begin)
    assert (begin[order] == np.cumsum(size[order]) - size[order]).all()
    below: Counter[int] = Counter()
    for node in range(len(size) - 1, -1, -1):
        below[node] += int(size[node])
        above = int(parent[node])
        if above >= 0:
            below[above] += below[node]
            assert begin[above] + size[above] <= begin[node] < end[node] <= end[above]
    assert (end - begin).tolist() == [below[node] for node in range(len(size))]


@given(rows(max_nodes=14))
def test_an_arranged_row_has_no_more_partial_tiles(row: tuple[Int64, Int64]) -> None:
    size, parent = row
    begin, end = child_order.arrange(size, parent)
    order = np.argsort(begin)
    given_order = oracle.tiles(np.repeat(ends_of(size, parent), size).tolist(), child_order.BLOCK)
    assert oracle.tiles(np.repeat(end[order], size[order]).tolist(), child_order.BLOCK) <= given_order


@given(
    trajectories=strategies.trajectories(max_count=12, max_length=12),
    capacity=st.integers(12, 40),
    semantics=st.sampled_from(["branch", "once"]),
)
def test_arranged_rows_give_back_every_trajectory(
    trajectories: list[Trajectory], capacity: int, semantics: str
) -> None:
    trie = build_trie(trajectories)
    plan = plan_rows(trie, capacity=capacity)
    packed = list(pack_rows(trie, plan, semantics=semantics))
    counted: Counter[str] = Counter()
    for row in packed:
        counted.update(row_counts(row))
    check_packed(packed, manifest_of(packed, capacity, semantics), trie)
    tokens = {t.trajectory_id: t.content.tokens.tolist() for t in trajectories if isinstance(t.content, Tokens)}
    assert {name: ids for row in packed for name, ids in sequences(row)} == tokens
    assert counted["tiles_partial"] <= unordered_tiles(trie, plan)


def sequences(row: Row) -> list[tuple[str, list[int]]]:
    assert row.trajectory_ends.tolist() == sorted(row.trajectory_ends.tolist())
    parent = row.parent.tolist()
    ends = zip(row.trajectory_ids, row.trajectory_ends.tolist(), strict=True)
    return [(name, row.input_ids[oracle.path_of(parent, end)].tolist()) for name, end in ends]


def test_a_trunk_with_side_branches_comes_before_them() -> None:
    # Each piece of trunk (8 tokens) comes after a side branch (6 tokens), as in a trie where the branch sorts first.
    size, parent = [40], [-1]
    trunk = 0
    for _ in range(20):
        size += [6, 8]
        parent += [trunk, trunk]
        trunk = len(size) - 1
    begin, end = child_order.arrange(np.array(size), np.array(parent))
    order = np.argsort(begin)
    arranged, _ = child_order.node_tiles(begin[order], end[order], sum(size))
    given_order, _ = child_order.tile_counts(np.repeat(ends_of(np.array(size), np.array(parent)), size))
    assert order[:21].tolist() == [0, *range(2, 41, 2)]
    assert 5 * arranged < given_order


def test_small_siblings_fill_a_block_before_the_next_large_one() -> None:
    begin, _ = child_order.arrange(np.array([2, 9, 8, 3, 2, 1]), np.array([-1, 0, 0, 0, 0, 0]))
    # The root has tokens 0 and 1, and the largest child (9) the tokens 2 to 10. Then the child of one token fills the
    # block, so that the next large child (8) begins at 12.
    assert begin.tolist()[1:] == [2, 12, 20, 23, 11]
