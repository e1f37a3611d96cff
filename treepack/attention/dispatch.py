"""Tree attention by the implementation that suits the tensors, or by a named one.

    subtree_end --prepare, once per row and reach--> schedule --tree_attention, once per layer--> [B, H, T, D_v]

implementation    runs on                           precision            result of `prepare`
reference         anything                          any, float64 too     None
flex              CPU (dense, slow), CUDA           float64 on the CPU   BlockMask
flash             Hopper, Blackwell, flash-attn-4   bf16, fp16           BlockMask
triton            CUDA                              bf16, fp16, fp32     Schedule, or Chains if nothing branches
auto              the first implementation in `AUTO` that has no obstacle

A schedule serves every layer of one reach (`reach.Reach`), the backward, and recomputation under checkpointing.
`Schedules` makes one for each reach of a model whose layers differ. Windows, chunks, sinks and caps of scores run on
every implementation except flash and chains.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from treepack.attention.autograd import Kept, runs_hopper, triton_attention
from treepack.attention.chains import Chains, chain_attention, find_chains
from treepack.attention.flash import MAX_HEAD_DIM, build_flash_mask, flash_attention, has_flash_attention_4
from treepack.attention.flex import BLOCK, build_block_mask, flex_attention
from treepack.attention.kernel_launch import is_interpreted
from treepack.attention.reach import Reach, first_visible
from treepack.attention.reference import check_shapes, reference_attention
from treepack.attention.schedule import Schedule, build_schedule
from treepack.errors import TreepackError, install_hint

# Implementations that `auto` tries, in this order, by kind of device. Other devices get the reference. So does the CPU,
# because FlexAttention is dense there (4096 tokens on one core: 7.2 s against 0.16 s).
AUTO = {"cuda": ("triton", "flash", "flex", "reference")}

NAMES = ("reference", "flex", "flash", "triton")
TRITON_MAX_HEAD_DIM = 512  # the largest that `portable.forward` has shapes for
FLEX_MAX_HEAD_DIM = 256  # the tiles of larger heads exceed the shared memory of a GPU, and compiling fails

# Shared memory of a program that head dimensions above 256 need in `portable`, in KiB, by the bytes of an element.
WIDE_SHARED = {2: 112, 4: 194}

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
    start: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute softmax attention in which token q sees token k if and only if start[q] <= k <= q < subtree_end[k].

    Args:
        q: [B, H, T, D], any T >= 1.
        k: [B, H_kv, T, D]; H is a multiple of H_kv, and query head h reads head h // (H / H_kv).
        v: [B, H_kv, T, D_v].
        subtree_end: int [B, T], or [T] if all rows are the same tree; one past the last token of each token's subtree.
        scale: factor of the scores, D**-0.5 by default.
        impl: reference, flex, flash, triton or auto.
        schedule: the result of `prepare` for this subtree_end, start and implementation; if None, computed here.
        kept: the object in which triton keeps the output for recomputation under checkpointing, and the place of this
            layer in it; other implementations compute the output again.
        start: int [B, T], the first token that each token sees, from `reach.first_visible`; None for all ancestors.
        sinks: [H], one more score per head that takes its share of the softmax and has no value.
        softcap: a positive number; scores become softcap * tanh(score / softcap).

    Returns:
        [B, H, T, D_v] in the dtype of the inputs, differentiable in q, k, v and sinks.

    Raises:
        TreepackError: if the shapes do not fit, if the dtypes differ, if the schedule was made for other rows or for
            another implementation, or if the implementation cannot run on this device, dtype or head dimension.
    """
    end = subtree_end.expand(len(q), -1) if subtree_end.ndim == 1 else subtree_end
    check_shapes(q, k, v, end)
    if start is not None and start.shape != end.shape:
        raise TreepackError(
            f"attention: start is {list(start.shape)} and subtree_end is {list(end.shape)}; "
            "pass first_visible(subtree_end, reach) of these rows"
        )
    dims = (q.shape[-1], v.shape[-1])
    is_plain = start is None and sinks is None and softcap is None
    chosen = resolve(impl, q.device, q.dtype, dims, plain=is_plain)
    if chosen != "reference" and not q.dtype == k.dtype == v.dtype:
        raise TreepackError(f"attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; expected one dtype")
    if schedule is None:
        varlen = impl == "auto" and is_plain and takes_chains(q.device, q.dtype, dims)
        schedule = prepare(end, chosen, start=start, varlen=varlen)
    else:
        _check_schedule(schedule, chosen, end, is_plain=is_plain, start=start)
    options: Any = {"scale": scale}
    if not is_plain:
        options |= {"sinks": sinks, "softcap": softcap}
    with torch.autocast(q.device.type, enabled=False):  # autocast would lower the precision of reference and flex
        if isinstance(schedule, Chains):
            return chain_attention(q, k, v, schedule, scale=scale)
        if isinstance(schedule, Schedule):
            return triton_attention(q, k, v, schedule, kept=kept, **options)
        if isinstance(schedule, BlockMask):
            attend = flash_attention if chosen == "flash" else flex_attention
            return attend(q, k, v, end, block_mask=schedule, **options)
        return reference_attention(q, k, v, end, start=start, **options)


