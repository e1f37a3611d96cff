"""Recorded experts are replayed with the weights and gradients of the model's own router."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from support.oracle_model import gradients
from support.refusal import refusal
from support.tiny_families import NOT_COMPARED, tiny_family
from treepack.data.batch import missing_expert
from treepack.errors import TreepackError
from treepack.model.experts.replay import check_routes, use_routes
from treepack.model.experts.routers import follow_routers

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
T = IDS.shape[1]


class Watch(TorchFunctionMode):
    """Keep the experts of the last choice in the block."""

    hides_choices = False

    def __init__(self, choices: dict[int, Tensor], number: int) -> None:
        super().__init__()
        self.choices, self.number = choices, number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self.choices[self.number] = result.indices
        return result

    def finish(self, router: nn.Module) -> None:
        assert self.number in self.choices


def own_routes(model: Any) -> Tensor:
    """The experts that a model takes for `IDS`, uint8 [T, routers, k]."""
    choices: dict[int, Tensor] = {}
    switches = follow_routers(model)
    for number, switch in enumerate(switches):
        switch.set("carry", partial(Watch, choices, number))
    model(input_ids=IDS)
    for switch in switches:
        switch.set("carry", None)
    return torch.stack([choices[number] for number in range(len(switches))], 1).to(torch.uint8)


def results(model: Any) -> list[Tensor]:
    """Logits and all gradients of a forward and a backward pass."""
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    torch.autograd.backward(logits.log_softmax(-1).square().sum())
    return [logits.detach(), *gradients(model).values()]


# Eight experts in two groups, of which a router chooses one first.
GROUPS: dict[str, Any] = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "n_routed_experts": 8}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("deepseek_v3", GROUPS),
    ("gpt_oss", {}),
    ("hunyuan_v1_moe", {}),  # one expert per token
]
OTHERS = """
    mixtral qwen2_moe olmoe flex_olmo granitemoe granitemoeshared ernie4_5_moe minimax minimax_m2 glm4_moe dots1
    deepseek_v2 llama4_text aria_text afmoe cohere2_moe
