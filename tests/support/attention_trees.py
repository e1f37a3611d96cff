"""Made-up rows for tests of attention: trees by their `parent` or `subtree_end`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
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


def caterpillar(trunk: int, turns: int, leaf: int, piece: int) -> Tensor:
    """subtree_end [1, T] of a trunk that continues with `turns` pieces, each beside a leaf."""
    # nodes 0 | 1 2 | 3 4 | ... with parents -1 | 0 0 | 2 2 | ...
    nodes = [(trunk, -1)]
    for turn in range(turns):
        nodes += [(leaf, 2 * turn), (piece, 2 * turn)]
    return ends_of(*nodes)


def star(prompt: int, branches: int, size: int) -> Tensor:
    return ends_of((prompt, -1), *[(size, 0)] * branches)


@st.composite
def forests(draw: st.DrawFn, *, lengths: Sequence[int], max_nodes: int) -> Tensor:
    """subtree_end [1, T] of up to `max_nodes` nodes, each of one of the `lengths`, and up to 5 tokens of padding."""
    nodes: list[tuple[int, int]] = []
    path: list[int] = []  # the nodes above the next one
    for node in range(draw(st.integers(1, max_nodes))):
        path = path[: draw(st.integers(0, len(path)))]
        nodes.append((draw(st.sampled_from(lengths)), path[-1] if path else -1))
        path.append(node)
    return ends_of(*nodes, *[(1, -1)] * draw(st.integers(0, 5)))
