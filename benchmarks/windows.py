"""Layers with windows, chunks and sinks on one GPU, in milliseconds and in percent of a full layer.

    python benchmarks/windows.py [--workload agent-64k] [--heads 32/8x128,64/8x64] [--impls triton,flex]
        [--layers full,full+sinks,window-128,window-128+sinks,window-1024,chunk-8192] [--repeats 11]
    python benchmarks/windows.py --dry-run       tiny rows on the CPU: does everything run?

Prints one Markdown row per layer: forward and backward of each implementation, what part of its time for the full layer
that is, and how much faster the first implementation is than the others. The implementations of a layer take turns, and
a figure is the median of `--repeats` turns, as in `attention.py`. Layers with sinks run in the first implementation
only. Schedules and masks are made before. A last line gives the time of the schedules themselves, on one CPU core.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from candidates import CANDIDATES, Case, Heads
from measure import commit, device_name
from workloads import Workload, make_workload

from attention import measure_times, median_ms, run_once, tiny_workloads
from treepack.attention import KeyReach, first_visible
from treepack.attention.build_schedule import build_schedule

LAYERS = "full,full+sinks,window-128,window-128+sinks,window-1024,chunk-8192"
Times = dict[str, dict[str, float]]


def parse_heads(text: str) -> Heads:
    """Return the heads of a text like 32/8x128: query heads, key heads, head dimension."""
    heads, size = text.split("x")
    query, key = heads.split("/")
    return Heads(int(query), int(key), int(size), int(size))


def parse_reach(layer: str) -> KeyReach | None:
    """Return the reach of a layer: window-128+sinks -> a window of 128, full -> None."""
    kind, _, size = layer.partition("+")[0].partition("-")
    return KeyReach(kind, int(size)) if size else None


def measure(workload: Workload, heads: Heads, layer: str, options: argparse.Namespace) -> Times:
    """Return the median milliseconds of each implementation that runs this layer."""
    torch._dynamo.reset()
    device = torch.device("cpu" if options.dry_run else "cuda")
    has_sinks = layer.endswith("+sinks")
    case = Case(
        workload, heads, torch.bfloat16, device, tokens_first=False, reach=parse_reach(layer), has_sinks=has_sinks
    )
    names = options.impls.split(",")
    ready = [CANDIDATES[name](case) for name in (names[:1] if has_sinks else names)]
    for candidate in ready * 2:
        run_once(candidate)
    return measure_times(ready, device, options.repeats)


def table_row(heads: str, layer: str, times: Times, full: Times, names: list[str]) -> str:
    """Return one row of the table."""
    cells = [heads, layer]
    for name in names:
        for which in ("forward_ms", "backward_ms"):
            if name in times:
                milliseconds = times[name][which]
                cells.append(f"{milliseconds:.2f} ({milliseconds / full[name][which]:.1%})")
            else:
                cells.append("")
    for name in names[1:]:
        cells.append(f"{times[name]['both_ms'] / times[names[0]]['both_ms']:.2f}" if name in times else "")
    return f"| {' | '.join(cells)} |"


def schedule_times(workload: Workload, layers: list[str]) -> str:
    """Return the milliseconds that the schedules take on one CPU core."""
    torch.set_num_threads(1)
    end, cpu = torch.tensor(workload.subtree_end, dtype=torch.int32)[None], torch.device("cpu")
    parts = []
    for layer in layers:
        reach = parse_reach(layer)
        build = partial(build_schedule, end, first_visible(end, reach))
        search = partial(first_visible, end, reach)
        parts.append(f"{layer} {median_ms(search, cpu, 7):.1f} + {median_ms(build, cpu, 7):.1f}")
    return f"first tokens + schedule, ms on one core: {'; '.join(parts)}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="agent-64k")
    parser.add_argument("--heads", default="32/8x128,64/8x64")
    parser.add_argument("--layers", default=LAYERS, help="full first, then any of full, window-N, chunk-N, each +sinks")
    parser.add_argument("--impls", default="triton,flex")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--dry-run", action="store_true", help="tiny rows on the CPU")
    options = parser.parse_args()
    if options.dry_run:
        options.impls, options.heads, options.repeats = "reference,flex", "4/2x16", 1
        options.layers = "full,full+sinks,window-16,chunk-32"
    workload = tiny_workloads()[0] if options.dry_run else make_workload(options.workload)
    layers, names = options.layers.split(","), options.impls.split(",")
    device = device_name(dry=options.dry_run)
    about = f"{device}, torch {torch.__version__}, commit {commit()}"
    print(f"{about}: {workload.name}, {workload.tokens:,} tokens, bfloat16")
    columns = [f"{name} {which}" for name in names for which in ("forward", "backward")]
    columns = ["heads", "layer", *columns, *(f"over {name}" for name in names[1:])]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for heads in options.heads.split(","):
        full = measure(workload, parse_heads(heads), layers[0], options)
        for layer in layers:
            times = full if layer == layers[0] else measure(workload, parse_heads(heads), layer, options)
            print(table_row(heads, layer, times, full, names), flush=True)
    print(f"\n{schedule_times(workload, [layer for layer in layers if '+' not in layer])}")


if __name__ == "__main__":
    main()
