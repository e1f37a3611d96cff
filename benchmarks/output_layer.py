"""The output layer and its loss on one GPU, forward and backward: gradients in the forward pass, or logits twice.

    python benchmarks/output_layer.py [--sizes 2048,4096] [--targets 32768] [--chunks 2048,8192] [--repeats 5]
    python benchmarks/output_layer.py --dry-run      tiny sizes on the CPU

Every target has a state of its own, except that every 64th state has two. Weights are float32 under bfloat16 autocast
with 151,936 words. Three ways, in turns within one run:

    priced         `loss.weighted_nll`: three products, gradients in the forward pass
    twice          `loss.tree_logprobs`, as for gspo and dpo: four products, one sum for the gradient of the weight
    checkpointed   a chunk under torch's checkpoint: four products, the weight and its gradient cast for each chunk

Before the times, the first two are compared with float64, and two runs must agree in every bit.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import seconds_of
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from treepack.model.experts.weights import cast_once
from treepack.model.head.head_chunks import split_targets
from treepack.model.head.head_gradients import adds_in_float32
from treepack.model.head.logit_map import LogitMap, OutputLayer, TargetSlopes
from treepack.model.head.token_loss import tree_logprobs, weighted_nll
from treepack.model.head.token_statistics import token_statistics, turn_into_gradients

Targets = tuple[Tensor, Tensor, Tensor]  # input_ids, parent and loss_weight of a row
Way = Callable[[Tensor, Tensor, Targets, int], Tensor]


class Statistics(torch.autograd.Function):
    """Log-probabilities of a chunk as a step of a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Any) -> Tensor:
        found = token_statistics(x, targets, LogitMap(), with_entropies=False)
        ctx.save_for_backward(x)
        ctx.rest = targets, found
        return found.logprobs

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        targets, found = ctx.rest
        grad = x.clone()
        turn_into_gradients(grad, targets, LogitMap(), found, TargetSlopes(slopes, None))
        return grad, None


def priced(hidden: Tensor, weight: Tensor, targets: Targets, chunk: int) -> Tensor:
    """Gradients in the forward pass."""
    return weighted_nll(hidden, OutputLayer(weight), targets, chunk=chunk)


def twice(hidden: Tensor, weight: Tensor, targets: Targets, chunk: int) -> Tensor:
    """Logits again in the backward pass."""
    input_ids, parent, weights = targets
    tokens, layer = weights.nonzero().squeeze(-1), OutputLayer(weight)
    logprobs, _ = tree_logprobs(hidden, layer, (tokens, input_ids, parent), with_entropies=False, chunk=chunk)
    return -(logprobs.double() * weights[tokens]).sum()


def checkpointed(hidden: Tensor, weight: Tensor, targets: Targets, chunk: int) -> Tensor:
    """Every chunk under torch's checkpoint."""
    input_ids, parent, weights = targets
    tokens = weights.nonzero().squeeze(-1)
    order, chunks = split_targets(parent[tokens], input_ids[tokens], None, chunk)
    total = hidden.new_zeros((), dtype=torch.float64)
    for each, part in zip(chunks, torch.split(weights[tokens][order], chunk), strict=True):

        def nll(hidden: Tensor, each: Any = each, part: Tensor = part) -> Tensor:
            x = linear(hidden.index_select(0, each.states), weight)
            logprobs: Tensor = Statistics.apply(x, each)  # type: ignore[no-untyped-call]
            return -(logprobs.double() * part).sum()

        total = total + checkpoint(nll, hidden, use_reentrant=False)
    return total


WAYS: dict[str, Way] = {"priced": priced, "twice": twice, "checkpointed": checkpointed}


def inputs_of(device: torch.device, size: int, words: int, count: int) -> tuple[Tensor, nn.Parameter, Targets]:
    """Return states, weight and `count` targets."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(count, size, generator=generator, device=device)
    weight = nn.Parameter(torch.randn(words, size, generator=generator, device=device) * 0.02)
    tokens = torch.arange(count, device=device)
    parent = tokens - 1 - (tokens % 64 == 5).long()
    weights = (tokens > 0).double() * (1 + tokens % 3)
    return (
        hidden.requires_grad_(),
        weight,
        (torch.randint(words, (count,), generator=generator, device=device), parent, weights),
    )


def run(way: str, hidden: Tensor, weight: Tensor, targets: Targets, chunk: int) -> list[Tensor]:
    """Return loss and gradients of one pass in both directions; the gradients stay where training leaves them."""
    for each in (hidden, weight):
        each.grad = None
    with cast_once():
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=hidden.dtype == torch.float32):
            loss = WAYS[way](hidden, weight, targets, chunk) / float(targets[2].sum())
        torch.autograd.backward(loss)
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def check(device: torch.device, words: int) -> None:
    """Compare with float64, and two runs with each other.

    Raises:
        SystemExit: an error is above 1 %, or two runs differ in a bit.
    """
    hidden, weight, targets = inputs_of(device, 256, words, 700)
    exact = run(
        "twice", hidden.detach().double().requires_grad_(), nn.Parameter(weight.detach().double()), targets, 512
    )
    for way in ("priced", "twice"):
        found, again = (run(way, hidden, weight, targets, 512) for _ in range(2))
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        print(
            f"# {way}: relative errors of loss, states and weight in bfloat16 {', '.join(f'{e:.1e}' for e in errors)}"
        )
        if not max(errors) < 1e-2:
            raise SystemExit(f"{way}: errors {errors}")
        if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
            raise SystemExit(f"{way}: two runs differ")


def measure(device: torch.device, way: str, sizes: tuple[int, int, int, int], repeats: int) -> str:
    """Return one line of the table; `sizes` are hidden size, words, targets and chunk."""
    size, words, count, chunk = sizes
    hidden, weight, targets = inputs_of(device, size, words, count)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [seconds_of(device, lambda: run(way, hidden, weight, targets, chunk)) for _ in range(repeats + 1)]
    spent = statistics.median(times[1:])  # the first compiles
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    rate = 6 * size * words * (count - 1) / spent / 1e12
    return f"| {size} | {chunk} | {way} | {1e3 * spent:.1f} | {rate:.0f} | {memory:.1f} |"


def main() -> None:
    """Check, then time every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2048,4096", help="hidden sizes, comma separated")
    parser.add_argument("--targets", type=int, default=32_768)
    parser.add_argument("--chunks", default="2048,8192")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    words, count = (500, 300) if arguments.dry_run else (151_936, arguments.targets)
    sizes, chunks = ("32,64", "64,300") if arguments.dry_run else (arguments.sizes, arguments.chunks)
    check(device, 500 if arguments.dry_run else 8192)
    if device.type == "cuda":
        print(f"# bfloat16 products are added to float32 sums in one kernel: {adds_in_float32(device, torch.bfloat16)}")
    print("| D | chunk | way | ms | TFLOP/s of three products | peak GiB |\n|---|---|---|---|---|---|", flush=True)
    for size in map(int, sizes.split(",")):
        for chunk in map(int, chunks.split(",")):
            for way in WAYS:
                print(measure(device, way, (size, words, count, chunk), arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
