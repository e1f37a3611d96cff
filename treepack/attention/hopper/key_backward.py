"""Gradients of the keys and values on Hopper: one program for 128 gathered keys of one key head.

A program passes over the queries that see any of its keys, of all query heads of the group, from the last query back to
the first. Blocks with very many queries are divided into shares (`key_shares`), one program each, and `join_shares`
adds up their sums. With windows or chunks the queries are a list of tiles instead of a range, and no block is divided.
The blocks of one branch end together, so programs that start together read the same queries from the L2 cache. Scores
are transposed (keys down, queries across), which makes P and dS operands in registers. The log-sum-exp is the initial
value of the scores' accumulator, and delta that of dP's accumulator, so neither needs extra registers.

Same inputs and outputs as `portable_backward`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from treepack.attention.hopper.tiles import (
    HeadMatrix,
    TileRing,
    copy,
    fetch,
    gather,
    is_seen,
    matrix,
    place,
    read_keys,
    ring,
    store_rows,
)


class _ProgramMemory(NamedTuple):
    """Shared memory of a program: its keys and values, rings of queries and output gradients, and numbers of queries.

    lse, delta, starts   [STAGES, QUERIES]; lse and starts arrive with the queries, delta with the output gradients;
                         starts is read if WINDOWED
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    block_full: gl.shared_memory_descriptor
    q: TileRing
    do: TileRing
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor


class _ProducerSources(NamedTuple):
    """Sources of the producer; queries and output gradients come from many heads and tokens."""

    k: HeadMatrix
    v: HeadMatrix
    q: tma.tensor_descriptor
    do: tma.tensor_descriptor
    q_at: gl.tuple
    do_at: gl.tuple
    row: gl.tensor
    group: gl.tensor


class _ProgramPointers(NamedTuple):
    """Pointers into global memory: numbers of the row, lists of the block, numbers, gradients and sums of the group."""

    ends: gl.tensor
    starts: gl.tensor
    granules: gl.tensor
    tiles: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    dk: gl.tensor
    dv: gl.tensor
    dk_sums: gl.tensor
    dv_sums: gl.tensor


class _KeyWork(NamedTuple):
    """Range of queries, `steps` (its tiles times the heads of the group), and the numbers that a consumer reads.

    `sums` is the place of the sums of a share, or -1. If WINDOWED, the range is one of places in the list of query
    tiles. `origin` is the token of the first row of q and do, and `places` the numbers of lse and delta per head.
    """

    steps: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    last: gl.tensor
    length: gl.tensor
    origin: gl.tensor
    places: gl.tensor
    sums: gl.tensor
    dk_stride: gl.tensor
    dv_stride: gl.tensor
    factor: gl.tensor
    scale: gl.tensor


