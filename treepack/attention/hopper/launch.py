"""Launches of the Hopper kernels (wgmma, TMA, warp specialisation; written in Gluon).

    AttentionInputs, BackwardInputs --`shapes`, `matrices`--> KernelLaunch --> results
    shapes      kernels and their parameters
    matrices    tensors for the copy engine

Forward and backward make the same passes over the same lists as `portable`, with the same inputs and outputs, about 1.5
times as fast. They take bfloat16 and float16, the head dimensions of `shapes.SHAPES`, windows, chunks and sinks, but no
caps of scores; `autograd.backend` gives everything else to `portable`.

One difference in memory: lse and delta have T_pad - first places per head, so that the copy engine can read whole
tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treepack.attention.delta import compute_delta
from treepack.attention.hopper.join_shares import join_shares
from treepack.attention.hopper.matrices import matrix_arguments
from treepack.attention.hopper.shapes import SHAPES, HeadShape
from treepack.attention.kernel_launch import (
    AttentionInputs,
    BackwardInputs,
    InputGradients,
    KernelLaunch,
    key_arguments,
    key_heads_per_section,
    query_arguments,
    sink_argument,
    sink_gradient,
    token_major,
)
from treepack.attention.schedule import GRANULE, KEY_BLOCK, QUERY_BLOCK, QUERY_TILE

# A program starts with 12 warps of 168 registers. The producer keeps 24 and gives the others to the consumers, which
# then have 240 each: 4 * 24 + 8 * 240 <= 12 * 168.
OPTIONS = {"num_warps": 4, "maxnreg": 168}

# Keys and values of the heads that run at once should stay in the L2 cache, which has 50 MB (H100) or 60 MB (H200).
CACHE_BYTES = 32_000_000


def hopper_forward(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return output [B, H, T - first, D_v] in the dtype of `query`, and lse, float32 [B, H, T_pad - first]."""
    query, schedule = inputs.query, inputs.schedule
    out = token_major(query, inputs.value.shape[-1])
    places = (*query.shape[:2], schedule.end.shape[1] - schedule.first)
    lse = torch.empty(places, dtype=torch.float32, device=query.device)
    hopper_forward_launch(inputs, out, lse).run()
    return out, lse


def hopper_backward(inputs: AttentionInputs, out: Tensor, lse: Tensor, grad: Tensor) -> InputGradients:
    """Return the gradients of query, key, value and sinks, the first three in their dtypes and in memory [B, T, H, D].

    `out` and `lse` are the results of `hopper_forward` for the same operands, and `grad` is the gradient of `out`.
    """
    incoming = BackwardInputs(grad, lse, compute_delta(out, grad, lse))
    dq, dk, dv = (token_major(x) for x in inputs[:3])
    hopper_query_launch(inputs, incoming, dq).run()
    sums = _empty_sums(inputs)
    hopper_key_launch(inputs, incoming, dk, dv, sums).run()
    if sums is not None:
        join_shares(sums, dk, dv, inputs.schedule, inputs.scale)
    # The weights of the sinks come from lse, so that the two kernels do not see them.
    return dq, dk, dv, sink_gradient(inputs, incoming)


def hopper_forward_launch(inputs: AttentionInputs, out: Tensor, lse: Tensor) -> KernelLaunch:
    """Describe the launch that writes `out` [B, H, T - first, D_v] and `lse` [B, H, T_pad - first]."""
    shape = _shape(inputs)
    arguments = {
        **_operand_matrices(inputs, shape, QUERY_BLOCK),
        "o_pointer": out,
        "o_strides": out.stride()[:3],
        "lse_pointer": lse,
        "sinks": sink_argument(inputs, lse),
        **query_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES) * inputs.group),
    }
    constants = {"SINKS": inputs.sinks is not None, **shape.forward}
    return _launch(shape.kernels.forward, _query_programs(inputs), inputs, arguments, constants)


