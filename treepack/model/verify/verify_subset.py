"""A smaller row for a comparison that must fit into memory: a subtree of a row, with some of its trajectories.

    row, RowPart --restrict_row--> row

        0 - 1 - 2 - 3            trajectories end at 3, 5 and 8; the part
            |-- 4 - 5            has 1 and 2, from depth 1 to depth 4:        1 - 4 - 5
            `-- 6 - 7 - 8                                                     `-- 6 - 7

The result is a row like any other: its positions start at 0, and its weights belong to the chosen trajectories.
`choose_part` selects neighbouring trajectories, because neighbours share most, and keeps places at which they branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import torch
from torch import Tensor

from treepack.data.batch import Batch, TermTensors, select_terms
from treepack.rl.rollout_parts import first_of_each
from treepack.trajectory import Int64


@dataclass(frozen=True)
class RowPart:
    """Trajectories of a row (their indices in the row, ascending), each from depth `start` up to depth `end`."""

    trajectories: tuple[int, ...]
    start: int
    end: int


def choose_part(batch: Batch, *, max_tokens: int, max_flat: int, max_depth: int) -> RowPart:
    """Choose the neighbouring trajectories of a row that share most and stay within three limits.

    A run with more trajectories is better than a run with fewer; of runs with equally many, the run with the smallest
    number of tokens is chosen. If no two trajectories fit whole, all are cut to a window of depths around the place at
    which most of them branch. A row with terms keeps at least one trained token, even beyond the limits.

    Args:
        batch: a row on the CPU.
        max_tokens: maximum tokens of the part, at least 2; each shared token counts once.
        max_flat: maximum tokens of its trajectories run alone.
        max_depth: maximum tokens of a trajectory.
    """
    parent, ends = batch.parent.numpy(), batch.trajectory_ends.numpy()
    order = np.argsort(ends, kind="stable").tolist()  # depth-first order: neighbours share most
    paths = [path_to(parent, int(ends[i])) for i in order]
    weights = (batch.loss_weight / batch.scale.clamp(min=1)).numpy()
    branching = _branching_window(paths, min(max_tokens, max_flat // 2, max_depth * 8 // 5))
    beginning = (0, max(2, min(max_depth, max_tokens, max_flat)))
    parts: list[RowPart] = []
    # Without terms a part may be without a trained token: `restrict_row` gives weights then.
    kinds = (True,) if batch.terms is not None else (True, False)
    for is_trained, (start, end) in product(kinds, ((0, max_depth), branching, beginning)):
        cut = [path[start:end] for path in paths]
        members = [i for i, path in enumerate(cut) if len(path) > 1]
        usable = [not is_trained or bool(weights[cut[i][1:]].any()) for i in members]
        run = _best_run([cut[i] for i in members], usable, max_tokens, max_flat)
        if run is not None:
            chosen = tuple(sorted(order[i] for i in members[run[0] : run[1]]))
            parts.append(RowPart(chosen, start, min(end, max(map(len, paths)))))
            if len(chosen) > 1 or len(members) == 1:
                return parts[-1]
    if parts:
        return max(parts, key=lambda part: len(part.trajectories))
    # No trained token within the limits: the trajectory whose first one comes first, cut after it.
    first = {i: int(np.flatnonzero(weights[path])[0]) for i, path in enumerate(paths) if weights[path].any()}
    i = min(first, key=first.__getitem__)
    return RowPart((order[i],), max(0, first[i] + 1 - beginning[1]), first[i] + 1)


def _branching_window(paths: Sequence[Int64], budget: int) -> tuple[int, int]:
    """Return the first and one past the last depth of a window of `budget` tokens where most neighbours branch."""
    # Half of the tokens before the branching, then room for four branches: 800 -> 400 before, 100 in each branch.
    counts = Counter(shared for a, b in pairwise(paths) if 0 < (shared := _num_shared(a, b)) < min(len(a), len(b)))
    if not counts:
        return 0, 0
    depth = min(counts, key=lambda shared: (-counts[shared], shared))
    return max(0, depth - budget // 2), depth + max(1, budget // 8)


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
        part: trajectories and depths, as `choose_part` returns them; each trajectory is longer than `start`.
    """
    parent = batch.parent.numpy()
    paths = [path_to(parent, int(batch.trajectory_ends[i]))[part.start : part.end] for i in part.trajectories]
    passes = np.zeros(len(parent), np.int64)  # of the chosen trajectories through each token
    for path in paths:
        passes[path] += 1
    tokens = np.flatnonzero(passes)
    # tokens [1, 4, 5, 6, 7] -> place [-1, 0, -1, -1, 1, 2, 3, 4, -1, -1]: the place of each token in the new row
    place = np.full(len(parent) + 1, -1, np.int64)
    place[tokens] = np.arange(len(tokens))
    # One past the last kept token of a subtree is the number of kept tokens before its end: end 6 -> 3.
    before = np.concatenate([[0], np.cumsum(passes > 0)])
    chosen, scale = torch.from_numpy(tokens), torch.from_numpy(passes[tokens])
    new_parent = torch.from_numpy(place[parent[tokens]])  # parent -1 of a root reads the last entry, which is -1
    share = (batch.loss_weight / batch.scale.clamp(min=1))[chosen]
    weight = torch.where(new_parent >= 0, share * scale, 0)  # nothing predicts a new root
    if not weight.any() and batch.terms is None:
        weight = torch.where(new_parent >= 0, scale, 0).to(weight.dtype)
    return replace(
        batch,
        input_ids=batch.input_ids[chosen],
        position_ids=batch.position_ids[chosen] - part.start,
        parent=new_parent,
        subtree_end=torch.from_numpy(before[batch.subtree_end.numpy()[tokens]]).to(batch.subtree_end.dtype),
        scale=scale.to(batch.scale.dtype),
        loss_weight=weight,
        trajectory_ids=tuple(batch.trajectory_ids[i] for i in part.trajectories),
        trajectory_ends=torch.from_numpy(place[[path[-1] for path in paths]]),
        num_tokens=len(tokens),
        total_weight=float(weight.sum()),
        tokens_flat=int(passes.sum()),
        terms=None if batch.terms is None else _restrict_terms(batch.terms, place, new_parent.numpy(), part),
        schedule=None,
        routes=None if batch.routes is None else batch.routes[chosen],
    )


