r"""Losses of a packed row from its hidden states, without the logits of the whole row in memory.

    weighted_nll    weighted next-token cross-entropy: one scalar
    tree_logprobs   log-probability and entropy of every chosen token, for objectives over terms (`objectives`)

    token j is predicted from the hidden state of parent[j]

           0 - 1 - 2        targets  1  2  3  4       tokens 1 and 3 are both predicted from
            \              from     0  1  0  3       hidden[0]: autograd sums the branches there
              3 - 4

`weighted_nll` is the SUM of loss_weight * nll. The caller divides it by the denominator of the optimiser step, which is
the sum of loss_weight over all rows of the step. A mean per row would give a mean of means.

`tree_logprobs` divides the logits by the temperature at which a token was sampled, because ratios and gradients of
reinforcement learning are about the distribution that was sampled. `weighted_nll` has no temperature.

Targets are processed in chunks of `chunk` under checkpointing: only the logits of one chunk are in memory at a
time, in forward and in backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from treepack.model.token_statistics import LogitMap, token_statistics

# Targets whose logits are in memory at a time: enough rows for a fast product, 1.2 GB in float32 with 151,936 words.
CHUNK = 2048


def weighted_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: tuple[Tensor, Tensor, Tensor],
    *,
    bias: Tensor | None = None,
    logit_map: LogitMap = LogitMap(),  # noqa: B008  # a frozen value
    chunk: int = CHUNK,
) -> Tensor:
    """Return the sum over the row's tokens j with loss_weight[j] != 0 of loss_weight[j] * nll(j | hidden[parent[j]]).

    Matrix products run in the dtype of `hidden` (or of autocast). The softmax runs in float64 for float64 logits and in
    float32 for all others. Chunks are summed in float64.

    Args:
        hidden: [T, D], after the model's final norm.
        weight: [V, D], the output embedding.
        targets: input_ids int64 [T], parent int64 [T] and loss_weight float [T] of the row.
        bias: [V], if the output layer has one.
        logit_map: the change that the model makes to the result of its output layer.
        chunk: targets whose logits are in memory at a time.

    Returns:
        a float64 scalar, attached to `hidden`; 0 for a row without targets.

    Raises:
        IndexError, RuntimeError: if a root has weight; the type depends on the device.
    """
    input_ids, parent, loss_weight = targets
    # loss_weight [0, 1, 2, 0, .5] -> chosen [1, 2, 4]; with parent [-1, 0, 1, 0, 3] -> sources [0, 1, 3]
    chosen = loss_weight.nonzero().squeeze(-1)
    sources = parent.index_select(0, chosen)
    # Without targets the 0 must still depend on `hidden`, so that backward gives zero gradients instead of an error.
    total = hidden.sum(dtype=torch.float64) * 0 if len(chosen) == 0 else hidden.new_zeros((), dtype=torch.float64)
    for part, source in zip(torch.split(chosen, chunk), torch.split(sources, chunk), strict=True):
        layer, chosen_part = (weight, bias, logit_map), (input_ids[part], loss_weight[part])
        total = total + checkpoint(_chunk_nll, hidden, source, layer, *chosen_part, use_reentrant=False)
    return total


def _chunk_nll(
    hidden: Tensor, source: Tensor, layer: tuple[Tensor, Tensor | None, LogitMap], labels: Tensor, weights: Tensor
) -> Tensor:
    weight, bias, logit_map = layer
    # [n, D] x [D, V] -> [n, V]. If a root has weight by mistake, `source` contains its parent -1: index_select then
    # fails, while hidden[source] would take the last token of the row without an error.
    x = linear(hidden.index_select(0, source), weight, bias)
    if x.is_cuda and x.dtype != torch.float64:  # one kernel in each direction, without logits in float32
        nll = -token_statistics(x, labels, None, logit_map, with_entropies=False)[0]
    else:
        nll = cross_entropy(logit_map(x if x.dtype == torch.float64 else x.float()), labels, reduction="none")
    return (nll.double() * weights).sum()


def tree_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    input_ids: Tensor,
    parent: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    logit_map: LogitMap = LogitMap(),  # noqa: B008  # a frozen value
    with_entropies: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each chosen token given its path, and the entropy of its distribution.

    The distribution is softmax(logits / temperature). Each is computed once, even if many trajectories share the token.
    Both are differentiable. They are float64 for float64 hidden states and float32 for all others.

    Args:
        hidden: [T, D], after the model's final norm.
        weight: [V, D], the output embedding.
        tokens: int64 [n], row indices of the chosen tokens; none may be a root. A token may occur several times.
        input_ids: int64 [T].
        parent: int64 [T].
        bias: [V], if the output layer has one.
        temperature: one for all, or float [n], one for each entry of `tokens`; all above 0.
        logit_map: the change that the model makes to the result of its output layer.
        with_entropies: if False, the entropies are not computed, and NaN takes their place.
        chunk: tokens whose logits are in memory at a time.

    Returns:
        log-probabilities [n] and entropies [n], in nats; attached to `hidden` even if n is 0.
    """
    sources, labels = parent.index_select(0, tokens), input_ids.index_select(0, tokens)
    if len(tokens) == 0:
        # [0, D] -> [0, V] -> [0], still attached to `hidden` and the weights: FSDP needs gradients from every rank.
        empty = linear(hidden[:0], weight, bias).sum(-1)
        empty = empty if empty.dtype == torch.float64 else empty.float()
        return empty, empty
    divisors = None
    if isinstance(temperature, Tensor):
        divisors = torch.split(temperature, chunk)
    elif temperature != 1:
        divisors = torch.split(hidden.new_full((len(tokens),), temperature, dtype=torch.float64), chunk)
    layer = weight, bias, logit_map
    parts = [
        checkpoint(
            _chunk_logprobs,
            hidden,
            source,
            layer,
            label,
            None if divisors is None else divisors[i],
            with_entropies,
            use_reentrant=False,
        )
        for i, (source, label) in enumerate(zip(torch.split(sources, chunk), torch.split(labels, chunk), strict=True))
    ]
    # [(logprobs, entropies) of chunk 0, ... of chunk 1] -> one tuple of each
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def filled_temperature(temperature: Tensor | None, missing: float | None) -> Tensor | float:
    """Return `temperature` with `missing` in place of NaN, or `missing` if there is none; 1 if `missing` is None."""
    fill = 1.0 if missing is None else missing
    return fill if temperature is None else torch.nan_to_num(temperature, nan=fill)


def _chunk_logprobs(
    hidden: Tensor,
    source: Tensor,
    layer: tuple[Tensor, Tensor | None, LogitMap],
    labels: Tensor,
    temperature: Tensor | None,
    with_entropies: bool,
) -> tuple[Tensor, Tensor]:
    weight, bias, logit_map = layer
    x = linear(hidden.index_select(0, source), weight, bias)
    return token_statistics(x, labels, temperature, logit_map, with_entropies)
