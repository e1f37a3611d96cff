"""Training steps on one GPU: rows in pieces against rows of a capacity, the same trees on every side, by turns.

    python benchmarks/carry.py SOURCE ... [--ways recomputed:65536,offload:262144,auto:65536,carry:auto]
        [--model qwen3-1.7b] [--layers N] [--divide N] [--optimizer adamw|sgd] [--repeats N] [--gpu-gb N] [--host-gb N]
        [--plans FOLDER] [--seconds N] [--then SOURCE ...]
    python benchmarks/carry.py --dry-run      a tiny model and tree on the CPU

A source is a workload of `carried_rows.py`, or a file that `training_rows.py` wrote from rows of whole trees. A way is
one of these, with the tokens of its rows, or of its pieces:

    recomputed    every layer is recomputed in the backward pass (--checkpoint-layers all), or so many of them that a
                  second number gives: recomputed:65536:4
    offload       and its input and attention output wait in host memory (--offload-checkpoints)
    auto          as few layers are recomputed as memory demands (--checkpoint-layers auto)
    carry         whole trees in pieces of so many tokens; auto chooses them by memory (--carry)

Each turn times one optimiser step of each way, with learning rate 0, and prints a line of JSON at once. All losses must
agree, or the run fails. `gain` is the median over turns of the seconds of the first way over this way's. GiB are
the peak of torch's allocator, and host memory that is pinned. `forward` and `backward` count tokens that run through
the layers, without recomputation. `compiled` counts graphs and kernels that compiled inside the timed steps: a time is
one of the step only if both are 0. Needs torch, triton, numpy and transformers.

--divide N        divides the layers and the words of the model, so that all parts of a step shrink alike
--gpu-gb, --host-gb    limit the memory as if the machine had no more
--plans FOLDER    reads the rows that were planned before, and writes the others there; give it after each --then
--plan-only       only writes the plans, which needs no GPU; a machine without treepack's loops in C cannot make them
--seconds N       starts no further turn that would end later than this after the start of the process
--profile         profiles one more step of each way, and prints the milliseconds of each kind of kernel and the gaps
--then            begins another run with options of its own, in the same process, which compiles each layer once

    carry.py forks-32k                                          random forks, 64 sequences of 32k
    carry.py tau.npz                                            rows of tau-bench by turns, from training_rows.py
    carry.py forks-128k --divide 28 --ways recomputed:131072,carry:32768                     a deep search
    carry.py wide-256k wide-1m --layers 2 --ways carry:8192 --repeats 1                      peaks of two trees
    carry.py long-200k --ways carry:auto --gpu-gb 80 --host-gb 100 --repeats 1               one long sample
    carry.py long-350k --ways carry:auto --gpu-gb 80 --host-gb 100 --repeats 1               a longer one
    carry.py forks-32k --model qwen3-8b --optimizer sgd --ways recomputed:32768,offload:65536,carry:auto
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from carried_model import STATE_BYTES, Bench, load, num_layers, set_layers
from carried_rows import WORKLOADS, planned_rows, whole_rows
from compilations import Compilations, count_compilations
from measure import alloc_retries, commit, device_name, seconds_of
from step_profile import gaps_of, kernels_of, kinds_of, largest

from treepack.carry.backward import CarryOptions, backward_row
from treepack.carry.offload import CarryBudget, CarryMemory
from treepack.costs.model_cost import PRESETS
from treepack.data.batch import Batch
from treepack.fit.limit import CarryCosts, CarryPlan, choose_limit
from treepack.memory.device_memory import gpu_meter
from treepack.memory.offload import LayerOffload
from treepack.memory.shortage import is_memory_error
from treepack.model.experts.weights import cast_once
from treepack.model.forward import prepare_batch, row_loss
from treepack.model.head.token_loss import CHUNK
from treepack.model.layers import has_compiled_layers
from treepack.train.setup.host_memory import pages_of_row
from treepack.train.setup.model_probe import probe_model
from treepack.train.setup.piece_probe import measure_costs

WAYS = "recomputed:65536,offload:262144,auto:65536,carry:auto"
# bfloat16 rounds a logit by 0.4 %, and a loss is a mean over many.
LARGEST_DIFFERENCE = 1e-3
STARTED = time.perf_counter()
# Of the dry run, which measures nothing.
CPU_COSTS = CarryCosts(num_layers=3, fixed=0, piece=1, keys_values=1, sums=1, output=1)


@dataclass
class Way:
    """A way to train the trees of a source, and its measurements.

    `obstacle` is the reason why it cannot run, and `pages` the host memory that its pieces are expected to pin.
    """

    name: str
    rows: list[Batch]
    recomputed: int
    offload: LayerOffload | None = None
    carry: CarryOptions | None = None
    note: str = ""
    obstacle: str | None = None
    loss: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    peak: float = 0.0
    pages: int = 0
    retries: int = 0
    compiled: Compilations = field(default_factory=lambda: Compilations(0, 0))
    seconds: list[float] = field(default_factory=list)

    @property
    def host(self) -> int:
        """Bytes of pinned host memory."""
        if self.offload is not None:
            return self.offload.pages.num_bytes
        return 0 if self.carry is None or self.carry.memory is None else self.carry.memory.num_bytes


def make_way(bench: Bench, source: str, text: str, rows: list[Batch]) -> Way:
    """Return the way that `text` names, such as carry:8192, with the rows of a source."""
    kind, size, *rest = text.split(":")
    layers = num_layers(bench.loaded)
    if kind == "carry":
        plan = plan_pieces(bench, rows, None if size == "auto" else int(size))
        autocast = partial(torch.autocast, bench.device.type, torch.bfloat16)
        memory = CarryMemory(bench.device, plan.budget)
        carry = CarryOptions(plan.limit, memory=memory, autocast=autocast)
        outputs = "kept" if plan.keep_outputs else "computed again"
        note = f"{plan.resident_layers} of {layers} layers on the GPU, outputs of trunk {outputs}"
        pages = plan.peak.host // memory.pages.size
        return Way(f"carry:{plan.limit}", rows, 0, carry=carry, note=note, pages=pages)
    cut = planned_rows(bench.options.plans, source, int(size), rows)
    if kind == "offload":
        return Way(text, cut, layers, offload=LayerOffload(bench.device))
    if kind == "recomputed":
        count = int(rest[0]) if rest else layers
        assert count <= layers, f"{text}: the model has {layers} layers"
        return Way(text, cut, count, note=f"{count} of {layers} layers recomputed" if rest else "")
    assert kind == "auto", f"ways are recomputed, offload, auto and carry, not {kind}"
    count = count_recomputed(bench, cut)
    return Way(text, cut, count, note=f"{count} of {layers} layers recomputed")


def plan_pieces(bench: Bench, rows: list[Batch], limit: int | None) -> CarryPlan:
    """Return the plan for rows in pieces; on the CPU, with everything in memory."""
    longest = max(row.num_tokens for row in rows)
    path = max(int(row.position_ids.max()) + 1 for row in rows)
    if bench.device.type != "cuda":
        plan = choose_limit(longest, path, CPU_COSTS, gpu_bytes=1 << 40, host_bytes=0, limit=limit)
        # Nothing stays, so that a dry run copies.
        return CarryPlan(plan.limit, 0, True, CarryBudget(stack=0, outputs=0, host_outputs=None), plan.peak)
    set_layers(bench.loaded, 0, None)
    autocast = partial(torch.autocast, bench.device.type, torch.bfloat16)
    costs = measure_costs(bench.loaded, rows[0], CarryOptions(1, autocast=autocast), gpu_meter(bench.device))
    room = {"gpu_bytes": bench.free_bytes(), "host_bytes": bench.host_bytes()}
    print(f"# {costs}, {room}", flush=True)
    return choose_limit(longest, path, costs, **room, limit=limit)


def count_recomputed(bench: Bench, rows: list[Batch]) -> int:
    """Return how many layers must be recomputed for the longest of `rows`."""
    loaded, longest = bench.loaded, max(row.num_tokens for row in rows)
    if bench.device.type != "cuda":
        return num_layers(loaded) // 2
    meter = gpu_meter(bench.device)
    probe = probe_model(
        loaded,
        rows[0],
        compiled=has_compiled_layers(loaded.causal),
        chunk=CHUNK,
        autocast=partial(torch.autocast, bench.device.type, torch.bfloat16),
        meter=meter,
        fits=lambda num_bytes: num_bytes < meter.free(),
    )
    room, counts = bench.free_bytes(), range(probe.num_layers)
    return next((n for n in counts if probe.pass_bytes(longest, n, CHUNK) <= room), probe.num_layers)


def step(bench: Bench, way: Way) -> None:
    """Run one optimiser step; write loss and tokens to the way."""
    set_layers(bench.loaded, way.recomputed, way.offload)
    bench.optimiser.zero_grad(set_to_none=True)
    with cast_once():
        way.loss, way.tokens = _backward(bench, way)
    bench.optimiser.step()


def _backward(bench: Bench, way: Way) -> tuple[float, tuple[int, int]]:
    """Add the gradients of all rows; return the loss and the tokens that ran forward and backward."""
    loaded, device = bench.loaded, bench.device
    denominator = sum(row.total_weight for row in way.rows)
    total, forward, backward = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    for row in way.rows:
        if way.carry is not None and row.num_tokens > way.carry.limit:
            result = backward_row(loaded, row, way.carry, denominator=denominator)
            total += result.loss
            forward, backward = forward + result.tokens_forward, backward + result.tokens_backward
            continue
        with torch.autocast(device.type, torch.bfloat16):
            loss = row_loss(loaded, prepare_batch(loaded, row)) / denominator
        torch.autograd.backward(loss)
        total += loss.detach()
        forward, backward = forward + row.num_tokens, backward + row.num_tokens
    return float(total), (forward, backward)


def measure(bench: Bench, source: str, ways: list[Way]) -> None:
    """Time all ways by turns; a way that lacks memory gets an obstacle, and one that lacks time has fewer turns."""
    for turn in range(bench.options.repeats):
        for way in [way for way in ways if way.obstacle is None]:
            # The first turn of a way has no time of its own yet.
            known = [*way.seconds, *(other.seconds[0] for other in ways if other.seconds)]
            if time.perf_counter() - STARTED + (known[0] if known else 0.0) > bench.options.seconds:
                print(f"# {way.name}: no time for turn {turn}", flush=True)
                continue
            time_step(bench, way)
            figures = {
                "seconds": None if way.obstacle else round(way.seconds[-1], 3),
                "loss": way.loss,
                "tokens": way.tokens,
                "peak_gib": round(way.peak, 2),
                "host_gib": round(way.host / 2**30, 2),
                "allocator_retries": way.retries,
                "compiled": way.compiled,
                "obstacle": way.obstacle,
                "since_start": round(time.perf_counter() - STARTED, 1),
            }
            print(json.dumps({"source": source, "way": way.name, "turn": turn, **figures}), flush=True)
    for way in ways:
        if not way.seconds and way.obstacle is None:
            way.obstacle = "no time"


def time_step(bench: Bench, way: Way) -> None:
    """Time one step of a way; write time, peak and counts to it."""
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        # In a run the allocator has its memory since the first step. Asking the driver takes longer for ways with a
        # higher peak, so the allocator gets nearly all of it before the time starts. Without gradients, no block of the
        # step before is in the way.
        bench.optimiser.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.empty(int(0.9 * bench.unreserved_bytes()), dtype=torch.uint8, device=bench.device)
        torch.cuda.reset_peak_memory_stats()
    before, retries = count_compilations(), alloc_retries() if on_gpu else 0
    try:
        way.seconds.append(seconds_of(bench.device, partial(step, bench, way)))
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        way.obstacle = "out of memory"
        bench.optimiser.zero_grad(set_to_none=True)
    new = count_compilations() - before
    way.compiled = Compilations(way.compiled.graphs + new.graphs, way.compiled.kernels + new.kernels)
    if on_gpu:
        way.peak, way.retries = torch.cuda.max_memory_allocated() / 2**30, alloc_retries() - retries


def profiles(bench: Bench, ways: list[Way]) -> list[str]:
    """Profile a step of each way; return a line with the milliseconds of each kind of kernel."""
    lines = []
    for way in [way for way in ways if way.obstacle is None]:
        kernels = kernels_of(bench.device, partial(step, bench, way))
        parts = kinds_of(kernels) | {"gaps": gaps_of(kernels)}
        cells = ", ".join(f"{part} {spent:.0f}" for part, spent in parts.items())
        lines.append(f"# {way.name}: {len(kernels):,} kernels; ms: {cells}")
        lines += [f"#   {spent:8.1f} ms {calls:6d} x  {name}" for name, calls, spent in largest(kernels, 12)]
    return lines


def table(source: str, ways: list[Way], rows: list[Batch]) -> list[str]:
    """Return the lines of a source.

    Raises:
        SystemExit: losses of two ways differ.
    """
    tokens, first = sum(row.num_tokens for row in rows), ways[0]
    lines = []
    for way in ways:
        if way.obstacle is not None:
            lines.append(f"| {source} | {way.name} | {len(way.rows)} | | | {way.obstacle} | | | {way.peak:.1f} | | | |")
            continue
        if first.obstacle is None and abs(way.loss / first.loss - 1) > LARGEST_DIFFERENCE:
            raise SystemExit(f"{source}: the loss of {way.name} is {way.loss}, that of {first.name} {first.loss}")
        seconds = statistics.median(way.seconds)
        turns = [one / other for one, other in zip(first.seconds, way.seconds, strict=False)]
        gain = f"{statistics.median(turns):.3f}" if first.obstacle is None else ""
        cells = [
            source,
            way.name,
            str(len(way.rows)),
            f"{way.tokens[0]:,}",
            f"{way.tokens[1]:,}",
            f"{seconds:.2f}",
            f"{tokens / seconds / 1000:.1f}",
            gain,
            f"{way.peak:.1f}",
            f"{way.host / 2**30:.1f}",
            "/".join(map(str, way.compiled)),
            way.note,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help=f"{', '.join(WORKLOADS)}, or files of training_rows.py")
    parser.add_argument("--ways", default=WAYS, help=f"comma separated; default {WAYS}")
    parser.add_argument("--model", default="qwen3-1.7b", help=f"{', '.join(PRESETS)}, or a config.json")
    parser.add_argument("--layers", type=int, help="number of layers; default: all")
    parser.add_argument("--divide", type=int, default=1, help="divide layers and words of the model by this number")
    parser.add_argument("--optimizer", default="adamw", choices=list(STATE_BYTES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu-gb", type=float, help="GB of GPU memory that the process may take")
    parser.add_argument("--host-gb", type=float, help="GB of host memory that pieces may pin")
    parser.add_argument("--plans", type=Path, help="folder of plans, which are read, or written if they are missing")
    parser.add_argument("--plan-only", action="store_true", help="write the plans and end; needs no GPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no turn that would end later than this")
    parser.add_argument("--profile", action="store_true", help="profile one more step of each way")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.sources, options.repeats, options.model = options.sources or ["tiny"], 1, "tiny"
        options.ways = "recomputed:50,offload:100,auto:50,carry:20" if options.ways == WAYS else options.ways
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure every source of every run, and print the table last."""
    given = sys.argv[1:] if arguments is None else arguments
    lines = []
    while True:  # [a, --then, b] -> [a], [b]
        place = given.index("--then") if "--then" in given else len(given)
        lines += run(parse(given[:place]))
        gc.collect()  # the model of the next run takes its memory
        torch.cuda.empty_cache()
        if place == len(given):
            break
        given = given[place + 1 :]
    print("| source | way | rows | forward | backward | s | k tokens/s | gain | GiB | host GiB | compiled | |")
    print("|---" * 12 + "|")
    print("\n".join(lines))