@gluon.jit
def _place(pointers, work, step, QUERIES: gl.constexpr, GROUP: gl.constexpr, WINDOWED: gl.constexpr):
    """Return the first query of a step, and the place of the step in the range of queries or places."""
    # GROUP 2, QUERIES 64, last 512: step 0 1 2 3 4 ... -> query 448 448 384 384 320 ..., head 0 1 0 1 0 ...
    # WINDOWED, tiles 0 64 448, last 3: -> place 2 2 1 1 0 0, query 448 448 64 64 0 0
    if WINDOWED:
        at = work.last - (step // GROUP + 1)
        return gl.load(pointers.tiles + at), at
    else:
        query = work.last - (step // GROUP + 1) * QUERIES
        return query, query


@gluon.jit
def _produce(shared, sources, pointers, work, GROUP: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr):
    QUERIES: gl.constexpr = shared.q.tiles.shape[1]
    mbarrier.expect(
        shared.block_full, 4 * (sources.k.descriptor.block_type.nbytes + sources.v.descriptor.block_type.nbytes)
    )
    # [128, D] each
    gather(sources.k, pointers.granules, shared.block_full, shared.k, 4)
    gather(sources.v, pointers.granules, shared.block_full, shared.v, 4)
    # [QUERIES]
    lanes = gl.arange(0, QUERIES, gl.BlockedLayout([QUERIES // 32], [32], [1], [0]))
    for step in range(work.steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        query, _ = _place(pointers, work, step, QUERIES, GROUP, WINDOWED)
        head = step % GROUP
        for part in gl.static_range(2):
            descriptor = sources.q if part == 0 else sources.do
            at = sources.q_at if part == 0 else sources.do_at
            ring_to = shared.q if part == 0 else shared.do
            numbers_to = shared.lse if part == 0 else shared.delta
            numbers = pointers.lse if part == 0 else pointers.delta
            source = matrix(descriptor, at, sources.row, sources.group * GROUP + head, query - work.origin)
            full = ring_to.full.index(stage)
            mbarrier.wait(ring_to.empty.index(stage), phase ^ 1)
            # [QUERIES], by the 32 lanes, whose arrivals the barrier counts
            copy(numbers_to.index(stage), numbers + head * work.places + query + lanes)
            if WINDOWED and part == 0:
                copy(shared.starts.index(stage), pointers.starts + query + lanes)
            async_copy.mbarrier_arrive(full, increment_count=False)
            mbarrier.expect(full, descriptor.block_type.nbytes)
            # [QUERIES, D]
            fetch(descriptor, [source.row, source.column], full, ring_to.tiles.index(stage))


@gluon.jit
def _consume(
    shared, pointers, work, GROUP: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, FIRST_ROW: gl.constexpr
):
    QUERIES: gl.constexpr = shared.q.tiles.shape[1]
    D: gl.constexpr = shared.q.tiles.shape[2]
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)

    # [64]
    rows = FIRST_ROW + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    granule, key, end = read_keys(pointers.granules, pointers.ends, rows)
    # [64, QUERIES]
    zeros = gl.zeros((64, QUERIES), gl.float32, s_layout)
    # exp2((k q' - lse / factor) * factor) = exp2(k q' * factor - lse)
    inverse = -1.0 / work.factor
    # [64, D] of [128, D]
    k = shared.k.slice(FIRST_ROW, 64, dim=0)
    v = shared.v.slice(FIRST_ROW, 64, dim=0)
    # [64, D]
    dk = gl.zeros((64, D), gl.float32, d_layout)
    dv = gl.zeros((64, D), gl.float32, d_layout)
    mbarrier.wait(shared.block_full, 0)
    for step in range(work.steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        first, at = _place(pointers, work, step, QUERIES, GROUP, WINDOWED)
        # [QUERIES, D]
        q = shared.q.tiles.index(stage)
        do = shared.do.tiles.index(stage)
        mbarrier.wait(shared.q.full.index(stage), phase)
        # [64, QUERIES] + [1, QUERIES]
        s = zeros + (shared.lse.index(stage).load(column) * inverse)[None, :]
        mbarrier.wait(shared.do.full.index(stage), phase)
        # [64, QUERIES] - [1, QUERIES]
        dp = zeros - shared.delta.index(stage).load(column)[None, :]
        # [64, D] @ [D, QUERIES] -> [64, QUERIES], added to -lse / factor
        s_product = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
        # [64, D] @ [D, QUERIES] -> [64, QUERIES], added to -delta
        dp_product = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s_product,))
        # [64, QUERIES]
        p = gl.exp2(s * work.factor)
        if (at < work.full_begin) | (at >= work.full_end):
            # [QUERIES]
            query = first + gl.arange(0, QUERIES, column)
            start = query
            if WINDOWED:
                start = shared.starts.index(stage).load(column)
            # [1, QUERIES] and [64, 1] -> [64, QUERIES]
            p = gl.where(is_seen(query[None, :], start[None, :], key[:, None], end[:, None], WINDOWED), p, 0.0)
        # [64, QUERIES] @ [QUERIES, D] -> [64, D]
        dv_product = warpgroup_mma(gl.convert_layout(p.to(dtype), p_layout), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp_product,))
        # [64, QUERIES] @ [QUERIES, D] -> [64, D]
        dk_product = warpgroup_mma(gl.convert_layout((p * dp).to(dtype), p_layout), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv_product,))
        mbarrier.arrive(shared.do.empty.index(stage), count=1)
        dk = warpgroup_mma_wait(0, deps=(dk_product,))
        mbarrier.arrive(shared.q.empty.index(stage), count=1)

    row: gl.constexpr = gl.SliceLayout(1, d_layout)
    # [64]
    token = gl.convert_layout(key, row)
    real = gl.convert_layout((granule >= 0) & (key < work.length), row)
    if WINDOWED:
        _store(pointers, work, token, real, dk, dv, k, v)
    else:
        if work.sums >= 0:
            # [64, 1] and [1, D] -> [64, D] of [128, D], float32
            place_of_key = FIRST_ROW + gl.arange(0, 64, row)
            offsets = place_of_key[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, d_layout))[None, :]
            gl.store(pointers.dk_sums + offsets, dk)
            gl.store(pointers.dv_sums + offsets, dv)
        else:
            _store(pointers, work, token, real, dk, dv, k, v)


@gluon.jit
def _store(pointers, work, token, real, dk, dv, k, v):
    """Write dk and dv [64, D]; the keys and values are no longer needed, so their tiles stage the gradients."""
    store_rows(pointers.dk, work.dk_stride, token, real, dk * work.scale, k)
    store_rows(pointers.dv, work.dv_stride, token, real, dv, v)


@gluon.jit
def _allocate(q_descriptor, do_descriptor, k_descriptor, v_descriptor, STAGES: gl.constexpr, WINDOWED: gl.constexpr):
    """Allocate the shared memory of a program and initialise its barriers."""
    QUERIES: gl.constexpr = q_descriptor.block_type.shape[0]
    D: gl.constexpr = q_descriptor.block_type.shape[1]
    # [128, D] each
    k_tile = gl.allocate_shared_memory(k_descriptor.dtype, [128, D], k_descriptor.layout)
    v_tile = gl.allocate_shared_memory(v_descriptor.dtype, [128, D], v_descriptor.layout)
    block_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(block_full, count=1)
    # [STAGES, QUERIES, D]; 33 arrivals: 1 of the producer, and 32 of the lanes that copy numbers
    q_ring = ring(q_descriptor, QUERIES, STAGES, 33)
    do_ring = ring(do_descriptor, QUERIES, STAGES, 33)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # [STAGES, QUERIES]
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    if WINDOWED:
        start_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, QUERIES], plain)
    else:
        start_tiles = lse_tiles
    return _ProgramMemory(k_tile, v_tile, block_full, q_ring, do_ring, lse_tiles, delta_tiles, start_tiles)


