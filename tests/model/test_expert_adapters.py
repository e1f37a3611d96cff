"""Adapters of experts: low-rank grouped products against PEFT's sum of the whole stack, and PEFT's own files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import support.interpreter  # noqa: F401  # before a kernel runs
from support.experts import Tiny, exact, poisoned, relative, routed
from support.oracle_model import Sample, gradients, make_row, tiny_config, worst_error
from support.refusal import refusal
from support.tiny_families import IS_OLD, tiny_family
from treepack.carry.verify import in_pieces
from treepack.data.batch import make_batch
from treepack.model.adapters.adapter import assign, initial_weights, put_adapter, save_adapter
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.experts import interface
from treepack.model.experts.gated import gated_experts
from treepack.model.experts.interface import NAME, register_experts
from treepack.model.experts.lora import ExpertAdapter, adapter_of
from treepack.model.experts.routing import sort_pairs
from treepack.model.load import load_merged, load_model
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients

SAMPLES = [
    Sample((1, 2, 3, 4, 5), (0, 1, 1, 1, 1)),
    Sample((1, 2, 3, 6, 7, 8), (0, 0, 1, 2, 1, 1)),
    Sample((1, 2, 9), (0, 1, 1)),
]
TOKENS = torch.arange(17)[None] * 7 % 50
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def mixture(path: Path) -> Path:
    return tiny_config(path / "moe.json", model_type="qwen3_moe", **EXPERTS)


def adapted(source: Path, **options: Any) -> LoadedModel:
    """A random model with a random adapter, whose B is not 0, in treepack's experts."""
    settings: dict[str, Any] = {"attention": "reference", "dtype": torch.float64, "lora": LoraOptions(rank=3)}
    loaded = load_model(source, **{**settings, **options})
    if "lora" in options or settings["lora"] is not None:
        assign(loaded.model, initial_weights(loaded.model, 1, random_b=True), loaded.model.dtype)
    register_experts()
    loaded.causal.set_experts_implementation(NAME)
    return loaded


def results(model: Any, causal: Any, implementation: str) -> dict[str, Tensor]:
    register_experts()
    causal.set_experts_implementation(implementation)
    model.zero_grad()
    logits = model(input_ids=TOKENS, use_cache=False).logits
    logits.backward(torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits))
    return {"logits": logits.detach(), **gradients(model)}


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_gradients_equal_those_of_the_dense_sum(kind: str) -> None:
    if IS_OLD and kind == "deepseek_v3":
        pytest.skip("the tiny model does not run in float64")
    register_experts()
    causal = tiny_family(kind)
    model, weights, _ = put_adapter(causal, None, LoraOptions(rank=3), source="tiny", seed=0)
    assert sum(".experts." in name for name in weights) == 2 * 2 * sum(
        hasattr(module, "_treepack_wrappers") for module in causal.modules()
    )
    assign(model, initial_weights(model, 1, random_b=True), torch.float64)
    expected, mine = results(model, causal, "eager"), results(model, causal, NAME)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(bool(expected[name].any()) for name in trained)
    assert worst_error(mine, expected) <= 1e-9
    with model.disable_adapter(), torch.no_grad():
        disabled = model(input_ids=TOKENS, use_cache=False).logits
    assert not torch.equal(disabled, mine["logits"])


@pytest.mark.parametrize("backward", [None, in_pieces(4)], ids=["whole", "pieces"])
def test_gradients_of_trees_equal_those_of_trajectories_alone(tmp_path: Path, backward: Any) -> None:
    loaded = adapted(mixture(tmp_path))
    report = verify_gradients(loaded, [make_batch(make_row(SAMPLES))], backward=backward)
    assert report.passed, report.worst
    assert any(".experts." in name for name in report.errors)


