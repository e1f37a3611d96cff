"""Recurrent layers in chunks against their definition token by token, and trees against each path alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import caterpillar, chain, ends_of, random_tree, star
from support.token_scans import scan_tokens
from treepack.recurrent.chunks import build_chunks, find_parents, flatten_ends
from treepack.recurrent.interface import normalise
from treepack.recurrent.twin import scan_plainly

RULES = ("delta", "kda", "mamba2")


class Rule(NamedTuple):
    has_beta: bool
    vector_decay: bool


KINDS = {"delta": Rule(True, False), "kda": Rule(True, True), "mamba2": Rule(False, False)}


@dataclass
class Inputs:
    """Arguments of a scan, as leaves, and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    do: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.g, self.beta) if x is not None]


def make_inputs(count: int, rule: str, *, seed: int = 0, key_heads: int = 1, heads: int = 2) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kind = KINDS[rule]
    q, k = (torch.nn.functional.normalize(draw(count, key_heads, 5), dim=-1) for _ in range(2))
    g = -draw(count, heads, *([5] if kind.vector_decay else [])).abs() / 4
    beta = draw(count, heads).sigmoid() if kind.has_beta else None
    inputs = Inputs(q, k, draw(count, heads, 3), g, beta, draw(count, heads, 3))
    for leaf in inputs.leaves:
        leaf.requires_grad_()
    return inputs


def results(out: Tensor, inputs: Inputs) -> list[Tensor]:
    """The output and the gradients of all arguments."""
    return [out.detach(), *torch.autograd.grad(out, inputs.leaves, inputs.do, materialize_grads=True)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference of two lists of tensors."""
    return max(float((x - y).norm() / y.norm().clamp(min=1e-300)) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", ["levels", "paths"])
@pytest.mark.parametrize(
    "end",
    [
        ends_of((63, -1), (64, 0), (65, 0)),
        ends_of((130, -1), (1, 0), (2, 0), (3, 0), (1, 3)),
        star(1, 9, 3),
        caterpillar(2, 12, 1, 2),
        chain(130),
        torch.cat([ends_of((20, -1), (30, 0), (1, 0), *[(1, -1)] * 9), random_tree(60, 3)]),
    ],
    ids="63-64-65 130-and-short star caterpillar chain rows".split(),
)
def test_chunks_equal_the_definition_token_by_token(end: Tensor, order: str, rule: str) -> None:
    inputs = make_inputs(end.numel(), rule)
    chunks = build_chunks(end, order=order)
    found = scan_plainly(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, chunks)
    expected = scan_tokens(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, find_parents(flatten_ends(end)))
    assert error(results(found, inputs), results(expected, inputs)) < 1e-12


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([1, 2, 3, 8]), st.sampled_from(RULES))
def test_random_trees_in_chunks_of_any_size_equal_the_definition(seed: int, length: int, size: int, rule: str) -> None:
    end = torch.cat([random_tree(length, seed), random_tree(length, seed + 1)])
    inputs = make_inputs(2 * length, rule, seed=seed, key_heads=2, heads=4)
    found = scan_plainly(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, build_chunks(end, size=size))
    expected = scan_tokens(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, find_parents(flatten_ends(end)))
    assert error(results(found, inputs), results(expected, inputs)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_tree_has_the_summed_gradients_of_its_paths_alone(rule: str) -> None:
    end = torch.cat([random_tree(90, 1), random_tree(90, 2)])
    inputs = make_inputs(180, rule)
    parent = find_parents(flatten_ends(end)).tolist()
    # Some paths end inside of nodes, and each path has weights of its own at its tokens.
    ends = [t for t in range(180) if t not in parent or t % 17 == 0]
    weight = torch.zeros_like(inputs.do)
    alone = [torch.zeros_like(leaf) for leaf in inputs.leaves]
    for number, last in enumerate(ends):
        path: list[int] = []
        at = last
        while at >= 0:
            path.insert(0, at)
            at = parent[at]
        own = torch.randn(len(path), 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        weight[path] += own
        q, k, v, g = (x[path] for x in (inputs.q, inputs.k, inputs.v, inputs.g))
        beta = None if inputs.beta is None else inputs.beta[path]
        out = scan_plainly(q, k, v, g, beta, build_chunks(chain(len(path))))
        for total, gradient in zip(alone, torch.autograd.grad(out, inputs.leaves, own), strict=True):
            total += gradient
    out = scan_plainly(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, build_chunks(end))
    assert error(list(torch.autograd.grad(out, inputs.leaves, weight)), alone) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_decays_that_vanish_leave_nothing_but_numbers(rule: str) -> None:
    inputs = make_inputs(100, rule)
    inputs.g = (inputs.g.detach() * 1e4).requires_grad_()
    out = scan_plainly(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, build_chunks(random_tree(100, 0)))
    assert all(bool(x.isfinite().all()) for x in results(out, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_compute_in_float32_and_round_once(dtype: torch.dtype) -> None:
    inputs = make_inputs(100, "delta")
    assert inputs.beta is not None
    q, k, v = (x.detach().to(dtype) for x in (inputs.q, inputs.k, inputs.v))
    g, beta = inputs.g.detach().float(), inputs.beta.detach().float()
    chunks = build_chunks(random_tree(100, 0))
    found = scan_plainly(q, k, v, g, beta, chunks)
    expected = scan_plainly(q.double(), k.double(), v.double(), g.double(), beta.double(), chunks)
    assert found.dtype == dtype
    assert error([found.double()], [expected.detach()]) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("rule", RULES)
def test_the_default_device_of_the_caller_changes_no_gradient(rule: str) -> None:
    inputs, chunks = make_inputs(7, rule), build_chunks(ends_of((3, -1), (2, 0), (2, 0)))
    expected = results(scan_plainly(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, chunks), inputs)
    with torch.device("meta"):  # any tensor made there without a device would have no values
        found = results(scan_plainly(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, chunks), inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_gradient_is_that_of_autograd(scale: float) -> None:
    x = torch.randn(5, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0  # a vector without a direction
    x.requires_grad_()
    dy = torch.randn(5, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = scale * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    found = normalise(x, scale)
    assert torch.allclose(found, expected, rtol=1e-14, atol=0)
    gradients = [torch.autograd.grad(out, x, dy)[0] for out in (found, expected)]
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


def test_lower_precisions_give_float32() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    y = normalise(x)
    assert y.dtype == torch.float32
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