@gluon.jit
def _share_of(shares, kv_heads):
    """Return row, key head and block of a program, where its range is, and the place of its sums."""
    # Heads vary fastest, as in one section of all heads.
    share = shares + gl.program_id(0) // kv_heads * 8
    return gl.load(share), gl.program_id(0) % kv_heads, gl.load(share + 1), share + 2, gl.load(share + 6)


@gluon.jit(do_not_specialize=["length", "blocks", "section"])
def key_kernel(
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
    dk_pointer,
    dk_strides,
    dv_pointer,
    dv_strides,
    dk_sums,
    dv_sums,
    ends,
    starts,
    key_granules,
    key_tiles,
    key_ranges,
    key_order,
    shares,
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
    WINDOWED: gl.constexpr,
):
    """Write the gradients dk and dv of 128 keys of one key head, or the sums of one share of these keys.

    Descriptors read QUERIES rows of q and do and one granule of k and v. The grid is the number of shares, or if
    WINDOWED batch * blocks, times kv_heads. The sums are [places, kv_heads, 128, D]. The other arguments are as in
    `forward_kernel`.
    """
    QUERIES: gl.constexpr = q_descriptor.block_type.shape[0]
    D: gl.constexpr = q_descriptor.block_type.shape[1]
    if WINDOWED:
        row, group, block = place(gl.program_id(0), section, batch, blocks, key_order)
        ranges = key_ranges + (row * blocks + block) * 4
        sums = row  # not read
    else:
        row, group, block, ranges, sums = _share_of(shares, kv_heads)
    first = gl.load(ranges)
    last = gl.load(ranges + 3)

    shared = _allocate(q_descriptor, do_descriptor, k_descriptor, v_descriptor, STAGES, WINDOWED)

    places = padded - origin
    of_head = (row.to(gl.int64) * kv_heads + group) * GROUP * places - origin
    of_sums = (sums.to(gl.int64) * kv_heads + group) * (128 * D)
    pointers = _ProgramPointers(
        ends + row * padded,
        starts + row * padded,
        key_granules + (row * blocks + block) * 4,
        key_tiles,
        lse_pointer + of_head,
        delta_pointer + of_head,
        dk_pointer + row.to(gl.int64) * dk_strides[0] + group * dk_strides[1],
        dv_pointer + row.to(gl.int64) * dv_strides[0] + group * dv_strides[1],
        dk_sums + of_sums,
        dv_sums + of_sums,
    )
    steps = (last - first) // (1 if WINDOWED else QUERIES) * GROUP
    full_begin = gl.load(ranges + 1)
    full_end = gl.load(ranges + 2)
    dk_stride, dv_stride = dk_strides[2], dv_strides[2]
    work = _KeyWork(
        steps, full_begin, full_end, last, length, origin, places, sums, dk_stride, dv_stride, factor, scale
    )
    k = matrix(k_descriptor, k_at, row, group, 0)
    v = matrix(v_descriptor, v_at, row, group, 0)
    sources = _ProducerSources(k, v, q_descriptor, do_descriptor, q_at, do_at, row, group)
    # The tuples are written here: in a tuple with a name, constants would become values of the run.
    gl.warp_specialize(
        [
            (_consume, (shared, pointers, work, GROUP, STAGES, WINDOWED, 0)),
            (_consume, (shared, pointers, work, GROUP, STAGES, WINDOWED, 64)),
            (_produce, (shared, sources, pointers, work, GROUP, STAGES, WINDOWED)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of a thread of each
    )
