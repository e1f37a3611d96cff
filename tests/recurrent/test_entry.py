"""Functions of transformers' modules are replaced for calls on trees only, and a model that avoids them is refused."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from support.hybrid_models import HARD, load_hybrid, write_config
from support.refusal import refusal
from support.tiny_families import HAS_RECURRENT, family_config
from treepack.attention.interface import IMPLEMENTATIONS
from treepack.errors import TreepackError
from treepack.model.accept.observation import ForwardObservation, check_observed_attention, observe
from treepack.model.forward import hidden_states
from treepack.model.layers import adapt_layers, find_layers
from treepack.model.load import load_model
from treepack.model.verify.gradients import verify_gradients
from treepack.recurrent.entry import enter, is_recurrent
from treepack.recurrent.interface import gated_delta_rule, state_space_scan

pytestmark = pytest.mark.skipif(not HAS_RECURRENT, reason="this version of transformers has other recurrent layers")

END = torch.tensor([[4, 2, 4, 4]])  # 0 - 1 and 0 - 2 - 3


def scan_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 2, 8)] * 3 + [(1, 4, 2)] * 2
    query, key, value, decay, rate = (torch.randn(shape, generator=generator).double() for shape in shapes)
    return [query, key, value, -decay.exp(), rate.sigmoid()]


def faster_package(original: Any, calls: list[str]) -> Any:
    """Return a function after transformers' decorator if a package that replaces it is installed."""

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(original.__name__)
        known = {name: options[name] for name in options if name in inspect.signature(original).parameters}
        return original(*arguments, **known)  # it drops unknown options

    return call


def test_only_calls_with_subtree_end_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch_chunk_gated_delta_rule"
    plain = inspect.unwrap(getattr(modeling_qwen3_next, name))
    another = modeling_lfm2.causal_conv1d_fn
    calls: list[str] = []
    monkeypatch.setattr(modeling_qwen3_next, name, faster_package(plain, calls))
    model = load_model(write_config(tmp_path, "qwen3_next")).model
    calls.clear()
    entered = getattr(modeling_qwen3_next, name)
    enter(model)
    assert getattr(modeling_qwen3_next, name) is entered
    inputs = scan_inputs()
    assert torch.equal(entered(*inputs)[0], plain(*inputs)[0])
    assert calls == [name]
    on_tree = entered(*inputs, subtree_end=END)[0]
    assert calls == [name]
    # The branch 0 - 2 - 3 alone, and float32 inside the function of transformers.
    path = [0, 2, 3]
    torch.testing.assert_close(on_tree[:, path], plain(*(x[:, path] for x in inputs))[0], rtol=1e-5, atol=1e-6)
    assert modeling_lfm2.causal_conv1d_fn is another


# granitemoehybrid has no layer with both; in falcon_h1 attention and a scan share every layer.
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1"])
def test_only_layers_without_attention_are_not_tried_as_one_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    loaded = load_hybrid(tmp_path, kind)
    attended: list[nn.Module] = []
    attend = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATIONS[loaded.attention]]

    def recorded(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        attended.append(module)
        return attend(module, *arguments, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, IMPLEMENTATIONS[loaded.attention], recorded)
    with torch.no_grad():
        hidden_states(loaded, HARD)
    layers = find_layers(loaded.causal)
    with_attention = [any(each in attended for each in layer.modules()) for layer in layers]
    assert [not is_recurrent(layer) for layer in layers] == with_attention
    whole: list[Any] = []

    def compile_(function: Any, *, fullgraph: bool = False, **_: Any) -> Any:
        whole.extend([function] if fullgraph else [])
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    adapt_layers(loaded.model, checkpointing=True, compiled=True)
    assert len(whole) == sum(with_attention) > 0


@pytest.mark.parametrize("kind", ["qwen3_next", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_an_installed_package_takes_part_neither_in_trees_nor_in_trajectories_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    module = importlib.import_module(type(family_config(kind)).__module__.replace("configuration", "modeling"))
    calls: list[str] = []
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, faster_package(inspect.unwrap(getattr(module, name)), calls))
    loaded = load_hybrid(tmp_path, kind)
    report = verify_gradients(loaded, [HARD])
    assert report.passed, report.worst
    assert not calls
    loaded.model.set_attn_implementation("eager")
    loaded.model(input_ids=HARD.input_ids[None], use_cache=False)
    assert len(calls) == 4  # two layers, a convolution and a scan each


def own_convolution(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    """Compute the layer of LFM2 with torch's convolution, as another version of its code might."""
    gate, other, x = self.in_proj(hidden_states).mT.chunk(3, dim=-2)
    out = other * self.conv(gate * x)[..., : x.shape[-1]]
    result: Tensor = self.out_proj(out.mT)
    return result


def test_a_layer_that_avoids_the_functions_is_refused_even_without_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(write_config(tmp_path, "lfm2"))
    monkeypatch.setattr(
        loaded.model.model.layers[0].conv, "forward", own_convolution.__get__(loaded.model.model.layers[0].conv)
    )
    # Sharded models get no probe: the calls are all that is known.
    assert "2 recurrent layers, 0 of them with a scan, call a convolution 1 times" in refusal(
        check_observed_attention, observed(loaded.model), loaded.model, source="m"
    )
    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", own_convolution)
    assert "version of transformers offers no function for" in refusal(load_model, write_config(tmp_path, "lfm2"))


def observed(model: Any) -> ForwardObservation:
    options: dict[str, Any] = {"subtree_end": HARD.subtree_end[None], "use_cache": False}
    with observe(model) as seen:
        model(input_ids=HARD.input_ids[None], position_ids=HARD.position_ids[None], record=seen.attention, **options)
    return seen


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"use_gate_in_kernel": True}, "passes use_gate_in_kernel to its gated delta rule, which has no form on trees"),
        ({"seq_idx": END}, "passes seq_idx to its gated delta rule"),
        ({"output_final_state": True}, "uses output_final_state in its gated delta rule; call it with use_cache=False"),
        ({"initial_state": END}, "uses initial_state in its gated delta rule; call it with use_cache=False"),
    ],
)
def test_options_that_would_be_ignored_are_refused(option: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TreepackError, match=complaint):
        gated_delta_rule(*scan_inputs(), subtree_end=END, **option)


def test_a_gate_inside_the_scan_is_refused() -> None:
    x, key, query, _, dt = scan_inputs()
    assert "passes z to its Mamba-2 scan" in refusal(
        state_space_scan, x, dt, -torch.ones(2), key, query, z=x, subtree_end=END
    )
