"""Tokens per second of one optimiser step by the capacity of its rows, rows joined into passes and row by row.

    python benchmarks/passes.py [--models qwen3-0.6b,qwen3-1.7b] [--capacities 2048,4096,8192,16384,32768]
        [--trees 36] [--repeats 3] [--flat-row TOKENS] [--json FILE]
    python benchmarks/passes.py --dry-run      a tiny model on the CPU, through the same code

Every capacity has the same trees, prompts of 512 tokens with 8 answers of 192, as many in a row as fit. So all ways
compute the same tokens and pairs, and their losses must agree. Passes are planned by the trainer (`train.passes`). The
flat way trains the same trajectories as separate sequences through FlashAttention, in the same run and turns.

launch       milliseconds that the processor needs to launch forward and backward of the shortest row
ideal        floating-point operations, flat over tree
efficiency   speed-up over flat divided by the ideal one

Weights are random, float32 under bfloat16 autocast; layers are compiled and recomputed; AdamW is fused.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experts import Way, load
from flat_sequences import flash_attention_4
from measure import seconds_of
from step_profile import TINY
from train_step import as_chains, counted_rows
from training_rows import flat_rows, make_row
from workloads import star

from treepack.costs.model_cost import PRESETS, operations, shape_of
from treepack.data.batch import Batch
from treepack.data.joined import join_rows
from treepack.model.experts.weights import cast_once
from treepack.model.forward import WholeRows, prepare_batch
from treepack.model.loaded import LoadedModel
from treepack.objectives.row_numbers import LossPart
from treepack.train.passes import Joining, plan_passes

CHUNK = 2048


def rows_of(capacity: int, trees: int, sizes: tuple[int, int, int], vocabulary: int) -> list[Batch]:
    """Return the trees, of equal size, in rows of at most `capacity` tokens; `sizes` are prompt, answers, answer."""
    tree = star("tree", *sizes)
    made = []
    for number in range(trees):
        ids = np.random.default_rng(number).integers(0, vocabulary, tree.tokens)
        ends = np.flatnonzero(tree.subtree_end == np.arange(1, tree.tokens + 1))
        made.append(make_row(number, ids, tree.subtree_end, ends))
    count = max(1, capacity // tree.tokens)
    rows = [join_rows(made[i : i + count], multiple=128) for i in range(0, trees, count)]
    return rows


def joined(rows: list[Batch], limit: int) -> list[Batch]:
    """Return the passes of a step that the trainer plans for one rank."""
    tokens = np.array([row.num_tokens for row in rows], np.int64)
    joining = Joining(limit, tokens, np.zeros(len(rows), np.int64))
    passes = plan_passes(range(len(rows)), tokens.astype(np.float64), joining)
    return [join_rows([rows[row] for row in each], multiple=128) for each in passes]


def step(
    loaded: LoadedModel,
    optimiser: torch.optim.Optimizer,
    passes: list[Batch],
    place: Callable[[LoadedModel, Batch], Batch],
) -> float:
    """Make one optimiser step; return its loss."""
    optimiser.zero_grad(set_to_none=True)
    weight = sum(each.total_weight for each in passes)
    total = torch.zeros((), dtype=torch.float64, device=loaded.device)
    with cast_once():
        for each in passes:
            total += run_pass(loaded, place(loaded, each), weight)
    optimiser.step()
    return float(total)


def run_pass(loaded: LoadedModel, batch: Batch, weight: float) -> torch.Tensor:
    """Run forward and backward of one pass; return its loss without a graph."""
    autocast = partial(torch.autocast, loaded.device.type, torch.bfloat16)
    return WholeRows(loaded, CHUNK, autocast).backward(batch, LossPart(denominator=weight)).loss


def launch_seconds(loaded: LoadedModel, row: Batch, repeats: int) -> float:
    """Return the time until one pass is launched, without that of its kernels; the median."""
    times = []
    batch = prepare_batch(loaded, row)
    with cast_once():
        for _ in range(repeats + 2):
            if loaded.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            run_pass(loaded, batch, 1.0)
            times.append(time.perf_counter() - began)
    loaded.model.zero_grad(set_to_none=True)
    return statistics.median(times[2:])


def measure(name: str, config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Time all ways of one model in turns."""
    device = arguments.device
    loaded = load(config, Way(name, "eager", torch.float32, compiled=device.type == "cuda"), device)
    optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, fused=True)
    sizes = (20, 3, 8) if arguments.dry_run else (512, 8, 192)
    rows = {c: rows_of(c, arguments.trees, sizes, config["vocab_size"]) for c in arguments.capacities}
    largest = max(arguments.capacities)
    flat = flat_rows(rows[largest], arguments.flat_row)
    place = as_chains if device.type == "cuda" else prepare_batch
    ways: dict[str, Callable[[], float]] = {"flat": lambda: step(loaded, optimiser, flat, place)}
    for capacity, own in rows.items():
        passes = joined(own, largest)
        ways[f"{capacity} joined"] = lambda passes=passes: step(loaded, optimiser, passes, prepare_batch)  # type: ignore[misc]
        ways[f"{capacity} alone"] = lambda own=own: step(loaded, optimiser, own, prepare_batch)  # type: ignore[misc]
    losses: dict[str, float] = {}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(arguments.repeats + 1):
        for way, run in ways.items():
            if turn == 0:
                losses[way] = run()  # the first turn compiles
            else:
                times[way].append(seconds_of(device, run))
    if max(abs(loss / losses["flat"] - 1) for loss in losses.values()) > 1e-3:
        raise SystemExit(f"{name}: the losses differ: {losses}")
    seconds = {way: statistics.median(each) for way, each in times.items()}
    shape = shape_of(config, name=name)
    ideal = operations(shape, counted_rows(flat).packed) / operations(shape, counted_rows(rows[largest]).packed)
    tokens = sum(row.num_tokens for row in rows[largest])
    return {
        "model": name,
        "tokens": tokens,
        "ideal": ideal,
        "seconds": seconds,
        "losses": losses,
        "launch": launch_seconds(loaded, rows[min(rows)][0], 5),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
    }


