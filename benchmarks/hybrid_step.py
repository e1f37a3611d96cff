"""Training steps of a hybrid model on one GPU, packed as a tree against flat sequence packing, side by side in one run.

    python benchmarks/hybrid_step.py [--model qwen3.5-4b] [--layers 8] [--workloads agent-64k,caterpillar]
        [--rows ROWS.npz ...] [--repeats N] [--flat-row TOKENS] [--no-compile] [--unchecked-fla] [--fla-shapes N]
    python benchmarks/hybrid_step.py --dry-run      a tiny model and tiny rows on the CPU

A random model with the shape of the preset, and the first `--layers` of its layers, trains on the same tokens in both
ways: float32 weights under bfloat16 autocast, every layer recomputed in the backward pass, AdamW. The tree goes through
treepack. Flat, every root-to-leaf path is a sequence of its own, in rows of at most `--flat-row` tokens; transformers'
own layers call flash-linear-attention (its convolution too) and varlen FlashAttention (`flat_sequences`). The two
losses and gradients must agree, or the run fails. `training_rows.py` writes ROWS.npz from a packed directory.

ideal        floating-point operations of the model on the row, flat over tree (costs.model_cost)
efficiency   measured speed-up over the ideal one
MFU          operations of forward and backward, nothing recomputed counted, per second of the step, over the measured
             rate of 8192 x 8192 x 8192 bfloat16 products
compiled     graphs and kernels that compiled inside the timed steps, tree / flat; without any, times are clean
parts        milliseconds of GPU kernels by kind, of the first row of each way under the profiler, multiplied by the
             score pairs of all rows over this row's for attention, and by tokens for the rest; `ideal` there
             is the ratio of these counts

A line of JSON follows each step, so that a run which is stopped has printed its figures. flash-linear-attention tunes
its kernels at their first call, for about two minutes; `--fla-shapes N` leaves it N shapes for each kernel.

Needs torch, triton, numpy, transformers and flash-linear-attention, nothing else. On Hopper, flash-linear-attention
refuses to run with Triton 3.4 to 3.7.0; `--unchecked-fla` takes its times all the same, and its gradients may be wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compilations import Compilations, count_compilations, made_on
from flat_sequences import FlatModel, fewer_shapes, flash_attention_4, refusal_lifted
from measure import commit, device_name, product_rate, seconds_of
from torch import Tensor
from training_rows import count_work, flat_rows, load_rows, tree_rows
from workloads import WORKLOADS, make_workload, star

from treepack.costs.model_cost import ModelShape, operations, shape_of
from treepack.costs.presets import PRESETS
from treepack.data.batch import Batch
from treepack.model.forward import prepare_batch, row_loss
from treepack.model.layers import adapt_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.recurrent.dispatch import NAMES, use_implementation
from treepack.recurrent.levels import obstacle_of_fla

TINY: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
PARTS = ("recurrent", "attention", "products", "other")
# Of gradients in bfloat16, and in float32. In a dry run, states of wrong parents differ by 4 %, convolutions by 0.4 %.
LARGEST_DIFFERENCE = {"cuda": 0.1, "cpu": 1e-4}
_PRODUCTS = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitK", re.IGNORECASE)


class Result(NamedTuple):
    """Both ways over one workload: seconds of a step (median), and milliseconds of its kernels by part.

    `difference` is the RMS difference of all gradients, over the RMS of the flat ones; NaN if they are not compared.
    """

    workload: str
    tokens: tuple[int, int]  # tree, flat, here and below
    pairs: tuple[int, int]
    seconds: tuple[float, float]
    operations: tuple[float, float]
    gib: tuple[float, float]
    difference: float
    parts: tuple[dict[str, float], dict[str, float]]
    compiled: tuple[Compilations, Compilations]


class Way(NamedTuple):
    """Rows and the functions that train on them."""

    rows: list[Batch]
    loss: Callable[[Batch], Tensor]
    around: Callable[[], Any]


def read_config(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the model: a preset, or the tiny one, with fewer layers."""
    config = {**PRESETS[options.model], **(TINY if options.dry_run else {})}
    if options.dry_run:  # one recurrent layer, then one with attention
        config |= {"num_hidden_layers": 2, "full_attention_interval": 2}
    else:
        config["num_hidden_layers"] = options.layers
    return {**config, "max_position_embeddings": 1 << 20}


