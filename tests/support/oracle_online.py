"""Slow twins of batches in memory: every sequence alone, and the forms in which trainers hold a batch.

random_batches   hypothesis: sequences that branch, repeat, are empty or of one token, and which tokens are scored
in_form          the same batch padded left, right or on both sides, as a nested tensor, or as a list
each_alone       log-probabilities and entropies of every sequence, by the model on this sequence alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

FORMS = ("left", "right", "both", "numpy", "jagged", "list")
_TOKENS = st.integers(0, 9)  # few, so that prefixes are shared by chance, too


@dataclass(frozen=True)
class MemoryBatch:
    """Sequences of token ids, and for each token whether it is scored."""

    sequences: list[list[int]]
    scored: list[list[bool]]

    @property
    def terms(self) -> list[tuple[int, int]]:
        """Every (sequence, token) that has a value, in order."""
        return [(i, j) for i, flags in enumerate(self.scored) for j, flag in enumerate(flags) if flag and j > 0]


@st.composite
def random_batches(draw: st.DrawFn, *, most: int = 6) -> MemoryBatch:
    """Up to `most` sequences, maybe none; each continues a prefix of an earlier one or none."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(0, most))):
        base = draw(st.sampled_from([[], *sequences]))
        cut = draw(st.integers(0, len(base)))
        sequences.append(base[:cut] + draw(st.lists(_TOKENS, max_size=6)))
    scored = [draw(st.lists(st.booleans(), min_size=len(each), max_size=len(each))) for each in sequences]
    return MemoryBatch(sequences, scored)


def in_form(values: Sequence[Sequence[Any]], form: str, *, fill: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return `values`, one for each token of each sequence, in a form of trainers, and the mask of padded forms."""
    rows = [torch.tensor(each, dtype=dtype) for each in values]
    if form == "list":
        return rows, None
    if form == "jagged":
        offsets = torch.tensor([0, *np.cumsum([len(each) for each in values]).tolist()])
        return torch.nested.nested_tensor_from_jagged(torch.cat([torch.zeros(0, dtype=dtype), *rows]), offsets), None
    length = max([len(each) for each in values], default=0) + 2
    padded = torch.full((len(rows), length), fill, dtype=dtype)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for i, row in enumerate(rows):
        start = {"left": length - len(row), "both": (length - len(row)) // 2}.get(form, 0)
        padded[i, start : start + len(row)] = row
        mask[i, start : start + len(row)] = 1
    return (padded.numpy(), mask.numpy()) if form == "numpy" else (padded, mask)


def as_lists(values: Any, mask: Any) -> list[Tensor]:
    """Return the values of each sequence, from the form of `in_form`."""
    if mask is not None:
        return [row[torch.as_tensor(keep).bool()] for row, keep in zip(values, mask, strict=True)]
    return list(values.unbind()) if isinstance(values, Tensor) else list(values)


def each_alone(model: Any, batch: MemoryBatch, temperature: Any = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Return log-probability and entropy of every scored token and 0 for the others; one forward pass per sequence.

    `temperature` is a number, or a list of numbers for each sequence.
    """
    logprobs, entropies = [], []
    for i, (sequence, flags) in enumerate(zip(batch.sequences, batch.scored, strict=True)):
        divisor = torch.tensor(
            temperature[i] if isinstance(temperature, list) else [temperature] * len(sequence), dtype=torch.float64
        )
        found = torch.zeros(2, len(sequence), dtype=torch.float64)
        if len(sequence) > 1:
            tokens = torch.tensor(sequence)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / divisor[1:, None].double()
            of_all = logits.log_softmax(-1)
            chosen = of_all.gather(-1, tokens[1:, None]).squeeze(-1)
            pair = torch.stack([chosen, -(of_all.exp() * of_all).sum(-1)])
            keep = torch.tensor(flags)[1:]
            found = torch.cat([found[:, :1], torch.where(keep, pair, torch.zeros_like(pair))], dim=1)
        logprobs.append(found[0])
        entropies.append(found[1])
    return logprobs, entropies