def show(result: dict[str, Any]) -> str:
    """Return the table of one model."""
    seconds, tokens, ideal = result["seconds"], result["tokens"], result["ideal"]
    best = max(int(way.split()[0]) for way in seconds if way != "flat")
    lines = [
        f"## {result['model']}: {tokens:,} tokens a step, ideal {ideal:.2f}, flat {seconds['flat']:.2f} s, launch "
        f"{1e3 * result['launch']:.0f} ms, {result['gib']:.1f} GiB",
        "| capacity | row by row, k tokens/s | joined, k tokens/s | of the longest | speed-up | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for capacity in sorted({int(way.split()[0]) for way in seconds if way != "flat"}):
        alone, together = seconds[f"{capacity} alone"], seconds[f"{capacity} joined"]
        cells = [f"{capacity:,}", f"{tokens / alone / 1e3:.1f}", f"{tokens / together / 1e3:.1f}"]
        cells += [f"{seconds[f'{best} alone'] / together:.3f}", f"{seconds['flat'] / together:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {seconds['flat'] / together / ideal:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure each model and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-1.7b", help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--capacities", default="2048,4096,8192,16384,32768")
    parser.add_argument("--trees", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flat-row", type=int, default=65_536)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    arguments.device = torch.device("cpu" if arguments.dry_run else "cuda")
    arguments.capacities = [int(each) for each in arguments.capacities.split(",")]
    if arguments.dry_run:
        arguments.capacities, arguments.trees, arguments.flat_row = [44, 88, 352], 8, 200
    results = []
    with flash_attention_4() as fa4:
        print(f"# flat through {'FlashAttention-4' if fa4 else 'FlashAttention of torch'}, torch {torch.__version__}")
        for name in arguments.models.split(","):
            config = {**PRESETS[name], "max_position_embeddings": 1 << 17} | (TINY if arguments.dry_run else {})
            results.append(measure(name, config, arguments))
            print(show(results[-1]), flush=True)
            gc.collect()
            if arguments.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
