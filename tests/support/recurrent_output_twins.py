"""Slow twins of the output kernels, chunk by chunk, in any precision; autograd computes gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from treepack.recurrent.chunks import TokenChunks


def outputs(q: Tensor, k: Tensor, new: Tensor, h: Tensor, a: Tensor, chunks: TokenChunks) -> Tensor:
    """Return o [N, H, V]: exp(a_i) q_i h + the sum over j of exp(a_i - a_j) (q_i k_j) new_j.

    Args:
        q, k: [N, H, K], one for each head of `new`.
        new: [N, H, V].
        h: states before the chunks, [C, H, K, V].
        a: [N, H].
        chunks: of the N tokens.
    """
    o = torch.zeros_like(new)
    for c, (begin, length) in enumerate(zip(chunks.begin.tolist(), chunks.length.tolist(), strict=True)):
        chunk = slice(begin, begin + length)
        # [H, n, ...]
        b_q, b_k, b_new, b_a = (x[chunk].transpose(0, 1) for x in (q, k, new, a[..., None]))
        place, end = torch.arange(begin, begin + length), chunks.end[chunk]
        seen = (place[None, :] <= place[:, None]) & (place[:, None] < end[None, :])
        pairs = (b_q @ b_k.mT) * (b_a - b_a.mT).masked_fill(~seen, -torch.inf).exp()
        o[chunk] = ((b_a.exp() * b_q) @ h[c] + pairs @ b_new).transpose(0, 1)
    return o


def states_after(k: Tensor, new: Tensor, h: Tensor, a: Tensor, chunks: TokenChunks) -> Tensor:
    """Return the states after the chunks, [C, H, K, V]: exp(a_last) h + the sum of exp(a_last - a_j) k_j new_j."""
    after = []
    for c, (begin, length) in enumerate(zip(chunks.begin.tolist(), chunks.length.tolist(), strict=True)):
        chunk = slice(begin, begin + length)
        b_k, b_new, b_a = (x[chunk].transpose(0, 1) for x in (k, new, a[..., None]))
        last = b_a[:, -1:]
        after.append(last.exp() * h[c] + ((last - b_a).exp() * b_k).mT @ b_new)
    return torch.stack(after)


def gradient_of_w(h: Tensor, du: Tensor, chunks: TokenChunks) -> Tensor:
    """Return dw [N, H, K], because new = U - W h: -du h' of the chunk of each token."""
    dw = [
        -torch.einsum("nhv,hkv->nhk", du[begin : begin + length], h[c])
        for c, (begin, length) in enumerate(zip(chunks.begin.tolist(), chunks.length.tolist(), strict=True))
    ]
    return torch.cat(dw)
