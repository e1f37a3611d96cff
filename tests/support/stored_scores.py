"""The backward of attention with stored gradients of scores, step by step, from the lists of `bands`.

    q, k, v, gradient of the output, Schedule with bands --run--> dq, dk, dv

Each band runs the two kernels of `hopper.stored_launch` over the same memory, which is full of NaN before each band. So
a tile that is read without being stored, or a sum that is read too early, shows in the results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from treepack.attention.schedule import GRANULE, QUERY_BLOCK, QUERY_TILE, Bands, Schedule


class Operands(NamedTuple):
    """Tensors of a backward, in any floating dtype, with lse and delta [B, H, T - first]; lse is a natural log."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    lse: Tensor
    delta: Tensor
    scale: float


def operands(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, seen: Tensor) -> Operands:
    """Return the operands from the leaves and the gradient of the output; `seen` is bool [B, T - first, T]."""
    scale, group = query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = (scale * query @ keys.mT).masked_fill(~seen[:, None], -torch.inf)
    delta = (scores.softmax(-1) @ values * grad).sum(-1)
    return Operands(query, key, value, grad, scores.logsumexp(-1), delta, scale)


def run(given: Operands, schedule: Schedule) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    bands = schedule.bands
    assert bands is not None
    _, kv_heads, length, width = given.key.shape
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (given.query, given.key, given.value))
    sums = given.key.new_full((2, bands.num_sums, kv_heads, 128, width), torch.nan)
    first_piece = 0
    for band, (num_pieces, num_places) in enumerate(zip(bands.num_pieces, bands.num_places, strict=True)):
        stored = given.query.new_full((given.query.shape[1], num_places, 128, QUERY_TILE), torch.nan)
        stored[:, 0] = 0
        for piece in bands.pieces[first_piece : first_piece + num_pieces].tolist():
            for group in range(kv_heads):
                _store(given, schedule, piece, group, stored, sums, dk, dv)
        first_piece += num_pieces
        last = min((band + 1) * bands.blocks, schedule.query_order.numel())
        for block in range(band * bands.blocks, last):
            _multiply(given, schedule, bands, block, stored, dq)
    return dq * given.scale, dk[:, :, :length] * given.scale, dv[:, :, :length]


def tokens_of(schedule: Schedule, row: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of the 128 places of a key block, clamped to the row, and which places have a token."""
    granules = schedule.key_granules[row, block]
    tokens = (granules[:, None] * GRANULE + torch.arange(GRANULE)).flatten()
    real = (granules >= 0).repeat_interleave(GRANULE) & (tokens < schedule.length)
    return tokens.clamp(0, schedule.length - 1), real


def _store(
    given: Operands,
    schedule: Schedule,
    piece: list[int],
    group: int,
    stored: Tensor,
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    row, block, begin, last, full_begin, full_end, earlier, later, at, place = piece
    heads = given.query.shape[1] // given.key.shape[1]
    tokens, real = tokens_of(schedule, row, block)
    ends = torch.where(real, schedule.end[row, tokens], 0)
    k, v = given.key[row, group, tokens], given.value[row, group, tokens]
    total = sums[:, at, group].clone() if earlier else torch.zeros_like(sums[:, at, group])
    for query in range(begin, last, QUERY_TILE):
        index = torch.arange(query, min(query + QUERY_TILE, schedule.length))
        for head in range(group * heads, (group + 1) * heads):
            q, do = given.query[row, head, index - schedule.first], given.grad[row, head, index - schedule.first]
            # [128, queries]
            p = (given.scale * k @ q.mT - given.lse[row, head, index - schedule.first]).exp()
            if query < full_begin or query >= full_end:
                p = torch.where((tokens[:, None] <= index) & (index < ends[:, None]), p, 0.0)
            ds = p * (v @ do.mT - given.delta[row, head, index - schedule.first])
            total += torch.stack([ds @ q, p @ do])
            tile = stored[head, place + (query - begin) // QUERY_TILE]
            assert tile.isnan().all(), "a tile is stored twice"
            tile[:] = 0
            tile[:, : len(index)] = ds
    if later:
        sums[:, at, group] = total
    else:
        dk[row, group, tokens[real]] = total[0, real]
        dv[row, group, tokens[real]] = total[1, real]


def _multiply(given: Operands, schedule: Schedule, bands: Bands, block: int, stored: Tensor, dq: Tensor) -> None:
    row, inside = divmod(block, schedule.query_order.shape[1])
    heads = given.query.shape[1] // given.key.shape[1]
    begin, end = bands.entry_offsets[block : block + 2].tolist()
    for tile in range(QUERY_BLOCK // QUERY_TILE):
        first = inside * QUERY_BLOCK + tile * QUERY_TILE
        index = torch.arange(first, max(first, min(first + QUERY_TILE, given.query.shape[2])))
        for head in range(given.query.shape[1]):
            total = given.query.new_zeros(QUERY_TILE, given.key.shape[3])
            for key_block, *places in bands.entries[begin:end, :3].tolist():
                tokens, _ = tokens_of(schedule, row, key_block - row * schedule.key_order.shape[1])
                total += stored[head, places[tile]].mT @ given.key[row, head // heads, tokens]
            dq[row, head, index] = total[: len(index)]
