"""Tree attention on one GPU, every implementation in one run: milliseconds, TFLOP/s, memory, and what a schedule costs.

    python benchmarks/attention.py [--impls triton,flex,...] [--workloads star-4k,...] [--packed DIR ...]
        [--shapes qwen3,mla,...] [--dtype bfloat16] [--layout bhtd|bthd] [--max-autotune] [--json FILE]
    python benchmarks/attention.py --dry-run       tiny rows on the CPU: does everything run?

Prints one Markdown row per workload and implementation, then geometric means. The implementations of a workload take
turns, and a figure is the median of `--repeats` turns. CUDA events time forward and backward in the same turn, and the
launches are queued after a pause, so no time of the CPU is counted. TFLOP/s count only the tree's own score pairs:
2 * pairs * (D + D_v) * H in the forward and 2 * pairs * (3 D + 2 D_v) * H in the backward, no matter how many an
implementation computes. A shape is the heads of a model, from `SHAPES`.
`of matmul` is the ratio to the rate of an 8192 x 8192 x 8192 matrix product of random bfloat16 on the same GPU.
`memory` is the peak beyond q, k, v, o, their gradients and the log-sum-exp, in percent of these, including the
schedule. `differs` is the largest RMS ratio of output and gradients against the first implementation that ran the tree.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from candidates import CANDIDATES, Candidate, Case, Heads
from measure import commit, product_rate
from torch import Tensor
from workloads import WORKLOADS, Workload, agent_tree, caterpillar, chains, make_workload, packed_workloads, star

from treepack.attention import build_block_mask
from treepack.attention.build_schedule import build_schedule

DEFAULT = ("flex", "triton", "flash", "flat-fa2", "flat-fa4")
BASELINES = ("flex", "flex-autotune", "flash", "flat-fa2", "flat-fa4")
PAUSE = 4_000_000  # cycles, about 2 ms: longer than the CPU needs to launch a forward and a backward
# Query heads, key heads and head dimensions of models.
SHAPES = {
    "qwen3": Heads(32, 8, 128, 128),
    "gpt-oss": Heads(64, 8, 64, 64),
    "qwen3.5": Heads(16, 2, 256, 256),  # its full layers
    "mla": Heads(32, 32, 192, 128),  # DeepSeek and Kimi, with fewer heads
    "gemma-4": Heads(8, 4, 512, 512),  # its full layers, on which FlexAttention runs out of shared memory
    "phi-3": Heads(32, 32, 96, 96),
    "phi-2": Heads(32, 32, 80, 80),
    "gpt2-medium": Heads(16, 16, 64, 64),
}
HEADER = (
    "| shape | workload | tokens tree / flat | implementation | forward | backward | both, ms | spread "
    "| TFLOP/s fwd | bwd | both | of matmul | over flex | over flex-autotune | memory % | differs |"
)


def tiny_workloads() -> list[Workload]:
    """Rows for a dry run."""
    return [star("star", 70, 3, 40), chains("chains", 2, 130)]


def schedule_workloads() -> list[Workload]:
    """Rows of about 65,536 tokens."""
    return [
        chains("one chain", 1, 65_536),
        star("star", 1024, 63, 1024),
        agent_tree("agent tree", 65_536, seed=5404),
        caterpillar("caterpillar", 91),
        chains("one-token branches", 65_536, 1),
    ]


def run_once(candidate: Candidate) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output and the three gradients."""
    with candidate.around():
        out = candidate.forward()
        return out, torch.autograd.grad(out, candidate.inputs, candidate.weight)


def mark(device: torch.device) -> Any:
    """Return a point in time: seconds on the CPU, an event on a GPU."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    """Return the milliseconds from one mark to another."""
    return 1e3 * (second - first) if isinstance(first, float) else float(first.elapsed_time(second))


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_turn(candidate: Candidate, flush: Tensor) -> tuple[Any, Any, Any]:
    """Return marks before the forward, before the backward, and after it."""
    flush.zero_()  # 256 MiB, more than any L2 cache, so every turn starts with a cold one
    if flush.device.type == "cuda":
        torch.cuda._sleep(PAUSE)  # type: ignore[no-untyped-call]
    begin = mark(flush.device)
    with candidate.around():
        out = candidate.forward()
        middle = mark(flush.device)
        torch.autograd.grad(out, candidate.inputs, candidate.weight)
    return begin, middle, mark(flush.device)


def measure_times(candidates: list[Candidate], device: torch.device, repeats: int) -> dict[str, dict[str, float]]:
    """Return median milliseconds of forward, backward and both, and the spread of both (quartiles over the median)."""
    flush = torch.empty(1 << (28 if device.type == "cuda" else 10), dtype=torch.int8, device=device)
    turns: dict[str, list[tuple[float, float, float]]] = {c.name: [] for c in candidates}
    for _ in range(repeats):
        for candidate in candidates:
            begin, middle, end = time_turn(candidate, flush)
            synchronize(device)
            turns[candidate.name].append((between(begin, middle), between(middle, end), between(begin, end)))
    medians = {}
    for name, times in turns.items():
        forward, backward, both = (statistics.median(column) for column in zip(*times, strict=True))
        ranked = sorted(t[2] for t in times)
        spread = (ranked[-1 - len(ranked) // 4] - ranked[len(ranked) // 4]) / both
        medians[name] = {"forward_ms": forward, "backward_ms": backward, "both_ms": both, "spread": spread}
    return medians


def extra_memory(candidate: Candidate, lse_bytes: int) -> float:
    """Return the peak bytes beyond q, k, v, o, their gradients and the log-sum-exp, in percent of these."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out, gradients = run_once(candidate)
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    outputs = sum(x.numel() * x.element_size() for x in (out, *gradients)) + lse_bytes
    inputs = sum(x.numel() * x.element_size() for x in (*candidate.inputs, candidate.weight))
    return 100 * float(peak - before - outputs + candidate.schedule_bytes) / (outputs + inputs)