def load(config: dict[str, Any], options: argparse.Namespace, device: torch.device) -> LoadedModel:
    """Return the random model on the device, with tree attention, its layers checkpointed and perhaps compiled."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps(config))
        with made_on(device):
            loaded = load_model(source, attention="auto", dtype=torch.float32, autocast=torch.bfloat16, device=device)
    adapt_layers(loaded.causal, checkpointing=True, compiled=not (options.no_compile or options.dry_run))
    loaded.model.train()
    return loaded


def make_step(loaded: LoadedModel, optimiser: torch.optim.Optimizer, way: Way, *, autocast: bool = True) -> float:
    """Run one step of the optimiser; return the mean loss."""
    optimiser.zero_grad(set_to_none=True)
    denominator = sum(row.total_weight for row in way.rows)
    total = torch.zeros((), dtype=torch.float64, device=loaded.device)
    with way.around():
        for row in way.rows:
            with torch.autocast(loaded.device.type, torch.bfloat16, enabled=autocast):
                loss = way.loss(row) / denominator
            torch.autograd.backward(loss)
            total += loss.detach()
    optimiser.step()
    return float(total)


def ways_of(loaded: LoadedModel, rows: list[Batch], options: argparse.Namespace) -> dict[str, Way]:
    """Return both ways to train on the rows."""
    flat = FlatModel(loaded)
    return {
        "tree": Way(
            rows,
            lambda row: row_loss(loaded, prepare_batch(loaded, row)),
            lambda: use_implementation(options.implementation),
        ),
        "flat": Way(
            flat_rows(rows, options.flat_row), lambda row: flat.loss(row.to(loaded.device)), flat.active
        ),
    }  # fmt: skip


def measure(
    loaded: LoadedModel, shape: ModelShape, name: str, rows: list[Batch], options: argparse.Namespace
) -> Result:
    """Return times of both ways over one workload, taken in turns.

    Raises:
        SystemExit: the losses differ.
    """
    device, ways = loaded.device, ways_of(loaded, rows, options)
    optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, fused=device.type == "cuda")
    losses: dict[str, float] = {}
    times: dict[str, list[float]] = {way: [] for way in ways}
    memory, compiled = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, Compilations(0, 0))
    for turn in range(options.repeats + 1):
        for name_of_way, whole in ways.items():
            # The first turn compiles and tunes: flash-linear-attention tunes again for the last row, which is shorter.
            way = whole if turn else whole._replace(rows=[*whole.rows[:1], *whole.rows[1:][-1:]])
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            values: list[float] = []
            before = count_compilations()
            spent = seconds_of(
                device, lambda way=way, values=values: values.append(make_step(loaded, optimiser, way))  # type: ignore[misc]
            )  # fmt: skip
            losses[name_of_way] = values[0]
            new = count_compilations() - before
            print(json.dumps({"workload": name, "way": name_of_way, "turn": turn, "rows": len(way.rows),
                              "seconds": round(spent, 3), "loss": values[0], "compiled": new}), flush=True)  # fmt: skip
            if device.type == "cuda":
                memory[name_of_way] = torch.cuda.max_memory_allocated() / 2**30
            if turn:
                times[name_of_way].append(spent)
                known = compiled[name_of_way]
                compiled[name_of_way] = Compilations(known.graphs + new.graphs, known.kernels + new.kernels)
    if abs(losses["tree"] / losses["flat"] - 1) > 1e-3:
        raise SystemExit(f"{name}: the tree's loss is {losses['tree']}, the flat one's {losses['flat']}")
    difference = math.nan if options.unchecked_fla else compare_gradients(loaded, optimiser, ways)
    if difference > LARGEST_DIFFERENCE[device.type]:
        raise SystemExit(f"{name}: the gradients of tree and sequences differ by {difference:.1%}")
    parts = [row_parts(loaded, optimiser, way) for way in ways.values()]
    work = [count_work(way.rows) for way in ways.values()]
    return Result(
        workload=name,
        tokens=(work[0].tokens, work[1].tokens),
        pairs=(work[0].pairs, work[1].pairs),
        seconds=(statistics.median(times["tree"]), statistics.median(times["flat"])),
        operations=(operations(shape, work[0]), operations(shape, work[1])),
        gib=(memory["tree"], memory["flat"]),
        difference=difference,
        parts=(parts[0], parts[1]),
        compiled=(compiled["tree"], compiled["flat"]),
    )


def compare_gradients(loaded: LoadedModel, optimiser: torch.optim.Optimizer, ways: dict[str, Way]) -> float:
    """Return the RMS difference of the gradients of both ways, over the RMS of the flat ones.

    On the CPU both are in float32, so that a dry run distinguishes a wrong state from rounding.
    """
    autocast = loaded.device.type == "cuda"
    make_step(loaded, optimiser, ways["flat"], autocast=autocast)
    flat = gradients_of(loaded)
    make_step(loaded, optimiser, ways["tree"], autocast=autocast)
    return rms_difference(loaded, flat)


def gradients_of(loaded: LoadedModel) -> list[Tensor | None]:
    """Return copies of the gradients of all parameters."""
    return [None if each.grad is None else each.grad.clone() for each in loaded.model.parameters()]


def rms_difference(loaded: LoadedModel, gradients: list[Tensor | None]) -> float:
    """Return the RMS difference of the model's gradients and the given ones, over the RMS of the given ones."""
    squares = torch.zeros(2, dtype=torch.float64, device=loaded.device)
    for parameter, expected in zip(loaded.model.parameters(), gradients, strict=True):
        if expected is not None:
            assert parameter.grad is not None
            found = parameter.grad
            squares += torch.stack([x.square().sum(dtype=torch.float64) for x in (found - expected, expected)])
    return float((squares[0] / squares[1]).sqrt())


