"""Recomputed layers whose inputs wait in host memory: gradients equal in every bit, and pages that are not shared."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from support.attention_trees import random_tree
from support.oracle_model import Sample, make_row, tiny_config
from support.refusal import refusal

pytest.importorskip("triton")

from support import interpreter  # noqa: F401
from treepack.attention import KeptOutputs, TreePass
from treepack.attention.autograd import triton_attention
from treepack.attention.build_schedule import build_schedule
from treepack.attention.schedule import Schedule
from treepack.data.batch import make_batch
from treepack.memory.host_pages import PagePool, copy_back, copy_out
from treepack.memory.offload import LayerOffload
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.forward import row_loss
from treepack.model.layers import (
    AdaptedLayers,
    adapt_layers,
    adapted_forward,
    adapted_layers,
    recomputed_layers,
    recomputes,
)
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

CPU = torch.device("cpu")
LAYERS = 5


class LateCopies:
    """Copies that run as late as a stream may run them: when somebody waits for one, with all copies before it."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Any, ...]] = deque()
        self.started = self.done = 0

    def to_pages(self, flat: Tensor, pages: list[Tensor]) -> int:
        return self.start("out", weakref.ref(flat), pages)

    def to_tensor(self, pages: list[Tensor], flat: Tensor) -> int:
        flat.fill_(255)  # NaN until the copy has run
        return self.start("back", weakref.ref(flat), pages)

    def start(self, kind: str, flat: Any, pages: list[Tensor]) -> int:
        self.jobs.append((kind, flat, pages))
        self.started += 1
        return self.started

    def wait(self, event: int) -> None:
        while self.done < event:
            kind, reference, pages = self.jobs.popleft()
            self.done += 1
            flat = None if reference is None else reference()
            if kind == "poison":
                for page in pages:
                    page.fill_(255)
                continue
            assert flat is not None, "the memory of a tensor was freed before its copy"
            if kind == "out":
                copy_out(flat, pages)
            else:
                copy_back(pages, flat)


class WatchedPages(PagePool):
    """Pages that are NaN after they were given back, and of which none is handed out twice."""

    def __init__(self, copies: LateCopies, *, size: int = 64) -> None:
        super().__init__(pinned=False, size=size)
        self.copies = copies
        self.used: set[int] = set()

    def take(self, num_bytes: int) -> list[Tensor]:
        pages = super().take(num_bytes)
        taken = {page.data_ptr() for page in pages}
        assert len(taken) == len(pages)
        assert not taken & self.used, "a page is handed out that is in use"
        self.used |= taken
        return pages

    def give(self, pages: list[Tensor]) -> None:
        self.used -= {page.data_ptr() for page in pages}
        self.copies.start("poison", None, pages)
        super().give(pages)


