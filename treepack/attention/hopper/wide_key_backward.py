"""Gradients of the keys and values on Hopper for heads in parts: one program for 64 gathered keys of one key head.

dk and dv of 64 keys fill the registers of a consumer each, so the consumers divide the products, not the keys:

    values   S' = K Q'    P' = 2**S'  -- P' through shared memory -->      dv += P' dO
    keys     dP' = V dO'                                dS' = P' dP'       dk += dS' Q

Queries come from the last one back, or with windows in the order of their list; for each tile, all heads of the group.
lse and delta are the initial values of accumulators. A key block of the schedule has 128 keys: two programs.

If CARRIED, the products on the right are in flight during the next step, which needs three stages. P passes as float16
times 2**14. Its error is 2**-12 of P down to P = 2**-28, an eighth of the rounding of dS to bfloat16. With float16
inputs dS is rounded as finely as that, so P passes as float32.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from treepack.attention.hopper.parts import (
    expect,
    finish_tile,
    gather_tile,
    inner,
    outer_product,
    ring_of,
    scaled,
    send,
    sources,
    stage_of,
    store_parts,
    tiles_of,
    zeros_of,
    zeros_unless,
)
from treepack.attention.hopper.tiles import TileRing, is_seen, place, read_keys

_SHIFT = gl.constexpr(16384.0)


class _WideShared(NamedTuple):
    """Shared memory of a program: its keys and values, and rings of queries, output gradients, P', lse and delta."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    block_full: gl.shared_memory_descriptor
    q: TileRing
    do: TileRing
    p: TileRing
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor


class _WidePointers(NamedTuple):
    """Pointers into global memory: granules of the half block, lists of the row, numbers of the group's queries."""

    granules: gl.tensor
    ends: gl.tensor
    starts: gl.tensor
    key_tiles: gl.tensor
    lse: gl.tensor
    delta: gl.tensor


class _WideKeyWork(NamedTuple):
    """The numbers that consumers read; `origin` and `places` are as in `key_backward.KeyWork`.

    `steps` is query tiles of the program times heads of its group.
    """

    steps: gl.tensor
    first: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    last: gl.tensor
    length: gl.tensor
    origin: gl.tensor
    places: gl.tensor
    factor: gl.tensor
    scale: gl.tensor


