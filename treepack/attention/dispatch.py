"""Tree attention by the implementation that suits the tensors, or by a named one.

    subtree_end --prepare, once per row--> schedule --tree_attention, once per layer--> [B, H, T, D_v]

implementation    runs on                           precision            result of `prepare`
reference         anything                          any, float64 too     None
flex              CPU (dense, slow), CUDA           float64 on the CPU   BlockMask
flash             Hopper, Blackwell, flash-attn-4   bf16, fp16           BlockMask
triton            CUDA                              bf16, fp16, fp32     Schedule, or Chains if nothing branches
auto              the first implementation in `AUTO` that has no obstacle

A schedule serves every layer, the backward, and recomputation under checkpointing. There are no parameters for
soft-capped scores and attention sinks, because no implementation has them; `interface` refuses models that use them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from treepack.attention.autograd import Kept, runs_hopper, triton_attention
from treepack.attention.chains import Chains, chain_attention, find_chains
from treepack.attention.flash import MAX_HEAD_DIM, build_flash_mask, flash_attention, has_flash_attention_4
from treepack.attention.flex import BLOCK, build_block_mask, flex_attention
from treepack.attention.reference import check_shapes, reference_attention
from treepack.attention.schedule import Schedule, build_schedule
from treepack.errors import TreepackError, install_hint

# Implementations that `auto` tries, in this order, by kind of device. Other devices get the reference. So does the CPU,
# because FlexAttention is dense there (4096 tokens on one core: 7.2 s against 0.16 s).
AUTO = {"cuda": ("triton", "flash", "flex", "reference")}

NAMES = ("reference", "flex", "flash", "triton")
TRITON_MAX_HEAD_DIM = 256  # the largest that `portable.forward` has shapes for

AnySchedule = BlockMask | Schedule | Chains | None

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
    kept: tuple[Kept, Hashable] | None = None,
) -> Tensor:
    """Compute softmax attention in which token q sees token k if and only if k <= q < subtree_end[k].

    Args:
        q: [B, H, T, D], any T >= 1.
        k: [B, H_kv, T, D]; H is a multiple of H_kv, and query head h reads head h // (H / H_kv).
        v: [B, H_kv, T, D_v].
        subtree_end: int [B, T], or [T] if all rows are the same tree; one past the last token of each token's subtree.
        scale: factor of the scores, D**-0.5 by default.
        impl: reference, flex, flash, triton or auto.
        schedule: the result of `prepare` for this subtree_end and this implementation; if None, computed here.
        kept: the object in which triton keeps the output for recomputation under checkpointing, and the place of this
            layer in it; other implementations compute the output again.

    Returns:
        [B, H, T, D_v] in the dtype of the inputs, differentiable in q, k and v.

    Raises:
        TreepackError: if the shapes do not fit, if the dtypes differ, if the schedule was made for other rows or for
            another implementation, or if the implementation cannot run on this device, dtype or head dimension.
    """
    end = subtree_end.expand(len(q), -1) if subtree_end.ndim == 1 else subtree_end
    check_shapes(q, k, v, end)
    dims = (q.shape[-1], v.shape[-1])
    chosen = resolve(impl, q.device, q.dtype, dims)
    if chosen != "reference" and not q.dtype == k.dtype == v.dtype:
        raise TreepackError(f"attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; expected one dtype")
    if schedule is None:
        schedule = prepare(end, chosen, varlen=impl == "auto" and takes_chains(q.device, q.dtype, dims))
    else:
        _check_schedule(schedule, chosen, end)
    with torch.autocast(q.device.type, enabled=False):  # autocast would lower the precision of reference and flex
        if isinstance(schedule, Chains):
            return chain_attention(q, k, v, schedule, scale=scale)
        if isinstance(schedule, Schedule):
            return triton_attention(q, k, v, schedule, scale=scale, kept=kept)
        if isinstance(schedule, BlockMask):
            attend = flash_attention if chosen == "flash" else flex_attention
            return attend(q, k, v, end, block_mask=schedule, scale=scale)
        return reference_attention(q, k, v, end, scale=scale)


def prepare(
    subtree_end: Tensor, impl: str, *, device: torch.device | str | None = None, varlen: bool = False
) -> AnySchedule:
    """Return the schedule of a row for an implementation; one schedule serves every layer.

    Args:
        subtree_end: int [B, T] or [T]. If it is on the CPU, for example in a data worker, no GPU is synchronised.
        impl: reference, flex, flash or triton: a result of `resolve`.
        device: device of the layers, by default that of `subtree_end`.
        varlen: allow Chains for a row in which nothing branches; see `takes_chains`.

    Returns:
        the schedule on `device`; None for the reference.
    """
    end = subtree_end[None] if subtree_end.ndim == 1 else subtree_end
    target = end.device if device is None else torch.device(device)
    schedule: AnySchedule = find_chains(end) if varlen else None
    if schedule is None and impl == "flex":
        schedule = build_block_mask(end.to(target))
    elif schedule is None and impl == "flash":
        schedule = build_flash_mask(end.to(target))
    elif schedule is None and impl == "triton":
        schedule = build_schedule(end)
    if isinstance(schedule, Schedule | Chains) and end.device.type == "cpu" and target.type == "cuda":
        return schedule.pin_memory().to(target, non_blocking=True)
    return schedule.to(target) if isinstance(schedule, Schedule | Chains) else schedule


def resolve(impl: str, device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> str:
    """Return the name of the implementation to run.

    Args:
        impl: one of `NAMES`, or auto.
        device: device of the tensors.
        dtype: dtype of q, k and v.
        head_dims: one pair (of q and k, of v) for every kind of layer.

    Raises:
        TreepackError: if `impl` is another name, or if it names an implementation that cannot run there.
    """
    if impl == "auto":
        return choose(device, dtype, *head_dims)
    if impl not in NAMES:
        raise TreepackError(f"attention is {impl!r}; expected one of auto, {', '.join(NAMES)}")
    reason = obstacle(impl, device, dtype, *head_dims)
    if reason is not None:
        raise TreepackError(f"attention: {impl} {reason}, or let auto choose")
    return impl


@functools.cache
def choose(device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> str:
    """Return the first implementation in `AUTO` that has no obstacle; cached, so the log names it once."""
    obstacles = []
    for impl in AUTO.get(device.type, ("reference",)):
        reason = obstacle(impl, device, dtype, *head_dims)
        if reason is None:
            break
        # "needs FlashAttention-4; pip install flash-attn-4" -> "flash needs FlashAttention-4"
        obstacles.append(f"{impl} {reason.partition(';')[0]}")
    why = f" ({'; '.join(obstacles)})" if obstacles else ""
    dims = _dims_text(head_dims)
    _log.info("attention: %s on %s in %s, head dimensions %s%s", impl, device, _dtype_name(dtype), dims, why)
    return impl


def takes_chains(device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> bool:
    """Return whether `auto` runs varlen FlashAttention on rows in which nothing branches."""
    # FlashAttention takes equal head dimensions, multiples of 8 up to 256, on Ampere (8, 0) and later.
    fits = all(d == d_v and d <= 256 and d % 8 == 0 for d, d_v in head_dims)
    capable = device.type == "cuda" and dtype in _HALVES and torch.cuda.get_device_capability(device) >= (8, 0)
    hopper = all(runs_hopper(device, dtype, d) for d, _ in head_dims)  # faster than varlen, even on such rows
    return fits and capable and not hopper and choose(device, dtype, *head_dims) != "reference"


def row_multiple(impl: str) -> int:
    """Return the row length multiple that `impl` prefers; other lengths cost a copy of q, k and v in every layer."""
    return BLOCK if impl in ("flex", "flash") else 1


def obstacle(impl: str, device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> str | None:
    """Return the reason why `impl` cannot run there, and the remedy; None if it can run.

    The text follows the name of the implementation: "needs FlashAttention-4; pip install flash-attn-4".
    """
    return _OBSTACLES[impl](device, dtype, head_dims)


def _no_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> None:
    return None


def _flex_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> str | None:
    if device.type == "cpu":
        return None
    if find_spec("triton") is None:
        return f"needs triton on a GPU; {install_hint('train')}, or use reference"
    if dtype == torch.float64:
        return "has no float64 on a GPU; use float32 or reference"
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
        return f"needs triton, which is not installed; {install_hint('train')}, or use reference"
    if device.type != "cuda" and not _is_interpreted():
        return f"needs a GPU and the tensors are on {device}; use reference"
    if dtype not in (*_HALVES, torch.float32):
        return f"computes bfloat16, float16 and float32, not {_dtype_name(dtype)}; use reference"
    if any(d != d_v or d > TRITON_MAX_HEAD_DIM for d, d_v in head_dims):
        return f"takes one head dimension of at most {TRITON_MAX_HEAD_DIM}, not {_dims_text(head_dims)}; use flex"
    return None


_OBSTACLES = {
    "reference": _no_obstacle,
    "flex": _flex_obstacle,
    "flash": _flash_obstacle,
    "triton": _triton_obstacle,
}


def _is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which takes tensors on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims_text(head_dims: tuple[tuple[int, int], ...]) -> str:
    """Return head dimensions (of q and k, of v) as text."""
    # ((192, 128), (64, 64)) -> "192/128 and 64/64"
    return " and ".join("/".join(map(str, dims)) for dims in head_dims)


_EXPECTED = {"reference": (), "flex": (BlockMask,), "flash": (BlockMask,), "triton": (Schedule, Chains)}


def _check_schedule(schedule: AnySchedule, impl: str, end: Tensor) -> None:
    """Check that a schedule was made for this implementation and for rows of this number and length.

    Raises:
        TreepackError: if it was not.
    """
    size: tuple[int, int] = (0, 0)
    rows, length = expected = (len(end), end.shape[1])
    if isinstance(schedule, BlockMask):
        block = schedule.BLOCK_SIZE[0]
        size = (len(schedule.kv_num_blocks), schedule.seq_lengths[0])
        expected = (rows, -(-length // block) * block)  # 300 tokens in blocks of 128 -> 384
    elif isinstance(schedule, Schedule):
        size = (len(schedule.end), schedule.length)
    elif isinstance(schedule, Chains):
        size = (schedule.rows, schedule.length)
    if not isinstance(schedule, (*_EXPECTED[impl], Chains)):
        raise TreepackError(
            f"attention: the schedule is a {type(schedule).__name__}, which {impl} does not take; "
            f"pass prepare(subtree_end, {impl!r})"
        )
    if size != expected:
        raise TreepackError(
            f"attention: the schedule has {size[0]} rows of {size[1]} tokens and q has {rows} of {length}; "
            "pass the schedule of these rows"
        )
