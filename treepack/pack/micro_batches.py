"""Micro-batches for trainers that keep their own attention: siblings together, equal work on every rank. numpy only.

    sequences   0: a b c    1: x y    2: a b d    3: x z    4: a b c e        in any order

    sort, shared tokens with the one before    a b c (0)   a b c e (3)   a b d (2)   x y (0)   x z (1)
    cut if little is shared                    [0, 4, 2]                             [1, 3]

A micro-batch is a range of the sorted order, so a cut costs exactly the tokens that the sequences on its two sides
share (see `pack.plan.cuts`). The work of a micro-batch is counted in score pairs: a token costs
6 * hidden_size pairs in the linear layers (24 d^2 operations a layer, against 4 d for a pair).

Ranks take micro-batches R at a time and wait for the slowest rank, so the time of a step is the sum of the maxima over
R consecutive micro-batches, in falling order of work. Several limits on the work of one micro-batch are tried, and the
plan with the minimum time is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.pack.plan.cuts import RangeMeasure, best_starts, costs_in_order, range_measure, ranges_of
from treepack.pack.plan.problem import path_pairs
from treepack.trajectory import Int32, Int64
from treepack.trie.nodes import sort_sequences

_LIMITS_TO_TRY = 16  # limits on the work of a micro-batch, if there are several ranks
_HIDDEN_SIZE = 4096  # of a model of 7 to 8 billion parameters

_Sequences = Sequence[NDArray[Any]] | tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _SortedSequences:
    """The sequences in sorted order, with the tokens and the work of every range of them.

    Flat micro-batches share nothing. `shared` is the number of shared tokens in both cases.
    """

    order: list[int]
    tokens: RangeMeasure
    work: RangeMeasure
    shared: list[int]


def micro_batches(
    sequences: _Sequences, capacity: int, ranks: int = 1, *, flat: bool = False, hidden_size: int = _HIDDEN_SIZE
) -> list[list[int]]:
    """Divide sequences of token ids into micro-batches, and return the indices of the sequences of each one.

    Sequences with a common prefix stay together, in the order of their trie. Every index occurs exactly once. The list
    has a multiple of `ranks` entries: entry i belongs to rank `i % ranks`, which runs `result[rank::ranks]`. The work
    of the entries falls, so the `ranks` entries that run at the same time have nearly equal work. The sequences of a
    micro-batch do not depend on the order of the input, except that equal sequences are interchangeable.

    Args:
        sequences: a list of 1-D integer arrays; or a tuple (values, offsets): sequence i is
            `values[offsets[i] : offsets[i + 1]]`.
        capacity: maximum tokens of a micro-batch, where tokens of a shared prefix count once. A longer sequence gets
            a micro-batch of its own.
        ranks: number of data-parallel ranks. If there are too few sequences, some entries are empty; their ranks must
            still take part in the collective operations of the step.
        flat: the trainer computes each sequence alone, so `capacity` and work count every token of every sequence.
        hidden_size: width of the model. The larger it is, the less the score pairs of long sequences matter.

    Raises:
        TreepackError: an argument has another type or shape, or is below 1.
    """
    for name, value in (("capacity", capacity), ("ranks", ranks), ("hidden_size", hidden_size)):
        if value < 1:
            raise TreepackError(f"micro_batches: {name} is {value}; expected at least 1")
    batch = _sort(*_flatten(sequences), flat=flat, pair_weight=6 * hidden_size, capacity=capacity)
    plans = [_round_up(_cut(batch, limit), batch, ranks) for limit in _limits(batch, ranks)]
    # The first of equally fast plans has the highest limit, so the minimum of repeated work.
    starts = min(plans, key=lambda plan: (_time(plan, batch, ranks), len(plan)))
    ranges = sorted(ranges_of(starts, len(batch.order)), key=lambda ab: (-batch.work.amount(*ab), ab))
    batches = [batch.order[a:b] for a, b in ranges]
    return batches + [[] for _ in range(-len(batches) % ranks)]


def _flatten(sequences: _Sequences) -> tuple[Int32, Int64]:
    """Return the tokens of all sequences, and offsets int64 [num_sequences + 1].

    Raises:
        TreepackError: an array has another shape or dtype, or a token id is out of range.
    """
    if isinstance(sequences, tuple):
        if len(sequences) != 2 or any(np.ndim(part) != 1 for part in sequences):
            raise TreepackError(
                "micro_batches: a tuple must be (values, offsets), two 1-D arrays; pass sequences as a list"
            )
        arrays = [np.asarray(sequences[0])]
    else:
        arrays = [np.asarray(sequence) for sequence in sequences]
    for i, array in enumerate(arrays):
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise TreepackError(
                f"micro_batches: sequence {i} has shape {list(array.shape)} and dtype {array.dtype}; expected a 1-D "
                "array of integers"
            )
    # Sequences of 3, 0 and 2 tokens -> [0, 3, 3, 5]
    offsets = sequences[1] if isinstance(sequences, tuple) else np.cumsum([0, *map(len, arrays)])
    tokens = np.concatenate([np.zeros(0, np.int32), *arrays])
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < 2**31):
        raise TreepackError(f"micro_batches: token ids are {tokens.min()} to {tokens.max()}; expected 0 to 2**31 - 1")
    return tokens.astype(np.int32), np.asarray(offsets, np.int64)


def _sort(tokens: Int32, offsets: Int64, *, flat: bool, pair_weight: int, capacity: int) -> _SortedSequences:
    order, shared = sort_sequences(tokens, offsets)
    lengths = np.diff(offsets)[order]
    again = np.zeros_like(lengths) if flat else np.array(shared, np.int64)

    def work(length: Int64) -> Int64:
        return pair_weight * length + path_pairs(length)

    unlimited = int(work(lengths).sum())
    return _SortedSequences(
        order,
        range_measure(lengths, again, capacity),
        range_measure(work(lengths), work(again), unlimited),
        shared.tolist(),
    )


def _limits(batch: _SortedSequences, ranks: int) -> list[int]:
    """Return the limits on work to try, falling: without effect at first, then down to the work of one sequence."""
    work, num = batch.work, len(batch.order)
    if ranks == 1 or not num:
        return [work.limit]  # the time is the total work, which a limit cannot lower
    plan = ranges_of(_cut(batch, work.limit), num)
    highest = max(work.amount(a, b) for a, b in plan)
    # The work of any plan is at least that of the whole tree, and all ranks take part.
    lowest = max(
        max(work.amount(k, k + 1) for k in range(num)),
        -(-work.total[-1] // (-(-len(plan) // ranks) * ranks)),
    )
    ladder = np.linspace(highest, min(lowest, highest), _LIMITS_TO_TRY).astype(np.int64).tolist()
    return [work.limit, *dict.fromkeys(ladder)]


def _cut(batch: _SortedSequences, limit: int) -> list[int]:
    """Return the starts of micro-batches with minimum repeated work, then minimum number, then minimum cut prefixes.

    A micro-batch has at most the limit of tokens and `limit` work, unless it is a single sequence. O(sequences).
    """
    work = replace(batch.work, limit=limit)
    return best_starts([batch.tokens, work], costs_in_order(work.again, [1] * len(batch.order), batch.shared))


def _round_up(starts: list[int], batch: _SortedSequences, ranks: int) -> list[int]:
    """Split micro-batches, the largest work first, until `ranks` divides their number, if this is possible."""
    ranges = ranges_of(starts, len(batch.order))
    for _ in range(-len(ranges) % ranks):
        whole = [(a, b) for a, b in ranges if b - a > 1]
        if not whole:
            break
        a, b = max(whole, key=lambda ab: (batch.work.amount(*ab), ab))
        middle = min(range(a + 1, b), key=lambda k: (max(batch.work.amount(a, k), batch.work.amount(k, b)), k))
        ranges.remove((a, b))
        ranges += [(a, middle), (middle, b)]
    return sorted(a for a, _ in ranges)


def _time(starts: list[int], batch: _SortedSequences, ranks: int) -> int:
    """Return the sum, over groups of `ranks` micro-batches in falling order of work, of the maximum work."""
    work = sorted((batch.work.amount(a, b) for a, b in ranges_of(starts, len(batch.order))), reverse=True)
    # work [9, 8, 5, 4, 4], two ranks: (9, 8), (5, 4), (4) -> 9 + 5 + 4
    return sum(work[::ranks])
