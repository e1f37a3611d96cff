"""Rows of 262,144 tokens whose checkpoints wait in host memory, against rows of 65,536 tokens, on one GPU.

    python benchmarks/wide_rows.py [--model qwen3-1.7b | config.json] [--workload agent-64k] [--copies 4]
        [--repeats N] [--layers N] [--no-compile] [--json FILE]
    python benchmarks/wide_rows.py --dry-run      a tiny model and a tiny tree on the CPU

The wide row has several copies of one tree side by side, which do not see each other: its loss is that many times the
loss of the tree, and its score pairs per token equal the tree's. Times are for forward and backward, without
the update, medians over the repeats, in turns. Layers are compiled, under autocast in bfloat16.

checkpointed   the tree, all layers recomputed (train --checkpoint-layers all)
auto           the tree, as few layers recomputed as memory demands (--checkpoint-layers auto), with room for AdamW
offloaded      the tree, all layers recomputed, inputs and attention outputs in pinned host memory
wide           the wide row, offloaded in the same way

peak     the largest amount of GPU memory of tensors, with weights and gradients
pinned   host memory of the tensors that wait
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compilations import made_on
from measure import seconds_of
from train_step import DRY_RUN_MODEL, POSITIONS
from training_rows import tree_rows
from workloads import Workload, make_workload, row_of_ends, star

from treepack.costs.model_cost import PRESETS
from treepack.data.batch import Batch
from treepack.memory.device_memory import gpu_meter, update_bytes
from treepack.memory.host_pages import PAGE
from treepack.memory.offload import LayerOffload
from treepack.model.forward import prepare_batch, row_loss
from treepack.model.head.token_loss import CHUNK
from treepack.model.layers import (
    AdaptedLayers,
    adapt_layers,
    adapted_layers,
    has_compiled_layers,
    recomputed_layers,
)
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.train.setup.host_memory import pages_of_row
from treepack.train.setup.model_probe import probe_model


@dataclass(frozen=True)
class Way:
    """A way to run forward and backward of a row."""

    name: str
    row: Batch
    recomputed: int
    offloaded: bool


@dataclass(frozen=True)
class Result:
    """Measurements of one way: median seconds, loss, peak bytes on the GPU, and pinned bytes."""

    way: str
    tokens: int
    recomputed: int
    seconds: float
    loss: float
    peak: int
    pinned: int

    @property
    def microseconds(self) -> float:
        """Time per token."""
        return 1e6 * self.seconds / self.tokens


def copies_of(tree: Workload, count: int) -> Workload:
    """Return a row with copies of a tree side by side."""
    # 2 copies of subtree_end [3 2 3] -> [3 2 3 6 5 6]
    shifts = np.repeat(np.arange(count) * tree.tokens, tree.tokens)
    return row_of_ends(f"{count} x {tree.name}", np.tile(tree.subtree_end, count) + shifts)


def wide_row(row: Batch, tree: Workload, count: int, vocabulary: int) -> Batch:
    """Return the row of `count` copies of a tree, each with the token ids of `row`."""
    (wide,) = tree_rows(copies_of(tree, count), vocabulary)
    return replace(wide, input_ids=row.input_ids.repeat(count))


def pass_over(loaded: LoadedModel, row: Batch) -> float:
    """Run forward and backward of a row; return its loss."""
    batch = prepare_batch(loaded, row)
    with torch.autocast(loaded.device.type, torch.bfloat16):
        loss = row_loss(loaded, batch)
    torch.autograd.backward(loss)
    return float(loss.detach())


def auto_count(loaded: LoadedModel, row: Batch, num_layers: int) -> int:
    """Return the number of layers that `--checkpoint-layers auto` recomputes for a row."""
    if loaded.device.type != "cuda":
        return num_layers // 2
    meter = gpu_meter(loaded.device)
    probe = probe_model(
        loaded,
        row,
        compiled=has_compiled_layers(loaded.causal),
        chunk=CHUNK,
        autocast=partial(torch.autocast, "cuda", torch.bfloat16),
        meter=meter,
        fits=lambda num_bytes: num_bytes < meter.free(),
    )
    print(probe)
    torch.cuda.empty_cache()
    room = meter.free() - update_bytes(loaded.model, state_bytes=8) - 0.08 * meter.total
    counts = range(probe.num_layers)
    return next((n for n in counts if probe.pass_bytes(row.num_tokens, n, CHUNK) <= room), probe.num_layers)


def measure(loaded: LoadedModel, adapted: AdaptedLayers, ways: list[Way], repeats: int) -> list[Result]:
    """Run all ways in turns; the first turn compiles and pins."""
    on_gpu, offload = loaded.device.type == "cuda", adapted.offload
    assert offload is not None
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    losses, peaks = dict[str, float](), dict[str, int]()
    for turn in range(repeats + 1):
        for way in ways:
            loaded.model.zero_grad(set_to_none=False)
            adapted.offload = offload if way.offloaded else None
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            values: list[float] = []
            with recomputed_layers(loaded.causal, way.recomputed):
                seconds = seconds_of(loaded.device, lambda: values.append(pass_over(loaded, way.row)))  # noqa: B023
            losses[way.name] = values[0]
            peaks[way.name] = torch.cuda.max_memory_allocated() if on_gpu else 0
            if turn:
                times[way.name].append(seconds)
    adapted.offload = offload
    lower = loaded.device.type == "cuda"
    return [
        Result(
            way=way.name,
            tokens=way.row.num_tokens,
            recomputed=way.recomputed,
            seconds=statistics.median(times[way.name]),
            loss=losses[way.name],
            peak=peaks[way.name],
            pinned=PAGE * pages_of_row(loaded, way.row.num_tokens, recomputed=way.recomputed, lower=lower)
            if way.offloaded
            else 0,
        )
        for way in ways
    ]


def check_losses(results: list[Result], copies: int) -> None:
    """Refuse results whose losses differ: equal bits for the tree, to a rounding of the sums for its copies.

    Raises:
        SystemExit: naming both losses.
    """
    first = results[0]
    for result in results[1:]:
        is_wide = result.tokens != first.tokens
        expected, tolerance = (copies * first.loss, 1e-4) if is_wide else (first.loss, 0.0)
        if abs(result.loss - expected) > tolerance * abs(expected):
            raise SystemExit(f"{result.way}: the loss is {result.loss}, expected {expected}")


def show(results: list[Result]) -> None:
    """Print the table."""
    first = results[0]
    print("| way | tokens | recomputed | s | us per token | of checkpointed | loss | peak GiB | pinned GiB |")
    print("|---" * 9 + "|")
    for each in results:
        print(
            f"| {each.way} | {each.tokens:,} | {each.recomputed} | {each.seconds:.2f} | {each.microseconds:.2f} "
            f"| {each.microseconds / first.microseconds:.3f} | {each.loss:.1f} | {each.peak / 2**30:.1f} "
            f"| {each.pinned / 2**30:.1f} |"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b", help=f"{', '.join(PRESETS)}, or a config.json")
    parser.add_argument("--workload", default="agent-64k")
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, help="layers of the model, by default all")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    options = parse(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    config: dict[str, Any] = DRY_RUN_MODEL if options.dry_run else dict(PRESETS.get(options.model) or {})
    config = config or json.loads(Path(options.model).read_text(encoding="utf-8"))
    config |= {} if options.layers is None else {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps({**config, **POSITIONS}))
        with made_on(device):
            loaded = load_model(source, attention="auto", dtype=torch.float32, autocast=torch.bfloat16, device=device)
    offload = LayerOffload(device)
    adapt_layers(
        loaded.causal, checkpointing=True, compiled=not (options.no_compile or options.dry_run), offload=offload
    )
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    loaded.model.train()
    tree = star("star", 30, 3, 40) if options.dry_run else make_workload(options.workload)
    (row,) = tree_rows(tree, config["vocab_size"])
    wide, count = wide_row(row, tree, options.copies, config["vocab_size"]), len(adapted.modules)
    for parameter in loaded.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adapted.offload = None
    fewest = auto_count(loaded, row, count)
    adapted.offload = offload
    pages = pages_of_row(loaded, wide.num_tokens, recomputed=count, lower=not options.dry_run)
    if not options.dry_run:
        seconds = seconds_of(device, lambda: offload.pages.reserve(pages))
        print(f"{options.model}, {loaded.attention}: pinned {pages * PAGE / 2**30:.1f} GiB in {seconds:.1f} s")
    ways = [
        Way("checkpointed", row, count, False),
        Way("auto", row, fewest, False),
        Way("offloaded", row, count, True),
        Way("wide", wide, count, True),
    ]
    results = measure(loaded, adapted, ways, options.repeats)
    show(results)
    taken = offload.pages.num_bytes
    print(f"pages: {taken / 2**30:.2f} GiB, {offload.pages.num_free} of {offload.pages.count} free in the end")
    check_losses(results, options.copies)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
