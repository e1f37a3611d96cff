"""One recurrent layer on one GPU: convolution and scan on a tree against flat sequences, errors first, then times.

    python benchmarks/recurrent_layers.py [--layers qwen3.5-4b,nemotron-h-8b] [--workloads star-4k,agent-64k,...]
        [--rows ROWS.npz ...] [--implementations fla,triton] [--repeats 5] [--unchecked-fla] [--fla-shapes N]
    TRITON_INTERPRET=1 python benchmarks/recurrent_layers.py --dry-run      tiny sizes on the CPU

A layer is what a model computes between its projections: a convolution of x with silu, then the scan of its parts q, k
and v. Inputs are random, in bfloat16 as under autocast, decays in float32; the tree goes through treepack. Flat, every
root-to-leaf path is a sequence of its own, in rows of at most `--flat-row` tokens, and goes through the convolution and
the scan of flash-linear-attention with cu_seqlens.

errors   RMS of the difference to float64, over the RMS of the float64 result, of the output and of every gradient.
         `alone` is flash-linear-attention on each trajectory alone; `over alone` is the largest ratio to its errors.
         Both `torch` in float64 on the tree and on each trajectory alone start from the same numbers.
times    milliseconds of forward and backward; convolution and scan are also timed apart. `ideal` is the ratio of tokens
         and `efficiency` the speed-up over it.

Needs torch, triton, numpy, transformers and flash-linear-attention, nothing else. On Hopper, flash-linear-attention
refuses to run with Triton 3.4 to 3.7.0; `--unchecked-fla` takes its times all the same, without its errors. It tunes
its kernels at their first call, for minutes; `--fla-shapes N` leaves it N shapes for each kernel.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from candidates import mend_interpreter
from flat_sequences import fewer_shapes, fla_convolve, fla_scan, refusal_lifted
from layer_sizes import LAYERS, Layer
from measure import commit, device_name
from torch import Tensor
from training_rows import load_rows, parents_of
from workloads import Workload, agent_tree, make_workload, star

from attention import between, mark, synchronize
from treepack.attention import BatchSchedules
from treepack.recurrent import dispatch
from treepack.recurrent.dispatch import use_implementation
from treepack.recurrent.interface import convolution, gated_delta_rule
from treepack.recurrent.levels import obstacle_of_fla

Convolve = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
Stage = tuple[Callable[[], Tensor], list[Tensor]]  # forward pass, tensors that get gradients
Times = dict[str, tuple[float, float]]  # milliseconds of forward and backward, by stage


TINY = {"delta": Layer(1, 2, 16, 16, is_delta=True), "mamba": Layer(1, 2, 16, 16, is_delta=False)}
STAGES = ("convolution", "scan", "layer")


@dataclass(frozen=True)
class Inputs:
    """Leaves of a layer over N tokens, and the gradient of its output.

    x        [1, N, C]
    weight   [C, W]
    bias     [C], None with the delta rule
    g        float32 [1, N, H], logarithm of the decay
    beta     [1, N, H], None with Mamba-2
    do       [1, N, H, V]
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    g: Tensor
    beta: Tensor | None
    do: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The inputs that get gradients, by name."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias, "g": self.g, "beta": self.beta}
        return {name: values for name, values in named.items() if values is not None}

    def of(self, tokens: Tensor | slice) -> Inputs:
        """Return the inputs of some tokens, as new leaves."""
        beta = None if self.beta is None else self.beta[:, tokens]
        return Inputs(self.x[:, tokens], self.weight, self.bias, self.g[:, tokens], beta, self.do[:, tokens]).map(
            torch.clone
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs after `function`, as new leaves."""
        columns = {name: function(values.detach()).requires_grad_() for name, values in self.leaves.items()}
        bias, beta = columns.get("bias"), columns.get("beta")
        return Inputs(columns["x"], columns["weight"], bias, columns["g"], beta, function(self.do))


def draw_inputs(layer: Layer, count: int, device: torch.device) -> Inputs:
    """Return random inputs in bfloat16, with the decays of new layers of Qwen3.5: exp(-A softplus(a + 1))."""
    generator = torch.Generator(device).manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    channels = sum(layer.channels)
    rate = torch.linspace(0.01, 16, layer.heads, device=device)
    g = -rate * torch.nn.functional.softplus(draw(1, count, layer.heads) + 1)
    weight, bias = draw(channels, layer.taps) / layer.taps**0.5, draw(channels) / 4
    half = {name: values.bfloat16() for name, values in {"x": draw(1, count, channels), "weight": weight}.items()}
    beta = draw(1, count, layer.heads).sigmoid().bfloat16() if layer.is_delta else None
    do = draw(1, count, layer.heads, layer.values).bfloat16()
    return Inputs(half["x"], half["weight"], None if layer.is_delta else bias.bfloat16(), g, beta, do).map(torch.clone)


class Functions(NamedTuple):
    """Convolution [1, N, C] with silu, and scan [1, N, H, V], of the tokens of one row."""

    convolve: Convolve
    scan: Scan


def tree_functions(end: Tensor, device: torch.device) -> Functions:
    """Return the functions of treepack for subtree_end [T] on the CPU; `use_implementation` chooses their code."""
    schedules = BatchSchedules(end[None], device=device)
    options: Any = {"subtree_end": end[None].to(device), "schedule": schedules}

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolution(x.mT, weight, bias, "silu", **options).mT

    def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        if beta is None:
            return dispatch.scan(q[0], k[0], v[0], g[0], None, schedules)[None]
        return gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **options)[0]

    return Functions(convolve, scan)


def flat_functions(lengths: list[int], device: torch.device) -> Functions:
    """Return flash-linear-attention's functions for sequences; on the CPU treepack's, for trees that do not branch."""
    bounds = np.cumsum([0, *lengths])
    if device.type == "cpu":
        return tree_functions(torch.from_numpy(np.repeat(bounds[1:], lengths)), device)
    there = torch.from_numpy(bounds).to(device)
    return Functions(
        lambda x, weight, bias: fla_convolve(x, weight, bias, "silu", there),
        lambda q, k, v, g, beta: fla_scan(q, k, v, g, beta, there),
    )


def split_heads(layer: Layer, mixed: Tensor) -> list[Tensor]:
    """Return q, k [1, N, Hk, K] and v [1, N, H, V] of the result of the convolution."""
    parts = mixed.tensor_split(np.cumsum(layer.channels)[:-1].tolist(), -1)
    return [
        torch.unflatten(x, -1, (heads, -1))
        for x, heads in zip(parts, (layer.key_heads, layer.key_heads, layer.heads), strict=True)
    ]


def compute(layer: Layer, inputs: Inputs, functions: Functions) -> dict[str, Tensor]:
    """Return the output of a layer, and the gradients of its inputs and of q, k and v."""
    q, k, v = split_heads(layer, functions.convolve(inputs.x, inputs.weight, inputs.bias))
    out = functions.scan(q, k, v, inputs.g, inputs.beta)
    named = {**inputs.leaves, "q": q, "k": k, "v": v}
    gradients = torch.autograd.grad(out, list(named.values()), inputs.do)
    return {"output": out.detach(), **dict(zip(named, gradients, strict=True))}


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return RMS of the difference over RMS of the exact result, by name."""
    return {name: float((found[name].double() - x).norm() / x.norm()) for name, x in exact.items()}


def paths_of(end: np.ndarray[Any, Any]) -> list[Tensor]:
    """Return the tokens of every root-to-leaf path."""
    parent = torch.from_numpy(parents_of(end))
    paths = []
    for leaf in np.flatnonzero(end == np.arange(1, len(end) + 1)).tolist():
        path = []
        while leaf >= 0:
            path.append(leaf)
            leaf = int(parent[leaf])
        paths.append(torch.tensor(path[::-1]))
    return paths


def measure_errors(
    layer: Layer, workload: Workload, implementations: list[str], device: torch.device, *, alone: bool
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the errors of flash-linear-attention if `alone`, then of each implementation on the tree."""
    inputs, end = draw_inputs(layer, workload.tokens, device), torch.from_numpy(workload.subtree_end)
    if alone:
        paths = paths_of(workload.subtree_end)
        lengths = [len(path) for path in paths]
        each = inputs.of(torch.cat(paths).to(device))
        chains = torch.from_numpy(np.repeat(np.cumsum(lengths), lengths))
        with use_implementation("torch"):
            exact = compute(layer, each.map(Tensor.double), tree_functions(chains, device))
            found = compute(layer, each, flat_functions(lengths, device))
        yield "alone", relative_errors(found, exact)
        del exact, found
    with use_implementation("torch"):
        exact = compute(layer, inputs.map(Tensor.double), tree_functions(end, device))
    for name in implementations:
        with use_implementation(name):
            yield name, relative_errors(compute(layer, inputs, tree_functions(end, device)), exact)


def error_table(name: str, errors: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the table of the errors of one layer, one row for each implementation."""
    columns = list(next(iter(errors.values())))
    yield f"| {name} | {' | '.join(columns)} | over alone |"
    yield "|---" * (len(columns) + 2) + "|"
    alone = errors.get("alone")
    for implementation, values in errors.items():
        cells = [f"{values[column]:.2e}" for column in columns]
        ratio = f"{max(values[c] / alone[c] for c in columns):.2f}" if alone else ""
        yield f"| {implementation} | {' | '.join(cells)} | {ratio} |"


def pack_paths(paths: list[int], most: int) -> list[list[int]]:
    """Return rows of sequences, longest first, of at most `most` tokens each unless one sequence has more."""
    # paths 5 4 3 with 8 -> [5], [4, 3]
    rows: list[list[int]] = [[]]
    for length in sorted(paths, reverse=True):
        if rows[-1] and sum(rows[-1]) + length > most:
            rows.append([])
        rows[-1].append(length)
    return rows


def stage_calls(
    layer: Layer, inputs: Inputs, functions: Functions
) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Return the forward pass of each stage, and the tensors that get its gradients."""
    mixed = torch.empty_like(inputs.x).normal_().requires_grad_()
    decays = [x for x in (inputs.g, inputs.beta) if x is not None]
    weights = [x for x in (inputs.weight, inputs.bias) if x is not None]

    def convolve() -> Tensor:
        return functions.convolve(inputs.x, inputs.weight, inputs.bias)

    def scan(source: Tensor = mixed) -> Tensor:
        q, k, v = split_heads(layer, source)
        return functions.scan(q, k, v, inputs.g, inputs.beta)

    return {
        "convolution": (convolve, [inputs.x, *weights]),
        "scan": (scan, [mixed, *decays]),
        "layer": (lambda: scan(convolve()), [inputs.x, *weights, *decays]),
    }


def time_stages(layer: Layer, inputs: Inputs, functions: Functions, repeats: int) -> Times:
    """Return median milliseconds of forward and backward of each stage, after two warm-ups."""
    device, times = inputs.x.device, {}
    for stage, (forward, leaves) in stage_calls(layer, inputs, functions).items():
        turns = []
        for turn in range(repeats + 2):
            begin = mark(device)
            out = forward()
            middle = mark(device)
            torch.autograd.grad(out, leaves, inputs.do if stage != "convolution" else inputs.x.detach())
            end = mark(device)
            synchronize(device)
            if turn > 1:
                turns.append((between(begin, middle), between(middle, end)))
            del out
        forward_ms, backward_ms = (statistics.median(column) for column in zip(*turns, strict=True))
        times[stage] = (forward_ms, backward_ms)
    return times


def measure_times(
    layer: Layer, workload: Workload, implementations: list[str], device: torch.device, options: argparse.Namespace
) -> dict[str, Times]:
    """Return the times of flat sequences, summed over their rows, and of each implementation on the tree."""
    total = dict.fromkeys(STAGES, (0.0, 0.0))
    rows = pack_paths(workload.paths.tolist(), options.flat_row)
    inputs = draw_inputs(layer, max(map(sum, rows)), device)
    for lengths in rows:
        part = inputs.of(slice(0, sum(lengths)))
        with use_implementation("torch" if device.type == "cpu" else "auto"):
            times = time_stages(layer, part, flat_functions(lengths, device), options.repeats)
        total = {stage: (a + times[stage][0], b + times[stage][1]) for stage, (a, b) in total.items()}
        del part
    del inputs
    results = {"flat": total}
    inputs = draw_inputs(layer, workload.tokens, device)
    functions = tree_functions(torch.from_numpy(workload.subtree_end), device)
    for name in implementations:
        with use_implementation(name):
            results[name] = time_stages(layer, inputs, functions, options.repeats)
    return results


def time_rows(name: str, workload: Workload, times: dict[str, Times]) -> Iterator[str]:
    """Yield the rows of the table of times."""
    ideal = workload.tokens_flat / workload.tokens
    for stage in STAGES:
        flat = sum(times["flat"][stage])
        for implementation, measured in times.items():
            forward, backward = measured[stage]
            cells = [name, workload.name, stage, implementation, f"{forward:.2f}", f"{backward:.2f}"]
            if implementation != "flat":
                speedup = flat / (forward + backward)
                cells += [f"{speedup:.2f}", f"{ideal:.2f}", f"{speedup / ideal:.2f}"]
            yield f"| {' | '.join(cells + [''] * (9 - len(cells)))} |"


def row_workloads(path: Path) -> list[Workload]:
    """Return the rows of a file of `training_rows` as workloads."""
    rows = load_rows(path)
    return [
        Workload(
            f"{path.stem}:{row.row_id}",
            row.subtree_end.long().numpy(),
            (row.position_ids[row.trajectory_ends] + 1).numpy(),
        )
        for row in rows
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--workloads", default="star-4k,agent-64k,caterpillar", help="comma separated, or none")
    parser.add_argument("--rows", type=Path, action="append", default=[], help="file of training_rows.py; repeatable")
    parser.add_argument("--implementations", default="fla,triton", help="on the tree: fla, triton, torch")
    parser.add_argument("--error-tokens", type=int, default=4096, help="tokens of the tree for the errors")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--flat-row", type=int, default=65_536, help="tokens of a flat row")
    parser.add_argument("--unchecked-fla", action="store_true", help="lift the refusal of flash-linear-attention")
    parser.add_argument("--fla-shapes", type=int, help="shapes that flash-linear-attention may try for each kernel")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def read_cases(options: argparse.Namespace) -> tuple[dict[str, Layer], Workload, list[Workload]]:
    """Return the layers, the tree for the errors, and the workloads for the times."""
    if options.dry_run:
        tiny = star("star", 20, 2, 10)
        return TINY, tiny, [tiny]
    names = [] if options.workloads == "none" else options.workloads.split(",")
    workloads = [make_workload(name) for name in names]
    workloads += [each for path in options.rows for each in row_workloads(path)]
    tree = agent_tree("agent", options.error_tokens, seed=7)
    return {name: LAYERS[name] for name in options.layers.split(",")}, tree, workloads


def main(arguments: list[str] | None = None) -> None:
    """Measure errors and times of every layer, and print the tables."""
    options = parse(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    implementations = options.implementations.split(",")
    reason = None if options.dry_run else obstacle_of_fla()
    if options.dry_run:
        mend_interpreter()
        options.repeats, implementations = 1, ["torch", "triton"]
    elif reason is not None:
        if not options.unchecked_fla:
            raise SystemExit(f"flash-linear-attention {reason}; or pass --unchecked-fla to take its times only")
        implementations = [name for name in implementations if name != "fla"]
    name = device_name(dry=options.dry_run)
    remark = f"; flash-linear-attention {reason}: times without errors" if reason else ""
    if options.fla_shapes is not None and not options.dry_run:
        remark += f"; flash-linear-attention tries {fewer_shapes(options.fla_shapes)} shapes of each kernel"
    print(f"{name}, torch {torch.__version__}, commit {commit()}{remark}\n", flush=True)
    layers, tree, workloads = read_cases(options)
    for layer_name, layer in layers.items():
        errors = dict(measure_errors(layer, tree, implementations, device, alone=reason is None))
        print("\n".join(error_table(f"{layer_name}, {tree.tokens:,} tokens", errors)) + "\n", flush=True)
    print(
        "| layer | workload | stage | | forward | backward, ms | speed-up | ideal | efficiency |\n" + "|---" * 9 + "|"
    )
    with refusal_lifted(reason is not None):
        for layer_name, layer in layers.items():
            for workload in workloads:
                times = measure_times(layer, workload, implementations, device, options)
                print("\n".join(time_rows(layer_name, workload, times)), flush=True)


if __name__ == "__main__":
    main()
