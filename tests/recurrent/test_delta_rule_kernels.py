"""The kernels of the delta rule inside chunks against their slow twin, in the interpreter; their fit on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from support import interpreter  # noqa: F401
from support.attention_trees import chain, ends_of
from support.kernel_inputs import poisoned_empty
from support.recurrent_solve_twins import solve
from support.recurrent_state_twins import sum_decays
from treepack.recurrent.chunks import TokenChunks, build_chunks
from treepack.recurrent.kernels.delta_rule import multiply_inverse, solve_backward, solve_forward

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # relative, at most


class Solve(NamedTuple):
    """Operands of both directions; names and shapes as in `kernels.delta_rule`."""

    k: Tensor
    v: Tensor
    beta: Tensor
    a: Tensor
    dw: Tensor
    du: Tensor


def draw(
    chunks: TokenChunks, keys: int = 16, values: int = 16, *, heads: int = 1, key_heads: int = 1, dtype: torch.dtype
) -> Solve:
    """Return random operands: unit keys, beta in (0, 1), decays of at most a factor of e**(1 / 4) a token."""
    count = len(chunks.end)
    generator = torch.Generator().manual_seed(count + keys)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(count, heads, width, generator=generator)

    k, v, dw, du = normal(key_heads, keys), normal(heads, values), normal(heads, keys), normal(heads, values)
    beta, g = torch.rand(2, count, heads, generator=generator)
    k, v, dw, du = (x.to(dtype) for x in (normalize(k, dim=-1), v, dw, du))
    return Solve(k, v, beta, sum_decays(g / -4, chunks), dw, du)


def run_kernels(inputs: Solve, chunks: TokenChunks) -> list[Tensor]:
    """Return W, U, the inverse, and the gradients of k, v, beta and a; elements without a result are NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty())
        w, u, inverse = solve_forward(*inputs[:4], chunks)
        return [w, u, inverse, *solve_backward(*inputs[:4], inverse, dw=inputs.dw, du=inputs.du, chunks=chunks)]


def run_twin(inputs: Solve, chunks: TokenChunks) -> list[Tensor]:
    """Return the results of `run_kernels` in float64."""
    # dk has a part for each head of v
    shared = inputs.k.repeat_interleave(inputs.v.shape[1] // inputs.k.shape[1], 1)
    k, v, beta, a = leaves = [x.double().requires_grad_() for x in (shared, inputs.v, inputs.beta, inputs.a)]
    results = solve(k, v, beta, a, chunks)
    torch.autograd.backward(results[:2], [inputs.dw.double(), inputs.du.double()])
    return [*(x.detach() for x in results), *(x.grad for x in leaves if x.grad is not None)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Relative RMS errors; results that are all zero count with their absolute one."""
    return [float((x.double() - y).norm() / (y.norm() or 1)) for x, y in zip(found, exact, strict=True)]


def condition(inverse: Tensor, chunks: TokenChunks) -> float:
    """Return the largest condition number of 1 + A among chunks and heads, in the 2-norm, from `inverse` [N, H, 64]."""
    parts = zip(chunks.begin.tolist(), chunks.length.tolist(), strict=True)
    return max(float(torch.linalg.cond(inverse[b : b + n, :, :n].transpose(0, 1)).max()) for b, n in parts)


@st.composite
def forests(draw: st.DrawFn) -> Tensor:
    """subtree_end [1, T] of one or two nodes, of which one may be longer than a chunk, and padding."""
    first, second = draw(st.sampled_from([(1, 2), (3, 17), (18, 1), (49, 0), (64, 1), (66, 0)]))
    nodes = [(first, -1), (second, draw(st.integers(-1, 0)))] if second else [(first, -1)]
    return ends_of(*nodes, *[(1, -1)] * draw(st.integers(0, 5)))


@given(forests(), st.sampled_from([(16, 16), (20, 40), (33, 5)]))
@settings(max_examples=4)
def test_solutions_and_their_gradients_are_those_of_the_definition(end: Tensor, widths: tuple[int, int]) -> None:
    check(build_chunks(end), widths)


def test_each_key_head_serves_the_heads_of_its_group() -> None:
    check(build_chunks(chain(5)), (16, 16), heads=4, key_heads=2)


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "length"), [((128, 128), 64), ((256, 64), 65), ((96, 256), 63)])
def test_widths_of_real_models(widths: tuple[int, int], length: int) -> None:
    end = ends_of((length, -1), (1, 0), (66, 0), *[(1, -1)] * 2)
    check(build_chunks(end), widths, heads=4, key_heads=2)


def check(chunks: TokenChunks, widths: tuple[int, int], *, heads: int = 1, key_heads: int = 1) -> None:
    inputs = draw(chunks, *widths, heads=heads, key_heads=key_heads, dtype=torch.float32)
    exact = run_twin(inputs, chunks)
    bound = 6 * ROUNDING[torch.float32] * condition(exact[2], chunks)
    assert max(errors(run_kernels(inputs, chunks), exact)) < bound


@pytest.mark.parametrize("beta", [1.0, 1.99])
def test_equal_keys_cost_no_more_than_the_roundings_of_float32(beta: float) -> None:
    # Powers of A reach 1e17 beta**32, and the condition number of 1 + A is 82 or 5205: a sum of powers would be noise.
    chunks = build_chunks(chain(64))
    inputs = draw(chunks, dtype=torch.float32)
    k = normalize(inputs.k[:1] + inputs.k / 1000, dim=-1)
    inputs = inputs._replace(k=k, beta=torch.full_like(inputs.beta, beta), a=torch.zeros_like(inputs.a))
    exact = run_twin(inputs, chunks)
    assert max(errors(run_kernels(inputs, chunks), exact)) < ROUNDING[torch.float32] * condition(exact[2], chunks)


def test_decays_that_underflow_leave_no_nan() -> None:
    chunks = build_chunks(chain(40))
    inputs = draw(chunks, dtype=torch.float32)
    inputs = inputs._replace(a=-1000.0 * torch.arange(1, 41)[:, None])
    assert max(errors(run_kernels(inputs, chunks), run_twin(inputs, chunks))) < 4 * ROUNDING[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_costs_a_few_roundings(dtype: torch.dtype) -> None:
    # T, beta v and U are rounded on the way to U, and five matrices on the way to dk.
    chunks = build_chunks(chain(64))
    inputs = draw(chunks, 64, 64, dtype=dtype)
    assert max(errors(run_kernels(inputs, chunks), run_twin(inputs, chunks))) < 3 * ROUNDING[dtype]


def test_chunks_do_not_read_each_other_and_two_runs_agree_in_every_bit() -> None:
    chunks = build_chunks(ends_of((5, -1), (3, 0), (4, 0)))
    inputs = draw(chunks, dtype=torch.float32)
    first = run_kernels(inputs, chunks)
    # tokens 5, 6 and 7 are the second chunk
    damaged = Solve(*(x.clone() for x in inputs))
    for x in damaged:
        x[5:8] = torch.nan
    others = [0, 1, 2, 3, 4, 8, 9, 10, 11]
    for x, y in zip(first, run_kernels(damaged, chunks), strict=True):
        assert torch.equal(x[others], y[others])


def test_products_with_a_stored_inverse_are_those_of_the_forward_pass() -> None:
    chunks = build_chunks(chain(9))
    inputs = draw(chunks, dtype=torch.bfloat16)
    w, u, inverse = solve_forward(*inputs[:4], chunks)
    again = multiply_inverse(*inputs[:4], inverse, chunks)
    assert torch.equal(w, again[0])
    assert torch.equal(u, again[1])