@gluon.jit
def _query_of(step, work, key_tiles, QUERIES: gl.constexpr, GROUP: gl.constexpr, WINDOWED: gl.constexpr):
    """Return the first query of a step, and True if its pairs need the mask."""
    # GROUP 2, QUERIES 64, last 512: step 0 1 2 3 4 ... -> query 448 448 384 384 320 ...
    # WINDOWED, key_tiles 0 64 448, first 0: step 0 1 2 3 4 5 -> query 0 0 64 64 448 448
    if WINDOWED:
        index = work.first + step // GROUP
        return gl.load(key_tiles + index), index < work.full_begin
    else:
        query = work.last - (step // GROUP + 1) * QUERIES
        return query, (query < work.full_begin) | (query >= work.full_end)


@gluon.jit
def _produce(
    shared, blocks, streams, pointers, work, GROUP: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr
):
    k, v = blocks
    q_first, q_second, do_first, do_second, q_at, do_at, row, group = streams
    QUERIES: gl.constexpr = shared.q.tiles[0].shape[1]
    # [64, D] and [64, D_v]; two arrivals
    expect(shared.block_full, k, 2)
    gather_tile(k, pointers.granules, shared.block_full, shared.k, 2)
    expect(shared.block_full, v, 2)
    gather_tile(v, pointers.granules, shared.block_full, shared.v, 2)
    # [QUERIES]
    lanes = gl.arange(0, QUERIES, gl.BlockedLayout([QUERIES // 32], [32], [1], [0]))
    for step in range(work.steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        query, _ = _query_of(step, work, pointers.key_tiles, QUERIES, GROUP, WINDOWED)
        head = step % GROUP
        at = head * work.places + query + lanes
        q = sources(q_first, q_second, q_at, row, group * GROUP + head, query - work.origin)
        do = sources(do_first, do_second, do_at, row, group * GROUP + head, query - work.origin)
        send(q, shared.q, stage, phase, shared.lse.index(stage), pointers.lse + at)
        send(do, shared.do, stage, phase, shared.delta.index(stage), pointers.delta + at)


@gluon.jit
def _consume_values(
    shared,
    pointers,
    work,
    dv_pointer,
    dv_stride,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    CARRIED: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    QUERIES: gl.constexpr = shared.q.tiles[0].shape[1]
    P_STAGES: gl.constexpr = shared.p.tiles.shape[0]
    dtype: gl.constexpr = shared.k[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    column: gl.constexpr = gl.SliceLayout(0, s_layout)

    # [64]
    granule, key, end = read_keys(pointers.granules, pointers.ends, gl.arange(0, 64, gl.SliceLayout(1, s_layout)))
    # [64, QUERIES]
    zeros = gl.zeros((64, QUERIES), gl.float32, s_layout)
    # exp2((k q' - lse / factor) * factor) = exp2(k q' * factor - lse)
    inverse = -1.0 / work.factor
    # [64, D_v]
    dv = zeros_of(shared.v, 64)
    PARTS: gl.constexpr = len(dv)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    # [64, QUERIES]
    p_before = gl.zeros((64, QUERIES), dtype, p_layout)
    mbarrier.wait(shared.block_full, 0)
    for step in range(work.steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        p_stage = step % P_STAGES
        query, is_masked = _query_of(step, work, pointers.key_tiles, QUERIES, GROUP, WINDOWED)
        mbarrier.wait(shared.q.full.index(stage), phase)
        # [64, QUERIES] + [1, QUERIES]
        s = zeros + (shared.lse.index(stage).load(column) * inverse)[None, :]
        # [64, D] @ [D, QUERIES] -> [64, QUERIES], added to -lse / factor
        s_product = inner(shared.k, stage_of(shared.q.tiles, stage), s, True)
        # In the first step p is 0 and multiplies this step's tile: others may hold NaN, and 0 * NaN is NaN.
        before = gl.maximum(step - 1, 0)
        if CARRIED:
            mbarrier.wait(shared.do.full.index(before % STAGES), (before // STAGES) & 1)
            # [64, QUERIES] @ [QUERIES, D_v] -> [64, D_v], the step before
            dv_product = outer_product(p_before, stage_of(shared.do.tiles, before % STAGES), dv)
        s = warpgroup_mma_wait(CARRIED * PARTS, deps=(s_product,))
        mbarrier.arrive(shared.q.empty.index(stage), count=1)
        # [64, QUERIES]
        p = gl.exp2(s * work.factor)
        if is_masked:
            # [QUERIES]
            queries = query + gl.arange(0, QUERIES, column)
            start = queries
            if WINDOWED:
                start = gl.load(pointers.starts + queries)
            # [1, QUERIES] and [64, 1] -> [64, QUERIES]
            p = gl.where(is_seen(queries[None, :], start[None, :], key[:, None], end[:, None], WINDOWED), p, 0.0)
        mbarrier.wait(shared.p.empty.index(p_stage), ((step // P_STAGES) & 1) ^ 1)
        shared.p.tiles.index(p_stage).store((p * _SHIFT).to(shared.p.tiles.dtype))
        mbarrier.arrive(shared.p.full.index(p_stage), count=1)
        if CARRIED:
            dv = finish_tile(dv_product, 0)
            mbarrier.arrive(shared.do.empty.index(before % STAGES), count=1, pred=step > 0)
            # [64, QUERIES]
            p_before = gl.convert_layout(p.to(dtype), p_layout)
        else:
            mbarrier.wait(shared.do.full.index(stage), phase)
            # [64, QUERIES] @ [QUERIES, D_v] -> [64, D_v]
            dv = finish_tile(outer_product(p.to(dtype), stage_of(shared.do.tiles, stage), dv), 0)
            mbarrier.arrive(shared.do.empty.index(stage), count=1)
    if CARRIED:
        last = gl.maximum(work.steps - 1, 0)
        mbarrier.wait(shared.do.full.index(last % STAGES), (last // STAGES) & 1, pred=work.steps > 0)
        # [64, QUERIES] @ [QUERIES, D_v] -> [64, D_v], the last step
        dv = finish_tile(outer_product(p_before, stage_of(shared.do.tiles, last % STAGES), dv), 0)
    # [64, D_v]; only this consumer reads the keys, so their tile stages the gradient
    _store(dv_pointer, dv_stride, key, granule, work, dv, shared.k)


@gluon.jit
def _consume_keys(
    shared,
    pointers,
    work,
    dk_pointer,
    dk_stride,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    CARRIED: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    QUERIES: gl.constexpr = shared.q.tiles[0].shape[1]
    P_STAGES: gl.constexpr = shared.p.tiles.shape[0]
    dtype: gl.constexpr = shared.k[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    column: gl.constexpr = gl.SliceLayout(0, s_layout)

    # [64, QUERIES]
    zeros = gl.zeros((64, QUERIES), gl.float32, s_layout)
    # [64, D]
    dk = zeros_of(shared.k, 64)
    PARTS: gl.constexpr = len(dk)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    # [64, QUERIES]
    ds_before = gl.zeros((64, QUERIES), dtype, ds_layout)
    mbarrier.wait(shared.block_full, 0)
    for step in range(work.steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        p_stage = step % P_STAGES
        mbarrier.wait(shared.do.full.index(stage), phase)
        # [64, QUERIES] - [1, QUERIES]
        dp = zeros - shared.delta.index(stage).load(column)[None, :]
        # [64, D_v] @ [D_v, QUERIES] -> [64, QUERIES], added to -delta
        dp_product = inner(shared.v, stage_of(shared.do.tiles, stage), dp, True)
        before = gl.maximum(step - 1, 0)
        if CARRIED:
            mbarrier.wait(shared.q.full.index(before % STAGES), (before // STAGES) & 1)
            # [64, QUERIES] @ [QUERIES, D] -> [64, D], the step before
            dk_product = outer_product(ds_before, stage_of(shared.q.tiles, before % STAGES), dk)
        dp = warpgroup_mma_wait(CARRIED * PARTS, deps=(dp_product,))
        mbarrier.arrive(shared.do.empty.index(stage), count=1)
        mbarrier.wait(shared.p.full.index(p_stage), (step // P_STAGES) & 1)
        # [64, QUERIES]
        p = shared.p.tiles.index(p_stage).load(s_layout).to(gl.float32)
        mbarrier.arrive(shared.p.empty.index(p_stage), count=1)
        ds = (p * dp) * (1.0 / _SHIFT)
        if CARRIED:
            dk = finish_tile(dk_product, 0)
            mbarrier.arrive(shared.q.empty.index(before % STAGES), count=1, pred=step > 0)
            # [64, QUERIES]
            ds_before = gl.convert_layout(ds.to(dtype), ds_layout)
        else:
            mbarrier.wait(shared.q.full.index(stage), phase)
            # [64, QUERIES] @ [QUERIES, D] -> [64, D]
            dk = finish_tile(outer_product(ds.to(dtype), stage_of(shared.q.tiles, stage), dk), 0)
            mbarrier.arrive(shared.q.empty.index(stage), count=1)
    if CARRIED:
        last = gl.maximum(work.steps - 1, 0)
        mbarrier.wait(shared.q.full.index(last % STAGES), (last // STAGES) & 1, pred=work.steps > 0)
        # [64, QUERIES] @ [QUERIES, D] -> [64, D], the last step
        dk = finish_tile(outer_product(ds_before, stage_of(shared.q.tiles, last % STAGES), dk), 0)
    # [64]
    rows = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    granule = gl.load(pointers.granules + rows // 32)
    key = granule * 32 + rows % 32
    dk = scaled(dk, gl.full_like(key, work.scale, dtype=gl.float32))
    # [64, D]; all queries have come and been read, so one of their tiles stages the gradient
    _store(dk_pointer, dk_stride, key, granule, work, dk, stage_of(shared.q.tiles, 0))


@gluon.jit
def _store(pointer, stride, key, granule, work, values, tile):
    # Keys that no query sees: the last product is 0 times a tile that nothing has filled, which may be NaN.
    values = zeros_unless(work.steps > 0, values)
    store_parts(pointer, stride, key, (granule >= 0) & (key < work.length), values, tile)


@gluon.jit
def _allocate(
    q_first, q_second, do_first, do_second, k_first, k_second, v_first, v_second, STAGES: gl.constexpr, P: gl.constexpr
):
    """Allocate the shared memory of a program and initialise its barriers."""
    QUERIES: gl.constexpr = q_first.block_type.shape[0]
    # [64, D] and [64, D_v]
    k_tile = tiles_of(k_first, k_second, 64)
    v_tile = tiles_of(v_first, v_second, 64)
    block_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(block_full, count=2)
    # [STAGES, QUERIES, D]; 33 arrivals: 1 of the producer, and 32 of the lanes that copy lse or delta
    q_ring = ring_of(q_first, q_second, QUERIES, STAGES, 33)
    do_ring = ring_of(do_first, do_second, QUERIES, STAGES, 33)
    # [P, 64, QUERIES], from one consumer to the other
    kind: gl.constexpr = gl.float32 if q_first.dtype == gl.float16 else gl.float16
    p_layout: gl.constexpr = gl.NVMMASharedLayout(128, kind.primitive_bitwidth, 2)
    p_tiles = gl.allocate_shared_memory(kind, [P, 64, QUERIES], p_layout)
    p_full = gl.allocate_shared_memory(gl.int64, [P, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [P, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(P):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=1)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # [STAGES, QUERIES]
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    p_ring = TileRing(p_tiles, p_full, p_empty)
    return _WideShared(k_tile, v_tile, block_full, q_ring, do_ring, p_ring, lse_tiles, delta_tiles)


@gluon.jit(do_not_specialize=["length", "blocks", "section"])
def wide_key_kernel(
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
    dk_pointer,
    dk_strides,
    dv_pointer,
    dv_strides,
    ends,
    starts,
    key_granules,
    key_ranges,
    key_tiles,
    key_order,
    length,
    origin,
    padded,
    batch,
    kv_heads,
    blocks,
    section,
    factor,
    scale,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    P_STAGES: gl.constexpr,
    CARRIED: gl.constexpr,
    WINDOWED: gl.constexpr,
):
    """Write the gradients dk and dv of 64 keys of one key head; the grid is 2 * batch * blocks * kv_heads.

    Descriptors read QUERIES rows of q and do, one granule of k and v; all else is as in `wide_forward_kernel`.
    """
    QUERIES: gl.constexpr = q_first.block_type.shape[0]
    row, group, block = place(gl.program_id(0) // 2, section, batch, blocks, key_order)
    ranges = key_ranges + (row * blocks + block) * 4
    granules = key_granules + (row * blocks + block) * 4 + gl.program_id(0) % 2 * 2
    first = gl.load(ranges)
    last = gl.load(ranges + 3)
    tiles = (last - first) if WINDOWED else (last - first) // QUERIES
    # A half without granules has nothing to do.
    steps = gl.where(gl.load(granules) >= 0, tiles * GROUP, 0)

    shared = _allocate(q_first, q_second, do_first, do_second, k_first, k_second, v_first, v_second, STAGES, P_STAGES)
    places = padded - origin
    of_head = (row.to(gl.int64) * kv_heads + group) * GROUP * places - origin
    dk_pointer += row.to(gl.int64) * dk_strides[0] + group * dk_strides[1]
    dv_pointer += row.to(gl.int64) * dv_strides[0] + group * dv_strides[1]
    pointers = _WidePointers(
        granules, ends + row * padded, starts + row * padded, key_tiles, lse_pointer + of_head, delta_pointer + of_head
    )
    full_begin = gl.load(ranges + 1)
    full_end = gl.load(ranges + 2)
    work = _WideKeyWork(steps, first, full_begin, full_end, last, length, origin, places, factor, scale)
    sides = (sources(k_first, k_second, k_at, row, group, 0), sources(v_first, v_second, v_at, row, group, 0))
    streams = (q_first, q_second, do_first, do_second, q_at, do_at, row, group)
    # The tuples are written here: in a tuple with a name, constants would become values of the run.
    gl.warp_specialize(
        [
            (_consume_values, (shared, pointers, work, dv_pointer, dv_strides[2], GROUP, STAGES, CARRIED, WINDOWED)),
            (_consume_keys, (shared, pointers, work, dk_pointer, dk_strides[2], GROUP, STAGES, CARRIED, WINDOWED)),
            (_produce, (shared, sides, streams, pointers, work, GROUP, STAGES, WINDOWED)),
        ],
        [4, 1],  # warps of the consumer of keys and of the producer
        [240, 24],  # registers of a thread of each
    )
