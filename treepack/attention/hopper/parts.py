"""Heads in one or two parts: tiles, products and masks for the head dimensions 256, 192, 96 and 80.

Shapes in Gluon are powers of two, so the columns of most heads are divided into two parts, each with its own tiles:

    head dimension   256   192      128   96      80
    parts            256   128 64   128   64 32   64 16

Everything that has a head dimension is a tuple of one or two parts: the sources of copies, tiles in shared memory, and
accumulators in registers. The parts of a tile share its barriers. A product over the head dimension adds up its parts;
a product that results in the head dimension is one product per part.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from treepack.attention.hopper.tiles import HeadMatrix, TileRing, copy, fetch, is_seen, matrix, read_keys, store_rows


@gluon.jit
def sources(first, second, at, row, head, token):
    """Return the `HeadMatrix` of each part of one head at `token`, from the steps of `matrices.as_matrix`."""
    whole = matrix(first, at, row, head, token)
    if second is None:
        return (whole,)
    else:
        # parts 128 64 of head 2, 192 columns apart -> columns 384 and 512
        return (whole, HeadMatrix(second, whole.row, whole.column + first.block_type.shape[1]))


@gluon.jit
def tiles_of(first, second, ROWS: gl.constexpr):
    """Allocate a tile [ROWS, D] for each part."""
    tile = gl.allocate_shared_memory(first.dtype, [ROWS, first.block_type.shape[1]], first.layout)
    if second is None:
        return (tile,)
    else:
        return (tile, gl.allocate_shared_memory(second.dtype, [ROWS, second.block_type.shape[1]], second.layout))


@gluon.jit
def ring_of(first, second, ROWS: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate a ring of tiles of ROWS tokens; a stage is full after ARRIVALS arrivals and all bytes of its parts."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)  # both consumers
    # [STAGES, ROWS, D]
    tiles = gl.allocate_shared_memory(first.dtype, [STAGES, ROWS, first.block_type.shape[1]], first.layout)
    if second is None:
        return TileRing((tiles,), full, empty)
    else:
        rest = gl.allocate_shared_memory(second.dtype, [STAGES, ROWS, second.block_type.shape[1]], second.layout)
        return TileRing((tiles, rest), full, empty)


@gluon.jit
def stage_of(tiles, stage):
    """Return the tile of one stage, all of its parts."""
    if len(tiles) == 1:
        return (tiles[0].index(stage),)
    else:
        return (tiles[0].index(stage), tiles[1].index(stage))


@gluon.jit
def rows_of_parts(tile, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT rows of a tile, all of its parts."""
    if len(tile) == 1:
        return (tile[0].slice(FIRST, COUNT, dim=0),)
    else:
        return (tile[0].slice(FIRST, COUNT, dim=0), tile[1].slice(FIRST, COUNT, dim=0))


@gluon.jit
def zeros_of(like, ROWS: gl.constexpr):
    """Return accumulators of zeros, [ROWS, D] for each part of the tile `like`."""
    first = _zeros(like[0], ROWS)
    if len(like) == 1:
        return (first,)
    else:
        return (first, _zeros(like[1], ROWS))


@gluon.jit
def _zeros(like, ROWS: gl.constexpr):
    D: gl.constexpr = like.shape[1]
    return gl.zeros((ROWS, D), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))


@gluon.jit
def copy_tile(source, token, barrier, tile):
    """Start the copies of one tile from `token` on; the barrier must expect `bytes_of` the source."""
    for i in gl.static_range(len(tile)):
        fetch(source[i].descriptor, [source[i].row + token, source[i].column], barrier, tile[i])


@gluon.jit
def gather_tile(source, granules, barrier, tile, COUNT: gl.constexpr):
    """Start the copies of COUNT granules of 32 tokens into the rows of a tile; granule -1 fetches granule 0."""
    for i in gl.static_range(COUNT):
        token = gl.maximum(gl.load(granules + i), 0) * 32
        copy_tile(source, token, barrier, rows_of_parts(tile, i * 32, 32))


@gluon.jit
def expect(barrier, source, COPIES: gl.constexpr):
    """Arrive at the barrier, which then waits for the bytes of COPIES boxes of all parts of the source."""
    if len(source) == 1:
        mbarrier.expect(barrier, COPIES * source[0].descriptor.block_type.nbytes)
    else:
        mbarrier.expect(
            barrier, COPIES * (source[0].descriptor.block_type.nbytes + source[1].descriptor.block_type.nbytes)
        )


