"""Rectangles, queries of the last tokens of a row against all of its keys, are the same rows of the square."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import comb, forests, random_tree, star
from support.refusal import refusal
from treepack.attention import (
    BatchSchedules,
    KeyReach,
    build_block_mask,
    first_visible,
    naive,
    prepare,
    tree_attention,
    visible_pairs,
)
from treepack.attention.build_schedule import build_schedule
from treepack.attention.chains import find_chains
from treepack.attention.kernel_launch import AttentionInputs
from treepack.attention.schedule import GRANULE, QUERY_BLOCK, QUERY_TILE, Schedule
from treepack.errors import TreepackError

REACHES = [None, KeyReach("window", 40), KeyReach("chunk", 90)]


def draw(end: Tensor, dims: tuple[int, int] = (8, 6)) -> tuple[list[Tensor], Tensor]:
    """Return q of 4 heads, k and v of 2, and sinks as float64 leaves, and the gradient of the output."""
    generator = torch.Generator().manual_seed(end.shape[1])
    shapes = [(4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1])]
    q, k, v, do = (
        torch.randn(len(end), heads, end.shape[1], width, generator=generator, dtype=torch.float64)
        for heads, width in shapes
    )
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, v, sinks)], do


def by_square(leaves: list[Tensor], do: Tensor, end: Tensor, first: int, **options: Any) -> list[Tensor]:
    """Return output and gradients of the square, of the queries from `first` on; earlier outputs have no gradient."""
    q, k, v, _ = leaves
    out = tree_attention(q, k, v, end, impl="reference", **options)[:, :, first:]
    dq, *others = torch.autograd.grad(out, leaves if "sinks" in options else leaves[:3], do[:, :, first:])
    assert not dq[:, :, :first].any()
    return [out.detach(), dq[:, :, first:], *others]


def by_rectangle(leaves: list[Tensor], do: Tensor, end: Tensor, first: int, **options: Any) -> list[Tensor]:
    """Return output and gradients of the rectangle."""
    q = leaves[0].detach()[:, :, first:].requires_grad_()
    out = tree_attention(q, leaves[1], leaves[2], end, first=first, **options)
    inputs = [q, *leaves[1:]] if "sinks" in options else [q, *leaves[1:3]]
    return [out.detach(), *torch.autograd.grad(out, inputs, do[:, :, first:])]


def assert_equal(results: list[Tensor], expected: list[Tensor], do: Tensor) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.shape == theirs.shape
        # Gradients of a token that sees only itself cancel to 0, so the error is relative to `do` at least.
        assert (ours - theirs).norm() <= 1e-12 * max(float(theirs.norm()), float(do.norm()))


ROWS = forests(lengths=[1, 5, 31, 64, 100], max_nodes=7)


@given(ROWS, st.data(), st.sampled_from(REACHES), st.booleans())
@settings(max_examples=12, deadline=None)
def test_a_rectangle_is_the_last_rows_of_the_square(
    end: Tensor, data: st.DataObject, reach: KeyReach | None, special: bool
) -> None:
    length = end.shape[1]
    first = data.draw(st.sampled_from([0, length // 2, length - 1, min(128, length - 1)]))
    leaves, do = draw(end)
    options: dict[str, Any] = {"start": first_visible(end, reach), "scale": 0.4}
    options |= {"sinks": leaves[3], "softcap": 2.0} if special else {}
    expected = by_square(leaves, do, end, first, **options)
    assert_equal(by_rectangle(leaves, do, end, first, impl="reference", **options), expected, do)


@pytest.mark.parametrize("impl", ["reference", "flex"])
@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("first", [128, 133, 299])
def test_rectangles_with_sinks_from_every_kind_of_token(first: int, reach: KeyReach | None, impl: str) -> None:
    end = torch.cat([random_tree(300, seed=1), star(200, 2, 50)])
    leaves, do = draw(end, (8, 8))
    options = {"start": first_visible(end, reach), "sinks": leaves[3]}
    expected = by_square(leaves, do, end, first, **options)
    assert_equal(by_rectangle(leaves, do, end, first, impl=impl, **options), expected, do)


@pytest.mark.parametrize("reach", REACHES)
def test_the_blocks_of_flex_are_those_of_the_last_queries_of_the_square(reach: KeyReach | None) -> None:
    end = torch.cat([random_tree(700, seed=2), star(300, 4, 100)])
    start = first_visible(end, reach)
    square, rectangle = (build_block_mask(end, start, first=first) for first in (0, 256))
    assert rectangle.seq_lengths == (512, 768)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(rectangle, name), getattr(square, name)[:, :, 2:])
    for kind in ("", "full_"):
        # Key by query block, from the lists of the forward and of the backward.
        counts, indices = (getattr(rectangle, f"{kind}{name}") for name in ("kv_num_blocks", "kv_indices"))
        q_counts, q_indices = (getattr(rectangle, f"{kind}{name}") for name in ("q_num_blocks", "q_indices"))
        assert torch.equal(dense_blocks(counts, indices, 6).mT, dense_blocks(q_counts, q_indices, 4))


def dense_blocks(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Return the blocks that ordered lists name, bool [B, rows, columns]."""
    dense = torch.zeros(*counts.shape[:1], counts.shape[2], columns, dtype=torch.bool)
    for batch, row in torch.cartesian_prod(*map(torch.arange, dense.shape[:2])).tolist():
        dense[batch, row, indices[batch, 0, row, : counts[batch, 0, row]].long()] = True
    return dense


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("first", [0, 128, 256])
def test_the_tiles_of_a_rectangle_are_the_reference_in_output_and_every_gradient(
    first: int, reach: KeyReach | None
) -> None:
    end = torch.cat([random_tree(301, seed=3), comb(61, 40, 6)])
    leaves, do = draw(end)
    start = first_visible(end, reach)
    expected = by_square(leaves, do, end, first, start=start, sinks=leaves[3], scale=0.3)
    q, k, v, sinks = (x.detach() for x in leaves)
    inputs = AttentionInputs(q[:, :, first:], k, v, build_schedule(end, start, first=first), 0.3, sinks)
    out, lse = naive.naive_forward(inputs)
    results = naive.naive_backward(inputs, out, lse, do[:, :, first:])
    assert results[3] is not None
    assert lse.shape == out.shape[:3]
    assert_equal([out, *results[:3], results[3]], expected, do)


