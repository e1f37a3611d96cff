"""Made-up rows for tests of attention: trees by their `parent` or `subtree_end`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def comb(stem: int, tooth: int, teeth: int) -> Tensor:
    """subtree_end [1, T] of a stem from whose every token hangs a tooth; the last token continues it."""
    end = torch.zeros(stem + teeth * tooth, dtype=torch.int32)
    end[:stem] = len(end)
    for i in range(teeth):
        end[stem + i * tooth : stem + (i + 1) * tooth] = stem + (i + 1) * tooth
    return end[None]


def random_tree(length: int, seed: int) -> Tensor:
    """subtree_end [1, T] of a random forest in depth-first order, with long runs, branches and several roots."""
    generator = np.random.default_rng(seed)
    end = np.arange(1, length + 1)
    path: list[int] = []
    for i in range(length):
        if path and generator.random() < 0.03:
            path = path[: generator.integers(0, len(path))]
        path.append(i)
        end[path] = i + 1
    return torch.tensor(end, dtype=torch.int32)[None]


def ends_of(*nodes: tuple[int, int]) -> Tensor:
    """subtree_end [1, T] of nodes (tokens, parent) in depth-first order; parent -1 is a root."""
    size = np.array([tokens for tokens, _ in nodes])
    end = size.cumsum()
    for node in range(len(nodes) - 1, -1, -1):
        parent = nodes[node][1]
        if parent >= 0:
            end[parent] = max(end[parent], end[node])
    return torch.from_numpy(end.repeat(size).astype(np.int32))[None]


def chain(length: int) -> Tensor:
    return ends_of((length, -1))


def star(prompt: int, branches: int, size: int) -> Tensor:
    return ends_of((prompt, -1), *[(size, 0)] * branches)
