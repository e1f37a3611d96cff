"""Building blocks of the Hopper kernels: the work of each program, gathered loads, masks, softmax, staged stores.

A program has three parts (`gl.warp_specialize`) that meet at barriers in shared memory:

    producer      1 warp       orders tiles from the copy engine (TMA), some stages ahead of their use
    consumers     2 x 4 warps  each multiplies 64 rows of the program's tile (wgmma) and never waits for the other, so
                               one computes exponentials while the other keeps the matrix units busy

In a ring of `STAGES` tiles, use i takes stage i % STAGES in phase (i // STAGES) & 1. The producer waits until both
consumers have emptied the stage; the consumers wait until the bytes of the stage have arrived.

A product must never be in flight across the back edge of a loop: ptxas would serialise every product of the kernel
(C7510, C7512). So each product is awaited in the iteration that issues it, and products overlap across iterations
because their operand is carried in registers instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Triton 3.9 renamed both functions.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_LOG2E = gl.constexpr(math.log2(math.e))


class HeadMatrix(NamedTuple):
    """One head of a tensor for the copy engine: a descriptor, and the row and column of the first token to copy."""

    descriptor: tma.tensor_descriptor
    row: gl.tensor
    column: gl.tensor


class TileRing(NamedTuple):
    """Tiles in shared memory, and two barriers per stage: one for full, one for empty."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class ProgramLists(NamedTuple):
    """Lists of a program: its granules, where tokens end and begin to see, and the ends of the keys in the ring.

    granules    [4 * tiles]
    ends        [T_pad] of the row
    starts      [T_pad] of the row; read if WINDOWED
    end_tiles   [STAGES, keys] in shared memory; read if WINDOWED
    """

    granules: gl.tensor
    ends: gl.tensor
    starts: gl.tensor
    end_tiles: gl.shared_memory_descriptor


@gluon.jit
def matrix(descriptor, at, row, head, token):
    """Return the `HeadMatrix` of one head at `token`, from the steps (batch, head, column) of `matrices.as_matrix`."""
    # steps (300, 100, 0), row 1, head 2, token 32 -> row 532, column 0; steps (100, 0, 64) -> row 132, column 128
    return HeadMatrix(descriptor, row * at[0] + head * at[1] + token, head * at[2])


@gluon.jit
def rows_of_queries(pointer, strides, row, head, origin):
    """Return the address that token 0 of a head would have in a tensor of queries, whose first token is `origin`."""
    return pointer + row.to(gl.int64) * strides[0] + head * strides[1] - origin.to(gl.int64) * strides[2]


