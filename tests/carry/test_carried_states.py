"""Recurrent layers and convolutions in pieces equal their slow twins over the whole tree, with all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.oracle_model import gradients
from support.token_scans import convolve_tokens, scan_tokens
from treepack.attention import TreePass
from treepack.carry.pieces import plan_row
from treepack.carry.states import CarriedStates, follow_layers
from treepack.recurrent.interface import convolution as causal_conv1d_fn
from treepack.recurrent.interface import gated_delta_rule as torch_chunk_gated_delta_rule
from treepack.trajectory import Int64

HEADS, KEYS, VALUES, TAPS = 2, 3, 2, 3


class Layer(nn.Module):
    """Two convolutions and a scan, as layers of transformers call them; `twin` computes the same by definition."""

    def __init__(self, *, has_key_decays: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, TAPS, dtype=torch.float64))
        self.decays = nn.Parameter(torch.randn(4, HEADS, *[KEYS] * has_key_decays, dtype=torch.float64))
        self.parts = nn.ParameterList(
            torch.randn(4, HEADS, width, dtype=torch.float64) for width in (KEYS, KEYS, VALUES, 1)
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Return outputs [n, H, V] of states [n, 4]."""
        for weight in self.weight:
            x = causal_conv1d_fn(x.T[None], weight, **options)[0].T
        q, k, v, g, beta = (each[None] for each in self.columns(x))
        return torch_chunk_gated_delta_rule(q, k, v, g, beta, **options)[0][0]

    def twin(self, x: Tensor, parent: Tensor) -> Tensor:
        for weight in self.weight:
            x = convolve_tokens(x, weight, None, parent)
        q, k, v, g, beta = self.columns(x)
        return scan_tokens(q * KEYS**-0.5, k, v, g, beta, parent)

    def columns(self, x: Tensor) -> list[Tensor]:
        q, k, v, rate = (torch.einsum("nc,chk->nhk", x, part) for part in self.parts)
        g = -torch.einsum("nc,ch...->nh...", x, self.decays).square()
        k = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        return [q, k, v, g, rate[..., 0].sigmoid()]


@dataclass
class Carry:
    """The part of `stack.Stack` that a recurrent layer calls."""

    states: CarriedStates


def forest(steps: list[int]) -> tuple[Int64, Int64]:
    """Ends and parents of a row in which token i leaves the last `steps[i]` tokens of the path, if it has them."""
    parent, path = [], []  # type: ignore[var-annotated]
    end = np.arange(1, len(steps) + 1)
    for token, step in enumerate(steps):
        path = path[: len(path) - max(0, step - 8)]
        parent.append(path[-1] if path else -1)
        path.append(token)
        end[path] = token + 1
    return end, np.array(parent)


def in_pieces(layer: Layer, x: Tensor, slopes: Tensor, end: Int64, parent: Int64, limit: int) -> list[Tensor]:
    """Outputs and gradients of x and the parameters, piece by piece; checks that freed states are gone."""
    layer.zero_grad()
    plan = plan_row(end, parent, limit, chains=True)
    states, outputs = CarriedStates(layer, plan, end, parent), torch.zeros_like(slopes)
    x = x.clone().requires_grad_()
    for each in plan.passes:
        own = slice(each.begin, each.end)
        states.enter(each)
        with torch.set_grad_enabled(each.kind != "push"):
            out = layer(x[own], subtree_end=torch.zeros(1, 1), tree_pass=TreePass(carry=Carry(states)))
        if each.kind != "push":
            outputs[own] = out.detach()
            torch.autograd.backward((out * slopes[own]).sum())
        states.leave()
    assert x.grad is not None
    return [outputs, x.grad, *gradients(layer).values()]


STEPS = st.lists(st.integers(0, 12), min_size=1, max_size=16)


@settings(max_examples=8)
@given(steps=STEPS, limit=st.sampled_from([1, 2, 3, 5]), has_key_decays=st.booleans(), seed=st.integers(0, 99))
def test_pieces_have_the_outputs_and_gradients_of_the_tree(
    steps: list[int], limit: int, has_key_decays: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    end, parent = forest(steps)
    layer = Layer(has_key_decays=has_key_decays)
    x, slopes = (torch.randn(len(end), *shape, dtype=torch.float64) for shape in ((4,), (HEADS, VALUES)))
    actual = in_pieces(layer, x, slopes, end, parent, limit)
    assert all(torch.equal(a, b) for a, b in zip(actual, in_pieces(layer, x, slopes, end, parent, limit), strict=True))
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    out = layer.twin(leaf, torch.from_numpy(parent))
    torch.autograd.backward((out * slopes).sum())
    assert leaf.grad is not None
    expected = [out.detach(), leaf.grad, *gradients(layer).values()]
    for a, b in zip(actual, expected, strict=True):
        assert float((a - b).norm()) <= 1e-9 * max(float(b.norm()), 1e-3)


def test_a_state_is_kept_for_each_branch_point_until_its_piece_is_popped() -> None:
    # 0 - 1 - 2 - 3 - 4, and 5 and 6 hang on 1: with pieces of 2 tokens, 0 1 2 are trunk
    end, parent = np.array([7, 7, 5, 5, 5, 6, 7]), np.array([-1, 0, 1, 2, 3, 1, 1])
    plan = plan_row(end, parent, 2, chains=True)
    layer = Layer(has_key_decays=False)
    states = CarriedStates(layer, plan, end, parent)
    per_exit = 2 * 8 * (HEADS * KEYS * VALUES + 2 * (TAPS - 1) * 4)  # float64, each with its sum
    found = []
    for each in plan.passes:
        states.enter(each)
        with torch.set_grad_enabled(each.kind != "push"):
            out = layer(
                torch.ones(each.size, 4, dtype=torch.float64), subtree_end=1, tree_pass=TreePass(carry=Carry(states))
            )
        if each.kind != "push":
            torch.autograd.backward(out.sum())
        states.leave()
        found.append((each.kind, each.begin, states.num_bytes // per_exit))
    assert found == [
        ("push", 0, 1),  # token 1
        ("push", 2, 2),  # and token 2
        ("bundle", 3, 2),
        ("pop", 2, 2),
        ("bundle", 5, 1),
        ("pop", 0, 1),
    ]


def test_layers_are_followed_once() -> None:
    layer = Layer(has_key_decays=False)
    first, second = follow_layers(layer), follow_layers(layer)
    assert len(first) == 1
    assert first[0] is second[0]
    assert follow_layers(nn.Linear(2, 2)) == []
