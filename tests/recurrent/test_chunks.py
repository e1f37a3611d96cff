"""The table of chunks: every token once, states in the order of the tree, one saved state for each branching."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import caterpillar, chain, comb, ends_of, forests, random_tree, star
from treepack.recurrent.chunks import TokenChunks, build_chunks, find_parents, flatten_ends, plan_stages
from treepack.recurrent.levels import build_levels

ORDERS = ("levels", "paths")
PADDING = [(1, -1)] * 5
FORESTS = forests(lengths=(1, 1, 2, 3, 4, 5, 9), max_nodes=12)


def parents_one_by_one(end: list[int]) -> list[int]:
    """The parent of each token by the definition: the last token before it whose subtree contains it."""
    return [max((k for k in range(q) if end[k] > q), default=-1) for q in range(len(end))]


def tokens_of(chunks: TokenChunks) -> list[list[int]]:
    return [list(range(b, b + n)) for b, n in zip(chunks.begin.tolist(), chunks.length.tolist(), strict=True)]


@given(FORESTS, st.sampled_from([1, 2, 4]), st.sampled_from(ORDERS))
def test_chunks_are_stretches_of_nodes_and_follow_the_chunk_of_the_parent(end: Tensor, size: int, order: str) -> None:
    chunks = build_chunks(end, size=size, order=order)
    parent = parents_one_by_one(end[0].tolist())
    assert find_parents(flatten_ends(end)).tolist() == parent
    parts = tokens_of(chunks)
    assert [token for part in parts for token in part] == list(range(end.shape[1]))
    owner = {token: number for number, part in enumerate(parts) for token in part}
    for number, part in enumerate(parts):
        assert 1 <= len(part) <= size
        roots = [token for token in part if parent[token] < 0]
        if len(roots) == len(part):  # trees of one token, or the first token of a tree alone
            assert chunks.parent[number] == -1
            continue
        assert parent[part[0]] < 0 or owner[parent[part[0]]] == chunks.parent[number]
        # Inside a chunk every token follows the one before it, and its parent is the last token of its own chunk.
        assert [parent[token] for token in part[1:]] == part[:-1]
        if parent[part[0]] >= 0:
            assert parts[int(chunks.parent[number])][-1] == parent[part[0]]


@given(FORESTS, st.sampled_from([1, 2, 4]), st.sampled_from(ORDERS))
def test_runs_begin_from_saved_states_of_earlier_stages(end: Tensor, size: int, order: str) -> None:
    chunks = build_chunks(end, size=size, order=order)
    parent, saved = chunks.parent.tolist(), chunks.saved.tolist()
    done: set[int] = set()
    begun: list[int] = []
    for stage in chunks.stages:
        assert stage.first == len(begun)
        begins, listed = stage.begins.tolist(), stage.chunks.tolist()
        runs = [listed[a:b] for a, b in pairwise(begins)]
        for run in runs:
            first, state = run[0], int(chunks.run_state[len(begun)])
            assert state == (-1 if parent[first] < 0 else saved[parent[first]])
            assert parent[first] < 0 or (parent[first] in done and state >= 0)
            assert [parent[c] for c in run[1:]] == run[:-1]
            begun.append(state)
        done.update(listed)
    assert sorted(done) == list(range(len(parent)))
    # Every saved state has the runs that begin from it, in ascending order, and there is none without a run.
    offsets, followers = chunks.state_begins.tolist(), chunks.state_runs.tolist()
    for state in range(len(offsets) - 1):
        mine = followers[offsets[state] : offsets[state + 1]]
        assert mine == [run for run, source in enumerate(begun) if source == state]
        assert mine
    assert sorted(s for s in saved if s >= 0) == list(range(len(offsets) - 1))


@pytest.mark.parametrize(
    ("end", "levels", "paths"),
    [
        (chain(200), 1, 1),
        (star(70, 5, 65), 2, 2),
        (comb(40, 2, 40), 2, 2),
        (ends_of(*[(3, i - 1) for i in range(40)]), 1, 1),
    ],
)
def test_paths_need_no_more_stages_than_levels(end: Tensor, levels: int, paths: int) -> None:
    by_levels, by_paths = (len(build_chunks(end, order=order).stages) for order in ORDERS)
    assert (by_levels, by_paths) == (levels, paths)


def test_a_caterpillar_of_40_levels_has_two_stages_of_paths() -> None:
    end = caterpillar(5, 39, 3, 5)
    assert len(build_chunks(end, order="levels").stages) == 40
    assert len(build_chunks(end, order="paths").stages) == 2
    assert len(build_chunks(end).stages) == 2


def test_the_order_without_a_choice_is_the_faster_one_by_the_estimate() -> None:
    # A star: levels compute all branches at once, paths the first branch with the trunk and then the others.
    assert plan_stages([-1, 0, 0], [4, 16, 16]) == [[[0]], [[1], [2]]]
    # A chain of nodes with short leaves: paths need two launches.
    # parents -1 | 0 0 | 2 2 | 4 4 ...: the even nodes are the trunk
    parent = [-1, *[2 * (turn // 2) for turn in range(20)]]
    assert len(plan_stages(parent, [1] * 21)) == 2
    assert len(plan_stages(parent, [1] * 21, "levels")) == 11


def test_padding_shares_chunks_that_follow_nothing() -> None:
    chunks = build_chunks(ends_of((4, -1), *[(1, -1)] * 100), size=64)
    assert chunks.length.tolist() == [4, 64, 36]
    assert chunks.parent.tolist() == [-1, -1, -1]


def test_rows_follow_one_another() -> None:
    rows = torch.cat([ends_of((2, -1), (3, 0), (3, 0)), ends_of((8, -1))])
    chunks = build_chunks(rows, size=4)
    assert chunks.begin.tolist() == [0, 2, 5, 8, 12]
    assert chunks.parent.tolist() == [-1, 0, 0, -1, 3]
    assert chunks.end.tolist() == [8, 8, 5, 5, 5, 8, 8, 8, *[16] * 8]


def test_the_default_device_of_the_caller_changes_nothing() -> None:
    end = ends_of((4, -1), (70, 0), (3, 0), *PADDING)
    with torch.device("meta"):  # any tensor made there without a device would have no values
        chunks, levels = build_chunks(end), build_levels(end)
    assert torch.equal(chunks.begin, build_chunks(end).begin)
    assert torch.equal(levels.order, build_levels(end).order)


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_long_rows_take_every_token_once(seed: int) -> None:
    chunks = build_chunks(random_tree(2000, seed))
    assert int(chunks.length.sum()) == 2000
    assert sorted(torch.cat([stage.chunks for stage in chunks.stages]).tolist()) == list(range(len(chunks.begin)))
