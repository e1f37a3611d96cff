"""Log-probability of each label and entropy of its distribution, from the logits of a chunk, and their gradients.

    x [m, V], the output layer's result --LogitMap, / temperature--> z --softmax--> log p[label] [n], entropy [n]

State rows[t] predicts target t. With z = logit_map(x) / T, p = softmax(z), l = log p[label] and H = -sum p log p:

    dl/dz = onehot(label) - p        dH/dz = -p (log p + H)        dz/dx = logit_map'(x) / T

A target with a kept set has z = -inf outside of it, which renormalises the law as top-p, top-k and min-p do. Its
gradients are 0 there.

The functions here are in torch, at any precision and on any device. On a GPU `fused_statistics` does the same in two
kernels, which read the logits once each and never store them in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treepack.model.head.head_chunks import ChunkTargets
from treepack.model.head.logit_map import LogitMap, TargetSlopes, TargetStatistics


def token_statistics(
    x: Tensor, targets: ChunkTargets, logit_map: LogitMap, *, with_entropies: bool
) -> TargetStatistics:
    """Return the statistics of the targets of a chunk.

    Args:
        x: [m, V], stride 1 in the last dimension.
        targets: the targets.
        logit_map: the model's last step.
        with_entropies: False puts NaN in place of the entropies.
    """
    if _runs_kernels(x):
        from treepack.model.head.fused_statistics import fused_statistics  # imports triton

        return fused_statistics(x, targets, logit_map)
    return torch_statistics(x, targets, logit_map, with_entropies=with_entropies)


def turn_into_gradients(
    x: Tensor, targets: ChunkTargets, logit_map: LogitMap, statistics: TargetStatistics, slopes: TargetSlopes
) -> None:
    """Overwrite the logits `x` [m, V] with the derivatives of a loss by them.

    Args:
        x: as in `token_statistics`.
        targets: the targets.
        logit_map: the model's last step.
        statistics: of `token_statistics`; with entropies if their slopes are given.
        slopes: of the loss; at least one of the two.
    """
    if _runs_kernels(x):
        from treepack.model.head.fused_statistics import fused_gradients  # imports triton

        fused_gradients(x, targets, logit_map, statistics, slopes)
    else:
        torch_gradients(x, targets, logit_map, statistics, slopes)


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def torch_statistics(
    x: Tensor, targets: ChunkTargets, logit_map: LogitMap, *, with_entropies: bool
) -> TargetStatistics:
    """Compute `token_statistics` in torch."""
    z = _kept_only(_tempered(x, targets, logit_map), x, targets)
    totals = z.logsumexp(-1)  # [n]
    logprobs = z.gather(-1, targets.labels[:, None]).squeeze(-1) - totals
    entropies = torch.full_like(totals, torch.nan)
    if with_entropies:
        # In the memory of z, unless this is x, which is still needed; entr(p) = -p log p, with 0 for p = 0
        p = (z - totals[:, None] if z is x else z.sub_(totals[:, None])).exp_()
        entropies = torch.special.entr(p, out=p).sum(-1)
    return TargetStatistics(logprobs, totals, entropies)


def torch_gradients(
    x: Tensor, targets: ChunkTargets, logit_map: LogitMap, statistics: TargetStatistics, slopes: TargetSlopes
) -> None:
    """Compute `turn_into_gradients` in torch."""
    z = _tempered(x, targets, logit_map)
    divisor = None if targets.temperature is None else targets.temperature.to(z.dtype)[:, None]
    # [n, V]: the derivative of the map. That of a cap needs z, whose place the softmax takes; z may be x itself.
    slope = logit_map.scale if logit_map.cap is None else logit_map.slope(z if divisor is None else z * divisor)
    p = _kept_only(z, x, targets).sub_(statistics.totals[:, None]).exp_()
    own = None if slopes.logprobs is None else slopes.logprobs[:, None]
    if slopes.entropies is None:
        assert own is not None, "a loss has a slope"
        result = p.mul_(-own)
    else:
        # -p (log p + H) = entr(p) - p H
        result = torch.special.entr(p) - p * statistics.entropies[:, None]
        result.mul_(slopes.entropies[:, None])
        if own is not None:
            result.addcmul_(p, own, value=-1)
    if own is not None:
        # the onehot(label) part: one element of each row
        result.scatter_add_(-1, targets.labels[:, None], own)
    if divisor is not None:
        result.div_(divisor)
    if logit_map != LogitMap():
        result.mul_(slope)
    if not targets.is_plain:
        # rows [0 0 1]: the gradients of two targets are added for state 0
        result = torch.zeros_like(x, dtype=result.dtype).index_add_(0, targets.rows, result)
    if result is not x:
        x.copy_(result)


def _tempered(x: Tensor, targets: ChunkTargets, logit_map: LogitMap) -> Tensor:
    """Return z [n, V]; it is `x` itself only if nothing changes."""
    z = logit_map(x if x.dtype == torch.float64 else x.float())
    if not targets.is_plain:
        z = z.index_select(0, targets.rows)
    if targets.temperature is None:
        return z
    divisor = targets.temperature.to(z.dtype)[:, None]
    return z / divisor if z is x else z.div_(divisor)


def _kept_only(z: Tensor, x: Tensor, targets: ChunkTargets) -> Tensor:
    """Return `z` [n, V] with -inf for words that the sampler left out; in its memory, unless this is `x`."""
    kept = targets.kept
    if kept is None:
        return z
    left_out = (kept.sizes > 0)[:, None].expand(z.shape).contiguous()
    left_out[kept.owners, kept.values.long()] = False
    return z.masked_fill(left_out, -torch.inf) if z is x else z.masked_fill_(left_out, -torch.inf)
