"""Speed-up of a whole step over flat sequence packing by the share of tokens that trajectories share.

    python benchmarks/overlap.py [--models qwen3-1.7b,qwen3-8b:8] [--shares 20,40,60,80,92] [--rows ROWS.npz ...]
        [--repeats 2] [--json FILE]
    python benchmarks/overlap.py --draw FILE.json PICTURE.svg      the picture of a finished measurement
    python benchmarks/overlap.py --dry-run                         a tiny model on the CPU, through the same code

Made sets of 16 trajectories of 8,192 tokens: leaves and flat tokens are constant, and the potential overlap ratio (POR,
the share of flat tokens that a trie saves) goes from 20 to 92 %. Trajectories leave the one before them at random
depths around a mean, so the trees are deep and unbalanced. Each set runs in three ways in turns:

    whole      the whole tree in one row
    cut        rows of at most 16,384 tokens (9,216 if the tree has fewer), which share less; joined into passes
    flat       every trajectory as a sequence of its own, in rows of 65,536, through FlashAttention

--rows adds rows of packed directories, written by training_rows.py. `qwen3-8b:8` has the first 8 layers. The losses of
all ways must agree. `ideal` is the ratio of floating-point operations, and `efficiency` the speed-up divided by it. The
last column has the largest speed-up of Tree Training (arXiv 2511.00413, figure 8) for such sets, on 64 GPUs: 5.7 for
whole trees, 4.5 to 5.3 for cut ones and 3.9 for real rollouts.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experts import Way, load
from flat_sequences import flash_attention_4
from measure import seconds_of
from passes import joined, step
from step_profile import TINY
from train_step import as_chains, counted_rows
from training_rows import flat_rows, load_rows, make_row
from workloads import Int64

from treepack.costs.model_cost import PRESETS, operations, shape_of
from treepack.data.batch import Batch
from treepack.model.forward import prepare_batch
from treepack.pack.plan.methods.contiguous import cut_in_order

LEAVES, LENGTH, CAPACITY, PASS = 16, 8192, 16_384, 32_768
PAPER = {"whole": "5.7", "cut": "4.5 to 5.3", "real": "3.9"}


def shared_depths(share: float, leaves: int, length: int) -> Int64:
    """Return the tokens that each trajectory shares with the one before it, so that the POR is `share`."""
    mean = share * leaves * length / (leaves - 1)
    spread = 0.5 * min(mean, length - 1 - mean)
    noise = np.random.default_rng(0).uniform(-spread, spread, leaves - 1)
    depths = np.rint(mean + noise - noise.mean()).astype(np.int64)
    return np.append(0, depths.clip(0, length - 1))


def row_of_paths(number: int, paths: list[Int64], shared: Int64) -> Batch:
    """Return the row of trajectories, each of which shares so many tokens with the one before it in the row."""
    new = [path[depth:] for path, depth in zip(paths, shared.tolist(), strict=True)]
    starts = np.cumsum([0, *map(len, new)])
    end = np.full(max(map(len, paths)), starts[-1])  # by depth: the first token after the subtree
    ends: list[Int64] = []
    for path, depth, start in zip(
        reversed(paths), reversed(shared.tolist()), reversed(starts[:-1].tolist()), strict=True
    ):
        ends.append(end[depth : len(path)].copy())
        end[depth:] = start
    return make_row(number, np.concatenate(new), np.concatenate(ends[::-1]), starts[1:] - 1)


def sets_of(share: float, vocabulary: int, sizes: tuple[int, int, int]) -> tuple[list[Batch], list[Batch], int]:
    """Return the whole tree as one row, its rows under a capacity, and that capacity."""
    leaves, length, capacity = sizes
    shared, generator = shared_depths(share, leaves, length), np.random.default_rng(1)
    paths: list[Int64] = []
    for depth in shared.tolist():
        own = generator.integers(0, vocabulary, length - depth)
        if paths and own[0] == paths[-1][depth]:
            own[0] = (own[0] + 1) % vocabulary
        paths.append(np.concatenate([paths[-1][:depth], own]) if paths else own)
    whole = row_of_paths(0, paths, shared)
    capacity = capacity if whole.num_tokens > capacity else length * 9 // 8
    row_of = cut_in_order(np.full(leaves, length), shared, capacity)
    cut = []
    for number in range(int(row_of[-1]) + 1):
        own = np.flatnonzero(row_of == number)
        cut.append(row_of_paths(number, [paths[i] for i in own], np.append(0, shared[own[1:]])))
    return [whole], cut, capacity


def measure(name: str, config: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all sets of one model."""
    device = arguments.device
    place = as_chains if device.type == "cuda" else prepare_batch
    loaded = load(config, Way(name, "eager", torch.float32, compiled=device.type == "cuda"), device)
    optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, fused=True)
    shape = shape_of(config, name=name.partition(":")[0])
    sizes = (6, 40, 90) if arguments.dry_run else (LEAVES, LENGTH, CAPACITY)
    cases: list[tuple[str, list[Batch], dict[str, list[Batch]]]] = []
    for share in arguments.shares:
        whole, cut, capacity = sets_of(share / 100, config["vocab_size"], sizes)
        por = 1 - whole[0].num_tokens / whole[0].tokens_flat
        cases.append((f"made, POR {por:.0%}, cut at {capacity:,}", whole, {"whole": whole, "cut": joined(cut, PASS)}))
    for path in arguments.rows:
        rows = load_rows(path)
        por = 1 - sum(row.num_tokens for row in rows) / sum(row.tokens_flat for row in rows)
        cases.append((f"{path.stem}, POR {por:.0%}", rows, {"real": rows}))
    results = []
    for title, rows, trees in cases:
        flat = flat_rows(rows, 200 if arguments.dry_run else 65_536)
        ways: dict[str, Callable[[], float]] = {"flat": lambda flat=flat: step(loaded, optimiser, flat, place)}  # type: ignore[misc]
        for way, passes in trees.items():
            ways[way] = lambda passes=passes: step(loaded, optimiser, passes, prepare_batch)  # type: ignore[misc]
        losses = {way: run() for way, run in ways.items()}  # compiles, if these lengths are new
        if max(abs(loss / losses["flat"] - 1) for loss in losses.values()) > 1e-3:
            raise SystemExit(f"{name}, {title}: the losses differ: {losses}")
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.repeats):
            for way, run in ways.items():
                times[way].append(seconds_of(device, run))
        seconds = {way: statistics.median(each) for way, each in times.items()}
        for way, passes in trees.items():
            ideal = operations(shape, counted_rows(flat).packed) / operations(shape, counted_rows(passes).packed)
            results.append(
                {
                    "model": name,
                    "set": title,
                    "way": way,
                    "tokens": sum(row.num_tokens for row in passes),
                    "tokens_flat": sum(row.num_tokens for row in flat),
                    "seconds": seconds[way],
                    "flat_seconds": seconds["flat"],
                    "speedup": seconds["flat"] / seconds[way],
                    "ideal": ideal,
                    "gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
                }
            )
            print(show(results[-1]), flush=True)
    return results


