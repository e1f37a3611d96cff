"""The trie of the trajectories in packed rows, if the trie of the packed directory is missing.

    Row, Row, ... --trie_of_rows--> Trie

Rows contain ids, groups, steps, rewards and advantages. Rows without terms do not record which of several trajectories
trains a token; in the trie, all of them train it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from treepack.pack.row import Row
from treepack.trajectory import Float64, Int64, Tokens, Trajectory, spans_of_mask
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.nodes import path_in_row
from treepack.trie.trie import Trie


def trie_of_rows(rows: Iterable[Row]) -> Trie:
    """Build the trie of everything in `rows`, prefixes shared between all trajectories of a step.

    Raises:
        TreepackError: there is no row.
    """
    return build_trie(trajectory for row in rows for trajectory in _trajectories(row))


def _trajectories(row: Row) -> Iterator[Trajectory]:
    terms = row.terms
    for i, end in enumerate(row.trajectory_ends.tolist()):
        path = path_in_row(row.subtree_end, end)
        advantages = reward = None
        trained = row.loss_weight[path] > 0
        if terms is not None:
            own_terms = np.flatnonzero(terms.trajectory == i)
            trained = np.zeros(len(path), np.bool_)
            # Terms name row indices; the position of a token is its index on the path.
            trained[row.position_ids[terms.token[own_terms]]] = True
            advantages = _complete(terms.advantage, own_terms)
            if terms.reward is not None and not np.isnan(terms.reward[i]):
                reward = float(terms.reward[i])
        content = Tokens(row.input_ids[path], *spans_of_mask(trained.astype(np.float64)), advantage=advantages)
        yield Trajectory(
            row.trajectory_ids[i],
            f"row {row.row_id}",
            content,
            group_id=row.trajectory_groups[i],
            step=row.step,
            reward=reward,
        )


def _complete(values: Float64 | None, terms: Int64) -> Float64 | None:
    """Return the values of `terms`, None if there are none or one is NaN."""
    if values is None or np.isnan(values[terms]).any():
        return None
    return values[terms]
