"""The kernels of states and of sums of decays against their slow twins, in the interpreter; their fit on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import interpreter  # noqa: F401
from support.attention_trees import caterpillar, chain, forests, star
from support.kernel_inputs import poisoned_empty
from support.recurrent_state_twins import Results, States, compute_states, draw_states, sum_decays
from treepack.recurrent.chunks import TokenChunks, build_chunks
from treepack.recurrent.kernels.decays import decays, decays_backward
from treepack.recurrent.kernels.state_shapes import FLOAT32, HALF, StateConfig, narrow_config
from treepack.recurrent.kernels.states import states_backward, states_forward

ORDERS = ("levels", "paths")
SIZE = 16  # tokens of a chunk, fewer than in use, for speed
FORESTS = forests(lengths=(1, 1, 2, 15, 16, 17, 33), max_nodes=6)


def run_kernels(inputs: States, chunks: TokenChunks) -> Results:
    """Compute both directions; elements without a result are NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned_empty())
        q, k, u, w, a, do, du_local = inputs
        h, new = states_forward(k, u, w, a, chunks)
        dh, du = states_backward(q, k, w, a, do, du_local, chunks=chunks)
    return Results(h, new, dh, du)


def errors(results: Results, exact: Results) -> list[float]:
    """Relative RMS errors; results that are all zero count with their absolute one."""
    pairs = zip(results, exact, strict=True)
    return [float((x.double() - y).norm() / (y.norm() or 1)) for x, y in pairs]


def close(sums: Tensor, exact: Tensor) -> bool:
    """Each sum of at most 16 numbers of one sign is exact up to that many roundings."""
    return bool(((sums.double() - exact).abs() <= 16 * torch.finfo(torch.float32).eps * exact.abs()).all())


@given(FORESTS, st.sampled_from(ORDERS), st.booleans())
@settings(max_examples=10)
def test_states_and_their_gradients_are_those_of_the_definition(end: Tensor, order: str, delta: bool) -> None:
    chunks = build_chunks(end, size=SIZE, order=order)
    inputs = draw_states(chunks, 16, 16, delta=delta)
    results = run_kernels(inputs.to(torch.float32), chunks)
    assert max(errors(results, compute_states(inputs, chunks))) < 1e-5


@pytest.mark.parametrize(
    "end", [chain(100), caterpillar(2, 12, 1, 2), star(20, 6, 3), torch.cat([star(9, 2, 17), chain(43)])]
)
def test_both_orders_give_equal_bits_in_the_forward_pass(end: Tensor) -> None:
    by_levels, by_paths = (build_chunks(end, size=SIZE, order=order) for order in ORDERS)
    inputs = draw_states(by_levels, 16, 16, heads=1)
    results = run_kernels(inputs.to(torch.float32), by_paths)
    assert max(errors(results, compute_states(inputs, by_paths))) < 1e-5
    _, k, u, w, a, *_ = inputs.to(torch.float32)
    h, new = states_forward(k, u, w, a, by_levels)
    assert torch.equal(h, results.h)
    assert torch.equal(new, results.new)


@pytest.mark.parametrize(("keys", "values", "key_heads"), [(5, 3, 1), (24, 33, 2), (130, 17, 2)])
@pytest.mark.parametrize("delta", [True, False])
def test_any_widths_and_groups_of_heads(keys: int, values: int, key_heads: int, delta: bool) -> None:
    chunks = build_chunks(star(9, 2, 5), size=SIZE)
    inputs = draw_states(chunks, keys, values, heads=2, key_heads=key_heads, delta=delta)
    results = run_kernels(inputs.to(torch.float32), chunks)
    assert max(errors(results, compute_states(inputs, chunks))) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_err_by_a_few_roundings_and_repeat_their_bits(dtype: torch.dtype) -> None:
    chunks = build_chunks(star(30, 2, 20), size=SIZE)
    inputs = draw_states(chunks, 16, 16).to(dtype)
    first, second = (run_kernels(inputs, chunks) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    exact = compute_states(inputs.to(torch.float64), chunks)
    assert max(errors(first, exact)) < 2 * torch.finfo(dtype).eps


def test_decays_that_erase_everything_leave_no_nan() -> None:
    chunks = build_chunks(star(20, 2, 10), size=SIZE)
    inputs = draw_states(chunks, 16, 16)
    g = torch.full((40, 2), -1000.0, dtype=torch.float64)
    inputs = inputs._replace(a=sum_decays(g, chunks))
    results = run_kernels(inputs.to(torch.float32), chunks)
    assert max(errors(results, compute_states(inputs, chunks))) < 1e-5


@given(FORESTS, st.sampled_from([1, 3]))
@settings(max_examples=3)
def test_sums_of_decays_begin_with_each_chunk_in_both_directions(end: Tensor, heads: int) -> None:
    chunks = build_chunks(end, size=SIZE)
    g = -torch.rand(len(chunks.end), heads, generator=torch.Generator().manual_seed(heads))
    assert close(decays(g, chunks), sum_decays(g.double(), chunks))
    # The gradient of a sum: reverse each chunk, sum, and reverse it back.
    ends = zip(chunks.begin.tolist(), chunks.length.tolist(), strict=True)
    parts = [g[first : first + count].double().flip(0).cumsum(0).flip(0) for first, count in ends]
    assert close(decays_backward(g, chunks), torch.cat(parts))


def test_more_heads_than_a_program_of_the_sums_takes() -> None:
    chunks = build_chunks(chain(5), size=4)
    g = -torch.rand(5, 40, generator=torch.Generator().manual_seed(0))
    assert close(decays(g, chunks), sum_decays(g.double(), chunks))


@pytest.mark.parametrize(
    ("runs", "heads", "values", "block"),
    [(1, 32, 128, 32), (2, 32, 128, 64), (1, 48, 128, 64), (1, 1, 64, 32), (0, 32, 128, 32)],
)
def test_few_runs_have_narrow_programs_that_all_run_at_once(runs: int, heads: int, values: int, block: int) -> None:
    # A GPU of 132 multiprocessors; programs have 64 columns or 32.
    assert narrow_config(HALF[128].forward, runs * heads * values, 132).block_v == block


@pytest.mark.parametrize("config", [*HALF[128], *HALF[256], *FLOAT32[128], *FLOAT32[256]])
def test_no_shape_is_narrower_than_a_product(config: StateConfig) -> None:
    assert narrow_config(config, 1, 132).block_v >= 16
    assert narrow_config(config, 1, 0) == config
