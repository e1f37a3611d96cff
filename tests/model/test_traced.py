"""Traced tensors: the boxes they record put any cut and join of tensors together again, whole and in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treepack.model.weights.traced import TracedTensor

SHAPE = (4, 6, 2)


def stored() -> dict[str, Tensor]:
    return {name: torch.arange(48).reshape(SHAPE) + start for name, start in (("a", 0), ("b", 100))}


def rebuilt(traced: TracedTensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return the tensor that the boxes describe; -1 for elements without a box."""
    assert traced.boxes is not None
    result = torch.full(tuple(traced.shape), -1)
    for box in traced.boxes:
        box.put(tensors[box.name], result)
    return result


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, float]]:
    names = st.sampled_from("cut split turn stack join drop select copy".split())
    return draw(st.lists(st.tuples(names, st.floats(0, 0.999)), max_size=6))


def change(tensor: Any, kind: str, at: float) -> Any:
    """Apply the step `kind` to a tensor; `at` in [0, 1) chooses dimension and place."""
    dim = int(at * tensor.ndim)
    size = tensor.shape[dim]
    first = int(at * size)
    if kind == "cut":
        return tensor.narrow(dim, first, size - first)
    if kind == "split":
        return torch.cat(torch.split(tensor, max(1, first), dim)[::-1], dim)
    if kind == "turn":
        return tensor.transpose(dim, -1).contiguous()
    if kind == "stack":
        return torch.stack([tensor, tensor], dim) if tensor.ndim < 5 else tensor
    if kind == "join":
        return torch.cat([tensor, *torch.chunk(tensor, 2, dim)], dim)
    if kind == "drop":
        return tensor.squeeze(dim)
    if kind == "select":
        return tensor.unbind(dim)[first] if tensor.ndim > 1 else tensor
    return tensor.clone().detach()


@given(changes=steps(), window=st.floats(0, 0.999))
def test_boxes_give_the_elements_of_the_same_steps_on_real_tensors(
    changes: list[tuple[str, float]], window: float
) -> None:
    tensors = stored()
    real = torch.cat([tensors["a"], tensors["b"]], 1)
    traced: Any = torch.cat([TracedTensor.whole(name, SHAPE, torch.int64) for name in "ab"], 1)
    for kind, at in changes:
        real, traced = change(real, kind, at), change(traced, kind, at)
    assert traced.is_known
    assert torch.equal(rebuilt(traced, tensors), real)
    # Any window of it alone, as a rank reads it: here rows from `first` on.
    first = int(window * len(real))
    inner = ((first, len(real)), *((0, size) for size in real.shape[1:]))
    part = torch.full((len(real) - first, *real.shape[1:]), -1)
    for box in traced.boxes:
        if (inside := box.within(inner)) is not None:
            inside.put(tensors[inside.name], part)
    assert torch.equal(part, real[first:])


@pytest.mark.parametrize("kind", ["product", "reshape", "step", "narrower dtype", "in place", "of an unknown one"])
def test_what_computes_with_elements_has_no_boxes(kind: str) -> None:
    traced = TracedTensor.whole("a", SHAPE, torch.float32)
    results: dict[str, Any] = {
        "product": lambda: traced * 2,
        "reshape": lambda: traced.reshape(24, 2),
        "step": lambda: traced[::2],
        "narrower dtype": lambda: traced.to(torch.bfloat16),
        "in place": lambda: traced.clone().mul_(2),
        "of an unknown one": lambda: torch.cat([traced, traced.exp()])[:4],
    }
    result = results[kind]()
    assert isinstance(result, TracedTensor)
    assert not result.is_known


def test_a_wider_dtype_keeps_the_boxes() -> None:
    traced: Any = TracedTensor.whole("a", SHAPE, torch.bfloat16).to(torch.float32)
    assert traced.is_known
    assert traced.dtype == torch.float32