def rms_ratio(result: Tensor, expected: Tensor) -> float:
    """Return RMS of the difference divided by RMS of `expected`, over the tokens of both."""
    length = min(result.shape[2], expected.shape[2])
    a, b = result.detach()[:, :, :length], expected.detach()[:, :, :length]
    squares = [((x - y).float().norm(), y.float().norm()) for x, y in zip(a[0], b[0], strict=True)]  # by head
    difference, size = (torch.stack(column).norm() for column in zip(*squares, strict=True))
    return float(difference / size)


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def warm_up(case: Case, names: list[str]) -> tuple[list[Candidate], list[dict[str, Any]]]:
    """Prepare and compile; return the candidates that run, and one record per name, with its error if there is one."""
    ready, records, expected = [], [], None
    for name in names:
        record: dict[str, Any] = {"implementation": name}
        records.append(record)
        began = time.perf_counter()
        try:
            candidate = CANDIDATES[name](case)
            out, gradients = run_once(candidate)
            synchronize(case.device)
            record |= {"note": candidate.note, "first_call_s": time.perf_counter() - began}
            if not name.startswith("flat"):
                if expected is None:
                    expected = (out, *gradients)
                else:
                    pairs = zip((out, *gradients), expected, strict=True)
                    record["differs"] = max(rms_ratio(a, b) for a, b in pairs)
            del out, gradients
            if case.device.type == "cuda":
                lse = 4 * case.heads.query * candidate.inputs[0].numel() // (case.heads.query * case.heads.size)
                record["memory_percent"] = extra_memory(candidate, lse)
            ready.append(candidate)
        except Exception as error:  # a candidate that cannot run must not end the comparison; the table shows its error
            record["error"] = first_line(error)
            gc.collect()
    return ready, records


