"""The products of an output layer with chunks of states, and all gradients of a loss through it.

    token_scores    log-probability and entropy of each target; backward computes the logits of a chunk again
    priced_loss     a loss whose slopes follow from a chunk's log-probabilities at once: its gradients are
                    computed in the forward pass, from logits that are computed once

Both keep one float32 sum for the gradient of the weight, cast the weight at most once per pass (`experts.weights`:
once per optimiser step), and overwrite the logits of a chunk with their gradients, so that a chunk needs the memory of
its logits only once. Products run in the dtype of autocast, or in that of the states without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from treepack.errors import TreepackError
from treepack.model.experts.weights import cast_weight
from treepack.model.head.distribution_loss import TeacherTargets, chunk_divergences, divergence_gradients
from treepack.model.head.head_chunks import ChunkTargets
from treepack.model.head.logit_map import LogitMap, TargetSlopes, TargetStatistics
from treepack.model.head.token_statistics import token_statistics, turn_into_gradients


class TargetPrices(NamedTuple):
    """A loss of n targets in the order of the chunks, whose slopes at a target depend on that target alone.

    Attributes:
        slopes: the slopes at the targets of a chunk, from its number and statistics.
        value: the loss, float64, and further sums, float64 [k], from log-probabilities, entropies and divergences [n].
    """

    slopes: Callable[[int, TargetStatistics], TargetSlopes]
    value: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class HeadOptions:
    """Options of the products with an output layer.

    Attributes:
        chunks: the targets.
        logit_map: the change that the model makes to the result of its output layer.
        with_entropies: False if entropies are not read.
        teacher: the laws from which divergences are computed; None for none.
    """

    chunks: Sequence[ChunkTargets]
    logit_map: LogitMap
    with_entropies: bool
    teacher: TeacherTargets | None = None

    def statistics(self, x: Tensor, number: int) -> TargetStatistics:
        """Return the numbers about the targets of a chunk from its logits."""
        targets = self.chunks[number]
        found = token_statistics(x, targets, self.logit_map, with_entropies=self.with_entropies)
        if self.teacher is None:
            return found
        law = self.teacher.laws[number], self.teacher.beta
        return found._replace(divergences=chunk_divergences(x, targets, self.logit_map, law))

    def turn_into_gradients(self, x: Tensor, number: int, statistics: TargetStatistics, slopes: TargetSlopes) -> None:
        """Overwrite the logits of a chunk with the derivatives of a loss by them."""
        targets, extra = self.chunks[number], None
        if self.teacher is not None and slopes.divergences is not None:
            law = self.teacher.laws[number], self.teacher.beta
            extra = divergence_gradients(x, targets, self.logit_map, slopes.divergences, law)
        if slopes.logprobs is not None or slopes.entropies is not None:
            turn_into_gradients(x, targets, self.logit_map, statistics, slopes)
        else:
            x.zero_()
        if extra is not None:
            x += extra


def token_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and divergence of each target in the order of the chunks, [n] each.

    Args:
        hidden: [T, D].
        weight: [V, D].
        bias: [V] or None.
        options: the targets, at least one; entropies and divergences that are not computed are NaN.
    """
    scores: tuple[Tensor, Tensor, Tensor] = _TokenScores.apply(hidden, weight, bias, options)  # type: ignore[no-untyped-call]
    return scores


def priced_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions, price: TargetPrices
) -> tuple[Tensor, Tensor]:
    """Return a loss, attached to the three tensors, and its further sums, which have no graph.

    One backward pass may go through the loss: its gradients exist once. Arguments as in `token_scores`.
    """
    wanted = torch.is_grad_enabled()
    result: tuple[Tensor, Tensor] = _PricedLoss.apply(hidden, weight, bias, options, price, wanted)  # type: ignore[no-untyped-call]
    return result


class _TokenScores(torch.autograd.Function):
    """`token_scores`, whose backward computes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.options, ctx.dtype = options, _autocast_dtype(hidden)
        layer = _cast(weight, bias, ctx.dtype)
        found = []
        with _exact_dtypes(hidden):
            for number, targets in enumerate(options.chunks):
                x = linear(_states(hidden, targets, layer), *layer)
                found.append(options.statistics(x, number))
                del x  # before the next chunk
        logprobs, totals, entropies, divergences = _joined(found)
        ctx.save_for_backward(hidden, weight, bias, totals, entropies)
        ctx.set_materialize_grads(False)  # an unused output has the gradient None, which saves its share of backward
        unread = []
        if not options.with_entropies:
            entropies = torch.full_like(entropies, torch.nan)
            unread.append(entropies)
        if divergences is None:
            divergences = torch.full_like(totals, torch.nan)
            unread.append(divergences)
        ctx.mark_non_differentiable(*unread)
        return logprobs, entropies, divergences

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_graph()
        hidden, weight, bias, *saved = ctx.saved_tensors
        if all(each is None for each in slopes):
            return None, None, None, None
        options, layer = ctx.options, _cast(weight, bias, ctx.dtype)
        sums = _GradientSums((hidden, weight, bias), ctx.needs_input_grad)
        sizes = [len(targets.labels) for targets in options.chunks]
        # totals, entropies and slopes [n] -> one part of each for every chunk
        parts = [[None] * len(sizes) if each is None else each.split(sizes) for each in (*saved, *slopes)]
        with _exact_dtypes(hidden):
            for number, (targets, totals, entropies, *each) in enumerate(zip(options.chunks, *parts, strict=True)):
                states = _states(hidden, targets, layer)
                x = linear(states, *layer)
                # Log-probabilities are not read again; the totals are a placeholder for them.
                statistics = TargetStatistics(totals, totals, entropies)
                options.turn_into_gradients(x, number, statistics, TargetSlopes(*each))
                sums.add(x, states, targets, layer)
                del x
        return (*sums.take(), None)


class _PricedLoss(torch.autograd.Function):
    """`priced_loss`, whose backward scales the gradients that the forward pass has computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: HeadOptions,
        price: TargetPrices,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        layer = _cast(weight, bias, _autocast_dtype(hidden))
        needs = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        ctx.sums = _GradientSums((hidden, weight, bias), needs)
        found = []
        with _exact_dtypes(hidden):
            for number, targets in enumerate(options.chunks):
                states = _states(hidden, targets, layer)
                x = linear(states, *layer)
                statistics = options.statistics(x, number)
                found.append(statistics)
                if any(needs):
                    options.turn_into_gradients(x, number, statistics, price.slopes(number, statistics))
                    ctx.sums.add(x, states, targets, layer)
                del x  # before the next chunk
        logprobs, _, entropies, divergences = _joined(found)
        loss, sums = price.value(logprobs, entropies, divergences)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_graph()
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise TreepackError(
                "a second backward pass goes through a loss whose gradients exist once; compute the loss again"
            )
        return (*sums.take(scale=grad), None, None, None)


