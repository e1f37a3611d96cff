"""One row over 1, 2 and 4 GPUs (`train --sequence-ranks`): the same loss and gradients, how much faster, peak memory.

    python benchmarks/sequence_parallel.py [--sizes 1,2,4] [--layers N] [--repeats 2] [--no-compile] [--update]
        [--budget 560] [--rows tree,path] [--tree-tokens 131072] [--path-tokens 200000] [--model qwen3-8b | config.json]
    python benchmarks/sequence_parallel.py --dry-run      a tiny model and tiny rows on 1 and 2 CPU processes

Each size is a run of its own under torchrun, with weights sharded by FSDP2, layers recomputed and bfloat16 autocast, so
every size has the same memory plan. First each size computes a small tree twice, uncompiled: together, and each rank
alone; losses and gradients must agree. Then it times steps (forward, backward, with --update AdamW) of two rows:

tree    a tree of agent turns of 131,072 tokens
path    one path of 200,000 tokens, nothing shared

Without --layers, the model has as many layers as fit on one GPU of this kind by a rough estimate, at most 6. Seconds
are medians of the repeats after one step that compiles; peaks are GPU memory of tensors, the largest of all ranks, with
weights and gradients. A row that does not fit is shown as out of memory. A size that does not end within LIMIT seconds,
or within what is left of --budget, is stopped, and the others are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import commit, device_name, seconds_of
from torch import distributed
from training_rows import tree_rows
from workloads import agent_tree, chains

from treepack.costs.presets import PRESETS
from treepack.data.batch import Batch
from treepack.model.experts.weights import cast_once
from treepack.model.forward import WholeRows
from treepack.model.loaded import LoadedModel
from treepack.objectives.row_numbers import LossPart
from treepack.sequence.share import share_rows
from treepack.train.options import TrainOptions
from treepack.train.ranks import find_device, join_ranks, leave_ranks
from treepack.train.sharding import load_sharded

DRY_RUN_MODEL: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
LIMIT = 280  # seconds of one size; a rank that waits for another one for ever is stopped
MOST_LAYERS = 6  # a step of more layers takes too long on one GPU
CHECK_TOKENS = 6144
BOUND = 1e-2  # relative difference of losses and norms of gradients in bfloat16; 1e-4 in float32


def main() -> None:
    """Start the processes of each size in turn, or be one of them."""
    arguments = parse()
    if arguments.folder:
        work(arguments)
        return
    print(f"{' '.join(sys.argv)} at {commit()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        write_model(arguments)
        arguments.end = time.perf_counter() + arguments.budget
        records = [start(arguments, size) for size in map(int, arguments.sizes.split(","))]
    show([record for record in records if record is not None])


def parse() -> argparse.Namespace:
    """The command line; --folder is for the processes that this one starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", default="tree,path")
    parser.add_argument("--tree-tokens", type=int, default=131_072)
    parser.add_argument("--path-tokens", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print the largest kernels of one step of each row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=560, help="seconds of all sizes together")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.sizes, arguments.tree_tokens, arguments.path_tokens = "1,2", 3300, 300
    return arguments