def tiles_of_keys(schedule: Schedule, row: int, block: int) -> list[tuple[int, bool]]:
    """Return the first token of each query tile of a key block, and whether it needs no mask."""
    first, begin, end, last = schedule.key_ranges[row, block].tolist()
    assert first <= begin <= end <= last
    if schedule.key_tiles is None:
        return [(tile, begin <= tile < end) for tile in range(first, last, QUERY_TILE)]
    return [(int(schedule.key_tiles[place]), place >= begin) for place in range(first, last)]


def times_listed(schedule: Schedule, row: int) -> tuple[Tensor, Tensor]:
    """Count how often a row's query lists and key ranges name each pair; minus 100 for each time without a mask.

    Two int [T_pad - first, T_pad], query by key.
    """
    total, first = schedule.end.shape[1], schedule.first
    queries, keys = torch.zeros(2, total - first, total, dtype=torch.int64)
    for block in range((total - first) // QUERY_BLOCK):
        begin, end = schedule.query_offsets[row, block : block + 2].tolist()
        for place, granule in enumerate(schedule.granules[begin:end].tolist()):
            is_full = place >= int(schedule.query_partial[row, block])
            rows = slice(block * QUERY_BLOCK, (block + 1) * QUERY_BLOCK)
            if granule >= 0:
                queries[rows, granule * GRANULE : (granule + 1) * GRANULE] += 1 - 100 * is_full
    for block in range(len(schedule.key_granules[row])):
        for tile, is_full in tiles_of_keys(schedule, row, block):
            assert tile >= first
            for granule in schedule.key_granules[row, block].tolist():
                rows = slice(tile - first, tile - first + QUERY_TILE)
                if granule >= 0:
                    keys[rows, granule * GRANULE : (granule + 1) * GRANULE] += 1 - 100 * is_full
    return queries, keys


def check_schedule(end: Tensor, reach: KeyReach | None, first: int) -> None:
    start = first_visible(end, reach)
    square, schedule = build_schedule(end, start), build_schedule(end, start, first=first)
    length, block = end.shape[1], first // QUERY_BLOCK
    seen = visible_pairs(schedule.end, schedule.start)[:, first:]
    assert schedule.first == first
    for row in range(len(end)):
        for listed, queries, keys in zip(times_listed(schedule, row), (None, length), (None, length), strict=True):
            pairs = seen[row].clone()
            if queries is not None:  # key blocks leave out the tokens that pad the row
                pairs[queries - first :], pairs[:, keys:] = False, False
            assert (listed[pairs] % 100 == 1).all(), "every visible pair is computed once"
            assert (listed % 100 <= 1).all(), "no pair is computed twice"
            assert seen[row][listed < 0].all(), "every pair computed without a mask is visible"
        granules = schedule.key_granules[row]
        assert sorted(granules[granules >= 0].tolist()) == list(range(math.ceil(length / GRANULE)))
        # The lists equal the lists of the last blocks of the square.
        begin, last = square.query_offsets[row, [block, -1]].tolist()
        assert torch.equal(schedule.query_offsets[row].diff(), square.query_offsets[row, block:].diff())
        assert torch.equal(schedule.query_partial[row], square.query_partial[row, block:])
        mine = schedule.granules[schedule.query_offsets[row, 0] : schedule.query_offsets[row, -1]]
        assert torch.equal(mine, square.granules[begin:last])
    work = schedule.key_ranges[..., 3] - schedule.key_ranges[..., 0]
    assert work.gather(1, schedule.key_order.long()).diff(dim=1).le(0).all(), "the longest range comes first"


@given(ROWS, st.data(), st.sampled_from(REACHES))
@settings(max_examples=15, deadline=None)
def test_the_schedule_of_a_rectangle_covers_every_visible_pair_once(
    end: Tensor, data: st.DataObject, reach: KeyReach | None
) -> None:
    end = end.repeat(2, 1)
    end[1] = torch.arange(1, end.shape[1] + 1)
    blocks = (end.shape[1] - 1) // QUERY_BLOCK
    check_schedule(end, reach, data.draw(st.integers(0, blocks)) * QUERY_BLOCK)


@pytest.mark.parametrize("reach", REACHES)
def test_keys_that_no_query_sees_have_an_empty_range(reach: KeyReach | None) -> None:
    # Half of the first 256 tokens are dead: 128 branches of one token.
    end = torch.cat([torch.full((128,), 500), torch.arange(129, 257), torch.full((244,), 500)]).int()[None]
    check_schedule(end, reach, 256)
    schedule = build_schedule(end, first_visible(end, reach), first=256)
    work = schedule.key_ranges[..., 3] - schedule.key_ranges[..., 0]
    dead = (schedule.key_granules // 4 == 1).any(-1)
    assert not work[dead].any()


def test_schedules_of_a_rectangle_serve_every_reach() -> None:
    end = random_tree(300, seed=6)
    leaves, do = draw(end, (8, 8))
    for first in (128, 150):
        schedules = BatchSchedules(end, first=first, varlen=True)
        for impl, reach in (("flex", None), ("flex", KeyReach("window", 40)), ("reference", None)):
            start, schedule = schedules.of(impl, reach, varlen=reach is None)
            options = {"start": start, "schedule": schedule, "impl": impl}
            expected = by_square(leaves, do, end, first, start=start)
            assert_equal(by_rectangle(leaves, do, end, first, **options), expected, do)
        schedules.check(end, first=first)
        with pytest.raises(
            TreepackError, match=rf"from token {first} on and they begin at 0; pass Schedules\("
        ) as caught:
            schedules.check(end)
        assert "\n" not in str(caught.value)


def test_a_row_without_branches_has_no_chains_as_a_rectangle() -> None:
    end = torch.full((300,), 300)
    assert not isinstance(prepare(end, "triton", varlen=True), Schedule)
    assert isinstance(prepare(end, "triton", varlen=True, first=128), Schedule)


END = random_tree(300, seed=5)
Q = torch.zeros(1, 2, 172, 8)
K = torch.zeros(1, 1, 300, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"do not share their tokens; call the model without a cache"),
        ({"first": 300}, r"first is 300 and the row has 300 tokens; pass 0 to 299"),
        ({"first": -1}, r"first is -1 and the row has 300 tokens; pass 0 to 299"),
        (
            {"first": 100},
            r"query has 172 tokens, key has 300 and first is 100; pass the queries of the last 200 tokens",
        ),
        (
            {"first": 128, "impl": "flash"},
            "flash has no windows, chunks, sinks, caps of scores and rectangles; use flex",
        ),
        (
            {"first": 128, "schedule": prepare(END, "flex")},
            "BlockMask has queries from token 0 on and they begin at 128",
        ),
        (
            {"first": 128, "impl": "flex", "schedule": prepare(END, "flex", first=256)},
            r"BlockMask has queries from token 256 on and they begin at 128; pass prepare\(subtree_end, 'flex', first=",
        ),
    ],
)
def test_a_rectangle_that_does_not_fit_is_refused_in_one_sentence(options: dict[str, Any], message: str) -> None:
    impl = options.pop("impl", "flex")
    with pytest.raises(TreepackError, match=message) as caught:
        tree_attention(Q, K, K, END, impl=impl, **options)
    assert "\n" not in str(caught.value)


def test_chains_and_flash_refuse_rectangles_by_name() -> None:
    assert "flash has no rectangles and first is 128; use triton or flex" in refusal(prepare, END, "flash", first=128)
    chains = find_chains(torch.full((1, 300), 300))
    assert "the ChainRows has queries from token 0 on and they begin at 128" in refusal(
        tree_attention, Q, K, K, torch.full((300,), 300), impl="triton", schedule=chains, first=128
    )
    assert "begins at query 100; pass a multiple of 128" in refusal(build_schedule, END, first=100)
