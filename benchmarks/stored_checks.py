"""Checks of the backward with stored score gradients on a GPU: accuracy against float64, and equal bits.

    STORED_CHECKS[name](name, device, quick=...)  ->  Result, ...      as the checks of `attention_checks`

Rows of every kind run with bands of the usual size and of one query block, which give each key block many pieces.
Errors and bounds are those of `attention_checks`. Two runs must agree in every bit with a third one, which has memory
for one key head at a time. On the CPU, the portable kernels run, which ignore bands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from attention_checks import (
    ROUNDING,
    Layout,
    Result,
    amid_nan,
    draw_inputs,
    measure,
    outputs,
    poison,
)
from attention_checks import random_forest_ends as forest
from candidates import changed
from torch import Tensor
from workloads import star

from treepack.attention import autograd as kernel
from treepack.attention import prepare, reference_attention, tree_attention
from treepack.attention.bands import BAND_BLOCKS, with_bands
from treepack.attention.schedule import Schedule

# Query heads, key heads, head dimensions and scale; dtype.
LAYERS: tuple[tuple[Layout, torch.dtype], ...] = (
    ((8, 2, 128, 128, None), torch.bfloat16),
    ((4, 4, 128, 128, 0.05), torch.float16),
    ((5, 1, 128, 128, None), torch.bfloat16),
)


def rows_of(*, quick: bool) -> Iterator[tuple[str, int, Tensor]]:
    """Yield a name, the token of the first query, and subtree_end [B, T]."""
    for length in (1, 65, 300) if quick else (1, 12, 65, 127, 129, 1000, 4095):
        yield f"{length} tokens", 0, forest(length, length)[None]
    yield "2 rows", 0, torch.stack([forest(600, seed) for seed in (1, 2)])
    yield "600 tokens from 133", 133, forest(600, 3)[None]
    branches = star("", 100, 4, 70) if quick else star("", 1024, 16, 512)
    yield "branches", 0, torch.tensor(branches.subtree_end, dtype=torch.int32)[None]
    if not quick:
        yield "chain of 8192", 0, torch.full((1, 8192), 8192, dtype=torch.int32)
        dead = torch.arange(1, 2001, dtype=torch.int32)
        dead[:128] = dead[1664:] = 2000
        yield "keys that no query sees", 1664, dead[None]


def check_stored(index: int, check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check every row of one layer with both sizes of bands."""
    layout, dtype = LAYERS[index]
    for case, first, end in rows_of(quick=quick):
        for blocks in (1, BAND_BLOCKS):
            yield _compare(check, f"{case}, bands of {blocks}", (end.to(device), first, blocks), layout, dtype)


def _compare(check: str, case: str, row: tuple[Tensor, int, int], layout: Layout, dtype: torch.dtype) -> Result:
    end, first, blocks = row
    (q, k, v), weight = draw_inputs(end, layout, dtype)
    q, weight, scale = q[:, :, first:], weight[:, :, first:], layout[4]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_attention(q, k, v, end, scale=scale, first=first)

    schedule = prepare(end, "triton", first=first)
    assert isinstance(schedule, Schedule)
    schedule = with_bands(schedule, blocks=blocks)
    assert schedule.bands is not None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tree_attention(q, k, v, end, scale=scale, impl="triton", schedule=schedule, first=first)

    expected = outputs(exact, (q.double(), k.double(), v.double()), weight.double())
    inputs = (amid_nan(q), amid_nan(k), amid_nan(v))
    results = []
    for around in (nullcontext(), nullcontext(), one_head(end.device)):
        poison(q)
        with around:
            results.append(outputs(attend, inputs, amid_nan(weight)))
    equal = all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    name = f"{kernel.backend(q, v)}, stored"
    note = "" if equal else "raised: runs differ"
    return Result(check, case, name, measure(results[0], expected, weight), (8 * ROUNDING[dtype],) * 4, note)


def one_head(device: torch.device) -> AbstractContextManager[None]:
    """Leave the kernels memory for one key head at a time; the module needs triton for a GPU, so not on the CPU."""
    return changed("stored_launch", "STORED_BYTES", lambda _: 1) if device.type == "cuda" else nullcontext()


def _name(layout: Layout, dtype: torch.dtype) -> str:
    return f"stored {'/'.join(map(str, layout[:3]))} {str(dtype).removeprefix('torch.')}"


STORED_CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    _name(*layer): partial(check_stored, index) for index, layer in enumerate(LAYERS)
}
