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
    KernelLaunch,
    key_arguments,
    key_heads_per_section,
    key_window,
    query_arguments,
    query_window,
    sink_gradient,
    token_major,
)
from treepack.attention.schedule import GRANULE, KEY_BLOCK, QUERY_BLOCK, QUERY_TILE, Schedule

# A program starts with 12 warps of 168 registers. The producer keeps 24 and gives the others to the consumers, which
# then have 240 each: 4 * 24 + 8 * 240 <= 12 * 168.
OPTIONS = {"num_warps": 4, "maxnreg": 168}

# Keys and values of the heads that run at once should stay in the L2 cache, which has 50 MB (H100) or 60 MB (H200).
CACHE_BYTES = 32_000_000


def hopper_forward(
    query: Tensor, key: Tensor, value: Tensor, schedule: Schedule, scale: float, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output [B, H, T - first, D_v] in the dtype of `query`, and lse, float32 [B, H, T_pad - first].

    Args:
        query, key, value, schedule, scale: as in `portable_forward`.
        sinks: float32 [H], one more score per head, without a value.
    """
    out = token_major(query, value.shape[-1])
    places = (*query.shape[:2], schedule.end.shape[1] - schedule.first)
    lse = torch.empty(places, dtype=torch.float32, device=query.device)
    hopper_forward_launch(AttentionInputs(query, key, value, schedule, scale, sinks), out, lse).run()
    return out, lse


def hopper_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and sinks, the first three in their dtypes and in memory [B, T, H, D].

    Args:
        query, key, value, schedule, scale, sinks: as in `hopper_forward`.
        out, lse: the results of `hopper_forward` for the same arguments.
        grad: [B, H, T - first, D_v], the gradient of `out`.
    """
    inputs = AttentionInputs(query, key, value, schedule, scale, sinks)
    incoming = BackwardInputs(grad, lse, compute_delta(out, grad, lse))
    dq, dk, dv = token_major(query), token_major(key), token_major(value)
    hopper_query_launch(inputs, incoming, dq).run()
    sums = empty_sums(inputs)
    hopper_key_launch(inputs, incoming, dk, dv, sums).run()
    if sums is not None:
        join_shares(sums, dk, dv, schedule, scale)
    # The weights of the sinks come from lse, so that the two kernels do not see them.
    dsinks = None if sinks is None else sink_gradient(sinks, lse, incoming.delta, query.shape[2])
    return dq, dk, dv, dsinks


def hopper_forward_launch(inputs: AttentionInputs, out: Tensor, lse: Tensor) -> KernelLaunch:
    """Describe the launch that writes `out` [B, H, T - first, D_v] and `lse` [B, H, T_pad - first]."""
    shape = _shape(inputs)
    has_sinks = inputs.sinks is not None
    constants = {"GROUP": inputs.group, "WINDOWED": inputs.is_windowed, "SINKS": has_sinks, **shape.forward}
    arguments = {
        **matrix_arguments("q", inputs.query, QUERY_BLOCK, shape.parts),
        **matrix_arguments("k", inputs.key, GRANULE, shape.parts),
        **matrix_arguments("v", inputs.value, GRANULE, shape.parts_v),
        "o_pointer": out,
        "o_strides": out.stride()[:3],
        "lse_pointer": lse,
        "sinks": lse if inputs.sinks is None else inputs.sinks,
        **query_window(inputs),
        **query_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES) * inputs.group),
    }
    return _launch(shape.kernels.forward, _query_programs(inputs), arguments, constants)


def hopper_query_launch(inputs: AttentionInputs, incoming: BackwardInputs, dq: Tensor) -> KernelLaunch:
    """Describe the launch that writes `dq` [B, H, T - first, D]."""
    shape = _shape(inputs)
    constants = {"GROUP": inputs.group, "WINDOWED": inputs.is_windowed, **shape.query}
    arguments = {
        **matrix_arguments("q", inputs.query, QUERY_BLOCK, shape.parts),
        **matrix_arguments("do", incoming.grad, QUERY_BLOCK, shape.parts_v),
        **matrix_arguments("k", inputs.key, GRANULE, shape.parts),
        **matrix_arguments("v", inputs.value, GRANULE, shape.parts_v),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "dq_pointer": dq,
        "dq_strides": dq.stride()[:3],
        "scale": inputs.scale,
        **query_window(inputs),
        **query_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES) * inputs.group),
    }
    return _launch(shape.kernels.query, _query_programs(inputs), arguments, constants)


def empty_sums(inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
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
    constants = {"GROUP": inputs.group, "WINDOWED": inputs.is_windowed, **shape.key}
    arguments = {
        **matrix_arguments("q", inputs.query, QUERY_TILE, shape.parts),
        **matrix_arguments("do", incoming.grad, QUERY_TILE, shape.parts_v),
        **matrix_arguments("k", inputs.key, GRANULE, shape.parts),
        **matrix_arguments("v", inputs.value, GRANULE, shape.parts_v),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "dk_pointer": dk,
        "dk_strides": dk.stride()[:3],
        "dv_pointer": dv,
        "dv_strides": dv.stride()[:3],
        "scale": inputs.scale,
        **of_shares,
        **key_window(inputs),
        # One section of all heads: of every head, the largest blocks start first. Programs that wait for the
        # longest block of the last head cost more than the L2 cache saves.
        **key_arguments(inputs, kv_heads),
    }
    return _launch(shape.kernels.key, shape.kernels.key_programs * kv_heads * programs, arguments, constants)


def _launch(kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]) -> KernelLaunch:
    # The descriptor of a part that does not exist is None, a constant.
    present = {name: value for name, value in arguments.items() if value is not None}
    return KernelLaunch(
        kernel, programs, present, constants | dict.fromkeys(arguments.keys() - present.keys()), OPTIONS
    )


def _shape(inputs: AttentionInputs) -> HeadShape:
    return SHAPES[inputs.query.shape[-1], inputs.value.shape[-1]]


def _query_programs(inputs: AttentionInputs) -> int:
    batch, heads = inputs.query.shape[:2]
    return int(batch * heads * inputs.schedule.query_order.shape[1])