def prepare(
    subtree_end: Tensor,
    impl: str,
    *,
    start: Tensor | None = None,
    device: torch.device | str | None = None,
    varlen: bool = False,
) -> AnySchedule:
    """Return the schedule of a row for an implementation; one schedule serves every layer of the same reach.

    Args:
        subtree_end: int [B, T] or [T]. If it is on the CPU, for example in a data worker, no GPU is synchronised.
        impl: reference, flex, flash or triton: a result of `resolve`.
        start: int [B, T], on the device of `subtree_end`; the first token that each token sees, None for all ancestors.
        device: device of the layers, by default that of `subtree_end`.
        varlen: allow Chains for a row in which nothing branches; see `takes_chains`.

    Returns:
        the schedule on `device`; None for the reference.
    """
    end = subtree_end[None] if subtree_end.ndim == 1 else subtree_end
    target = end.device if device is None else torch.device(device)
    schedule: AnySchedule = find_chains(end) if varlen and start is None else None
    if schedule is None and impl == "flex":
        schedule = build_block_mask(end.to(target), None if start is None else start.to(target))
    elif schedule is None and impl == "flash":
        schedule = build_flash_mask(end.to(target))
    elif schedule is None and impl == "triton":
        schedule = build_schedule(end, start)
    if isinstance(schedule, Schedule | Chains) and end.device.type == "cpu" and target.type == "cuda":
        return schedule.pin_memory().to(target, non_blocking=True)
    return schedule.to(target) if isinstance(schedule, Schedule | Chains) else schedule


class Schedules:
    """The schedules of one batch of rows, one for each reach of a model's layers, made when they are first asked for.

    A model gets the object as its argument `schedule`, and each layer finds its own schedule in it.
    """

    def __init__(self, subtree_end: Tensor, *, device: torch.device | str | None = None, varlen: bool = False) -> None:
        """Start without schedules.

        Args:
            subtree_end: int [B, T] or [T], on the CPU if possible; see `prepare`.
            device: of the layers, by default that of `subtree_end`.
            varlen: allow Chains for layers without windows, sinks and caps; see `takes_chains`.
        """
        self.varlen = varlen
        self._end = subtree_end[None] if subtree_end.ndim == 1 else subtree_end
        self._device = self._end.device if device is None else torch.device(device)
        self._starts: dict[Reach | None, Tensor | None] = {}
        self._made: dict[tuple[str, Reach | None, bool], tuple[Tensor | None, AnySchedule]] = {}
        self._tables: dict[Hashable, Any] = {}

    def check(self, subtree_end: Tensor) -> None:
        """Check that these are the schedules of the rows of `subtree_end`: their length, and on the CPU their values.

        Another number of rows is found by `tree_attention`, or by the trainer whose wrapper divided a batch.

        Raises:
            TreepackError: if they are not.
        """
        end = subtree_end[None] if subtree_end.ndim == 1 else subtree_end
        # Values on a GPU are not compared, because the comparison would wait for it in every layer.
        on_cpu = end.device.type == self._end.device.type == "cpu"
        comparable = on_cpu and len(end) == len(self._end) and end is not self._end
        if end.shape[1] != self._end.shape[1] or (comparable and not torch.equal(end, self._end)):
            raise TreepackError(
                f"attention: the schedule was made for {len(self._end)} other rows of {self._end.shape[1]} tokens; "
                "pass Schedules(subtree_end) of these rows"
            )

    def of(self, impl: str, reach: Reach | None = None, *, varlen: bool = False) -> tuple[Tensor | None, AnySchedule]:
        """Return `start` and `schedule` of `tree_attention`, for an implementation and a reach.

        A reach that no path of the rows exceeds has the results of None.
        """
        if reach not in self._starts:
            self._starts[reach] = first_visible(self._end, reach)
        start = self._starts[reach]
        place = (impl, None if start is None else reach, varlen and start is None)
        if place not in self._made:
            schedule = prepare(self._end, impl, start=start, device=self._device, varlen=varlen)
            moved = None if start is None else start.to(self._device, non_blocking=True)
            self._made[place] = (moved, schedule)
        return self._made[place]

    def table(self, name: Hashable, make: Callable[[Tensor], Any]) -> Any:
        """Return make(subtree_end [B, T]) on the device of the layers, made once under its `name`.

        The result of `make` is a tensor, or has a method `to(device)`. Layers that are no attention need such tables.
        """
        if name not in self._tables:
            self._tables[name] = make(self._end).to(self._device)
        return self._tables[name]


