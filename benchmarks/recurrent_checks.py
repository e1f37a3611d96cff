"""Checks of recurrent layers on trees on a GPU, through flash-linear-attention and the own kernels.

    RECURRENT_CHECKS[name](name, device, quick=...)  ->  Result, ...      as the checks of `attention_checks`

Errors are given for output, dq, dk, dv and the larger one of the decays' and beta's gradients, each relative in RMS to
plain torch in float64 on the same rounded inputs. The bound is 8 rounding units of the dtype. In float32
flash-linear-attention multiplies in tf32, which rounds like float16. Two runs must agree in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from attention_checks import KERNEL_FLOAT32, ROUNDING, Result, poison
from attention_checks import random_forest_ends as forest
from torch import Tensor

from treepack.attention import BatchSchedules
from treepack.recurrent import dispatch, twin
from treepack.recurrent.chunks import build_chunks


class Sizes(NamedTuple):
    """A rule (delta, kda or mamba2), heads of q and k, heads of v, and dimensions of k and v."""

    rule: str
    key_heads: int
    heads: int
    keys: int
    values: int


LAYERS: tuple[tuple[Sizes, torch.dtype], ...] = (
    (Sizes("delta", 2, 4, 128, 128), torch.bfloat16),
    (Sizes("delta", 2, 2, 256, 256), torch.bfloat16),
    (Sizes("delta", 1, 3, 96, 40), torch.float16),
    (Sizes("delta", 2, 4, 64, 64), torch.float32),
    (Sizes("mamba2", 1, 8, 128, 64), torch.bfloat16),
    (Sizes("mamba2", 2, 4, 64, 64), torch.float32),
    (Sizes("kda", 2, 2, 128, 128), torch.bfloat16),
)
IMPLEMENTATIONS = ("fla", "triton")


def check_layer(index: int, check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check one layer on random rows of several lengths, on two rows at a time, and on a row with padding."""
    sizes, dtype = LAYERS[index]
    rows = [forest(length, length)[None] for length in (129, 1000, 4095)]
    rows.append(torch.stack([forest(600, seed) for seed in (1, 2)]))
    rows.append(torch.cat([forest(900, 3), torch.arange(901, 1501, dtype=torch.int32)])[None])
    for end in rows[:1] if quick else rows:
        yield from _compare(check, sizes, dtype, end, device)


def _compare(check: str, sizes: Sizes, dtype: torch.dtype, end: Tensor, device: torch.device) -> Iterator[Result]:
    arguments, weight = _draw(sizes, dtype, end, device)
    exact = [x.double() for x in arguments]
    expected = _run(partial(twin.scan_plainly, chunks=build_chunks(end).to(device)), exact, weight.double())
    layer = dispatch.LayerProperties(
        device, dtype, sizes.keys, sizes.values, sizes.rule != "mamba2", sizes.rule == "kda"
    )
    case = f"{len(end)} x {end.shape[1]} tokens"
    for name in IMPLEMENTATIONS:
        reason = dispatch.scan_obstacle(name, layer)
        if reason is not None:
            yield Result(check, case, name, (), (), f"not run: {reason}")
            continue
        runs = []
        for _ in range(2):
            poison(weight)
            with dispatch.use_implementation(name):
                scan = partial(dispatch.scan, schedules=BatchSchedules(end, device=device))
                runs.append(_run(scan, arguments, weight))
        equal = all(torch.equal(first, again) for first, again in zip(*runs, strict=True))
        errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(runs[0], expected, strict=True)]
        errors[4:] = [max(errors[4:])]
        unit = ROUNDING[torch.float16] if dtype == torch.float32 and name == "fla" else ROUNDING[dtype]
        bound = KERNEL_FLOAT32 if unit == ROUNDING[torch.float32] else 8 * unit
        yield Result(check, case, name, tuple(errors), (bound,) * 5, "" if equal else "raised: two runs differ")


def _draw(sizes: Sizes, dtype: torch.dtype, end: Tensor, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Draw q, k, v, g and perhaps beta, and the gradient of the output, the same on each device."""
    generator = torch.Generator().manual_seed(0)
    count = end.numel()

    def draw(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(sizes.key_heads, sizes.keys), dim=-1) for _ in range(2))
    v, weight = draw(sizes.heads, sizes.values), draw(sizes.heads, sizes.values)
    # Decays of some tokens forget all, most of them hardly anything.
    g = -draw(sizes.heads, *([sizes.keys] if sizes.rule == "kda" else [])).exp() / 8
    columns = [q.to(dtype), k.to(dtype), v.to(dtype), g]
    if sizes.rule != "mamba2":
        columns.append(draw(sizes.heads).sigmoid())
    return [x.to(device) for x in columns], weight.to(device, dtype)


def _run(scan: Callable[..., Tensor], arguments: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Return the output and the gradients of all arguments."""
    leaves = [x.detach().requires_grad_() for x in arguments]
    out = scan(*leaves, *([None] if len(leaves) == 4 else []))
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def _name(sizes: Sizes, dtype: torch.dtype) -> str:
    return f"recurrent {sizes.rule} {sizes.keys} x {sizes.values} {str(dtype).removeprefix('torch.')}"


RECURRENT_CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    _name(sizes, dtype): partial(check_layer, index) for index, (sizes, dtype) in enumerate(LAYERS)
}
