"""Experts of a mixture on one GPU: the kernels against float64, then whole training steps and where their time goes.

    python benchmarks/experts.py [--layers 4] [--repeats 5] [--no-compile] [--profile 18]
    python benchmarks/experts.py --dry-run       tiny sizes on the CPU, without the checks of kernels

The model has the shape of Qwen3-30B-A3B with fewer layers and random weights; the row is the agent tree of 32,239
tokens of `workloads`. Every step recomputes its layers and counts head and loss. TFLOP/s are floating-point operations
of the active experts, nothing recomputed counted (`costs.model_cost`), per second of forward and backward; AdamW
is a column of its own. Needs only torch, triton, numpy and transformers.

    float32 experts   transformers' grouped products, float32 weights under bfloat16 autocast
    bfloat16 weights  the same with every weight in bfloat16, no autocast
    treepack          treepack's experts, float32 weights under bfloat16 autocast
    compiled          the same with `--compile`
    large chunks      the same with `--loss-chunk 8192`
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measure import seconds_of
from torch import Tensor
from torch.nn.functional import silu
from workloads import Workload, make_workload, star

from treepack.attention import IMPLEMENTATIONS, row_multiple
from treepack.costs.model_cost import FlopCount, operations, shape_of
from treepack.costs.presets import PRESETS
from treepack.data.batch import Batch, make_batch
from treepack.model.experts.interface import compute_experts, implementation_of
from treepack.model.experts.lora import ExpertAdapter
from treepack.model.experts.routing import sort_pairs
from treepack.model.experts.weights import cast_once
from treepack.model.forward import row_loss
from treepack.model.layers import adapt_layers
from treepack.model.load import read_config, with_attention
from treepack.model.loaded import LoadedModel

TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to train: name, experts implementation, dtype of the weights, compiled layers, targets per chunk."""

    name: str
    experts: str
    dtype: torch.dtype
    compiled: bool = False
    chunk: int = 2048


WAYS = (
    Way("float32 experts", "grouped_mm", torch.float32),
    Way("bfloat16 weights", "grouped_mm", torch.bfloat16),
    Way("treepack", "treepack", torch.float32),
    Way("compiled", "treepack", torch.float32, compiled=True),
    Way("large chunks", "treepack", torch.float32, compiled=True, chunk=8192),
)


def make_row(workload: Workload, vocabulary: int, multiple: int) -> Batch:
    """Return the workload as a row of random tokens; each with a parent is trained once for each path through it."""
    end, count = workload.subtree_end, workload.tokens
    parent, path = np.full(count, -1), list[int]()
    for token in range(count):
        while path and end[path[-1]] <= token:
            path.pop()
        parent[token] = path[-1] if path else -1
        path.append(token)
    scale, position = (end == np.arange(1, count + 1)).astype(np.int64), np.zeros(count, np.int64)
    leaves = np.flatnonzero(scale)
    for token in range(count - 1, 0, -1):
        if parent[token] >= 0:
            scale[parent[token]] += scale[token]
    for token in range(1, count):
        position[token] = position[parent[token]] + 1 if parent[token] >= 0 else 0
    row: Any = SimpleNamespace(
        row_id=0,
        step=None,
        input_ids=np.random.default_rng(0).integers(0, vocabulary, count),
        position_ids=position,
        parent=parent,
        subtree_end=end,
        scale=scale,
        loss_weight=np.where(parent >= 0, scale * 1.0, 0.0),
        trajectory_ids=[str(leaf) for leaf in leaves],
        trajectory_ends=leaves,
        terms=None,
        routes=None,
    )
    return make_batch(row, multiple=multiple)


def load(config: dict[str, Any], way: Way, device: torch.device) -> LoadedModel:
    """Return a model with random weights on the device, with the attention that treepack chooses."""
    from transformers import AutoConfig, AutoModelForCausalLM

    implementation_of(way.dtype)  # registers it
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**config).save_pretrained(folder)
        parsed, _ = read_config(folder)
    options: Any = {"dtype": way.dtype, "experts_implementation": way.experts}
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            parsed, attn_implementation=IMPLEMENTATIONS["reference"], **options
        ).eval()
    loaded = with_attention(LoadedModel(model, way.name, "reference", (), device=device), "auto", torch.bfloat16)
    adapt_layers(loaded.causal, checkpointing=True, compiled=way.compiled)
    loaded.model.train()
    return loaded


