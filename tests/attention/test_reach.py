"""Windows and chunks: the first visible token, schedules without everything before it, refusals of other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import chain, comb, random_tree, star
from support.refusal import refusal
from support.strategies import trees
from support.tiny_families import tiny_family
from treepack.attention import BatchSchedules, register, tree_attention
from treepack.attention.build_schedule import build_schedule
from treepack.attention.reach import KeyReach, depths, first_visible
from treepack.attention.reference import visible_pairs
from treepack.attention.schedule import GRANULE, QUERY_BLOCK, QUERY_TILE, Schedule
from treepack.errors import TreepackError
from treepack.pack.plan.problem import PlanTree

REACHES = [
    KeyReach("window", 1),
    KeyReach("window", 31),
    KeyReach("window", 128),
    KeyReach("chunk", 1),
    KeyReach("chunk", 50),
]


def paths(end: Tensor) -> list[list[int]]:
    """Return the path of every token of one row, from its root to itself."""
    ends = end.tolist()
    return [[k for k in range(q + 1) if ends[k] > q] for q in range(len(ends))]


def slow_first_visible(end: Tensor, reach: KeyReach) -> Tensor:
    """`first_visible` from its definition, row by row."""
    rows = []
    for row in end:
        first = []
        for path in paths(row):
            last = len(path) - 1
            first.append(path[max(0, last - reach.size + 1) if reach.kind == "window" else last - last % reach.size])
        rows.append(first)
    return torch.tensor(rows, dtype=torch.int32)


def ends_of_tree(tree: PlanTree, stretch: int) -> Tensor:
    """subtree_end [1, T] of a planner's tree, with every token repeated `stretch` times."""
    size = tree.size * stretch
    begin = np.concatenate([[0], size.cumsum()])
    return torch.from_numpy(begin[tree.end].repeat(size).astype(np.int32))[None]


@settings(deadline=None)
@given(trees(), st.integers(1, 9), st.sampled_from(["window", "chunk"]))
def test_the_first_visible_token_is_an_ancestor_at_the_bound(tree: PlanTree, size: int, kind: str) -> None:
    end, reach = ends_of_tree(tree, 1), KeyReach(kind, size)
    assume(end.shape[1] > 0)
    assert depths(end)[0].tolist() == [len(path) - 1 for path in paths(end[0])]
    first = first_visible(end, reach)
    if first is None:
        assert max(len(path) for path in paths(end[0])) <= size
    else:
        assert torch.equal(first, slow_first_visible(end, reach))


def test_rows_of_a_batch_and_of_a_reach_that_never_ends() -> None:
    end = torch.cat([random_tree(90, seed=1), random_tree(90, seed=2), torch.arange(1, 91)[None].int()])
    for reach in (KeyReach("window", 4), KeyReach("chunk", 7)):
        first = first_visible(end, reach)
        assert first is not None
        assert torch.equal(first, slow_first_visible(end, reach))
    assert first_visible(end, None) is None
    assert first_visible(end, KeyReach("window", 90)) is None


@pytest.mark.parametrize("reach", [KeyReach("window", 0), KeyReach("dilated", 4)])
def test_another_reach_is_refused(reach: KeyReach) -> None:
    assert f"the reach is a {reach.kind} of {reach.size} tokens; expected a window" in refusal(
        first_visible, chain(5), reach
    )


def check_cover(end: Tensor, reach: KeyReach) -> tuple[int, int]:
    """Check that a schedule computes each visible pair once; return granules and tiles in its lists."""
    start = first_visible(end, reach)
    assert start is not None
    schedule = build_schedule(end, start)
    assert schedule.start is not None
    assert schedule.key_tiles is not None
    total = schedule.end.shape[1]
    seen = visible_pairs(schedule.end, schedule.start)
    assert torch.equal(seen[:, : end.shape[1], : end.shape[1]], visible_pairs(end, start))
    for row in range(len(end)):
        _check_query_lists(schedule, row, seen[row], total)
        _check_key_lists(schedule, row, seen[row], end.shape[1])
    return len(schedule.granules), len(schedule.key_tiles)


