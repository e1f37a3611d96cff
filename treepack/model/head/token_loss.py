r"""Losses of a packed row from its hidden states, without the logits of the whole row in memory.

    weighted_nll    weighted next-token cross-entropy: one scalar
    nll_of_rows     the same, with the part of each row of a joined batch
    tree_logprobs   log-probability and entropy of every chosen token, for objectives over terms (`objectives`)

    token j is predicted from the hidden state of parent[j]

           0 - 1 - 2        targets  1  2  3  4       tokens 1 and 3 are both predicted from
            \              from     0  1  0  3       hidden[0]: autograd sums the branches there
              3 - 4

`weighted_nll` is the SUM of loss_weight * nll. The caller divides it by the denominator of the optimiser step, which is
the sum of loss_weight over all rows of the step. A mean per row would give a mean of means.

`tree_logprobs` divides the logits by the temperature at which a token was sampled, because ratios and gradients of
reinforcement learning are about the distribution that was sampled. `weighted_nll` has no temperature.

Targets are processed in chunks of `chunk`: only the logits of one chunk are in memory at a time, in forward and in
backward, and a state with several children has its logits computed once. `weighted_nll` and `priced_terms`, an
objective whose slope at a token depends on that token alone, compute their gradients in the forward pass, from the same
logits. `tree_logprobs` serves every other objective, and computes the logits again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.teacher_law import TeacherLaw
from treepack.data.transfers import sent
from treepack.errors import TreepackError
from treepack.model.head.head_chunks import invert
from treepack.model.head.head_gradients import HeadOptions, TargetPrices, priced_loss, token_scores
from treepack.model.head.logit_map import OutputLayer, TargetSlopes
from treepack.model.head.shared_targets import HeadTargets, no_logits

# Targets whose logits are in memory at a time: enough rows for a fast product, 1.2 GB in float32 with 151,936 words.
CHUNK = 2048


def weighted_nll(
    hidden: Tensor, layer: OutputLayer, targets: tuple[Tensor, Tensor, Tensor], *, chunk: int = CHUNK
) -> Tensor:
    """Return the sum over the row's tokens j with loss_weight[j] != 0 of loss_weight[j] * nll(j | hidden[parent[j]]).

    Arguments and errors are as in `nll_of_rows`. The result is a float64 scalar, attached to `hidden` and the
    weights; 0 for a row without targets.
    """
    return nll_of_rows(hidden, layer, targets, chunk=chunk)[0]


def nll_of_rows(
    hidden: Tensor,
    layer: OutputLayer,
    targets: tuple[Tensor, Tensor, Tensor],
    *,
    edges: Sequence[int] | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return `weighted_nll` of a batch of n rows, and the part of each row.

    Matrix products run in the dtype of `hidden` (or of autocast). The softmax runs in float64 for float64 logits and in
    float32 for all others. Chunks are summed in float64.

    Args:
        hidden: [T, D], after the model's final norm.
        layer: the output layer.
        targets: input_ids int64 [T], parent int64 [T] and loss_weight float [T] of the row. If the last two are on the
            CPU, nothing waits for a GPU.
        edges: n + 1 numbers; row i has the targets edges[i] .. edges[i + 1] - 1. None for one row.
        chunk: targets whose logits are in memory at a time.

    Returns:
        a float64 scalar, attached to `hidden` and the weights, and float64 [n] without a graph.

    Raises:
        IndexError, RuntimeError: if a root has weight; the type depends on the device.
        TreepackError: loss_weight requires a gradient.
    """
    input_ids, parent, loss_weight = targets
    if loss_weight.requires_grad and torch.is_grad_enabled():
        raise TreepackError(
            "weighted_nll: loss_weight requires a gradient, which is not computed; detach it, or weigh tree_logprobs"
        )
    # loss_weight [0, 1, 2, 0, .5] -> tokens [1, 2, 4]; with parent [-1, 0, 1, 0, 3] -> sources [0, 1, 3]
    tokens = loss_weight.nonzero().squeeze(-1)
    if len(tokens) == 0:
        nothing = no_logits(hidden, layer).sum(dtype=torch.float64)
        return nothing, nothing.detach().new_zeros(1 if edges is None else len(edges) - 1)

    chosen = sent(loss_weight.index_select(0, tokens), hidden.device)

    def prices(order: Tensor) -> TargetPrices:
        weights = chosen.index_select(0, order)
        parts = torch.split(weights, chunk)

        def value(logprobs: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
            losses = -(logprobs.double() * weights)
            total = losses.sum()
            if edges is None:
                return total, total[None]
            return total, _sums_of_rows(losses.new_zeros(len(tokens)).index_copy_(0, order, losses), edges)

        # In the dtype of the log-probabilities, into which the subtraction casts the weights.
        return TargetPrices(
            lambda number, found: TargetSlopes(torch.zeros_like(found.logprobs).sub_(parts[number]), None), value
        )

    return priced_terms(hidden, layer, (tokens, input_ids, parent), prices, with_entropies=False, chunk=chunk)


def _sums_of_rows(values: Tensor, edges: Sequence[int]) -> Tensor:
    """Return the sum of values[edges[i] : edges[i + 1]] for each row i, in an order that is equal in every run."""
    # values [1 2 3], edges (0, 2, 3) -> [3 3]
    return torch.stack([values[begin:end].sum() for begin, end in pairwise(edges)])


@torch.no_grad()
def target_metrics(
    hidden: Tensor, layer: OutputLayer, targets: tuple[Tensor, Tensor, Tensor], *, chunk: int = CHUNK
) -> Tensor:
    """Return the sums of loss_weight * entropy and of loss_weight * [the target has the largest logit], float64 [2].

    Arguments are as in `nll_of_rows`. The logits are computed again, without gradients.
    """
    input_ids, parent, loss_weight = targets
    share, tokens = layer.share, loss_weight.nonzero().squeeze(-1)
    if share is not None:
        _, (tokens, input_ids, parent) = share.own_targets((tokens, input_ids, parent))
    sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)
    for part in torch.split(tokens, chunk):
        states = hidden.index_select(0, sent(parent.index_select(0, part), hidden.device))
        logits = layer.logits(states)
        logprobs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        is_first = logits.argmax(-1) == input_ids.index_select(0, sent(part, hidden.device))
        weights = sent(loss_weight.index_select(0, part), hidden.device).double()
        sums += torch.stack([(weights * entropies).sum(), (weights * is_first).sum()])
    return sums if share is None else share.total(sums)


