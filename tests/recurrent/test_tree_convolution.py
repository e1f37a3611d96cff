"""Convolutions on trees against their definition token by token: plain torch in float64, and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

import support.interpreter  # noqa: F401
from support.attention_trees import ends_of, random_tree, star
from support.kernel_inputs import poisoned_empty
from support.refusal import refusal
from support.token_scans import convolve_tokens
from treepack.attention.dispatch import BatchSchedules
from treepack.recurrent import dispatch
from treepack.recurrent.chunks import find_parents, flatten_ends
from treepack.recurrent.convolution import ConvolutionTaps, build_taps, convolve_plainly
from treepack.recurrent.kernels.convolution import triton_convolve

Convolve = Callable[[Tensor, Tensor, Tensor | None, str | None, ConvolutionTaps], Tensor]
PADDING = ends_of(*[(1, -1)] * 9)


class Inputs(NamedTuple):
    """Arguments of a convolution, and the gradient of its output."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None
    do: Tensor


def make_inputs(
    end: Tensor, width: int, activation: str | None, *, channels: int = 20, dtype: torch.dtype = torch.float64
) -> Inputs:
    generator = torch.Generator().manual_seed(end.numel())

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    count = end.numel()
    bias = None if activation is None else draw(channels)
    return Inputs(draw(count, channels), draw(channels, width), bias, activation, draw(count, channels))


def run(function: Convolve, inputs: Inputs, taps: ConvolutionTaps) -> list[Tensor]:
    """Return the output and the gradients of x, weight and bias."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs[:3]]
    x, weight, bias = leaves
    assert x is not None
    assert weight is not None
    out = function(x, weight, bias, inputs.activation, taps)
    given = [leaf for leaf in leaves if leaf is not None]
    return [out.detach(), *torch.autograd.grad(out, given, inputs.do)]


def run_tokens(inputs: Inputs, end: Tensor) -> list[Tensor]:
    """Return the same in float64 by the definition."""

    def function(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, _: ConvolutionTaps) -> Tensor:
        out = convolve_tokens(x, weight, bias, find_parents(flatten_ends(end)))
        return out if activation is None else silu(out)

    x, weight, bias, activation, do = inputs
    wide = Inputs(x.double(), weight.double(), None if bias is None else bias.double(), activation, do.double())
    return run(function, wide, build_taps(end, weight.shape[1]))


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative RMS error of a result."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@st.composite
def rows_of_small_nodes(draw: st.DrawFn) -> Tensor:
    """subtree_end [B, T] of rows of trees whose nodes have 1 to 3 tokens, padded to one length."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        nodes: list[tuple[int, int]] = []
        path: list[int] = []
        for _ in range(draw(st.integers(1, 5))):
            path = path[: draw(st.integers(0, len(path)))]
            nodes.append((draw(st.integers(1, 3)), path[-1] if path else -1))
            path.append(len(nodes) - 1)
        rows.append(ends_of(*nodes)[0])
    length = max(map(len, rows))
    # A row of 3 tokens padded to 5 ends with one-token trees: [3, 3, 3] -> [3, 3, 3, 4, 5]
    padded = [torch.cat([row, torch.arange(len(row) + 1, length + 1, dtype=row.dtype)]) for row in rows]
    return torch.stack(padded)


@given(rows_of_small_nodes(), st.integers(1, 5), st.sampled_from([None, "silu"]))
@example(star(3, 12, 1), 4, "silu")
@example(PADDING, 4, "silu")
def test_torch_convolves_paths_of_trees_with_every_gradient(end: Tensor, width: int, activation: str | None) -> None:
    inputs = make_inputs(end, width, activation)
    found = run(convolve_plainly, inputs, build_taps(end, width))
    assert largest_error(found, run_tokens(inputs, end)) < 1e-14


@settings(max_examples=8)
@given(rows_of_small_nodes(), st.integers(2, 5), st.sampled_from([None, "silu"]))
@example(star(3, 10, 1), 4, "silu")  # one token with more readers than a tile has
@example(PADDING, 4, "silu")
def test_kernels_convolve_paths_of_trees_with_every_gradient(end: Tensor, width: int, activation: str | None) -> None:
    inputs = make_inputs(end, width, activation, dtype=torch.float32)
    found = run(triton_convolve, inputs, build_taps(end, width))
    assert largest_error(found, run_tokens(inputs, end)) < 8 * torch.finfo(torch.float32).eps


def test_kernels_take_more_channels_and_tokens_than_one_tile_and_part_have() -> None:
    end = star(1, 2, 65)
    inputs = make_inputs(end, 2, "silu", channels=257, dtype=torch.float32)
    found = run(triton_convolve, inputs, build_taps(end, 2))
    assert largest_error(found, run_tokens(inputs, end)) < 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_round_once_in_half_precision(dtype: torch.dtype) -> None:
    end = random_tree(40, 1)
    inputs = make_inputs(end, 4, "silu", dtype=dtype)
    found = run(triton_convolve, inputs, build_taps(end, 4))
    assert all(x.dtype == dtype for x in found)
    assert largest_error(found, run_tokens(inputs, end)) < torch.finfo(dtype).eps / 2