def forward_and_backward(loaded: LoadedModel, row: Batch, way: Way) -> float:
    """Run forward and backward of one row as the trainer does; return the mean loss."""
    autocast = torch.autocast(loaded.device.type, torch.bfloat16, enabled=way.dtype == torch.float32)
    with cast_once():
        with autocast:
            loss = row_loss(loaded, row, chunk=way.chunk) / row.total_weight
        torch.autograd.backward(loss)
    return float(loss.detach())


def measure(way: Way, config: dict[str, Any], row: Batch, work: float, arguments: argparse.Namespace) -> str:
    """Return one line of the table; with --profile, print the kernels of a step."""
    device = row.input_ids.device
    loaded = load(config, way, device)
    optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, fused=device.type == "cuda")
    times, updates, loss = [], [], 0.0
    began = time.perf_counter()
    for turn in range(arguments.repeats + 2):  # the first two turns compile, and make the states of AdamW
        optimiser.zero_grad(set_to_none=True)
        results: list[float] = []
        spent = seconds_of(device, lambda results=results: results.append(forward_and_backward(loaded, row, way)))  # type: ignore[misc]
        update = seconds_of(device, optimiser.step)
        loss = results[0]
        if turn == 1:
            print(f"# {way.name}: {time.perf_counter() - began:.0f} s before the first timed step", flush=True)
        if turn > 1:
            times.append(spent)
            updates.append(update)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    if arguments.profile and way.experts == "treepack" and device.type == "cuda":
        print_profile(f"{way.name}", lambda: forward_and_backward(loaded, row, way), arguments.profile)
    spent = statistics.median(times)
    cells = (way.name, f"{spent:.3f}", f"{work / spent / 1e12:.0f}", f"{statistics.median(updates):.3f}")
    return f"| {' | '.join(cells)} | {loss:.4f} | {memory:.0f} |"


def print_profile(name: str, run: Callable[[], Any], count: int) -> None:
    """Print the kernels that take most of the GPU's time in one call of `run`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    kernels: Any = sorted(seen.key_averages(), key=lambda each: -each.device_time_total)
    total = sum(each.device_time_total for each in kernels)
    print(f"# profile of {name}: {total / 1e3:.0f} ms in kernels")
    for each in kernels[:count]:
        print(f"#   {each.device_time_total / 1e3:7.1f} ms {each.count:5d} x  {each.key[:110]}")


class Experts(torch.nn.Module):
    """Gated experts as transformers stores them."""

    def __init__(self, count: int, size: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.has_gate = count, torch.nn.SiLU(), True
        self.gate_up_proj = torch.nn.Parameter(torch.randn(count, 2 * width, size, device=device) / size**0.5)
        self.down_proj = torch.nn.Parameter(torch.randn(count, size, width, device=device) / width**0.5)


def exact_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts one by one in the dtype of `hidden`: the slow twin."""
    out = torch.zeros_like(hidden)
    for e in range(module.num_experts):
        token, place = (index == e).nonzero(as_tuple=True)
        gate, up = (hidden[token] @ module.gate_up_proj[e].to(hidden.dtype).t()).chunk(2, -1)
        rows = (silu(gate) * up) @ module.down_proj[e].to(hidden.dtype).t()
        out = out.index_add(0, token, rows * weights[token, place, None])
    return out