def hopper_query_launch(inputs: AttentionInputs, incoming: BackwardInputs, dq: Tensor) -> KernelLaunch:
    """Describe the launch that writes `dq` [B, H, T - first, D]."""
    shape = _shape(inputs)
    arguments = {
        **_backward_arguments(inputs, incoming, QUERY_BLOCK),
        "dq_pointer": dq,
        "dq_strides": dq.stride()[:3],
        **query_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES) * inputs.group),
    }
    return _launch(shape.kernels.query, _query_programs(inputs), inputs, arguments, shape.query)


def _empty_sums(inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
    """Return memory for the sums of dk and dv of all shares; None if no key block is divided."""
    shares = inputs.schedule.shares
    if _shape(inputs).parts is not None or shares is None or not shares.num_sums:
        return None
    shape = (shares.num_sums, inputs.key.shape[1], KEY_BLOCK, inputs.key.shape[-1])
    dk, dv = (torch.empty(shape, dtype=torch.float32, device=inputs.key.device) for _ in range(2))
    return dk, dv


def hopper_key_launch(
    inputs: AttentionInputs, incoming: BackwardInputs, dk: Tensor, dv: Tensor, sums: tuple[Tensor, Tensor] | None = None
) -> KernelLaunch:
    """Describe the launch that writes `dk` [B, H_kv, T, D] and `dv` [B, H_kv, T, D_v], or `sums` of divided blocks."""
    shape = _shape(inputs)
    batch, kv_heads = inputs.key.shape[:2]
    of_shares, programs = {}, batch * inputs.schedule.key_order.shape[1]
    if shape.parts is None:
        shares = inputs.schedule.shares
        # Without sums, any tensor of float32 will do, and with windows any of int32.
        dk_sums, dv_sums = sums if sums is not None else (incoming.lse, incoming.lse)
        table = inputs.schedule.end if shares is None else shares.shares
        of_shares = {"dk_sums": dk_sums, "dv_sums": dv_sums, "shares": table}
        programs = programs if shares is None else len(table)
    arguments = {
        **_backward_arguments(inputs, incoming, QUERY_TILE),
        "dk_pointer": dk,
        "dk_strides": dk.stride()[:3],
        "dv_pointer": dv,
        "dv_strides": dv.stride()[:3],
        **of_shares,
        # One section of all heads: of every head, the largest blocks start first. Programs that wait for the
        # longest block of the last head cost more than the L2 cache saves.
        **key_arguments(inputs, kv_heads),
    }
    programs *= shape.kernels.key_programs * kv_heads
    return _launch(shape.kernels.key, programs, inputs, arguments, shape.key)


def _backward_arguments(inputs: AttentionInputs, incoming: BackwardInputs, rows: int) -> dict[str, Any]:
    """Return what both kernels of the backward read, beside their lists; they copy `rows` queries at a time."""
    shape = _shape(inputs)
    return {
        **_operand_matrices(inputs, shape, rows),
        **matrix_arguments("do", incoming.grad, rows, shape.parts_v),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "scale": inputs.scale,
    }


def _operand_matrices(inputs: AttentionInputs, shape: HeadShape, rows: int) -> dict[str, Any]:
    """Return the arguments by which a kernel copies `rows` queries, and a granule of keys and values, at a time."""
    return {
        **matrix_arguments("q", inputs.query, rows, shape.parts),
        **matrix_arguments("k", inputs.key, GRANULE, shape.parts),
        **matrix_arguments("v", inputs.value, GRANULE, shape.parts_v),
    }


def _launch(
    kernel: Any, programs: int, inputs: AttentionInputs, arguments: dict[str, Any], constants: dict[str, Any]
) -> KernelLaunch:
    # The descriptor of a part that does not exist is None, a constant.
    present = {name: value for name, value in arguments.items() if value is not None}
    absent = dict.fromkeys(arguments.keys() - present.keys())
    constants = {"GROUP": inputs.group, "WINDOWED": inputs.is_windowed, **constants, **absent}
    return KernelLaunch(kernel, programs, present, constants, OPTIONS)


def _shape(inputs: AttentionInputs) -> HeadShape:
    return SHAPES[inputs.query.shape[-1], inputs.value.shape[-1]]


def _query_programs(inputs: AttentionInputs) -> int:
    batch, heads = inputs.query.shape[:2]
    return int(batch * heads * inputs.schedule.query_order.shape[1])
