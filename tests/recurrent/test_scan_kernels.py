"""Recurrent layers by the kernels, in the interpreter, against the twin in float64: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import interpreter  # noqa: F401
from support.attention_trees import chain, ends_of, forests, star
from support.kernel_inputs import poisoned_empty
from treepack.recurrent import twin
from treepack.recurrent.chunks import TokenChunks, build_chunks

pytest.importorskip("triton")

from treepack.recurrent.kernels.autograd import triton_scan

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, TokenChunks], Tensor]

SIZE = 16  # tokens of a chunk, fewer than in use, for speed
BRANCHES = ends_of((66, -1), (1, 0), (5, 1), (3, 1), (70, 0), *[(1, -1)] * 3)


def draw_inputs(
    count: int, *, widths: tuple[int, int] = (16, 16), key_heads: int = 1, delta: bool = True
) -> list[Tensor]:
    """Return q, k, v, g and beta (if `delta`) of 2 heads in float64, and the gradient of the output."""
    generator = torch.Generator().manual_seed(count + widths[0])

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(count, key_heads, widths[0]), dim=-1) for _ in range(2))
    beta = [draw(count, 2).sigmoid()] if delta else []
    return [q, k, draw(count, 2, widths[1]), -draw(count, 2).abs() / 4, *beta, draw(count, 2, widths[1])]


def compute(scan: Scan, inputs: list[Tensor], chunks: TokenChunks, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and every gradient, of inputs in `dtype`; g and beta have at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    *values, do = inputs
    leaves = [x.to(dtype if i < 3 else wide).requires_grad_() for i, x in enumerate(values)]
    q, k, v, g, *beta = leaves
    out = scan(q, k, v, g, beta[0] if beta else None, chunks)
    assert out.dtype == dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, do.to(dtype))]


def by_kernels(inputs: list[Tensor], chunks: TokenChunks, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Compute by the kernels; elements without a result are NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty())
        return compute(triton_scan, inputs, chunks, dtype)


def error(results: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative RMS error; results that are all zero count with their absolute one."""
    return max(float((x.double() - y).norm() / (y.norm() or 1)) for x, y in zip(results, exact, strict=True))


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """subtree_end [2, T] of two rows: nodes shorter and longer than chunks with padding, and one path."""
    first = draw(forests(lengths=(1, 1, 2, 15, 16, 17), max_nodes=5))
    return torch.cat([first, chain(first.shape[1])])


@given(rows(), st.booleans())
@settings(max_examples=3)
def test_outputs_and_gradients_are_those_of_the_twin_on_any_trees(end: Tensor, delta: bool) -> None:
    chunks = build_chunks(end, size=SIZE)
    inputs = draw_inputs(end.numel(), delta=delta)
    assert error(by_kernels(inputs, chunks), compute(twin.scan_plainly, inputs, chunks, torch.float64)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "key_heads", "delta"), [((24, 5), 1, False), ((5, 24), 2, True)])
def test_chunks_in_use_with_any_widths_and_groups_of_heads(
    widths: tuple[int, int], key_heads: int, delta: bool
) -> None:
    chunks = build_chunks(BRANCHES)
    inputs = draw_inputs(BRANCHES.shape[1], widths=widths, key_heads=key_heads, delta=delta)
    assert error(by_kernels(inputs, chunks), compute(twin.scan_plainly, inputs, chunks, torch.float64)) < 1e-5


def test_two_chunks_in_use_with_other_widths() -> None:
    chunks = build_chunks(chain(67))
    inputs = draw_inputs(67, widths=(5, 24))
    assert error(by_kernels(inputs, chunks), compute(twin.scan_plainly, inputs, chunks, torch.float64)) < 1e-5


@pytest.mark.parametrize("delta", [True, False])
def test_bfloat16_errs_by_a_few_roundings(delta: bool) -> None:
    chunks = build_chunks(star(16, 2, 8), size=SIZE)
    rounded = [x.bfloat16().double() if x.ndim == 3 else x.float().double() for x in draw_inputs(32, delta=delta)]
    # Values pass through about four products, whose operands are rounded each time.
    bound = 4 * torch.finfo(torch.bfloat16).eps
    assert (
        error(by_kernels(rounded, chunks, torch.bfloat16), compute(twin.scan_plainly, rounded, chunks, torch.float64))
        < bound
    )


def test_two_runs_agree_in_every_bit() -> None:
    chunks, inputs = build_chunks(star(3, 2, 2), size=SIZE), draw_inputs(7)
    first, second = (by_kernels(inputs, chunks, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_gradients_have_the_dtypes_of_their_inputs() -> None:
    chunks = build_chunks(chain(2), size=SIZE)
    q, k, v, g, beta, do = draw_inputs(2)
    q, k, v, g, beta = leaves = [x.requires_grad_() for x in (q.float(), k.half(), v.bfloat16(), g, beta.bfloat16())]
    out = triton_scan(q, k, v, g, beta, chunks)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out, leaves, do.bfloat16())
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]


def test_rows_without_tokens_have_no_outputs_and_no_gradients() -> None:
    chunks = build_chunks(torch.zeros(1, 0, dtype=torch.int32))
    assert [len(x) for x in by_kernels(draw_inputs(0), chunks)] == [0] * 6