def _check_query_lists(schedule: Schedule, row: int, seen: Tensor, total: int) -> None:
    listed = torch.zeros_like(seen)
    for block in range(total // QUERY_BLOCK):
        rows = slice(block * QUERY_BLOCK, (block + 1) * QUERY_BLOCK)
        first, last = schedule.query_offsets[row, block : block + 2].tolist()
        partial = int(schedule.query_partial[row, block])
        entries = schedule.granules[first:last].tolist()
        assert len(entries) % 4 == partial % 4 == 0
        assert entries[:4] == [4 * block + i for i in range(4)], "the diagonal comes first"
        for place, granule in enumerate(entries):
            if granule < 0:
                assert place < partial, "no padding without a mask"
                continue
            keys = slice(granule * GRANULE, (granule + 1) * GRANULE)
            assert not listed[rows, keys].any()
            listed[rows, keys] = True
            assert place < partial or seen[rows, keys].all()
    assert bool((listed | ~seen).all())


def _check_key_lists(schedule: Schedule, row: int, seen: Tensor, length: int) -> None:
    assert schedule.key_tiles is not None
    listed, granules = torch.zeros_like(seen), schedule.key_granules[row]
    assert sorted(granules[granules >= 0].tolist()) == list(range(-(-length // GRANULE)))
    for block, (first, full_begin, full_end, last) in zip(granules, schedule.key_ranges[row].tolist(), strict=True):
        assert full_end == last
        tiles = schedule.key_tiles[first:last].tolist()
        assert len(set(tiles)) == len(tiles)
        for place, tile in enumerate(tiles, first):
            assert tile % QUERY_TILE == 0
            assert tile < length
            for granule in block[block >= 0].tolist():
                rows, keys = slice(tile, tile + QUERY_TILE), slice(granule * GRANULE, (granule + 1) * GRANULE)
                listed[rows, keys] = True
                assert place < full_begin or seen[rows, keys].all()
    inside = seen.clone()
    inside[length:], inside[:, length:] = False, False
    assert bool((listed | ~inside).all())


@pytest.mark.parametrize("reach", REACHES)
def test_every_visible_pair_is_in_the_lists_of_both_sides(reach: KeyReach) -> None:
    for end in (chain(300), star(200, 3, 140), comb(70, 60, 8), random_tree(700, seed=5)):
        check_cover(end, reach)
    check_cover(torch.cat([random_tree(401, seed=1), random_tree(401, seed=2)]), reach)


@settings(max_examples=15, deadline=None)
@given(trees(max_size=4), st.integers(1, 200), st.sampled_from(["window", "chunk"]))
def test_the_lists_of_random_trees_cover_what_they_must(tree: PlanTree, size: int, kind: str) -> None:
    end, reach = ends_of_tree(tree, 29), KeyReach(kind, size)
    if first_visible(end, reach) is not None:
        check_cover(end, reach)


@pytest.mark.slow
def test_a_short_window_lists_a_few_granules_per_block_however_long_the_paths_are() -> None:
    # Three branches of 2,000 tokens after 4,000: a block sees itself and the 128 tokens before it on its path.
    end = star(4000, 3, 2000)
    granules, tiles = check_cover(end, KeyReach("window", 128))
    blocks = end.shape[1] / QUERY_BLOCK
    assert granules <= 9.2 * blocks
    assert tiles <= 5 * blocks


# 0 - 1 - 2 - 3 - 4 with the branch 5 - 6 after token 1, and rows of other shapes and values
END = torch.tensor([[7, 7, 5, 5, 5, 7, 7]])


OTHERS = {
    "values": torch.tensor([[7, 7, 7, 4, 7, 7, 7]]),
    "length": torch.tensor([[8, 8, 5, 5, 5, 8, 8, 8]]),
    "number": END.repeat(2, 1),
}


ROW = {
    "input_ids": torch.tensor([[7, 3, 9, 11, 2, 5, 6]]),
    "position_ids": torch.tensor([[0, 1, 2, 3, 4, 2, 3]]),
    "subtree_end": END,
    "use_cache": False,
}


@torch.no_grad()
@pytest.mark.parametrize("impl", ["reference", "flex"])
def test_schedules_of_other_rows_are_refused(impl: str) -> None:
    register()
    windows: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_family("gemma3_text", attention=f"treepack_{impl}", **windows)
    expected = model(**ROW).logits
    assert torch.equal(model(**ROW, schedule=BatchSchedules(END.clone())).logits, expected)
    for other in OTHERS.values():
        with pytest.raises(
            TreepackError, match=r"made for 1 other rows of \d tokens; pass Schedules|start is \[2, 7\]"
        ):
            model(**ROW, schedule=BatchSchedules(other))


def test_windows_of_other_rows_are_refused() -> None:
    q = torch.randn(1, 2, 7, 4)
    assert "start is [1, 8] and subtree_end is [1, 7]; pass first_visible" in refusal(
        tree_attention, q, q, q, END, start=torch.zeros(1, 8, dtype=torch.int32)
    )
