"""The capacity of rows by expected time: candidates, the time and memory of each, and the choice.

    Trie --candidate_capacities--> longest trajectory, powers of two, largest tree
    rows of a plan, --waiting--> time of the slowest rank over the mean of the ranks, with the launches of passes
    carried_report lines, waiting --estimate_capacities--> CapacityEstimate, ... --choose_estimate--> one of them

The expected time is the operations of the rows, including repeated ones, at the rate of the device, over the number of
ranks, times the waiting. Long rows share more; short rows divide better among ranks and need less memory.
The trainer joins rows into passes, so short rows cost launches only if a step has too few tokens for a full pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.analysis.glossary import readable_time
from treepack.costs.limits import PASS_TOKENS
from treepack.pack.capacity import USUAL_CAPACITIES
from treepack.trajectory import Float64, Int64
from treepack.trie.trie import Trie

# Capacities whose expected time is at most this share above the minimum are as good as it.
NEAR = 0.03
# Of these, the smallest from this number of tokens on is chosen: the usual 8 rows of a training step are then as many
# tokens as trainers take, and shorter rows gain nothing.
USUAL = USUAL_CAPACITIES[0]
_SHORTEST = 1024  # the first power of two that is a candidate
# Tokens of a training step for each rank: 8 rows of 16,384 tokens, as the trainer takes by default. Every capacity is
# compared with steps of so many tokens, or of one row for each rank if rows are longer.
STEP_TOKENS = 131_072
# Training steps from which the waiting is estimated.
_MAX_STEPS = 256
_SEED = 0  # of the order of the rows, which the trainer shuffles


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """The expected time and memory of rows of `capacity` tokens.

    Attributes:
        capacity: maximum number of tokens of a row.
        num_left_out: trajectories that are longer.
        num_rows: number of rows.
        tokens_packed: their tokens, N_pack.
        flops: floating-point operations of one pass over the data, none of them twice.
        seconds: expected time of one pass over the data on all ranks.
        waiting: time of the slowest rank over the mean of the ranks, at least 1.
        carry: tokens of a piece if rows in pieces are faster or the only ones that fit, else None.
        num_bytes: memory of one GPU, None if it is not known.
        fits: False if it is more than the device has; None if one of both is not known.
    """

    capacity: int
    num_left_out: int
    num_rows: int
    tokens_packed: int
    flops: float
    seconds: float
    waiting: float
    carry: int | None = None
    num_bytes: int | None = None
    fits: bool | None = None


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Rows of a plan: tokens int64 [num_rows], seconds alone float64 [num_rows], training step as a rank int64."""

    tokens: Int64
    seconds: Float64
    steps: Int64


def candidate_capacities(trie: Trie, *, smallest: int | None = None) -> list[int]:
    """Return the capacities to compare, ascending: longest trajectory, powers of two above it, and largest tree.

    A row of the largest tree shares all that can be shared, so no larger capacity computes fewer tokens. `USUAL` is
    always among the capacities if every trajectory fits it. `smallest` replaces the longest trajectory if rows have
    larger units.
    """
    longest = smallest or int(trie.lengths.max())
    largest = max(largest_tree(trie), longest)
    last = max(largest, USUAL)
    # longest 2,369 and largest 36,708 -> 2,369, 4,096, 8,192, 16,384, 32,768, 36,708
    powers = [1 << k for k in range(last.bit_length()) if max(longest + 1, _SHORTEST) <= 1 << k]
    return sorted({longest, *powers, largest})


def largest_tree(trie: Trie) -> int:
    """Return the tokens of the largest tree of `trie`."""
    starts = trie.node_start[:-1][trie.parent < 0]
    return int(np.diff(np.append(starts, trie.tokens_tree)).max())


