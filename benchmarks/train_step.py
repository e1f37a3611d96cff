"""One optimiser step on one GPU, packed as a tree against flat sequence packing, side by side in one run.

    python benchmarks/train_step.py [--model qwen3-1.7b | config.json] [--workloads agent-64k,caterpillar,chains]
        [--packed DIR ...] [--rows N] [--repeats N] [--flat-row TOKENS] [--json FILE]
    python benchmarks/train_step.py --dry-run      a tiny model and tiny rows on the CPU

Both ways train the same random model on the same tokens through the trainer's own code: the same compiled layers under
the same checkpointing and autocast, the same loss, AdamW. Flat, every root-to-leaf path is a separate sequence.
Sequences share rows of at most `--flat-row` tokens and attend through varlen FlashAttention: FlashAttention-4 if it is
installed, else torch's. The two losses must agree, or the run fails.

ideal        floating-point operations of the measured rows, flat over tree (costs.model_cost)
efficiency   measured speed-up over the ideal one
forecast     the speed-up that `treepack stats` forecasts; for a packed directory, from all of its rows
measured/f.  measured speed-up over the forecast
MFU          operations of forward and backward, nothing recomputed counted, per second, over the machine's measured
             rate of 8192 x 8192 x 8192 bfloat16 products
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flat_sequences import flash_attention_4
from measure import product_rate, seconds_of
from training_rows import flat_rows, make_row, tree_rows
from workloads import WORKLOADS, chains, make_workload, star

from treepack.analysis.forecast import ForecastLine, row_work
from treepack.attention.chains import ChainRows
from treepack.costs.model_cost import FlopCount, ModelShape, operations, shape_of
from treepack.costs.presets import PRESETS
from treepack.data.batch import Batch
from treepack.data.dataset import PackedDataset
from treepack.files.manifest import read_manifest
from treepack.model.forward import prepare_batch, row_loss
from treepack.model.layers import adapt_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

DRY_RUN_MODEL: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
POSITIONS = {"max_position_embeddings": 1 << 20}


@dataclass(frozen=True)
class Result:
    """Both ways over one workload; seconds are medians over the repeats of one optimiser step."""

    workload: str
    tokens_tree: int
    tokens_flat: int
    tree: float
    flat: float
    ideal: float
    forecast: float
    tree_mfu: float
    flat_mfu: float
    tree_gib: float
    flat_gib: float

    @property
    def speedup(self) -> float:
        """Seconds of flat training divided by the seconds of the tree."""
        return self.flat / self.tree


def packed_rows(path: Path, count: int, shape: ModelShape) -> tuple[list[Batch], ForecastLine]:
    """Rows of a packed directory, spread evenly over the gains of rows, and a forecast's work of all of them."""
    dataset = PackedDataset(path)
    rows = [dataset[i] for i in range(len(dataset))]
    counted = counted_rows(rows, read_manifest(path)["totals"]["tokens_trained"])
    rows.sort(key=lambda row: speedup(counted_rows([row]), shape))
    chosen = np.unique((np.arange(count) + 0.5) * len(rows) // count).astype(int)
    made = [
        make_row(i, row.input_ids.numpy(), row.subtree_end.numpy().astype(np.int64), row.trajectory_ends.numpy(),
                 row.loss_weight.numpy())
        for i, row in enumerate(rows[i] for i in chosen)
    ]  # fmt: skip
    return made, counted


def speedup(line: ForecastLine, shape: ModelShape) -> float:
    """Operations of flat training divided by the operations of the rows."""
    return operations(shape, line.flat) / operations(shape, line.packed)


def counted_rows(rows: list[Batch], tokens_trained: int | None = None) -> ForecastLine:
    """The work of `rows` and of their trajectories one by one, which have `tokens_trained` targets if that is known."""
    columns = [(row.position_ids, row.scale, row.loss_weight, row.trajectory_ends) for row in rows]
    works = [row_work(*(values.numpy() for values in each)) for each in columns]
    packed, flat = (sum(each, FlopCount(0, 0, 0)) for each in zip(*works, strict=True))
    return ForecastLine("rows", None, flat if tokens_trained is None else replace(flat, targets=tokens_trained), packed)


def as_chains(loaded: LoadedModel, row: Batch) -> Batch:
    """A flat row on the device, scheduled as sequences for varlen attention."""
    offsets = torch.tensor([0, *(row.trajectory_ends + 1).tolist()], dtype=torch.int32, device=loaded.device)
    schedule = ChainRows(1, row.num_tokens, offsets, int(offsets.diff().max()))
    return replace(row.to(loaded.device), schedule=schedule)


def work_of(rows: list[Batch]) -> FlopCount:
    """The work of rows of trees or of separate sequences."""
    return counted_rows(rows).packed


def step(
    loaded: LoadedModel,
    optimiser: torch.optim.Optimizer,
    rows: list[Batch],
    place: Callable[[LoadedModel, Batch], Batch],
) -> float:
    """One optimiser step; the mean loss."""
    optimiser.zero_grad(set_to_none=True)
    total, denominator = torch.zeros((), dtype=torch.float64, device=loaded.device), sum(r.total_weight for r in rows)
    for row in rows:
        with torch.autocast(loaded.device.type, torch.bfloat16):
            loss = row_loss(loaded, place(loaded, row)) / denominator
        torch.autograd.backward(loss)
        total += loss.detach()
    optimiser.step()
    return float(total)


def measure(
    loaded: LoadedModel,
    shape: ModelShape,
    name: str,
    case: tuple[list[Batch], ForecastLine],
    arguments: argparse.Namespace,
) -> Result:
    """Both ways over one workload, in turns."""
    rows, counted = case
    device, flat = loaded.device, flat_rows(rows, arguments.flat_row)
    optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, fused=device.type == "cuda")
    ways: dict[str, Callable[[], float]] = {
        "tree": lambda: step(loaded, optimiser, rows, prepare_batch),
        "flat": lambda: step(loaded, optimiser, flat, as_chains if device.type == "cuda" else prepare_batch),
    }
    losses: dict[str, float] = {}
    times: dict[str, list[float]] = {"tree": [], "flat": []}
    memory: dict[str, float] = {}
    for turn in range(arguments.repeats + 1):
        for way, run in ways.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            values: list[float] = []
            seconds = seconds_of(device, lambda run=run, values=values: values.append(run()))  # type: ignore[misc]
            losses[way] = values[0]
            memory[way] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            if turn:  # the first turn compiles
                times[way].append(seconds)
    if abs(losses["tree"] / losses["flat"] - 1) > 1e-3:
        raise SystemExit(f"{name}: the tree's loss is {losses['tree']}, the flat one's {losses['flat']}")
    tree, plain = (statistics.median(times[way]) for way in ("tree", "flat"))
    work, work_flat = operations(shape, work_of(rows)), operations(shape, work_of(flat))
    return Result(
        workload=name,
        tokens_tree=sum(row.num_tokens for row in rows),
        tokens_flat=sum(row.num_tokens for row in flat),
        tree=tree,
        flat=plain,
        ideal=work_flat / work,
        forecast=speedup(counted, shape),
        tree_mfu=work / tree / arguments.rate,
        flat_mfu=work_flat / plain / arguments.rate,
        tree_gib=memory["tree"],
        flat_gib=memory["flat"],
    )


