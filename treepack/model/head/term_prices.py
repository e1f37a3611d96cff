"""Loss and slopes of an objective of single tokens, chunk by chunk of the tokens.

    terms of a row --prices_of_terms--> the price for `token_loss.priced_terms`: statistics of a chunk -> slopes

The terms of a chunk are gathered when its log-probabilities are there; no column is sorted as a whole. The gradient by
the log-probabilities is that of `policy_terms.term_sums`, computed by autograd on tensors of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from treepack.data.batch import TermTensors, select_terms
from treepack.model.head.head_chunks import invert
from treepack.model.head.head_gradients import TargetPrices
from treepack.model.head.logit_map import TargetSlopes, TargetStatistics
from treepack.objectives.distillation import with_teacher
from treepack.objectives.objective import Objective
from treepack.objectives.policy_terms import TERM_MEANS, term_sums
from treepack.objectives.term_slices import TERM_CHUNK, term_slices


def prices_of_terms(
    terms: TermTensors,
    factors: Tensor,
    objective: Objective,
    order: Tensor,
    *,
    chunk: int,
    term_chunk: int = TERM_CHUNK,
    edges: Sequence[int] | None = None,
    num_tokens: int | None = None,
) -> TargetPrices:
    """Return the price of the terms of a row or of joined rows. Waits for the GPU.

    Its sums are the result of `policy_terms.term_sums`, then the part of each row of the loss.

    Args:
        terms: the terms of the tokens, as `losses.weigh_terms` returns them.
        factors: float64 [K], f of the trajectories.
        objective: with `is_tokenwise`.
        order: int64 [n], the number of each token in the order of the chunks; terms of tokens without one are left out.
        chunk: tokens of a chunk.
        term_chunk: terms whose values are in memory at a time.
        edges: n + 1 numbers; row i has the terms edges[i] .. edges[i + 1] - 1. None for one row.
        num_tokens: the number of tokens that the terms are about; None if that is n.
    """
    assert objective.is_tokenwise, "the slopes of this loss depend on other tokens"
    rank, places, terms, edges = _place_terms(terms, order, edges, num_tokens)
    by_place = places.argsort(stable=True)
    places = places.index_select(0, by_place)
    # Sorted places [0 1 1 2], chunk 2 -> starts [0 2 4], cuts [0 3 4]: chunk 0 has the first three terms
    starts = torch.arange(0, len(order) + chunk, chunk, device=places.device)
    cuts = torch.searchsorted(places, starts).tolist()

    def slopes(number: int, statistics: TargetStatistics) -> TargetSlopes:
        logprobs = statistics.logprobs.detach().requires_grad_()
        entropies = statistics.entropies.detach().requires_grad_(objective.entropy > 0)
        divergences = statistics.divergences
        if divergences is not None:
            divergences = divergences.detach().requires_grad_(objective.distill > 0)
        given = (logprobs, entropies, divergences)
        read = [each for each in given if each is not None and each.requires_grad]
        totals = [torch.zeros_like(each) for each in read]
        for begin in range(cuts[number], cuts[number + 1], term_chunk):
            span = slice(begin, min(begin + term_chunk, cuts[number + 1]))
            part = replace(select_terms(terms, by_place[span]), index=places[span] - number * chunk)
            part = with_teacher(part, logprobs, divergences, objective)
            with torch.enable_grad():
                loss, _ = term_sums(logprobs, entropies, part, factors, None, objective, divergences)
            for total, slope in zip(totals, torch.autograd.grad(loss, read), strict=True):
                total += slope
        found = iter(totals)
        return TargetSlopes(*(next(found) if each is not None and each.requires_grad else None for each in given))

    def value(logprobs: Tensor, entropies: Tensor, divergences: Tensor | None) -> tuple[Tensor, Tensor]:
        # In the order of the terms, so that the size of a chunk changes no bit.
        own = rank.clamp(min=0)  # no term reads a token without a place
        logprobs, entropies = (_at(each, own) for each in (logprobs, entropies))
        divergences = None if divergences is None else _at(divergences, own)
        bounds = (0, len(terms.index)) if edges is None else edges
        losses = logprobs.new_zeros(len(bounds) - 1, dtype=torch.float64)
        sums = logprobs.new_zeros(len(TERM_MEANS), dtype=torch.float64)
        for i, (begin, end) in enumerate(pairwise(bounds)):
            for part in term_slices(terms, term_chunk, begin=begin, end=end):
                part = with_teacher(part, logprobs, divergences, objective)
                part_loss, part_sums = term_sums(logprobs, entropies, part, factors, None, objective, divergences)
                losses[i] += part_loss
                sums = sums + part_sums
        return losses.sum(), torch.cat([sums, losses])

    return TargetPrices(slopes, value)


def _place_terms(
    terms: TermTensors, order: Tensor, edges: Sequence[int] | None, num_tokens: int | None
) -> tuple[Tensor, Tensor, TermTensors, Sequence[int] | None]:
    """Return the place of each token in `order` or -1; and places, terms and edges of the terms that have a place."""
    if num_tokens is None:
        # order [2 0 1], index [0 0 1 2] -> places [1 1 2 0], terms sorted by place [3 0 1 2]
        rank = invert(order)
        return rank, rank.index_select(0, terms.index), terms, edges
    rank = order.new_full((num_tokens,), -1).scatter_(0, order, torch.arange(len(order), device=order.device))
    places = rank.index_select(0, terms.index)
    # Order of the tokens 0 and 2 of 3, index [0 1 1 2] -> places [0 -1 -1 1], kept [0 3]; edges [0 2 4] -> [0 1 2]
    kept = (places >= 0).nonzero().squeeze(-1)
    if edges is not None:
        edges = torch.searchsorted(kept, torch.tensor(edges, device=kept.device)).tolist()
    return rank, places.index_select(0, kept), select_terms(terms, kept), edges


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Return values[places], or zeros if `values` is empty."""
    return values.index_select(0, places) if len(values) else values.new_zeros(len(places))