def measure(workload: Workload, shape: str, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record per implementation, with times and rates."""
    heads = SHAPES[shape]
    torch._dynamo.reset()
    gc.collect()
    device = torch.device("cpu" if options.dry_run else "cuda")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    case = Case(workload, heads, getattr(torch, options.dtype), device, tokens_first=options.layout == "bthd")
    ready, records = warm_up(case, names)
    gc.collect()
    for candidate in ready * 2:
        # A candidate that fitted alone may no longer fit beside the candidates prepared after it.
        try:
            run_once(candidate)
        except torch.OutOfMemoryError as error:
            ready = [other for other in ready if other is not candidate]
            next(r for r in records if r["implementation"] == candidate.name)["error"] = first_line(error)
    times = measure_times(ready, device, options.repeats)
    unit = 2 * workload.pairs * heads.query / 1e9  # GFLOP are TFLOP/s over milliseconds
    work = {
        "forward": unit * (heads.size + heads.size_v),
        "backward": unit * (3 * heads.size + 2 * heads.size_v),
        "both": unit * (4 * heads.size + 3 * heads.size_v),
    }
    for record in records:
        record |= {
            "shape": shape,
            "heads": heads.text,
            "workload": workload.name,
            "tokens": workload.tokens,
            "tokens_flat": workload.tokens_flat,
        }
        record["pairs"] = workload.pairs
        medians = times.get(record["implementation"])
        if medians:
            record |= medians
            for name, operations in work.items():
                record[f"{name}_tflops"] = operations / medians[f"{name}_ms"]
    for record in records:
        for other in BASELINES:
            if "both_ms" in record and "both_ms" in times.get(other, {}):
                record[f"over_{other}"] = times[other]["both_ms"] / record["both_ms"]
    return records


def table_row(record: dict[str, Any], matmul: float) -> str:
    """Return one row of the table."""
    workload = f"{record['shape']} | {record['workload']} | {record['tokens']:,} / {record['tokens_flat']:,}"
    name = record["implementation"] + (f" ({record['note']})" if record.get("note") else "")
    if "both_ms" not in record:
        return f"| {workload} | {name} | {record.get('error', 'did not run')} |"

    def cell(key: str, form: str) -> str:
        return format(record[key], form) if key in record else ""

    cells = [
        cell("forward_ms", ".2f"),
        cell("backward_ms", ".2f"),
        cell("both_ms", ".2f"),
        cell("spread", ".1%"),
        cell("forward_tflops", ".0f"),
        cell("backward_tflops", ".0f"),
        cell("both_tflops", ".0f"),
        f"{record['both_tflops'] / matmul:.2f}",
        cell("over_flex", ".2f"),
        cell("over_flex-autotune", ".2f"),
        cell("memory_percent", ".2f"),
        cell("differs", ".0e"),
    ]
    return f"| {workload} | {name} | {' | '.join(cells)} |"


def print_summary(records: list[dict[str, Any]]) -> None:
    """Geometric mean and worst of every implementation over each baseline."""
    print("\n| implementation | over | geometric mean | worst | on | workloads |\n|---|---|---|---|---|---|")
    for name in dict.fromkeys(record["implementation"] for record in records):
        for other in BASELINES:
            key = f"over_{other}"
            mine = [r for r in records if r["implementation"] == name and key in r]
            if mine and name != other:
                mean = math.exp(statistics.fmean(math.log(r[key]) for r in mine))
                worst = min(mine, key=lambda r: float(r[key]))
                print(f"| {name} | {other} | {mean:.3f} | {worst[key]:.3f} | {worst['workload']} | {len(mine)} |")


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median wall-clock milliseconds of a call, including the kernels that it launches."""
    times = []
    for i in range(repeats + 3):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        if i >= 3:  # after three warm-ups
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def measure_schedules(device: torch.device, *, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds to build the schedule on the GPU and on one CPU core, and FlexAttention's block lists."""
    print("\n| schedule of | tokens | GPU, ms | one CPU core, ms | block mask, GPU, ms | entries | KiB |")
    print("|---|---|---|---|---|---|---|")
    threads, cpu, records = torch.get_num_threads(), torch.device("cpu"), []
    torch.set_num_threads(1)
    for workload in schedule_workloads():
        end = torch.tensor(workload.subtree_end, dtype=torch.int32)[None]
        there = end.to(device)
        schedule = build_schedule(end)
        size = sum(x.numel() * x.element_size() for x in vars(schedule).values() if isinstance(x, Tensor))
        record: dict[str, Any] = {
            "workload": workload.name,
            "tokens": workload.tokens,
            "gpu_ms": median_ms(partial(build_schedule, there), device, repeats),
            "cpu_ms": median_ms(partial(build_schedule, end), cpu, repeats),
            "block_mask_ms": median_ms(partial(build_block_mask, there), device, repeats),
            "entries": schedule.granules.numel(),
            "bytes": size,
        }
        records.append(record)
        times = " | ".join(f"{record[key]:.2f}" for key in ("gpu_ms", "cpu_ms", "block_mask_ms"))
        print(
            f"| {record['workload']} | {record['tokens']:,} | {times} | {record['entries']:,} | {size >> 10:,} |",
            flush=True,
        )
    torch.set_num_threads(threads)
    return records


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impls", help=f"some of {', '.join(CANDIDATES)}; default {','.join(DEFAULT)}")
    parser.add_argument("--workloads", help=f"some of {', '.join(WORKLOADS)}, or none; default all")
    parser.add_argument("--packed", type=Path, action="append", default=[], help="a packed directory; repeatable")
    parser.add_argument("--rows", type=int, default=3, help="rows of each packed directory")
    parser.add_argument("--shapes", default="qwen3", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--layout", default="bhtd", choices=("bhtd", "bthd"), help="order in memory")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--max-autotune", action="store_true", help="add flex-autotune: a minute of search a workload")
    parser.add_argument("--no-schedules", action="store_true", help="leave out the time of building schedules")
    parser.add_argument("--dry-run", action="store_true", help="tiny rows on the CPU")
    parser.add_argument("--json", type=Path, help="write every figure there")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options, began = parse(), time.perf_counter()
    device = torch.device("cpu" if options.dry_run else "cuda")
    names = options.impls.split(",") if options.impls else ["flex", "reference"] if options.dry_run else [*DEFAULT]
    if options.max_autotune:
        names.insert(1, "flex-autotune")
    chosen = [] if options.workloads == "none" else (options.workloads or ",".join(WORKLOADS)).split(",")
    workloads = tiny_workloads() if options.dry_run else [make_workload(name) for name in chosen]
    for directory in options.packed:
        workloads += packed_workloads(directory, options.rows)
    shapes = options.shapes.split(",")
    matmul = product_rate(device) / 1e12
    about: dict[str, Any] = {
        "device": platform.processor() if options.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "shapes": options.shapes,
        "dtype": options.dtype,
        "layout": options.layout,
        "matmul_tflops": matmul,
    }
    print(" ".join(f"{name}={value}" for name, value in about.items()))
    print(f"{HEADER}\n{'|---' * (HEADER.count('|') - 1)}|", flush=True)
    records: list[dict[str, Any]] = []
    for shape, workload in itertools.product(shapes, workloads):
        for record in measure(workload, shape, names, options):
            print(table_row(record, matmul), flush=True)
            records.append(record)
    print_summary(records)
    schedules = [] if options.no_schedules else measure_schedules(device, repeats=3 if options.dry_run else 20)
    if options.json:
        options.json.write_text(json.dumps({**about, "rows": records, "schedules": schedules}, indent=1) + "\n")
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
