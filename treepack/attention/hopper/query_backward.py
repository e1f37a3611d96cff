"""Gradient of the queries on Hopper: one program for 128 queries of one head.

In step i a consumer computes the exponentials of key tile i while the product dS K of tile i - 1 is in flight. Same
inputs and outputs as `portable_backward`.
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
    is_seen,
    keys_of,
    list_of_queries,
    matrix,
    numbers_of,
    read_keys,
    ring,
    rows_of_queries,
    staged_ends,
    store_rows,
)


class _QueryWork(NamedTuple):
    """First query and tiles of a program, the numbers that a consumer reads, and pointers of its head.

    lse, delta    [T_pad - origin], moved back by `origin` places, so that a token is its index
    dq            the result; its tokens are dq_stride elements apart
    """

    q0: gl.tensor
    tiles: gl.tensor
    partial_tiles: gl.tensor
    length: gl.tensor
    factor: gl.tensor
    scale: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    dq: gl.tensor
    dq_stride: gl.tensor


@gluon.jit
def _produce(copies, shared, lists, work, STAGES: gl.constexpr, WINDOWED: gl.constexpr):
    q, do, k, v = copies
    q_tile, do_tile, inputs_full, k_ring, v_ring = shared
    # [128, D] each
    mbarrier.expect(inputs_full, q.descriptor.block_type.nbytes + do.descriptor.block_type.nbytes)
    fetch(q.descriptor, [q.row, q.column], inputs_full, q_tile)
    fetch(do.descriptor, [do.row, do.column], inputs_full, do_tile)
    feed(k, v, k_ring, v_ring, lists, work.tiles, STAGES, WINDOWED)


@gluon.jit
def _consume(shared, lists, work, STAGES: gl.constexpr, WINDOWED: gl.constexpr, FIRST_ROW: gl.constexpr):
    q_tile, do_tile, inputs_full, k_ring, v_ring = shared
    tiles = work.tiles
    factor = work.factor
    KEYS: gl.constexpr = k_ring.tiles.shape[1]
    D: gl.constexpr = k_ring.tiles.shape[2]
    dtype: gl.constexpr = q_tile.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)

    # [64]
    query = work.q0 + FIRST_ROW + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    # [KEYS]
    columns = gl.arange(0, KEYS, column)
    # [64]
    start = query
    if WINDOWED:
        start = gl.load(lists.starts + query)
    lse = gl.load(work.lse + query)
    delta = gl.load(work.delta + query)
    # [64, KEYS]
    zeros = gl.zeros((64, KEYS), gl.float32, s_layout)
    # [64, D] of [128, D]
    q = q_tile.slice(FIRST_ROW, 64, dim=0)
    do = do_tile.slice(FIRST_ROW, 64, dim=0)
    # [64, D]
    dq = gl.zeros((64, D), gl.float32, dq_layout)
    # [64, KEYS], the left operand of dS K
    ds = gl.zeros((64, KEYS), dtype, ds_layout)
    mbarrier.wait(inputs_full, 0)
    for i in range(tiles):
        stage = i % STAGES
        # In the first iteration ds is 0 and multiplies this tile: other stages may hold NaN, and 0 * NaN is NaN.
        before = gl.maximum(i - 1, 0) % STAGES
        if WINDOWED:
            numbers = numbers_of(lists.granules + i * (KEYS // 32), KEYS // 32)
        mbarrier.wait(k_ring.full.index(stage), (i // STAGES) & 1)
        # [64, D] @ [D, KEYS] -> [64, KEYS]
        s_product = warpgroup_mma(q, k_ring.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_ring.full.index(stage), (i // STAGES) & 1)
        # [64, D] @ [D, KEYS] -> [64, KEYS]
        dp_product = warpgroup_mma(do, v_ring.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # [64, KEYS] @ [KEYS, D] -> [64, D], tile i - 1
        dq_product = warpgroup_mma(ds, k_ring.tiles.index(before), dq, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s_product,))
        # [64, KEYS]
        p = gl.exp2(s * factor - lse[:, None])
        if i < work.partial_tiles:
            # [KEYS]
            if WINDOWED:
                key = keys_of(numbers, columns)
                end = lists.end_tiles.index(stage).load(column)
            else:
                _, key, end = read_keys(lists.granules + i * (KEYS // 32), lists.ends, columns)
            # [64, 1] and [1, KEYS] -> [64, KEYS]
            seen = is_seen(query[:, None], start[:, None], key[None, :], end[None, :], WINDOWED)
            p = gl.where(seen, p, 0.0)
        # [64, KEYS]
        dp = warpgroup_mma_wait(1, deps=(dp_product,))
        mbarrier.arrive(v_ring.empty.index(stage), count=1)
        # [64, KEYS] * ([64, KEYS] - [64, 1]) = dS
        p = p * (dp - delta[:, None])
        dq = warpgroup_mma_wait(0, deps=(dq_product,))
        mbarrier.arrive(k_ring.empty.index(before), count=1, pred=i > 0)
        # [64, KEYS]
        ds = gl.convert_layout(p.to(dtype), ds_layout)
    # [64, KEYS] @ [KEYS, D] -> [64, D], the last tile
    dq = warpgroup_mma(ds, k_ring.tiles.index((tiles - 1) % STAGES), dq)

    # [64]
    rows = gl.convert_layout(query, gl.SliceLayout(1, dq_layout))
    # [64, D]
    store_rows(work.dq, work.dq_stride, rows, rows < work.length, dq * work.scale, q)


@gluon.jit(do_not_specialize=["length", "blocks", "section"])
def query_kernel(
    q_descriptor,
    do_descriptor,
    k_descriptor,
    v_descriptor,
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
    STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """Write the gradient dq of 128 queries of one head; the grid is batch * blocks * heads.

    Arguments as in `forward_kernel`.
    """
    D: gl.constexpr = q_descriptor.block_type.shape[1]
    row, head, block, first, tiles, partial_tiles = list_of_queries(
        gl.program_id(0), section, batch, blocks, query_order, query_offsets, query_partial, GRANULES
    )
    group = head // GROUP
    q0 = origin + block * 128

    # [128, D] each
    q_tile = gl.allocate_shared_memory(q_descriptor.dtype, [128, D], q_descriptor.layout)
    do_tile = gl.allocate_shared_memory(q_descriptor.dtype, [128, D], q_descriptor.layout)
    inputs_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(inputs_full, count=1)
    # [STAGES, GRANULES * 32, D]; 33 arrivals: 1 of the producer, and 32 of the lanes that copy ends
    k_ring = ring(k_descriptor, GRANULES * 32, STAGES, 33 if WINDOWED else 1)
    v_ring = ring(v_descriptor, GRANULES * 32, STAGES, 1)
    end_tiles = staged_ends(k_ring, STAGES, WINDOWED)

    of_head = (row.to(gl.int64) * heads + head) * (padded - origin) - origin
    lists = ProgramLists(granules + first, ends + row * padded, starts + row * padded, end_tiles)
    work = _QueryWork(
        q0,
        tiles,
        partial_tiles,
        length,
        factor,
        scale,
        lse_pointer + of_head,
        delta_pointer + of_head,
        rows_of_queries(dq_pointer, dq_strides, row, head, origin),
        dq_strides[2],
    )
    q = matrix(q_descriptor, q_at, row, head, q0 - origin)
    do = matrix(do_descriptor, do_at, row, head, q0 - origin)
    k = matrix(k_descriptor, k_at, row, group, 0)
    v = matrix(v_descriptor, v_at, row, group, 0)
    shared = (q_tile, do_tile, inputs_full, k_ring, v_ring)
    # The tuples are written here: in a tuple with a name, constants would become values of the run.
    gl.warp_specialize(
        [
            (_consume, (shared, lists, work, STAGES, WINDOWED, 0)),
            (_consume, (shared, lists, work, STAGES, WINDOWED, 64)),
            (_produce, ((q, do, k, v), shared, lists, work, STAGES, WINDOWED)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of a thread of each
    )
