"""Checks of caps of scores, heads of 512 and padded heads on a GPU, with windows, sinks and rows of several trees.

    OPTION_CHECKS[name](name, device, quick=...)  ->  Result, ...      as the checks of `attention_checks`

The portable kernels serve these layers. Errors and bounds are defined as in `attention_checks`, and the sinks' gradient
is the fifth error. Two runs must agree in every bit. Inputs are views into buffers of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from attention_checks import KERNEL_FLOAT32, ROUNDING, Layout, Result, amid_nan, draw_inputs, measure, outputs, poison
from attention_checks import random_forest_ends as forest
from candidates import portable_kernels
from torch import Tensor

from treepack.attention import KeyReach, first_visible, reference_attention, tree_attention


class Option(NamedTuple):
    """The options of a layer beside plain attention: window or chunk, sinks, and a cap of scores."""

    reach: KeyReach | None = None
    sinks: bool = False
    softcap: float | None = None

    def __str__(self) -> str:
        """Return, for example, `window 128, sinks, cap 5`."""
        parts = [] if self.reach is None else [f"{self.reach.kind} {self.reach.size}"]
        parts += ["sinks"] * self.sinks + ([] if self.softcap is None else [f"cap {self.softcap:g}"])
        return ", ".join(parts) or "plain"


PLAIN, CAP = Option(), Option(softcap=5.0)
WINDOW, SHORT, CHUNK = Option(KeyReach("window", 128)), Option(KeyReach("window", 1)), Option(KeyReach("chunk", 100))
ALL = Option(KeyReach("window", 100), sinks=True, softcap=5.0)

# Query heads, key heads, head dimensions (of q and k, of v) and scale; dtype; options.
LAYERS: tuple[tuple[Layout, torch.dtype, tuple[Option, ...]], ...] = (
    ((6, 2, 64, 64, None), torch.bfloat16, (WINDOW, SHORT, CHUNK, CAP, ALL)),
    ((4, 2, 128, 128, 0.05), torch.float16, (WINDOW, CAP, ALL)),
    ((4, 1, 256, 256, None), torch.bfloat16, (CAP, ALL)),
    ((4, 2, 24, 16, None), torch.bfloat16, (PLAIN, ALL)),
    ((8, 4, 512, 512, None), torch.bfloat16, (PLAIN, WINDOW, ALL)),
    ((4, 2, 512, 512, None), torch.float16, (PLAIN,)),
    ((2, 1, 320, 512, None), torch.float32, (PLAIN,)),
    ((6, 2, 64, 64, None), torch.float32, (WINDOW, SHORT, CAP, ALL)),
)


def check_options(index: int, check: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Check the options of one layer, on rows of several lengths and on two rows at a time."""
    layout, dtype, options = LAYERS[index]
    rows = [forest(length, length)[None] for length in (129, 1000, 4095)]
    rows.append(torch.stack([forest(600, seed) for seed in (1, 2)]))
    for option in options[-1:] if quick else options:
        for end in rows[:1] if quick else rows:
            yield _compare(check, option, end.to(device), layout, dtype)


def _compare(check: str, option: Option, end: Tensor, layout: Layout, dtype: torch.dtype) -> Result:
    """Return the result of one layer on rows `end` [B, T]."""
    (q, k, v), weight = draw_inputs(end, layout, dtype)
    # The gradient of a sink is a sum over queries. Positive means keep its terms from cancelling one another.
    weight, v = weight + 0.5, v + 0.5
    sinks = (torch.linspace(-2, 4, layout[0], device=end.device),) if option.sinks else ()
    start = first_visible(end, option.reach)
    settings: dict[str, Any] = {"scale": layout[4], "start": start, "softcap": option.softcap}

    def attend(function: Callable[..., Tensor], *inputs: Tensor, **more: Any) -> Tensor:
        return function(*inputs[:3], end, sinks=inputs[3] if sinks else None, **settings, **more)

    doubles = tuple(x.double() for x in (q, k, v, *sinks))
    expected = outputs(partial(attend, reference_attention), doubles, weight.double())
    inputs, incoming = (amid_nan(q), amid_nan(k), amid_nan(v), *sinks), amid_nan(weight)
    runs = []
    for _ in range(2):
        poison(q)
        with portable_kernels():
            runs.append(outputs(partial(attend, tree_attention, impl="triton"), inputs, incoming))
    equal = all(torch.equal(first, again) for first, again in zip(*runs, strict=True))
    errors = measure(runs[0], expected, weight)
    bound = KERNEL_FLOAT32 if dtype == torch.float32 else 8 * ROUNDING[dtype]
    case = f"{option}, {len(end)} x {end.shape[1]} tokens"
    return Result(check, case, "portable", errors, (bound,) * len(errors), "" if equal else "raised: two runs differ")


def _name(layout: Layout, dtype: torch.dtype) -> str:
    return f"options {'/'.join(map(str, layout[:4]))} {str(dtype).removeprefix('torch.')}"


OPTION_CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    _name(layout, dtype): partial(check_options, index) for index, (layout, dtype, _) in enumerate(LAYERS)
}
