"""Experts: the loop of transformers is the slow twin; products are in the dtype of autocast, and casts happen once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import support.interpreter  # noqa: F401  # before a kernel runs
from support.experts import Tiny, exact, poisoned, relative, routed
from support.oracle_model import tiny_config
from support.tiny_families import IS_OLD, NOT_COMPARED, tiny_family
from treepack.model.experts.gated import gated_experts
from treepack.model.experts.interface import NAME, register_experts
from treepack.model.experts.routing import sort_pairs
from treepack.model.experts.weights import cast_once, cast_weight
from treepack.model.layers import adapt_layers
from treepack.model.load import load_model

# Experts in every layer, so that none of them drops out of the comparison.
SPARSE: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"] * 2}
FAMILIES = {"deepseek_v3": SPARSE, "glm4_moe": SPARSE} | {
    kind: {} for kind in "qwen3_moe mixtral granitemoe olmoe gpt_oss".split()
}


def gradients(model: Any, implementation: str) -> list[Tensor]:
    model.set_experts_implementation(implementation)
    logits = model(input_ids=torch.arange(33)[None] * 7 % 50, use_cache=False).logits
    grad = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return [logits.detach(), *torch.autograd.grad(logits, list(model.parameters()), grad, allow_unused=True)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_has_the_logits_and_gradients_of_the_loop(kind: str) -> None:
    if kind in NOT_COMPARED or (IS_OLD and kind == "granitemoe"):
        pytest.skip(f"{kind} of transformers {transformers.__version__} does not run in tiny form, or does not stack")
    register_experts()
    model = tiny_family(kind, **FAMILIES[kind])
    experts = [module for module in model.modules() if getattr(module, "down_proj", None) is not None]
    assert any(isinstance(module.down_proj, nn.Parameter) and module.down_proj.ndim == 3 for module in experts)
    expected, results = gradients(model, "eager"), gradients(model, NAME)
    for result, twin in zip(results, expected, strict=True):
        assert (result is None) == (twin is None)
        assert result is None or relative(result, twin) <= 1e-13


@pytest.mark.parametrize(
    ("needed", "absent"),
    [((0, 1, 2, 3), None), ((0, 1), None), ((0, 1, 2, 3), 2)],
    ids=["all", "frozen experts", "an expert on another rank"],
)
def test_the_kernels_agree_with_the_experts_one_by_one(needed: tuple[int, ...], absent: int | None) -> None:
    module = Tiny()
    hidden, index, weights, grad = routed(150)
    if absent is not None:
        index = index.masked_fill(index == absent, module.num_experts)
    num_pairs = None if absent is None else int((index < 4).sum())
    stacked = module.gate_up_proj, module.down_proj
    inputs = [hidden, weights, *stacked]
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(i in needed)
    chosen = [inputs[i] for i in needed]
    expected = exact(module, hidden.double(), index, weights.double())
    with poisoned():
        out = gated_experts(
            hidden, weights, *stacked, routing=sort_pairs(index, 4, num_pairs=num_pairs), dtype=torch.float32
        )
        results = torch.autograd.grad(out, chosen, grad)
    assert relative(out, expected) < 1e-6
    twins = torch.autograd.grad(expected, chosen, grad.double())
    assert max(relative(a, b) for a, b in zip(results, twins, strict=True)) < 1e-6


@given(st.data())
def test_pairs_are_sorted_by_expert_then_token_and_can_be_put_back(data: st.DataObject) -> None:
    count, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 6))
    experts = st.permutations(range(count)).map(lambda order: order[: max(1, count // 2)])
    rows = [data.draw(experts) for _ in range(tokens)]
    index = torch.tensor(rows, dtype=torch.int64).view(tokens, max(1, count // 2))
    routing = sort_pairs(index, count)
    pairs = sorted((e, t) for t, row in enumerate(rows) for e in row)
    assert [(int(index.flatten()[slot]), int(slot) // index.shape[1]) for slot in routing.order] == pairs
    assert routing.token.tolist() == [t for _, t in pairs]
    assert routing.ends.tolist() == [sum(e <= each for e, _ in pairs) for each in range(count)]
    assert torch.equal(routing.order[routing.place.flatten()], torch.arange(len(pairs)))


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dtypes of the matrix products, and the number of casts of stacked weights, inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: set[torch.dtype] = set()
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.products |= {args[0].dtype, args[1].dtype}
        if func.overloadpacket is torch.ops.aten._to_copy and args[0].ndim == 3:
            self.casts += args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


def step(module: Tiny, *, recompute: bool) -> list[Tensor]:
    """Two rows of one step under autocast; outputs, and the gradients of the weights."""
    outputs = []
    module.zero_grad()
    for tokens in (20, 33):
        hidden, index, weights, grad = routed(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            args = hidden.requires_grad_(), index, weights
            out = checkpoint(module, *args, use_reentrant=False) if recompute else module(*args)
        assert out.dtype == torch.float32
        out.backward(grad)
        outputs.append(out.detach())
    return [*outputs, *(parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_products_are_in_the_dtype_of_autocast_from_weights_cast_once_a_step(recompute: bool) -> None:
    module = Tiny()
    with cast_once(), Seen() as seen:
        results = step(module, recompute=recompute)
    assert seen.products == {torch.bfloat16}
    assert seen.casts == 2  # two weights, two rows, forward, backward and recomputation
    with Seen() as seen:
        again = step(module, recompute=recompute)
    assert seen.casts > 2  # the casts of the first step are gone
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    assert {each.dtype for each in results} == {torch.float32}
    hidden, index, weights, _ = routed(33)
    assert relative(results[1], exact(module, hidden.double(), index, weights.double())) < 1e-2


def test_a_weight_that_changes_is_cast_again() -> None:
    weight = nn.Parameter(torch.ones(2, 3, 4))
    with cast_once():
        before = cast_weight(weight, torch.bfloat16)
        assert cast_weight(weight, torch.bfloat16) is before
        assert cast_weight(weight.detach(), torch.bfloat16) is before  # as autograd returns a saved weight
        with torch.no_grad():
            weight.mul_(2)
        assert bool((cast_weight(weight, torch.bfloat16) == 2).all())
    assert cast_weight(weight, torch.float32).data_ptr() == weight.data_ptr()


def test_a_loaded_model_uses_it_and_its_saved_configuration_does_not_name_it(tmp_path: Path) -> None:
    path = mixture(tmp_path / "config.json")
    for dtype, name in ((torch.float32, NAME), (torch.float64, "eager")):
        model = load_model(path, attention="reference", dtype=dtype, device="cpu").causal
        assert model.config._experts_implementation == name
    model.config.save_pretrained(tmp_path / "saved")
    assert NAME not in (tmp_path / "saved" / "config.json").read_text()


def mixture(path: Path) -> Path:
    fields = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return tiny_config(path, "qwen3", **fields)


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Layers are traced and broken into graphs, which run as they are: machine code would take minutes.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    results = []
    for compiled in (False, True):
        loaded = load_model(mixture(tmp_path / "config.json"), attention="reference", device="cpu")
        adapt_layers(loaded.causal, checkpointing=True, compiled=compiled)
        loaded.model.train()
        end = torch.full((1, 24), 24, dtype=torch.int32)
        out = loaded.model(input_ids=torch.arange(24)[None], subtree_end=end, use_cache=False).logits
        results.append(torch.autograd.grad(out.square().sum(), list(loaded.model.parameters())))
    assert max(relative(a, b) for a, b in zip(*results, strict=True)) < 1e-4