def run(options: argparse.Namespace) -> list[str]:
    """Measure the sources of one run; return the lines of the table."""
    if options.plan_only:
        write_plans(options)
        return []
    device = torch.device("cpu" if options.dry_run else "cuda")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (options.gpu_gb or 1e9) * 1e9 / total))
    bench = load(options, device)
    where = device_name(dry=options.dry_run)
    vocabulary = bench.loaded.causal.config.vocab_size
    print(f"{where}, torch {torch.__version__}, commit {commit()}: {options.model}, "
          f"{num_layers(bench.loaded)} layers, {vocabulary:,} words, {bench.loaded.attention} attention, "
          f"{options.optimizer}; {time.perf_counter() - STARTED:.0f} s since the start", flush=True)  # fmt: skip
    lines = []
    for source in options.sources:
        rows = whole_rows(source, vocabulary)
        ways = [make_way(bench, source, each, rows) for each in options.ways.split(",")]
        if device.type == "cuda":
            warm_up(bench, ways)
        measure(bench, Path(source).stem, ways)
        if options.profile:
            print("\n".join(profiles(bench, ways)), flush=True)
        lines += table(Path(source).stem, ways, rows)
        print("\n".join(lines), flush=True)
    return lines


def write_plans(options: argparse.Namespace) -> None:
    """Plan the rows of every way that has rows of a capacity; tokens do not matter, so neither does the model."""
    for source in options.sources:
        rows = whole_rows(source, 2)
        for kind, size, *_ in (way.split(":") for way in options.ways.split(",")):
            if kind != "carry":
                count = len(planned_rows(options.plans, source, int(size), rows))
                print(f"{source}: {count} rows of {int(size):,}", flush=True)


def warm_up(bench: Bench, ways: list[Way]) -> None:
    """Compile the layers for every way, on a short tree, and pin the pages of offloaded rows."""
    rows = whole_rows("short", bench.loaded.causal.config.vocab_size)
    # Pieces of every kind, with and without a stack: a graph for equal numbers of queries and keys takes no others.
    limit = rows[0].num_tokens // 6
    for way in ways:
        began, before = time.perf_counter(), count_compilations()
        if way.offload is not None:  # a run pins its pages once
            longest = max(row.num_tokens for row in way.rows)
            way.offload.pages.reserve(pages_of_row(bench.loaded, longest, recomputed=way.recomputed, lower=True))
        if way.carry is not None and way.carry.memory is not None:
            way.carry.memory.pages.reserve(way.pages)
        carry = None if way.carry is None else CarryOptions(limit, autocast=way.carry.autocast)
        step(bench, Way(way.name, rows, way.recomputed, way.offload, carry))
        new = count_compilations() - before
        print(f"# {way.name}: warm-up {time.perf_counter() - began:.1f} s, {new}, {way.host / 2**30:.1f} GiB pinned",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
