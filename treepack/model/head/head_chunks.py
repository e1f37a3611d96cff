"""Targets of an output layer in chunks, sorted by the state that predicts them.

    sources [n], labels [n] --split_targets--> order [n], [ChunkTargets, ...]

The logits of a state with several children are computed once for all of them, unless they fall into two chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.transfers import sent


@dataclass(frozen=True)
class ChunkTargets:
    """The n targets of one chunk, which m states predict.

    Attributes:
        states: int64 [m], ascending: the row indices of the states.
        rows: int32 [n], ascending: the place in `states` of the state that predicts each target.
        first: int32 [m + 1]; state i predicts the targets first[i] .. first[i + 1] - 1.
        labels: int64 [n], the token id of each target.
        temperature: float [n], above 0; None for 1.
        kept: n ascending lists of token ids, int32, over which the softmax is taken; an empty list, or None, is the
            whole vocabulary. A list has its label.
    """

    states: Tensor
    rows: Tensor
    first: Tensor
    labels: Tensor
    temperature: Tensor | None = None
    kept: RaggedTensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if every state predicts one target."""
        return len(self.states) == len(self.labels)


def split_targets(
    sources: Tensor, labels: Tensor, temperature: Tensor | None, chunk: int, kept: RaggedTensor | None = None
) -> tuple[Tensor, list[ChunkTargets]]:
    """Sort targets by their states and cut them into chunks; waits for the GPU if `sources` or `kept` is there.

    Args:
        sources: int64 [n], the row index of the state that predicts each target; on the CPU or with `labels`.
        labels: int64 [n], on the device of the states.
        temperature: float [n]; None for 1.
        chunk: targets of a chunk.
        kept: see `ChunkTargets`; None for the whole vocabulary.

    Returns:
        int64 [n], the number of each target in the order of the chunks; and the chunks. All on the device of `labels`.
    """
    order = sources.argsort(stable=True)
    sources = sources[order]
    # sources [0 0 1 | 1 3], chunk 3 -> is_first [1 0 1 | 1 1], places [0 2 3 4], rows [0 0 1 | 2 3]
    is_first = torch.ones_like(sources, dtype=torch.bool)
    is_first[1:] = sources[1:] != sources[:-1]
    is_first[::chunk] = True
    places, rows = is_first.nonzero().squeeze(-1), is_first.cumsum(0) - 1
    edges = [*rows[::chunk].tolist(), len(places)]
    order, states, places, rows = (sent(each, labels.device) for each in (order, sources[places], places, rows))
    labels, temperature = labels[order], None if temperature is None else temperature[order]
    chunks, sets = [], None if kept is None else kept[order].split(chunk)
    for number, begin in enumerate(range(0, len(labels), chunk)):
        low, high, end = edges[number], edges[number + 1], min(begin + chunk, len(labels))
        own = places[low:high]  # [0 2], then [3 4]
        first = pad(own - begin, (0, 1), value=end - begin)  # [0 2 3], then [0 1 2]
        targets = slice(begin, end)
        chunks.append(
            ChunkTargets(
                states[low:high],
                (rows[targets] - low).int(),
                first.int(),
                labels[targets],
                None if temperature is None else temperature[targets],
                None if sets is None else sets[number],
            )
        )
    return order, chunks


def invert(order: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 [n]."""
    # order [2 0 1] -> [1 2 0]
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
