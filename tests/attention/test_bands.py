"""Bands of stored score gradients: every pair once, places without overlap, exact gradients, bounded memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import chain, random_tree, star
from support.stored_scores import Operands, operands, run
from treepack.attention.bands import with_bands
from treepack.attention.reach import Reach, first_visible
from treepack.attention.reference import reference_attention, visible_pairs
from treepack.attention.schedule import QUERY_BLOCK, QUERY_TILE, Bands, Schedule, build_schedule
from treepack.errors import TreepackError


@st.composite
def rows(draw: st.DrawFn, *, max_length: int = 700) -> tuple[Tensor, int]:
    """Two rows of a forest, and the first query of a rectangle, or 0."""
    length = draw(st.integers(1, max_length))
    seeds = draw(st.tuples(st.integers(0, 999), st.integers(0, 999)))
    first = 128 * draw(st.integers(0, (length - 1) // 128))
    return torch.stack([random_tree(length, seed)[0] for seed in seeds]), draw(st.sampled_from([0, first]))


def banded(row: tuple[Tensor, int], **options: int) -> tuple[Schedule, Bands]:
    """Return the schedule of rows, with bands, and the bands."""
    schedule = with_bands(build_schedule(row[0], first=row[1]), **options)
    assert schedule.bands is not None
    return schedule, schedule.bands


def pieces_of(bands: Bands) -> list[list[list[int]]]:
    """Return the pieces of each band."""
    return [part.tolist() for part in torch.split(bands.pieces, list(bands.num_pieces))]


def tiles_of(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Return row, key block and query tile of every tile that the schedule computes."""
    return [
        (row, block, tile)
        for row, blocks in enumerate(schedule.key_ranges.tolist())
        for block, (first, _, _, last) in enumerate(blocks)
        for tile in range(first // QUERY_TILE, last // QUERY_TILE)
    ]


@given(rows(max_length=2000), st.integers(1, 9))
def test_pieces_have_every_tile_once_at_a_place_of_its_own(row: tuple[Tensor, int], blocks: int) -> None:
    schedule, bands = banded(row, blocks=blocks)
    tiles = []
    for pieces, num_places in zip(pieces_of(bands), bands.num_places, strict=True):
        places = []
        lengths = []
        for r, block, begin, last, *_, place in pieces:
            count = (last - begin) // QUERY_TILE
            tiles += [(r, block, begin // QUERY_TILE + i) for i in range(count)]
            places += [place + i for i in range(count)]
            lengths.append(count)
        assert sorted(places) == list(range(1, num_places)), "place 0 has zeros"
        assert lengths == sorted(lengths, reverse=True), "the longest piece is first"
    assert sorted(tiles) == tiles_of(schedule)


@given(rows(max_length=2000), st.integers(1, 9))
def test_entries_name_every_tile_of_a_query_block_once(row: tuple[Tensor, int], blocks: int) -> None:
    schedule, bands = banded(row, blocks=blocks)
    at = {}
    for band, pieces in enumerate(pieces_of(bands)):
        for r, block, begin, last, *_, place in pieces:
            for i in range((last - begin) // QUERY_TILE):
                at[band, place + i] = (r, block, begin // QUERY_TILE + i)
    tiles = []
    offsets = bands.entry_offsets.tolist()
    per_row = schedule.query_order.shape[1]
    for query_block in range(schedule.query_order.numel()):
        r, inside = divmod(query_block, per_row)
        first_tile = (schedule.first + inside * QUERY_BLOCK) // QUERY_TILE
        for key_block, *places, _ in bands.entries[offsets[query_block] : offsets[query_block + 1]].tolist():
            assert any(places)
            for i, place in enumerate(places):
                if place:
                    tile = at[query_block // bands.blocks, place]
                    assert tile == (r, key_block - r * schedule.key_order.shape[1], first_tile + i)
                    tiles.append(tile)
    assert sorted(tiles) == tiles_of(schedule)


@given(rows(max_length=2000), st.integers(1, 9))
def test_pieces_of_a_key_block_count_up_and_share_a_place_for_sums(row: tuple[Tensor, int], blocks: int) -> None:
    schedule, bands = banded(row, blocks=blocks)
    numbers: dict[tuple[int, int], list[list[int]]] = {}
    for pieces in pieces_of(bands):
        for r, block, *_, earlier, later, at, _ in pieces:
            numbers.setdefault((r, block), []).append([earlier, later, at])
    places = []
    for values in numbers.values():
        count = len(values)
        assert [(earlier, later) for earlier, later, _ in values] == [(i, count - 1 - i) for i in range(count)]
        assert len({at for *_, at in values}) == 1
        places += [values[0][2]] * (count > 1)
    assert sorted(places) == list(range(len(places))), "each block with several pieces has sums of its own"
    assert bands.num_sums >= max(1, len(places))
    with_granules = (schedule.key_granules[..., 0] >= 0).nonzero().tolist()
    assert sorted(numbers) == [tuple(place) for place in with_granules], "blocks that no query sees store zeros"


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


@settings(max_examples=10)
@given(rows(max_length=500), st.integers(1, 5))
def test_two_products_of_stored_tiles_are_the_gradients_of_the_reference(row: tuple[Tensor, int], blocks: int) -> None:
    schedule, _ = banded(row, blocks=blocks)
    given_operands, expected = draw_operands(*row, torch.float64)
    for result, exact in zip(run(given_operands, schedule), expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=0, atol=1e-12 * max(1.0, float(exact.abs().max())))


def test_a_block_without_a_granule_is_masked_everywhere() -> None:
    # Its full tiles would be multiplied by the keys of granule 0, which stand in for the missing ones.
    schedule = build_schedule(chain(1000))
    granules = schedule.key_granules.clone()
    granules[0, 1, 3] = -1
    bands = with_bands(replace(schedule, key_granules=granules)).bands
    assert bands is not None
    masked = {block: begin == end for _, block, _, _, begin, end, *_ in bands.pieces.tolist()}
    assert (masked[0], masked[1], masked[2]) == (False, True, False)


@pytest.mark.parametrize("end", [chain(20_000), star(18_000, 4, 500)])
def test_bands_are_shortened_until_their_tiles_fit(end: Tensor) -> None:
    _, whole = banded((end, 0), tiles=1 << 30)
    _, short = banded((end, 0), tiles=2_000)
    assert (whole.blocks, short.blocks) == (16, 4)
    assert max(short.num_places) <= 2_001 < max(whole.num_places)


def test_a_row_whose_bands_would_be_too_short_has_none() -> None:
    assert with_bands(build_schedule(chain(20_000)), tiles=1_000).bands is None


def test_the_worked_example_of_the_header() -> None:
    _, bands = banded((chain(512), 0), blocks=2)
    places = [
        [(block, begin // 64, last // 64, place) for _, block, begin, last, *_, place in pieces]
        for pieces in pieces_of(bands)
    ]
    assert places == [
        [(0, 0, 4, 1), (1, 2, 4, 5)],
        [(0, 4, 8, 1), (1, 4, 8, 5), (2, 4, 8, 9), (3, 6, 8, 13)],
    ]
    begin, end = bands.entry_offsets[1:3].tolist()
    assert bands.entries[begin:end].tolist() == [[0, 3, 4, 0], [1, 5, 6, 0]]


def test_windows_and_bands_without_blocks_are_refused_in_one_sentence() -> None:
    end = chain(300)
    windowed = build_schedule(end, first_visible(end, Reach("window", 16)))
    with pytest.raises(TreepackError, match=r"have no windows and chunks; use the schedule as it is$"):
        with_bands(windowed)
    with pytest.raises(TreepackError, match=r"a band has 0 query blocks; expected at least 1$"):
        with_bands(build_schedule(end), blocks=0)