def test_weights_may_have_another_dtype_than_tokens() -> None:
    end = random_tree(20, 2)
    inputs = make_inputs(end, 3, "silu", dtype=torch.float32)
    inputs = inputs._replace(x=inputs.x.half(), do=inputs.do.half())
    found = run(triton_convolve, inputs, build_taps(end, 3))
    assert [x.dtype for x in found] == [torch.float16, torch.float16, torch.float32, torch.float32]
    assert largest_error(found, run_tokens(inputs, end)) < torch.finfo(torch.float16).eps


def test_kernels_read_their_tokens_only_and_write_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    end = torch.cat([star(2, 3, 2), star(5, 1, 3)])
    inputs = make_inputs(end, 4, "silu", dtype=torch.float32)
    expected = run(triton_convolve, inputs, build_taps(end, 4))
    # NaN before and after the tokens, and in the columns beside their channels
    x, do = (torch.full((end.numel() + 8, 48), torch.nan)[4:-4, 16:36].copy_(each) for each in (inputs.x, inputs.do))
    monkeypatch.setattr(torch, "empty", poisoned_empty())
    found = run(triton_convolve, inputs._replace(x=x, do=do), build_taps(end, 4))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("function", [convolve_plainly, triton_convolve])
def test_two_runs_agree_in_every_bit(function: Convolve) -> None:
    end = star(3, 6, 2)
    inputs = make_inputs(end, 4, "silu", dtype=torch.float32)
    first, again = (run(function, inputs, build_taps(end, 4)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@given(rows_of_small_nodes(), st.integers(1, 5))
def test_each_ancestor_has_each_reader_once_near_or_distant(end: Tensor, width: int) -> None:
    taps = build_taps(end, width)
    ancestors = taps.ancestors.tolist()
    pairs = [(above, tap, t) for tap, row in enumerate(ancestors) for t, above in enumerate(row) if above >= 0]
    distant = []
    for number, target in enumerate(taps.targets.tolist()):
        assert taps.number[target] == number
        part = slice(int(taps.begins[number]), int(taps.begins[number + 1]))
        readers = list(zip(taps.reader_taps[part].tolist(), taps.readers[part].tolist(), strict=True))
        assert readers == sorted(readers)
        assert readers
        distant += [(target, *reader) for reader in readers]
    near = [pair for pair in pairs if pair[2] == pair[0] + pair[1]]
    assert sorted(near + distant) == sorted(pairs)
    assert int((taps.number >= 0).sum()) == len(taps.targets)


def test_readers_of_a_later_branch_are_distant() -> None:
    #  0 - 1 - 2
    #       `- 3 - 4
    taps = build_taps(ends_of((2, -1), (1, 0), (2, 0)), 3)
    assert taps.targets.tolist() == [0, 1]
    assert taps.begins.tolist() == [0, 1, 3]
    assert taps.readers.tolist() == [3, 3, 4]
    assert taps.reader_taps.tolist() == [2, 1, 2]


@pytest.mark.parametrize("function", [convolve_plainly, triton_convolve])
def test_no_tokens_have_no_outputs_and_gradients_of_zero(function: Convolve) -> None:
    end = torch.zeros(1, 0, dtype=torch.int32)
    inputs = make_inputs(end, 4, "silu", dtype=torch.float32)
    out, dx, dweight, dbias = run(function, inputs, build_taps(end, 4))
    assert out.shape == dx.shape == (0, 20)
    assert not dweight.any()
    assert not dbias.any()


@pytest.mark.parametrize("function", [convolve_plainly, triton_convolve])
def test_other_activations_are_refused(function: Convolve) -> None:
    end = star(2, 2, 1)
    assert "convolution: the activation is 'gelu'; expected silu or none" in refusal(
        run, function, make_inputs(end, 4, None)._replace(activation="gelu"), build_taps(end, 4)
    )


def test_the_chosen_implementation_computes_the_convolutions_of_models() -> None:
    end = star(4, 2, 3)
    x, weight, bias, activation, _ = make_inputs(end, 4, "silu", dtype=torch.float32)
    schedules, taps = BatchSchedules(end), build_taps(end, 4)
    assert torch.equal(
        dispatch.convolve(x, weight, bias, activation, schedules), convolve_plainly(x, weight, bias, activation, taps)
    )
    with dispatch.use_implementation("triton"):
        found = dispatch.convolve(x, weight, bias, activation, schedules)
    assert torch.equal(found, triton_convolve(x, weight, bias, activation, taps))
