"""Sums in global memory in a fixed order: programs add one after another, in the order of their turns.

A flag counts the programs that have added to a place. A program waits until the flag shows its turn, adds, and raises
the flag. Turn 0 stores instead of adding, so the memory needs no zeros, but the flags do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 renamed both functions.
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@_core.builtin
def _reduce(descriptor, coordinates, tile, _semantic=None):
    # Triton 3.6 compiles this operation but has no function for it.
    from triton._C.libtriton import ir

    at = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, tile.handle)


@gluon.jit
def lower(descriptor, coordinates, tile, is_sum):
    """Start to add a tile in shared memory to a matrix in global memory, or to store it if `is_sum` is false."""
    if is_sum:
        _reduce(descriptor, coordinates, tile)
    else:
        _store(descriptor, coordinates, tile)


@gluon.jit
def wait_for_writes():
    """Wait until the results of `lower` are in global memory; `tma.store_wait` waits only until tiles are read."""
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_turn(flag, before):
    """Wait until `before` programs have added; their additions are then visible."""
    count = _read(flag)
    while count != before:
        count = _read(flag)
    # Threads may see the turn at different times.
    _barrier()


@gluon.jit
def _read(flag):
    # What another program wrote before it raised the flag is visible after this load, in each thread.
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [flag], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def turn(flag):
    """Raise the flag after the additions of all threads of this part of the program."""
    _barrier()
    gl.atomic_add(flag, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def add(pointer, tokens, real, values, is_sum):
    """Add `values` [64, D] to the rows `tokens` that are `real`, both [64], or store them if `is_sum` is false."""
    D: gl.constexpr = values.shape[1]
    # [64, 1] + [1, D] -> [64, D], in int64
    offsets = tokens.to(gl.int64)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, values.type.layout))[None, :]
    if is_sum:
        values += gl.load(pointer + offsets, mask=real[:, None], other=0.0)
    gl.store(pointer + offsets, values, mask=real[:, None])
