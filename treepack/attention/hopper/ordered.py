"""Flags in global memory that count the parts of programs that have finished some work.

A program waits until a flag has reached a count, and then sees everything that was written before the flag was raised.
Copies of the copy engine (TMA) read memory through a path of their own, so both sides put a fence between the two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.9 renamed both functions.
write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def wait_for(flag, count):
    """Wait until the flag is at least `count`; what was written before is then visible."""
    value = _read(flag)
    while value < count:
        value = _read(flag)
    # Threads may see the count at different times.
    _barrier()


@gluon.jit
def _read(flag):
    # What another program wrote before it raised the flag is visible after this load, in each thread.
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [flag], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def raise_flag(flag):
    """Add 1 to the flag after the writes of all threads of this part of the program."""
    _barrier()
    gl.atomic_add(flag, 1, sem="acq_rel", scope="gpu")


@gluon.jit
def wait_for_copies():
    """Wait until copies that this thread started have arrived in global memory; `tma.store_wait` waits for less."""
    lanes = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_copies(WARPS: gl.constexpr):
    """Order ordinary reads and writes of each thread with copies of the copy engine, in both directions."""
    lanes = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1
    )