def resolve(
    impl: str, device: torch.device, dtype: torch.dtype, *head_dims: tuple[int, int], plain: bool = True
) -> str:
    """Return the name of the implementation to run.

    Args:
        impl: one of `NAMES`, or auto.
        device: device of the tensors.
        dtype: dtype of q, k and v.
        head_dims: one pair (of q and k, of v) for every kind of layer.
        plain: False if a layer has a window, a chunk, sinks or a cap of scores.

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
    """Return whether `auto` runs varlen FlashAttention on rows in which nothing branches."""
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
    if impl == "flash" and not plain:
        return "has no windows, chunks, sinks and caps of scores; use flex"
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
    if any(max(dims) > FLEX_MAX_HEAD_DIM for dims in head_dims):
        return (
            f"runs out of shared memory on a GPU with head dimensions above {FLEX_MAX_HEAD_DIM}, "
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
        return f"needs triton, which is not installed; {install_hint('train')}, or use reference"
    if device.type != "cuda" and not is_interpreted():
        return f"needs a GPU and the tensors are on {device}; use reference"
    if dtype not in (*_HALVES, torch.float32):
        return f"computes bfloat16, float16 and float32, not {_dtype_name(dtype)}; use reference"
    largest = max((max(dims) for dims in head_dims), default=0)
    if largest > TRITON_MAX_HEAD_DIM:
        return f"takes head dimensions of at most {TRITON_MAX_HEAD_DIM}, not {_dims_text(head_dims)}; use reference"
    if largest > 256 and device.type == "cuda":
        needed, has = WIDE_SHARED[dtype.itemsize], _shared_memory(device)
        if has < needed:
            return (
                f"needs {needed} KiB of shared memory for head dimensions above 256, "
                f"and {device} has {has}; use reference"
            )
    return None


_OBSTACLES = {
    "reference": _no_obstacle,
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


_EXPECTED = {"reference": (), "flex": (BlockMask,), "flash": (BlockMask,), "triton": (Schedule, Chains)}


def _check_schedule(schedule: AnySchedule, impl: str, end: Tensor, *, is_plain: bool, start: Tensor | None) -> None:
    """Check that a schedule was made for this implementation and reach, and for rows of this number and length.

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
    if not isinstance(schedule, (*_EXPECTED[impl], *((Chains,) if is_plain else ()))):
        raise TreepackError(
            f"attention: the schedule is a {type(schedule).__name__}, which {impl} does not take; "
            f"pass prepare(subtree_end, {impl!r})"
        )
    if isinstance(schedule, Schedule) and (schedule.start is None) != (start is None):
        raise TreepackError(
            "attention: the schedule was made for another `start`; pass prepare(subtree_end, impl, start=start)"
        )
    if size != expected:
        raise TreepackError(
            f"attention: the schedule has {size[0]} rows of {size[1]} tokens and q has {rows} of {length}; "
            "pass the schedule of these rows"
        )
