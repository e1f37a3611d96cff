"""Short causal convolutions on trees: each tap reads an ancestor.

    out[t] = activation(bias + sum over taps i of weight[W - 1 - i] * x[ancestor i of t])        ancestor 0 is t itself

An ancestor before the root reads 0, as the padding of the usual convolution does. In plain torch, in any precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from treepack.errors import TreepackError
from treepack.recurrent.chunks import find_parents, flatten_ends


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


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, ancestors: Tensor) -> Tensor:
    """Return the convolution of the tokens of a tree, [N, C] in the dtype of `x`.

    The precision is float64 if `x` has it, and float32 otherwise.

    Args:
        x: [N, C].
        weight: [C, W]; the last tap reads the token itself.
        bias: [C], or None.
        activation: silu, swish or None.
        ancestors: from `build_ancestors` with W taps.

    Raises:
        TreepackError: if the activation is another one.
    """
    if activation not in (None, "silu", "swish"):
        raise TreepackError(f"convolution: the activation is {activation!r}; expected silu or none")
    precision = torch.promote_types(x.dtype, torch.float32)
    wide, kernel = x.to(precision), weight.to(precision)
    out = wide * kernel[:, -1]
    for tap in range(1, weight.shape[1]):
        source = ancestors[tap].long()
        read = torch.where(source[:, None] < 0, 0, wide[source.clamp(min=0)])
        out = out + read * kernel[:, -1 - tap]
    if bias is not None:
        out = out + bias.to(precision)
    return (out if activation is None else silu(out)).to(x.dtype)
