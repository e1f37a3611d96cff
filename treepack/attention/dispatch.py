"""Tree attention by the implementation that suits the tensors, or by a named one.

    subtree_end --prepare, once per row and reach--> schedule --tree_attention, once per layer--> [B, H, T, D_v]

implementation    runs on                           precision            result of `prepare`
reference         anything                          any, float64 too     None
flex              CPU (dense, slow), CUDA           float64 on the CPU   BlockMask
flash             Hopper, Blackwell, flash-attn-4   bf16, fp16           BlockMask
triton            CUDA                              bf16, fp16, fp32     Schedule, or Chains if nothing branches
auto              the first implementation in `AUTO` that has no obstacle

A schedule serves every layer of one reach (`reach.Reach`), the backward, and recomputation under checkpointing.
`BatchSchedules` makes one for each reach of a model whose layers differ. Windows, chunks, sinks, caps of scores and
rectangles run on every implementation except flash and chains.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from treepack.attention.autograd import KeptOutputs, runs_hopper, triton_attention
from treepack.attention.chains import ChainRows, chain_attention
from treepack.attention.flash import MAX_HEAD_DIM, flash_attention, has_flash_attention_4
from treepack.attention.flex import BLOCK, flex_attention
from treepack.attention.kernel_launch import is_interpreted
from treepack.attention.reference import check_shapes, reference_attention
from treepack.attention.schedule import Schedule
from treepack.attention.schedules import AnySchedule, BatchSchedules, check_schedule, first_of_block, prepare
from treepack.errors import TreepackError

__all__ = [
    "AUTO",
    "NAMES",
    "WIDE_SHARED",
    "AnySchedule",
    "BatchSchedules",
    "choose",
    "obstacle",
    "prepare",
    "resolve",
    "row_multiple",
    "takes_chains",
    "tree_attention",
]

# Implementations that `auto` tries, in this order, by kind of device. Other devices get the reference. So does the CPU,
# because FlexAttention is dense there (4096 tokens on one core: 7.2 s against 0.16 s).
AUTO = {"cuda": ("triton", "flash", "flex", "reference")}

NAMES = ("reference", "flex", "flash", "triton")
_TRITON_MAX_HEAD_DIM = 512  # the largest that `portable_forward` has shapes for
_FLEX_MAX_HEAD_DIM = 256  # the tiles of larger heads exceed the shared memory of a GPU, and compiling fails

# Shared memory of a program that head dimensions above 256 need in `portable`, in KiB, by the bytes of an element.
WIDE_SHARED = {2: 112, 4: 194}

_HALVES = (torch.bfloat16, torch.float16)  # the dtypes of tensor cores that every FlashAttention takes
_log = logging.getLogger("treepack")


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_end: Tensor,
    *,
    scale: float | None = None,
    impl: str = "auto",
    schedule: AnySchedule = None,
    kept: tuple[KeptOutputs, Hashable] | None = None,
    start: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Compute softmax attention in which token q sees token k if and only if start[q] <= k <= q < subtree_end[k].

    Args:
        q: [B, H, T - first, D], any T >= 1.
        k: [B, H_kv, T, D]; H is a multiple of H_kv, and query head h reads head h // (H / H_kv).
        v: [B, H_kv, T, D_v].
        subtree_end: int [B, T], or [T] if all rows are the same tree; one past the last token of each token's subtree.
        scale: factor of the scores, D**-0.5 by default.
        impl: reference, flex, flash, triton or auto.
        schedule: the result of `prepare` for this subtree_end, start, implementation and `first`; if None, computed
            here.
        kept: the object in which triton keeps the output for recomputation under checkpointing, and the place of this
            layer in it; other implementations compute the output again.
        start: int [B, T], the first token that each token sees, from `reach.first_visible`; None for all ancestors.
        sinks: [H], one more score per head that takes its share of the softmax and has no value.
        softcap: a positive number; scores become softcap * tanh(score / softcap).
        first: the token of the first query, 0 to T - 1; the tokens before it are only keys and values, and they must be
            finite even if nothing sees them. A multiple of 128 spares a copy of q in every layer.

    Returns:
        [B, H, T - first, D_v] in the dtype of the inputs, differentiable in q, k, v and sinks.

    Raises:
        TreepackError: if the shapes do not fit, if the dtypes differ, if the schedule was made for other rows or for
            another implementation, or if the implementation cannot run on this device, dtype or head dimension.
    """
    end = subtree_end.expand(len(q), -1) if subtree_end.ndim == 1 else subtree_end
    check_shapes(q, k, v, end, first)
    if start is not None and start.shape != end.shape:
        raise TreepackError(
            f"attention: start is {list(start.shape)} and subtree_end is {list(end.shape)}; "
            "pass first_visible(subtree_end, reach) of these rows"
        )
    dims = (q.shape[-1], v.shape[-1])
    is_plain = start is None and sinks is None and softcap is None
    chosen = resolve(impl, q.device, q.dtype, dims, plain=is_plain and not first)
    if chosen != "reference" and not q.dtype == k.dtype == v.dtype:
        raise TreepackError(f"attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; expected one dtype")
    if schedule is None:
        varlen = impl == "auto" and is_plain and takes_chains(q.device, q.dtype, dims)
        schedule = prepare(end, chosen, start=start, varlen=varlen, first=first)
    else:
        check_schedule(schedule, chosen, end, is_plain=is_plain, start=start, first=first)
    with torch.autocast(q.device.type, enabled=False):  # autocast would lower the precision of reference and flex
        if schedule is None:
            return reference_attention(
                q, k, v, end, scale=scale, start=start, sinks=sinks, softcap=softcap, first=first
            )
        if isinstance(schedule, ChainRows):
            return chain_attention(q, k, v, schedule, scale=scale)
        # 300 -> 44 queries in front, to a whole block; their outputs are dropped, so they add 0 to every gradient
        begin = first_of_block(first)
        added = first - begin
        q = pad(q, (0, 0, added, 0)) if added else q
        if isinstance(schedule, Schedule):
            out = triton_attention(q, k, v, schedule, kept=kept, scale=scale, sinks=sinks, softcap=softcap)
        elif chosen == "flash":
            out = flash_attention(q, k, v, end, block_mask=schedule, scale=scale)
        else:
            out = flex_attention(
                q, k, v, end, block_mask=schedule, scale=scale, sinks=sinks, softcap=softcap, first=begin
            )
        return out[:, :, added:] if added else out


