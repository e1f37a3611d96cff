"""The backward of attention in one pass on Hopper; `launch.backward` makes two, one for dq and one for dk and dv.

    Inputs, Incoming --fused_launch--> dq, dk and dv in float32 --backward--> in the dtype of the inputs

It multiplies five times where the two passes multiply seven times. In exchange, it needs dq, dk and dv in float32, so
its memory is larger. It takes heads of 64 and 128 without windows and chunks, and a schedule with `bands`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treepack.attention.hopper.delta import compute_delta
from treepack.attention.hopper.fused_backward import fused_kernel
from treepack.attention.hopper.launch import OPTIONS, query_launch
from treepack.attention.hopper.matrices import matrix_arguments
from treepack.attention.kernel_launch import LOG2E, Incoming, Inputs, Launch, sink_gradient, token_major
from treepack.attention.schedule import GRANULE, QUERY_TILE, Schedule

# Stages of the rings of queries and output gradients, of dS, and of dq: all fit into 227 KB of shared memory.
STAGES = {
    64: {"STAGES": 3, "DS_STAGES": 2, "DQ_STAGES": 2},
    128: {"STAGES": 2, "DS_STAGES": 2, "DQ_STAGES": 1},
}


class Sums(NamedTuple):
    """Float32 sums that programs add to in a fixed order, and the flags of the order.

    dq         [B, H, T_pad - first, D]; rows after the row have no meaning
    dk, dv     [B, H_kv, T_pad, D]; rows after the row have no meaning
    counter    int32 [4], zeros; the first one counts programs
    flags      int32, zeros; pieces that have added to dq, for [B, H, T_pad / 64], then padding
    key_flags  int32, zeros; pieces that have added to dk and dv, for [B, nk, H_kv, 2], then padding
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    counter: Tensor
    flags: Tensor
    key_flags: Tensor


def takes(head_dims: tuple[int, int]) -> bool:
    """Return True if the backward in one pass computes such heads (dimension of q and k, of v)."""
    return head_dims[0] == head_dims[1] and head_dims[0] in STAGES


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    schedule: Schedule,
    scale: float,
    *,
    sinks: Tensor | None = None,
    one_pass: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and sinks, the first three in their dtypes and in memory [B, T, H, D].

    Args:
        query, key, value, out, lse, grad, scale, sinks: as in `launch.backward`.
        schedule: the result of `with_bands`.
        one_pass: if False, dq comes from the kernel of `launch`, and only dk and dv from pieces of key blocks.
    """
    inputs = Inputs(query, key, value, schedule, scale, sinks)
    incoming = Incoming(grad, lse, compute_delta(out, grad, lse))
    sums = empty_sums(inputs, dq=one_pass)
    dq, dk, dv = token_major(query), token_major(key), token_major(value)
    fused_launch(inputs, incoming, sums, dq=one_pass).run()
    if one_pass:
        torch.mul(sums.dq[:, :, : query.shape[2]], scale, out=dq)
    else:
        query_launch(inputs, incoming, dq).run()
    torch.mul(sums.dk[:, :, : key.shape[2]], scale, out=dk)
    dv.copy_(sums.dv[:, :, : key.shape[2]])
    dsinks = None if sinks is None else sink_gradient(sinks, lse, incoming.delta, query.shape[2])
    return dq, dk, dv, dsinks


def empty_sums(inputs: Inputs, *, dq: bool = True) -> Sums:
    """Return memory for the sums, and flags of zeros; without `dq`, its sums are one tile that nothing reads."""
    schedule, device = inputs.schedule, inputs.query.device
    batch, heads, _, width = inputs.query.shape
    kv_heads, padded = inputs.key.shape[1], schedule.end.shape[1]
    shape = (batch, heads, padded - schedule.first, width) if dq else (1, 1, QUERY_TILE, width)
    dq_sums = torch.empty(shape, dtype=torch.float32, device=device)
    dk, dv = (torch.empty(batch, kv_heads, padded, width, dtype=torch.float32, device=device) for _ in range(2))
    sizes = (1, batch * heads * (padded // QUERY_TILE), schedule.key_order.numel() * kv_heads * 2)
    # Each begins at a multiple of 16 bytes, so Triton compiles one kernel: sizes 1 6 8 -> 4 8 8
    aligned = [-(-size // 4) * 4 for size in sizes]
    flags = torch.zeros(sum(aligned), dtype=torch.int32, device=device)
    return Sums(dq_sums, dk, dv, *flags.split(aligned))


def fused_launch(inputs: Inputs, incoming: Incoming, sums: Sums, *, dq: bool = True) -> Launch:
    """Describe the launch that adds up dk, dv and, unless `dq` is false, dq."""
    schedule, width = inputs.schedule, inputs.query.shape[-1]
    pieces, turns = schedule.pieces, schedule.turns
    assert pieces is not None, "the schedule has bands"
    assert turns is not None, "the schedule has bands"
    kv_heads, padded = inputs.key.shape[1], schedule.end.shape[1]
    halves = matrix_arguments("halves", inputs.key, GRANULE, (width // 2,))["halves_first"]
    arguments: dict[str, Any] = {
        **matrix_arguments("q", inputs.query, QUERY_TILE, None),
        **matrix_arguments("do", incoming.grad, QUERY_TILE, None),
        **matrix_arguments("k", inputs.key, GRANULE, None),
        **matrix_arguments("v", inputs.value, GRANULE, None),
        "halves_descriptor": halves,
        "dq_descriptor": _matrix_of_sums(sums.dq),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "dk_pointer": sums.dk,
        "dv_pointer": sums.dv,
        "counter": sums.counter,
        "flags": sums.flags,
        "key_flags": sums.key_flags,
        "ends": schedule.end,
        "key_granules": schedule.key_granules,
        "key_ranges": schedule.key_ranges,
        "pieces": pieces,
        "turns": turns,
        "length": schedule.length,
        "origin": schedule.first,
        "padded": padded,
        "kv_heads": kv_heads,
        "blocks": schedule.key_order.shape[1],
        "tiles": padded // QUERY_TILE,
        "factor": inputs.scale * LOG2E,
    }
    constants = {"GROUP": inputs.group, "BAND": turns.shape[1], **STAGES[width], "DQ": dq}
    return Launch(fused_kernel, len(pieces) * kv_heads, arguments, constants, OPTIONS)


def _matrix_of_sums(sums: Tensor) -> TensorDescriptor:
    """Return the descriptor of float32 sums [B, H, places, D]: 64 rows of half the columns at a time."""
    width = sums.shape[-1]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    matrix = sums.view(-1, width)
    return TensorDescriptor(matrix, list(matrix.shape), [width, 1], [QUERY_TILE, width // 2], layout)