def _restrict_terms(terms: TermTensors, place: Int64, new_parent: Int64, part: RowPart) -> TermTensors:
    """Return the terms of the chosen trajectories about tokens of the part that another token predicts."""
    number = np.full(len(terms.group), -1, np.int64)  # of each trajectory in the new row
    number[list(part.trajectories)] = np.arange(len(part.trajectories))
    token = place[terms.tokens[terms.index.long()].numpy()]  # [N], the new place of the token of each term, or -1
    owner = number[terms.trajectory.numpy()]
    # A token that is kept for another trajectory is still on the path of each trajectory that has a term about it,
    # because all are cut at the same depths.
    kept = np.flatnonzero((owner >= 0) & (token >= 0) & (new_parent[token] >= 0))
    # Entries of `tokens` are ascending, and so are their places; a token with two temperatures has two entries.
    entries, index = np.unique(terms.index.numpy()[kept], return_inverse=True)
    owners = torch.tensor(part.trajectories, dtype=torch.int64)
    cut = select_terms(terms, torch.from_numpy(kept), scored=torch.from_numpy(entries), owners=owners)
    return replace(
        cut,
        tokens=torch.from_numpy(place[cut.tokens.numpy()]),
        index=_like(index, terms.index),
        trajectory=_like(owner[kept], terms.trajectory),
        rollout=None if cut.rollout is None else _like(first_of_each(cut.rollout.numpy()), cut.rollout),
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
