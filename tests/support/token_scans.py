"""Recurrent layers and convolutions on trees by their definition, token after token: the slow twin of the others.

Every token starts from the state of its parent, and a tap of a convolution reads an ancestor. Nothing is divided into
chunks, and autograd computes the gradients. It is here to be read and to test against.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scan_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, parent: Tensor) -> Tensor:
    """Return the outputs o [N, H, V]; arguments as in `twin.scan`, with the parent of each token, int [N]."""
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    decay = (g if g.ndim == 3 else g[..., None]).exp()[..., None]  # [N, H, K or 1, 1]
    states: list[Tensor] = []
    outputs = []
    for token, above in enumerate(parent.tolist()):
        # [H, K, V]
        h = states[above] * decay[token] if above >= 0 else v.new_zeros(heads, k.shape[-1], v.shape[-1])
        new = v[token]
        if beta is not None:
            new = beta[token][:, None] * (new - torch.einsum("hk,hkv->hv", k[token], h))
        h = h + k[token][:, :, None] * new[:, None, :]
        states.append(h)
        outputs.append(torch.einsum("hk,hkv->hv", q[token], h))
    return torch.stack(outputs)


def convolve_tokens(x: Tensor, weight: Tensor, bias: Tensor | None, parent: Tensor) -> Tensor:
    """Return the convolution [N, C] of x [N, C] with weight [C, W]: the last tap reads the token itself."""
    taps = weight.shape[1]
    parents = parent.tolist()
    outputs = []
    for token in range(len(x)):
        total = torch.zeros_like(x[token]) if bias is None else bias
        at = token
        for tap in range(taps - 1, -1, -1):
            if at < 0:
                break
            total = total + weight[:, tap] * x[at]
            at = parents[at]
        outputs.append(total)
    return torch.stack(outputs)
