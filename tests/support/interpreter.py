"""Triton's interpreter, fit to run these kernels: import it before a test calls one. `conftest` switches it on.

Four things of Triton 3.6 are put right. It reads the bounds of a loop by int(array of one element), which numpy
refuses from 2.4 on. It multiplies the bit patterns of bfloat16 matrices. It cuts off the last 16 bits of a float32 for
a bfloat16, which GPUs round to the nearest. And it patches the whole language again on every call of a function inside
a kernel, a third of the time that a small kernel takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_multiply = interpreter.InterpreterBuilder.create_dot
_convert = interpreter._convert_float


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _multiply(builder, _widened(a), _widened(b), *rest)


def _widened(matrix: Any) -> Any:
    if matrix.dtype.scalar != tl.bfloat16:
        return matrix
    values = interpreter._convert_float(matrix.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


def _convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    if source != tl.float32 or target != tl.bfloat16:
        return _convert(values, source, target, rounding)
    nearest = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
    return nearest.view(torch.uint16).numpy()


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    if tl.core.is_builtin(tl.core.load) or tl.core.is_builtin(tl.load):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter.InterpretedFunction.__call__ = _call
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter._convert_float = _convert_float
