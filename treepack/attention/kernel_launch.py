"""Launches of kernels: values that describe one launch completely, and the arguments all backends of attention share.

    AttentionInputs, BackwardInputs  --`portable`, `hopper`-->  KernelLaunch  --run-->  the kernel on the current GPU

Each backend builds one `KernelLaunch` per direction: forward, dq, and dk with dv. Nothing runs until its method `run`,
so a test builds the same descriptions from tensors on the CPU and compiles the kernels for a GPU that it does not have.

Arguments are passed by name, so a kernel whose parameters change cannot silently receive the wrong tensor. Triton is
not imported with this module.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treepack.attention.schedule import Schedule

LOG2E = math.log2(math.e)  # exp(x) = 2**(x * LOG2E), and GPUs compute powers of two


class AttentionInputs(NamedTuple):
    """Operands of one attention call, which the forward and the backward read.

    query       [B, H, T - first, D], of the tokens from `schedule.first` on
    key         [B, H_kv, T, D]; query head h reads head h // (H / H_kv)
    value       [B, H_kv, T, D_v]
    schedule    of these B rows of T tokens, on the device of `query`
    scale       factor of the scores
    sinks       [H] in any floating dtype, one more score per head that takes its share of the softmax and has no
                value; None without sinks
    softcap     a positive number; scores become softcap * tanh(score / softcap); None without a cap
    """

    query: Tensor
    key: Tensor
    value: Tensor
    schedule: Schedule
    scale: float
    sinks: Tensor | None = None
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def is_windowed(self) -> bool:
        """True if the layer has windows or chunks; the compile-time parameter WINDOWED of every kernel."""
        return self.schedule.start is not None


class BackwardInputs(NamedTuple):
    """Tensors that only the backward reads.

    grad   [B, H, T - first, D_v], the gradient of the output
    lse    float32 [B, H, T - first], the base-2 log-sum-exp that the forward returned; [B, H, T_pad - first] on Hopper
    delta  float32, the sum of output * grad over D_v, in the shape of `lse`
    """

    grad: Tensor
    lse: Tensor
    delta: Tensor


# Of query, key, value and sinks, in their shapes and dtypes; None without sinks.
InputGradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class KernelLaunch(NamedTuple):
    """One launch of a kernel.

    kernel     a function under `triton.jit` or `gluon.jit`
    programs   number of programs of the one-dimensional grid
    arguments  value of every run-time parameter, by name
    constants  value of every compile-time parameter, by name
    options    options of the compiler, such as num_warps
    """

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        """Launch the kernel on the current GPU; the tensors among the arguments receive its results."""
        self.kernel[(self.programs,)](**self.arguments, **self.constants, **self.options)


def is_interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, which takes tensors on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def padded_width(width: int) -> int:
    """Return the rows or columns of a block for `width`: a power of two, and at least the 16 of a product."""
    # 8 -> 16, 80 -> 128, 128 -> 128
    return 1 << max(4, (width - 1).bit_length())


def is_on_hopper(x: Tensor) -> bool:
    """Return True if `x` is on a Hopper GPU."""
    # AMD's gfx90a has the capability (9, 0) too.
    nvidia = x.is_cuda and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(x.device)[0] == 9


def query_arguments(inputs: AttentionInputs, section: int) -> dict[str, Any]:
    """Return the arguments that every kernel over query blocks takes: forward and dq.

    Args:
        inputs: the operands.
        section: query heads that run at once.
    """
    schedule = inputs.schedule
    return {
        "granules": schedule.granules,
        "query_offsets": schedule.query_offsets,
        "query_partial": schedule.query_partial,
        "query_order": schedule.query_order,
        "heads": inputs.query.shape[1],
        "blocks": schedule.query_order.shape[1],
        **_row_arguments(inputs, section),
    }


def key_arguments(inputs: AttentionInputs, section: int) -> dict[str, Any]:
    """Return the arguments that every kernel over key blocks takes: dk with dv.

    Args:
        inputs: the operands.
        section: key heads that run at once.
    """
    schedule = inputs.schedule
    return {
        "key_granules": schedule.key_granules,
        "key_ranges": schedule.key_ranges,
        "key_order": schedule.key_order,
        "key_tiles": schedule.end if schedule.key_tiles is None else schedule.key_tiles,
        "kv_heads": inputs.key.shape[1],
        "blocks": schedule.key_order.shape[1],
        **_row_arguments(inputs, section),
    }


def _row_arguments(inputs: AttentionInputs, section: int) -> dict[str, Any]:
    schedule = inputs.schedule
    return {
        "ends": schedule.end,
        # Kernels read `starts` and `key_tiles` only if WINDOWED; without windows they are any int32 tensor.
        "starts": schedule.end if schedule.start is None else schedule.start,
        "length": schedule.length,
        # `origin` and `padded` are multiples of 128, so Triton compiles one kernel for all of their values.
        "origin": schedule.first,
        "padded": schedule.end.shape[1],
        "batch": inputs.query.shape[0],
        "section": section,
        "factor": inputs.scale * LOG2E,
    }


def sink_argument(inputs: AttentionInputs, lse: Tensor) -> Tensor:
    """Return the sinks as the forward kernels read them, float32 [H]; without sinks it is any float32 tensor, `lse`."""
    return lse if inputs.sinks is None else inputs.sinks.float().contiguous()


def sink_gradient(inputs: AttentionInputs, incoming: BackwardInputs) -> Tensor | None:
    """Return the gradient of the sinks [H] in their dtype; None without sinks.

    A sink has the weight p = 2**(sink * log2(e) - lse) in each query's softmax and the value 0, so its score has the
    gradient p * (0 - delta). The sum runs in one order, so two runs agree in every bit.
    """
    if inputs.sinks is None:
        return None
    lse, delta = (x[..., : inputs.query.shape[2]] for x in (incoming.lse, incoming.delta))
    # [H, 1] - [B, H, T - first] -> [B, H, T - first] -> [H]
    weights = torch.exp2(inputs.sinks.to(lse.dtype)[:, None] * LOG2E - lse)
    return -(weights * delta).sum((0, 2)).to(inputs.sinks.dtype)


def key_heads_per_section(key: Tensor, cache_bytes: int) -> int:
    """Return the number of key heads to run at once, so that their keys and values stay in the L2 cache.

    Args:
        key: [B, H_kv, T, D].
        cache_bytes: bytes of the cache that one section may fill.

    Returns:
        the largest divisor of H_kv that fits, and 1 if none fits.
    """
    batch, heads, length, width = key.shape
    return _largest_divisor(heads, cache_bytes // (2 * batch * length * width * key.element_size()))


@functools.cache
def _largest_divisor(number: int, limit: int) -> int:
    # (12, 5) -> 4, (7, 5) -> 1, (7, 0) -> 1
    return max(n for n in range(1, number + 1) if number % n == 0 and (n == 1 or n <= limit))


def token_major(like: Tensor, width: int | None = None) -> Tensor:
    """Return an empty tensor [B, H, T, D] like `like`, with memory in the order [B, T, H, D].

    A model joins the heads of each token after attention, and in this order that needs no copy.

    Args:
        like: [B, H, T, any].
        width: D, by default that of `like`.
    """
    batch, heads, length, same = like.shape
    width = same if width is None else width
    return torch.empty((batch, length, heads, width), dtype=like.dtype, device=like.device).transpose(1, 2)
