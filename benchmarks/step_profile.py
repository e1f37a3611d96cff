"""Parts of a whole optimiser step on one GPU, with their shares, for shapes of Qwen3.

    python benchmarks/step_profile.py [--models qwen3-1.7b,qwen3-8b:20,qwen3-32b:6] [--workload agent-32k]
        [--loss-chunk 2048] [--recomputed N] [--repeats 2] [--top N] [--json FILE]
    python benchmarks/step_profile.py --dry-run      a tiny model on the CPU, through the same code

`qwen3-8b:20` has the first 20 layers. A model runs all workloads, such as `agent-32k,short-2k`, before the next one.
Weights are random, float32 under bfloat16 autocast; layers are compiled and recomputed; AdamW is fused. Each step goes
through the trainer's own functions: prepare_batch, the loss through the output layer, backward, clipping, AdamW. One
more step is profiled. Between its sections a marker kernel runs, so that each kernel belongs to one section, and a part
is a section and a kind of kernel:

    section    layers forward | output layer | layers backward (with recomputation) | update
    kind       attention, products, Triton kernels of the compiler, copies and additions, softmax of the output layer

The gaps are the time from the first kernel to the last in which no kernel runs. MFU counts operations of forward and
backward, nothing recomputed, over the measured rate of a product of 8192 x 8192 x 8192. Needs only torch, triton, numpy
and transformers; rows are made beforehand, so reading them is not in the step.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from experts import Way, load
from measure import product_rate, seconds_of
from torch import Tensor
from training_rows import count_work, tree_rows
from workloads import make_workload, star

from treepack.costs.model_cost import PRESETS, operations, shape_of
from treepack.data.batch import Batch
from treepack.model.experts.weights import cast_once
from treepack.model.forward import prepare_batch, run_with_head
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.token_loss import weighted_nll
from treepack.model.layers import set_recomputed
from treepack.model.loaded import LoadedModel

TINY: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1 << 17,
}  # fmt: skip
SECTIONS = ("layers forward", "output layer", "layers backward", "update")
MARKER = "spin_kernel"

# The first pattern that matches the name of a kernel gives its kind.
_KINDS = (
    ("compiled norms, rotations, activations", r"^triton_"),
    ("softmax of the output layer", r"_statistics_kernel|_gradient_kernel"),
    ("experts", r"_(gate_up|gate_back|outer|product|combine)_kernel"),
    ("attention", r"^_?\w*(forward|key|query|delta|fused|join|scale|reduce|sum)\w*_(kernel|section)|flash|fmha"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitk"),
    ("copies, casts, additions", r"memcpy|memset|copy|elementwise|reduce|cat|index|fill|scan|sort|gather|scatter"),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a profile: name, start and length in microseconds."""

    name: str
    start: float
    length: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lower)), "other")