""".split()


def runs(kind: str) -> list[pytest.MarkDecorator]:
    """Marks of a test of a family."""
    return [pytest.mark.skip("the tiny model does not run with this transformers")] if kind in NOT_COMPARED else []


ALL = [*(pytest.param(*kind, id=kind[0], marks=runs(kind[0])) for kind in KINDS)]
ALL += [pytest.param(kind, {}, id=kind, marks=pytest.mark.slow) for kind in OTHERS]


@pytest.mark.parametrize(("kind", "fields"), ALL)
def test_a_replay_of_own_routes_changes_no_bit(kind: str, fields: dict[str, Any]) -> None:
    model = tiny_family(kind, **fields)
    expected, routes = results(model), own_routes(model)
    check_routes(model, kind, routes)
    use_routes(model, kind, routes)
    replayed = results(model)
    assert len(expected) > 10
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


def of_qwen(router: Any, states: Tensor, experts: Tensor) -> Tensor:
    weights: Tensor = (states @ router.weight.T).softmax(-1).gather(1, experts)
    total: Tensor = weights.sum(-1, keepdim=True)
    return weights / total


def of_deepseek(router: Any, states: Tensor, experts: Tensor) -> Tensor:
    weights: Tensor = (states @ router.weight.T).sigmoid().gather(1, experts)
    scaled: Tensor = weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    return scaled


def of_gpt_oss(router: Any, states: Tensor, experts: Tensor) -> Tensor:
    scores: Tensor = states @ router.weight.T + router.bias
    return scores.gather(1, experts).softmax(-1)


TWINS: list[tuple[str, dict[str, Any], Callable[[Any, Tensor, Tensor], Tensor]]] = [
    ("qwen3_moe", {"norm_topk_prob": True}, of_qwen),
    ("deepseek_v3", GROUPS | {"topk_method": "noaux_tc"}, of_deepseek),
    ("gpt_oss", {}, of_gpt_oss),
]


@pytest.mark.parametrize(
    ("kind", "fields", "twin"), [pytest.param(*twin, id=twin[0], marks=runs(twin[0])) for twin in TWINS]
)
def test_any_experts_get_the_weights_and_gradients_of_the_router(
    kind: str, fields: dict[str, Any], twin: Callable[[Any, Tensor, Tensor], Tensor]
) -> None:
    model = tiny_family(kind, **fields)
    router: Any = follow_routers(model)[0].router
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(50, 32, dtype=torch.float64, generator=generator)
    # Experts of one group and of two, in any order.
    order = torch.rand(50, 2, len(router.weight), generator=generator).argsort(-1)
    routes = order[:, :, :2].to(torch.uint8)
    use_routes(model, kind, routes)
    weights, experts = [x for x in router(states) if isinstance(x, Tensor) and x.shape == (50, 2)]
    assert torch.equal(experts, routes[:, 0].long())
    slopes = torch.randn(50, 2, dtype=torch.float64, generator=generator)
    (got,) = torch.autograd.grad((weights.double() * slopes).sum(), router.weight)
    expected = twin(router, states, experts)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=0)  # some routers compute in float32
    (wanted,) = torch.autograd.grad((expected * slopes).sum(), router.weight)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_tokens_and_layers_without_record_route_freely(dtype: torch.dtype) -> None:
    model = tiny_family("qwen3_moe")
    chosen = own_routes(model)
    routes = torch.full_like(chosen, missing_expert(dtype), dtype=dtype)
    use_routes(model, "m", routes)
    assert torch.equal(own_routes(model), chosen)
    other = (chosen[3, 0] + 1) % 4
    routes[3, 0] = other
    use_routes(model, "m", routes)
    replayed = own_routes(model)
    assert replayed[3, 0].tolist() == other.tolist()
    assert torch.equal(replayed[:3], chosen[:3])
    assert torch.equal(replayed[4:, 0], chosen[4:, 0])


def test_the_last_of_256_experts_is_replayed() -> None:
    model = tiny_family("qwen3_moe", num_experts=256, num_local_experts=256, num_hidden_layers=1)
    routes = own_routes(model)
    routes[2, 0], routes[4, 0] = torch.tensor([255, 3], dtype=torch.uint8), torch.tensor([9, 255], dtype=torch.uint8)
    check_routes(model, "m", routes)
    use_routes(model, "m", routes)
    assert torch.equal(own_routes(model), routes)
    small = tiny_family("qwen3_moe", num_hidden_layers=1)
    assert "has 4 experts in a layer, but the recorded routes name expert 255" in refusal(
        check_routes, small, "m", routes
    )


def test_a_pass_without_routes_replays_nothing() -> None:
    model = tiny_family("mixtral")
    chosen = own_routes(model)
    use_routes(model, "m", (chosen + 1) % 4)
    use_routes(model, "m", None)
    assert torch.equal(own_routes(model), chosen)


def test_routes_of_all_layers_skip_the_dense_ones() -> None:
    model = tiny_family("glm4_moe", num_hidden_layers=3)  # its first layer is dense
    chosen = own_routes(model)
    assert chosen.shape[1] == 2
    routes = (chosen + 1) % 4
    use_routes(model, "m", torch.cat([torch.zeros_like(routes[:, :1]), routes], 1))
    assert torch.equal(own_routes(model), routes)


@pytest.mark.parametrize(
    ("kind", "routes", "message"),
    [
        ("qwen3", torch.zeros(T, 2, 2), "has no routers"),
        ("phimoe", torch.zeros(T, 2, 2), "does not choose k of its experts at once"),
        ("mixtral", torch.zeros(T, 5, 2), "has 2 layers and 2 routers, but the recorded routes have 5 layers"),
        ("mixtral", torch.full((T, 2, 2), 4), "has 4 experts in a layer, but the recorded routes name expert 4"),
        ("mixtral", torch.zeros(T, 2, 3), "chooses 2 experts per token, but the recorded routes have 3"),
    ],
)
def test_a_model_that_cannot_replay_them_is_refused(kind: str, routes: Tensor, message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        check_routes(tiny_family(kind), kind, routes.to(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "message"),
    [((T, 2, 3), "chooses 2 experts per token, but the recorded routes have 3"), ((T + 1, 2, 2), "routes of 8 tokens")],
)
def test_routes_of_another_row_or_router_are_refused_when_they_run(shape: tuple[int, ...], message: str) -> None:
    model: nn.Module = tiny_family("mixtral")
    use_routes(model, "m", torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(TreepackError, match=message):
        model(input_ids=IDS)
