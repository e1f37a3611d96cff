"""The work of a backward in one pass: every pair once, turns without gaps, no deadlock, exact gradients, equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import chain, random_tree, star
from support.one_pass import Operands, operands, run
from treepack.attention.bands import with_bands
from treepack.attention.reach import Reach, first_visible
from treepack.attention.reference import reference_attention, visible_pairs
from treepack.attention.schedule import QUERY_TILE, Schedule, build_schedule
from treepack.errors import TreepackError


@st.composite
def rows(draw: st.DrawFn, *, max_length: int = 700) -> tuple[Tensor, int]:
    """Two rows of a forest, and the first query of a rectangle, or 0."""
    length = draw(st.integers(1, max_length))
    seeds = draw(st.tuples(st.integers(0, 999), st.integers(0, 999)))
    first = 128 * draw(st.integers(0, (length - 1) // 128))
    return torch.stack([random_tree(length, seed)[0] for seed in seeds]), draw(st.sampled_from([0, first]))


def tiles_of(schedule: Schedule) -> list[tuple[int, int, list[int], int, list[int]]]:
    """Return row, key block, query tiles, number among the block's pieces and turns of each piece, in launch order."""
    assert schedule.pieces is not None
    assert schedule.turns is not None
    band = schedule.turns.shape[1]
    result = []
    for (row, block, begin, last, number), turns in zip(schedule.pieces.tolist(), schedule.turns.tolist(), strict=True):
        tiles = list(range(begin // QUERY_TILE, last // QUERY_TILE))
        assert len({tile // band for tile in tiles}) <= 1, "a piece has one band"
        result.append((row, block, tiles, number, [turns[tile % band] for tile in tiles]))
    return result


@given(rows(max_length=2000), st.integers(1, 9))
def test_pieces_have_every_query_tile_of_every_key_block_once(row: tuple[Tensor, int], band: int) -> None:
    schedule = build_schedule(row[0], first=row[1])
    pairs = [(r, b, tile) for r, b, tiles, _, _ in tiles_of(with_bands(schedule, band=band)) for tile in tiles]
    expected = [
        (r, b, tile)
        for r, blocks in enumerate(schedule.key_ranges.tolist())
        for b, (first, _, _, last) in enumerate(blocks)
        for tile in range(first // QUERY_TILE, last // QUERY_TILE)
    ]
    assert sorted(pairs) == expected


@given(rows(max_length=2000), st.integers(1, 9))
def test_turns_and_numbers_count_up_without_gaps_in_launch_order(row: tuple[Tensor, int], band: int) -> None:
    schedule = with_bands(build_schedule(row[0], first=row[1]), band=band)
    at_tile: dict[tuple[int, int], int] = {}
    at_block: dict[tuple[int, int], int] = {}
    for r, block, tiles, number, turns in tiles_of(schedule):
        for tile, turn in zip(tiles, turns, strict=True):
            assert turn == at_tile.get((r, tile), 0)
            at_tile[r, tile] = turn + 1
        assert number == at_block.get((r, block), 0)
        at_block[r, block] = number + 1
    with_granules = (schedule.key_granules[..., 0] >= 0).nonzero().tolist()
    assert sorted(at_block) == [tuple(place) for place in with_granules], "blocks that no query sees store zeros"


def draw_operands(end: Tensor, first: int, dtype: torch.dtype) -> tuple[Operands, list[Tensor]]:
    """Return random operands of 4 query and 2 key heads, and the gradients of the reference."""
    batch, length = end.shape
    generator = torch.Generator().manual_seed(length)
    sizes = ((4, length - first), (2, length), (2, length), (4, length - first))
    q, k, v, do = (torch.randn(batch, *size, 8, generator=generator, dtype=torch.float64) for size in sizes)
    exact = operands(q, k, v, do, visible_pairs(end)[:, first:])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = reference_attention(q, k, v, end, first=first)
    expected = list(torch.autograd.grad(out, leaves, do))
    rounded: dict[str, Any] = {
        name: x.detach().to(dtype) for name, x in exact._asdict().items() if isinstance(x, Tensor)
    }
    return exact._replace(**rounded), expected


@settings(max_examples=5)
@given(rows(max_length=400), st.integers(1, 5), st.integers(1, 12), st.integers(0, 99))
def test_programs_in_any_order_and_number_end_with_the_gradients_of_the_reference(
    row: tuple[Tensor, int], band: int, residents: int, seed: int
) -> None:
    schedule = with_bands(build_schedule(row[0], first=row[1]), band=band)
    given_operands, expected = draw_operands(*row, torch.float64)
    results = run(given_operands, schedule, residents=residents, seed=seed)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=1e-12 * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("end", [chain(500), star(200, 6, 70)])
def test_two_orders_of_the_programs_agree_in_every_bit(end: Tensor) -> None:
    schedule = with_bands(build_schedule(end), band=3)
    given_operands, _ = draw_operands(end, 0, torch.float32)
    one, other, alone = (
        run(given_operands, schedule, residents=residents, seed=seed) for residents, seed in ((7, 0), (7, 1), (1, 0))
    )
    for a, b, c in zip(one, other, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_the_worked_example_of_the_header() -> None:
    schedule = with_bands(build_schedule(chain(512)), band=4)
    assert [(block, tiles, turns) for _, block, tiles, _, turns in tiles_of(schedule)] == [
        (1, [2, 3], [0, 0]),
        (0, [0, 1, 2, 3], [0, 0, 1, 1]),
        (3, [6, 7], [0, 0]),
        (0, [4, 5, 6, 7], [0, 0, 1, 1]),
        (1, [4, 5, 6, 7], [1, 1, 2, 2]),
        (2, [4, 5, 6, 7], [2, 2, 3, 3]),
    ]


def test_windows_and_bands_without_tiles_are_refused_in_one_sentence() -> None:
    end = chain(300)
    windowed = build_schedule(end, first_visible(end, Reach("window", 16)))
    with pytest.raises(TreepackError, match=r"has no windows and chunks; use the one in two passes$"):
        with_bands(windowed)
    with pytest.raises(TreepackError, match=r"band is 0; expected at least 1 query tile$"):
        with_bands(build_schedule(end), band=0)
