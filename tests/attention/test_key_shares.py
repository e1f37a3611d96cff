"""Shares of key blocks: every query tile once, long blocks divided, sums joined in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import chain, random_tree, star
from support.kernel_inputs import surrounded
from treepack.attention.build_schedule import build_schedule
from treepack.attention.key_shares import MIN_TILES, PARTS_OF_A_ROW
from treepack.attention.reach import KeyReach, first_visible
from treepack.attention.schedule import QUERY_TILE, KeyShares, Schedule


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Two rows, one of them with a prompt and many answers, and the first query of a rectangle, or 0."""
    branches, size = draw(st.integers(1, 60)), draw(st.integers(1, 90))
    end = star(draw(st.integers(1, 300)), branches, size)
    other = random_tree(end.shape[1], draw(st.integers(0, 999)))
    first = 128 * draw(st.integers(0, (end.shape[1] - 1) // 128))
    return torch.cat([end, other]), draw(st.sampled_from([0, first]))


def shares_of(end: Tensor, first: int = 0) -> tuple[Schedule, KeyShares]:
    """Return the schedule of rows and its shares."""
    schedule = build_schedule(end, first=first)
    assert schedule.shares is not None
    return schedule, schedule.shares


@given(rows())
def test_shares_have_every_query_tile_of_every_key_block_once(row: tuple[Tensor, int]) -> None:
    schedule, found = shares_of(*row)
    tiles = [
        (r, block, first)
        for r, block, begin, _, _, last, _, _ in found.shares.tolist()
        for first in range(begin, last, QUERY_TILE)
    ]
    expected = [
        (r, block, first)
        for r, blocks in enumerate(schedule.key_ranges.tolist())
        for block, (begin, _, _, last) in enumerate(blocks)
        for first in range(begin, last, QUERY_TILE)
    ]
    assert sorted(tiles) == expected
    with_granules = (schedule.key_granules[..., 0] >= 0).nonzero().tolist()
    assert sorted({(r, block) for r, block, *_ in found.shares.tolist()}) == [tuple(place) for place in with_granules]


@given(rows())
def test_shares_are_short_sorted_and_keep_the_ranges_without_a_mask(row: tuple[Tensor, int]) -> None:
    schedule, found = shares_of(*row)
    lengths = [(last - begin) // QUERY_TILE for _, _, begin, _, _, last, _, _ in found.shares.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) <= max(MIN_TILES, sum(lengths) // PARTS_OF_A_ROW)
    for r, block, _, full_begin, full_end, *_ in found.shares.tolist():
        assert [full_begin, full_end] == schedule.key_ranges[r, block, 1:3].tolist()


@given(rows())
def test_each_divided_block_has_sums_of_its_own_in_the_order_of_its_shares(row: tuple[Tensor, int]) -> None:
    _, found = shares_of(*row)
    divided: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for r, block, begin, _, _, _, place, _ in found.shares.tolist():
        divided.setdefault((r, block), []).append((begin, place))
    places = []
    for (r, block), shares in sorted(divided.items()):
        if len(shares) == 1:
            assert shares[0][1] == -1
        else:
            own = [place for _, place in sorted(shares)]
            assert own == list(range(own[0], own[0] + len(own)))
            assert [r, block, own[0], len(own)] in found.joined.tolist()
            places += own
    assert sorted(places) == list(range(found.num_sums))
    assert len(found.joined) == sum(len(shares) > 1 for shares in divided.values())


def test_the_worked_example_of_the_header() -> None:
    _, found = shares_of(star(128, 40, 128))
    prompt = sorted(share for share in found.shares.tolist() if share[1] == 0)
    assert [(begin // 64, last // 64, place) for _, _, begin, _, _, last, place, _ in prompt] == [
        *((14 * i, 14 * i + 14, i) for i in range(5)),
        (70, 82, 5),
    ]
    assert found.joined.tolist() == [[0, 0, 0, 6]]
    assert len(found.shares) == 6 + 40


def test_no_block_of_a_long_chain_is_divided_and_windows_have_no_shares() -> None:
    _, found = shares_of(chain(20_000))
    assert (found.num_sums, len(found.joined)) == (0, 0)
    end = star(128, 40, 128)
    assert build_schedule(end, first_visible(end, KeyReach("window", 16))).shares is None


@pytest.mark.parametrize("width", [64, 128])
def test_sums_of_shares_are_added_to_the_rows_of_divided_blocks_only(width: int) -> None:
    pytest.importorskip("triton")
    from support import interpreter  # noqa: F401
    from treepack.attention.hopper.join_shares import join_shares

    end = torch.cat([star(200, 30, 70), star(100, 20, 110)])
    schedule, found = shares_of(end)
    assert len(found.joined) > 2, "both rows have divided blocks"
    generator = torch.Generator().manual_seed(0)
    heads = 2
    sums = (
        torch.randn(found.num_sums, heads, 128, width, generator=generator),
        torch.randn(found.num_sums, heads, 128, width, generator=generator),
    )
    empty = torch.full((2, heads, end.shape[1], width), torch.nan)
    dk, dv = surrounded(empty), surrounded(empty)
    join_shares(sums, dk, dv, schedule, 0.5)
    expected = [empty.clone(), empty.clone()]
    for row, block, first, count in found.joined.tolist():
        for part, granule in enumerate(schedule.key_granules[row, block].tolist()):
            if granule < 0:
                continue
            tokens = torch.arange(granule * 32, min(granule * 32 + 32, schedule.length))
            for total, result, scale in zip(sums, expected, (0.5, 1.0), strict=True):
                whole = total[first : first + count, :, 32 * part : 32 * part + 32].sum(0) * scale
                result[row, :, tokens] = whole[:, : len(tokens)]
    torch.testing.assert_close(dk, expected[0], equal_nan=True)
    torch.testing.assert_close(dv, expected[1], equal_nan=True)
