"""Checks of layers whose inputs and attention outputs wait in host memory, on a GPU.

    OFFLOAD_CHECKS[name](name, device, quick=...)  ->  Result, ...      as the checks of `attention_checks`

Rows of several lengths run through a small model, with all or some layers recomputed and offloaded. Losses and
gradients must equal the same rows without offloading, or for compiled layers with ordinary copies: equal in every bit,
or, if torch's own sums differ from run to run, at most twice as far as two plain runs. Two traps make a race visible:
every copy starts some milliseconds late, so that work which does not wait for it reads or overwrites too early, and
pages that were given back become NaN.
The last check measures layers, as `train --checkpoint-layers auto` does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_checks import Result, random_forest_ends
from torch import Tensor
from training_rows import make_row

from treepack.data.batch import Batch
from treepack.fit.measure import TrialPasses, probe_model
from treepack.memory.device_memory import gpu_meter
from treepack.memory.host_pages import HostCopies, PagePool, StreamCopies
from treepack.memory.offload import LayerOffload
from treepack.model.forward import prepare_batch, row_loss
from treepack.model.layers import adapt_layers, adapted_layers, set_recomputed
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

LAYERS, VOCABULARY = 5, 320
CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CYCLES = 10_000_000  # some 5 ms


class LateCopies(StreamCopies):
    """Copies of which each starts late by some clock cycles."""

    def __init__(self, device: torch.device, cycles: int = CYCLES) -> None:
        """Make the stream."""
        super().__init__(device)
        self._cycles = cycles

    def _run(self, copy: Callable[[Any, Any], None], source: Any, target: Any) -> Any:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        return super()._run(copy, source, target)

    def poison(self, pages: list[Tensor]) -> None:
        """Make pages NaN after all copies so far."""
        with torch.cuda.stream(self._stream):
            for page in pages:
                page.copy_(torch.full_like(page, 255, device=self._device), non_blocking=True)


class PoisonedPages(PagePool):
    """Pages that become NaN when they are given back."""

    def __init__(self, copies: LateCopies | HostCopies) -> None:
        """Make small pages, so that every tensor has several."""
        super().__init__(pinned=isinstance(copies, LateCopies), size=1 << 16)
        self._copies = copies

    def give(self, pages: list[Tensor]) -> None:
        """Poison the pages in the order of the copies, and take them back."""
        if isinstance(self._copies, LateCopies):
            self._copies.poison(pages)
        super().give(pages)


def check_offload(name: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Compare losses and gradients with and without offloading, bit by bit."""
    loaded = small_model(device)
    copies = LateCopies(device) if device.type == "cuda" else HostCopies()
    offload = LayerOffload(device, pages=PoisonedPages(copies), copies=copies)
    compiled = name.endswith("compiled") and device.type == "cuda"
    adapt_layers(loaded.causal, checkpointing=True, compiled=compiled, offload=offload)
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    lengths = (200, 90) if quick else (5000, 300, 9000, 5000)
    rows = [_row(length, number) for number, length in enumerate(lengths)]
    for count in (LAYERS, 2):
        set_recomputed(loaded.causal, count)
        # A compiled layer computes again inside its graph, with other roundings, unless its inputs wait elsewhere.
        adapted.offload = LayerOffload(device) if compiled else None
        expected, again = ([gradients(loaded, row) for row in rows] for _ in range(2))
        noise = sum(map(difference, expected, again))
        adapted.offload = offload
        error = sum(difference(gradients(loaded, row), each) for row, each in zip(rows, expected, strict=True))
        free = float(offload.pages.num_free != offload.pages.count)
        yield Result(name, f"{count} of {LAYERS} layers", loaded.attention, (error, free), (2 * noise, 0.0))


def check_measure(name: str, device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Measure layers: a recomputed layer keeps its input and attention output, and another one several times that."""
    loaded = small_model(device)
    adapt_layers(loaded.causal, checkpointing=True, compiled=False)
    if device.type != "cuda":
        return
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    row = _row(256 if quick else 4096, 0)
    probe = probe_model(TrialPasses(loaded, row, 2048, autocast, gpu_meter(device)))
    # Of every layer: inputs in float32, outputs of 4 heads of 64 in bfloat16, and a log-sum-exp for each head.
    expected = LAYERS * (256 * 4 + 256 * 2 + 4 * 4)
    peak = probe.backward  # the backward pass of one layer is in both of its numbers
    note = f"kept {peak.kept:.0f}, recomputed {peak.recomputed:.0f} bytes per token of all layers"
    yield Result(name, note, loaded.attention, (expected / peak.recomputed, peak.recomputed / peak.kept), (1.0, 1.0))


def difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the sum over tensors of the largest absolute difference."""
    # A sum of NaN is NaN, and no bound accepts it; `max` may pass it over.
    return sum(float((a.double() - b.double()).abs().max()) for a, b in zip(results, expected, strict=True))


def small_model(device: torch.device) -> LoadedModel:
    """Return a model of `CONFIG` with random float32 weights, which computes in bfloat16 under autocast."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**CONFIG, "max_position_embeddings": 1 << 16}))
        loaded = load_model(path, attention="auto", dtype=torch.float32, autocast=torch.bfloat16, device=device)
    loaded.model.train()
    return loaded


def _row(length: int, seed: int) -> Batch:
    end = random_forest_ends(length, seed).numpy().astype("int64")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (length,), generator=generator).numpy()
    leaves = [token for token in range(length) if end[token] == token + 1]
    return make_row(seed, ids, end, torch.tensor(leaves).numpy())


def gradients(loaded: LoadedModel, row: Batch) -> list[Tensor]:
    """Return the loss of a row and the gradients of all weights."""
    loaded.model.zero_grad(set_to_none=True)
    batch = prepare_batch(loaded, row)
    with torch.autocast(loaded.device.type, torch.bfloat16):
        loss = row_loss(loaded, batch)
    torch.autograd.backward(loss)
    return [loss.detach(), *(p.grad.clone() for p in loaded.model.parameters() if p.grad is not None)]


OFFLOAD_CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    "offloaded layers": check_offload,
    "offloaded layers compiled": check_offload,
    "memory of layers": check_measure,
}