def row_parts(loaded: LoadedModel, optimiser: torch.optim.Optimizer, way: Way) -> dict[str, float]:
    """Return the milliseconds of GPU kernels of a way by part, from its first row."""
    first = way._replace(rows=way.rows[:1])
    parts = profile_parts(loaded.device, lambda: make_step(loaded, optimiser, first))
    work, whole = count_work(first.rows), count_work(way.rows)
    tokens, pairs = whole.tokens / work.tokens, whole.pairs / work.pairs
    return {part: ms * (pairs if part == "attention" else tokens) for part, ms in parts.items()}


def profile_parts(device: torch.device, run: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of GPU kernels in one call, by part; all 0 without a GPU."""
    parts = dict.fromkeys(PARTS, 0.0)
    if device.type != "cuda":
        return parts
    from torch.profiler import ProfilerActivity, profile

    recurrent, attention = (kernel_names(*prefixes) for prefixes in (
        ("treepack.recurrent", "fla."), ("treepack.attention",)
    ))  # fmt: skip
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    averages: Any = seen.key_averages()
    for each in averages:
        parts[part_of(each.key, recurrent, attention)] += each.device_time_total / 1e3
    return parts


def part_of(kernel: str, recurrent: set[str], attention: set[str]) -> str:
    """Return the part of a step that a kernel of this name belongs to."""
    if kernel in recurrent:  # first: `_forward_kernel` is also in attention.portable, which Hopper GPUs do not run
        return "recurrent"
    if kernel in attention or "flash" in kernel.lower():
        return "attention"
    return "products" if _PRODUCTS.search(kernel) else "other"


def kernel_names(*prefixes: str) -> set[str]:
    """Return the names of all Triton kernels in imported modules whose names begin with one of `prefixes`."""
    from triton.runtime.jit import KernelInterface

    names = set()
    for module in [each for name, each in sys.modules.items() if name.startswith(prefixes) and each is not None]:
        for value in vars(module).values():
            kernel = value
            while isinstance(kernel, KernelInterface):  # perhaps in wrappers that tune it
                kernel = kernel.fn
            if kernel is not value:
                names.add(kernel.__name__)
    return names


def table(results: list[Result], rate: float) -> Iterator[str]:
    """Yield the lines of both tables."""
    yield "| workload | tokens tree / flat | flat, s | tree, s | speed-up | ideal | efficiency | MFU tree | flat " + (
        "| GiB tree / flat | gradients differ | compiled |"
    )
    yield "|---" * 12 + "|"
    for result in results:
        speedup, ideal = result.seconds[1] / result.seconds[0], result.operations[1] / result.operations[0]
        use = [work / spent / rate for work, spent in zip(result.operations, result.seconds, strict=True)]
        cells = [
            result.workload,
            f"{result.tokens[0]:,} / {result.tokens[1]:,}",
            f"{result.seconds[1]:.2f}",
            f"{result.seconds[0]:.2f}",
            f"{speedup:.2f}",
            f"{ideal:.2f}",
            f"{speedup / ideal:.2f}",
            f"{use[0]:.0%}",
            f"{use[1]:.0%}",
            f"{result.gib[0]:.1f} / {result.gib[1]:.1f}",
            f"{result.difference:.1e}",
            " / ".join(f"{graphs}, {kernels}" for graphs, kernels in result.compiled),
        ]
        yield f"| {' | '.join(cells)} |"
    yield "\n| workload | part | flat, ms | tree, ms | speed-up | ideal |\n|---|---|---|---|---|---|"
    for result in results:
        for part in PARTS:
            tree, flat = (parts[part] for parts in result.parts)
            counts = result.pairs if part == "attention" else result.tokens
            times = f"{flat:.0f} | {tree:.0f} | {flat / tree if tree else 0:.2f}"
            yield f"| {result.workload} | {part} | {times} | {counts[1] / counts[0]:.2f} |"


@contextmanager
def checked_fla(options: argparse.Namespace) -> Iterator[str]:
    """Yield a remark about flash-linear-attention; the options may lift its refusal inside the block.

    Raises:
        SystemExit: it cannot run, and the options do not lift its refusal.
    """
    if options.dry_run:
        yield "functions of transformers in plain torch"
        return
    reason = obstacle_of_fla()
    if reason is not None and not options.unchecked_fla:
        raise SystemExit(f"flash-linear-attention {reason}; or pass --unchecked-fla to take its times only")
    few = "" if options.fla_shapes is None else f", {fewer_shapes(options.fla_shapes)} shapes of kernels"
    with refusal_lifted(reason is not None):
        yield "flash-linear-attention" + few + (" (refused, so its gradients may be wrong)" if reason else "")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-4b", choices=[name for name in PRESETS if "qwen3.5" in name])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--workloads", default="agent-64k,caterpillar", help="comma separated, or none")
    parser.add_argument("--rows", type=Path, action="append", default=[], help="file of training_rows.py; repeatable")
    parser.add_argument("--implementation", default="auto", choices=["auto", *NAMES], help="of recurrent layers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flat-row", type=int, default=65_536, help="tokens of a flat row")
    parser.add_argument("--no-compile", action="store_true", help="run every layer as transformers wrote it")
    parser.add_argument("--unchecked-fla", action="store_true", help="lift the refusal of flash-linear-attention")
    parser.add_argument("--fla-shapes", type=int, help="shapes that flash-linear-attention may try for each kernel")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure every workload, and print the tables last."""
    options = parse(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    config = read_config(options)
    shape = shape_of(config, name=options.model)
    if options.dry_run:
        options.flat_row, options.repeats = 40, 1
        cases = {"star": tree_rows(star("star", 20, 2, 12), TINY["vocab_size"])}
    else:
        chosen = [] if options.workloads == "none" else options.workloads.split(",")
        assert set(chosen) <= set(WORKLOADS), f"workloads are {', '.join(WORKLOADS)}"
        cases = {each: tree_rows(make_workload(each), config["vocab_size"]) for each in chosen}
    cases |= {path.stem: load_rows(path) for path in options.rows}
    rate = product_rate(device)
    with checked_fla(options) as remark, flash_attention_4() as fa4:
        loaded = load(config, options, device)
        print(
            f"{device_name(dry=options.dry_run)}, torch {torch.__version__}, commit "
            f"{commit()}: {options.model}, {config['num_hidden_layers']} layers; tree through "
            f"{loaded.attention} attention and {options.implementation} recurrent layers, flat through {remark} and "
            f"{'FlashAttention-4' if fa4 else 'FlashAttention of torch'}; {rate / 1e12:.0f} TFLOP/s of products",
            flush=True,
        )
        results = []
        for name, rows in cases.items():
            results.append(measure(loaded, shape, name, rows, options))
            print(f"# {name}: {results[-1].seconds[1]:.2f} s flat, {results[-1].seconds[0]:.2f} s tree", flush=True)
    print("\n".join(table(results, rate)))


if __name__ == "__main__":
    main()
