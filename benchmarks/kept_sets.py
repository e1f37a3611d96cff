"""The kernels of the output layer's statistics with kept sets, against the same without sets, on one GPU.

    python benchmarks/kept_sets.py [--targets 8192] [--words 151936] [--repeats 20]
    python benchmarks/kept_sets.py --dry-run      tiny sizes on the CPU, in torch

Logits are bfloat16, and each state predicts one target. Sets have 1 to 1,000 random ids; "mixed" leaves each fourth
target without a set. A pass is `token_statistics`, then `turn_into_gradients` with slopes of log-probabilities and
entropies. Before the times, both are compared with a dense softmax in float64, and two runs must agree in every bit.
The ways take turns within one run; the copy that restores the logits is not timed.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch
from measure import commit, device_name, seconds_of
from torch import Tensor

from treepack.data.ragged_tensor import RaggedTensor
from treepack.model.head.head_chunks import ChunkTargets
from treepack.model.head.logit_map import LogitMap, TargetSlopes, TargetStatistics
from treepack.model.head.token_statistics import token_statistics, turn_into_gradients

LARGEST = 1000  # ids of a set
MAX_RATIO = 1.15


def inputs_of(device: torch.device, num: int, words: int) -> tuple[Tensor, ChunkTargets, TargetSlopes]:
    """Return logits [num, words], targets without sets, and slopes."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(num, words, generator=generator, device=device).mul_(3).bfloat16()
    every = torch.arange(num + 1, dtype=torch.int32, device=device)
    labels = torch.randint(words, (num,), generator=generator, device=device)
    targets = ChunkTargets(every[:-1].long(), every[:-1], every, labels)
    slopes = torch.randn(2, num, generator=generator, device=device)
    return x, targets, TargetSlopes(slopes[0], slopes[1])


def with_sets(targets: ChunkTargets, words: int, sizes: Tensor) -> ChunkTargets:
    """Return the targets with random sets of about `sizes` ids, int64 [num]; 0 is the whole vocabulary."""
    device, num = targets.labels.device, len(targets.labels)
    generator = torch.Generator(device).manual_seed(1)
    owners = torch.repeat_interleave(torch.arange(num, device=device), sizes)
    ids = torch.randint(words, (len(owners),), generator=generator, device=device)
    first = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), sizes.cumsum(0)])[:-1]
    ids[first[sizes > 0]] = targets.labels[sizes > 0]
    # As one key per pair; ids that a set has twice are removed.
    keys = torch.unique(owners * words + ids)
    counts = torch.bincount(keys // words, minlength=num)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), counts.cumsum(0)])
    return replace(targets, kept=RaggedTensor((keys % words).int(), offsets))


def one_pass(x: Tensor, targets: ChunkTargets, slopes: TargetSlopes) -> TargetStatistics:
    """Compute the statistics, and overwrite the logits with their gradients."""
    found = token_statistics(x, targets, LogitMap(), with_entropies=True)
    turn_into_gradients(x, targets, LogitMap(), found, slopes)
    return found


def dense(x: Tensor, targets: ChunkTargets, slopes: TargetSlopes) -> list[Tensor]:
    """Return log-probabilities, entropies and gradients of a dense renormalised softmax in float64."""
    assert targets.kept is not None
    z = x.double().requires_grad_()
    inside = (targets.kept.sizes == 0)[:, None].expand(x.shape).clone()
    inside[targets.kept.owners, targets.kept.values.long()] = True
    logs = z.masked_fill(~inside, -torch.inf).log_softmax(-1)
    logprobs = logs.gather(-1, targets.labels[:, None]).squeeze(-1)
    entropies = -(logs.exp() * logs.masked_fill(~inside, 0)).sum(-1)
    assert slopes.logprobs is not None
    assert slopes.entropies is not None
    torch.autograd.backward(((logprobs * slopes.logprobs) + (entropies * slopes.entropies)).sum())
    assert z.grad is not None
    return [logprobs.detach(), entropies.detach(), z.grad]


def check(device: torch.device, words: int) -> None:
    """Compare with the dense softmax, and two runs with each other.

    Raises:
        SystemExit: an error is above that of bfloat16, or two runs differ in a bit.
    """
    x, targets, slopes = inputs_of(device, 64, words)
    targets = with_sets(targets, words, sizes_of("mixed", 64, words, device))
    exact, runs = dense(x, targets, slopes), []
    for _ in range(2):
        logits = x.clone()
        found = one_pass(logits, targets, slopes)
        runs.append([found.logprobs, found.entropies, logits])
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(runs[0], exact, strict=True)]
    print(f"# relative errors of log-probabilities, entropies and gradients: {', '.join(f'{e:.1e}' for e in errors)}")
    if not (max(errors[:2]) < 1e-4 and errors[2] < 5e-3):
        raise SystemExit(f"kept sets: errors {errors}")
    if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
        raise SystemExit("kept sets: two runs differ")


def sizes_of(way: str, num: int, words: int, device: torch.device) -> Tensor:
    """Return the ids of each set, int64 [num]."""
    largest = min(LARGEST, words // 2)
    mixed = torch.arange(num, device=device) * 7919 % largest + 1
    if way == "mixed":  # each fourth target has no set
        return torch.where(torch.arange(num, device=device) % 4 == 3, 0, mixed)
    return mixed if way == "1 to 1000" else torch.full_like(mixed, min(int(way), largest))


def measure(device: torch.device, num: int, words: int, repeats: int) -> list[str]:
    """Return the lines of the table."""
    x, targets, slopes = inputs_of(device, num, words)
    ways: dict[str, ChunkTargets] = {"no sets": targets}
    for way in ("1", "50", "1000", "1 to 1000", "mixed"):
        ways[way] = with_sets(targets, words, sizes_of(way, num, words, device))
    logits, times = torch.empty_like(x), {way: list[float]() for way in ways}
    for _ in range(repeats + 1):
        for way, own in ways.items():
            logits.copy_(x)

            def call(own: ChunkTargets = own) -> Any:
                return one_pass(logits, own, slopes)

            times[way].append(seconds_of(device, call))
    spent = {way: statistics.median(each[1:]) for way, each in times.items()}  # the first compiles
    lines = []
    for way, seconds in spent.items():
        ratio = seconds / spent["no sets"]
        verdict = "" if ratio <= MAX_RATIO else f" above {MAX_RATIO}"
        lines.append(f"| {way} | {1e3 * seconds:.3f} | {ratio:.2f}{verdict} |")
    return lines


def main() -> None:
    """Check, then time every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=8192)
    parser.add_argument("--words", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    num, words = (64, 500) if arguments.dry_run else (arguments.targets, arguments.words)
    print(f"# {device_name(dry=arguments.dry_run)}, commit {commit()}, {num} targets, {words} words, bfloat16")
    check(device, words)
    print("| ids of a set | ms | times no sets |\n|---|---|---|")
    for line in measure(device, num, words, 2 if arguments.dry_run else arguments.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
