"""Launches of the Hopper kernels for head dimensions in parts: 256, 192 with values of 128, 96 and 80.

Same passes, inputs and outputs as `launch`, which serves 64 and 128. `SHAPES` has the tiles of each pair of head
dimensions (of q and k, of v).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treepack.attention.hopper.launch import CACHE_BYTES, OPTIONS, as_matrix, compute_delta
from treepack.attention.hopper.wide_forward import wide_forward_kernel
from treepack.attention.hopper.wide_key_backward import wide_key_kernel
from treepack.attention.hopper.wide_query_backward import wide_query_kernel
from treepack.attention.kernel_launch import (
    Incoming,
    Inputs,
    Launch,
    key_arguments,
    key_heads_per_section,
    key_window,
    query_arguments,
    query_window,
    sink_gradient,
    token_major,
)
from treepack.attention.schedule import GRANULE, QUERY_BLOCK, QUERY_TILE, Schedule


class Shape(NamedTuple):
    """Parts of the head dimensions and compile-time parameters of the three kernels."""

    parts: tuple[int, ...]
    parts_v: tuple[int, ...]
    forward: dict[str, int]
    query: dict[str, int]
    key: dict[str, int]


# Within 3 % of the fastest values on an H200 that fit into 227 KB of shared memory in both dtypes and hardly spill. At
# 256 the query kernel has 128 KB of queries and output gradients, and room for two tiles of 64 keys and one of values.
SHAPES = {
    (256, 256): Shape(
        (256,),
        (256,),
        {"GRANULES": 2, "K_STAGES": 2, "V_STAGES": 2},
        {"GRANULES": 2, "K_STAGES": 2, "V_STAGES": 1, "CARRIED": False},
        {"STAGES": 2, "P_STAGES": 2, "CARRIED": False},
    ),
    (192, 128): Shape(
        (128, 64),
        (128,),
        {"GRANULES": 4, "K_STAGES": 2, "V_STAGES": 2},
        {"GRANULES": 2, "K_STAGES": 3, "V_STAGES": 3, "CARRIED": True},
        {"STAGES": 3, "P_STAGES": 2, "CARRIED": True},
    ),
    (96, 96): Shape(
        (64, 32),
        (64, 32),
        {"GRANULES": 4, "K_STAGES": 2, "V_STAGES": 2},
        {"GRANULES": 2, "K_STAGES": 3, "V_STAGES": 3, "CARRIED": True},
        {"STAGES": 3, "P_STAGES": 2, "CARRIED": True},
    ),
    (80, 80): Shape(
        (64, 16),
        (64, 16),
        {"GRANULES": 4, "K_STAGES": 2, "V_STAGES": 2},
        {"GRANULES": 2, "K_STAGES": 3, "V_STAGES": 3, "CARRIED": True},
        {"STAGES": 4, "P_STAGES": 2, "CARRIED": True},
    ),
}


def forward(
    query: Tensor, key: Tensor, value: Tensor, schedule: Schedule, scale: float, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return output [B, H, T, D_v] in the dtype of `query` and base-2 log-sum-exp, float32 [B, H, T_pad].

    Args:
        query, key, value, schedule, scale: as in `portable.forward`.
        sinks: float32 [H], one more score per head, without a value.
    """
    out = token_major(query, value.shape[-1])
    places = (*query.shape[:2], schedule.end.shape[1])
    lse = torch.empty(places, dtype=torch.float32, device=query.device)
    forward_launch(Inputs(query, key, value, schedule, scale, sinks), out, lse).run()
    return out, lse


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and sinks, the first three in their dtypes and in memory [B, T, H, D].

    Args:
        query, key, value, schedule, scale, sinks: as in `forward`.
        out, lse: the results of `forward` for the same arguments.
        grad: [B, H, T, D_v], the gradient of `out`.
    """
    inputs = Inputs(query, key, value, schedule, scale, sinks)
    incoming = Incoming(grad, lse, compute_delta(out, grad, lse))
    dq, dk, dv = token_major(query), token_major(key), token_major(value)
    query_launch(inputs, incoming, dq).run()
    key_launch(inputs, incoming, dk, dv).run()
    # The weights of the sinks come from lse, so that the two kernels do not see them.
    dsinks = None if sinks is None else sink_gradient(sinks, lse, incoming.delta, schedule.length)
    return dq, dk, dv, dsinks


def forward_launch(inputs: Inputs, out: Tensor, lse: Tensor) -> Launch:
    """Describe the launch that writes `out` [B, H, T, D_v] and `lse` [B, H, T_pad]."""
    shape = _shape(inputs)
    has_sinks = inputs.sinks is not None
    constants = {"GROUP": inputs.group, "WINDOWED": inputs.is_windowed, "SINKS": has_sinks, **shape.forward}
    arguments = {
        **_matrix("q", inputs.query, QUERY_BLOCK, shape.parts),
        **_matrix("k", inputs.key, GRANULE, shape.parts),
        **_matrix("v", inputs.value, GRANULE, shape.parts_v),
        "o_pointer": out,
        "o_strides": out.stride()[:3],
        "lse_pointer": lse,
        "sinks": lse if inputs.sinks is None else inputs.sinks,
        **query_window(inputs),
        **query_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES) * inputs.group),
    }
    return _launch(wide_forward_kernel, _query_programs(inputs), arguments, constants)


def query_launch(inputs: Inputs, incoming: Incoming, dq: Tensor) -> Launch:
    """Describe the launch that writes `dq` [B, H, T, D]."""
    shape = _shape(inputs)
    constants = {"GROUP": inputs.group, "WINDOWED": inputs.is_windowed, **shape.query}
    arguments = {
        **_matrix("q", inputs.query, QUERY_BLOCK, shape.parts),
        **_matrix("do", incoming.grad, QUERY_BLOCK, shape.parts_v),
        **_matrix("k", inputs.key, GRANULE, shape.parts),
        **_matrix("v", inputs.value, GRANULE, shape.parts_v),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "dq_pointer": dq,
        "dq_strides": dq.stride()[:3],
        "scale": inputs.scale,
        **query_window(inputs),
        **query_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES) * inputs.group),
    }
    return _launch(wide_query_kernel, _query_programs(inputs), arguments, constants)


def key_launch(inputs: Inputs, incoming: Incoming, dk: Tensor, dv: Tensor) -> Launch:
    """Describe the launch that writes `dk` [B, H_kv, T, D] and `dv` [B, H_kv, T, D_v]."""
    shape = _shape(inputs)
    batch, kv_heads = inputs.key.shape[:2]
    constants = {"GROUP": inputs.group, "WINDOWED": inputs.is_windowed, **shape.key}
    arguments = {
        **_matrix("q", inputs.query, QUERY_TILE, shape.parts),
        **_matrix("do", incoming.grad, QUERY_TILE, shape.parts_v),
        **_matrix("k", inputs.key, GRANULE, shape.parts),
        **_matrix("v", inputs.value, GRANULE, shape.parts_v),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "dk_pointer": dk,
        "dk_strides": dk.stride()[:3],
        "dv_pointer": dv,
        "dv_strides": dv.stride()[:3],
        "scale": inputs.scale,
        **key_window(inputs),
        **key_arguments(inputs, key_heads_per_section(inputs.key, CACHE_BYTES, pairs=inputs.group)),
    }
    programs = 2 * batch * kv_heads * inputs.schedule.key_order.shape[1]
    return _launch(wide_key_kernel, programs, arguments, constants)


def _launch(kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]) -> Launch:
    # The descriptor of a part that does not exist is None, a constant.
    present = {name: value for name, value in arguments.items() if value is not None}
    return Launch(kernel, programs, present, constants | dict.fromkeys(arguments.keys() - present.keys()), OPTIONS)


def _shape(inputs: Inputs) -> Shape:
    return SHAPES[inputs.query.shape[-1], inputs.value.shape[-1]]


def _query_programs(inputs: Inputs) -> int:
    batch, heads = inputs.query.shape[:2]
    return int(batch * heads * inputs.schedule.query_order.shape[1])


def _matrix(name: str, x: Tensor, rows: int, parts: tuple[int, ...]) -> dict[str, Any]:
    """Return the three arguments that a kernel needs to copy `rows` tokens of a head of `x` at a time, in parts."""
    x, shape, at = as_matrix(x)
    strides = [x.stride(2), 1]
    made = [TensorDescriptor(x, shape, strides, [rows, width], _layout(width)) for width in parts]
    first, second = made if len(made) == 2 else (made[0], None)
    return {f"{name}_first": first, f"{name}_second": second, f"{name}_at": at}


def _layout(width: int) -> NVMMASharedLayout:
    # Rows of 64 and more elements are swizzled in 128 bytes, of 32 in 64, of 16 in 32.
    return NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)
