"""The output kernels of recurrent layers against autograd of their definition in float64: outputs and every gradient.

Without a GPU they run in Triton's interpreter. `torch.empty` returns NaN, so a missing write shows in results. Tensors
are views into buffers of NaN, so a read before the first token or after the last one shows too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import chain, ends_of, random_tree
from support.kernel_inputs import poisoned_empty
from support.recurrent_output_twins import gradient_of_w, outputs, states_after

pytest.importorskip("triton")


from support import interpreter  # noqa: F401
from treepack.recurrent.chunks import CHUNK, TokenChunks, build_chunks
from treepack.recurrent.kernels import outputs as kernels
from treepack.recurrent.kernels.outputs import (
    OutputConfig,
    OutputConfigs,
    local_backward,
    outputs_forward,
    products_backward,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL, LARGE = OutputConfig(16, 16, 8, 1), OutputConfig(64, 64, 8, 1)
# A root of 5 tokens with children of 3 and 1 tokens, below the first of which is a node of 2; then a tree of 4, and 3
# tokens of padding: chunks of 5 3 2 1 4 3 tokens.
FOREST = ends_of((5, -1), (3, 0), (2, 1), (1, 0), (4, -1), (1, -1), (1, -1), (1, -1))
FORK = ends_of((5, -1), (3, 0), (2, 0))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned_empty())
    if DEVICE == "cpu":  # few steps, because each costs the interpreter about the same time
        monkeypatch.setattr(kernels, "FLOAT32", OutputConfigs(LARGE, LARGE, LARGE))


class Shape(NamedTuple):
    """Sizes of a layer: key heads, heads, K, V."""

    key_heads: int = 1
    heads: int = 2
    keys: int = 16
    values: int = 16


class Inputs(NamedTuple):
    """Arguments of the kernels, in the order of `products_backward`."""

    q: Tensor
    k: Tensor
    new: Tensor
    h: Tensor
    a: Tensor
    do: Tensor
    dh: Tensor
    du: Tensor


def between_nan(x: Tensor) -> Tensor:
    """Return `x` as a contiguous view into a buffer of NaN, with 64 rows of it before and after."""
    edge = torch.full((64, *x.shape[1:]), torch.nan, dtype=x.dtype)
    return torch.cat([edge, x, edge]).to(DEVICE)[64:-64]


def make_inputs(chunks: TokenChunks, shape: Shape, *, dtype: torch.dtype = torch.float32, decay: float = 0.3) -> Inputs:
    """Return arguments whose `a` falls inside every chunk, by up to `decay` from token to token."""
    generator = torch.Generator().manual_seed(len(chunks.end))
    count, (key_heads, heads, keys, values) = len(chunks.end), shape

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(count, key_heads, keys), dim=-1) for _ in range(2))
    new, do, du = (draw(count, heads, values) for _ in range(3))
    h, dh = (draw(len(chunks.begin), heads, keys, values) for _ in range(2))
    g = -decay * torch.rand(count, heads, generator=generator)
    parts = torch.split(g, chunks.length.tolist())
    a = torch.cat([part.cumsum(0) for part in parts])
    q, k, new, h, do, dh, du = (between_nan(x.to(dtype)) for x in (q, k, new, h, do, dh, du))
    return Inputs(q, k, new, h, between_nan(a), do, dh, du)


def expect(inputs: Inputs, chunks: TokenChunks) -> dict[str, Tensor]:
    """Return the results of the kernels in float64: autograd of the sum of o * do and of h_after * dh."""
    wide = Inputs(*(x.detach().cpu().double() for x in inputs))
    group = wide.new.shape[1] // wide.q.shape[1]
    # Each head of the values has its own copy of q and k, and so its own gradient.
    q, k = (x.repeat_interleave(group, 1).requires_grad_() for x in (wide.q, wide.k))
    new, h, a = (x.requires_grad_() for x in (wide.new, wide.h, wide.a))
    chunks = chunks.to(torch.device("cpu"))
    o, after = outputs(q, k, new, h, a, chunks), states_after(k, new, h, a, chunks)
    (du_local,) = torch.autograd.grad(o, new, wide.do, retain_graph=True)
    dq, dk, da = torch.autograd.grad([o, after], [q, k, a], [wide.do, wide.dh])
    dw = gradient_of_w(h.detach(), wide.du, chunks)
    return {"o": o.detach(), "du_local": du_local, "dq": dq, "dk": dk, "dw": dw, "da": da}


def run(inputs: Inputs, chunks: TokenChunks) -> dict[str, Tensor]:
    """Return the results of the kernels; dw is left out without the delta rule, where the others must not change."""
    q, k, new, h, a, do, dh, du = inputs
    o, du_local = outputs_forward(q, k, new, h, a, chunks), local_backward(q, k, a, do, chunks)
    dq, dk, dw, da = products_backward(q, k, new, h, a, do=do, dh=dh, du=du, chunks=chunks, delta=True)
    assert dw is not None
    return {"o": o, "du_local": du_local, "dq": dq, "dk": dk, "dw": dw, "da": da}


def check(end: Tensor, shape: Shape, *, size: int = CHUNK, decay: float = 0.3) -> None:
    """Compare all results in float32 with results in float64."""
    chunks = build_chunks(end, size=size).to(torch.device(DEVICE))
    inputs = make_inputs(chunks, shape, decay=decay)
    compare(run(inputs, chunks), expect(inputs, chunks), 4e-6)


def compare(results: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare each result with its norm; da with 1 if it is smaller, because it is a difference of products."""
    for name, theirs in expected.items():
        ours = results[name].double().cpu()
        assert ours.shape == theirs.shape, name
        assert ours.isfinite().all(), name
        yardstick = theirs.norm().clamp(min=1.0 if name == "da" else 0.0)
        assert float((ours - theirs).norm() / yardstick) <= tolerance, name


