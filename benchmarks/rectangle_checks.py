"""Checks of rectangles on a GPU: queries of the last tokens of a row against all of its keys.

    RECTANGLE_CHECKS[name](name, device, quick=...)  ->  Result, ...      as the checks of `attention_checks`

Rows begin their queries at token 0, at block edges, inside a block, and after keys that no query sees, with windows,
chunks and sinks. Errors and bounds are defined as in `attention_checks`, and the sinks' gradient is the fifth error.
Two runs must agree in every bit, and the output must have the bits of the same rows of the square. Inputs are views
into buffers of NaN, so a query that is read before the first one shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from attention_checks import (
    HEAD_DIMS,
    KERNEL_FLOAT32,
    ROUNDING,
    Layout,
    Result,
    amid_nan,
    draw_inputs,
    kernels,
    measure,
    outputs,
    poison,
)
from attention_checks import random_forest_ends as forest
from candidates import portable_kernels
from option_checks import CHUNK, PLAIN, Option
from torch import Tensor

from treepack.attention import KeyReach, first_visible, reference_attention, tree_attention

OPTIONS = (PLAIN, CHUNK, Option(KeyReach("window", 128), sinks=True))

# Query heads, key heads, head dimensions (of q and k, of v) and scale; dtype; whether flex runs as well.
LAYERS: tuple[tuple[Layout, torch.dtype, bool], ...] = (
    *(((4, 2, *dims, None), torch.bfloat16, dims == (64, 64)) for dims in HEAD_DIMS),
    *(((4, 2, *dims, None), torch.float16, False) for dims in HEAD_DIMS),
    ((4, 2, 24, 16, None), torch.bfloat16, False),
    ((8, 4, 512, 512, None), torch.bfloat16, False),
    ((6, 2, 64, 64, None), torch.float32, False),
)


def rows_of(*, quick: bool) -> Iterator[tuple[str, int, Tensor]]:
    """Yield a name, the token of the first query, and subtree_end [B, T]."""
    yield "1000 tokens", 0, forest(1000, 1000)[None]
    yield "1000 tokens", 128, forest(1000, 1000)[None]
    yield "1000 tokens", 133, forest(1000, 1000)[None]
    yield "2 rows", 128, torch.stack([forest(600, seed) for seed in (1, 2)])
    if not quick:
        yield "5000 tokens", 4096, forest(5000, 5000)[None]
        # Whole key blocks, from token 128 to 4095, have no query: their gradients must be written, as zeros.
        dead = torch.arange(1, 5001, dtype=torch.int32)
        dead[:128] = dead[4096:] = 5000
        yield "3968 unseen keys", 4096, dead[None]


def check_rectangles(index: int, check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check every row, option and implementation of one layer."""
    layout, dtype, with_flex = LAYERS[index]
    for case, first, end in rows_of(quick=quick):
        for option in OPTIONS[-1:] if quick else OPTIONS:
            yield from _compare(f"{case} from {first}, {option}", check, (end.to(device), first), option, layout, dtype)
    if with_flex:
        case, first, end = "5000 tokens", 4096, forest(5000, 5000)[None]
        yield from _compare(case, check, (end.to(device), first), PLAIN, layout, dtype, names=["flex"])


def _compare(
    case: str,
    check: str,
    row: tuple[Tensor, int],
    option: Option,
    layout: Layout,
    dtype: torch.dtype,
    *,
    names: list[str] | None = None,
) -> Iterator[Result]:
    """Yield the result of each implementation on one rectangle: subtree_end [B, T] and the token of the first query."""
    end, first = row
    (whole, k, v), weight = draw_inputs(end, layout, dtype)
    # The gradient of a sink is a sum over queries. Positive means keep its terms from cancelling one another.
    weight, v = (weight + 0.5)[:, :, first:], v + 0.5
    q = whole[:, :, first:]
    sinks = (torch.linspace(-2, 4, layout[0], device=end.device),) if option.sinks else ()
    settings: dict[str, Any] = {"scale": layout[4], "start": first_visible(end, option.reach)}

    def attend(function: Callable[..., Tensor], *inputs: Tensor, **more: Any) -> Tensor:
        return function(*inputs[:3], end, sinks=inputs[3] if sinks else None, **settings, **more)

    doubles = tuple(x.double() for x in (q, k, v, *sinks))
    expected = outputs(partial(attend, reference_attention, first=first), doubles, weight.double())
    inputs, incoming = (amid_nan(q), amid_nan(k), amid_nan(v), *sinks), amid_nan(weight)
    for name in kernels(q, v) if names is None else names:
        impl, runs = "flex" if name == "flex" else "triton", []
        with portable_kernels() if name == "portable" else nullcontext():
            for _ in range(2):
                poison(q)
                runs.append(outputs(partial(attend, tree_attention, impl=impl, first=first), inputs, incoming))
            with torch.no_grad():
                square = attend(tree_attention, amid_nan(whole), *inputs[1:], impl=impl)[:, :, first:]
        equal = all(torch.equal(one, again) for one, again in zip(*runs, strict=True))
        note = "" if equal or name == "flex" else "raised: two runs differ"
        if name != "flex" and not torch.equal(runs[0][0], square):
            note = "raised: the output differs from that of the square"
        bound = KERNEL_FLOAT32 if dtype == torch.float32 else 8 * ROUNDING[dtype]
        errors = measure(runs[0], expected, weight)
        yield Result(check, case, name, errors, (bound,) * len(errors), note)


def _name(layout: Layout, dtype: torch.dtype) -> str:
    return f"rectangles {'/'.join(map(str, layout[:4]))} {str(dtype).removeprefix('torch.')}"


RECTANGLE_CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    _name(layout, dtype): partial(check_rectangles, index) for index, (layout, dtype, _) in enumerate(LAYERS)
}
