"""Tree attention by whichever implementation suits the tensors, or by the one that is named.

    subtree_end --prepare, once per row--> schedule --tree_attention, once per layer--> [B, H, T, D_v]

implementation    runs on                           precision            what `prepare` makes
reference         anything                          any, float64 too     nothing
flex              CPU (dense, slow), CUDA           float64 on the CPU   BlockMask
flash             Hopper, Blackwell, flash-attn-4   bf16, fp16           BlockMask
triton            CUDA                              bf16, fp16, fp32     Schedule, or Chains if nothing branches
auto              the first of `AUTO` that nothing stands against

A schedule serves every layer, the backward and recomputation under checkpointing. Soft-capped scores and attention
sinks have no parameter here, for no implementation has them; `interface` refuses models that ask.
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
from treepack.attention.flash import MAX_HEAD_DIM, build_flash_mask, flash_attention, installed
from treepack.attention.flex import BLOCK, build_block_mask, flex_attention
from treepack.attention.reference import check_shapes, reference_attention
from treepack.attention.schedule import Schedule, build_schedule
from treepack.errors import TreepackError

# What `auto` tries, in this order, by the kind of device. Other devices, and the CPU, where FlexAttention is dense
# (4096 tokens: 7.2 s against 0.16 s on one core), get the reference.
AUTO = {"cuda": ("triton", "flash", "flex", "reference")}

NAMES = ("reference", "flex", "flash", "triton")
TRITON_MAX_HEAD_DIM = 256

AnySchedule = BlockMask | Schedule | Chains | None

_HALVES = (torch.bfloat16, torch.float16)
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
    """Softmax attention in which token q sees token k if and only if k <= q < subtree_end[k].

    Args:
        q: [B, H, T, D], any T >= 1.
        k: [B, H_kv, T, D]; H is a multiple of H_kv, and query head h reads head h // (H / H_kv).
        v: [B, H_kv, T, D_v].
        subtree_end: int [B, T], or [T] for rows that are alike; one past the last token of each token's subtree.
        scale: factor of the scores, D**-0.5 by default.
        impl: reference, flex, flash, triton or auto.
        schedule: what `prepare` made of this subtree_end for this implementation; made here if it is not given.
        kept: where triton keeps the output for its recomputation under checkpointing, and this layer's place there;
            other implementations compute it again.

    Returns:
        [B, H, T, D_v] in the dtype of the inputs, differentiable in q, k and v.

    Raises:
        TreepackError: if the shapes do not fit, the schedule is not of these rows, or the implementation cannot run
            on this device, dtype or head dimension.
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
    with torch.autocast(q.device.type, enabled=False):  # it would lower what reference and flex compute
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
    """What an implementation needs to know of a row, made once and passed to every layer as `schedule`.

    Args:
        subtree_end: int [B, T] or [T]. On the CPU, in a data worker say, a Schedule is made without waiting for a GPU.
        impl: reference, flex, flash or triton: the name that `resolve` gave.
        device: where the layers run; by default where `subtree_end` is.
        varlen: whether a row in which nothing branches may be made Chains; see `takes_chains`.

    Returns:
        the schedule on `device`, None for the reference.
    """
    end = subtree_end[None] if subtree_end.ndim == 1 else subtree_end
    target = end.device if device is None else torch.device(device)
    made: AnySchedule = find_chains(end) if varlen else None
    if made is None and impl == "flex":
        made = build_block_mask(end.to(target))
    elif made is None and impl == "flash":
        made = build_flash_mask(end.to(target))
    elif made is None and impl == "triton":
        made = build_schedule(end)
    if isinstance(made, Schedule | Chains) and end.device.type == "cpu" and target.type == "cuda":
        return made.pin_memory().to(target, non_blocking=True)
    return made.to(target) if isinstance(made, Schedule | Chains) else made


