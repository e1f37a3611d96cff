"""Tree attention by this package's own kernels, as a function that torch differentiates.

    query, key, value, sinks, Schedule --forward--> output, log-sum-exp
    gradient of the output             --backward--> gradients of query, key, value and sinks

Between forward and backward, only the inputs, the output and the log-sum-exp are kept. This module chooses the kernels;
`dispatch` makes sure that a row has a schedule and that the kernels take the shapes and dtypes.

Triton launches on the current GPU even if the tensors are on another one, so their GPU becomes the current one for each
launch. torch.compile skips this module: it would trace the launches, and it would decide only once whether this is a
recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once
from torch.autograd.function import once_differentiable

from treepack.attention.kernel_launch import AttentionInputs, InputGradients
from treepack.attention.schedule import Schedule
from treepack.errors import TreepackError

# Head dimensions (of q and k, of v) that the Hopper kernels take, with windows, chunks and sinks or without.
HOPPER_HEAD_DIMS = frozenset({(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)})
# The first and last release of Triton whose Gluon has compiled them.
HOPPER_TRITON = ((3, 6), (3, 9))

_ForwardKernels = Callable[[AttentionInputs], tuple[Tensor, Tensor]]
_BackwardKernels = Callable[[AttentionInputs, Tensor, Tensor, Tensor], InputGradients]


class KeptOutputs:
    """Outputs of attention, kept from the forward pass so that recomputation under checkpointing skips the kernel.

    A checkpointed layer runs twice: in the forward pass, which stores its output and log-sum-exp here, and inside the
    backward pass, which takes them out again. One object serves all layers of one forward pass and distinguishes them
    by `place`, any hashable of the layer. If a place occurs twice before the backward pass, for example because layers
    share their module, its output is computed again.

    `move` puts a tensor elsewhere until it is taken: it returns a function that returns the tensor. Places in `skipped`
    belong to layers that run once, so nothing is stored for them.
    """

    def __init__(self) -> None:
        """Start without outputs, which stay on their device."""
        self.move: Callable[[Tensor], Callable[[], Tensor]] | None = None
        self.skipped: set[Hashable] = set()
        self._results: dict[Hashable, tuple[Callable[[], Tensor], Callable[[], Tensor]] | None] = {}

    def store(self, place: Hashable, out: Tensor, lse: Tensor) -> None:
        """Keep the output and the log-sum-exp of the forward pass at `place`."""
        if place in self.skipped:
            return
        if place in self._results:
            # A recomputation could not distinguish the two results.
            self._results[place] = None
        else:
            move = self.move or _stay
            self._results[place] = (move(out.detach()), move(lse))

    def take(self, place: Hashable) -> tuple[Tensor, Tensor] | None:
        """Remove and return the result at `place`; None in a forward pass, or if there is no result."""
        result = self._results.pop(place, None) if is_recomputing() else None
        return None if result is None else (result[0](), result[1]())


def _stay(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def is_recomputing() -> bool:
    """Return True if this code runs inside a backward pass."""
    # The backward pass of autograd has a graph task; outside of one the id is -1.
    return bool(torch._C._current_graph_task_id() >= 0)


@_disable_dynamo
def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    schedule: Schedule,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    kept: tuple[KeptOutputs, Hashable] | None = None,
) -> Tensor:
    """Compute softmax attention over the visible pairs of a schedule's rows.

    Args:
        query, key, value: as in `AttentionInputs`, all in bfloat16, float16 or float32; D <= 512 and D_v <= 512.
        schedule, sinks, softcap: as in `AttentionInputs`; the schedule has `start` if the layer has windows.
        scale: factor of the scores, D**-0.5 by default.
        kept: the object that keeps the output for recomputation, and the place of this layer in it.

    Returns:
        [B, H, T - first, D_v] in the dtype of `query`, in memory [B, T - first, H, D_v].

    Raises:
        TreepackError: if `scale` or `softcap` is not positive, there is not one sink per head, or the schedule has
            other rows or is on another device.
    """
    batch, length, width = len(query), key.shape[2], query.shape[3]
    scale = width**-0.5 if scale is None else scale
    if not scale > 0:
        raise TreepackError(f"attention: scale is {scale}; expected a positive number")
    if softcap is not None and not softcap > 0:
        raise TreepackError(f"attention: softcap is {softcap}; expected a positive number, or None for no cap")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise TreepackError(
            f"attention: sinks are {list(sinks.shape)}; expected [{query.shape[1]}], one per query head"
        )
    if (len(schedule.end), schedule.length) != (batch, length) or schedule.end.device != query.device:
        raise TreepackError(
            f"attention: the schedule has {len(schedule.end)} x {schedule.length} tokens on {schedule.end.device}, "
            f"key {batch} x {length} on {query.device}; pass the schedule of these rows, moved to that device"
        )
    if query.shape[2] != length - schedule.first:
        raise TreepackError(
            f"attention: query has {query.shape[2]} tokens, and the schedule has {length - schedule.first}, from "
            f"token {schedule.first} on; pass the queries of these tokens"
        )
    out: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        kept, *AttentionInputs(query, key, value, schedule, scale, sinks, softcap)
    )
    return out


def backend(query: Tensor, value: Tensor | None = None, *, capped: bool = False) -> str:
    """Return the name of the kernels for such a layer: hopper or portable.

    Args:
        query: [B, H, T, D].
        value: [B, H_kv, T, D_v]; if None, D_v is D.
        capped: True if the layer has a cap of scores, which only the portable kernels compute.
    """
    # Numbers, also while torch.compile traces a layer whose head dimension is a symbol there, which has no hash.
    head_dims = (int(query.shape[-1]), int((query if value is None else value).shape[-1]))
    runs = runs_hopper(query.device, query.dtype, head_dims)
    return "hopper" if runs and not capped else "portable"


def runs_hopper(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> bool:
    """Return True if the Hopper kernels take such tensors."""
    known = head_dims in HOPPER_HEAD_DIMS
    suits = dtype in (torch.bfloat16, torch.float16) and known and device.type == "cuda"
    return suits and has_hopper(device)


@functools.cache
def has_hopper(device: torch.device) -> bool:
    """Return True if the GPU is a Hopper and this release of Triton compiles its kernels."""
    import triton

    # "3.6.0" -> (3, 6)
    release = tuple(int(number) for number in triton.__version__.split(".")[:2])
    # AMD's gfx90a reports (9, 0) too.
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and HOPPER_TRITON[0] <= release <= HOPPER_TRITON[1]


def _kernels(inputs: AttentionInputs) -> tuple[_ForwardKernels, _BackwardKernels]:
    """Return the functions that run forward and backward; imported late, because triton may be missing."""
    if backend(inputs.query, inputs.value, capped=inputs.softcap is not None) == "hopper":
        from treepack.attention.hopper.launch import hopper_backward, hopper_forward

        return hopper_forward, hopper_backward
    from treepack.attention.portable.backward import portable_backward
    from treepack.attention.portable.forward import portable_forward

    return portable_forward, portable_backward


def forward_kernels(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the kernels for these operands; the latter has the shape that they need."""
    with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]
        return _kernels(inputs)[0](_with_dense_operands(inputs))