def parts_of(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the milliseconds of each part of a profiled step, the largest first, and of the gaps.

    A marker ends a section. Kernels after the last section count as part of it.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    spent: dict[str, float] = defaultdict(float)
    number = 0
    for kernel in ordered:
        if MARKER in kernel.name:
            number = min(number + 1, len(SECTIONS) - 1)
            continue
        section = SECTIONS[number]
        kind = kind_of(kernel.name)
        if section == "update":
            kind = "AdamW" if "adam" in kernel.name.lower() else "clipping"
        spent[f"{section}: {kind}"] += kernel.length / 1e3
    found = dict(sorted(spent.items(), key=lambda item: -item[1]))
    return found | {"gaps between kernels": gaps_of(ordered)}


def gaps_of(kernels: Iterable[Kernel]) -> float:
    """Return the milliseconds from the first kernel to the last in which no kernel runs."""
    gaps, busy_until = 0.0, None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        gaps += 0.0 if busy_until is None else max(0.0, kernel.start - busy_until)
        busy_until = max(busy_until or 0.0, kernel.start + kernel.length)
    return gaps / 1e3


def kinds_of(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the milliseconds of each kind of kernel, the largest first."""
    spent: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        spent[kind_of(kernel.name)] += kernel.length / 1e3
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def mark(device: torch.device) -> None:
    """Run the marker kernel."""
    if device.type == "cuda":
        torch.cuda._sleep(1000)  # type: ignore[no-untyped-call]
    else:
        with torch.profiler.record_function(MARKER):
            pass


class Step:
    """A model with its optimiser, and one row."""

    def __init__(self, loaded: LoadedModel, row: Batch, chunk: int) -> None:
        self.loaded, self.row, self.chunk = loaded, row, chunk
        self.parameters = list(loaded.model.parameters())
        fused = loaded.device.type in ("cpu", "cuda")
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-5, fused=fused)

    def __call__(self) -> float:
        """Make one step; return its loss."""
        device = self.loaded.device
        self.optimiser.zero_grad(set_to_none=True)

        def head(states: Tensor, layer: OutputLayer) -> Tensor:
            mark(device)
            loss = weighted_nll(states, layer, row.targets, chunk=self.chunk) / row.total_weight
            mark(device)
            return loss

        with cast_once():
            row = prepare_batch(self.loaded, self.row)
            with torch.autocast(device.type, torch.bfloat16):
                loss: Tensor = run_with_head(self.loaded, row, head)
            torch.autograd.backward(loss)
        mark(device)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        return float(loss.detach())


def kernels_of(device: torch.device, call: Callable[[], Any]) -> list[Kernel]:
    """Return the kernels of one call on a GPU; on the CPU its operations, so that a dry run has names too."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        seconds_of(device, call)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in seen.events()
        if event.device_type.name == ("CUDA" if on_gpu else "CPU")
    ]


def measure(name: str, config: dict[str, Any], row: Batch, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time a model and profile one of its steps."""
    device = row.input_ids.device
    loaded = load(config, Way(name, "eager", torch.float32, compiled=device.type == "cuda"), device)
    if arguments.recomputed is not None:
        set_recomputed(loaded.model, arguments.recomputed)
    step = Step(loaded, row, arguments.loss_chunk)
    began = time.perf_counter()
    loss = step()
    compiled = time.perf_counter() - began
    step()
    times = [seconds_of(device, step) for _ in range(arguments.repeats)]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    prepare = seconds_of(device, lambda: prepare_batch(loaded, row))
    kernels = kernels_of(device, step)
    spent, work = statistics.median(times), operations(shape_of(config, name=name), count_work([row]))
    return {
        "model": name,
        "layers": config["num_hidden_layers"],
        "recomputed": config["num_hidden_layers"] if arguments.recomputed is None else arguments.recomputed,
        "tokens": row.num_tokens,
        "loss_chunk": arguments.loss_chunk,
        "first_loss": loss,
        "first_step_seconds": compiled,
        "seconds": spent,
        "mfu": work / spent / arguments.rate,
        "prepare_seconds": prepare,
        "gib": memory,
        "parts": parts_of(kernels),
        "largest": largest(kernels, arguments.top),
    }


def largest(kernels: Iterable[Kernel], count: int) -> list[tuple[str, int, float]]:
    """Return name, calls and milliseconds of the kernels that take most of the time."""
    found: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.name].append(kernel.length / 1e3)
    ordered = sorted(((name[:110], len(times), sum(times)) for name, times in found.items()), key=lambda each: -each[2])
    return ordered[:count]


def show(result: dict[str, Any]) -> str:
    """Return the table of one model."""
    total = sum(result["parts"].values()) or 1.0
    lines = [
        f"## {result['model']}, {result['layers']} layers, {result['recomputed']} of them recomputed, "
        f"{result['tokens']:,} tokens: {result['seconds']:.3f} s, MFU "
        f"{result['mfu']:.1%}, {result['gib']:.1f} GiB, prepare_batch {1e3 * result['prepare_seconds']:.1f} ms, first "
        f"step {result['first_step_seconds']:.0f} s, loss {result['first_loss']:.4f}",
        "| part | ms | share |\n|---|---|---|",
        *(f"| {part} | {spent:.1f} | {spent / total:.1%} |" for part, spent in result["parts"].items()),
        *(f"#   {spent:7.1f} ms {calls:5d} x  {name}" for name, calls, spent in result["largest"]),
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure each model and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="qwen3-1.7b,qwen3-8b:20,qwen3-32b:6", help="presets, with numbers of layers"
    )
    parser.add_argument("--workload", default="agent-32k")
    parser.add_argument("--loss-chunk", type=int, default=2048)
    parser.add_argument("--recomputed", type=int, help="layers to recompute; all by default")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--top", type=int, default=0, help="kernels to list for each model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    arguments.rate, results = product_rate(device), []
    print(f"# {arguments.rate / 1e12:.0f} TFLOP/s of bfloat16 products, torch {torch.__version__}", flush=True)
    for chosen in arguments.models.split(","):
        name, _, layers = chosen.partition(":")
        config = {**PRESETS[name], "max_position_embeddings": 1 << 17}
        config |= {"num_hidden_layers": int(layers)} if layers else {}
        config |= TINY if arguments.dry_run else {}
        dry = star("star", 30, 3, 40)
        names = ["star"] if arguments.dry_run else arguments.workload.split(",")
        for work in (dry if arguments.dry_run else make_workload(each) for each in names):
            (row,) = tree_rows(work, config["vocab_size"])
            results.append(measure(name, config, row.to(device), arguments))
            print(show(results[-1]), flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