def test_peft_loads_a_saved_adapter_and_treepack_trains_it_on(tmp_path: Path) -> None:
    loaded = adapted(mixture(tmp_path), dtype=torch.float32)
    save_adapter(loaded.model, tmp_path / "adapter", None)
    names = [name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors") if "experts" in name]
    assert sorted({name.split("experts.")[1] for name in names}) == [
        f"{wrapper}lora_{part}.weight" for wrapper in ("base_layer.", "") for part in "AB"
    ]
    loaded.causal.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = loaded.model(TOKENS, use_cache=False).logits
        base = load_model(mixture(tmp_path), attention="reference", dtype=torch.float32).causal
        base.set_attn_implementation("sdpa")
        base.set_experts_implementation("eager")
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        torch.testing.assert_close(theirs(TOKENS, use_cache=False).logits, expected)
        again = load_model(tmp_path / "adapter", attention="reference", dtype=torch.float32)
        again.causal.set_attn_implementation("sdpa")
        assert torch.equal(again.model(TOKENS, use_cache=False).logits, expected)
        merged = load_merged(str(mixture(tmp_path)), tmp_path / "adapter", seed=0)
        merged.set_attn_implementation("sdpa")
        torch.testing.assert_close(merged(TOKENS, use_cache=False).logits, expected)
    trained = [name for name, parameter in again.model.named_parameters() if parameter.requires_grad]
    assert sum("experts" in name for name in trained) == len(names)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_peft_alone_computes_and_merges_the_saved_adapter(tmp_path: Path, kind: str) -> None:
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    tiny_family(kind).save_pretrained(base)
    mine = adapted(tmp_path / "base")
    save_adapter(mine.model, tmp_path / "adapter", None)
    other = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, experts_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(other, adapter)
    for causal in (mine.causal, other):
        causal.set_attn_implementation("eager")
    with torch.no_grad():
        expected = mine.model(TOKENS, use_cache=False).logits
        with mine.model.disable_adapter():
            plain = mine.model(TOKENS, use_cache=False).logits
        assert relative(plain, expected) > 1e-3
        assert relative(theirs(TOKENS, use_cache=False).logits, expected) < 1e-9
        merged = theirs.merge_and_unload()
        assert relative(merged(TOKENS, use_cache=False).logits, expected) < 1e-9
    ours = load_merged(base, adapter, seed=0).state_dict()
    assert ours.keys() == merged.state_dict().keys()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(ours[name], weight.float(), rtol=1e-6, atol=1e-7)


def summed(weight: Tensor, adapter: ExpertAdapter | None) -> Tensor:
    """The slow twin: the stacked weights in float64, with every low-rank product added up."""
    return weight.double() if adapter is None else weight.double() + adapter.b.double() @ adapter.a.double()


# Ranks of one block, of two, and of three (48). Expert 1 has no pair, and expert 0 more than a tile of them.
@pytest.mark.parametrize(
    ("ranks", "frozen"),
    [
        pytest.param((16, 48), True, id="both"),
        pytest.param((16, 0), False, id="gate_up, with its weights", marks=pytest.mark.slow),
        pytest.param((0, 32), True, id="down", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_agree_with_the_dense_sum(ranks: tuple[int, int], frozen: bool) -> None:
    module = Tiny(width=64)
    hidden, index, weights, grad = routed(150)
    generator = torch.Generator().manual_seed(1)
    adapters = []
    for weight, rank in zip((module.gate_up_proj, module.down_proj), ranks, strict=True):
        count, out, size = weight.shape
        parts = [torch.randn(*sizes, generator=generator) * 0.2 for sizes in ((count, rank, size), (count, out, rank))]
        adapters.append(ExpertAdapter(*(part.requires_grad_() for part in parts)) if rank else None)
        weight.requires_grad_(not frozen)
    both, down = adapters
    inputs = [hidden.requires_grad_(), weights.requires_grad_(), *(part for each in adapters for part in each or ())]
    inputs += [] if frozen else [module.gate_up_proj, module.down_proj]
    sums = {"gate_up_proj": summed(module.gate_up_proj, both), "down_proj": summed(module.down_proj, down)}
    expected = exact(SimpleNamespace(num_experts=4, **sums), hidden.double(), index, weights.double())
    twins = torch.autograd.grad(expected, inputs, grad.double())
    stacked = module.gate_up_proj, module.down_proj
    with poisoned():
        result = gated_experts(hidden, weights, *stacked, sort_pairs(index, 4), torch.float32, (both, down))
        mine = torch.autograd.grad(result, inputs, grad)
    assert relative(result, expected) < 1e-6
    assert max(relative(a, b) for a, b in zip(mine, twins, strict=True)) < 1e-6


def test_a_model_gives_its_adapters_to_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    source = tiny_config(tmp_path / "moe.json", model_type="qwen3_moe", **sizes)
    loaded = adapted(source, dtype=torch.float32, lora=LoraOptions(rank=1))
    loaded.causal.set_attn_implementation("sdpa")
    expected = results(loaded.model, loaded.causal, "eager")
    monkeypatch.setattr(interface, "takes_kernels", lambda *_: True)
    mine = results(loaded.model, loaded.causal, NAME)
    assert any(".experts." in name and bool(value.any()) for name, value in mine.items())
    loaded.model.double()
    twin = results(loaded.model, loaded.causal, "eager")
    assert worst_error(mine, twin) < 4 * worst_error(expected, twin)  # both round to float32


def test_names_choose_experts_or_leave_them_out(tmp_path: Path) -> None:
    def chosen(targets: str) -> tuple[set[str], bool]:
        loaded = load_model(mixture(tmp_path), lora=LoraOptions(rank=3, targets=targets))
        config = loaded.model.peft_config["default"]
        layers = [module for module in loaded.causal.modules() if hasattr(module, "down_proj")]
        has_adapter = any(adapter_of(module, "down_proj") is not None for module in layers)
        return {*(config.target_modules or ()), *(config.target_parameters or ())}, has_adapter

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert chosen("auto") == (attention | {"experts.gate_up_proj", "experts.down_proj"}, True)
    assert chosen("down_proj") == ({"experts.down_proj"}, True)
    assert chosen("q_proj") == ({"q_proj"}, False)
    assert "no linear layer or expert is named 'gate_proj'" in refusal(chosen, "gate_proj")
