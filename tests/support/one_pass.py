"""The backward of attention in one pass, step by step: programs that take turns at sums in global memory.

    q, k, v, gradient of the output, Schedule with bands --run--> dq, dk, dv

Each program is a generator of the steps of `hopper.fused_backward`. At most `residents` programs run at a time, and
they start in launch order. A random one of them makes the next step. A step that must wait for its turn does nothing,
so a run in which every resident program waits would never end: `run` raises an error instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from treepack.attention.schedule import GRANULE, QUERY_TILE, Schedule


class Operands(NamedTuple):
    """Tensors of a backward, in any floating dtype, with lse and delta [B, H, T - first]; lse is a natural log."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    lse: Tensor
    delta: Tensor
    scale: float


class Sums(NamedTuple):
    """Sums of all programs, and the flags of their order; NaN where nothing has been stored."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    flags: Tensor
    key_flags: Tensor


def operands(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, seen: Tensor) -> Operands:
    """Return the operands from the leaves and the gradient of the output; `seen` is bool [B, T - first, T]."""
    scale, group = query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = (scale * query @ keys.mT).masked_fill(~seen[:, None], -torch.inf)
    delta = (scores.softmax(-1) @ values * grad).sum(-1)
    return Operands(query, key, value, grad, scores.logsumexp(-1), delta, scale)


def run(given: Operands, schedule: Schedule, *, residents: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of programs that run in a random order, as far as their turns allow it."""
    assert schedule.pieces is not None
    padded, heads = schedule.end.shape[1], given.query.shape[1]
    batch, kv_heads, _, width = given.key.shape
    sums = Sums(
        given.query.new_full((batch, heads, padded, width), torch.nan),
        given.query.new_full((batch, kv_heads, padded, width), torch.nan),
        given.query.new_full((batch, kv_heads, padded, width), torch.nan),
        torch.zeros(batch, heads, padded // QUERY_TILE, dtype=torch.int64),
        torch.zeros(batch, kv_heads, schedule.key_order.shape[1], dtype=torch.int64),
    )
    # Heads vary fastest: numbers 0 1 2 3 ... of 2 heads are piece 0 0 1 1 ...
    waiting = [(item, group) for item in range(len(schedule.pieces)) for group in range(kv_heads)][::-1]
    running: list[Iterator[bool]] = []
    chance = random.Random(seed)
    while waiting or running:
        while waiting and len(running) < residents:
            running.append(program(given, schedule, sums, *waiting.pop()))
        chance.shuffle(running)
        for at, one in enumerate(running):
            progress = next(one, None)
            if progress is None:
                del running[at]
            if progress is not False:
                break
        else:
            raise AssertionError("every program waits for another one")
    first, length = schedule.first, schedule.length
    return sums.dq[:, :, first:length] * given.scale, sums.dk[:, :, :length] * given.scale, sums.dv[:, :, :length]


def program(given: Operands, schedule: Schedule, sums: Sums, item: int, group: int) -> Iterator[bool]:
    """Make the steps of one program; yield True after a step, and False if it must wait."""
    assert schedule.pieces is not None
    assert schedule.turns is not None
    row, block, begin, last, piece = schedule.pieces[item].tolist()
    _, full_begin, full_end, _ = schedule.key_ranges[row, block].tolist()
    heads = given.query.shape[1] // given.key.shape[1]
    granules = schedule.key_granules[row, block]
    tokens = torch.cat([torch.arange(GRANULE) + GRANULE * granule for granule in granules[granules >= 0]])
    tokens = tokens[tokens < schedule.length]
    ends = schedule.end[row, tokens]
    k, v = given.key[row, group, tokens], given.value[row, group, tokens]
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for step in range((last - begin) // QUERY_TILE * heads):
        query = last - (step // heads + 1) * QUERY_TILE
        head = group * heads + step % heads
        index = torch.arange(query, min(query + QUERY_TILE, schedule.length))
        at = index - schedule.first
        q, do = given.query[row, head, at], given.grad[row, head, at]
        # [keys, queries]
        p = (given.scale * k @ q.mT - given.lse[row, head, at]).exp()
        if query < full_begin or query >= full_end:
            p = torch.where((tokens[:, None] <= index) & (index < ends[:, None]), p, 0.0)
        ds = p * (v @ do.mT - given.delta[row, head, at])
        dv += p @ do
        dk += ds @ q
        tile = query // QUERY_TILE
        turn = int(schedule.turns[item, tile % schedule.turns.shape[1]])
        while sums.flags[row, head, tile] != turn:
            yield False
        sums.dq[row, head, index] = ds.mT @ k + (sums.dq[row, head, index] if turn else 0.0)
        sums.flags[row, head, tile] += 1
        yield True
    while sums.key_flags[row, group, block] != piece:
        yield False
    sums.dk[row, group, tokens] = dk + (sums.dk[row, group, tokens] if piece else 0.0)
    sums.dv[row, group, tokens] = dv + (sums.dv[row, group, tokens] if piece else 0.0)
    sums.key_flags[row, group, block] += 1
    yield True
