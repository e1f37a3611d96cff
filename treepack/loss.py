r"""The loss of a packed row: weighted next-token cross-entropy, without ever holding the logits of the row.

    token j is predicted from the hidden state of parent[j]

           0 - 1 - 2        targets  1  2  3  4       tokens 1 and 3 are both predicted from
            \              from     0  1  0  3       hidden[0]: autograd sums the branches there
              3 - 4

In: hidden states of the row, the output weights, and the row's input_ids, parent and loss_weight. Out: the SUM of
loss_weight * nll. The caller divides by the denominator of the optimiser step, which is the sum of loss_weight over all
of its rows, so that no mean of means arises.

Targets are taken `chunk` at a time under checkpointing: the logits of one chunk exist, in forward and in backward.
"""

from __future__ import annotations

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