def check(device: torch.device, tokens: int, count: int, size: int, width: int, top_k: int, rank: int) -> list[float]:
    """Return relative errors of output and gradients in bfloat16, against float64.

    Gradients of hidden, weights, gate_up and down; with a rank, those of adapters of random A and B instead of the last
    two.

    Raises:
        SystemExit: an error is above 1 %, or two runs differ in a bit.
    """
    from transformers.integrations import moe

    from treepack.model.experts.gated import gated_experts

    torch.manual_seed(tokens)
    module = Experts(count, size, width, device)
    type(module)._apply_gate = moe._default_apply_gate  # type: ignore[attr-defined]
    # Uneven: low numbers are chosen more often, and the last expert never.
    scores = torch.rand(tokens, count, device=device) * torch.linspace(2, 1, count, device=device)
    index = scores[:, :-1].topk(top_k, -1).indices
    weights = torch.rand(tokens, top_k, device=device).requires_grad_()
    hidden = torch.randn(tokens, size, device=device).requires_grad_()
    grad = torch.randn(tokens, size, device=device)
    stacked = (module.gate_up_proj, module.down_proj)
    first, second = (random_adapter(weight, rank) if rank else None for weight in stacked)
    adapters = first, second
    inputs = [hidden, weights, *(part for each in adapters for part in each or ())] + ([] if rank else [*stacked])

    def run() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            if rank:
                out = gated_experts(hidden, weights, *stacked, sort_pairs(index, count), torch.bfloat16, adapters)
            else:
                out = compute_experts(module, hidden, index, weights)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    results, again = run(), run()
    if not all(torch.equal(a, b) for a, b in zip(results, again, strict=True)):
        raise SystemExit("two runs differ")
    sums = [w.double() + (a.b.double() @ a.a.double() if a else 0) for w, a in zip(stacked, adapters, strict=True)]
    whole = SimpleNamespace(num_experts=count, gate_up_proj=sums[0], down_proj=sums[1])
    exact = exact_experts(whole, hidden.double(), index, weights.double())
    expected = [exact.detach(), *torch.autograd.grad(exact, inputs, grad.double())]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(results, expected, strict=True)]
    assert all(result.dtype == torch.float32 for result in results), "float32 in, float32 out"
    if not max(errors) < 1e-2:
        raise SystemExit(f"errors {errors}")
    return errors


def random_adapter(weight: Tensor, rank: int) -> ExpertAdapter:
    """Return an adapter of a stacked weight, whose sum is about as large as the weight."""
    count, out, size = weight.shape
    a, b = (torch.randn(*sizes, device=weight.device) for sizes in ((count, rank, size), (count, out, rank)))
    return ExpertAdapter((a / size**0.5).requires_grad_(), (b / rank**0.5).requires_grad_())


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", default=",".join(way.name for way in WAYS), help="comma separated names of the table")
    parser.add_argument("--profile", type=int, default=18, help="kernels in each profile; 0 for none")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Check the kernels, then measure every way and print the table."""
    arguments = parse()
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    config = {**PRESETS["qwen3-30b-a3b"], "num_hidden_layers": arguments.layers, **(TINY if arguments.dry_run else {})}
    config["max_position_embeddings"] = 1 << 17
    lines = []
    if device.type == "cuda":
        checked = [(1000, 8, 256, 192, 2), (3000, 16, 512, 768, 4), (77, 64, 128, 64, 8)]
        for sizes, rank in itertools.product(checked, (0, 16, 64)):
            errors = check(device, *sizes, rank)
            lines.append(
                f"# tokens, experts, D, I, k {sizes}, rank {rank}: errors {', '.join(f'{e:.1e}' for e in errors)}"
            )
            print(lines[-1], flush=True)
    workload = star("star", 30, 3, 40) if arguments.dry_run else make_workload("agent-32k")
    row = make_row(workload, config["vocab_size"], row_multiple("triton")).to(device)
    targets = int((row.loss_weight > 0).sum())
    work = operations(shape_of(config, name="mixture"), FlopCount(workload.tokens, workload.pairs, targets))
    lines.append(f"# {workload.tokens:,} tokens, {work / 1e12:.1f} TFLOP of active operations")
    lines.append("| way | forward and backward, s | TFLOP/s | AdamW, s | loss | GiB |\n|---|---|---|---|---|---|")
    names = arguments.ways.split(",")
    with torch.device("cpu") if arguments.dry_run else nullcontext():
        for way in WAYS:
            if way.name in names and not (arguments.dry_run and way.compiled):
                lines.append(measure(way, config, row, work, arguments))
                print(lines[-1], flush=True)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