def resolve(
    impl: str, device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int], plain: bool = True
) -> str:
    """Return the name of the implementation to run.

    Args:
        impl: one of `NAMES`, or auto.
        device: device of the tensors.
        dtype: dtype of q, k and v.
        head_dims: one pair (of q and k, of v) for every kind of layer.
        plain: False if a layer has a window, a chunk, sinks or a cap of scores, or computes a rectangle.

    Raises:
        TreepackError: if `impl` is another name, or if it names an implementation that cannot run there.
    """
    if impl == "auto":
        return choose(device, dtype, *head_dims, plain=plain)
    if impl not in NAMES:
        raise TreepackError(f"attention is {impl!r}; expected one of auto, {', '.join(NAMES)}")
    reason = obstacle(impl, device, dtype, *head_dims, plain=plain)
    if reason is not None:
        raise TreepackError(f"attention: {impl} {reason}, or let auto choose")
    return impl


@functools.cache
def choose(device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int], plain: bool = True) -> str:
    """Return the first implementation in `AUTO` that has no obstacle; cached, so the log names it once."""
    obstacles = []
    for impl in AUTO.get(device.type, ("reference",)):
        reason = obstacle(impl, device, dtype, *head_dims, plain=plain)
        if reason is None:
            break
        # "needs FlashAttention-4; pip install flash-attn-4" -> "flash needs FlashAttention-4"
        obstacles.append(f"{impl} {reason.partition(';')[0]}")
    why = f" ({'; '.join(obstacles)})" if obstacles else ""
    dims = _dims_text(head_dims)
    _log.info("attention: %s on %s in %s, head dimensions %s%s", impl, device, _dtype_name(dtype), dims, why)
    return impl


