"""Checks of the backward in one pass on a GPU: accuracy against float64, equal bits, and no program that waits forever.

    ONE_PASS_CHECKS[name](name, device, quick=...)  ->  Result, ...      as the checks of `attention_checks`

Rows of every kind run with bands of the usual size and of 4 query tiles, which give each key block many pieces. Errors
and bounds are those of `attention_checks`. Three runs must agree in every bit. A program that waits forever ends no
check, so start them under `timeout`. On the CPU, the portable kernels run, which ignore bands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from torch import Tensor
from workloads import star

from treepack.attention import autograd as kernel
from treepack.attention import prepare, reference_attention, tree_attention
from treepack.attention.bands import BAND, with_bands
from treepack.attention.schedule import Schedule

# Query heads, key heads, head dimensions and scale; dtype.
LAYERS: tuple[tuple[Layout, torch.dtype], ...] = (
    ((8, 2, 128, 128, None), torch.bfloat16),
    ((4, 4, 128, 128, 0.05), torch.float16),
    ((8, 2, 64, 64, None), torch.bfloat16),
    ((3, 3, 64, 64, None), torch.float16),
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


def check_one_pass(index: int, check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check every row of one layer with both sizes of bands."""
    layout, dtype = LAYERS[index]
    for case, first, end in rows_of(quick=quick):
        for band in (4, BAND):
            yield _compare(check, f"{case}, bands of {band}", (end.to(device), first, band), layout, dtype)


def _compare(check: str, case: str, row: tuple[Tensor, int, int], layout: Layout, dtype: torch.dtype) -> Result:
    end, first, band = row
    (q, k, v), weight = draw_inputs(end, layout, dtype)
    q, weight, scale = q[:, :, first:], weight[:, :, first:], layout[4]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_attention(q, k, v, end, scale=scale, first=first)

    schedule = prepare(end, "triton", first=first)
    assert isinstance(schedule, Schedule)
    schedule = with_bands(schedule, band=band)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tree_attention(q, k, v, end, scale=scale, impl="triton", schedule=schedule, first=first)

    expected = outputs(exact, (q.double(), k.double(), v.double()), weight.double())
    inputs = (amid_nan(q), amid_nan(k), amid_nan(v))
    results = []
    for _ in range(3):
        poison(q)
        results.append(outputs(attend, inputs, amid_nan(weight)))
    equal = all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    name = f"{kernel.backend(q, v)}, one pass"
    note = "" if equal else "raised: runs differ"
    return Result(check, case, name, measure(results[0], expected, weight), (8 * ROUNDING[dtype],) * 4, note)


def _name(layout: Layout, dtype: torch.dtype) -> str:
    return f"one pass {'/'.join(map(str, layout[:3]))} {str(dtype).removeprefix('torch.')}"


ONE_PASS_CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    _name(*layer): partial(check_one_pass, index) for index, layer in enumerate(LAYERS)
}
