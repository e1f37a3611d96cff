"""Compiled layers: attention stays outside the graph, lengths do not compile again, and the gradients agree."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.oracle_model import Sample, make_row, tiny_config
from support.refusal import refusal
from treepack.data.batch import make_batch
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.forward import row_loss
from treepack.model.layers import adapt_layers, compile_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

# Lengths of the trajectories of a row; none is 0 or 1, on which torch.compile always specialises.
LENGTHS = (9, 17, 30, 41)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each traced graph; graphs are not turned into machine code, which would take minutes."""
    traced: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        traced.append(len(graph.graph.nodes))
        return graph.forward  # runs the traced operations one by one

    torch._dynamo.reset()  # the cache of graphs is global
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield traced
    torch._dynamo.reset()


def losses_and_gradients(loaded: LoadedModel) -> list[Tensor]:
    results: list[Tensor] = []
    for length in LENGTHS:
        samples = [
            Sample(tuple(range(length)), (0.0, *[1.0] * (length - 1))),
            Sample((*range(length - 3), 40, 41), (0.0, *[1.0] * (length - 2))),
        ]
        loss = row_loss(loaded, make_batch(make_row(samples)))
        results += [loss.detach(), *torch.autograd.grad(loss, list(loaded.model.parameters()))]
    return results


@pytest.mark.slow
def test_compiled_layers_agree_and_serve_every_length(tmp_path: Path, graphs: list[int]) -> None:
    loaded = load_model(tiny_config(tmp_path / "config.json"), attention="reference", dtype=torch.float64, device="cpu")
    loaded.model.train()
    expected = losses_and_gradients(loaded)
    adapt_layers(loaded.model, checkpointing=True, compiled=True)
    results = losses_and_gradients(loaded)
    assert graphs, "something was compiled"
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    traced = len(graphs)
    again = losses_and_gradients(loaded)
    assert len(graphs) == traced, "the same lengths need no other graph"
    assert all(torch.equal(a, b) for a, b in zip(again, results, strict=True))


@pytest.mark.slow
def test_all_layers_under_an_adapter_are_one_graph(tmp_path: Path, graphs: list[int]) -> None:
    source = tiny_config(tmp_path / "config.json")
    loaded = load_model(source, attention="reference", device="cpu", lora=LoraOptions(rank=2))
    adapt_layers(loaded.causal, checkpointing=False, compiled=True)
    traced: list[int] = []
    for layer in loaded.causal.base_model.layers:
        layer.register_forward_pre_hook(lambda *_: traced.append(len(graphs)))
    row_loss(loaded, make_batch(make_row([Sample((1, 2, 3, 4), (0.0, 1.0, 1.0, 1.0))])))
    assert traced[0] == 0 < traced[1] == len(graphs), "the second layer compiles nothing"


def test_a_model_without_marked_layers_is_refused() -> None:
    class Bare(nn.Module):
        base_model = nn.Linear(2, 2)

    assert refusal(compile_layers, Bare()).startswith("Bare has no layers to compile")
