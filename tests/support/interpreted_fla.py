"""Kernels of flash-linear-attention in Triton's interpreter, without a GPU, in float32 and float16.

Two things of Triton 3.9 are put right besides those of `support.interpreter`: a kernel is run with its first
configuration instead of the fastest one, and counters of loops are tensors, as in compiled kernels. bfloat16 stays
wrong: numpy has no such numbers, and the interpreter adds and multiplies their bit patterns as integers.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from typing import Any

import fla.ops.gated_delta_rule
import fla.ops.kda
import fla.ops.simple_gla  # noqa: F401 (the modules of all kernels are in sys.modules from here on)
import triton.language as tl
from triton.runtime import autotuner, interpreter

import support.interpreter  # noqa: F401


def _range(*bounds: Any) -> Iterator[Any]:
    numbers = [bound.value if isinstance(bound, tl.constexpr) else int(bound) for bound in bounds]
    for number in builtins.range(*numbers):
        yield interpreter._implicit_cvt(number)


def _take_as_fast(_: Any, *__: Any, **___: Any) -> list[float]:
    return [1.0, 1.0, 1.0]


autotuner.Autotuner._bench = _take_as_fast
for _name, _module in list(sys.modules.items()):
    if _name.startswith("fla.ops."):
        _module.__dict__.setdefault("range", _range)