def waiting(rows: RowCosts, *, ranks: int, launch_seconds: float) -> float:
    """Return the time of the slowest rank over the mean compute time of the ranks, at least 1.

    Rows of a training step are shuffled and divided into optimiser steps of about `STEP_TOKENS` tokens for each rank.
    Each rank gets rows of about the same time, the slowest rows first, and joins them into passes. A pass takes at
    least `launch_seconds`. At most `_MAX_STEPS` optimiser steps are counted.
    """
    size = max(ranks, round(STEP_TOKENS * ranks / float(rows.tokens.mean())))
    order = np.random.default_rng(_SEED).permutation(len(rows.tokens))
    order = order[np.argsort(rows.steps[order], kind="stable")]
    # steps [0, 0, 0, 1, 1], size 2 -> [0, 0], [0], [1, 1]
    groups = np.split(order, np.flatnonzero(np.diff(rows.steps[order])) + 1)
    steps = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
    taken = np.linspace(0, len(steps) - 1, min(_MAX_STEPS, len(steps))).astype(int)
    slowest = sum(_step_seconds(rows, steps[i], ranks, launch_seconds) for i in taken)
    compute = sum(float(rows.seconds[steps[i]].sum()) for i in taken)
    return max(1.0, slowest * ranks / compute)


def _step_seconds(rows: RowCosts, step: Int64, ranks: int, launch_seconds: float) -> float:
    """Return the time of the slowest rank in an optimiser step of the rows `step`."""
    loads = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for row in step[np.argsort(-rows.seconds[step], kind="stable")].tolist():
        load, rank = loads[0]
        shares[rank].append(row)
        heapq.heapreplace(loads, (load + float(rows.seconds[row]), rank))
    return max(_rank_seconds(rows.tokens[share], rows.seconds[share], launch_seconds) for share in shares if share)


def _rank_seconds(tokens: Int64, seconds: Float64, launch_seconds: float) -> float:
    """Return the time of the passes of one rank, which join rows up to `PASS_TOKENS`."""
    # Rows of more than half a pass are never joined with each other, and no pass is more than full.
    passes = max(int((tokens > PASS_TOKENS / 2).sum()), -(-int(np.minimum(tokens, PASS_TOKENS).sum()) // PASS_TOKENS))
    return max(float(seconds.sum()), passes * launch_seconds)


def estimate_time(line: Mapping[str, Any]) -> tuple[float, int | None, int, bool | None]:
    """Return seconds, tokens of a piece, bytes and whether they fit, of the fastest way that fits to train rows.

    `line` is a line of `carried_report`. Without a way that fits, it is rows in pieces. Equal times are rows without
    pieces.
    """
    ways = [
        (line["hours_rows"] * 3600, None, line["bytes_rows"], line["fits_rows"]),
        (line["hours_carry"] * 3600, line["carry"], line["bytes_carry"], line["fits_carry"]),
    ]
    fitting = [way for way in ways if way[-1] is not False]
    return min(fitting, key=lambda way: float(way[0])) if fitting else ways[1]


def choose_estimate(estimates: Iterable[CapacityEstimate]) -> CapacityEstimate:
    """Return the capacity to take: the smallest of at least `USUAL` near the minimum time, else the largest near it.

    It leaves out as few trajectories as possible, and its memory fits if that of any such capacity fits.
    """
    every = list(estimates)
    fewest = min(each.num_left_out for each in every)
    complete = [each for each in every if each.num_left_out == fewest]
    fitting = [each for each in complete if each.fits is not False] or complete
    limit = (1 + NEAR) * min(each.seconds for each in fitting)
    near = sorted((each for each in fitting if each.seconds <= limit), key=lambda each: each.capacity)
    return next((each for each in near if each.capacity >= USUAL), near[-1])


def choice_sentence(estimates: Sequence[CapacityEstimate], chosen: CapacityEstimate, *, where: str) -> str:
    """Return why `chosen` is the capacity: its time and memory, and the times of its neighbours.

    `where` names the model and the devices: "qwen3-8b on one h200".
    """
    text = f"{readable_time(chosen.seconds)} expected for {where}"
    if chosen.num_bytes is not None:
        text += f", {chosen.num_bytes / 2**30:.1f} GiB of a GPU"
    if chosen.carry is not None:
        text += f" with train --carry {chosen.carry}"
    ordered = sorted(estimates, key=lambda each: each.capacity)
    place = ordered.index(chosen)
    others = [
        f"{readable_time(each.seconds)} in rows of {each.capacity:,}{', too large' if each.fits is False else ''}"
        for each in ordered[max(place - 1, 0) : place + 2]
        if each is not chosen
    ]
    return text + (f"; {' and '.join(others)}" if others else "")
