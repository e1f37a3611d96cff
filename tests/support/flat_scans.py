"""The functions of flash-linear-attention that `recurrent.levels` calls, by their definition, in any precision.

The slow twin of all three: sequences one after the other, token after token, each from its initial state. It has their
arguments as `levels` passes them, and knows nothing of trees.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def flat_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [1, T, H, V] and, if wanted, the final states [n, H, K, V] of the n sequences.

    `chunk_indices` and `cu_seqlens_cpu` only save the package work. They must describe the same sequences.
    """
    assert cu_seqlens is not None
    assert cu_seqlens_cpu is not None
    assert scale is not None
    bounds = cu_seqlens.tolist()
    assert cu_seqlens_cpu.tolist() == bounds
    if chunk_indices is not None:
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        assert chunk_indices.tolist() == [[i, c] for i, size in enumerate(sizes) for c in range((size + 63) // 64)]
    heads = v.shape[2]
    q, k = (x[0].repeat_interleave(heads // x.shape[2], 1) for x in (q, k))
    decay = (g[0] if g.ndim == 4 else g[0][..., None]).exp()[..., None]  # [T, H, K or 1, 1]
    outputs, finals = [], []
    for sequence, (begin, end) in enumerate(itertools.pairwise(bounds)):
        h = v.new_zeros(heads, k.shape[-1], v.shape[-1]) if initial_state is None else initial_state[sequence]
        for token in range(begin, end):
            h = h * decay[token]
            new = v[0, token]
            if beta is not None:
                new = beta[0, token][:, None] * (new - torch.einsum("hk,hkv->hv", k[token], h))
            h = h + k[token][:, :, None] * new[:, None, :]
            outputs.append(scale * torch.einsum("hk,hkv->hv", q[token], h))
        finals.append(h)
    return torch.stack(outputs)[None], torch.stack(finals) if output_final_state else None
