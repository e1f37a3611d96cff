"""Gradients of queries, keys and values on Hopper with stored gradients of the scores (see `stored_parts`).

    key item      S' = K Q' - lse    dP' = V dO' - delta    P' = 2**S'    dS' = P' dP'    of 64 keys, in each consumer
                  dv += P' dO        dk += dS' Q                                          in registers, over all queries
                  dS' --> global memory, a tile [128 keys, 64 queries] at a time
    query item    dq += dS K         of one query tile and one or two heads, in each consumer, over all entries

The products of a key item are those of `key_backward`. Sums of a key block with pieces in several bands wait in float32
in global memory for the next band.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from treepack.attention.hopper.ordered import fence_copies, raise_flag, wait_for, wait_for_copies, write
from treepack.attention.hopper.stored_parts import (
    KEY_ITEM,
    NO_ITEM,
    Pointers,
    Sources,
    Work,
    allocate,
    produce,
    receive,
)
from treepack.attention.hopper.tiles import rows_of_queries, store_rows


@gluon.jit
def _sums_at(place, D: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr):
    """Return the offsets [64, D] of the sums at a place, of one consumer."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = gl.arange(0, D, gl.SliceLayout(0, layout))
    # [64, 1] + [1, D] -> [64, D]
    return (place.to(gl.int64) * 128 + HALF * 64) * D + (rows[:, None] * D + columns[None, :])