def priced_terms(
    hidden: Tensor,
    layer: OutputLayer,
    targets: tuple[Tensor, Tensor, Tensor],
    prices: Callable[[Tensor], TargetPrices],
    *,
    temperature: Tensor | float = 1.0,
    kept: RaggedTensor | None = None,
    with_entropies: bool = True,
    teacher: tuple[TeacherLaw, float] | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return a loss with slopes that are computed chunk by chunk, and further sums; for one backward pass only.

    Args:
        hidden: [T, D], after the model's final norm.
        layer: the output layer.
        targets: int64 tokens [n], at least one, input_ids [T] and parent [T], as in `tree_logprobs`. If tokens and
            parents are on the CPU, nothing waits for a GPU.
        prices: gets the numbers of the tokens in the order of the chunks, int64 [n], and returns their price.
        temperature: as in `tree_logprobs`.
        kept: as in `tree_logprobs`.
        with_entropies: False if the price reads no entropies.
        teacher: as in `tree_scores`.
        chunk: tokens of a chunk.

    Returns:
        a float64 scalar, attached to `hidden` and the weights, and float64 [k] without a graph.
    """
    wanted = HeadTargets(targets, _divisors(hidden, len(targets[0]), temperature), kept, teacher)
    places, order, options = _own_chunks(wanted, hidden, layer, with_entropies=with_entropies, chunk=chunk)
    price = prices(order if places is None else places.index_select(0, order))
    if options.chunks:
        loss, numbers = priced_loss(hidden, layer.weight, layer.bias, options, price)
    else:
        empty = no_logits(hidden, layer).sum(-1)
        loss, none = empty.sum(dtype=torch.float64), empty.detach()
        numbers = price.value(none, none, None if teacher is None else none)[1]
    return (loss, numbers) if layer.share is None else (layer.share.total(loss), layer.share.total(numbers))


def tree_logprobs(
    hidden: Tensor,
    layer: OutputLayer,
    targets: tuple[Tensor, Tensor, Tensor],
    *,
    temperature: Tensor | float = 1.0,
    kept: RaggedTensor | None = None,
    with_entropies: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each chosen token given its path, and the entropy of its distribution.

    The distribution is softmax(logits / temperature), over the kept ids if there are some. Each is computed once, even
    if many trajectories share the token. Both are differentiable. They are float64 for float64 hidden states and
    float32 for all others.

    Args:
        hidden: [T, D], after the model's final norm.
        layer: the output layer.
        targets: int64 tokens [n], input_ids [T] and parent [T]. The tokens are row indices without roots, and one may
            occur several times. If tokens and parents are on the CPU, nothing waits for a GPU.
        temperature: one for all, or float [n], one for each of the tokens; all above 0.
        kept: n lists of token ids, see `ChunkTargets`; on the device of the labels, which it waits for.
        with_entropies: if False, the entropies are not computed, and NaN takes their place.
        chunk: tokens whose logits are in memory at a time.

    Returns:
        log-probabilities [n] and entropies [n], in nats; attached to `hidden` even if n is 0.
    """
    options: dict[str, Any] = {"temperature": temperature, "kept": kept, "with_entropies": with_entropies}
    return tree_scores(hidden, layer, targets, **options, chunk=chunk)[:2]


def tree_scores(
    hidden: Tensor,
    layer: OutputLayer,
    targets: tuple[Tensor, Tensor, Tensor],
    *,
    temperature: Tensor | float = 1.0,
    kept: RaggedTensor | None = None,
    with_entropies: bool = True,
    teacher: tuple[TeacherLaw, float] | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `tree_logprobs`, and the divergences from a teacher [n], differentiable too; NaN without a teacher.

    `teacher` has the laws of the n tokens in their order, and beta (`objectives.distillation`).
    """
    if len(targets[0]) == 0:
        empty = no_logits(hidden, layer).sum(-1)
        return empty, empty, empty
    wanted = HeadTargets(targets, _divisors(hidden, len(targets[0]), temperature), kept, teacher)
    places, order, options = _own_chunks(wanted, hidden, layer, with_entropies=with_entropies, chunk=chunk)
    if options.chunks:
        scores = token_scores(hidden, layer.weight, layer.bias, options)
    else:
        scores = (no_logits(hidden, layer).sum(-1),) * 3
    inverse, share, count = invert(order), layer.share, len(targets[0])
    found = (each.index_select(0, inverse) for each in scores)
    logprobs, entropies, divergences = found if share is None else (share.whole(each, places, count) for each in found)
    return logprobs, entropies, divergences


def _own_chunks(
    wanted: HeadTargets, hidden: Tensor, layer: OutputLayer, *, with_entropies: bool, chunk: int
) -> tuple[Tensor | None, Tensor, HeadOptions]:
    """Return the numbers of this rank's targets, None for all; their order in chunks; and the chunks with options."""
    places = None
    if layer.share is not None:
        places, wanted = wanted.own(layer.share, hidden.device)
    order, chunks, teacher = wanted.split(chunk)
    return places, order, HeadOptions(chunks, layer.logit_map, with_entropies, teacher)


def _divisors(hidden: Tensor, count: int, temperature: Tensor | float) -> Tensor | None:
    """Return a temperature for each of `count` tokens; None if it is 1 for all."""
    if isinstance(temperature, Tensor):
        return temperature
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return None if temperature == 1 else hidden.new_full((count,), temperature, dtype=dtype)


def filled_temperature(temperature: Tensor | None, missing: float | None) -> Tensor | float:
    """Return `temperature` with `missing` in place of NaN, or `missing` if it is None; a `missing` of None means 1."""
    fill = 1.0 if missing is None else missing
    return fill if temperature is None else torch.nan_to_num(temperature, nan=fill)
