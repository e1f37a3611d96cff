"""What the Hopper kernels share: which program does what, gathered loads, staged stores.

A program has three parts (`gl.warp_specialize`) that meet at barriers in shared memory:

    producer      1 warp       has the copy engine (TMA) fetch tiles, some stages ahead of their use
    consumers     2 x 4 warps  each multiplies 64 rows of the program's tile (wgmma) and never waits for the other,
                               so that one computes exponentials while the other keeps the matrix units busy

Around a ring of `STAGES` tiles, use i takes stage i % STAGES in phase (i // STAGES) & 1: the producer waits until
both consumers have emptied the stage, the consumers until its bytes have arrived.

Nothing multiplied may be in flight across the back edge of a loop, or ptxas serialises every product of the kernel
(C7510, C7512): each product is waited for in the iteration that issues it, and overlap across iterations comes from
carrying its operand in registers instead.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Triton 3.9 renamed both.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


class Matrix(NamedTuple):
    """One head of a tensor as the copy engine addresses it: a descriptor, and where token 0 lies under it."""

    descriptor: tma.tensor_descriptor
    row: gl.tensor
    column: gl.tensor


class Ring(NamedTuple):
    """Tiles in shared memory and, per stage, the barriers that say full and empty."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def matrix(descriptor, at, row, head, token):
    """The `Matrix` of one head, from the steps (batch, head, column) that `launch.descriptor` found."""
    return Matrix(descriptor, row * at[0] + head * at[1] + token, head * at[2])


@gluon.jit
def ring(descriptor, ROWS: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A ring of tiles of ROWS tokens; each stage is full after ARRIVALS arrivals and its bytes."""
    shape: gl.constexpr = [STAGES, ROWS, descriptor.block_type.shape[1]]
    tiles = gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    return Ring(tiles, full, empty)


@gluon.jit
def gather(source, granules, barrier, tile, COUNT: gl.constexpr):
    """Have COUNT granules of 32 tokens fetched into `tile`, one below the other; -1 fetches granule 0."""
    for i in gl.static_range(COUNT):
        token = gl.maximum(gl.load(granules + i), 0) * 32
        part = tile.slice(i * 32, 32, dim=0)
        fetch(source.descriptor, [source.row + token, source.column], barrier, part)


@gluon.jit
def feed(k, v, k_ring, v_ring, granules, tiles, STAGES: gl.constexpr):
    """Fill the rings with the tiles of a list of granules, keys before values, as stages become empty."""
    GRANULES: gl.constexpr = k_ring.tiles.shape[1] // 32
    for i in range(tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        for part in gl.static_range(2):
            source = k if part == 0 else v
            to = k_ring if part == 0 else v_ring
            mbarrier.wait(to.empty.index(stage), phase ^ 1)
            mbarrier.expect(to.full.index(stage), GRANULES * source.descriptor.block_type.nbytes)
            gather(source, granules + i * GRANULES, to.full.index(stage), to.tiles.index(stage), GRANULES)


@gluon.jit
def place(pid, section, batch, blocks, order):
    """Which row, head and block a program works on: sections of heads slowest, then blocks by work, then heads."""
    item = pid // section % (batch * blocks)
    head = pid // (section * batch * blocks) * section + pid % section
    row = item % batch
    return row, head, gl.load(order + row * blocks + item // batch)


@gluon.jit
def store_rows(pointer, stride, tokens, real, values, tile):
    """Write `values` [64, D] to rows `tokens` of a matrix where `real`, through `tile`, 16 bytes at a time."""
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row: gl.constexpr = gl.SliceLayout(1, layout)
    tile.store(values.to(tile.dtype))
    at = gl.convert_layout(tokens, row).to(gl.int64) * stride
    offsets = at[:, None] + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    gl.store(pointer + offsets, tile.load(layout), mask=gl.convert_layout(real, row)[:, None])
