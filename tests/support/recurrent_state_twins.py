"""Slow twins of the state kernels, chunk by chunk in torch, and random tensors for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from treepack.recurrent.chunks import TokenChunks


class States(NamedTuple):
    """Operands of the recursion over chunks; names and shapes as in `kernels.states`."""

    q: Tensor
    k: Tensor
    u: Tensor
    w: Tensor | None
    a: Tensor
    do: Tensor
    du_local: Tensor

    def to(self, dtype: torch.dtype) -> States:
        """Return the operands in `dtype`, the sums of decays in float32 or float64."""
        wide = torch.promote_types(dtype, torch.float32)
        q, k, u, do, du_local = (x.to(dtype) for x in (self.q, self.k, self.u, self.do, self.du_local))
        return States(q, k, u, None if self.w is None else self.w.to(dtype), self.a.to(wide), do, du_local)


class Results(NamedTuple):
    """Results of both directions: h and dh [C, H, K, V], new and du [N, H, V]."""

    h: Tensor
    new: Tensor
    dh: Tensor
    du: Tensor


def draw_states(
    chunks: TokenChunks, keys: int, values: int, *, heads: int = 2, key_heads: int = 1, delta: bool = True
) -> States:
    """Return random operands, float64, with keys small enough that states stay bounded."""
    count = len(chunks.end)
    generator = torch.Generator().manual_seed(count + keys)

    def draw(heads: int, width: int) -> Tensor:
        return torch.randn(count, heads, width, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(key_heads, keys), dim=-1) for _ in range(2))
    w = torch.nn.functional.normalize(draw(heads, keys), dim=-1) / chunks.size if delta else None
    g = -torch.rand(count, heads, generator=generator, dtype=torch.float64) / 4
    return States(q, k, draw(heads, values), w, sum_decays(g, chunks), draw(heads, values), draw(heads, values))


def sum_decays(g: Tensor, chunks: TokenChunks) -> Tensor:
    """Return the sums of g [N, H] from the first token of each chunk on."""
    ends = zip(chunks.begin.tolist(), chunks.length.tolist(), strict=True)
    return torch.cat([g[:0], *(g[first : first + count].cumsum(0) for first, count in ends)])


def compute_states(inputs: States, chunks: TokenChunks) -> Results:
    """Return the states and the new values by their definition, and their gradients by autograd."""
    q, k, u, w, a, do, du_local = inputs
    group = u.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    u = u.detach().requires_grad_()
    before: list[Tensor] = []
    after: list[Tensor] = []
    news: list[Tensor] = []
    loss = (u * 0).sum()
    for first, count, parent in zip(*(x.tolist() for x in (chunks.begin, chunks.length, chunks.parent)), strict=True):
        part = slice(first, first + count)
        h = u.new_zeros(u.shape[1], k.shape[2], u.shape[2]) if parent < 0 else after[parent]
        new = u[part] if w is None else u[part] - torch.einsum("nhk,hkv->nhv", w[part], h)
        last = a[first + count - 1]
        decayed = (last - a[part]).exp()[..., None] * k[part]
        state = last.exp()[:, None, None] * h + torch.einsum("nhk,nhv->hkv", decayed, new)
        loss = loss + (torch.einsum("nhk,hkv->nhv", a[part].exp()[..., None] * q[part], h) * do[part]).sum()
        loss = loss + (new * du_local[part]).sum()
        before.append(h)
        after.append(state)
        news.append(new)
    du, *gradients = torch.autograd.grad(loss, [u, *after], allow_unused=True)
    dh = [torch.zeros_like(x) if each is None else each for x, each in zip(after, gradients, strict=True)]
    return Results(*(x.detach() for x in (torch.stack(before), torch.cat(news), torch.stack(dh), du)))
