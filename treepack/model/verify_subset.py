"""A smaller row for a comparison that must fit into memory: some trajectories of a row, each up to a depth.

    row, trajectories [1, 2], depth 3 --restrict_row--> row

        0 - 1 - 2 - 3            trajectory 0 ends at 3, 1 at 5, 2 at 8
            |-- 4 - 5                                         0 - 1 - 4        tokens 0 1 4 6 of the row;
            `-- 6 - 7 - 8                                         `-- 6        both trajectories are cut at depth 3

The result is a row like any other: a subtree of the row with the same root, its weights those of the chosen
trajectories. `choose_part` selects neighbouring trajectories, because neighbours share most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treepack.data.batch import Batch, TermTensors
from treepack.trajectory import Int64


@dataclass(frozen=True)
class RowPart:
    """Trajectories of a row (their indices in the row, ascending), each up to its first `depth` tokens."""

    trajectories: tuple[int, ...]
    depth: int


def choose_part(batch: Batch, *, max_tokens: int, max_flat: int, max_depth: int) -> RowPart:
    """Choose the neighbouring trajectories of a row that share most and stay within three limits.

    Among runs of neighbours of equal number, the one with the fewest tokens is chosen; a run with more trajectories is
    better than one with fewer. If no trajectory fits whole, trajectories are cut at the depth that fits. A row with
    terms keeps at least one trained token, even beyond the limits.

    Args:
        batch: a row on the CPU.
        max_tokens: maximum tokens of the part, at least 2; each shared token counts once.
        max_flat: maximum tokens of its trajectories run alone.
        max_depth: maximum tokens of a trajectory.
    """
    parent, ends = batch.parent.numpy(), batch.trajectory_ends.numpy()
    paths = [path_to(parent, end) for end in ends.tolist()]
    weights = (batch.loss_weight / batch.scale.clamp(min=1)).numpy()
    depth = max(2, min(max_depth, max_tokens, max_flat))
    shortest = min((len(path) for path in paths if weights[path].any()), default=depth)
    if shortest <= depth:  # at least one trajectory fits whole; longer ones are cut only by `max_depth`
        depth = max_depth
    order = sorted(range(len(paths)), key=lambda i: int(ends[i]))  # depth-first order: neighbours share most
    cut = [paths[i][:depth] for i in order]
    trained = [bool(weights[path[1:]].any()) for path in cut]
    run = _best_run(cut, trained, max_tokens, max_flat)
    if run is None and batch.terms is None:  # no trained token within the limits: `restrict_row` gives weights
        run = _best_run(cut, [True] * len(cut), max_tokens, max_flat)
    if run is None:  # the trajectory that needs the fewest tokens up to a trained one, cut after it
        i, depth = min(
            ((i, int(np.flatnonzero(weights[path])[0]) + 1) for i, path in enumerate(paths) if weights[path].any()),
            key=lambda pair: pair[1],
        )
        return RowPart((i,), depth)
    return RowPart(tuple(sorted(order[run[0] : run[1]])), depth)


def _best_run(
    paths: Sequence[Int64], trained: Sequence[bool], max_tokens: int, max_flat: int
) -> tuple[int, int] | None:
    """Return the first and one past the last of the run of `paths`; None if no run has a trained path."""
    # The tokens of a run in depth-first order: the first path, then of each next path the part that it does not share
    # with the one before it. Paths 0 1 2, 0 1 3, 0 4 -> lengths 3 3 2, shared 2 1 -> the run of all has 3 + 1 + 1 = 5.
    shared = [_num_shared(a, b) for a, b in pairwise(paths)]
    best: tuple[int, int, int, int] | None = None
    end, tokens, flat = 0, 0, 0
    for start in range(len(paths)):
        if end <= start:
            end, tokens, flat = start, 0, 0
        while end < len(paths):
            more = len(paths[end]) - (shared[end - 1] if end > start else 0)
            if tokens + more > max_tokens or flat + len(paths[end]) > max_flat:
                break
            tokens, flat, end = tokens + more, flat + len(paths[end]), end + 1
        if any(trained[start:end]):
            candidate = (end - start, -tokens, -start, end)
            best = candidate if best is None or candidate > best else best
        if end > start:  # without its first path a run loses the tokens that its second path does not share with it
            tokens -= len(paths[start]) - (shared[start] if end > start + 1 else 0)
            flat -= len(paths[start])
    return None if best is None else (-best[2], best[3])


def _num_shared(a: Int64, b: Int64) -> int:
    # paths [0, 1, 2] and [0, 1, 3, 4] -> 2
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


def restrict_row(batch: Batch, part: RowPart) -> Batch:
    """Return the row of a part of a row: its tokens, the weights of its trajectories and their terms.

    If none of its tokens has a weight and the row has no terms, every token that is predicted gets weight 1 for each
    trajectory through it.

    Args:
        batch: a row on the CPU.
        part: trajectories and depth, as `choose_part` returns them.
    """
    parent = batch.parent.numpy()
    paths = [path_to(parent, int(batch.trajectory_ends[i]))[: part.depth] for i in part.trajectories]
    passes = np.zeros(len(parent), np.int64)  # of the chosen trajectories through each token
    for path in paths:
        passes[path] += 1
    tokens = np.flatnonzero(passes)
    # tokens [0, 1, 4, 6] -> place [0, 1, -1, -1, 2, -1, 3, ...]: the place of each token in the new row
    place = np.full(len(parent) + 1, -1, np.int64)
    place[tokens] = np.arange(len(tokens))
    # One past the last kept token of a subtree is the number of kept tokens before its end: end 9 -> 4.
    before = np.concatenate([[0], np.cumsum(passes > 0)])
    chosen = torch.from_numpy(tokens)
    share = (batch.loss_weight / batch.scale.clamp(min=1))[chosen]
    scale = torch.from_numpy(passes[tokens])
    weight = share * scale
    new_parent = torch.from_numpy(place[parent[tokens]])  # parent -1 of a root reads the last entry, which is -1
    if not weight.any() and batch.terms is None:
        weight = torch.where(new_parent >= 0, scale, 0).to(weight.dtype)
    return replace(
        batch,
        input_ids=batch.input_ids[chosen],
        position_ids=batch.position_ids[chosen],
        parent=new_parent,
        subtree_end=torch.from_numpy(before[batch.subtree_end.numpy()[tokens]]).to(batch.subtree_end.dtype),
        scale=scale.to(batch.scale.dtype),
        loss_weight=weight,
        trajectory_ids=tuple(batch.trajectory_ids[i] for i in part.trajectories),
        trajectory_ends=torch.from_numpy(place[[path[-1] for path in paths]]),
        num_tokens=len(tokens),
        total_weight=float(weight.sum()),
        tokens_flat=int(passes.sum()),
        terms=None if batch.terms is None else _restrict_terms(batch.terms, place, part, paths),
        schedule=None,
    )


def _restrict_terms(terms: TermTensors, place: Int64, part: RowPart, paths: Sequence[Int64]) -> TermTensors:
    """Return the terms of the chosen trajectories whose tokens are within their paths."""
    number = np.full(len(terms.group), -1, np.int64)  # of each trajectory in the new row
    number[list(part.trajectories)] = np.arange(len(part.trajectories))
    token = terms.tokens[terms.index.long()].numpy()  # [N], the token of each term
    owner = number[terms.trajectory.numpy()]
    # A token that is kept for another trajectory is still on the path of each trajectory that has a term about it,
    # because paths are cut at one depth.
    kept = np.flatnonzero((owner >= 0) & (place[token] >= 0))
    tokens, index = np.unique(place[token[kept]], return_inverse=True)
    per_term: dict[str, Any] = {}
    for field in fields(terms):
        column = getattr(terms, field.name)
        if field.name in ("group", "reward") and column is not None:
            per_term[field.name] = column[list(part.trajectories)]
        elif field.name not in ("tokens", "index", "trajectory", "group", "reward"):
            per_term[field.name] = None if column is None else column[torch.from_numpy(kept)]
    return TermTensors(
        tokens=torch.from_numpy(tokens),
        index=_like(index, terms.index),
        trajectory=_like(owner[kept], terms.trajectory),
        **{"reward": None, **per_term},
    )


def _like(values: Int64, column: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(column.dtype)


def path_to(parent: Int64, token: int) -> Int64:
    """Return the tokens from the root to `token`, ascending."""
    # parent [-1, 0, 1, 0, 3], token 4 -> [0, 3, 4]
    path = []
    while token >= 0:
        path.append(token)
        token = int(parent[token])
    return np.array(path[::-1], np.int64)
