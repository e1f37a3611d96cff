"""Trees of random forks as rows of a model, for the checks of rows in pieces.

    random_forks --Workload--> row_of_columns --> Batch

Columns are computed without a Python step for each token, because time on a GPU counts.
"""

from __future__ import annotations

import numpy as np
import torch
from workloads import Int64, Workload, depths, row_of_nodes

from treepack.data.batch import Batch


def random_forks(name: str, leaves: int, length: int, seed: int = 0) -> Workload:
    """Return `leaves` sequences of `length` tokens, each of which forks from an earlier one at a random token."""
    generator = np.random.default_rng(seed)
    # Of each sequence: its own first token, and (token, sequence) of all forks from it, ascending by token.
    first, origin, forks = [0], [0], [list[tuple[int, int]]()]
    for leaf in range(1, leaves):
        token, other = int(generator.integers(1, length)), int(generator.integers(leaf))
        while token <= first[other]:  # that part of the path belongs to the sequence from which `other` forks
            other = origin[other]
        forks[other].append((token, leaf))
        first.append(token)
        origin.append(other)
        forks.append([])
    parent, size, children = list[int](), list[int](), list[list[int]]()
    waiting = [(0, -1)]
    while waiting:
        leaf, node = waiting.pop()
        at = first[leaf]
        for token, other in [*sorted(forks[leaf]), (length, -1)]:
            if token > at:  # two forks from one token share the node before it
                parent.append(node)
                size.append(token - at)
                children.append([])
                if node >= 0:
                    children[node].append(len(size) - 1)
                node, at = len(size) - 1, token
            if other >= 0:
                waiting.append((other, node))
    return _depth_first(name, parent, size, children)


def _depth_first(name: str, parent: list[int], size: list[int], children: list[list[int]]) -> Workload:
    """Return the row of a tree, the largest child of each node first, as `pack` arranges it."""
    total = list(size)
    for node in _topological(children)[::-1]:
        total[node] += sum(total[child] for child in children[node])
    order, waiting = list[int](), [0]
    while waiting:
        order.append(waiting.pop())
        waiting += sorted(children[order[-1]], key=lambda child: total[child])
    place = {node: i for i, node in enumerate(order)}
    return row_of_nodes(name, [place.get(parent[node], -1) for node in order], [size[node] for node in order])


def _topological(children: list[list[int]]) -> list[int]:
    order = [0]
    for node in order:
        order += children[node]  # the loop sees them
    return order


def row_of_columns(number: int, ids: Int64, subtree_end: Int64, ends: Int64, trained: np.ndarray) -> Batch:
    """Return a row whose `trained` tokens, roots excepted, have one unit of weight for each trajectory through them."""
    position = depths(subtree_end) - 1
    parent = _parents(subtree_end)
    # Trajectories that end before token i: ends 1 3 of 4 tokens -> 0 0 1 1 2; through token i: the ends in its subtree
    before = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=len(ids)))])
    scale = before[subtree_end] - before[:-1]
    weights = torch.from_numpy(np.where(trained & (parent >= 0), scale, 0)).double()
    return Batch(
        row_id=number,
        step=None,
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(position),
        parent=torch.from_numpy(parent),
        subtree_end=torch.from_numpy(subtree_end).int(),
        scale=torch.from_numpy(scale).int(),
        loss_weight=weights,
        trajectory_ids=tuple(map(str, ends.tolist())),
        trajectory_ends=torch.from_numpy(ends),
        num_tokens=len(ids),
        total_weight=float(weights.sum()),
        tokens_flat=int(scale.sum()),
    )


def _parents(subtree_end: Int64) -> Int64:
    """Return `parent` [T], -1 at roots."""
    # A token follows its parent, unless a subtree ends between them; these are few.
    parent = np.arange(-1, len(subtree_end) - 1)
    open_ends: list[int] = []  # tokens before the last break whose subtree continues
    last = 0
    for token in np.flatnonzero(subtree_end[:-1] == np.arange(1, len(subtree_end))) + 1:
        run = np.arange(last, token)
        open_ends = [k for k in open_ends if subtree_end[k] > token]
        # Of a run of tokens that follow each other, the last one whose subtree continues and its ancestors are enough.
        continuing = run[subtree_end[run] > token]
        open_ends += _borders(continuing, subtree_end)
        parent[token] = max(open_ends) if open_ends else -1
        last = int(token)
    return parent


def _borders(run: Int64, subtree_end: Int64) -> list[int]:
    """Return the last token of each stretch of `run` with equal ends: the only ones that can be parents later."""
    # ends 9 9 7 7 5 -> the second, the fourth and the fifth
    if not len(run):
        return []
    last = np.append(subtree_end[run[1:]] != subtree_end[run[:-1]], True)
    found: list[int] = run[last].tolist()
    return found
