"""Gated delta rule, Mamba-2 and KDA on trees in plain torch: chunk by chunk, in any precision, with gradients.

The rules, token after token along a path, with a state h [K, V] per head, keys k, queries q [K] and values v [V]:

    h = exp(g) h_parent                the state after the parent, 0 before roots
    u = beta (v - k h), or u = v       with `beta`: the delta rule; without: Mamba-2, where k, q, v are B, C, dt x
    h = h + k' u        o = q h

g <= 0 is one number per head, or K of them (KDA). Inside a chunk, with a = the sum of g from its first token on,
A[i, j] = beta_i (k_i exp(a_i - a_j) k_j) for j < i and P[i, j] = q_i exp(a_i - a_j) k_j for j <= i:

    U = (1 + A)^-1 (beta v)      W = (1 + A)^-1 (beta exp(a) k)      u = U - W h        (without beta: U = v, W = 0)
    o = (exp(a) q) h + P u       h' = D h + K' u,   K = exp(a_last - a) k,   D = exp(a_last)

where h is the state before the chunk and h' the state after it. Everything but h is computed for all chunks at once;
`_TreeStates` computes h along the tree, and its gradient G' after a chunk is the sum over the chunks that follow it.

The forms are from Yang et al., "Gated Delta Networks" (2024), and Dao and Gu, "Transformers are SSMs" (2024).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from treepack.recurrent.chunks import TokenChunks


def scan_plainly(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chunks: TokenChunks) -> Tensor:
    """Return the outputs o [N, H, V] of the tokens of a tree, in the dtype of `v`.

    The precision is float64 if `v` has it, and float32 otherwise.

    Args:
        q, k: [N, Hk, K]; each of their heads serves H / Hk consecutive heads of v. q includes its scale.
        v: [N, H, V].
        g: logarithm of the decay, [N, H], or [N, H, K] for one decay per key dimension; at most 0.
        beta: [N, H], or None for no delta rule.
        chunks: of the same N tokens, on their device.
    """
    heads, precision = v.shape[1], torch.promote_types(v.dtype, torch.float32)
    q, k = (x.to(precision).repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    decay = g.to(precision) if g.ndim == 3 else g.to(precision)[..., None]
    index, real, seen = _positions(chunks)
    # [C, H, n, ...] from here on; tokens that fill up a chunk are 0, which leaves states as they are
    q, k, u, a = (_divide(x, index, real) for x in (q, k, v.to(precision), decay))
    a = a.cumsum(-2)
    weights = _pair_weights(q, k, a, seen)
    w = torch.zeros_like(k)
    if beta is not None:
        rate = _divide(beta.to(precision)[..., None], index, real)
        below = seen & ~torch.eye(chunks.size, dtype=torch.bool, device=seen.device)
        system = torch.eye(chunks.size, dtype=precision, device=u.device) + _pair_weights(rate * k, k, a, below)
        u, w = (
            torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
            for x in (rate * u, rate * a.exp() * k)
        )
    last = a[..., -1:, :]
    # K and D: [C, H, n, K] and [C, H, K or 1, 1]
    h: Tensor = _TreeStates.apply(w, u, (last - a).exp() * k, last.mT.exp(), chunks)  # type: ignore[no-untyped-call]
    out = (q * a.exp()) @ h + weights @ (u - w @ h)
    flat: Tensor = out.transpose(1, 2)[real]  # [N, H, V], chunk after chunk, and so token after token
    return flat.to(v.dtype)


def _positions(chunks: TokenChunks) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token at each place of each chunk, int64 [C, n]; which of them exist; and pairs, bool [C, 1, n, n].

    The pair i, j is True if the token at place i sees the one at place j of its chunk.
    """
    place = torch.arange(chunks.size, device=chunks.end.device)
    # begin 2, length 2, size 3 -> tokens 2 3 (4), of which the last belongs to the next chunk
    index = (chunks.begin[:, None] + place).clamp(max=max(len(chunks.end) - 1, 0)).long()
    real = place < chunks.length[:, None]
    # Tokens in a chunk see each other unless they are trees of one token: their subtrees end before the next one.
    within = index[:, :, None] < chunks.end[index][:, None, :]
    seen = within & (place[:, None] >= place) & real[:, :, None] & real[:, None, :]
    return index, real, seen[:, None]