def takes_chains(device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> bool:
    """Return True if `auto` runs varlen FlashAttention on rows without a branch."""
    # FlashAttention takes equal head dimensions, multiples of 8 up to 256, on Ampere (8, 0) and later.
    fits = all(d == d_v and d <= 256 and d % 8 == 0 for d, d_v in head_dims)
    capable = device.type == "cuda" and dtype in _HALVES and torch.cuda.get_device_capability(device) >= (8, 0)
    hopper = all(runs_hopper(device, dtype, dims) for dims in head_dims)  # faster than varlen, even on such rows
    return fits and capable and not hopper and choose(device, dtype, *head_dims) != "reference"


def row_multiple(impl: str) -> int:
    """Return the row length multiple that `impl` prefers; other lengths cost a copy of q, k and v in every layer."""
    return BLOCK if impl in ("flex", "flash") else 1


def obstacle(
    impl: str, device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int], plain: bool = True
) -> str | None:
    """Return the reason why `impl` cannot run there, and the remedy; None if it can run. Arguments as in `resolve`.

    The text follows the name of the implementation: "needs FlashAttention-4; pip install flash-attn-4".
    """
    if impl == "reference":
        return None
    if impl == "flash" and not plain:
        return "has no windows, chunks, sinks, caps of scores and rectangles; use flex"
    return _OBSTACLES[impl](device, dtype, head_dims)


def _flex_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> str | None:
    if device.type == "cpu":
        return None
    if find_spec("triton") is None:
        return "needs triton on a GPU; run pip install triton, or use reference"
    if dtype == torch.float64:
        return "has no float64 on a GPU; use float32 or reference"
    if any(max(dims) > _FLEX_MAX_HEAD_DIM for dims in head_dims):
        return (
            f"runs out of shared memory on a GPU with head dimensions above {_FLEX_MAX_HEAD_DIM}, "
            f"and they are {_dims_text(head_dims)}; use triton or reference"
        )
    return None


def _flash_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> str | None:
    # Capability 9 is Hopper; 10 and 11 are Blackwell.
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10, 11):
        return f"needs a Hopper or Blackwell GPU and the tensors are on {device}; use another implementation"
    if not has_flash_attention_4():
        return "needs FlashAttention-4; pip install flash-attn-4"
    if dtype not in _HALVES:
        return f"computes bfloat16 and float16, not {_dtype_name(dtype)}; use triton, flex or reference"
    if any(max(dims) > MAX_HEAD_DIM or dims[0] % 8 or dims[1] % 8 for dims in head_dims):
        return (
            f"takes head dimensions that are multiples of 8 up to {MAX_HEAD_DIM}, not {_dims_text(head_dims)}; use flex"
        )
    return None


def _triton_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> str | None:
    if find_spec("triton") is None:
        return "needs triton, which is not installed; run pip install triton, or use reference"
    if device.type != "cuda" and not is_interpreted():
        return f"needs a GPU and the tensors are on {device}; use reference"
    if dtype not in (*_HALVES, torch.float32):
        return f"computes bfloat16, float16 and float32, not {_dtype_name(dtype)}; use reference"
    largest = max((max(dims) for dims in head_dims), default=0)
    if largest > _TRITON_MAX_HEAD_DIM:
        return f"takes head dimensions of at most {_TRITON_MAX_HEAD_DIM}, not {_dims_text(head_dims)}; use reference"
    if largest > 256 and device.type == "cuda":
        needed, has = WIDE_SHARED[dtype.itemsize], _shared_memory(device)
        if has < needed:
            return (
                f"needs {needed} KiB of shared memory for head dimensions above 256, "
                f"and {device} has {has}; use reference"
            )
    return None


_OBSTACLES = {
    "flex": _flex_obstacle,
    "flash": _flash_obstacle,
    "triton": _triton_obstacle,
}


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the shared memory that one program may have, in KiB."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack this field
    return int(properties.shared_memory_per_block_optin) >> 10


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims_text(head_dims: tuple[tuple[int, int], ...]) -> str:
    """Return head dimensions (of q and k, of v) as text."""
    # ((192, 128), (64, 64)) -> "192/128 and 64/64"
    return " and ".join("/".join(map(str, dims)) for dims in head_dims)