def show(result: Result) -> str:
    """One row of the table."""
    cells = [
        result.workload,
        f"{result.tokens_tree:,} / {result.tokens_flat:,}",
        f"{result.flat:.2f}",
        f"{result.tree:.2f}",
        f"{result.speedup:.2f}",
        f"{result.ideal:.2f}",
        f"{result.speedup / result.ideal:.2f}",
        f"{result.forecast:.2f}",
        f"{result.speedup / result.forecast:.2f}",
        f"{result.tree_mfu:.0%}",
        f"{result.flat_mfu:.0%}",
        f"{result.tree_gib:.1f} / {result.flat_gib:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b", help=f"{', '.join(PRESETS)}, or a Qwen3-like config.json")
    parser.add_argument("--workloads", default="agent-64k,caterpillar,chains", help="comma separated, or none")
    parser.add_argument("--packed", type=Path, action="append", default=[], help="packed directory; may be repeated")
    parser.add_argument("--rows", type=int, default=4, help="rows of each packed directory")
    parser.add_argument("--no-compile", action="store_true", help="run every layer as transformers wrote it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flat-row", type=int, default=65_536, help="tokens of a flat row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure every workload and print the table."""
    arguments = parse()
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    name = "tiny" if arguments.dry_run else arguments.model
    config = (
        DRY_RUN_MODEL if arguments.dry_run else PRESETS.get(name) or json.loads(Path(name).read_text(encoding="utf-8"))
    )
    shape = shape_of(config, name=name)
    arguments.rate = product_rate(device)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps({**config, **POSITIONS}))
        loaded = load_model(source, attention="auto", dtype=torch.float32, autocast=torch.bfloat16, device=device)
    adapt_layers(loaded.model, checkpointing=True, compiled=not arguments.no_compile)
    loaded.model.train()
    if arguments.dry_run:
        made = {work.name: tree_rows(work, 300) for work in (star("star", 30, 3, 40), chains("chains", 2, 50))}
    else:
        chosen = [] if arguments.workloads == "none" else arguments.workloads.split(",")
        assert set(chosen) <= set(WORKLOADS), f"workloads are {', '.join(WORKLOADS)}"
        made = {each: tree_rows(make_workload(each), config["vocab_size"]) for each in chosen}
    cases = {each: (rows, counted_rows(rows)) for each, rows in made.items()}
    cases |= {path.name: packed_rows(path, arguments.rows, shape) for path in arguments.packed}
    results = []
    with flash_attention_4() as fa4:
        print(f"{name}, {loaded.attention}, flat through {'FlashAttention-4' if fa4 else 'FlashAttention of torch'}, "
              f"{arguments.rate / 1e12:.0f} TFLOP/s of bfloat16 products")  # fmt: skip
        print("| workload | tokens tree / flat | flat, s | tree, s | speed-up | ideal | efficiency ", end="")
        print("| forecast | measured/f. | MFU tree | flat | GiB tree / flat |\n|---" + "|---" * 11 + "|")
        for each, case in cases.items():
            results.append(measure(loaded, shape, each, case, arguments))
            print(show(results[-1]), flush=True)
    if arguments.json:
        records = [asdict(result) | {"speedup": result.speedup} for result in results]
        arguments.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
