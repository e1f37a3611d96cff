"""Work, shared memory and the producer of `stored_backward`: one queue of items, which programs draw one after another.

    section       the pieces of one band and some key heads; sections of a band follow one another, band after band
    key item      one piece of one key head: dk, dv, and tiles of dS in the memory of the section
    query item    one query block of a few heads: reads the tiles of a section that is complete
    step          the key items of section `step`, mixed with the query items of section `step - LAG`

    steps          0       1       2                       3                       ...
    key items      a a a   b b b   c     c     c           d     d     d
    query items                          a         a             b           b     ...

The memory of dS has RING sections, so that of section s is free when the query items of section s - RING are done.
Items wait only for items before them in the queue, which other programs have drawn already. The earliest unfinished
item never waits, so nothing deadlocks, with any number of programs at a time.

Key items wait for products and query items for memory, so it helps that both kinds run at a time. In shared memory,
a query item uses the tiles of a key item:

    key item         k [128, D]    v [128, D]                    q [64, D]                     do [64, D]
    query item       k [128, D]    dS of 2 tiles, first head     dS of tile 0, second head     of tile 1
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from treepack.attention.hopper.ordered import fence_copies, wait_for
from treepack.attention.hopper.tiles import Ring, copy, fetch, gather, matrix, numbers_of, ring

LAG = gl.constexpr(2)
RING = gl.constexpr(3)
KEY_ITEM = gl.constexpr(0)
QUERY_ITEM = gl.constexpr(1)
NO_ITEM = gl.constexpr(2)


class Shared(NamedTuple):
    """Shared memory of a program.

    items        ring of [32] numbers, `Item`, from the producer to the consumers
    k, v         [2, 128, D], full and empty together
    filled       barriers of k and v
    q, do        rings of queries and output gradients [QUERIES, D]
    lse, delta   [STAGES, QUERIES]; lse arrives with the queries, delta with the output gradients
    ds           [4, 64, QUERIES], two tiles of each consumer on their way to global memory
    """

    items: Ring
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    filled: Ring
    q: Ring
    do: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor


class Sources(NamedTuple):
    """Matrices that the producer copies from."""

    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    q: tma.tensor_descriptor
    do: tma.tensor_descriptor
    ds: tma.tensor_descriptor
    k_at: gl.tuple
    v_at: gl.tuple
    q_at: gl.tuple
    do_at: gl.tuple


class Pointers(NamedTuple):
    """Pointers into global memory.

    counter               one number, items drawn
    key_done, query_done  [sections], parts of programs that have finished an item, two for each item
    sums_done             [num_sums, key heads, 2], pieces whose sums of 64 keys are complete
    pieces, entries, entry_offsets, table      of `Bands`
    ends                  [B, T_pad]
    granules              [B, nk, 4]
    lse, delta            [B, H, spots]
    dk_sums, dv_sums      [num_sums, key heads, 128, D], float32
    dq, dk, dv            the results, each with its strides
    """

    counter: gl.tensor
    key_done: gl.tensor
    query_done: gl.tensor
    sums_done: gl.tensor
    pieces: gl.tensor
    entries: gl.tensor
    entry_offsets: gl.tensor
    table: gl.tensor
    ends: gl.tensor
    granules: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    dk_sums: gl.tensor
    dv_sums: gl.tensor
    dq: gl.tuple
    dk: gl.tuple
    dv: gl.tuple


class Work(NamedTuple):
    """Numbers that the parts of a program read.

    items          all items
    sections       bands times kv_heads / heads
    heads          key heads of a section
    band_blocks    query blocks of a band but the last
    row_blocks     query blocks of a row; all_blocks of all rows
    section_tiles  tiles of dS of a section, at most
    kv_heads, blocks, length, padded, origin    as in `key_backward`; `spots` are padded - origin
    """

    items: gl.tensor
    sections: gl.tensor
    heads: gl.tensor
    band_blocks: gl.tensor
    row_blocks: gl.tensor
    all_blocks: gl.tensor
    section_tiles: gl.tensor
    kv_heads: gl.tensor
    blocks: gl.tensor
    length: gl.tensor
    padded: gl.tensor
    origin: gl.tensor
    factor: gl.tensor
    scale: gl.tensor


class Item(NamedTuple):
    """An item as the consumers get it.

    kind       KEY_ITEM, QUERY_ITEM or NO_ITEM
    index      the piece, or the query block
    head       the key head
    chunk      of the query heads of the key head; 0 for a key item
    section    its section
    tile       tile 1 of the first head of the item is at tile + 1
    per_head   tiles from one query head to the next
    """

    kind: gl.tensor
    index: gl.tensor
    head: gl.tensor
    chunk: gl.tensor
    section: gl.tensor
    tile: gl.tensor
    per_head: gl.tensor


@gluon.jit
def _key_items(pointers, work, section):
    """Return the number of key items of a section; 0 if there is no such section."""
    band = gl.minimum(section, work.sections - 1) // (work.kv_heads // work.heads)
    return gl.where(section < work.sections, gl.load(pointers.table + band * 3 + 1) * work.heads, 0)


@gluon.jit
def _query_items(work, section, CHUNKS: gl.constexpr):
    """Return the number of query items of a section; 0 if there is no such section."""
    first = section // (work.kv_heads // work.heads) * work.band_blocks
    blocks = gl.minimum(work.band_blocks, work.all_blocks - first)
    return gl.where((section >= 0) & (section < work.sections), blocks * work.heads * CHUNKS, 0)


@gluon.jit
def _item(pointers, work, number, step, key_items, query_items, GROUP: gl.constexpr, CHUNKS: gl.constexpr):
    """Return item `number` of a step."""
    # 4 key and 2 query items: numbers 0 1 2 3 4 5 -> query items before 0 0 0 1 1 1 2 -> key key query key key query
    before = number * query_items // (key_items + query_items)
    is_query = (number + 1) * query_items // (key_items + query_items) > before
    section = step - gl.where(is_query, LAG, 0)
    splits = work.kv_heads // work.heads
    band = section // splits
    index = gl.where(is_query, before // CHUNKS, number - before)
    chunk = gl.where(is_query, before % CHUNKS, 0)
    inside = index % work.heads
    per_head = gl.load(pointers.table + band * 3 + 2)
    of_head = inside * GROUP + chunk * (GROUP // CHUNKS)
    first = gl.where(is_query, band * work.band_blocks, gl.load(pointers.table + band * 3))
    return Item(
        gl.where(is_query, QUERY_ITEM, KEY_ITEM),
        first + index // work.heads,
        section % splits * work.heads + inside,
        chunk,
        section,
        section % RING * work.section_tiles + of_head * per_head,
        per_head,
    )


@gluon.jit
def _send(shared, item, turn):
    """Give an item to the consumers."""
    slot = turn % 2
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    numbers = gl.where(lanes == 0, item.kind, 0)
    for i in gl.static_range(1, 7):
        numbers = gl.where(lanes == i, item[i], numbers)
    mbarrier.wait(shared.items.empty.index(slot), ((turn // 2) & 1) ^ 1)
    shared.items.tiles.index(slot).store(numbers)
    mbarrier.arrive(shared.items.full.index(slot), count=1)


@gluon.jit
def receive(shared, turn):
    """Return the item of this turn, in a consumer."""
    slot = turn % 2
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, 32, layout)
    mbarrier.wait(shared.items.full.index(slot), (turn // 2) & 1)
    numbers = shared.items.tiles.index(slot).load(layout)
    item = Item(
        gl.sum(gl.where(lanes == 0, numbers, 0), 0),
        gl.sum(gl.where(lanes == 1, numbers, 0), 0),
        gl.sum(gl.where(lanes == 2, numbers, 0), 0),
        gl.sum(gl.where(lanes == 3, numbers, 0), 0),
        gl.sum(gl.where(lanes == 4, numbers, 0), 0),
        gl.sum(gl.where(lanes == 5, numbers, 0), 0),
        gl.sum(gl.where(lanes == 6, numbers, 0), 0),
    )
    mbarrier.arrive(shared.items.empty.index(slot), count=1)
    return item


@gluon.jit
def produce(shared, sources, pointers, work, GROUP: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """Draw items until there are no more, and copy what each of them reads."""
    turn = 0
    filled = 0  # uses of k and v by all items before
    done = 0  # uses of q and do by all items before
    step = 0
    start = 0  # the number of the first item of the step
    key_items = _key_items(pointers, work, 0)
    query_items = _query_items(work, -LAG, CHUNKS)
    number = gl.atomic_add(pointers.counter, 1)
    while number < work.items:
        while number >= start + key_items + query_items:
            start += key_items + query_items
            step += 1
            key_items = _key_items(pointers, work, step)
            query_items = _query_items(work, step - LAG, CHUNKS)
        item = _item(pointers, work, number - start, step, key_items, query_items, GROUP, CHUNKS)
        _send(shared, item, turn)
        turn += 1
        if item.kind == QUERY_ITEM:
            wait_for(pointers.key_done + item.section, 2 * _key_items(pointers, work, item.section))
            fence_copies(1)
            uses = _copy_tiles(shared, sources, pointers, work, item, filled, done, GROUP, CHUNKS, STAGES)
            filled += uses
            done += uses
        else:
            if item.section >= RING:
                needed = 2 * _query_items(work, item.section - RING, CHUNKS)
                wait_for(pointers.query_done + item.section - RING, needed)
            done += _copy_queries(shared, sources, pointers, work, item, filled, done, GROUP, STAGES)
            filled += 1
        number = gl.atomic_add(pointers.counter, 1)
    _send(shared, Item(NO_ITEM, 0, 0, 0, 0, 0, 0), turn)


@gluon.jit
def _copy_queries(shared, sources, pointers, work, item, filled, done, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """Copy the keys and values of a key item, and queries and output gradients of each step; return its steps."""
    QUERIES: gl.constexpr = shared.q.tiles.shape[1]
    # [QUERIES]
    lanes = gl.arange(0, QUERIES, gl.BlockedLayout([QUERIES // 32], [32], [1], [0]))
    piece = pointers.pieces + item.index * 10
    row = gl.load(piece)
    block = row * work.blocks + gl.load(piece + 1)
    last = gl.load(piece + 3)
    steps = (last - gl.load(piece + 2)) // QUERIES * GROUP
    slot = filled % 2
    barrier = shared.filled.full.index(slot)
    mbarrier.wait(shared.filled.empty.index(slot), ((filled // 2) & 1) ^ 1)
    mbarrier.expect(barrier, 4 * (sources.k.block_type.nbytes + sources.v.block_type.nbytes))
    granules = pointers.granules + block * 4
    # [128, D] each
    gather(matrix(sources.k, sources.k_at, row, item.head, 0), granules, barrier, shared.k.index(slot), 4)
    gather(matrix(sources.v, sources.v_at, row, item.head, 0), granules, barrier, shared.v.index(slot), 4)
    spots = work.padded - work.origin
    numbers_at = (row.to(gl.int64) * work.kv_heads + item.head) * GROUP * spots - work.origin
    for step in range(steps):
        stage = (done + step) % STAGES
        phase = ((done + step) // STAGES) & 1
        # GROUP 2, QUERIES 64, last 512: step 0 1 2 3 ... -> query 448 448 384 384 ..., head 0 1 0 1 ...
        query = last - (step // GROUP + 1) * QUERIES
        head = step % GROUP
        for part in gl.static_range(2):
            descriptor = sources.q if part == 0 else sources.do
            at = sources.q_at if part == 0 else sources.do_at
            ring_to = shared.q if part == 0 else shared.do
            numbers_to = shared.lse if part == 0 else shared.delta
            numbers = pointers.lse if part == 0 else pointers.delta
            source = matrix(descriptor, at, row, item.head * GROUP + head, query - work.origin)
            full = ring_to.full.index(stage)
            mbarrier.wait(ring_to.empty.index(stage), phase ^ 1)
            # [QUERIES], by the 32 lanes, whose arrivals the barrier counts
            copy(numbers_to.index(stage), numbers + numbers_at + head * spots + query + lanes)
            async_copy.mbarrier_arrive(full, increment_count=False)
            mbarrier.expect(full, descriptor.block_type.nbytes)
            # [QUERIES, D]
            fetch(descriptor, [source.row, source.column], full, ring_to.tiles.index(stage))
    return steps


@gluon.jit
def _copy_tiles(
    shared,
    sources,
    pointers,
    work,
    item,
    filled,
    done,
    GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy the keys and the tiles of dS of each entry of a query item; return the number of entries."""
    HEADS: gl.constexpr = GROUP // CHUNKS
    begin = gl.load(pointers.entry_offsets + item.index)
    count = gl.load(pointers.entry_offsets + item.index + 1) - begin
    k = matrix(sources.k, sources.k_at, item.index // work.row_blocks, item.head, 0)
    nbytes: gl.constexpr = sources.ds.block_type.nbytes
    entry = pointers.entries + begin.to(gl.int64) * 4
    # The numbers of an entry are loaded while the tiles of the entry before are copied.
    block, place, place_next = _entry(entry)
    granules = numbers_of(pointers.granules + block * 4, 4)
    for i in range(count):
        entry += gl.where(i + 1 < count, 4, 0)
        block_after, place_after, place_next_after = _entry(entry)
        slot = (filled + i) % 2
        barrier = shared.filled.full.index(slot)
        mbarrier.wait(shared.filled.empty.index(slot), (((filled + i) // 2) & 1) ^ 1)
        mbarrier.expect(barrier, 4 * sources.k.block_type.nbytes + (4 * nbytes if HEADS == 2 else 0))
        for j in gl.static_range(4):
            # [32, D] of [128, D]
            part = shared.k.index(slot).slice(j * 32, 32, dim=0)
            fetch(k.descriptor, [k.row + gl.maximum(granules[j], 0) * 32, k.column], barrier, part)
        places = (place, place_next)
        if HEADS == 2:
            for half in gl.static_range(2):
                # [128, 64], the first head, in two parts of 64 keys
                to = shared.v.index(slot).slice(half * 64, 64, dim=1)
                # Place 0 is a tile of zeros, of all heads.
                tile = gl.where(places[half] > 0, item.tile + places[half], 0)
                fetch(sources.ds, [tile * 128, 0], barrier, to.slice(0, 64, dim=0))
                fetch(sources.ds, [tile * 128 + 64, 0], barrier, to.slice(64, 64, dim=0))
        granules = numbers_of(pointers.granules + block_after * 4, 4)
        stage = (done + i) % STAGES
        phase = ((done + i) // STAGES) & 1
        for half in gl.static_range(2):
            ring_to = shared.q if half == 0 else shared.do
            full = ring_to.full.index(stage)
            mbarrier.wait(ring_to.empty.index(stage), phase ^ 1)
            # The lanes have copied nothing, but the barrier counts their arrivals.
            async_copy.mbarrier_arrive(full, increment_count=False)
            mbarrier.expect(full, 2 * nbytes)
            # [64, 128], the last head: 64 keys x 64 queries, then the other 64 keys beside them
            to = ring_to.tiles.index(stage)
            tile = gl.where(places[half] > 0, item.tile + (HEADS - 1) * item.per_head + places[half], 0)
            fetch(sources.ds, [tile * 128, 0], full, to.slice(0, 64, dim=1))
            fetch(sources.ds, [tile * 128 + 64, 0], full, to.slice(64, 64, dim=1))
        block, place, place_next = block_after, place_after, place_next_after
    return count


@gluon.jit
def _entry(entry):
    """Return the key block and the two places of an entry."""
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def allocate(q_descriptor, do_descriptor, k_descriptor, v_descriptor, ds_descriptor, STAGES: gl.constexpr):
    """Allocate the shared memory of a program and initialise its barriers."""
    QUERIES: gl.constexpr = q_descriptor.block_type.shape[0]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # [2, 32]
    numbers = gl.allocate_shared_memory(gl.int32, [2, 32], plain)
    numbers_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    numbers_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(numbers_full.index(i), count=1)
        mbarrier.init(numbers_empty.index(i), count=2)  # both consumers
    # 1 arrival of the producer; [2, 128, D] each
    keys = ring(k_descriptor, 128, 2, 1)
    v_tiles = gl.allocate_shared_memory(v_descriptor.dtype, keys.tiles.shape, v_descriptor.layout)
    # [STAGES, QUERIES, D]; 33 arrivals: 1 of the producer, and 32 of the lanes that copy numbers
    q_ring = ring(q_descriptor, QUERIES, STAGES, 33)
    do_ring = ring(do_descriptor, QUERIES, STAGES, 33)
    # [STAGES, QUERIES]
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    items = Ring(numbers, numbers_full, numbers_empty)
    ds_tiles = gl.allocate_shared_memory(ds_descriptor.dtype, [4, 64, QUERIES], ds_descriptor.layout)
    return Shared(items, keys.tiles, v_tiles, keys, q_ring, do_ring, lse_tiles, delta_tiles, ds_tiles)