@given(
    end=st.builds(random_tree, st.integers(1, 12), st.integers(0, 2**16)),
    heads=st.sampled_from([(1, 1), (1, 2)]),
    keys=st.sampled_from([3, 16]),
    values=st.sampled_from([5, 16]),
)
@settings(max_examples=3)
def test_every_result_is_that_of_autograd_on_any_tree(
    end: Tensor, heads: tuple[int, int], keys: int, values: int
) -> None:
    check(end, Shape(*heads, keys, values), size=8)


def test_chunks_read_and_write_only_their_tokens_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FLOAT32", OutputConfigs(SMALL, SMALL, SMALL))
    check(FOREST, Shape(1, 2, 18, 20), size=8)


@pytest.mark.parametrize("length", [64, 65, 130])
def test_nodes_about_as_long_as_a_chunk(length: int) -> None:
    check(chain(length), Shape(1, 1))


def test_decays_that_erase_everything_leave_no_nan() -> None:
    check(FORK, Shape(), size=8, decay=3000.0)


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "values"), [(256, 64), (96, 192)])
def test_sizes_of_real_models(keys: int, values: int) -> None:
    check(random_tree(100, seed=3), Shape(2, 4, keys, values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_err_by_a_few_roundings_and_repeat_their_bits(dtype: torch.dtype) -> None:
    chunks = build_chunks(chain(40)).to(torch.device(DEVICE))
    inputs = make_inputs(chunks, Shape(1, 1, 40, 40), dtype=dtype)
    first, second = run(inputs, chunks), run(inputs, chunks)
    for name, result in first.items():
        assert result.dtype == (torch.float32 if name == "da" else dtype)
        assert torch.equal(result, second[name])
    compare(first, expect(inputs, chunks), torch.finfo(dtype).eps)


def test_without_the_delta_rule_only_dw_is_missing() -> None:
    chunks = build_chunks(FORK).to(torch.device(DEVICE))
    q, k, new, h, a, do, dh, du = make_inputs(chunks, Shape())
    others: dict[str, Any] = {"do": do, "dh": dh, "chunks": chunks}
    with_delta = products_backward(q, k, new, h, a, du=du, delta=True, **others)
    without = products_backward(q, k, new, h, a, du=torch.full_like(du, torch.nan), delta=False, **others)
    assert without[2] is None
    for i in (0, 1, 3):
        assert torch.equal(with_delta[i], without[i])  # type: ignore[arg-type]