@gluon.jit
def feed_tiles(k, v, k_ring, v_ring, granules, tiles, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr):
    """Fill the rings with the tiles of a list of granules, keys before values, when stages become empty."""
    for i in range(tiles):
        _feed_tile(k, k_ring, granules, i, K_STAGES)
        _feed_tile(v, v_ring, granules, i, V_STAGES)


@gluon.jit
def _feed_tile(source, ring, granules, i, STAGES: gl.constexpr):
    GRANULES: gl.constexpr = ring.tiles[0].shape[1] // 32
    stage = i % STAGES
    mbarrier.wait(ring.empty.index(stage), ((i // STAGES) & 1) ^ 1)  # passes at once in the first round
    expect(ring.full.index(stage), source, GRANULES)
    gather_tile(source, granules + i * GRANULES, ring.full.index(stage), stage_of(ring.tiles, stage), GRANULES)


@gluon.jit
def send(source, ring, stage, phase, numbers, pointers):
    """Copy a tile into a stage, and one number per row by the 32 lanes, whose arrivals the barrier counts."""
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    copy(numbers, pointers)
    async_copy.mbarrier_arrive(full, increment_count=False)
    expect(full, source, 1)
    copy_tile(source, 0, full, stage_of(ring.tiles, stage))


@gluon.jit
def inner(a, b, start, USE_START: gl.constexpr):
    """Start the product of two tiles [M, D] and [N, D] over D, one after another part, added to `start` [M, N]."""
    # [M, D] @ [D, N] -> [M, N]
    result = warpgroup_mma(a[0], b[0].permute((1, 0)), start, use_acc=USE_START, is_async=True)
    if len(a) == 1:
        return result
    else:
        return warpgroup_mma(a[1], b[1].permute((1, 0)), result, is_async=True)


@gluon.jit
def outer_product(a, b, to):
    """Start the products of a [M, N], in registers, and a tile b [N, D], added to the accumulators `to` [M, D]."""
    # [M, N] @ [N, D] -> [M, D]
    layout: gl.constexpr = gl.DotOperandLayout(0, to[0].type.layout, 2)
    first = warpgroup_mma(gl.convert_layout(a, layout), b[0], to[0], is_async=True)
    if len(to) == 1:
        return (first,)
    else:
        rest: gl.constexpr = gl.DotOperandLayout(0, to[1].type.layout, 2)
        return (first, warpgroup_mma(gl.convert_layout(a, rest), b[1], to[1], is_async=True))


@gluon.jit
def finish_tile(product, PENDING: gl.constexpr):
    """Return the accumulators of `outer_product` after all products but the last PENDING ones."""
    if len(product) == 1:
        return (warpgroup_mma_wait(PENDING, deps=(product[0],)),)
    else:
        first, second = warpgroup_mma_wait(PENDING, deps=(product[0], product[1]))
        return (first, second)


@gluon.jit
def scaled(values, factor):
    """Return each part [M, D] times `factor` [M], in any layout."""
    layout: gl.constexpr = gl.SliceLayout(1, values[0].type.layout)
    first = values[0] * gl.convert_layout(factor, layout)[:, None]
    if len(values) == 1:
        return (first,)
    else:
        rest: gl.constexpr = gl.SliceLayout(1, values[1].type.layout)
        return (first, values[1] * gl.convert_layout(factor, rest)[:, None])


@gluon.jit
def zeros_unless(condition, values):
    """Return each part [M, D] if `condition`, a number of the program, is true, and zeros otherwise."""
    first = gl.where(condition, values[0], 0.0)
    if len(values) == 1:
        return (first,)
    else:
        return (first, gl.where(condition, values[1], 0.0))


@gluon.jit
def visible(granules, ends, query, start, columns, WINDOWED: gl.constexpr):
    """Return the mask [64, KEYS] of queries, [64] with the first token that each sees, and the keys of granules."""
    # [KEYS]
    _, key, end = read_keys(granules, ends, columns)
    # [64, 1] and [1, KEYS] -> [64, KEYS]
    return is_seen(query[:, None], start[:, None], key[None, :], end[None, :], WINDOWED)


@gluon.jit
def store_parts(pointer, stride, tokens, real, values, tile):
    """Write the parts of `values` [64, D] to the rows `tokens` that are `real`, both [64], by way of `tile`."""
    store_rows(pointer, stride, tokens, real, values[0], tile[0])
    if len(values) == 2:
        store_rows(pointer + values[0].shape[1], stride, tokens, real, values[1], tile[1])
