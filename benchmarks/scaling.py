"""One run on 1, 2 and 4 GPUs: the same losses, how much faster, and what a checkpoint costs.

    python benchmarks/scaling.py --packed DIR [--sizes 1,2,4] [--model qwen3-1.7b] [--rows-per-step 8] [--steps 4]
    python benchmarks/scaling.py --packed DIR --dry-run       a tiny model on 1 and 2 CPU processes

First a small model is trained in every way that several ranks offer: sharded, with layers compiled and recomputed,
gathered in bfloat16, with moments in host memory, stopped and resumed with another number of ranks. Each curve of
losses must equal the curve of one GPU. Then the model itself, with compiled layers, recomputation and AdamW: seconds of
a step (median without the first), speed-up over one GPU, peak memory of the first rank, and the seconds for which a
checkpoint interrupts training (first and second save) and takes in total, on the largest number of GPUs.
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
from pathlib import Path
from typing import Any

import torch
from train_step import DRY_RUN_MODEL, POSITIONS

from treepack.costs.presets import PRESETS
from treepack.data.prefetch import Prefetch
from treepack.files.manifest import read_manifest
from treepack.train.loop import train
from treepack.train.optimiser import make_optimiser
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks, find_device, join_ranks, leave_ranks
from treepack.train.saving.checkpoint import Checkpoints
from treepack.train.setup.opening import open_run
from treepack.train.step import train_step

SMALL = {**DRY_RUN_MODEL, "head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
TINY = {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {},
    "compiled": {"compile": torch.cuda.is_available(), "checkpoint_layers": "all"},
    "offloaded": {"offload_optimizer": True},
    "gathered in bf16": {"gather_dtype": "bf16"},
    "resumed": {},
}
# Relative difference of a loss from that of one GPU: rounding, which training carries on from step to step.
BOUNDS = {"fp32": 2e-4, "gathered in bf16": 2e-2}
BOUND = 5e-3


def main() -> None:
    """Start the processes of each size in turn, or be one of them."""
    arguments = parse()
    if arguments.folder:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        for size in map(int, arguments.sizes.split(",")):
            start(arguments, size)
        check_curves(arguments)
        show_times(arguments)


def parse() -> argparse.Namespace:
    """The command line; --folder is for the processes that this one starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packed", type=Path, required=True)
    parser.add_argument("--sizes", default="1,2,4")
    parser.add_argument("--model", default="qwen3-1.7b", choices=PRESETS)
    parser.add_argument("--rows-per-step", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.sizes, arguments.model = "1,2", "tiny"
    return arguments


def start(arguments: argparse.Namespace, size: int) -> None:
    """One process without a group, or `size` of them under torchrun."""
    script = [__file__, *sys.argv[1:], "--folder", str(arguments.folder)]
    launch = [] if size == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    threads = str(max(1, (os.cpu_count() or 1) // size))
    subprocess.run(
        [sys.executable, *launch, *script],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
    )


def work(arguments: argparse.Namespace) -> None:
    """The program of each process."""
    device = find_device("cpu" if arguments.dry_run else "cuda")
    ranks = join_ranks(device)
    base = {"device": device.type, "lr": 1e-3, "rows_per_step": 5, "steps": 3, "checkpoint_every": 0, "dtype": "bf16"}
    small = {**SMALL, "vocab_size": read_manifest(arguments.packed)["max_token_id"] + 1}
    if arguments.dry_run:
        base, small = {**base, "rows_per_step": 3, "dtype": "fp32"}, {**small, **TINY}
    for way, changes in WAYS.items():
        config = write_config(arguments.folder / "small.json", small)
        run = open_run(arguments.packed, config, TrainOptions(**{**base, **changes}), ranks)
        out = arguments.folder / ("resumed" if way == "resumed" else f"{way}-{ranks.size}")
        losses: list[tuple[int, float]] = []
        steps = train(run, out, resume=True, stop=lambda losses=losses, way=way: way == "resumed" and not losses)  # type: ignore[misc]
        losses += [(metrics.step, metrics.loss) for metrics in steps]
        if ranks.leads:
            keep(arguments, ranks.size, way, losses)
    record = timed(arguments, ranks, device, small if arguments.dry_run else PRESETS[arguments.model])
    if ranks.leads:
        keep(arguments, ranks.size, "times", record)
    leave_ranks()


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """A config.json, whole at any moment."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({**config, **POSITIONS}))
    temporary.replace(path)
    return path


def keep(arguments: argparse.Namespace, size: int, name: str, record: Any) -> None:
    """Leave a record for the first process, and print it."""
    print(f"{size} GPUs, {name}: {record}", file=sys.stderr, flush=True)
    (arguments.folder / f"{size}-{name}.json").write_text(json.dumps(record))


def timed(arguments: argparse.Namespace, ranks: Any, device: torch.device, fields: dict[str, Any]) -> dict[str, Any]:
    """Steps of the model itself, and two checkpoints."""
    gpu = device.type == "cuda"
    options = TrainOptions(device=device.type, dtype="bf16", compile=gpu, checkpoint_layers="all",
                           rows_per_step=arguments.rows_per_step, steps=arguments.steps)  # fmt: skip
    config = write_config(arguments.folder / "model.json", fields)
    run = open_run(arguments.packed, config, options, ranks)
    optimiser = make_optimiser(run)
    own = (each for step in run.schedule for each in run.passes(step.rows))
    rows = Prefetch(run.dataset, own, pin=gpu)
    run.loaded.model.train()
    metrics = [train_step(run, optimiser, number, rows) for number in range(len(run.schedule))]
    rows.close()
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    holds: list[float] = []
    whole = 0.0
    if ranks.size == max(map(int, arguments.sizes.split(","))):
        holds, whole = saved(arguments, ranks, run.loaded.model, optimiser)
    return {
        "seconds": [each.seconds for each in metrics],
        "losses": [each.loss for each in metrics],
        "wait": sum(each.wait_seconds for each in metrics) / sum(each.seconds for each in metrics),
        "peak": peak,
        "holds": holds,
        "whole": whole,
    }


def saved(arguments: argparse.Namespace, ranks: Ranks, model: Any, optimiser: Any) -> tuple[list[float], float]:
    """Seconds for which each of two saves interrupts training, and seconds of the second save in total."""
    checkpoints = Checkpoints(arguments.folder / "checkpoints", keep=1)
    holds: list[float] = []
    for step in (1, 2):
        ranks.any(False)
        began = time.perf_counter()
        checkpoints.save(step, model, optimiser, {"step": step})
        holds.append(time.perf_counter() - began)
        checkpoints.wait()
        whole = time.perf_counter() - began
    checkpoints.close()
    return holds, whole


def check_curves(arguments: argparse.Namespace) -> None:
    """Every way on every number of ranks against one process; ends the script if one differs."""
    sizes = [int(size) for size in arguments.sizes.split(",")]
    print("| way | ranks | losses | largest difference from one GPU |\n|---|---|---|---|")
    failed = []
    for way in WAYS:
        reference = load(arguments, sizes[0], "bf16" if way == "resumed" else way)
        if way == "resumed":  # each size made one more step of one run, the last one the rest
            curves = {"->".join(map(str, sizes)): [pair for size in sizes for pair in load(arguments, size, way)]}
        else:
            curves = {str(size): load(arguments, size, way) for size in sizes[1:]}
        for name, curve in curves.items():
            assert [step for step, _ in curve] == [step for step, _ in reference][: len(curve)], (way, name, curve)
            worst = max(abs(a / b - 1) for (_, a), (_, b) in zip(curve, reference, strict=False))
            print(f"| {way} | {name} | {' '.join(f'{loss:.5f}' for _, loss in curve)} | {worst:.1e} |")
            if not worst <= BOUNDS.get(way, BOUND):
                failed.append(f"{way} on {name}")
    if failed:
        raise SystemExit(f"other losses than one GPU gives: {', '.join(failed)}")


def load(arguments: argparse.Namespace, size: int, name: str) -> Any:
    """A record that `keep` left."""
    return json.loads((arguments.folder / f"{size}-{name}.json").read_text())


def show_times(arguments: argparse.Namespace) -> None:
    """The table of the model itself."""
    print(f"\n{arguments.model}, {arguments.rows_per_step} rows of {arguments.packed.name} per step")
    print(
        "| GPUs | step, s | speed-up | of ideal | waiting for rows | GiB on rank 0 | save holds, s | total | losses |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    first = None
    for size in map(int, arguments.sizes.split(",")):
        record = load(arguments, size, "times")
        seconds = statistics.median(record["seconds"][1:])
        first = first or seconds
        holds = ", ".join(f"{each:.2f}" for each in record["holds"])
        losses = " ".join(f"{loss:.5f}" for loss in record["losses"])
        times = f"{seconds:.2f} | {first / seconds:.2f} | {first / seconds / size:.0%} | {record['wait']:.1%}"
        print(f"| {size} | {times} | {record['peak']:.1f} | {holds} | {record['whole']:.1f} | {losses} |")


if __name__ == "__main__":
    main()
