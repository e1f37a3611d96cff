"""A pop repeats the experts that its push chose, with the weights and gradients of its own scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from support.hybrid_models import write_config
from support.oracle_model import Sample, gradients, make_row
from support.tiny_families import spread_weights, tiny_family
from treepack.carry.backward import CarryOptions, backward_row
from treepack.carry.pieces import PiecePass, RowPlan
from treepack.carry.routes import CarriedRoutes
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.model.experts.routers import follow_routers
from treepack.model.layers import checkpoint_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

PUSH, POP = (PiecePass(kind, 0, 6, 0, ()) for kind in ("push", "pop"))
PLAN = RowPlan((PUSH, POP), np.arange(6), 128, 128)
TRUNK = tuple(range(1, 10))
ROW = make_batch(make_row([Sample((*TRUNK, *tail), (0.0, *[1.0] * 11)) for tail in ((20, 21, 22), (30, 31, 32))]))


class TopTwo(nn.Module):
    """A router with two experts for each token, as Qwen 3 MoE has it."""

    def __init__(self, num_experts: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, 4, dtype=torch.float64))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = torch.topk((states @ self.weight.T).softmax(-1), 2, dim=-1)
        return weights / weights.sum(-1, keepdim=True), experts


class Mixture(nn.Module):
    """A model whose decoder has routers and nothing else."""

    def __init__(self, *routers: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleList(routers)


def pushed(router: nn.Module, states: Tensor) -> CarriedRoutes:
    """Routes of a row whose only push has run."""
    routes = CarriedRoutes(Mixture(router), PLAN)
    with routes.running(PUSH), torch.no_grad():
        router(states)
    return routes


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30))
def test_a_disturbed_router_weighs_the_experts_of_the_push(seed: int) -> None:
    torch.manual_seed(seed)
    router, states = TopTwo(), torch.randn(6, 4, dtype=torch.float64)
    chosen = router(states)[1]
    routes = pushed(router, states)
    disturbed = states + torch.randn(6, 4, dtype=torch.float64)
    with routes.running(POP):
        weights, experts = router(disturbed)
        torch.autograd.backward((weights * torch.arange(12).view(6, 2)).sum())
    assert torch.equal(experts, chosen)
    # The twin: softmax over all experts, of which the chosen ones are gathered.
    weight = router.weight.detach().clone().requires_grad_()
    twin = (disturbed @ weight.T).softmax(-1).gather(1, chosen)
    twin = twin / twin.sum(-1, keepdim=True)
    torch.autograd.backward((twin * torch.arange(12).view(6, 2)).sum())
    torch.testing.assert_close(weights, twin, rtol=1e-12, atol=0)
    assert router.weight.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-9, atol=1e-12)


def routers_of(kind: str, **fields: Any) -> nn.Module:
    """A router of a tiny model of transformers, with weights of order one."""
    model = tiny_family(kind, **fields)
    return follow_routers(model)[0].router


# Eight experts in two groups, of which a router chooses one first.
GROUPS: dict[str, Any] = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "num_local_experts": 8}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("deepseek_v3", GROUPS),
    ("phimoe", {}),
    ("gpt_oss", {}),
]


@pytest.mark.parametrize(("kind", "fields"), KINDS, ids=[kind for kind, _ in KINDS])
def test_repeating_equal_choices_changes_no_bit(kind: str, fields: dict[str, Any]) -> None:
    router = routers_of(kind, **fields)
    states = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def results() -> list[Tensor]:
        router.zero_grad()
        outputs = [x for x in router(states) if isinstance(x, Tensor)]
        torch.autograd.backward([x.square().sum() for x in outputs if x.requires_grad])
        return [*(x.detach().clone() for x in outputs), *gradients(router).values()]

    expected = results()
    routes = pushed(router, states)
    assert routes.num_bytes > 0
    with routes.running(POP):
        repeated = results()
    assert len(repeated) == len(expected) > 3
    assert all(torch.equal(a, b) for a, b in zip(repeated, expected, strict=True))
    assert routes.num_bytes == 0


@pytest.mark.parametrize(("num_experts", "size"), [(5, 1), (256, 1), (257, 2), (1 << 15, 2), ((1 << 15) + 1, 4)])
def test_choices_take_as_few_bytes_as_the_experts_need(num_experts: int, size: int) -> None:
    router, states = TopTwo(num_experts), torch.randn(6, 4, dtype=torch.float64)
    assert pushed(router, states).num_bytes == 6 * 2 * size


def test_a_router_that_runs_twice_in_a_push_is_refused_by_name() -> None:
    router, states = TopTwo(), torch.randn(6, 4, dtype=torch.float64)
    routes = CarriedRoutes(Mixture(router), PLAN)
    with routes.running(PUSH):
        router(states)
        with pytest.raises(TreepackError, match="TopTwo runs twice in one forward pass"):
            router(states)


def test_experts_without_a_router_are_refused_by_name() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.weight = 2, nn.Parameter(torch.zeros(2, 3, 4))

    with pytest.raises(TreepackError, match="1 layers with experts, and 0 routers"):
        follow_routers(Mixture(Experts()))


def backward(loaded: LoadedModel) -> dict[str, Tensor]:
    loaded.model.zero_grad()
    # Pieces of 4, 4 and 1 trunk tokens, and two bundles of 3 tokens.
    backward_row(loaded, ROW, CarryOptions(4))
    return gradients(loaded.model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_experts_of_the_push(tmp_path: Path, checkpointing: bool) -> None:
    config = write_config(tmp_path, "deepseek_v3", **GROUPS)
    loaded = load_model(config, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        spread_weights(loaded.model)
    if checkpointing:
        loaded.model.train()
        checkpoint_layers(loaded.causal)
    expected = backward(loaded)
    moves = []

    # The bias takes part in the choice of experts and not in their weights.
    def move(router: Any, states: tuple[Tensor]) -> None:
        is_pop = torch.is_grad_enabled() and states[0].numel() // 32 != 3
        moves.append(is_pop)
        router.e_score_correction_bias.copy_(torch.arange(8) * (10.0 if is_pop else 0.0))

    routers = [switch.router for switch in follow_routers(loaded.causal)]
    for router in routers:
        router.register_forward_pre_hook(move)
    disturbed = backward(loaded)
    assert moves.count(True) == len(routers) * 3 * (2 if checkpointing else 1)
    assert all(torch.equal(disturbed[name], gradient) for name, gradient in expected.items())
    # Without the switch, the bias moves tokens to other experts.
    del routers[0].forward
    states = torch.randn(20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = routers[0](states)[2].sort().values
    assert not torch.equal(routers[0](states)[2].sort().values, before)