class Layer(nn.Module):
    """Attention between two matrix products, as in a layer of a model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inward, self.outward = (nn.Parameter(torch.randn(16, 16, generator=generator)) for _ in range(2))

    def forward(self, x: Tensor, *, schedule: Schedule, tree_pass: TreePass, dtype: torch.dtype) -> Tensor:
        heads = (x @ self.inward)[:, None].to(dtype)
        assert tree_pass.kept is not None
        out = triton_attention(heads, heads, heads, schedule, kept=(tree_pass.kept, self))
        return x + out[:, 0].to(x.dtype) @ self.outward


def late_offload(*, size: int = 64) -> tuple[LayerOffload, WatchedPages]:
    copies = LateCopies()
    pages = WatchedPages(copies, size=size)
    return LayerOffload(CPU, pages=pages, copies=copies), pages


def strided(seed: int, *, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]) -> Tensor:
    """Return random numbers of this shape, whose memory has the dimensions in this order."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn([shape[dim] for dim in order], generator=generator).to(dtype)
    return values.permute([order.index(dim) for dim in range(len(shape))])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of up to a few pages, with or without elements."""
    shape = tuple(draw(st.lists(st.integers(0, 7) if draw(st.booleans()) else st.integers(1, 7), max_size=4)))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    return strided(draw(st.integers(0, 99)), dtype=dtype, shape=shape, order=draw(st.permutations(range(len(shape)))))


STEPS = st.lists(st.one_of(tensors(), st.sampled_from(["layer", "take", "look", "drop"])), max_size=30)


@given(steps=STEPS)
def test_every_tensor_comes_back_and_every_page_is_free_in_the_end(steps: list[Any]) -> None:
    offload, pages = late_offload()
    stack: list[tuple[Any, Tensor]] = []
    for step in steps:
        if isinstance(step, Tensor):
            stack.append((offload.put(step.clone(memory_format=torch.preserve_format)), step))
        elif step == "layer":
            offload.next_layer()
        elif stack:
            offloaded, expected = stack[-1] if step == "look" else stack.pop()
            if step != "drop":
                result = offloaded()
                offload.copies.wait(offload.copies.started)  # type: ignore[attr-defined]
                assert torch.equal(result, expected)
                assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
                assert [s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1] == [
                    s for s, n in zip(expected.stride(), expected.shape, strict=True) if n > 1
                ] or not result.numel()
            del offloaded
    stack.clear()
    assert not pages.used
    assert pages.num_free == pages.count


def test_pages_serve_rows_of_other_lengths() -> None:
    offload, pages = late_offload(size=16)
    for length in (40, 8, 64, 3):
        row = [offload.put(torch.arange(length, dtype=torch.float32)) for _ in range(2)]
        assert torch.equal(row[1](), torch.arange(length, dtype=torch.float32))
        row.clear()
    assert pages.count == 2 * 64 * 4 // 16  # two tensors of the longest row


def row() -> Any:
    samples = [
        Sample(tuple(range(20)), (0.0, *[1.0] * 19)),
        Sample((*range(12), 40, 41, 42), (0.0, *[1.0] * 14)),
        Sample((7, 8, 9), (0.0, 1.0, 1.0)),
    ]
    return make_batch(make_row(samples))


def model(folder: Path, *, lora: bool = False, attention: str = "reference") -> LoadedModel:
    # One head, because kernels run in an interpreter here.
    heads: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = tiny_config(folder / "config.json", num_hidden_layers=LAYERS, **heads)
    options: Any = {"lora": LoraOptions(rank=2)} if lora else {}
    return load_model(config, attention=attention, dtype=torch.float32, device="cpu", **options)


def result_of(loaded: LoadedModel, *, lower: bool = False) -> list[Tensor]:
    """Return the loss of a row and all gradients."""
    loaded.model.train()
    loaded.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        loss = row_loss(loaded, row())
    torch.autograd.backward(loss)
    return [loss.detach(), *[p.grad for p in loaded.model.parameters() if p.grad is not None]]


def assert_equal_bits(results: list[Tensor], expected: list[Tensor]) -> None:
    assert len(results) == len(expected) > 1
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapter"])
def test_recomputed_and_offloaded_layers_have_the_same_bits(tmp_path: Path, lora: bool) -> None:
    expected = result_of(model(tmp_path, lora=lora))
    loaded = model(tmp_path, lora=lora)
    offload, pages = late_offload()
    adapt_layers(loaded.causal, checkpointing=True, compiled=False, offload=offload)
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    for count in (LAYERS, 2, 0):
        with recomputed_layers(loaded.causal, count):
            before = offload.copies.started  # type: ignore[attr-defined]
            for adapted.offload in (None, offload, offload):
                assert_equal_bits(result_of(loaded), expected)
            assert (offload.copies.started > before) == (count > 0)  # type: ignore[attr-defined]
            assert not pages.used
    assert pages.count == pages.num_free > 0


def test_offloaded_layers_have_the_same_bits_under_autocast(tmp_path: Path) -> None:
    loaded = model(tmp_path)
    expected = result_of(loaded, lower=True)
    offload, _ = late_offload()
    adapt_layers(loaded.causal, checkpointing=True, compiled=False, offload=offload)
    assert_equal_bits(result_of(loaded, lower=True), expected)


def test_outputs_of_attention_wait_in_host_memory_too() -> None:
    """Two layers of the package's own attention, whose kernels run in the interpreter."""
    layers = [Layer(seed) for seed in range(2)]
    end = random_tree(70, seed=3)
    x = torch.randn(1, 70, 16, generator=torch.Generator().manual_seed(5))
    schedule = build_schedule(end)

    def gradients(offload: LayerOffload | None) -> list[Tensor]:
        model = nn.ModuleList(layers)
        for layer in model:
            vars(layer).pop("forward", None)
        kept = KeptOutputs()
        adapted = AdaptedLayers(tuple(layers), 2, offload)
        for number, layer in enumerate(layers):
            layer.forward = adapted_forward(layer, number, adapted)  # type: ignore[method-assign]
        hidden = leaf = x.clone().requires_grad_()
        for layer in layers:
            hidden = layer(hidden, schedule=schedule, tree_pass=TreePass(kept), dtype=torch.bfloat16)
        return list(torch.autograd.grad(hidden.square().sum(), [leaf, *model.parameters()]))

    expected = gradients(None)
    offload, pages = late_offload()
    put, sizes = offload.put, list[torch.Size]()
    offload.put = lambda tensor: sizes.append(tensor.shape) or put(tensor)  # type: ignore[method-assign,func-returns-value]
    assert_equal_bits(gradients(offload), expected)
    assert sizes == [torch.Size(shape) for shape in [(1, 70, 16), (1, 1, 70, 16), (1, 1, 70)]] * 2
    assert not pages.used


