"""Gradient of the queries on Hopper for heads in parts: one program for 128 queries of one head.

As `query_backward`, with tensors that are tuples of `parts`. CARRIED is its order of products, in which dS K of a tile
is in flight during the exponentials of the next one. That needs three tiles of keys; where shared memory has room for
two (head dimension 256), a consumer finishes a tile before it begins the next, and only the other one overlaps.
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
from treepack.attention.hopper.tiles import list_of_queries, rows_of_queries


@gluon.jit
def _produce(copies, shared, lists, tiles, K: gl.constexpr, V: gl.constexpr):
    q, do, k, v = copies
    q_tile, do_tile, inputs_full, k_ring, v_ring = shared
    # [128, D] and [128, D_v]; two arrivals
    expect(inputs_full, q, 1)
    copy_tile(q, 0, inputs_full, q_tile)
    expect(inputs_full, do, 1)
    copy_tile(do, 0, inputs_full, do_tile)
    feed_tiles(k, v, k_ring, v_ring, lists[0], tiles, K, V)


@gluon.jit
def _consume(
    shared,
    lists,
    tiles,
    pointers,
    numbers,
    K: gl.constexpr,
    V: gl.constexpr,
    CARRIED: gl.constexpr,
    WINDOWED: gl.constexpr,
    FIRST_ROW: gl.constexpr,
):
    q_tile, do_tile, inputs_full, k_ring, v_ring = shared
    granules, ends, starts = lists
    lse_pointer, delta_pointer, dq_pointer = pointers
    q0, length, partial_tiles, dq_stride, factor, scale = numbers
    KEYS: gl.constexpr = k_ring.tiles[0].shape[1]
    PARTS: gl.constexpr = len(k_ring.tiles)
    dtype: gl.constexpr = q_tile[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    # [64, D]
    dq = zeros_of(stage_of(k_ring.tiles, 0), 64)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, dq[0].type.layout, 2)

    # [64]
    query = q0 + FIRST_ROW + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    start = query
    if WINDOWED:
        start = gl.load(starts + query)
    # [KEYS]
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    # [64]
    lse = gl.load(lse_pointer + query)
    delta = gl.load(delta_pointer + query)
    # [64, D] of [128, D], and [64, D_v] of [128, D_v]
    q = rows_of_parts(q_tile, FIRST_ROW, 64)
    do = rows_of_parts(do_tile, FIRST_ROW, 64)
    # [64, KEYS], the left operand of dS K
    ds = gl.zeros((64, KEYS), dtype, ds_layout)
    mbarrier.wait(inputs_full, 0)
    for i in range(tiles):
        stage = i % K
        # The second term is 0, which the compiler cannot prove: with one stage, it would keep the addresses of all
        # products with the tile in registers, and spill.
        stage_v = i % V + ((i + length) >> 31)
        # In the first iteration ds is 0 and multiplies this tile: other stages may hold NaN, and 0 * NaN is NaN.
        before = gl.maximum(i - 1, 0) % K
        mbarrier.wait(k_ring.full.index(stage), (i // K) & 1)
        # [64, D] @ [D, KEYS] -> [64, KEYS]
        s_product = inner(q, stage_of(k_ring.tiles, stage), gl.zeros((64, KEYS), gl.float32, s_layout), False)
        mbarrier.wait(v_ring.full.index(stage_v), (i // V) & 1)
        # [64, D_v] @ [D_v, KEYS] -> [64, KEYS]
        dp_product = inner(do, stage_of(v_ring.tiles, stage_v), gl.zeros((64, KEYS), gl.float32, s_layout), False)
        if CARRIED:
            # [64, KEYS] @ [KEYS, D] -> [64, D], tile i - 1
            dq_product = outer_product(ds, stage_of(k_ring.tiles, before), dq)
        s = warpgroup_mma_wait(len(do) + CARRIED * PARTS, deps=(s_product,))
        # [64, KEYS]
        p = gl.exp2(s * factor - lse[:, None])
        if i < partial_tiles:
            p = gl.where(visible(granules + i * (KEYS // 32), ends, query, start, columns, WINDOWED), p, 0.0)
        # [64, KEYS]
        dp = warpgroup_mma_wait(CARRIED * PARTS, deps=(dp_product,))
        mbarrier.arrive(v_ring.empty.index(stage_v), count=1)
        # [64, KEYS] * ([64, KEYS] - [64, 1]) = dS
        p = p * (dp - delta[:, None])
        if CARRIED:
            dq = finish_tile(dq_product, 0)
            mbarrier.arrive(k_ring.empty.index(before), count=1, pred=i > 0)
            # [64, KEYS]
            ds = gl.convert_layout(p.to(dtype), ds_layout)
        else:
            # [64, KEYS] @ [KEYS, D] -> [64, D]
            dq = finish_tile(outer_product(p.to(dtype), stage_of(k_ring.tiles, stage), dq), 0)
            mbarrier.arrive(k_ring.empty.index(stage), count=1)
    if CARRIED:
        # [64, KEYS] @ [KEYS, D] -> [64, D], the last tile
        dq = finish_tile(outer_product(ds, stage_of(k_ring.tiles, (tiles - 1) % K), dq), 0)

    # [64, D]
    store_parts(dq_pointer, dq_stride, query, query < length, scaled(dq, gl.full_like(lse, scale)), q)


@gluon.jit(do_not_specialize=["length", "blocks", "section"])
def wide_query_kernel(
    q_first,
    q_second,
    do_first,
    do_second,
    k_first,
    k_second,
    v_first,
    v_second,
    q_at,
    do_at,
    k_at,
    v_at,
    lse_pointer,
    delta_pointer,
    dq_pointer,
    dq_strides,
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
    scale,
    GROUP: gl.constexpr,
    GRANULES: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    CARRIED: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """Write the gradient dq of 128 queries of one head; the grid is batch * blocks * heads.

    Arguments as in `wide_forward_kernel`.
    """
    row, head, block, first, tiles, partial_tiles = list_of_queries(
        gl.program_id(0), section, batch, blocks, query_order, query_offsets, query_partial, GRANULES
    )
    group = head // GROUP
    q0 = origin + block * 128

    # [128, D] and [128, D_v]
    q_tile = tiles_of(q_first, q_second, 128)
    do_tile = tiles_of(do_first, do_second, 128)
    inputs_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(inputs_full, count=2)
    # [STAGES, GRANULES * 32, D] and [STAGES, GRANULES * 32, D_v]
    k_ring = ring_of(k_first, k_second, GRANULES * 32, K_STAGES, 1)
    v_ring = ring_of(v_first, v_second, GRANULES * 32, V_STAGES, 1)

    of_head = (row.to(gl.int64) * heads + head) * (padded - origin) - origin
    dq_pointer = rows_of_queries(dq_pointer, dq_strides, row, head, origin)
    pointers = (lse_pointer + of_head, delta_pointer + of_head, dq_pointer)
    numbers = (q0, length, partial_tiles, dq_strides[2], factor, scale)
    q = sources(q_first, q_second, q_at, row, head, q0 - origin)
    do = sources(do_first, do_second, do_at, row, head, q0 - origin)
    k = sources(k_first, k_second, k_at, row, group, 0)
    v = sources(v_first, v_second, v_at, row, group, 0)
    lists = (granules + first, ends + row * padded, starts + row * padded)
    copies = (q, do, k, v)
    shared = (q_tile, do_tile, inputs_full, k_ring, v_ring)
    # The tuples are written here: in a tuple with a name, constants would become values of the run.
    gl.warp_specialize(
        [
            (_consume, (shared, lists, tiles, pointers, numbers, K_STAGES, V_STAGES, CARRIED, WINDOWED, 0)),
            (_consume, (shared, lists, tiles, pointers, numbers, K_STAGES, V_STAGES, CARRIED, WINDOWED, 64)),
            (_produce, (copies, shared, lists, tiles, K_STAGES, V_STAGES)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of a thread of each
    )
