"""Gradient of the queries on Hopper: one program for 128 queries of one head.

Per key tile, the product of the tile before (dS K) runs under the exponentials of this one. In and out as in
`portable_backward`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from treepack.attention.hopper.tiles import feed, fetch, matrix, place, ring, store_rows


@gluon.jit
def _produce(q, do, k, v, own, k_ring, v_ring, granules, tiles, pointers, numbers, STAGES: gl.constexpr):
    q_tile, do_tile, own_full = own
    mbarrier.expect(own_full, q.descriptor.block_type.nbytes + do.descriptor.block_type.nbytes)
    fetch(q.descriptor, [q.row, q.column], own_full, q_tile)
    fetch(do.descriptor, [do.row, do.column], own_full, do_tile)
    feed(k, v, k_ring, v_ring, granules, tiles, STAGES)


@gluon.jit
def _consume_second(q, do, k, v, own, k_ring, v_ring, granules, tiles, pointers, numbers, STAGES: gl.constexpr):
    _consume(own, k_ring, v_ring, granules, tiles, pointers, numbers, STAGES, 64)


@gluon.jit
def _consume(own, k_ring, v_ring, granules, tiles, pointers, numbers, STAGES: gl.constexpr, FIRST_ROW: gl.constexpr):
    q_tile, do_tile, own_full = own
    ends, lse_pointer, delta_pointer, dq_pointer = pointers
    q0, length, partial_tiles, dq_stride, factor, scale = numbers
    KEYS: gl.constexpr = k_ring.tiles.shape[1]
    D: gl.constexpr = k_ring.tiles.shape[2]
    dtype: gl.constexpr = q_tile.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, dq_layout, 2)

    query = q0 + FIRST_ROW + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    lse = gl.load(lse_pointer + query)
    delta = gl.load(delta_pointer + query)
    zeros = gl.zeros((64, KEYS), gl.float32, s_layout)
    q = q_tile.slice(FIRST_ROW, 64, dim=0)
    do = do_tile.slice(FIRST_ROW, 64, dim=0)
    dq = gl.zeros((64, D), gl.float32, dq_layout)
    ds = gl.zeros((64, KEYS), dtype, ds_layout)
    mbarrier.wait(own_full, 0)
    for i in range(tiles):
        stage = i % STAGES
        before = gl.maximum(i - 1, 0) % STAGES  # of the first tile its own stage, times ds = 0: others hold no numbers
        mbarrier.wait(k_ring.full.index(stage), (i // STAGES) & 1)
        s_product = warpgroup_mma(q, k_ring.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_ring.full.index(stage), (i // STAGES) & 1)
        dp_product = warpgroup_mma(do, v_ring.tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        dq_product = warpgroup_mma(ds, k_ring.tiles.index(before), dq, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s_product,))
        p = gl.exp2(s * factor - lse[:, None])
        if i < partial_tiles:
            granule = gl.load(granules + i * (KEYS // 32) + columns // 32)
            key = granule * 32 + columns % 32
            end = gl.load(ends + key, mask=granule >= 0, other=0)
            p = gl.where((key[None, :] <= query[:, None]) & (query[:, None] < end[None, :]), p, 0.0)
        dp = warpgroup_mma_wait(1, deps=(dp_product,))
        mbarrier.arrive(v_ring.empty.index(stage), count=1)
        p = p * (dp - delta[:, None])
        dq = warpgroup_mma_wait(0, deps=(dq_product,))
        mbarrier.arrive(k_ring.empty.index(before), count=1, pred=i > 0)
        ds = gl.convert_layout(p.to(dtype), ds_layout)
    dq = warpgroup_mma(ds, k_ring.tiles.index((tiles - 1) % STAGES), dq)

    rows = gl.convert_layout(query, gl.SliceLayout(1, dq_layout))
    store_rows(dq_pointer, dq_stride, rows, rows < length, dq * scale, q)


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
    granules,
    query_offsets,
    query_partial,
    query_order,
    length,
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
):
    """The gradient dq of 128 queries of one head; the grid is batch * blocks * heads.

    Arguments as in `forward_kernel`.
    """
    D: gl.constexpr = q_descriptor.block_type.shape[1]
    row, head, block = place(gl.program_id(0), section, batch, blocks, query_order)
    offset = query_offsets + row * (blocks + 1) + block
    first = gl.load(offset)
    tiles = (gl.load(offset + 1) - first) // GRANULES
    partial_tiles = gl.load(query_partial + row * blocks + block) // GRANULES
    group = head // GROUP
    q0 = block * 128

    q_tile = gl.allocate_shared_memory(q_descriptor.dtype, [128, D], q_descriptor.layout)
    do_tile = gl.allocate_shared_memory(q_descriptor.dtype, [128, D], q_descriptor.layout)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    k_ring = ring(k_descriptor, GRANULES * 32, STAGES, 1)
    v_ring = ring(v_descriptor, GRANULES * 32, STAGES, 1)

    of_head = (row.to(gl.int64) * heads + head) * padded
    dq_pointer += row.to(gl.int64) * dq_strides[0] + head * dq_strides[1]
    pointers = (ends + row * padded, lse_pointer + of_head, delta_pointer + of_head, dq_pointer)
    numbers = (q0, length, partial_tiles, dq_strides[2], factor, scale)
    own = (q_tile, do_tile, own_full)
    granules += first
    q = matrix(q_descriptor, q_at, row, head, q0)
    do = matrix(do_descriptor, do_at, row, head, q0)
    k = matrix(k_descriptor, k_at, row, group, 0)
    v = matrix(v_descriptor, v_at, row, group, 0)
    everything = (q, do, k, v, own, k_ring, v_ring, granules, tiles, pointers, numbers, STAGES)
    gl.warp_specialize(
        [
            (_consume, (own, k_ring, v_ring, granules, tiles, pointers, numbers, STAGES, 0)),
            (_consume_second, everything),
            (_produce, everything),
        ],
        [4, 1],
        [240, 24],
    )