def backward_kernels(inputs: AttentionInputs, out: Tensor, lse: Tensor, grad: Tensor) -> InputGradients:
    """Return the gradients of query, key, value and sinks, from the results of `forward_kernels` and their gradient."""
    with torch.cuda.device_of(inputs.query):  # type: ignore[no-untyped-call]
        return _kernels(inputs)[1](_with_dense_operands(inputs), out, lse, _with_dense_rows(grad))


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: tuple[KeptOutputs, Hashable] | None, *operands: Any) -> Tensor:
        # `AttentionInputs` one by one, because autograd finds tensors only among the arguments themselves.
        inputs = _with_dense_operands(AttentionInputs(*operands))
        result = kept[0].take(kept[1]) if kept is not None else None
        if result is not None:
            out, lse = result
        else:
            out, lse = forward_kernels(inputs)
            if kept is not None and not is_recomputing():
                kept[0].store(kept[1], out, lse)
        ctx.save_for_backward(inputs.query, inputs.key, inputs.value, inputs.sinks, out, lse)
        ctx.schedule, ctx.scale, ctx.softcap = inputs.schedule, inputs.scale, inputs.softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        inputs = AttentionInputs(query, key, value, ctx.schedule, ctx.scale, sinks, ctx.softcap)
        dq, dk, dv, dsinks = backward_kernels(inputs, out, lse, grad)
        return None, dq, dk, dv, None, None, dsinks, None


def _with_dense_operands(inputs: AttentionInputs) -> AttentionInputs:
    query, key, value = (_with_dense_rows(x) for x in inputs[:3])
    return inputs._replace(query=query, key=key, value=value)


def _with_dense_rows(x: Tensor) -> Tensor:
    """Return `x`, copied if its last dimension is not dense in memory, as in the gradient of a sum (stride 0)."""
    return x if x.stride(-1) == 1 else x.contiguous()