@gluon.jit
def ring(descriptor, ROWS: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate a ring of tiles of ROWS tokens; a stage is full after ARRIVALS arrivals and all of its bytes."""
    # [STAGES, ROWS, D]
    shape: gl.constexpr = [STAGES, ROWS, descriptor.block_type.shape[1]]
    tiles = gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)  # both consumers
    return TileRing(tiles, full, empty)


@gluon.jit
def gather(source, granules, barrier, tile, COUNT: gl.constexpr):
    """Start copies of COUNT granules of 32 tokens into the rows of `tile`, one after another.

    Granule -1 fetches granule 0 instead, because the barrier waits for the bytes of all of them. Its pairs are masked.
    """
    for i in gl.static_range(COUNT):
        token = gl.maximum(gl.load(granules + i), 0) * 32
        # [32, D] of [COUNT * 32, D]
        part = tile.slice(i * 32, 32, dim=0)
        fetch(source.descriptor, [source.row + token, source.column], barrier, part)


@gluon.jit
def feed(k, v, k_ring, v_ring, lists, tiles, STAGES: gl.constexpr, WINDOWED: gl.constexpr):
    """Fill the rings with the tiles of the list of a program, keys before values, when stages become empty.

    If WINDOWED, the ends of the keys arrive in `end_tiles` [STAGES, keys] together with the keys: almost every tile of
    a short window is under the mask, and consumers would wait for two loads, one after the other.
    """
    KEYS: gl.constexpr = k_ring.tiles.shape[1]
    # [KEYS], a lane has one key of each granule
    columns = gl.arange(0, KEYS, gl.BlockedLayout([1], [32], [1], [0]))
    for i in range(tiles):
        # STAGES 3: i 0 1 2 3 4 5 6 -> stage 0 1 2 0 1 2 0, phase 0 0 0 1 1 1 0
        stage = i % STAGES
        phase = (i // STAGES) & 1
        of_tile = lists.granules + i * (KEYS // 32)
        for part in gl.static_range(2):
            source = k if part == 0 else v
            to = k_ring if part == 0 else v_ring
            mbarrier.wait(to.empty.index(stage), phase ^ 1)  # passes at once in the first round
            if WINDOWED and part == 0:
                # [KEYS], by the 32 lanes, whose arrivals the barrier counts
                token = gl.maximum(gl.load(of_tile + columns // 32), 0) * 32 + columns % 32
                copy(lists.end_tiles.index(stage), lists.ends + token)
                async_copy.mbarrier_arrive(to.full.index(stage), increment_count=False)
            mbarrier.expect(to.full.index(stage), KEYS // 32 * source.descriptor.block_type.nbytes)
            # [KEYS, D]
            gather(source, of_tile, to.full.index(stage), to.tiles.index(stage), KEYS // 32)


@gluon.jit
def staged_ends(k_ring, STAGES: gl.constexpr, WINDOWED: gl.constexpr):
    """Allocate the `end_tiles` of `feed`, [STAGES, keys]; if not WINDOWED, the result is never read."""
    if WINDOWED:
        shape: gl.constexpr = [STAGES, k_ring.tiles.shape[1]]
        return gl.allocate_shared_memory(gl.int32, shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        return k_ring.tiles


@gluon.jit
def numbers_of(granules, COUNT: gl.constexpr):
    """Return COUNT granules of a list, each a scalar, so that their loads can start long before `keys_of`."""
    if COUNT == 2:
        return (gl.load(granules), gl.load(granules + 1))
    else:
        return (gl.load(granules), gl.load(granules + 1), gl.load(granules + 2), gl.load(granules + 3))


@gluon.jit
def keys_of(numbers, columns):
    """Return the key tokens of the columns of a tile; they are negative, before every window, for the granule -1."""
    # numbers 9 -1: columns 0 1 ... 31 | 32 ... 63 -> keys 288 289 ... 319 | -32 ... -1
    key = numbers[0] * 32 + columns % 32
    for i in gl.static_range(1, len(numbers)):
        # Which registers hold columns of granule i is known at compile time, so this selects nothing at run time.
        key = gl.where(columns // 32 == i, numbers[i] * 32 + columns % 32, key)
    return key


@gluon.jit
def place(pid, section, batch, blocks, order):
    """Return row, head and block of a program.

    Sections of heads vary slowest, then blocks in the order of their work, then rows; the heads of a section vary
    fastest.
    """
    # section 2, 1 row, 3 blocks in the order 2 0 1: pid 0 1 2 3 4 5 | 6 7 ... -> head  0 1 0 1 0 1 | 2 3 ...
    #                                                                          -> block 2 2 0 0 1 1 | 2 2 ...
    item = pid // section % (batch * blocks)
    head = pid // (section * batch * blocks) * section + pid % section
    row = item % batch
    return row, head, gl.load(order + row * blocks + item // batch)


@gluon.jit
def list_of_queries(pid, section, batch, blocks, order, offsets, partial, GRANULES: gl.constexpr):
    """Return row, head and block of a program of queries, and its list: first granule, all tiles, partial tiles."""
    row, head, block = place(pid, section, batch, blocks, order)
    offset = offsets + row * (blocks + 1) + block
    first = gl.load(offset)
    tiles = (gl.load(offset + 1) - first) // GRANULES
    return row, head, block, first, tiles, gl.load(partial + row * blocks + block) // GRANULES


@gluon.jit
def read_keys(granules, ends, columns):
    """Return granule, key token and end of the columns of a tile; granule -1 has end 0, and no query is below it."""
    granule = gl.load(granules + columns // 32)
    key = granule * 32 + columns % 32
    return granule, key, gl.load(ends + key, mask=granule >= 0, other=0)


@gluon.jit
def is_seen(query, start, key, end, WINDOWED: gl.constexpr):
    """Return which queries see which keys, broadcast; `start` is the first token that each query sees."""
    seen = (key <= query) & (query < end)
    if WINDOWED:
        seen = seen & (start <= key)
    return seen


@gluon.jit
def online_softmax(s, factor, highest, total):
    """Return the weights of one more tile of scores, the factor of all earlier weights, and the new maximum and total.

    Scores and weights are [64, KEYS], all else [64]. The weights are powers of two, so `factor` includes log2(e).
    """
    raised = gl.maximum(highest, gl.max(s, 1) * factor)
    # [64, KEYS]
    p = gl.exp2(s * factor - raised[:, None])
    # [64]
    shrink = gl.exp2(highest - raised)
    return p, shrink, raised, total * shrink + gl.sum(p, 1)


@gluon.jit
def finish_softmax(lse, query, highest, total, sink, SINKS: gl.constexpr):
    """Write the log-sum-exp of queries [64], and return the factor [64] of their outputs.

    A sink is one more score, without a value. The weights stay relative to the largest score of a key: a sink far above
    it would make all of them small, and less exact in the dtype of the product.
    """
    share = 1.0 / total
    if SINKS:
        score = gl.load(sink) * _LOG2E
        raised = gl.maximum(highest, score)
        shrink = gl.exp2(highest - raised)
        total = total * shrink + gl.exp2(score - raised)
        highest = raised
        share = shrink / total
    gl.store(lse + query, highest + gl.log2(total))
    return share


@gluon.jit
def store_rows(pointer, stride, tokens, real, values, tile):
    """Write `values` [64, D] to the rows `tokens` that are `real`, both [64], through `tile`, 16 bytes at a time."""
    D: gl.constexpr = tile.shape[1]
    # A thread holds [1, 8] neighbours (16 bytes), a warp [256 // D, D], 4 warps [1024 // D, D].
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    # [64, D], registers -> shared memory
    tile.store(values.to(tile.dtype))
    # [64, 1] + [1, D] -> [64, D], in int64
    at = gl.convert_layout(tokens, row).to(gl.int64) * stride
    offsets = at[:, None] + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    # [64, D], shared memory -> global memory
    gl.store(pointer + offsets, tile.load(layout), mask=gl.convert_layout(real, row)[:, None])
