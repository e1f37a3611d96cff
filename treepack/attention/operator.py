"""Tree attention as an operator of torch, so that a compiled layer is one graph with attention inside.

    Schedules --pack_schedules, once per pass--> PackedSchedules: one int32 tensor and its layout
    layer --kernel_attention, traced by torch.compile--> torch.ops.treepack.attention, ..._backward

torch.compile traces tensors and numbers and no `Schedule`, so the lists of all schedules of a pass travel as one
tensor. The layout is a tensor on the CPU: a list of numbers would compile a layer again for every row. The operator
returns the log-sum-exp too. Both results are kept for the backward pass, even if the layer is recomputed there
(`keep_attention`), so that no attention runs twice.

Only the project's own kernels are here. A compiled layer breaks its graph at every other implementation.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from treepack.attention.autograd import backend, backward_kernels, forward_kernels
from treepack.attention.kernel_launch import AttentionInputs, token_major
from treepack.attention.reach import KeyReach
from treepack.attention.schedule import QUERY_BLOCK, KeyShares, Schedule

_NUMBERS = itertools.count(1)
# Schedules that were packed or unpacked last, by their number; unpacking takes some 50 microseconds.
_RECENT: OrderedDict[int, tuple[Schedule, ...]] = OrderedDict()
_NUM_RECENT = 16

_TENSORS = tuple(field.name for field in fields(Schedule) if field.name not in ("length", "first", "shares"))
_MISSING = -1  # in place of the number of dimensions of a tensor that is None


@dataclass(eq=False)
class PackedSchedules:
    """The schedules of one pass as tensors.

    Attributes:
        values: int32 [n] on the device of the layers, all tensors of all schedules one after the other.
        layout: int64 on the CPU: a different number for each pass, then sizes of each schedule; see `_sizes_of`.
        reaches: the reach of each schedule, as (kind, size), or None.
    """

    values: Tensor
    layout: Tensor
    reaches: tuple[tuple[str, int] | None, ...]


def pack_schedules(schedules: dict[KeyReach | None, Schedule]) -> PackedSchedules:
    """Return the schedules of all kinds of layers of a pass as tensors, on the device of the schedules."""
    found = tuple(schedules.values())
    number = next(_NUMBERS)
    sizes = [size for schedule in found for size in _sizes_of(schedule)]
    values = torch.cat(
        [tensor.flatten() for schedule in found for tensor in _tensors_of(schedule) if tensor is not None]
    )
    _remember(number, found)
    layout = torch.tensor([number, *sizes], dtype=torch.int64)
    reaches = tuple(None if reach is None else (reach.kind, reach.size) for reach in schedules)
    return PackedSchedules(values, layout, reaches)


def _tensors_of(schedule: Schedule) -> list[Tensor | None]:
    shares = schedule.shares
    of_shares = [None, None] if shares is None else [shares.shares, shares.joined]
    return [getattr(schedule, name) for name in _TENSORS] + of_shares


def _sizes_of(schedule: Schedule) -> list[int]:
    """Return length, first and num_sums, then the number of dimensions and the shape of each tensor."""
    # A tensor [2, 384] and one that is None -> [2, 2, 384, -1]
    sizes = [schedule.length, schedule.first, 0 if schedule.shares is None else schedule.shares.num_sums]
    for tensor in _tensors_of(schedule):
        sizes += [_MISSING] if tensor is None else [tensor.ndim, *tensor.shape]
    return sizes


def _unpacked(values: Tensor, layout: Tensor) -> tuple[Schedule, ...]:
    number, *sizes = layout.tolist()
    found = _RECENT.get(number)
    if found is None:
        found = tuple(_read_schedules(values, iter(sizes)))
        _remember(number, found)
    return found


def _read_schedules(values: Tensor, sizes: Any) -> Any:
    """Yield the schedules that `pack_schedules` got, with views of `values` as tensors."""
    begin = 0
    for length in sizes:
        first, num_sums = next(sizes), next(sizes)
        tensors: list[Tensor | None] = []
        for _ in range(len(_TENSORS) + 2):
            dimensions = next(sizes)
            shape = None if dimensions == _MISSING else [next(sizes) for _ in range(dimensions)]
            if shape is not None:
                count = torch.Size(shape).numel()
                tensors.append(values[begin : begin + count].view(shape))
                begin += count
            else:
                tensors.append(None)
        *own, shares, joined = tensors
        both = None if shares is None or joined is None else KeyShares(shares, joined, num_sums)
        columns: dict[str, Any] = dict(zip(_TENSORS, own, strict=True))
        yield Schedule(length=length, first=first, shares=both, **columns)


def _remember(number: int, schedules: tuple[Schedule, ...]) -> None:
    _RECENT[number] = schedules
    while len(_RECENT) > _NUM_RECENT:
        _RECENT.popitem(last=False)


# Defined without torch.library.custom_op, whose checks take longer than a launch.
_LIBRARY: Any = torch.library.Library("treepack", "DEF")  # type: ignore[no-untyped-call]
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? sinks"
_OPTIONS = "Tensor values, Tensor layout, int kind, float scale, float softcap"
_LIBRARY.define(f"attention({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"attention_backward({_OPERANDS}, Tensor out, Tensor lse, Tensor grad, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _read_inputs(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *options: Any) -> AttentionInputs:
    """Return the operands of a call, whose schedule is number `kind` of the packed ones; a `softcap` of 0 is none."""
    values, layout, kind, scale, softcap = options
    schedule = _unpacked(values, layout)[kind]
    return AttentionInputs(query, key, value, schedule, scale, sinks, softcap or None)


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp."""
    return forward_kernels(_read_inputs(*arguments))