def write_model(arguments: argparse.Namespace) -> None:
    """Write the configuration that all sizes load, with random weights of one seed."""
    if arguments.dry_run:
        config: dict[str, Any] = {**DRY_RUN_MODEL}
    else:
        config = PRESETS.get(arguments.model) or json.loads(Path(arguments.model).read_text(encoding="utf-8"))
        config = {**config, "num_hidden_layers": arguments.layers or fitting_layers(config, arguments)}
    (arguments.folder / "model.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 20}))
    print(f"{arguments.model} with {config['num_hidden_layers']} layers", flush=True)


def fitting_layers(config: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Return the number of layers of which the longest row fits on one GPU, by bytes per weight and token."""
    room = 0.9 * torch.cuda.get_device_properties(0).total_memory - (6 << 30)
    width, inner, tokens = config["hidden_size"], config["intermediate_size"], longest(arguments)
    heads = config["num_attention_heads"] * config["head_dim"]
    layer = width * (2 * heads + 2 * config["num_key_value_heads"] * config["head_dim"] + 3 * inner)
    state = 16 if arguments.update else 8  # float32 weights and gradients, and two states of AdamW
    # The layer that runs again: measured 250 KB a token for widths of 4,096 and 12,288, two thirds of it if compiled.
    working = (4 * width + 4 * inner) * (4 if arguments.no_compile else 3)
    room -= state * 2 * config["vocab_size"] * width + tokens * working
    return min(MOST_LAYERS, max(1, int(room / (state * layer + tokens * (4 * width + 2 * heads)))))


def longest(arguments: argparse.Namespace) -> int:
    """Tokens of the longest row."""
    tokens: list[int] = [getattr(arguments, f"{name}_tokens") for name in arguments.rows.split(",")]
    return max(tokens)


def start(arguments: argparse.Namespace, size: int) -> dict[str, Any] | None:
    """Run `size` processes under torchrun; return their record, None if they failed."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [sys.executable, *launch, __file__, *sys.argv[1:], "--folder", str(arguments.folder)]
    threads = str(max(1, (os.cpu_count() or 1) // size))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    try:
        subprocess.run(command, check=True, env=environment, timeout=max(0.0, min(LIMIT, arguments.end - began)))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{size} GPUs failed after {time.perf_counter() - began:.0f} s: {error}", flush=True)
        return None
    record: dict[str, Any] = {"size": size, **json.loads((arguments.folder / f"{size}.json").read_text())}
    print(f"{size} GPUs took {time.perf_counter() - began:.0f} s in total", flush=True)
    if arguments.json:
        with arguments.json.open("a") as file:
            print(json.dumps({"commit": commit(), **record}), file=file)
    return record


def work(arguments: argparse.Namespace) -> None:
    """The program of each process."""
    device = find_device("cpu" if arguments.dry_run else "cuda")
    ranks = join_ranks(device)
    gpu = device.type == "cuda"
    options = TrainOptions(
        device=device.type,
        dtype="bf16" if gpu else "fp32",
        checkpoint_layers="all",
        compile=gpu and not arguments.no_compile,
        sequence_ranks=ranks.size,
    )
    config = json.loads((arguments.folder / "model.json").read_text())
    loaded = load_sharded(arguments.folder / "model.json", options, device)
    loaded.model.train()
    say(ranks.leads, f"{ranks.size} ranks loaded {loaded.attention} attention")
    optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, fused=gpu) if arguments.update else None
    made = {
        "check": lambda: agent_tree("check", 3300 if arguments.dry_run else CHECK_TOKENS, seed=1),
        "tree": lambda: agent_tree("tree", arguments.tree_tokens, seed=5404),
        "path": lambda: chains("path", 1, arguments.path_tokens),
    }
    (row,) = tree_rows(made["check"](), config["vocab_size"])
    record: dict[str, Any] = {"device": device_name(dry=not gpu), "rows": {}}
    with torch.compiler.set_stance("force_eager"):
        record["check"] = compare(loaded, row, ranks)
    for name in arguments.rows.split(","):
        (row,) = tree_rows(made[name](), config["vocab_size"])
        record["rows"][name] = timed(loaded, row, optimiser, arguments, ranks)
    if ranks.leads:
        (arguments.folder / f"{ranks.size}.json").write_text(json.dumps(record))
    leave_ranks()


def say(leads: bool, text: str) -> None:
    """Print a line on the first rank."""
    if leads:
        print(text, flush=True)


def step(loaded: LoadedModel, row: Batch, optimiser: Any = None) -> float:
    """Run forward and backward of a row, and the update; return the mean loss."""
    gpu = loaded.device.type == "cuda"
    autocast = partial(torch.autocast, loaded.device.type, torch.bfloat16, enabled=gpu)
    loaded.model.zero_grad(set_to_none=True)
    with cast_once(keep=False):
        result = WholeRows(loaded, autocast=autocast).backward(row, LossPart(denominator=row.total_weight))
    if optimiser is not None:
        optimiser.step()
    return float(result.loss)


def norm_of(loaded: LoadedModel) -> float:
    """Return the norm of the gradients over all ranks."""
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in loaded.model.parameters() if p.grad is not None])
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def compare(loaded: LoadedModel, row: Batch, ranks: Any) -> dict[str, float]:
    """Compute a row together, and on every rank alone; return losses and norms, and refuse a difference."""
    group = loaded.sequence
    together = step(loaded, row), norm_of(loaded)
    share_rows(loaded.causal, None)
    # Each rank has the whole gradient, and FSDP adds them up. Compiled, a row of one rank would need other graphs.
    alone = step(loaded, row), norm_of(loaded) / ranks.size
    share_rows(loaded.causal, None if group is None else group.group)
    loaded.model.zero_grad(set_to_none=True)
    bound = BOUND if loaded.device.type == "cuda" else 1e-4
    for name, a, b in zip(("loss", "norm of gradients"), together, alone, strict=True):
        say(ranks.leads, f"{ranks.size} ranks, {row.num_tokens:,} tokens: {name} {a:.6f} together and {b:.6f} alone")
        if not abs(a - b) <= bound * abs(b):
            raise SystemExit(f"{name} differs by more than {bound}")
    return {"loss": together[0], "norm": together[1]}


def timed(loaded: LoadedModel, row: Batch, optimiser: Any, arguments: argparse.Namespace, ranks: Any) -> dict[str, Any]:
    """Return the loss, the seconds of steps and the peak memory of all ranks; or the lack of memory."""
    gpu, losses = loaded.device.type == "cuda", list[float]()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        times = []
        for turn in range(arguments.repeats + 1):
            times.append(seconds_of(loaded.device, lambda: losses.append(step(loaded, row, optimiser))))
            say(ranks.leads, f"{ranks.size} ranks, {row.num_tokens:,} tokens, step {turn}: {times[-1]:.3f} s")
        if arguments.profile:
            profile(loaded, row, ranks.leads)
    except torch.OutOfMemoryError as error:
        if ranks.size > 1:
            raise  # the other ranks wait for this one
        say(ranks.leads, f"out of memory: {str(error).partition('. ')[0]}")
        loaded.model.zero_grad(set_to_none=True)
        return {"tokens": row.num_tokens, "seconds": None}
    peak = torch.tensor([torch.cuda.max_memory_allocated() if gpu else 0], device=loaded.device)
    distributed.all_reduce(peak, distributed.ReduceOp.MAX)
    seconds = statistics.median(times[1:])
    return {"tokens": row.num_tokens, "loss": losses[-1], "seconds": seconds, "peak": int(peak)}


def profile(loaded: LoadedModel, row: Batch, leads: bool) -> None:
    """Print the kernels of one step that take longest on the first rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        step(loaded, row)
        torch.cuda.synchronize()
    say(leads, record.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))


def show(records: list[dict[str, Any]]) -> None:
    """Print the table: each size beside the first one, after a comparison of losses."""
    sizes = [record for record in records if record["rows"]]
    for name in sizes[0]["rows"] if sizes else ():
        print(f"\n{name}: GPUs, tokens, loss, seconds of a step, times faster, peak GiB, of the first")
        first: dict[str, Any] | None = None
        for record in sizes:
            row = record["rows"][name]
            if row["seconds"] is None:
                print(f"  {record['size']}  {row['tokens']:>8,}  out of memory")
                continue
            first = first or row
            faster, share = first["seconds"] / row["seconds"], row["peak"] / max(first["peak"], 1)
            print(
                f"  {record['size']}  {row['tokens']:>8,}  {row['loss']:.5f}  {row['seconds']:8.3f}  {faster:5.2f}  "
                f"{row['peak'] / 2**30:6.1f}  {share:5.2f}"
            )
            if not abs(row["loss"] - first["loss"]) <= BOUND * abs(first["loss"]):
                print(f"  the loss differs from {first['loss']:.5f} by more than {BOUND}")
    if sizes:
        print(f"\n{sizes[0]['device']}, checks: {[record['check'] for record in sizes]}")


if __name__ == "__main__":
    main()
