"""Short causal convolutions on trees: each tap reads an ancestor.

    out[t] = activation(bias + sum over taps i of weight[W - 1 - i] * x[ancestor i of t])        ancestor 0 is t itself

An ancestor before the root reads 0, as the padding of the usual convolution does. In plain torch, in any precision;
`kernels.convolution` computes the same on GPUs.

The gradient of x at a token adds the gradients of the tokens that read it. Nearly all of them are t, t + 1, ...,
t + W - 1, read by taps 0, 1, ..., W - 1. The others read it from a later branch:

    0 - 1 - 2        with 3 taps, token 0 has the readers 0, 1, 2 and, by tap 2, also 3
         `- 3 - 4    token 1 has the readers 1, 2 and, by tap 1, also 3, and by tap 2 also 4

`ConvolutionTaps` lists these distant readers, token by token, so that each gradient has one owner and one order of
additions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from treepack.errors import TreepackError
from treepack.recurrent.chunks import find_parents, flatten_ends, move


@dataclass(frozen=True)
class ConvolutionTaps:
    """Ancestors that the W taps of a convolution read, and the distant readers of tokens. There are N tokens.

    ancestors    int32 [W, N], the i-th ancestor of each token in row i, -1 before the root; row 0 is 0 ... N - 1
    targets      int32 [E], the tokens with distant readers, in ascending order
    number       int32 [N], the number of each token among `targets`, -1 if it is none
    begins       int32 [E + 1], index in `readers` of the first one of each target, then of the end
    readers      int32 [F], target after target; of one target by tap, then by token
    reader_taps  int32 [F], the tap by which each of them reads its target, 1 ... W - 1
    """

    ancestors: Tensor
    targets: Tensor
    number: Tensor
    begins: Tensor
    readers: Tensor
    reader_taps: Tensor

    def to(self, device: torch.device) -> ConvolutionTaps:
        """Return the same table on `device`; see `chunks.move`."""
        if self.ancestors.device == device:
            return self
        return ConvolutionTaps(**{each.name: move(getattr(self, each.name), device) for each in fields(self)})


def build_ancestors(subtree_end: Tensor, taps: int) -> Tensor:
    """Return the ancestors that the taps of a convolution read, int32 [taps, N]; -1 before the root.

    Args:
        subtree_end: int [B, T], one past the last token of each token's subtree.
        taps: width of the convolution. Row i has the i-th ancestor of each token; row 0 the tokens themselves.
    """
    end = flatten_ends(subtree_end)
    parent = find_parents(end)
    rows = [torch.arange(len(end), device=end.device)]
    for _ in range(taps - 1):
        # parent [-1, 0, 1] of rows [0, 1, 2] -> [-1, 0, 1] -> [-1, -1, 0]
        above = rows[-1]
        rows.append(torch.where(above < 0, -1, parent[above.clamp(min=0)]) if len(end) else above)
    return torch.stack(rows).to(torch.int32)


def build_taps(subtree_end: Tensor, taps: int) -> ConvolutionTaps:
    """Return the table of a convolution of width `taps` for rows of `subtree_end` [B, T]; see `build_ancestors`."""
    ancestors = build_ancestors(subtree_end, taps)
    count = ancestors.shape[1]
    # The header's tree has ancestors [0 1 2 3 4], [-1 0 1 1 3], [-1 -1 0 0 1]. The i-th ancestor of t is not t - i in
    # [. . . 1 .] and [. . . 0 1] -> (tap, reader) (1, 3), (2, 3), (2, 4) of targets 1, 0, 1
    shift = torch.arange(taps, device=ancestors.device)[:, None]
    tap, reader = ((ancestors >= 0) & (ancestors != ancestors[:1] - shift)).nonzero(as_tuple=True)
    target, order = ancestors[tap, reader].sort(stable=True)
    targets, readers_each = torch.unique_consecutive(target, return_counts=True)
    number = torch.full((count,), -1, dtype=torch.int32, device=ancestors.device)
    number[targets.long()] = torch.arange(len(targets), dtype=torch.int32, device=ancestors.device)
    begins = torch.cat([readers_each.new_zeros(1), readers_each.cumsum(0)]).to(torch.int32)
    return ConvolutionTaps(
        ancestors, targets, number, begins, reader[order].to(torch.int32), tap[order].to(torch.int32)
    )


def convolve_plainly(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, taps: ConvolutionTaps
) -> Tensor:
    """Return the convolution of the tokens of a tree, [N, C] in the dtype of `x`.

    The precision is float64 if `x` has it, and float32 otherwise. Two runs agree in every bit.

    Args:
        x: [N, C].
        weight: [C, W]; the last tap reads the token itself.
        bias: [C], or None.
        activation: silu, swish or None.
        taps: from `build_taps` with W taps.

    Raises:
        TreepackError: if the activation is another one.
    """
    is_silu = check_activation(activation)
    precision = torch.promote_types(x.dtype, torch.float32)
    wide = _TapProducts.apply(x.to(precision), weight.to(precision), taps)  # type: ignore[no-untyped-call]
    out: Tensor = wide if bias is None else wide + bias.to(precision)
    return (silu(out) if is_silu else out).to(x.dtype)


def check_activation(activation: str | None) -> bool:
    """Return True for silu, False for no activation.

    Raises:
        TreepackError: if the activation is another one.
    """
    if activation not in (None, "silu", "swish"):
        raise TreepackError(f"convolution: the activation is {activation!r}; expected silu or none")
    return activation is not None


class _TapProducts(torch.autograd.Function):
    """Sum over taps of weight[:, W - 1 - i] * x[ancestor i], [N, C]; its backward adds in one order.

    The gradient of indexing, which autograd would compute, adds in any order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, taps: ConvolutionTaps) -> Tensor:
        """Compute the sum, tap after tap."""
        ctx.save_for_backward(x, weight)
        ctx.taps = taps
        out = x * weight[:, -1]
        for tap in range(1, weight.shape[1]):
            out += _read(x, taps.ancestors[tap]) * weight[:, -1 - tap]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and weight."""
        (do,) = gradients
        x, weight = ctx.saved_tensors
        taps: ConvolutionTaps = ctx.taps
        ancestors = taps.ancestors
        dx = do * weight[:, -1]
        columns = [(do * x).sum(0)]
        for tap in range(1, weight.shape[1]):
            columns.append((do * _read(x, ancestors[tap])).sum(0))
            # Token t + tap reads t. Of 5 tokens with tap 2: tokens 2 3 4, whose ancestors may be 0 1 2
            is_near = ancestors[tap, tap:] == ancestors[0, : len(do) - tap] if tap < len(do) else ancestors[0, :0] > 0
            dx[: len(is_near)] += torch.where(is_near[:, None], do[tap:], 0) * weight[:, -1 - tap]
        if len(taps.targets):
            # [F, C], summed over the readers of each target in their order -> [E, C]
            shares = do[taps.readers.long()] * weight.mT[weight.shape[1] - 1 - taps.reader_taps.long()]
            dx[taps.targets.long()] += torch.segment_reduce(shares, "sum", offsets=taps.begins.long(), unsafe=True)
        return dx, torch.stack(columns[::-1], 1), None


def _read(x: Tensor, source: Tensor) -> Tensor:
    """Return x[source] [N, C], and 0 for sources of -1."""
    index = source.long()
    return torch.where(index[:, None] < 0, 0, x[index.clamp(min=0)])
