"""Kernels and compile-time parameters of each pair of head dimensions on Hopper.

head dimensions    kernels             a head is
64, 128            forward, ...        one tile wide, a power of two
all others         wide_forward, ...   one or two parts, each a power of two wide (`parts`)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from treepack.attention.hopper.forward import forward_kernel
from treepack.attention.hopper.key_backward import key_kernel
from treepack.attention.hopper.query_backward import query_kernel
from treepack.attention.hopper.wide_forward import wide_forward_kernel
from treepack.attention.hopper.wide_key_backward import wide_key_kernel
from treepack.attention.hopper.wide_query_backward import wide_query_kernel


class _PassKernels(NamedTuple):
    """The kernels of the three passes.

    forward        writes output and lse
    query          writes dq
    key            writes dk and dv
    key_programs   programs of `key` for each key block of the schedule
    """

    forward: Any
    query: Any
    key: Any
    key_programs: int


class HeadShape(NamedTuple):
    """Kernels of a pair of head dimensions, the parts of its heads, and compile-time parameters of each kernel.

    parts     widths of the parts of q and k; None for kernels of whole heads
    parts_v   widths of the parts of v
    """

    kernels: _PassKernels
    parts: tuple[int, ...] | None
    parts_v: tuple[int, ...] | None
    forward: dict[str, int]
    query: dict[str, int]
    key: dict[str, int]


_WHOLE_HEADS = _PassKernels(forward_kernel, query_kernel, key_kernel, 1)
_HEADS_IN_PARTS = _PassKernels(wide_forward_kernel, wide_query_kernel, wide_key_kernel, 2)

# Key granules per tile and stages per ring: the fastest values on an H200 that fit into 227 KB of shared memory beside
# 128 rows of queries. The forward needs 4 granules, because its first tile must hold the whole diagonal. For dq, 2
# granules are faster than 4 (head dimension 64: 3.7 ms against 5.8). For dk and dv, a third stage gains nothing.
_WHOLE = HeadShape(_WHOLE_HEADS, None, None, {"GRANULES": 4, "STAGES": 2}, {"GRANULES": 2, "STAGES": 3}, {"STAGES": 2})

# Heads in parts: within 3 % of the fastest values on an H200 that fit into 227 KB in both dtypes and hardly spill. At
# 256 the query kernel has 128 KB of queries and output gradients, and room for two tiles of 64 keys and one of values.
_PARTS = HeadShape(
    _HEADS_IN_PARTS,
    (128, 64),
    (128,),
    {"GRANULES": 4, "K_STAGES": 2, "V_STAGES": 2},
    {"GRANULES": 2, "K_STAGES": 3, "V_STAGES": 3, "CARRIED": True},
    {"STAGES": 3, "P_STAGES": 2, "CARRIED": True},
)

SHAPES = {
    (64, 64): _WHOLE,
    (128, 128): _WHOLE,
    (256, 256): HeadShape(
        _HEADS_IN_PARTS,
        (256,),
        (256,),
        {"GRANULES": 2, "K_STAGES": 2, "V_STAGES": 2},
        {"GRANULES": 2, "K_STAGES": 2, "V_STAGES": 1, "CARRIED": False},
        {"STAGES": 2, "P_STAGES": 2, "CARRIED": False},
    ),
    (192, 128): _PARTS,
    (96, 96): _PARTS._replace(parts=(64, 32), parts_v=(64, 32)),
    (80, 80): _PARTS._replace(parts=(64, 16), parts_v=(64, 16), key={**_PARTS.key, "STAGES": 4}),
}
