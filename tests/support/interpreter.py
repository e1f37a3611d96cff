"""Triton's interpreter, fit to run these kernels: import it before a test calls one. `conftest` switches it on.

Four things of Triton 3.6 are put right. It reads the bounds of a loop by int(array of one element), which numpy
refuses from 2.4 on. It multiplies the bit patterns of bfloat16 matrices. It cuts off the last 16 bits of a float32 for
a bfloat16, which GPUs round to the nearest. And it patches the whole language again on every call of a function inside
a kernel, a third of the time that a small kernel takes.

Half of the rest went into types: each operation makes the types of its operands again, with every size of their shapes
wrapped and unwrapped. Here equal shapes are one object, and a type that nobody asks for is not made.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from support.kernel_inputs import poisoned_empty
from treepack.attention.portable import forward as portable
from treepack.attention.portable.forward import LoopConfigs, PortableConfig

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


Sizes = tuple[int, ...]
_init_block = tl.block_type.__init__
_unwrap = tl.core._unwrap_if_constexpr
_broadcast = TritonSemantic.broadcast_impl_value
_find_numpy = interpreter._get_np_dtype
_blocks: dict[Sizes, tuple[Any, int]] = {}  # shape and number of elements, as block_type has them
_shapes: dict[Sizes, tuple[Any, Any]] = {}  # the same, as tensor has them
_names: dict[tuple[Sizes, str], str] = {}
_numpy: dict[str, Any] = {}


def _make_block(block: Any, element: Any, shape: Any) -> None:
    key = tuple(size.value if type(size) is tl.constexpr else size for size in shape)
    if (key, element.name) not in _names:
        _init_block(block, element, shape)
        _blocks.setdefault(key, (block.shape, block.numel))
        _names[key, element.name] = block.name
    block.element_ty, block.name = element, _names[key, element.name]
    block.shape, block.numel = _blocks[key]


def _make_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    key = tuple(kind.shape) if kind.is_block() else ()
    if key not in _shapes:
        _shapes[key] = tl.tuple([tl.constexpr(size) for size in key]), tl.constexpr(math.prod(key))
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = _shapes[key]


def _make_tuple(values: Any, args: Any, kind: Any = None) -> None:
    values.values = list(args)
    values.made = kind if kind is None or isinstance(kind, tl.core.tuple_type) else tl.core.tuple_type(kind)


def _type_of_tuple(values: Any) -> Any:
    if vars(values).get("made") is None:
        values.made = tl.core._type_for_tuple_values(values.values)
    return values.made


def _make_constant(constant: Any, value: Any) -> None:
    while isinstance(value, tl.constexpr):
        value = value.value
    constant.value = value


def _unwrapped(value: Any) -> Any:
    if type(value) is tl.constexpr:
        return value.value
    return _unwrap(value) if isinstance(value, (list, tuple, tl.tuple)) else value


def _broadcast_both(semantic: Any, left: Any, right: Any) -> Any:
    if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
        return left, right
    return _broadcast(semantic, left, right)


def _numpy_dtype(kind: Any) -> Any:
    name = kind.scalar.name
    if name not in _numpy:
        _numpy[name] = _find_numpy(kind)
    return _numpy[name]


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter.InterpretedFunction.__call__ = _call
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter._convert_float = _convert_float
if knobs.runtime.interpret:  # the compiler keeps its own types
    tl.block_type.__init__ = _make_block
    tl.tensor.__init__ = _make_tensor
    tl.tuple.__init__ = _make_tuple
    tl.tuple.type = property(_type_of_tuple, lambda values, kind: setattr(values, "made", kind))
    tl.constexpr.__init__ = _make_constant
    tl.constexpr.type = property(lambda constant: tl.core.constexpr_type(constant.value))
    tl.core._unwrap_if_constexpr = _unwrapped
    TritonSemantic.broadcast_impl_value = _broadcast_both
    interpreter._get_np_dtype = _numpy_dtype


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill `torch.empty` with NaN in a file that imports this; without a GPU, let float32 kernels have few steps."""
    monkeypatch.setattr(torch, "empty", poisoned_empty())
    if not torch.cuda.is_available():
        wide = PortableConfig(128, 128, 8, 1)  # each program and step costs the interpreter about the same time
        monkeypatch.setitem(portable.FLOAT32, 64, LoopConfigs(wide, wide, PortableConfig(128, 64, 8, 1)))