def _attention_shapes(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return tensors without values that have the shapes of the results of `_attention`."""
    softcap = options[-1]
    batch, heads, length = query.shape[:3]
    padded = (length + QUERY_BLOCK - 1) // QUERY_BLOCK * QUERY_BLOCK
    places = padded if backend(query, value, capped=softcap != 0) == "hopper" else length
    lse = torch.empty((batch, heads, places), dtype=torch.float32, device=query.device)
    return token_major(query, value.shape[-1]), lse


def _attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks, of which the last is empty without sinks."""
    inputs = _read_inputs(query, key, value, sinks, *options)
    dq, dk, dv, dsinks = backward_kernels(inputs, out, lse, grad)
    return dq, dk, dv, query.new_empty(0) if dsinks is None else dsinks


def _backward_shapes(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tensors without values that have the shapes of the results of `_attention_backward`."""
    dsinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return token_major(query), token_major(key), token_major(value), dsinks


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, values, layout, *options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(query, key, value, sinks, out, lse, values, layout)
    ctx.options = options


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, sinks, out, lse, values, layout = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.treepack.attention_backward(
        query, key, value, sinks, out, lse, grad, values, layout, *ctx.options
    )
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", _attention, _device)
    _LIBRARY.impl("attention_backward", _attention_backward, _device)
torch.library.register_fake("treepack::attention", _attention_shapes, lib=_LIBRARY)
torch.library.register_fake("treepack::attention_backward", _backward_shapes, lib=_LIBRARY)
torch.library.register_autograd("treepack::attention", _differentiate, setup_context=_save_for_backward, lib=_LIBRARY)


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSchedules,
    reach: KeyReach | None,
    *,
    scale: float | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Compute `autograd.triton_attention` of a whole row; torch.compile may trace it.

    Args:
        query, key, value, scale, sinks, softcap: as there.
        packed: the schedules of the pass.
        reach: of this layer, one of `packed.reaches`.
    """
    place = packed.reaches.index(None if reach is None else (reach.kind, reach.size))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.treepack.attention(
        query, key, value, sinks, packed.values, packed.layout, place, factor, softcap or 0.0
    )[0]
    return out


def keep_attention() -> tuple[Any, Any]:
    """Return the contexts of a checkpoint that keeps the results of attention and computes all else again."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(_: Any, operator: Callable[..., Any], *__: Any, **___: Any) -> CheckpointPolicy:
    is_attention = operator is torch.ops.treepack.attention.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
