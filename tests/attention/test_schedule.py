"""The schedule of the attention kernels: exact cover from both sides, in order, within the best possible work."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import caterpillar, chain, ends_of, star
from support.strategies import trees
from treepack.attention.build_schedule import build_schedule
from treepack.attention.reference import visible_pairs
from treepack.attention.schedule import GRANULE, KEY_BLOCK, QUERY_BLOCK, QUERY_TILE, Schedule
from treepack.pack.plan.problem import PlanTree

MASKED = 0.25  # work that a mask adds to a tile, as a share of the tile


def agent_tree(length: int, seed: int) -> Tensor:
    """A trunk of 3,000 tokens, then turns of 100 to 1,200 tokens; one turn in three has two continuations."""
    rng = np.random.default_rng(seed)
    size, tips = [3000], [0]
    children: list[list[int]] = [[]]
    while sum(size) < length:
        tip = tips.pop(rng.integers(len(tips)))
        for _ in range(2 if rng.random() < 0.35 else 1):
            children[tip].append(len(size))
            tips.append(len(size))
            size.append(int(rng.integers(100, 1201)))
            children.append([])
    nodes: list[tuple[int, int]] = []
    waiting = [(0, -1)]
    while waiting:
        node, parent = waiting.pop()
        waiting.extend((child, len(nodes)) for child in reversed(children[node]))
        nodes.append((size[node], parent))
    return ends_of(*nodes)


def random_tree(rng: np.random.Generator, steps: Iterable[int], size: int) -> Tensor:
    """A root and one node per step, attached that many nodes above the last one; each has up to `size` tokens."""
    nodes, path = [(int(rng.integers(1, size + 1)), -1)], [0]
    for up in steps:
        path = path[: max(1, len(path) - up)]
        # path 0 1 4 and up 1 -> path 0 1: the new node 5 is a child of node 1
        nodes.append((int(rng.integers(1, size + 1)), path[-1]))
        path.append(len(nodes) - 1)
    return ends_of(*nodes)


def ends_of_tree(tree: PlanTree, stretch: int) -> Tensor:
    """subtree_end [1, T] of a planner's tree, with every token repeated `stretch` times."""
    size = tree.size * stretch
    begin = np.concatenate([[0], size.cumsum()])
    # sizes 2 1 1, node ends 3 2 3 -> begin 0 2 3 4 -> subtree_end 4 4 3 4
    return torch.from_numpy(begin[tree.end].repeat(size).astype(np.int32))[None]