@gluon.jit
def _key_item(
    shared,
    ds_descriptor,
    pointers,
    work,
    item,
    filled,
    done,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
):
    """Compute a key item; return its steps."""
    QUERIES: gl.constexpr = shared.q.tiles.shape[1]
    D: gl.constexpr = shared.q.tiles.shape[2]
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    # [64, QUERIES]
    zeros = gl.zeros((64, QUERIES), gl.float32, s_layout)
    # exp2((k q' - lse / factor) * factor) = exp2(k q' * factor - lse)
    inverse = -1.0 / work.factor

    piece = pointers.pieces + item.index * 10
    row = gl.load(piece)
    block = row * work.blocks + gl.load(piece + 1)
    last = gl.load(piece + 3)
    tiles = (last - gl.load(piece + 2)) // QUERIES
    full_begin = gl.load(piece + 4)
    full_end = gl.load(piece + 5)
    earlier = gl.load(piece + 6)
    # The tile of the last query tile; earlier queries have the tiles before it.
    last_tile = item.tile + gl.load(piece + 9) + tiles - 1
    # [64]; key is negative and end is 0 for granule -1
    rows = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    granule = gl.load(pointers.granules + block * 4 + rows // 32)
    key = granule * 32 + rows % 32
    end = gl.load(pointers.ends + row * work.padded + key, mask=granule >= 0, other=0)
    # [64, D]
    dk = gl.zeros((64, D), gl.float32, d_layout)
    dv = gl.zeros((64, D), gl.float32, d_layout)
    if earlier > 0:
        place = gl.load(piece + 8) * work.kv_heads + item.head
        wait_for(pointers.sums_done + place * 2 + HALF, earlier)
        dk = gl.load(pointers.dk_sums + _sums_at(place, D, HALF, d_layout))
        dv = gl.load(pointers.dv_sums + _sums_at(place, D, HALF, d_layout))
    slot = filled % 2
    # [64, D] of [128, D]
    k = shared.k.index(slot).slice(HALF * 64, 64, dim=0)
    v = shared.v.index(slot).slice(HALF * 64, 64, dim=0)
    mbarrier.wait(shared.filled.full.index(slot), (filled // 2) & 1)
    for step in range(tiles * GROUP):
        stage = (done + step) % STAGES
        phase = ((done + step) // STAGES) & 1
        first = last - (step // GROUP + 1) * QUERIES
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
        if (first < full_begin) | (first >= full_end):
            # [QUERIES]
            query = first + gl.arange(0, QUERIES, column)
            # [64, 1] and [1, QUERIES] -> [64, QUERIES]
            p = gl.where((key[:, None] <= query[None, :]) & (query[None, :] < end[:, None]), p, 0.0)
        # [64, QUERIES] @ [QUERIES, D] -> [64, D]
        dv_product = warpgroup_mma(gl.convert_layout(p.to(dtype), p_layout), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp_product,))
        # [64, QUERIES]
        ds = (p * dp).to(dtype)
        # [64, QUERIES] @ [QUERIES, D] -> [64, D]
        dk_product = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk, is_async=True)
        # [64, QUERIES], registers -> shared memory -> global memory; the copy before last has left this tile
        tile = shared.ds.index(HALF * 2 + step % 2)
        tile.store(ds)
        fence_async_shared()
        at = (last_tile + step % GROUP * item.per_head - step // GROUP) * 128 + HALF * 64
        write(ds_descriptor, [at, 0], tile)
        tma.store_wait(1)
        dv = warpgroup_mma_wait(1, deps=(dv_product,))
        mbarrier.arrive(shared.do.empty.index(stage), count=1)
        dk = warpgroup_mma_wait(0, deps=(dk_product,))
        mbarrier.arrive(shared.q.empty.index(stage), count=1)

    wait_for_copies()
    fence_copies(4)
    raise_flag(pointers.key_done + item.section)
    if gl.load(piece + 7) > 0:
        place = gl.load(piece + 8) * work.kv_heads + item.head
        gl.store(pointers.dk_sums + _sums_at(place, D, HALF, d_layout), dk)
        gl.store(pointers.dv_sums + _sums_at(place, D, HALF, d_layout), dv)
        raise_flag(pointers.sums_done + place * 2 + HALF)
    else:
        last_row: gl.constexpr = gl.SliceLayout(1, d_layout)
        # [64]
        token = gl.convert_layout(key, last_row)
        real = gl.convert_layout((granule >= 0) & (key < work.length), last_row)
        # [64, D]; the keys and values are no longer needed, so their tiles stage the gradients
        dk_pointer, dk_strides = pointers.dk
        dv_pointer, dv_strides = pointers.dv
        of_dk = row.to(gl.int64) * dk_strides[0] + item.head * dk_strides[1]
        of_dv = row.to(gl.int64) * dv_strides[0] + item.head * dv_strides[1]
        store_rows(dk_pointer + of_dk, dk_strides[2], token, real, dk * work.scale, k)
        store_rows(dv_pointer + of_dv, dv_strides[2], token, real, dv, v)
        # The copy engine writes to the tiles next.
        fence_async_shared()
    mbarrier.arrive(shared.filled.empty.index(slot), count=1)
    return tiles * GROUP


@gluon.jit
def _query_item(
    shared,
    pointers,
    work,
    item,
    filled,
    done,
    GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
):
    """Compute a query item; return its entries."""
    HEADS: gl.constexpr = GROUP // CHUNKS
    D: gl.constexpr = shared.q.tiles.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    count = gl.load(pointers.entry_offsets + item.index + 1) - gl.load(pointers.entry_offsets + item.index)
    # [64, D], of the last head; and of the head before, which is not used if there is one head
    dq = gl.zeros((64, D), gl.float32, layout)
    dq_before = gl.zeros((64, D), gl.float32, layout)
    for i in range(count):
        slot = (filled + i) % 2
        stage = (done + i) % STAGES
        phase = ((done + i) // STAGES) & 1
        # [128, D]
        k = shared.k.index(slot)
        mbarrier.wait(shared.filled.full.index(slot), ((filled + i) // 2) & 1)
        if HEADS == 2:
            # [128, 64] -> [64, 128] @ [128, D] -> [64, D]
            ds = shared.v.index(slot).slice(HALF * 64, 64, dim=1).permute((1, 0))
            before_product = warpgroup_mma(ds, k, dq_before, is_async=True)
        # Both, because this consumer empties both.
        mbarrier.wait(shared.q.full.index(stage), phase)
        mbarrier.wait(shared.do.full.index(stage), phase)
        of_tile = (shared.q if HALF == 0 else shared.do).tiles.index(stage)
        # [64, 64] -> [64, 64] @ [64, D] -> [64, D], of 64 keys and then of the others
        product = warpgroup_mma(of_tile.slice(0, 64, dim=1).permute((1, 0)), k.slice(0, 64, dim=0), dq, is_async=True)
        product = warpgroup_mma(
            of_tile.slice(64, 64, dim=1).permute((1, 0)), k.slice(64, 64, dim=0), product, is_async=True
        )
        if HEADS == 2:
            dq_before, dq = warpgroup_mma_wait(0, deps=(before_product, product))
        else:
            dq = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(shared.filled.empty.index(slot), count=1)
        # The last stage stays, to stage the results.
        more = i + 1 < count
        mbarrier.arrive(shared.q.empty.index(stage), count=1, pred=more)
        mbarrier.arrive(shared.do.empty.index(stage), count=1, pred=more)
    raise_flag(pointers.query_done + item.section)

    # [64]
    first = work.origin + item.index % work.row_blocks * 128 + HALF * 64
    query = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    real = query < work.length
    dq_pointer, dq_strides = pointers.dq
    stage = (done + count - 1) % STAGES
    # [64, D]
    staging = (shared.q if HALF == 0 else shared.do).tiles.index(stage)
    head = item.head * GROUP + item.chunk * HEADS
    at = rows_of_queries(dq_pointer, dq_strides, item.index // work.row_blocks, head, work.origin)
    if HEADS == 2:
        store_rows(at, dq_strides[2], query, real, dq_before * work.scale, staging)
    store_rows(at + (HEADS - 1) * dq_strides[1], dq_strides[2], query, real, dq * work.scale, staging)
    # The copy engine writes to the tile next.
    fence_async_shared()
    mbarrier.arrive(shared.q.empty.index(stage), count=1)
    mbarrier.arrive(shared.do.empty.index(stage), count=1)
    return count


@gluon.jit
def _consume(
    shared,
    ds_descriptor,
    pointers,
    work,
    GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    HALF: gl.constexpr,
):
    turn = 0
    filled = 0
    done = 0
    item = receive(shared, turn)
    while item.kind != NO_ITEM:
        if item.kind == KEY_ITEM:
            done += _key_item(shared, ds_descriptor, pointers, work, item, filled, done, GROUP, STAGES, HALF)
            filled += 1
        else:
            uses = _query_item(shared, pointers, work, item, filled, done, GROUP, CHUNKS, STAGES, HALF)
            done += uses
            filled += uses
        turn += 1
        item = receive(shared, turn)


@gluon.jit(do_not_specialize=["length", "blocks", "items", "sections", "heads", "row_blocks", "all_blocks"])
def stored_kernel(
    q_descriptor,
    do_descriptor,
    k_descriptor,
    v_descriptor,
    ds_descriptor,
    q_at,
    do_at,
    k_at,
    v_at,
    lse_pointer,
    delta_pointer,
    dk_sums,
    dv_sums,
    dq_pointer,
    dq_strides,
    dk_pointer,
    dk_strides,
    dv_pointer,
    dv_strides,
    counter,
    key_done,
    query_done,
    sums_done,
    ends,
    key_granules,
    pieces,
    entries,
    entry_offsets,
    table,
    items,
    sections,
    heads,
    band_blocks,
    row_blocks,
    all_blocks,
    section_tiles,
    kv_heads,
    blocks,
    length,
    padded,
    origin,
    factor,
    scale,
    GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Write dq, dk and dv; any number of programs share the work.

    Descriptors read QUERIES rows of q and do, one granule of k and v, and 64 keys of a tile of dS. Tile 0 of dS has
    zeros, and so have counter, key_done, query_done and sums_done. See `Pointers` and `Work`.
    """
    shared = allocate(q_descriptor, do_descriptor, k_descriptor, v_descriptor, ds_descriptor, STAGES)
    pointers = Pointers(
        counter,
        key_done,
        query_done,
        sums_done,
        pieces,
        entries,
        entry_offsets,
        table,
        ends,
        key_granules,
        lse_pointer,
        delta_pointer,
        dk_sums,
        dv_sums,
        (dq_pointer, dq_strides),
        (dk_pointer, dk_strides),
        (dv_pointer, dv_strides),
    )
    work = Work(
        items,
        sections,
        heads,
        band_blocks,
        row_blocks,
        all_blocks,
        section_tiles,
        kv_heads,
        blocks,
        length,
        padded,
        origin,
        factor,
        scale,
    )
    sources = Sources(k_descriptor, v_descriptor, q_descriptor, do_descriptor, ds_descriptor, k_at, v_at, q_at, do_at)
    # The tuples are written here: in a tuple with a name, constants would become values of the run.
    gl.warp_specialize(
        [
            (_consume, (shared, ds_descriptor, pointers, work, GROUP, CHUNKS, STAGES, 0)),
            (_consume, (shared, ds_descriptor, pointers, work, GROUP, CHUNKS, STAGES, 1)),
            (produce, (shared, sources, pointers, work, GROUP, CHUNKS, STAGES)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # registers of a thread of each
    )