def _divide(x: Tensor, index: Tensor, real: Tensor) -> Tensor:
    """Return x [N, H, D] as chunks [C, H, n, D], 0 at places without a token."""
    return torch.where(real[..., None, None], x[index], 0).transpose(1, 2)


def _pair_weights(left: Tensor, right: Tensor, a: Tensor, seen: Tensor) -> Tensor:
    """Return left_i exp(a_i - a_j) right_j for the pairs i, j that are `seen`, and 0 for the others; [C, H, n, n]."""
    # Pairs that are not seen may have positive exponents, which would overflow: they are set to -inf first.
    if a.shape[-1] == 1:
        exponents = (a - a.mT).masked_fill(~seen, -math.inf)
        return (left @ right.mT) * exponents.exp()
    exponents = (a[..., :, None, :] - a[..., None, :, :]).masked_fill(~seen[..., None], -math.inf)
    return torch.einsum("chik,chjk,chijk->chij", left, right, exponents.exp())


class _TreeStates(torch.autograd.Function):
    """States [C, H, K, V] before every chunk: h of a chunk = D h + K' (U - W h) of its parent.

    With G = the gradient of the state after a chunk, which is the sum over the chunks that follow it:

        dU = K G    dW = -K G h'    dK = u G'    dD = <h, G>    and to the parent: dh (from outputs) + D G - W' K G
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, u: Tensor, k: Tensor, decay: Tensor, chunks: TokenChunks) -> Tensor:
        """Compute the states, one step along all paths at a time."""
        h = u.new_zeros(*u.shape[:2], k.shape[-1], u.shape[-1])
        steps = _steps(chunks.parent)
        for chosen, sources, _ in steps:
            before = h[sources]
            after = decay[sources] * before + k[sources].mT @ (u[sources] - w[sources] @ before)
            h[chosen] = after
        ctx.save_for_backward(w, u, k, decay, h)
        ctx.steps = steps
        return h

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients, one step back along all paths at a time."""
        w, u, k, decay, h = ctx.saved_tensors
        (before,) = (gradient.clone() for gradient in gradients)  # of the state before each chunk
        after = torch.zeros_like(h)
        for chosen, sources, rank in reversed(ctx.steps):
            # All followers of the chosen chunks are done, so the gradient of the state before them is complete.
            g = after[chosen]
            before[chosen] += decay[chosen] * g - w[chosen].mT @ (k[chosen] @ g)
            # A chunk may have several followers. Those of one rank have different parents, so that each addition has
            # one owner, and the order of additions is fixed.
            for each in range(int(rank.max()) + 1):
                after[sources[rank == each]] += before[chosen[rank == each]]
        new = u - w @ h
        kg = k @ after
        # The decay is one number or K numbers per head: [C, H, 1, 1] or [C, H, K, 1]
        d_decay = (h * after).sum(-1, keepdim=True).sum_to_size(decay.shape)
        return -kg @ h.mT, kg, new @ after.mT, d_decay, None


def _steps(parent: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the chunks, their parents, and their ranks among siblings, at each distance from the roots.

    parent [-1, 0, 0, 2] -> ([1, 2], [0, 0], [0, 1]), ([3], [2], [0])
    """
    parents = parent.tolist()
    depth: list[int] = []
    children = [0] * len(parents)
    steps: list[tuple[list[int], list[int], list[int]]] = []
    for chunk, above in enumerate(parents):
        depth.append(0 if above < 0 else depth[above] + 1)
        if above < 0:
            continue
        if depth[chunk] > len(steps):
            steps.append(([], [], []))
        for column, value in zip(steps[depth[chunk] - 1], (chunk, above, children[above]), strict=True):
            column.append(value)
        children[above] += 1
    return [
        (torch.tensor(a, device=parent.device), torch.tensor(b, device=parent.device), torch.tensor(c, device="cpu"))
        for a, b, c in steps
    ]