def test_only_the_newest_layers_tensors_stay_on_the_device(tmp_path: Path) -> None:
    loaded = model(tmp_path)
    offload, pages = late_offload()
    adapt_layers(loaded.causal, checkpointing=True, compiled=False, offload=offload)
    waiting: list[Any] = []
    put = offload.put
    offload.put = lambda tensor: waiting.append(put(tensor)) or waiting[-1]  # type: ignore[method-assign,func-returns-value]
    loss = row_loss(loaded, row())
    assert [each._flat is not None for each in waiting] == [False] * (LAYERS - 1) + [True]
    waiting.clear()
    assert pages.used
    del loss  # an error between forward and backward
    assert not pages.used


def test_evaluation_moves_nothing(tmp_path: Path) -> None:
    loaded = model(tmp_path)
    offload, pages = late_offload()
    adapt_layers(loaded.causal, checkpointing=True, compiled=False, offload=offload)
    with torch.no_grad():
        row_loss(loaded, row())
    assert pages.count == 0


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each traced graph; graphs are not turned into machine code, which would take minutes."""
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield graphs
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_layers_have_the_same_bits(tmp_path: Path, traced: list[int]) -> None:
    loaded = model(tmp_path)
    adapt_layers(loaded.causal, checkpointing=False, compiled=True)
    expected = result_of(loaded)
    assert traced
    for count in (LAYERS, 2):
        loaded = model(tmp_path)
        offload, pages = late_offload()
        adapt_layers(loaded.causal, checkpointing=True, compiled=True, recomputed=count, offload=offload)
        assert_equal_bits(result_of(loaded), expected)
        assert pages.count == pages.num_free > 0


def test_a_model_has_at_most_all_of_its_layers_recomputed(tmp_path: Path) -> None:
    loaded = model(tmp_path, attention="reference")
    assert refusal(adapt_layers, loaded.causal, checkpointing=True, compiled=False, recomputed=6).startswith(
        "checkpoint_layers is 6 and Qwen3ForCausalLM has 5 layers; give at most"
    )
    adapt_layers(loaded.causal, checkpointing=True, compiled=False, recomputed=0)
    assert not recomputes(loaded.causal)
