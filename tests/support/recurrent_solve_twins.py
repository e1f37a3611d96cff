"""Slow twin of the triangular solve of the delta rule, chunk by chunk, in any precision."""

from __future__ import annotations

import torch
from torch import Tensor

from treepack.recurrent.chunks import CHUNK, TokenChunks


def solve(k: Tensor, v: Tensor, beta: Tensor, a: Tensor, chunks: TokenChunks) -> tuple[Tensor, Tensor, Tensor]:
    """Return W [N, H, K], U [N, H, V] and (1 + A)^-1 [N, H, 64]; autograd computes gradients.

    Args:
        k: [N, Hk, K]; each head serves H / Hk consecutive heads of v.
        v: [N, H, V].
        beta, a: [N, H].
        chunks: of the N tokens.
    """
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    parts: list[tuple[Tensor, ...]] = []
    for begin, length in zip(chunks.begin.tolist(), chunks.length.tolist(), strict=True):
        chunk = slice(begin, begin + length)
        # [H, n, K], [H, n, V], [H, n, 1] twice
        b_k, b_v, b_beta, b_a = (x[chunk].transpose(0, 1) for x in (k, v, beta[..., None], a[..., None]))
        one = torch.eye(length, dtype=k.dtype)
        right = torch.cat([b_beta * b_a.exp() * b_k, b_beta * b_v, one.expand(len(b_k), -1, -1)], -1)
        system = one + pairs(b_k, b_beta, b_a, chunks.end[chunk] - begin)
        solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        w, u, inverse = solution.transpose(0, 1).split([k.shape[-1], v.shape[-1], length], -1)
        parts.append((w, u, torch.nn.functional.pad(inverse, (0, CHUNK - length))))
    w, u, inverse = (torch.cat(each) for each in zip(*parts, strict=True))
    return w, u, inverse


def pairs(k: Tensor, beta: Tensor, a: Tensor, end: Tensor) -> Tensor:
    """Return A [H, n, n] of a chunk of n tokens: beta_i exp(a_i - a_j) (k_i k_j) for j < i < end_j, else 0.

    Args:
        k: [H, n, K].
        beta, a: [H, n, 1].
        end: [n], one past the last place that sees each place.
    """
    place = torch.arange(len(end))
    seen = (place[None, :] < place[:, None]) & (place[:, None] < end[None, :])
    return beta * (a - a.mT).masked_fill(~seen, -torch.inf).exp() * (k @ k.mT)