def show(result: dict[str, Any]) -> str:
    """Return one line of the table."""
    cells = [result["model"], result["set"], result["way"], f"{result['tokens']:,} / {result['tokens_flat']:,}"]
    cells += [f"{result[name]:.2f}" for name in ("flat_seconds", "seconds", "speedup", "ideal")]
    return f"| {' | '.join(cells)} | {result['speedup'] / result['ideal']:.2f} | {PAPER[result['way']]} |"


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Draw speed-up and ideal by POR, one panel for each model."""
    from vl_convert import vegalite_to_svg  # of the extra `report`

    values = [
        {
            "model": each["model"],
            "POR in %": 100 * (1 - _whole_tokens(each, results) / each["tokens_flat"]),
            "speed-up": each[kind],
            "of": f"{each['way']}, {'measured' if kind == 'speedup' else 'ratio of operations'}",
        }
        for each in results
        for kind in ("speedup", "ideal")
    ]
    encoding = {
        "x": {"field": "POR in %", "type": "quantitative"},
        "y": {"field": "speed-up", "type": "quantitative", "scale": {"type": "log"}},
        "color": {"field": "of", "type": "nominal", "title": None},
    }
    spec = {
        "data": {"values": values},
        "facet": {"field": "model", "type": "nominal", "title": None},
        "spec": {"mark": {"type": "line", "point": True}, "encoding": encoding, "width": 300, "height": 260},
    }
    picture.write_text(vegalite_to_svg(spec), encoding="utf-8")


def _whole_tokens(result: dict[str, Any], results: list[dict[str, Any]]) -> int:
    """Return the tokens of the whole tree of a result's set."""
    same = [each for each in results if (each["model"], each["set"]) == (result["model"], result["set"])]
    return min(int(each["tokens"]) for each in same)


def main() -> None:
    """Measure each model and print the table, or draw a finished one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-1.7b,qwen3-8b:8", help="presets, with numbers of layers")
    parser.add_argument("--shares", default="20,40,60,80,92", help="potential overlap ratios in percent")
    parser.add_argument("--rows", type=Path, action="append", default=[], help="file of training_rows.py")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "SVG"))
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(arguments.draw[0].read_text()), arguments.draw[1])
        return
    arguments.device = torch.device("cpu" if arguments.dry_run else "cuda")
    arguments.shares = [float(share) for share in arguments.shares.split(",")]
    results: list[dict[str, Any]] = []
    with flash_attention_4() as fa4:
        print(f"# flat through {'FlashAttention-4' if fa4 else 'FlashAttention of torch'}, torch {torch.__version__}")
        print("| model | set | way | tokens tree / flat | flat, s | tree, s | speed-up | ideal | efficiency | paper |")
        print(f"|---{'|---' * 9}|", flush=True)
        for chosen in arguments.models.split(","):
            name, _, layers = chosen.partition(":")
            config = {**PRESETS[name], "max_position_embeddings": 1 << 17}
            config |= {"num_hidden_layers": int(layers)} if layers else {}
            results += measure(chosen, config | (TINY if arguments.dry_run else {}), arguments)
            gc.collect()
            if arguments.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