def _joined(found: Sequence[TargetStatistics]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the statistics of all chunks, one after the other."""
    logprobs, totals, entropies, divergences = zip(*found, strict=True)
    joined = None if divergences[0] is None else torch.cat(divergences)
    return torch.cat(logprobs), torch.cat(totals), torch.cat(entropies), joined


def _refuse_graph() -> None:
    """Refuse a backward pass with create_graph=True: second derivatives would lack a part without an error."""
    if torch.is_grad_enabled():
        raise TreepackError("the gradients of the output layer have no graph; run backward without create_graph=True")


def is_float16(hidden: Tensor) -> bool:
    """Return True if products with the states `hidden` run in float16, which rounds small gradients to 0."""
    return (_autocast_dtype(hidden) or hidden.dtype) == torch.float16


class _CastLayer(NamedTuple):
    """Weight [V, D] and bias [V] of an output layer in the dtype of its products."""

    weight: Tensor
    bias: Tensor | None


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast; None if it is off, or leaves float64 as it is."""
    device = hidden.device.type
    is_lower = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if is_lower else None


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> _CastLayer:
    """Return the layer in `dtype`, or as it is."""
    own = None if bias is None else bias.detach()
    if dtype is None:
        return _CastLayer(weight.detach(), own)
    return _CastLayer(cast_weight(weight, dtype), None if own is None else own.to(dtype))


def _exact_dtypes(hidden: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off: products have the dtype of their factors, and sums that of their total."""
    return torch.autocast(hidden.device.type, enabled=False)


def _states(hidden: Tensor, targets: ChunkTargets, layer: _CastLayer) -> Tensor:
    """Return the states of a chunk [m, D] in the dtype of the products, or as they are without autocast."""
    # If a root has weight by mistake, `states` contains its parent -1: index_select then fails, while hidden[states]
    # would take the last token of the row without an error.
    states = hidden.detach().index_select(0, targets.states)
    is_lower = layer.weight.dtype != hidden.dtype and layer.weight.dtype in (torch.bfloat16, torch.float16)
    return states.to(layer.weight.dtype) if is_lower else states


class _GradientSums:
    """Gradients of states [T, D], weight [V, D] and bias [V], summed over chunks; weight and bias in float32."""

    def __init__(self, inputs: tuple[Tensor, Tensor, Tensor | None], needs: Sequence[bool]) -> None:
        self._dtypes = [None if each is None else each.dtype for each in inputs]
        hidden, weight, bias = inputs
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.hidden = torch.zeros_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None

    def add(self, grad: Tensor, states: Tensor, targets: ChunkTargets, layer: _CastLayer) -> None:
        """Add the products of a chunk with the gradient of its logits [m, V]."""
        if self.hidden is not None:
            # [m, V] x [V, D]; a chunk has each state once, so the sum has one order and equal bits in every run
            self.hidden.index_add_(0, targets.states, (grad @ layer.weight).to(self.hidden.dtype))
        if self.weight is not None:
            _add_product(self.weight, grad.t(), states)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)

    def take(self, *, scale: Tensor | None = None) -> list[Tensor | None]:
        """Return the gradients, multiplied by `scale`, in the dtypes of their inputs; this object forgets them."""
        # The only reference must be the caller's, so that autograd stores a gradient without a copy.
        found = [self.hidden, self.weight, self.bias]
        self.hidden = self.weight = self.bias = None
        if scale is not None:
            found = [each if each is None else each.mul_(scale) for each in found]
        return [each if each is None else each.to(dtype) for each, dtype in zip(found, self._dtypes, strict=True)]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left x right to `total`, whose dtype may be wider."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and _adds_in_float32(total.device, right.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a product of `dtype` can be added to a float32 sum in one kernel: CUDA can, other GPUs may not."""
    total, small = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, small, small, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 17).all())
