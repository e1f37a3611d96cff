"""A smaller row that fits into memory: some of the trajectories of a row, whole or between two depths.

    row, limit --neighbours_within--> groups of trajectories        row, RowPart --restrict_row--> row

        0 - 1 - 2 - 3            trajectories end at 3, 5 and 8; the part
            |-- 4 - 5            has 1 and 2, from depth 1 to depth 4:        1 - 4 - 5
            `-- 6 - 7 - 8                                                     `-- 6 - 7

The result is a row like any other: its positions start at 0, and its weights belong to the chosen trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from treepack.data.batch import Batch, TermTensors, select_terms
from treepack.rl.rollout_parts import first_of_each
from treepack.trajectory import Int64
from treepack.trie.nodes import path_in_row, path_to


@dataclass(frozen=True)
class RowPart:
    """Trajectories of a row (their indices in the row, ascending), each from depth `start` up to depth `end`."""

    trajectories: tuple[int, ...]
    start: int
    end: int


def neighbours_within(row: Batch, limit: int) -> list[list[int]]:
    """Return the trajectories of a row on the CPU in groups of neighbours, which share most.

    The tokens of a group are at most `limit`, each shared one counted once, or the group is one longer trajectory.
    """
    subtree_end, ends = row.subtree_end.numpy(), row.trajectory_ends.numpy()
    groups: list[list[int]] = []
    inside, size = np.zeros(len(subtree_end), bool), limit
    for i in np.argsort(ends, kind="stable").tolist():  # depth-first order
        path = path_in_row(subtree_end, ends[i])
        more = int(np.count_nonzero(~inside[path]))
        if not groups or (more and size + more > limit):
            groups.append([])
            inside[:], size, more = False, 0, len(path)
        inside[path] = True
        size += more
        groups[-1].append(i)
    return groups


def restrict_row(batch: Batch, part: RowPart) -> Batch:
    """Return the row of a part of a row: its tokens, the weights of its trajectories and their terms.

    If none of its tokens has a weight and the row has no terms, every token that is predicted gets weight 1 for each
    trajectory through it.

    Args:
        batch: a row on the CPU.
        part: trajectories and depths; each trajectory is longer than `start`.
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
