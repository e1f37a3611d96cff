"""Forward pass of tree attention on Hopper for heads in parts: one program for 128 queries of one head.

As `forward`, with two differences. Tensors are tuples of `parts`. A tile may have fewer keys than the block has
queries, so that the first tile need not hold a key that a query sees: the running maximum begins at a number below all
scores. A sink is one more score after the last tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from treepack.attention.hopper.parts import (
    copy_tile,
    expect,
    feed_tiles,
    finish_tile,
    inner,
    outer_product,
    ring_of,
    rows_of_parts,
    scaled,
    sources,
    stage_of,
    store_parts,
    tiles_of,
    visible,
    zeros_of,
)
from treepack.attention.hopper.tiles import finish_softmax, list_of_queries, online_softmax, rows_of_queries

_LOWEST = gl.constexpr(-3.0e38)


@gluon.jit
def _produce(copies, shared, lists, tiles, K: gl.constexpr, V: gl.constexpr):
    q, k, v = copies
    q_tile, q_full, k_ring, v_ring = shared
    # [128, D]
    expect(q_full, q, 1)
    copy_tile(q, 0, q_full, q_tile)
    feed_tiles(k, v, k_ring, v_ring, lists[0], tiles, K, V)


@gluon.jit
def _consume(
    shared,
    lists,
    tiles,
    outputs,
    numbers,
    K: gl.constexpr,
    V: gl.constexpr,
    WINDOWED: gl.constexpr,
    SINKS: gl.constexpr,
    FIRST_ROW: gl.constexpr,
):
    q_tile, q_full, k_ring, v_ring = shared
    granules, ends, starts, sink_pointer = lists
    o_pointer, lse_pointer = outputs
    q0, length, partial_tiles, o_stride, factor = numbers
    KEYS: gl.constexpr = k_ring.tiles[0].shape[1]
    PARTS: gl.constexpr = len(v_ring.tiles)
    dtype: gl.constexpr = q_tile[0].dtype
    # Accumulators of wgmma (version 3, 4 warps of 16 rows); P is the second product's left operand, in registers.
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    # [64, D_v]
    o = zeros_of(stage_of(v_ring.tiles, 0), 64)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o[0].type.layout, 2)

    # [64]
    query = q0 + FIRST_ROW + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    start = query
    if WINDOWED:
        start = gl.load(starts + query)
    # [KEYS]
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    # [64, D] of [128, D]
    q = rows_of_parts(q_tile, FIRST_ROW, 64)
    # [64, KEYS]
    zeros = gl.zeros((64, KEYS), gl.float32, s_layout)
    # [64]
    highest = gl.full((64,), _LOWEST, gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, s_layout))

    # The first tile is one of the partial section, which begins with the block's own keys.
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_ring.full.index(0), 0)
    # [64, D] @ [D, KEYS] -> [64, KEYS]
    s = warpgroup_mma_wait(0, deps=(inner(q, stage_of(k_ring.tiles, 0), zeros, False),))
    mbarrier.arrive(k_ring.empty.index(0), count=1)
    s = gl.where(visible(granules, ends, query, start, columns, WINDOWED), s, float("-inf"))
    p, _, highest, total = online_softmax(s, factor, highest, total)
    # [64, KEYS], from the layout of an accumulator to that of an operand
    weights = gl.convert_layout(p.to(dtype), p_layout)
    for i in range(1, tiles):
        stage = i % K
        before = (i - 1) % V
        mbarrier.wait(k_ring.full.index(stage), (i // K) & 1)
        # [64, D] @ [D, KEYS] -> [64, KEYS], tile i
        s_product = inner(q, stage_of(k_ring.tiles, stage), zeros, False)
        mbarrier.wait(v_ring.full.index(before), ((i - 1) // V) & 1)
        # [64, KEYS] @ [KEYS, D] -> [64, D], tile i - 1
        o_product = outer_product(weights, stage_of(v_ring.tiles, before), o)
        s = warpgroup_mma_wait(PARTS, deps=(s_product,))
        mbarrier.arrive(k_ring.empty.index(stage), count=1)
        if i < partial_tiles:
            seen = visible(granules + i * (KEYS // 32), ends, query, start, columns, WINDOWED)
            s = gl.where(seen, s, float("-inf"))
        p, shrink, highest, total = online_softmax(s, factor, highest, total)
        o = finish_tile(o_product, 0)
        mbarrier.arrive(v_ring.empty.index(before), count=1)
        # [64, D] * [64, 1] -> [64, D]
        o = scaled(o, shrink)
        # [64, KEYS]
        weights = gl.convert_layout(p.to(dtype), p_layout)
    last = (tiles - 1) % V
    mbarrier.wait(v_ring.full.index(last), ((tiles - 1) // V) & 1)
    # [64, KEYS] @ [KEYS, D] -> [64, D]
    o = finish_tile(outer_product(weights, stage_of(v_ring.tiles, last), o), 0)

    # [64]
    share = finish_softmax(lse_pointer, query, highest, total, sink_pointer, SINKS)
    # [64, D] * [64, 1] -> [64, D]; the queries are no longer needed, so their tile stages the output
    store_parts(o_pointer, o_stride, query, query < length, scaled(o, share), q)


@gluon.jit(do_not_specialize=["length", "blocks", "section"])
def wide_forward_kernel(
    q_first,
    q_second,
    k_first,
    k_second,
    v_first,
    v_second,
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
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
    SINKS: gl.constexpr,
):
    """Write output and lse of 128 queries of one head; the grid is batch * blocks * heads.

    Descriptors read 128 rows of q and one granule of k and v, in parts; a second part is None if there is only one.
    q_at, k_at and v_at are the steps of `tiles.matrix`; o_strides are the elements from one batch row, head or token to
    the next. Token `origin` is the first row of q, o and lse; lse has `padded` - `origin` places per head, and the
    kernel writes all of them. `starts` is read if WINDOWED, and `sinks`, one float32 per head, if SINKS.
    """
    row, head, block, first, tiles, partial_tiles = list_of_queries(
        gl.program_id(0), section, batch, blocks, query_order, query_offsets, query_partial, GRANULES
    )
    group = head // GROUP
    q0 = origin + block * 128

    # [128, D]
    q_tile = tiles_of(q_first, q_second, 128)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    # [STAGES, GRANULES * 32, D]
    k_ring = ring_of(k_first, k_second, GRANULES * 32, K_STAGES, 1)
    v_ring = ring_of(v_first, v_second, GRANULES * 32, V_STAGES, 1)

    o_pointer = rows_of_queries(o_pointer, o_strides, row, head, origin)
    lse_pointer += (row.to(gl.int64) * heads + head) * (padded - origin) - origin
    lists = (granules + first, ends + row * padded, starts + row * padded, sinks + head)
    numbers = (q0, length, partial_tiles, o_strides[2], factor)
    q = sources(q_first, q_second, q_at, row, head, q0 - origin)
    k = sources(k_first, k_second, k_at, row, group, 0)
    v = sources(v_first, v_second, v_at, row, group, 0)
    outputs = (o_pointer, lse_pointer)
    copies = (q, k, v)
    shared = (q_tile, q_full, k_ring, v_ring)
    # The tuples are written here: in a tuple with a name, constants would become values of the run.
    gl.warp_specialize(
        [
            (_consume, (shared, lists, tiles, outputs, numbers, K_STAGES, V_STAGES, WINDOWED, SINKS, 0)),
            (_consume, (shared, lists, tiles, outputs, numbers, K_STAGES, V_STAGES, WINDOWED, SINKS, 64)),
            (_produce, (copies, shared, lists, tiles, K_STAGES, V_STAGES)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of a thread of each
    )
