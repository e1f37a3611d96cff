"""Attention as an operator: the results of the kernels, one graph for a compiled layer, and no attention run twice."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.attention_trees import random_tree
from support.oracle_model import Sample, make_row, tiny_config

pytest.importorskip("triton")

from support import interpreter  # noqa: F401
from treepack.attention import operator
from treepack.attention.autograd import triton_attention
from treepack.attention.build_schedule import build_schedule
from treepack.attention.operator import kernel_attention, pack_schedules
from treepack.attention.reach import KeyReach, first_visible
from treepack.attention.schedule import Schedule
from treepack.data.batch import make_batch
from treepack.model.forward import row_loss
from treepack.model.layers import adapt_layers, set_recomputed
from treepack.model.load import load_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES = [Sample((1, 2, 3, 4), (0.0, 1.0, 1.0, 1.0)), Sample((1, 2, 5), (0.0, 1.0, 2.0))]
LONGER = [Sample(tuple(range(1, 12)), (0.0, *[1.0] * 10)), Sample((1, 2, 3, 20, 21), (0.0, 0.0, 1.0, 1.0, 1.0))]


def schedules_of(length: int) -> dict[KeyReach | None, Schedule]:
    """Return the schedules of a random tree for layers with and without a window."""
    end = random_tree(length, seed=3).int().to(DEVICE)
    reach = KeyReach("window", 7)
    start = first_visible(end, reach)
    assert start is not None
    return {None: build_schedule(end), reach: build_schedule(end, start)}


def test_packed_schedules_are_read_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    made = schedules_of(300)
    packed = pack_schedules(made)
    monkeypatch.setattr(operator, "_RECENT", type(operator._RECENT)())  # as after many other passes
    for before, after in zip(made.values(), operator._unpacked(packed.values, packed.layout), strict=True):
        for name in ("length", "first"):
            assert getattr(after, name) == getattr(before, name)
        for ours, theirs in zip(operator._tensors_of(after), operator._tensors_of(before), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or torch.equal(ours, theirs)
        assert (after.shares is None) == (before.shares is None)
        if after.shares is not None and before.shares is not None:
            assert after.shares.num_sums == before.shares.num_sums


# Each pair of values once.
@pytest.mark.parametrize(
    ("place", "with_sinks", "softcap"), [(0, False, None), (0, True, 5.0), (1, False, 5.0), (1, True, None)]
)
def test_results_and_gradients_are_those_of_the_kernels(place: int, with_sinks: bool, softcap: float | None) -> None:
    made = schedules_of(70)
    reach = list(made)[place]
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 70, 16), (1, 2, 70, 16), (1, 2, 70, 16))
    inputs = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
    sinks = torch.randn(4, generator=generator).to(DEVICE).requires_grad_() if with_sinks else None
    leaves = inputs if sinks is None else [*inputs, sinks]
    options: dict[str, Any] = {"scale": 0.3, "sinks": sinks, "softcap": softcap}
    query, key, value = inputs
    expected = triton_attention(query, key, value, made[reach], **options)
    out = kernel_attention(query, key, value, pack_schedules(made), reach, **options)
    assert torch.equal(out, expected)
    grad = torch.randn(out.shape, generator=generator).to(DEVICE)
    for ours, theirs in zip(*(torch.autograd.grad(each, leaves, grad) for each in (out, expected)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each traced graph; they run operation by operation, forward and backward derived from each."""
    traced: list[int] = []
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def count(graph: Any, _: Any) -> Any:
        traced.append(len(graph.graph.nodes))
        return graph.forward

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield traced
    torch._dynamo.reset()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each call of the kernels by the operator."""
    seen: list[str] = []
    for name in ("forward_kernels", "backward_kernels"):
        original = getattr(operator, name)

        def counted(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            seen.append(name)
            return original(*args, **options)

        monkeypatch.setattr(operator, name, counted)
    return seen


def losses_and_gradients(loaded: Any, sets: list[list[Sample]]) -> list[Tensor]:
    results: list[Tensor] = []
    for samples in sets:
        loss = row_loss(loaded, make_batch(make_row(samples)))
        results += [loss.detach(), *torch.autograd.grad(loss, list(loaded.model.parameters()))]
    return results


@pytest.mark.slow
def test_a_compiled_layer_is_one_graph_and_keeps_its_attention(
    tmp_path: Path, graphs: list[int], launches: list[str]
) -> None:
    config = tiny_config(tmp_path / "config.json")
    loaded = load_model(config, attention="triton", dtype=torch.float32, device=DEVICE)
    loaded.model.train()
    expected = losses_and_gradients(loaded, [SAMPLES, LONGER])
    assert not launches, "without compilation, layers call the kernels themselves"
    adapt_layers(loaded.model, checkpointing=True, compiled=True)
    set_recomputed(loaded.model, 1)
    results = losses_and_gradients(loaded, [SAMPLES, LONGER])
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    # Two layers, two rows; a recomputed layer does not run its attention again.
    assert sorted(launches) == ["backward_kernels"] * 4 + ["forward_kernels"] * 4
    # One graph forward and one backward for each kind of layer, kept and recomputed, and for two lengths at most.
    assert len(graphs) <= 2 * 2 * 2
    before = len(graphs)
    losses_and_gradients(loaded, [LONGER, SAMPLES])
    assert len(graphs) == before, "other rows compile nothing"


@pytest.mark.slow
def test_layers_of_several_graphs_keep_their_attention_outside(
    tmp_path: Path, graphs: list[int], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "config.json")
    loaded = load_model(config, attention="triton", dtype=torch.float32, device=DEVICE)
    loaded.model.train()
    expected = losses_and_gradients(loaded, [SAMPLES])
    for layer in loaded.model.base_model.layers:
        plain: Any = torch.compiler.disable(layer.mlp.forward)  # type: ignore[no-untyped-call]  # as experts are
        monkeypatch.setattr(layer.mlp, "forward", plain)
    adapt_layers(loaded.model, checkpointing=True, compiled=True)
    for _ in range(2):
        launches.clear()
        for ours, theirs in zip(losses_and_gradients(loaded, [SAMPLES]), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert graphs, "the rest of the layers is compiled"
    assert not launches, "the second pass breaks its graphs at attention"


@pytest.mark.slow
def test_a_head_dimension_that_is_a_symbol_of_the_compiler_is_traced() -> None:
    made = schedules_of(70)
    packed = pack_schedules(made)

    def attend(x: Tensor, width: int) -> Tensor:
        heads = x.view(1, 70, -1, width).transpose(1, 2)
        return kernel_attention(heads, heads, heads, packed, None, scale=None, sinks=None, softcap=None)

    compiled = torch.compile(attend, backend="eager", dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for width in (16, 32, 16):
        x = torch.randn(1, 70, 64, generator=generator).to(DEVICE)
        assert torch.equal(compiled(x, width), attend(x, width))
    torch._dynamo.reset()
