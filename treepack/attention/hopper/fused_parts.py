"""Shared memory, pointers and the producer of `fused_backward`.

The producer is that of `key_backward`, with the query tiles of one band. Heads of 64 get a second copy of the keys, in
two halves of 32 columns, because a swizzled row of a tile can only be cut at a multiple of 64 columns.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from treepack.attention.hopper.tiles import Matrix, Ring, copy, fetch, gather, matrix, ring


class Shared(NamedTuple):
    """Shared memory of a program.

    k, v         [128, D], its keys and values, full at block_full
    halves       the columns of k in two halves [128, D / 2]: views of k, or tiles of their own
    q, do        rings of queries and output gradients [QUERIES, D]
    lse, delta   [STAGES, QUERIES]; lse arrives with the queries, delta with the output gradients
    ds           ring of dS' [128 keys, QUERIES], from both consumers to both
    dq           ring of 2 x [QUERIES, D / 2] in float32, from each consumer to the writer
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    halves: gl.shared_memory_descriptor
    block_full: gl.shared_memory_descriptor
    q: Ring
    do: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: Ring
    dq: Ring


class Sources(NamedTuple):
    """Sources of the producer; queries and output gradients come from many heads and tokens."""

    k: Matrix
    v: Matrix
    halves: Matrix
    q: tma.tensor_descriptor
    do: tma.tensor_descriptor
    q_at: gl.tuple
    do_at: gl.tuple
    row: gl.tensor
    group: gl.tensor


class Pointers(NamedTuple):
    """Pointers into global memory.

    ends            [T_pad] of the row
    granules        [4] of the key block
    turns           [band] of the piece
    lse, delta      [GROUP, places] of the group, moved back by `origin` places
    flags           [GROUP, tiles] of the group: pieces that have added to dq of a query tile
    key_flags       [2] of the key block and head: pieces that have added to dk and dv, for each consumer
    dk, dv          [T_pad, D] of the key head, float32
    """

    ends: gl.tensor
    granules: gl.tensor
    turns: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    flags: gl.tensor
    key_flags: gl.tensor
    dk: gl.tensor
    dv: gl.tensor


class FusedWork(NamedTuple):
    """Steps (query tiles of the piece times heads of the group), and the numbers that the parts read.

    last, full_begin, full_end, origin, places    as in `key_backward.KeyWork`
    piece    pieces of this key block that add to dk and dv before
    dq_row   row of the dq matrix that token 0 of the group's first head would have
    tiles    query tiles of the row, from token 0 on
    """

    steps: gl.tensor
    last: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    piece: gl.tensor
    length: gl.tensor
    origin: gl.tensor
    places: gl.tensor
    dq_row: gl.tensor
    tiles: gl.tensor
    factor: gl.tensor


@gluon.jit
def query_of(step, work, QUERIES: gl.constexpr, GROUP: gl.constexpr):
    """Return the first query of a step."""
    # GROUP 2, QUERIES 64, last 512: step 0 1 2 3 4 ... -> query 448 448 384 384 320 ..., head 0 1 0 1 0 ...
    return work.last - (step // GROUP + 1) * QUERIES


@gluon.jit
def produce(shared, sources, pointers, work, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """Copy the keys and values, then the queries and output gradients of each step when a stage becomes empty."""
    QUERIES: gl.constexpr = shared.q.tiles.shape[1]
    D: gl.constexpr = shared.k.shape[1]
    mbarrier.expect(
        shared.block_full, 4 * (sources.k.descriptor.block_type.nbytes + sources.v.descriptor.block_type.nbytes)
    )
    # [128, D] each
    gather(sources.k, pointers.granules, shared.block_full, shared.k, 4)
    gather(sources.v, pointers.granules, shared.block_full, shared.v, 4)
    # A second arrival for the halves; heads of 128 have views of k, and expect no bytes.
    if D == 128:
        mbarrier.arrive(shared.block_full, count=1)
    else:
        mbarrier.expect(shared.block_full, 8 * sources.halves.descriptor.block_type.nbytes)
        for half in gl.static_range(2):
            columns = Matrix(sources.halves.descriptor, sources.halves.row, sources.halves.column + half * (D // 2))
            gather(columns, pointers.granules, shared.block_full, shared.halves.index(half), 4)
    # [QUERIES]
    lanes = gl.arange(0, QUERIES, gl.BlockedLayout([QUERIES // 32], [32], [1], [0]))
    for step in range(work.steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        query = query_of(step, work, QUERIES, GROUP)
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
            async_copy.mbarrier_arrive(full, increment_count=False)
            mbarrier.expect(full, descriptor.block_type.nbytes)
            # [QUERIES, D]
            fetch(descriptor, [source.row, source.column], full, ring_to.tiles.index(stage))


@gluon.jit
def _ring_between(tiles, STAGES: gl.constexpr, TO: gl.constexpr):
    """Return the ring of tiles that both consumers fill and TO parts of the program empty."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=TO)
    return Ring(tiles, full, empty)


@gluon.jit
def allocate(
    q_descriptor,
    do_descriptor,
    k_descriptor,
    v_descriptor,
    halves_descriptor,
    dq_descriptor,
    STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr,
    DQ_STAGES: gl.constexpr,
):
    """Allocate the shared memory of a program and initialise its barriers."""
    QUERIES: gl.constexpr = q_descriptor.block_type.shape[0]
    D: gl.constexpr = q_descriptor.block_type.shape[1]
    # [128, D] each
    k_tile = gl.allocate_shared_memory(k_descriptor.dtype, [128, D], k_descriptor.layout)
    v_tile = gl.allocate_shared_memory(v_descriptor.dtype, [128, D], v_descriptor.layout)
    if D == 128:
        halves = k_tile
    else:
        # [2, 128, D / 2]
        halves = gl.allocate_shared_memory(k_descriptor.dtype, [2, 128, D // 2], halves_descriptor.layout)
    block_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(block_full, count=2)
    # [STAGES, QUERIES, D]; 33 arrivals: 1 of the producer, and 32 of the lanes that copy numbers
    q_ring = ring(q_descriptor, QUERIES, STAGES, 33)
    do_ring = ring(do_descriptor, QUERIES, STAGES, 33)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # [STAGES, QUERIES]
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # [DS_STAGES, 128, QUERIES]
    ds_tiles = gl.allocate_shared_memory(k_descriptor.dtype, [DS_STAGES, 128, QUERIES], ds_layout)
    # [DQ_STAGES * 2, QUERIES, D / 2]
    dq_shape: gl.constexpr = [DQ_STAGES * 2, QUERIES, D // 2]
    dq_tiles = gl.allocate_shared_memory(gl.float32, dq_shape, dq_descriptor.layout)
    ds_ring = _ring_between(ds_tiles, DS_STAGES, 2)
    dq_ring = _ring_between(dq_tiles, DQ_STAGES, 1)
    return Shared(k_tile, v_tile, halves, block_full, q_ring, do_ring, lse_tiles, delta_tiles, ds_ring, dq_ring)