def query_cover(schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Count how often each pair is computed, under the mask and without it: two int [B, T_pad, T_pad], query by key."""
    batch, total = schedule.end.shape
    masked, bare = torch.zeros(2, batch, total // QUERY_BLOCK, total // GRANULE, dtype=torch.int32)
    for row in range(batch):
        for block in range(total // QUERY_BLOCK):
            first, last = schedule.query_offsets[row, block : block + 2].tolist()
            middle = first + int(schedule.query_partial[row, block])
            for into, entries in (
                (masked, schedule.granules[first:middle]),
                (bare, schedule.granules[middle:last]),
            ):
                assert len(entries) % 4 == 0
                into[row, block] += torch.bincount(entries[entries >= 0].long(), minlength=into.shape[-1])
            assert (schedule.granules[middle:last] >= 0).all(), "no padding without a mask"
            diagonal = torch.arange(4) + 4 * block
            assert torch.equal(schedule.granules[first : first + 4].long(), diagonal), "the diagonal comes first"
    # [B, blocks, granules] -> [B, T_pad, T_pad]
    masked, bare = (x.repeat_interleave(QUERY_BLOCK, 1).repeat_interleave(GRANULE, 2) for x in (masked, bare))
    return masked, bare


def key_cover(schedule: Schedule) -> tuple[Tensor, Tensor]:
    """`query_cover` of the ranges of the key blocks."""
    batch, total = schedule.end.shape
    masked, bare = torch.zeros(2, batch, total, total // GRANULE, dtype=torch.int32)
    for row in range(batch):
        for granules, edges in zip(schedule.key_granules[row], schedule.key_ranges[row].tolist(), strict=True):
            assert edges == sorted(edges)
            assert edges[-1] <= total
            assert all(edge % QUERY_TILE == 0 for edge in edges)
            first, begin, end, last = edges
            for granule in granules[granules >= 0].tolist():
                masked[row, first:begin, granule] += 1
                bare[row, begin:end, granule] += 1
                masked[row, end:last, granule] += 1
    return masked.repeat_interleave(GRANULE, 2), bare.repeat_interleave(GRANULE, 2)


def check(subtree_end: Tensor) -> Schedule:
    schedule = build_schedule(subtree_end)
    batch, length = subtree_end.shape
    total = schedule.end.shape[1]
    assert schedule.length == length <= total < length + QUERY_BLOCK
    assert total % QUERY_BLOCK == 0
    assert torch.equal(schedule.end[:, :length], subtree_end.int())
    assert torch.equal(schedule.end[:, length:], torch.arange(length + 1, total + 1).int().expand(batch, -1))
    seen = visible_pairs(schedule.end)
    real = seen.clone()
    real[:, length:], real[:, :, length:] = False, False
    for (masked, bare), pairs in ((query_cover(schedule), seen), (key_cover(schedule), real)):
        assert ((masked + bare)[pairs] == 1).all(), "every visible pair is computed once"
        assert int((masked + bare).max()) <= 1, "no pair is computed twice"
        assert seen[bare > 0].all(), "every pair computed without a mask is visible"
    check_orders(schedule)
    for granules in schedule.key_granules:
        listed = granules[granules >= 0].sort().values
        assert torch.equal(listed.long(), torch.arange(-(-length // GRANULE))), "every granule has one key block"
    return schedule


def check_orders(schedule: Schedule) -> None:
    ranges = schedule.key_ranges
    for order, work in (
        (schedule.query_order, schedule.query_offsets.diff(dim=1)),
        (schedule.key_order, ranges[..., 3] - ranges[..., 0]),
    ):
        for blocks, costs in zip(order.tolist(), work.tolist(), strict=True):
            assert blocks == [i for _, i in sorted((-cost, i) for i, cost in enumerate(costs))]


@given(trees(max_leaves=8, max_size=9), st.integers(1, 12))
@settings(max_examples=80)
def test_both_sides_cover_every_visible_pair_once(tree: PlanTree, stretch: int) -> None:
    end = ends_of_tree(tree, stretch)
    if end.shape[1]:
        check(end)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 90), st.integers(0, 10**6))
def test_trees_of_short_nodes_are_covered(steps: list[int], size: int, seed: int) -> None:
    check(random_tree(np.random.default_rng(seed), steps, size))


# Branches begin 0, 2 and 4 tokens after a multiple of 128 and the offset, so each is at every edge of a granule once.
@pytest.mark.parametrize("offset", [offset for offset in range(128) if offset % 32 < 2 or offset % 32 > 24])
def test_branches_at_every_offset_are_covered(offset: int) -> None:
    check(star(128 + offset, 3, 130))


@pytest.mark.parametrize("length", [1, 128, 300])
def test_a_row_of_padding_is_its_diagonal(length: int) -> None:
    schedule = check(torch.arange(1, length + 1)[None])
    assert torch.equal(schedule.granules, torch.arange(schedule.end.shape[1] // GRANULE).int())


def test_ten_thousand_branches_of_one_token_are_listed_once_each() -> None:
    schedule = build_schedule(star(100, 10_000, 1))
    lists = schedule.query_offsets.diff(dim=1)[0]
    assert int(lists.max()) == 8, "the diagonal and the prompt"
    seen = schedule.key_granules[schedule.key_granules >= 0].sort().values
    assert torch.equal(seen.long(), torch.arange(-(-10_100 // GRANULE)))


def test_rows_of_a_batch_are_scheduled_as_if_alone() -> None:
    rows = [star(200, 5, 90), chain(650), caterpillar(50, 20, 10, 20), torch.arange(1, 651)[None]]
    together = check(torch.cat([row[:, :650].clamp(max=650) for row in rows]))
    for i, row in enumerate(rows):
        alone = build_schedule(row[:, :650].clamp(max=650))
        begin, end = together.query_offsets[i, [0, -1]].tolist()
        assert torch.equal(together.granules[begin:end], alone.granules)
        assert torch.equal(together.query_offsets[i] - begin, alone.query_offsets[0])
        blocks = alone.key_granules.shape[1]
        assert torch.equal(together.key_granules[i, :blocks], alone.key_granules[0])
        assert (together.key_granules[i, blocks:] == -1).all()
        assert not together.key_ranges[i, blocks:].any()


@cache
def workloads() -> dict[str, Tensor]:
    return {
        "chain": chain(8000),
        "star": star(1024, 8, 1024),
        "agent tree": agent_tree(16_000, seed=1),
        "caterpillar": caterpillar(2000, 20, 300, 400),
        "twigs": caterpillar(300, 200, 7, 20),
    }


def work_and_minimum(end: Tensor) -> tuple[float, float]:
    """Return the work of the key blocks, and the minimum over all cuts of either order."""
    first, full_begin, full_end, last = build_schedule(end).key_ranges[0].unbind(-1)
    work = float(((1 + MASKED) * (last - first) - MASKED * (full_end - full_begin)).sum())
    return work, min(minimum_work(end, straddling_last=x) for x in (False, True))


@pytest.mark.parametrize(
    ("name", "limit"),
    [("chain", 1.0), ("star", 1.0), ("agent tree", 1.005), ("caterpillar", 1.005), ("twigs", 1.05)],
)
def test_no_cut_of_the_order_is_much_less_work(name: str, limit: float) -> None:
    work, minimum = work_and_minimum(workloads()[name])
    assert work <= limit * minimum


@pytest.mark.parametrize(("size", "limit"), [(30, 1.07), (100, 1.04), (300, 1.015), (1000, 1.01)])
def test_cuts_of_random_trees_are_near_the_minimum_work(size: int, limit: float) -> None:
    """The shorter the nodes (up to `size` tokens), the larger the distance from the minimum."""
    rng = np.random.default_rng(size)
    rows = [random_tree(rng, rng.integers(0, 4, 40), size) for _ in range(20)]
    work, minimum = np.array([work_and_minimum(row) for row in rows]).sum(0)
    assert work <= limit * minimum


def test_what_is_masked_in_a_caterpillar_is_little() -> None:
    first, full_begin, full_end, last = build_schedule(workloads()["caterpillar"]).key_ranges[0].unbind(-1)
    assert int((last - first - full_end + full_begin).sum()) <= 0.25 * int((last - first).sum())


@pytest.mark.parametrize("name", ["chain", "star", "agent tree", "caterpillar"])
def test_the_tiles_hold_little_more_than_the_visible_pairs(name: str) -> None:
    end = workloads()[name]
    schedule = build_schedule(end)
    pairs = int((end - torch.arange(end.shape[1])).sum())
    ranges = schedule.key_ranges[0]
    assert len(schedule.granules) * GRANULE * QUERY_BLOCK <= 1.09 * pairs
    assert int((ranges[:, 3] - ranges[:, 0]).sum()) * KEY_BLOCK <= 1.09 * pairs


def minimum_work(end: Tensor, *, straddling_last: bool) -> float:
    """Return the minimum work over all cuts of the granules, sorted by their last query, into blocks of at most 4."""
    length, tile = end.shape[1], QUERY_TILE
    padded = build_schedule(end).end[0]
    begin, full_begin, full_end, last = [], [], [], []
    for start in range(0, length, GRANULE):
        ends = padded[start : start + GRANULE]
        # A granule at token 96, with ends of 192 and 300: range 64 ... 320, full 128 ... 192
        begin.append(start // tile * tile)
        full_begin.append(-(-(start + GRANULE - 1) // tile) * tile)
        full_end.append(int(ends.min()) // tile * tile)
        last.append(-(-min(int(ends.max()), length) // tile) * tile)
    late = [straddling_last and last[i] - full_end[i] > tile for i in range(len(last))]
    order = sorted(range(len(last)), key=lambda i: (-last[i], late[i], i))
    # best[i] is the minimum for the first i granules in this order; the last block has 1 to 4 of them.
    best = [0.0]
    for i in range(1, len(order) + 1):
        totals = []
        for size in range(1, min(4, i) + 1):
            group = order[i - size : i]
            whole = max(last[g] for g in group) - min(begin[g] for g in group)
            full = max(0, min(full_end[g] for g in group) - max(full_begin[g] for g in group))
            totals.append(best[i - size] + (1 + MASKED) * whole - MASKED * full)
        best.append(min(totals))
    return best[-1]


def test_a_schedule_moves_whole() -> None:
    schedule = build_schedule(star(30, 3, 20))
    moved = schedule.to("meta")
    assert moved.length == schedule.length
    assert {x.device.type for x in vars(moved).values() if isinstance(x, Tensor)} == {"meta"}
    assert all(x.dtype == torch.int32 for x in vars(moved).values() if isinstance(x, Tensor))
