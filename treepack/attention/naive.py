"""The kernels of tree attention in plain torch: the same tiles in the same order, to read and to test against.

One query block and its tiles of keys, gathered from the list of the schedule:

               partial, under the mask     full, no mask
    keys     | own granules | 9 3 -1 7 | | 0 1 2 4 | 5 6 8 12 |
    queries  |      S       |     S    | |    S    |     S    |     running maximum m, sum l and output o per query:
                                                                    p = 2**(s - m'), a = 2**(m - m')
    l = a l + sum p,  o = a o + p v,  m = m',  and at the end o / l and lse = m + log2(l)

A sink is one more score at the end, with no value: it raises m and adds to l, and so it is in lse.

The backward computes p = 2**(s - lse) again. With delta = sum(o * do) and ds = p * (do v' - delta), the gradients are

    dq = ds k * scale       query block by query block, over the same lists
    dk = ds' q * scale      key block by key block, over its range of queries and the query heads of its key head
    dv = p' do
    dsink = -sum over queries of 2**(sink - lse) * delta

With a cap c, scores are c tanh(s / c), and ds is multiplied by the derivative 1 - tanh(s / c)**2.

In a rectangle, the query of token t is row t - first of q, o, lse and their gradients; masks compare tokens.

Scores are multiplied by scale * log2(e), so that every exponential is a power of two. Same inputs and outputs as
`portable`. The precision is float64 for float64 and float32 otherwise; the kernels round p and ds to the dtype of the
inputs before they multiply. Slow: Python loops run over tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from treepack.attention.kernel_launch import LOG2E, AttentionInputs, BackwardInputs, InputGradients, sink_gradient
from treepack.attention.schedule import GRANULE, QUERY_BLOCK, QUERY_TILE, Schedule


def naive_forward(inputs: AttentionInputs, *, granules: int = 4) -> tuple[Tensor, Tensor]:
    """Return output [B, H, T - first, D_v] in the dtype of `query` and base-2 log-sum-exp [B, H, T - first].

    `granules` is the number of granules per tile of keys: 1, 2 or 4.
    """
    # Tensors of queries and of keys, all with H heads from here on: one key head per query head.
    q, k, v, schedule, scale, sinks, softcap = _widen(inputs)
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for row, block, tokens in _query_blocks(schedule):
        rows = tokens - schedule.first
        # [H, queries] and [H, queries, D]
        running = q.new_full((q.shape[1], len(rows)), -math.inf)
        total, acc = torch.zeros_like(running), torch.zeros_like(out[row, :, rows])
        for keys, seen in _key_tiles(schedule, row, block, tokens, granules):
            # [H, queries, D] @ [H, D, keys] -> [H, queries, keys]
            score = _capped(q[row, :, rows] @ k[row, :, keys].mT * (scale * LOG2E), softcap)[0]
            score = score if seen is None else score.masked_fill(~seen, -math.inf)
            # [H, queries]
            new = running.maximum(score.amax(-1))
            safe = new.masked_fill(new == -math.inf, 0)  # a query that has seen nothing yet: every power below is zero
            weight, decay = torch.exp2(score - safe[..., None]), torch.exp2(running - safe)
            total = total * decay + weight.sum(-1)
            # [H, queries, keys] @ [H, keys, D] -> [H, queries, D]
            acc = acc * decay[..., None] + weight @ v[row, :, keys]
            running = new
        if sinks is not None:
            # [H, 1], in powers of two
            sink = sinks[:, None] * LOG2E
            new = running.maximum(sink)
            total = total * torch.exp2(running - new) + torch.exp2(sink - new)
            acc = acc * torch.exp2(running - new)[..., None]
            running = new
        out[row, :, rows] = acc / total[..., None]
        lse[row, :, rows] = running + total.log2()
    return out.to(inputs.query.dtype), lse


def naive_backward(
    inputs: AttentionInputs, out: Tensor, lse: Tensor, grad: Tensor, *, granules: int = 4
) -> InputGradients:
    """Return the gradients of query, key, value and sinks, in their dtypes; None for the sinks if there are none.

    Args:
        inputs, granules: as in `naive_forward`.
        out, lse: the results of `naive_forward` for the same operands.
        grad: [B, H, T - first, D_v], the gradient of `out`.
    """
    wide = _widen(inputs)
    q, k, schedule, do = wide.query, wide.key, wide.schedule, grad.to(wide.query.dtype)
    incoming = BackwardInputs(do, lse, (out.to(q.dtype) * do).sum(-1))
    dq = torch.empty_like(q)
    for row, block, tokens in _query_blocks(schedule):
        rows = tokens - schedule.first
        acc = torch.zeros_like(q[row, :, rows])
        for keys, seen in _key_tiles(schedule, row, block, tokens, granules):
            _, ds = _weights(wide, incoming, (row, rows, keys, seen))
            # [H, queries, keys] @ [H, keys, D] -> [H, queries, D]
            acc += ds @ k[row, :, keys]
        dq[row, :, rows] = acc * inputs.scale
    # Sum over the query heads of each key head: [B, H, T, D] -> [B, H_kv, H / H_kv, T, D] -> [B, H_kv, T, D]
    dk, dv = (x.unflatten(1, (-1, inputs.group)).sum(2) for x in _key_gradients(wide, incoming))  # type: ignore[no-untyped-call]
    dsinks = sink_gradient(inputs, incoming)
    return dq.to(inputs.query.dtype), dk.to(inputs.key.dtype), dv.to(inputs.value.dtype), dsinks


def _key_gradients(inputs: AttentionInputs, incoming: BackwardInputs) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys [B, H, T, D] and values [B, H, T, D_v] of every query head.

    The caller sums over each group.
    """
    q, k, v, schedule, scale = inputs[:5]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    started = set()
    for row, block, ranges in _key_work(schedule):
        granules = schedule.key_granules[row, block]
        keys, real = _tokens(granules[granules >= 0], schedule.length)
        keys = keys[real]
        dk_part, dv_part = torch.zeros_like(k[row, :, keys]), torch.zeros_like(v[row, :, keys])
        for start, is_full in _query_tiles(schedule, ranges):
            tokens = torch.arange(start, min(start + QUERY_TILE, schedule.length), device=q.device)
            rows, seen = tokens - schedule.first, None
            if not is_full:
                seen = _visible_pairs(schedule, row, tokens, keys)
            p, ds = _weights(inputs, incoming, (row, rows, keys, seen))
            # [H, keys, queries] @ [H, queries, D] -> [H, keys, D]
            dv_part += p.mT @ incoming.grad[row, :, rows]
            dk_part += ds.mT @ q[row, :, rows]
        if (row, block) in started:
            dk[row, :, keys] += dk_part * scale
            dv[row, :, keys] += dv_part
        else:
            dk[row, :, keys], dv[row, :, keys] = dk_part * scale, dv_part
        started.add((row, block))
    return dk, dv


