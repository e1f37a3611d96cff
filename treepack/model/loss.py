r"""Losses of a packed row from its hidden states, without ever holding the logits of the row.

    weighted_nll    weighted next-token cross-entropy: one scalar
    tree_logprobs   log-probability and entropy of every chosen token, for objectives over terms (`objectives`)

    token j is predicted from the hidden state of parent[j]

           0 - 1 - 2        targets  1  2  3  4       tokens 1 and 3 are both predicted from
            \              from     0  1  0  3       hidden[0]: autograd sums the branches there
              3 - 4

`weighted_nll` is the SUM of loss_weight * nll. The caller divides by the denominator of the optimiser step, which is
the sum of loss_weight over all of its rows, so that no mean of means arises.

Targets are taken `chunk` at a time under checkpointing: the logits of one chunk exist, in forward and in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

CHUNK = 2048


def weighted_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: tuple[Tensor, Tensor, Tensor],
    *,
    bias: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Sum over the row's tokens j with loss_weight[j] != 0 of loss_weight[j] * nll(j | hidden[parent[j]]).

    Products run in the dtype of `hidden` (or of autocast); the softmax runs in float64 for float64 and in float32
    otherwise, and chunks are summed in float64.

    Args:
        hidden: [T, D], after the model's final norm.
        weight: [V, D], the output embedding.
        targets: input_ids int64 [T], parent int64 [T] and loss_weight float [T] of the row.
        bias: [V], where the output layer has one.
        chunk: targets whose logits exist at a time.

    Returns:
        a float64 scalar; 0, still attached to `hidden`, for a row without targets.
    """
    input_ids, parent, loss_weight = targets
    chosen = loss_weight.nonzero().squeeze(-1)
    # index_select, unlike indexing, fails for the parent -1 of a root that carries weight by mistake.
    sources = parent.index_select(0, chosen)
    total = hidden.sum(dtype=torch.float64) * 0 if len(chosen) == 0 else hidden.new_zeros((), dtype=torch.float64)
    for part, source in zip(torch.split(chosen, chunk), torch.split(sources, chunk), strict=True):
        labels, weights = input_ids[part], loss_weight[part]
        total = total + checkpoint(_chunk_nll, hidden, source, weight, bias, labels, weights, use_reentrant=False)
    return total


def _chunk_nll(
    hidden: Tensor, source: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor
) -> Tensor:
    logits = linear(hidden.index_select(0, source), weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    nll = cross_entropy(logits, labels, reduction="none")
    return (nll.double() * weights).sum()


def tree_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    input_ids: Tensor,
    parent: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each chosen token given its path, and the entropy of the distribution that it is drawn from.

    Each is computed once, however many trajectories share the token; both are differentiable. In float64 for float64
    hidden states and in float32 otherwise.

    Args:
        hidden: [T, D], after the model's final norm.
        weight: [V, D], the output embedding.
        tokens: int64 [n], row indices of the chosen tokens; none may be a root.
        input_ids: int64 [T].
        parent: int64 [T].
        bias: [V], where the output layer has one.
        chunk: tokens whose logits exist at a time.

    Returns:
        log-probabilities [n] and entropies [n], in nats; attached to `hidden` even if n is 0.
    """
    sources, labels = parent.index_select(0, tokens), input_ids.index_select(0, tokens)
    if len(tokens) == 0:
        nothing = hidden[:0].sum(-1)
        nothing = nothing if nothing.dtype == torch.float64 else nothing.float()
        return nothing, nothing
    parts = [
        checkpoint(_chunk_logprobs, hidden, source, weight, bias, label, use_reentrant=False)
        for source, label in zip(torch.split(sources, chunk), torch.split(labels, chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    hidden: Tensor, source: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    logits = linear(hidden.index_select(0, source), weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    found: tuple[Tensor, Tensor] = _TokenStatistics.apply(logits, labels)  # type: ignore[no-untyped-call]
    return found


class _TokenStatistics(torch.autograd.Function):
    """Log-probability of the labels and entropy of each row of logits; keeps the logits and nothing else of their size.

    With p = softmax(x), l = log p[label] and H = -sum p log p:

        dl/dx = onehot(label) - p        dH/dx = -p (log p + H)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        total = logits.logsumexp(-1)
        entropies = torch.special.entr((logits - total[:, None]).exp_()).sum(-1)
        ctx.save_for_backward(logits, labels, total, entropies)
        ctx.set_materialize_grads(False)
        return logits.gather(-1, labels[:, None]).squeeze(-1) - total, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        logits, labels, total, entropies = ctx.saved_tensors
        of_logprob, of_entropy = grads
        if of_logprob is None and of_entropy is None:
            return None, None
        p = (logits - total[:, None]).exp_()
        if of_entropy is None:
            assert of_logprob is not None
            result = p.mul_(-of_logprob[:, None])
        else:
            result = (torch.special.entr(p) - p * entropies[:, None]).mul_(of_entropy[:, None])
            if of_logprob is not None:
                result.addcmul_(p, of_logprob[:, None], value=-1)
        if of_logprob is not None:
            result.scatter_add_(-1, labels[:, None], of_logprob[:, None])
        return result, None