def resolve(impl: str, device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> str:
    """The implementation that `impl` stands for.

    Args:
        impl: one of `NAMES`, or auto.
        device: where the tensors are.
        dtype: what they are computed in.
        head_dims: (of q and k, of v) of every kind of layer.

    Raises:
        TreepackError: for another name, or an implementation that cannot run there.
    """
    if impl == "auto":
        return choose(device, dtype, *head_dims)
    if impl not in NAMES:
        raise TreepackError(f"attention is {impl!r}; expected one of auto, {', '.join(NAMES)}")
    against = obstacle(impl, device, dtype, *head_dims)
    if against is not None:
        raise TreepackError(f"attention: {impl} {against}, or let auto choose")
    return impl


@functools.cache
def choose(device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> str:
    """The first implementation of `AUTO` that nothing stands against; cached, so the log names it once."""
    passed = []
    for impl in AUTO.get(device.type, ("reference",)):
        against = obstacle(impl, device, dtype, *head_dims)
        if against is None:
            break
        passed.append(f"{impl} {against.partition(';')[0]}")
    why = f" ({'; '.join(passed)})" if passed else ""
    _log.info("attention: %s on %s in %s, head dimensions %s%s", impl, device, _short(dtype), _listed(head_dims), why)
    return impl


def takes_chains(device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> bool:
    """Whether `auto` gives rows in which nothing branches to varlen FlashAttention."""
    fits = all(d == d_v and d <= 256 and d % 8 == 0 for d, d_v in head_dims)
    capable = device.type == "cuda" and dtype in _HALVES and torch.cuda.get_device_capability(device) >= (8, 0)
    faster = all(runs_hopper(device, dtype, d) for d, _ in head_dims)  # the tree kernel itself is, even there
    return fits and capable and not faster and choose(device, dtype, *head_dims) != "reference"


def row_multiple(impl: str) -> int:
    """Rows padded to a multiple of this many tokens spare the implementation a copy of q, k and v in every layer."""
    return BLOCK if impl in ("flex", "flash") else 1


def obstacle(impl: str, device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int]) -> str | None:
    """Why an implementation cannot run there; what would help, to be read after its name; or None if it can."""
    return _OBSTACLES[impl](device, dtype, head_dims)


def _no_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> None:
    return None


def _flex_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> str | None:
    if device.type == "cpu":
        return None
    if find_spec("triton") is None:
        return "needs triton on a GPU; install treepack[train] or use reference"
    if dtype == torch.float64:
        return "has no float64 on a GPU; use float32 or reference"
    return None


def _flash_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10, 11):
        return f"needs a Hopper or Blackwell GPU and the tensors are on {device}; use another implementation"
    if not installed():
        return "needs FlashAttention-4; pip install flash-attn-4"
    if dtype not in _HALVES:
        return f"computes bfloat16 and float16, not {_short(dtype)}; use triton, flex or reference"
    if any(max(dims) > MAX_HEAD_DIM or dims[0] % 8 or dims[1] % 8 for dims in head_dims):
        return f"takes head dimensions that are multiples of 8 up to {MAX_HEAD_DIM}, not {_listed(head_dims)}; use flex"
    return None


def _triton_obstacle(device: torch.device, dtype: torch.dtype, head_dims: tuple[tuple[int, int], ...]) -> str | None:
    if find_spec("triton") is None:
        return "needs triton, which is not installed; install treepack[train] or use reference"
    if device.type != "cuda" and not _interpreted():
        return f"needs a GPU and the tensors are on {device}; use reference"
    if dtype not in (*_HALVES, torch.float32):
        return f"computes bfloat16, float16 and float32, not {_short(dtype)}; use reference"
    if any(d != d_v or d > TRITON_MAX_HEAD_DIM for d, d_v in head_dims):
        return f"takes one head dimension of at most {TRITON_MAX_HEAD_DIM}, not {_listed(head_dims)}; use flex"
    return None


_OBSTACLES = {
    "reference": _no_obstacle,
    "flex": _flex_obstacle,
    "flash": _flash_obstacle,
    "triton": _triton_obstacle,
}


def _interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which takes tensors on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(head_dims: tuple[tuple[int, int], ...]) -> str:
    """Head dimensions of q and k / of v, as in 192/128."""
    return " and ".join("/".join(map(str, dims)) for dims in head_dims)


_EXPECTED = {"reference": (), "flex": (BlockMask,), "flash": (BlockMask,), "triton": (Schedule, Chains)}


def _check_schedule(schedule: AnySchedule, impl: str, end: Tensor) -> None:
    """Refuse a schedule that was made for another implementation, or for rows of another number or length."""
    rows, length = end.shape
    if isinstance(schedule, BlockMask):
        block = schedule.BLOCK_SIZE[0]
        found, expected = (len(schedule.kv_num_blocks), schedule.seq_lengths[0]), (rows, -(-length // block) * block)
    elif isinstance(schedule, Schedule):
        found, expected = (len(schedule.end), schedule.length), (rows, length)
    elif isinstance(schedule, Chains):
        found, expected = (schedule.rows, schedule.length), (rows, length)
    else:
        found, expected = (0, 0), (rows, length)
    if not isinstance(schedule, (*_EXPECTED[impl], Chains)):
        raise TreepackError(
            f"attention: the schedule is a {type(schedule).__name__}, which {impl} does not read; "
            f"expected what prepare(subtree_end, {impl!r}) gives"
        )
    if found != expected:
        raise TreepackError(
            f"attention: the schedule is of {found[0]} rows of {found[1]} tokens and q of {rows} of {length}; "
            "expected the schedule of these rows"
        )