def _key_work(schedule: Schedule) -> Iterator[tuple[int, int, list[int]]]:
    """Yield row, key block and ranges of every program for keys: key blocks, or their shares if there are any."""
    if schedule.shares is not None:
        for row, block, *ranges in schedule.shares.shares[:, :6].tolist():
            yield row, block, ranges
    else:
        for row, blocks in enumerate(schedule.key_ranges.tolist()):
            for block, ranges in enumerate(blocks):
                yield row, block, ranges


def _query_tiles(schedule: Schedule, ranges: list[int]) -> Iterator[tuple[int, bool]]:
    """Yield the first token of each query tile in the ranges of a key block, and True if the tile needs no mask."""
    first, full_begin, full_end, last = ranges
    if schedule.key_tiles is not None:
        for place, start in enumerate(schedule.key_tiles[first:last].tolist(), first):
            yield start, place >= full_begin
    else:
        for start in range(first, last, QUERY_TILE):
            yield start, full_begin <= start < full_end


def _weights(
    inputs: AttentionInputs, incoming: BackwardInputs, tile: tuple[int, Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return p and ds of the header, both [H, queries, keys], for one tile: row, queries, keys and mask."""
    q, k, v, _, scale, _, softcap = inputs
    (do, lse, delta), (row, rows, keys, seen) = incoming, tile
    score, slope = _capped(q[row, :, rows] @ k[row, :, keys].mT * (scale * LOG2E), softcap)
    p = torch.exp2(score - lse[row, :, rows, None])
    # p is at most 1 for a visible pair; a masked pair may overflow to inf, so it is replaced and not multiplied by 0.
    p = p if seen is None else p.masked_fill(~seen, 0)
    return p, p * (do[row, :, rows] @ v[row, :, keys].mT - delta[row, :, rows, None]) * slope


def _capped(scores: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """Return base-2 scores after the cap, and the derivative of the cap."""
    if softcap is None:
        return scores, 1.0
    bent = torch.tanh(scores / (softcap * LOG2E))
    return softcap * LOG2E * bent, 1 - bent * bent


def _widen(inputs: AttentionInputs) -> AttentionInputs:
    """Return the operands in the precision of the computation, with one key head per query head."""
    work = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    # 2 key heads, groups 3 -> key heads 0 0 0 1 1 1
    key, value = (x.to(work).repeat_interleave(inputs.group, 1) for x in (inputs.key, inputs.value))
    sinks = None if inputs.sinks is None else inputs.sinks.to(work)
    return inputs._replace(query=inputs.query.to(work), key=key, value=value, sinks=sinks)


def _query_blocks(schedule: Schedule) -> Iterator[tuple[int, int, Tensor]]:
    """Yield row, block and query tokens of every query block, in the order of launch."""
    for row, order in enumerate(schedule.query_order.tolist()):
        for block in order:
            first = schedule.first + block * QUERY_BLOCK
            last = min(first + QUERY_BLOCK, schedule.length)
            yield row, block, torch.arange(first, last, device=schedule.end.device)


def _key_tiles(
    schedule: Schedule, row: int, block: int, tokens: Tensor, granules: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the key tokens of each tile of a query block, and its mask [queries, keys]; None for a full tile."""
    first, last = schedule.query_offsets[row, block : block + 2].tolist()
    middle = first + int(schedule.query_partial[row, block])
    for entry in range(first, last, granules):
        keys, real = _tokens(schedule.granules[entry : entry + granules], schedule.length)
        yield keys, (_visible_pairs(schedule, row, tokens, keys) & real) if entry < middle else None


def _tokens(granules: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the token indices of granules, clamped to the row, and a mask of the real ones, both [32 * granules]."""
    # granules [9, -1], length 300 -> 288 ... 299 real, 20 times 299 and 32 times 0 not real
    index = granules.long()[:, None] * GRANULE + torch.arange(GRANULE, device=granules.device)
    index = index.flatten()
    return index.clamp(0, length - 1), (index >= 0) & (index < length)


def _visible_pairs(schedule: Schedule, row: int, queries: Tensor, keys: Tensor) -> Tensor:
    # [keys] and [queries, 1] -> [queries, keys]
    seen = (keys <= queries[:, None]) & (queries[:, None] < schedule.end[row, keys])
    return seen if schedule.start is None else seen & (schedule.start[row, queries, None] <= keys)
