"""Choice of the code that computes a recurrent layer or a convolution.

    torch     plain torch (`twin`, `convolution`): any device and precision
    fla       flash-linear-attention, level by level of the tree (`levels`): GPUs
    triton    treepack's kernels (`kernels`): GPUs, and the CPU in Triton's interpreter; one decay per head

`auto` takes the first in `AUTO` that has no obstacle, and plain torch on other devices. `use_implementation` sets
another one for all models. flash-linear-attention has no convolution on trees, so `fla` uses treepack's kernel for it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from treepack.attention.dispatch import BatchSchedules
from treepack.attention.kernel_launch import is_interpreted
from treepack.errors import TreepackError
from treepack.recurrent import convolution, twin
from treepack.recurrent.chunks import build_chunks
from treepack.recurrent.convolution import build_taps
from treepack.recurrent.levels import build_levels, obstacle_of_fla, scan_by_levels

NAMES = ("torch", "fla", "triton")
AUTO = {"cuda": ("triton", "fla", "torch")}

_MAX_WIDTH = 256  # of keys and values, in fla and in treepack's kernels
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_wanted = "auto"
_log = logging.getLogger("treepack")


class LayerProperties(NamedTuple):
    """Properties of a recurrent layer that its implementation depends on.

    device, dtype    of the values
    keys, values     widths of a head: the state is [keys, values]
    has_delta        True for the delta rule (the layer has beta), False for Mamba-2
    has_key_decays   True if a head has one decay per key dimension (KDA), False if it has one
    """

    device: torch.device
    dtype: torch.dtype
    keys: int
    values: int
    has_delta: bool
    has_key_decays: bool


@contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Compute all recurrent layers by the implementation `name` inside the block: one of `NAMES`, or auto.

    The backward pass uses the implementation of the forward pass. With gradient checkpointing it runs layers again, so
    it must be inside the block too.

    Raises:
        TreepackError: if there is no implementation `name`.
    """
    global _wanted
    if name not in ("auto", *NAMES):
        raise TreepackError(f"recurrent layers are {name!r}; expected one of auto, {', '.join(NAMES)}")
    before, _wanted = _wanted, name
    try:
        yield
    finally:
        _wanted = before


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, schedules: BatchSchedules
) -> Tensor:
    """Return the convolution of the tokens of a tree; arguments as in `convolution.convolve`.

    Raises:
        TreepackError: if the activation is unknown, or if the kernels are chosen by name and cannot run on `x`.
    """
    width = weight.shape[-1]
    taps = schedules.table(("taps", width), lambda end: build_taps(end, width))
    if _takes_kernel(x):
        from treepack.recurrent.kernels.convolution import triton_convolve

        return triton_convolve(x, weight, bias, activation, taps)
    return convolution.convolve_plainly(x, weight, bias, activation, taps)


def _takes_kernel(x: Tensor) -> bool:
    """Return True if treepack's kernel computes the convolution of `x`."""
    if _wanted == "torch" or (_wanted != "triton" and not x.is_cuda):
        return False
    reason = _kernel_obstacle(x.device, x.dtype)
    if reason is not None and _wanted == "triton":
        raise TreepackError(f"convolution: triton {reason}, or let auto choose")
    return reason is None


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, schedules: BatchSchedules) -> Tensor:
    """Return the outputs of the tokens of a tree, [N, H, V]; arguments as in `twin.scan`, N tokens of all rows.

    Raises:
        TreepackError: if the implementation that `use_implementation` names cannot compute this layer.
    """
    layer = LayerProperties(v.device, v.dtype, k.shape[-1], v.shape[-1], beta is not None, g.ndim == 3)
    chosen = resolve_scan(_wanted, layer)
    if chosen == "fla":
        return scan_by_levels(q, k, v, g, beta, schedules.table("levels", build_levels))
    chunks = schedules.table("chunks", build_chunks)
    if chosen == "triton":
        from treepack.recurrent.kernels.autograd import triton_scan

        return triton_scan(q, k, v, g, beta, chunks)
    return twin.scan_plainly(q, k, v, g, beta, chunks)


def resolve_scan(name: str, layer: LayerProperties) -> str:
    """Return the name of the implementation that computes a layer; `name` is one of `NAMES`, or auto.

    Raises:
        TreepackError: if `name` is an implementation that cannot compute it.
    """
    if name == "auto":
        return choose_scan(layer)
    reason = scan_obstacle(name, layer)
    if reason is not None:
        raise TreepackError(f"recurrent layer: {name} {reason}, or let auto choose")
    return name


@functools.cache
def choose_scan(layer: LayerProperties) -> str:
    """Return the first implementation in `AUTO` that has no obstacle; cached, so the log names it once."""
    obstacles = []
    for name in AUTO.get(layer.device.type, ("torch",)):
        reason = scan_obstacle(name, layer)
        if reason is None:
            break
        # "needs flash-linear-attention; pip install ..." -> "fla needs flash-linear-attention"
        obstacles.append(f"{name} {reason.partition(';')[0]}")
    why = f" ({'; '.join(obstacles)})" if obstacles else ""
    widths = f"{layer.keys} x {layer.values}"
    _log.info("recurrent layers: %s on %s in %s, states of %s%s", name, layer.device, _name(layer.dtype), widths, why)
    return name


def scan_obstacle(name: str, layer: LayerProperties) -> str | None:
    """Return the reason why an implementation cannot compute a layer, and the remedy; None if it can.

    The text follows the name of the implementation: "needs a GPU and the tensors are on cpu; use torch".
    """
    if name == "torch":
        return None
    if name == "triton":
        reason = _kernel_obstacle(layer.device, layer.dtype)
        if reason is None and layer.has_key_decays:
            return "computes one decay per head and the layer has one per key dimension; use fla or torch"
    else:
        reason = _fla_obstacle(layer)
    if reason is None and max(layer.keys, layer.values) > _MAX_WIDTH:
        return f"takes states of at most {_MAX_WIDTH} x {_MAX_WIDTH}, not {layer.keys} x {layer.values}; use torch"
    return reason


def _fla_obstacle(layer: LayerProperties) -> str | None:
    if layer.device.type != "cuda":
        return f"needs a GPU and the tensors are on {layer.device}; use torch"
    if layer.dtype not in _DTYPES:
        return f"computes bfloat16, float16 and float32, not {_name(layer.dtype)}; use torch"
    if layer.has_key_decays and not layer.has_delta:
        return "takes a decay per key dimension only with the delta rule; use torch"
    return obstacle_of_fla(vector_decay=layer.has_key_decays)


def _kernel_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why treepack's kernels of scans and convolutions cannot run on such tensors; None if they can."""
    if find_spec("triton") is None:
        return "needs triton, which is not installed; run pip install triton, or use torch"
    if device.type != "cuda" and not is_interpreted():
        return f"needs a GPU and the tensors are on {device}; use torch"
    if dtype not in _DTYPES:
        return f"computes bfloat16, float16 and float32, not {_name(dtype)}; use torch"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
