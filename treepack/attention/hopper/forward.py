"""Forward pass of tree attention on Hopper: one program for 128 queries of one head.

In step i a consumer issues the scores of key tile i and then the product with the values of tile i - 1; tiles have 128
keys. It computes the exponentials of tile i while the second product is in flight. A sink is one more score after the
last tile. Same inputs and outputs as `portable_forward`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from treepack.attention.hopper.tiles import (
    ProgramLists,
    feed,
    fetch,
    finish_softmax,
    keys_of,
    list_of_queries,
    matrix,
    numbers_of,
    online_softmax,
    ring,
    rows_of_queries,
    staged_ends,
    store_rows,
)


class _ForwardWork(NamedTuple):
    """First query and tiles of a program, the numbers that a consumer reads, and pointers of its head.

    o, lse    results; tokens of o are o_stride elements apart
    sink      one number, read if SINKS
    """

    q0: gl.tensor
    tiles: gl.tensor
    partial_tiles: gl.tensor
    length: gl.tensor
    factor: gl.tensor
    o: gl.tensor
    o_stride: gl.tensor
    lse: gl.tensor
    sink: gl.tensor


@gluon.jit
def _produce(copies, shared, lists, work, STAGES: gl.constexpr, WINDOWED: gl.constexpr):
    q, k, v = copies
    q_tile, q_full, k_ring, v_ring = shared
    # [128, D]
    mbarrier.expect(q_full, q.descriptor.block_type.nbytes)
    fetch(q.descriptor, [q.row, q.column], q_full, q_tile)
    feed(k, v, k_ring, v_ring, lists, work.tiles, STAGES, WINDOWED)


@gluon.jit
def _first_scores(q, k_ring, lists, q0, rows, start, columns, WINDOWED: gl.constexpr):
    """Return the scores [64, KEYS] of the first tile, which holds the block's own keys."""
    KEYS: gl.constexpr = k_ring.tiles.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    mbarrier.wait(k_ring.full.index(0), 0)
    zeros = gl.zeros((64, KEYS), gl.float32, s_layout)
    # [64, D] @ [D, KEYS] -> [64, KEYS]
    s = warpgroup_mma(q, k_ring.tiles.index(0).permute((1, 0)), zeros, use_acc=False)
    # [KEYS]
    if WINDOWED:
        end = lists.end_tiles.index(0).load(gl.SliceLayout(0, s_layout))
    else:
        end = gl.load(lists.ends + q0 + columns)
    mbarrier.arrive(k_ring.empty.index(0), count=1)
    # [1, KEYS] and [64, 1] -> [64, KEYS]
    seen = (columns[None, :] <= rows[:, None]) & ((q0 + rows)[:, None] < end[None, :])
    if WINDOWED:
        seen = seen & (start[:, None] <= q0 + columns[None, :])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _consume(
    shared, lists, work, STAGES: gl.constexpr, WINDOWED: gl.constexpr, SINKS: gl.constexpr, FIRST_ROW: gl.constexpr
):
    q_tile, q_full, k_ring, v_ring = shared
    tiles = work.tiles
    factor = work.factor
    KEYS: gl.constexpr = k_ring.tiles.shape[1]
    D: gl.constexpr = k_ring.tiles.shape[2]
    dtype: gl.constexpr = q_tile.dtype
    # Accumulators of wgmma (version 3, 4 warps of 16 rows); P is the second product's left operand, in registers.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)

    # [64]
    rows = FIRST_ROW + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    query = work.q0 + rows
    start = query
    if WINDOWED:
        start = gl.load(lists.starts + query)
    # [KEYS]
    columns = gl.arange(0, KEYS, column)
    # [64, D] of [128, D]
    q = q_tile.slice(FIRST_ROW, 64, dim=0)
    # [64, KEYS]
    zeros = gl.zeros((64, KEYS), gl.float32, s_layout)

    mbarrier.wait(q_full, 0)
    s = _first_scores(q, k_ring, lists, work.q0, rows, start, columns, WINDOWED)
    # [64]; every query sees itself, so the running maximum is finite
    highest = gl.max(s, 1) * factor
    # [64, KEYS]
    p = gl.exp2(s * factor - highest[:, None])
    # [64]
    total = gl.sum(p, 1)
    # [64, KEYS], from the layout of an accumulator to that of an operand
    weights = gl.convert_layout(p.to(dtype), p_layout)
    # [64, D]
    o = gl.zeros((64, D), gl.float32, o_layout)
    for i in range(1, tiles):
        stage = i % STAGES
        before = (i - 1) % STAGES
        if WINDOWED:
            numbers = numbers_of(lists.granules + i * (KEYS // 32), KEYS // 32)
        mbarrier.wait(k_ring.full.index(stage), (i // STAGES) & 1)
        # [64, D] @ [D, KEYS] -> [64, KEYS], tile i
        s_product = warpgroup_mma(q, k_ring.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_ring.full.index(before), ((i - 1) // STAGES) & 1)
        # [64, KEYS] @ [KEYS, D] -> [64, D], tile i - 1
        o_product = warpgroup_mma(weights, v_ring.tiles.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s_product,))
        if WINDOWED:
            if i < work.partial_tiles:
                key = keys_of(numbers, columns)
                end = lists.end_tiles.index(stage).load(column)
                # [64, 1] and [1, KEYS] -> [64, KEYS]; the keys precede the block, so key <= query holds
                s = gl.where((query[:, None] < end[None, :]) & (start[:, None] <= key[None, :]), s, float("-inf"))
            mbarrier.arrive(k_ring.empty.index(stage), count=1)
        else:
            mbarrier.arrive(k_ring.empty.index(stage), count=1)
            if i < work.partial_tiles:
                # [KEYS]; end is 0 for granule -1, so that no query is below it
                granule = gl.load(lists.granules + i * (KEYS // 32) + columns // 32)
                end = gl.load(lists.ends + granule * 32 + columns % 32, mask=granule >= 0, other=0)
                # [64, 1] < [1, KEYS] -> [64, KEYS]; the keys precede the block, so key <= query holds
                s = gl.where(query[:, None] < end[None, :], s, float("-inf"))
        p, shrink, highest, total = online_softmax(s, factor, highest, total)
        o = warpgroup_mma_wait(0, deps=(o_product,))
        mbarrier.arrive(v_ring.empty.index(before), count=1)
        # [64, D] * [64, 1] -> [64, D]
        o = o * gl.convert_layout(shrink, o_row)[:, None]
        # [64, KEYS]
        weights = gl.convert_layout(p.to(dtype), p_layout)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_ring.full.index(last), ((tiles - 1) // STAGES) & 1)
    # [64, KEYS] @ [KEYS, D] -> [64, D]
    o = warpgroup_mma(weights, v_ring.tiles.index(last), o)

    # [64]
    share = finish_softmax(work.lse, query, highest, total, work.sink, SINKS)
    # [64, D] * [64, 1] -> [64, D]; the queries are no longer needed, so their tile stages the output
    store_rows(work.o, work.o_stride, query, query < work.length, o * gl.convert_layout(share, o_row)[:, None], q)


@gluon.jit(do_not_specialize=["length", "blocks", "section"])
def forward_kernel(
    q_descriptor,
    k_descriptor,
    v_descriptor,
    q_at,
    k_at,
    v_at,
    o_pointer,
    o_strides,
    lse_pointer,
    sinks,
    ends,
    starts,
    granules,
    query_offsets,
    query_partial,
    query_order,
    length,
    origin,
    padded,
    batch,
    heads,
    blocks,
    section,
    factor,
    GROUP: gl.constexpr,
    GRANULES: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
    SINKS: gl.constexpr,
):
    """Write output and lse of 128 queries of one head; the grid is batch * blocks * heads.

    Descriptors read 128 rows of q and one granule of k and v. q_at, k_at and v_at are the steps of `tiles.matrix`;
    o_strides are the elements from one batch row, head or token to the next. Token `origin` is the first row of q, o
    and lse, so pointers to these are moved back by `origin` rows; lse has `padded` - `origin` places per head, and the
    kernel writes all of them. `starts` is read if WINDOWED, `sinks`, float32 [heads], if SINKS.
    """
    D: gl.constexpr = q_descriptor.block_type.shape[1]
    row, head, block, first, tiles, partial_tiles = list_of_queries(
        gl.program_id(0), section, batch, blocks, query_order, query_offsets, query_partial, GRANULES
    )
    group = head // GROUP
    q0 = origin + block * 128

    # [128, D]
    q_tile = gl.allocate_shared_memory(q_descriptor.dtype, [128, D], q_descriptor.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    # [STAGES, GRANULES * 32, D]; 33 arrivals: 1 of the producer, and 32 of the lanes that copy ends
    k_ring = ring(k_descriptor, GRANULES * 32, STAGES, 33 if WINDOWED else 1)
    v_ring = ring(v_descriptor, GRANULES * 32, STAGES, 1)
    end_tiles = staged_ends(k_ring, STAGES, WINDOWED)

    lists = ProgramLists(granules + first, ends + row * padded, starts + row * padded, end_tiles)
    work = _ForwardWork(
        q0,
        tiles,
        partial_tiles,
        length,
        factor,
        rows_of_queries(o_pointer, o_strides, row, head, origin),
        o_strides[2],
        lse_pointer + (row.to(gl.int64) * heads + head) * (padded - origin) - origin,
        sinks + head,
    )
    q = matrix(q_descriptor, q_at, row, head, q0 - origin)
    k = matrix(k_descriptor, k_at, row, group, 0)
    v = matrix(v_descriptor, v_at, row, group, 0)
    shared = (q_tile, q_full, k_ring, v_ring)
    # The tuples are written here: in a tuple with a name, constants would become values of the run.
    gl.warp_specialize(
        [
            (_consume, (shared, lists, work, STAGES, WINDOWED, SINKS, 0)),
            (_consume, (shared, lists, work, STAGES, WINDOWED, SINKS, 64)),
            (_produce, ((q, k, v), shared, lists, work, STAGES, WINDOWED)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of a thread of each
    )
