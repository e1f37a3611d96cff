"""All gradients on Hopper in one pass: one program for 128 gathered keys and the queries of one band (`bands`).

    S' = K Q' - lse    dP' = V dO' - delta    P' = 2**S'    dS' = P' dP'       of 64 keys, in each consumer
    dv += P' dO        dk += dS' Q                                             in registers, over all queries
    dS  -- through shared memory, from both consumers -->  dS K                of 128 keys, half of the columns each
    dS K  -- shared memory, writer -->  dq in global memory                    when it is the turn of this program

The products are those of `key_backward` and one more. dS K of a step is computed in the next step, so a consumer rarely
waits for the other one. Its sum over key blocks is kept in float32 in global memory: the writer, a warp of its own,
waits until the flag of the query tile shows the turn of the program, adds with the copy engine, and raises the flag.
The gradients of the keys are added in the same way, at the end, if a key block has several pieces.

Programs draw their number from a counter, so they start in the order of their numbers on every GPU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from treepack.attention.hopper.fused_parts import FusedWork, Pointers, Sources, allocate, produce, query_of
from treepack.attention.hopper.ordered import add, lower, turn, wait_for_turn, wait_for_writes
from treepack.attention.hopper.tiles import Matrix, matrix


@gluon.jit
def _half_of_keys(shared, HALF: gl.constexpr):
    """Return the columns HALF of the keys, [128, D / 2]."""
    D: gl.constexpr = shared.k.shape[1]
    # Swizzled rows have 64 columns, so only heads of 128 can be cut within one tile.
    if D == 128:
        return shared.k.slice(HALF * 64, 64, dim=1)
    else:
        return shared.halves.index(HALF)


@gluon.jit
def _send(shared, values, step, HALF: gl.constexpr):
    """Give dS K of a step, columns HALF, to the writer."""
    DQ_STAGES: gl.constexpr = shared.dq.tiles.shape[0] // 2
    stage = step % DQ_STAGES
    mbarrier.wait(shared.dq.empty.index(stage), ((step // DQ_STAGES) & 1) ^ 1)
    # [QUERIES, D / 2], registers -> shared memory
    shared.dq.tiles.index(stage * 2 + HALF).store(values)
    fence_async_shared()
    mbarrier.arrive(shared.dq.full.index(stage), count=1)


@gluon.jit
def _consume(shared, pointers, work, GROUP: gl.constexpr, STAGES: gl.constexpr, DQ: gl.constexpr, HALF: gl.constexpr):
    QUERIES: gl.constexpr = shared.q.tiles.shape[1]
    D: gl.constexpr = shared.q.tiles.shape[2]
    DS_STAGES: gl.constexpr = shared.ds.tiles.shape[0]
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)

    # [64]; key is negative and end is 0 for granule -1
    rows = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    granule = gl.load(pointers.granules + rows // 32)
    key = granule * 32 + rows % 32
    end = gl.load(pointers.ends + key, mask=granule >= 0, other=0)
    # [64, QUERIES]
    zeros = gl.zeros((64, QUERIES), gl.float32, s_layout)
    # [QUERIES, D / 2]
    dq_zeros = gl.zeros((QUERIES, D // 2), gl.float32, dq_layout)
    # exp2((k q' - lse / factor) * factor) = exp2(k q' * factor - lse)
    inverse = -1.0 / work.factor
    # [64, D] of [128, D]
    k = shared.k.slice(HALF * 64, 64, dim=0)
    v = shared.v.slice(HALF * 64, 64, dim=0)
    k_half = _half_of_keys(shared, HALF)
    # [64, D]
    dk = gl.zeros((64, D), gl.float32, d_layout)
    dv = gl.zeros((64, D), gl.float32, d_layout)
    mbarrier.wait(shared.block_full, 0)
    for step in range(work.steps):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        ds_stage = step % DS_STAGES
        # In the first step this is the same step, and the product is not used.
        before = gl.maximum(step - 1, 0)
        first = query_of(step, work, QUERIES, GROUP)
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
        if (first < work.full_begin) | (first >= work.full_end):
            # [QUERIES]
            query = first + gl.arange(0, QUERIES, column)
            # [64, 1] and [1, QUERIES] -> [64, QUERIES]
            p = gl.where((key[:, None] <= query[None, :]) & (query[None, :] < end[:, None]), p, 0.0)
        # [64, QUERIES] @ [QUERIES, D] -> [64, D]
        dv_product = warpgroup_mma(gl.convert_layout(p.to(dtype), p_layout), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp_product,))
        # [64, QUERIES]
        ds = (p * dp).to(dtype)
        if DQ:
            mbarrier.wait(shared.ds.empty.index(ds_stage), ((step // DS_STAGES) & 1) ^ 1)
            shared.ds.tiles.index(ds_stage).slice(HALF * 64, 64, dim=0).store(ds)
            fence_async_shared()
            mbarrier.arrive(shared.ds.full.index(ds_stage), count=1)
        # [64, QUERIES] @ [QUERIES, D] -> [64, D]
        dk_product = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk, is_async=True)
        if DQ:
            mbarrier.wait(shared.ds.full.index(before % DS_STAGES), (before // DS_STAGES) & 1)
            # [QUERIES, 128] @ [128, D / 2] -> [QUERIES, D / 2], the step before
            ds_before = shared.ds.tiles.index(before % DS_STAGES).permute((1, 0))
            dq_product = warpgroup_mma(ds_before, k_half, dq_zeros, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(1 + DQ, deps=(dv_product,))
        mbarrier.arrive(shared.do.empty.index(stage), count=1)
        dk = warpgroup_mma_wait(0 + DQ, deps=(dk_product,))
        mbarrier.arrive(shared.q.empty.index(stage), count=1)
        if DQ:
            dq = warpgroup_mma_wait(0, deps=(dq_product,))
            mbarrier.arrive(shared.ds.empty.index(before % DS_STAGES), count=1, pred=step > 0)
            if step > 0:
                _send(shared, dq, before, HALF)
    if DQ and work.steps > 0:
        last = work.steps - 1
        mbarrier.wait(shared.ds.full.index(last % DS_STAGES), (last // DS_STAGES) & 1)
        # [QUERIES, 128] @ [128, D / 2] -> [QUERIES, D / 2], the last step
        ds_before = shared.ds.tiles.index(last % DS_STAGES).permute((1, 0))
        dq = warpgroup_mma(ds_before, k_half, dq_zeros, use_acc=False)
        _send(shared, dq, last, HALF)

    # [64]
    row: gl.constexpr = gl.SliceLayout(1, d_layout)
    token = gl.convert_layout(key, row)
    real = gl.convert_layout((granule >= 0) & (key < work.length), row)
    flag = pointers.key_flags + HALF
    wait_for_turn(flag, work.piece)
    add(pointers.dk, token, real, dk, work.piece > 0)
    add(pointers.dv, token, real, dv, work.piece > 0)
    turn(flag)


@gluon.jit
def _write(shared, pointers, work, dq_descriptor, BAND: gl.constexpr, GROUP: gl.constexpr, DQ: gl.constexpr):
    """Add dS K of each step to dq when it is the turn of this program."""
    QUERIES: gl.constexpr = shared.q.tiles.shape[1]
    D: gl.constexpr = shared.q.tiles.shape[2]
    DQ_STAGES: gl.constexpr = shared.dq.tiles.shape[0] // 2
    for step in range(work.steps if DQ else 0):
        stage = step % DQ_STAGES
        query = query_of(step, work, QUERIES, GROUP)
        head = step % GROUP
        tile = query // QUERIES
        before = gl.load(pointers.turns + tile % BAND)
        flag = pointers.flags + head * work.tiles + tile
        mbarrier.wait(shared.dq.full.index(stage), (step // DQ_STAGES) & 1)
        wait_for_turn(flag, before)
        row = work.dq_row + head * work.places + query
        for half in gl.static_range(2):
            # [QUERIES, D / 2], shared memory -> global memory
            lower(dq_descriptor, [row, half * (D // 2)], shared.dq.tiles.index(stage * 2 + half), before > 0)
        wait_for_writes()
        mbarrier.arrive(shared.dq.empty.index(stage), count=1)
        turn(flag)


@gluon.jit(do_not_specialize=["length", "blocks", "tiles"])
def fused_kernel(
    q_descriptor,
    do_descriptor,
    k_descriptor,
    v_descriptor,
    halves_descriptor,
    dq_descriptor,
    q_at,
    do_at,
    k_at,
    v_at,
    lse_pointer,
    delta_pointer,
    dk_pointer,
    dv_pointer,
    counter,
    flags,
    key_flags,
    ends,
    key_granules,
    key_ranges,
    pieces,
    turns,
    length,
    origin,
    padded,
    kv_heads,
    blocks,
    tiles,
    factor,
    GROUP: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    DS_STAGES: gl.constexpr,
    DQ_STAGES: gl.constexpr,
    DQ: gl.constexpr,
):
    """Add to dq, dk and dv, float32, for one piece of a key block of one key head; the grid is pieces * kv_heads.

    Descriptors read QUERIES rows of q and do and one granule of k and v, also of its halves; that of dq has QUERIES
    rows of half the columns. counter, flags and key_flags begin with zeros. If not DQ, dq stays as
    it is, and nothing waits for turns at query tiles. All else is as in `key_kernel`.
    """
    QUERIES: gl.constexpr = q_descriptor.block_type.shape[0]
    # Heads vary fastest. Programs wait only for smaller numbers, and all smaller numbers are drawn before.
    number = gl.atomic_add(counter, 1)
    group = number % kv_heads
    item = number // kv_heads
    row = gl.load(pieces + item * 5)
    block = row * blocks + gl.load(pieces + item * 5 + 1)
    begin = gl.load(pieces + item * 5 + 2)
    last = gl.load(pieces + item * 5 + 3)
    piece = gl.load(pieces + item * 5 + 4)

    shared = allocate(
        q_descriptor,
        do_descriptor,
        k_descriptor,
        v_descriptor,
        halves_descriptor,
        dq_descriptor,
        STAGES,
        DS_STAGES,
        DQ_STAGES,
    )
    places = padded - origin
    heads_before = row * kv_heads + group
    of_head = heads_before.to(gl.int64) * GROUP * places - origin
    of_keys = heads_before.to(gl.int64) * padded * k_descriptor.block_type.shape[1]
    pointers = Pointers(
        ends + row * padded,
        key_granules + block * 4,
        turns + item.to(gl.int64) * BAND,
        lse_pointer + of_head,
        delta_pointer + of_head,
        flags + heads_before * GROUP * tiles,
        key_flags + (block * kv_heads + group) * 2,
        dk_pointer + of_keys,
        dv_pointer + of_keys,
    )
    steps = (last - begin) // QUERIES * GROUP
    full_begin = gl.load(key_ranges + block * 4 + 1)
    full_end = gl.load(key_ranges + block * 4 + 2)
    dq_row = heads_before * GROUP * places - origin
    work = FusedWork(steps, last, full_begin, full_end, piece, length, origin, places, dq_row, tiles, factor)
    k = matrix(k_descriptor, k_at, row, group, 0)
    v = matrix(v_descriptor, v_at, row, group, 0)
    halves = Matrix(halves_descriptor, k.row, k.column)
    sources = Sources(k, v, halves, q_descriptor, do_descriptor, q_at, do_at, row, group)
    # The tuples are written here: in a tuple with a name, constants would become values of the run.
    gl.warp_specialize(
        [
            (_consume, (shared, pointers, work, GROUP, STAGES, DQ, 0)),
            (_consume, (shared, pointers, work, GROUP, STAGES, DQ, 1)),
            (produce, (shared, sources, pointers, work, GROUP, STAGES)),
            (_write, (shared, pointers, work, dq_descriptor, BAND, GROUP, DQ)),
        ],
        [4, 1, 1],  # warps of the second consumer, the producer and the writer
        [240, 24, 24],  # registers of a thread of each
    )
