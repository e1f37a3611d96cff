"""Check the shape of a row that was read from a file: lengths of its columns, and indices that stay inside of it.

Code that reads rows relies on this; `check.check_row` checks the rest of the definition.
"""

from __future__ import annotations

import numpy as np

from treepack.columns import BY_NAME, Axis
from treepack.errors import TreepackError
from treepack.pack.row import Row, RowTerms
from treepack.rl.rollout_parts import first_of_each
from treepack.trajectory import Int32

_PER_TOKEN = ("position_ids", "parent", "subtree_end", "scale", "loss_weight")


def check_shape(row: Row) -> None:
    """Check that the lists of a row have one value for each token, trajectory or term, and point into the row.

    Raises:
        TreepackError: naming the row and the column.
    """
    num = row.num_tokens
    if num < 1:
        raise TreepackError(f"row {row.row_id}: has no token; pack the trie again")
    for name in _PER_TOKEN:
        if (size := len(getattr(row, name))) != num:
            raise TreepackError(f"row {row.row_id}: {name} has {size} values for {num} tokens; pack the trie again")
    if row.routes is not None and len(row.routes) != num:
        raise TreepackError(
            f"row {row.row_id}: routes has {len(row.routes)} values for {num} tokens; pack the trie again"
        )
    if len(row.trajectory_groups) != len(row.trajectory_ids) or len(row.trajectory_ends) != len(row.trajectory_ids):
        raise TreepackError(
            f"row {row.row_id}: trajectory_ids, trajectory_groups and trajectory_ends differ in length; "
            "pack the trie again"
        )
    index = np.arange(num, dtype=np.int32)
    inside = {
        "input_ids": row.input_ids >= 0,
        "position_ids": (row.position_ids >= 0) & (row.position_ids <= index),
        "parent": (row.parent >= -1) & (row.parent < index),
        "subtree_end": (row.subtree_end > index) & (row.subtree_end <= num),
        "scale": row.scale > 0,
    }
    for name, good in inside.items():
        if not good.all():
            raise TreepackError(f"row {row.row_id}: {name} is wrong at token {good.argmin()}; pack the trie again")
    if not _all_below(row.trajectory_ends, num):
        raise TreepackError(f"row {row.row_id}: trajectory_ends points outside the row; pack the trie again")
    if row.terms is not None:
        _check_terms(row, row.terms)


def _check_terms(row: Row, terms: RowTerms) -> None:
    num, sizes = len(row.trajectory_ids), {len(terms.token), len(terms.trajectory), len(terms.weight)}
    for column in BY_NAME.values():
        values = getattr(terms, column.name)
        if values is not None and column.axis is Axis.TRAINED:
            sizes.add(len(values))
        elif values is not None and len(values) != num:
            raise TreepackError(
                f"row {row.row_id}: {column.packed} needs one value per trajectory; pack the trie again"
            )
    if (rollouts := terms.rollout) is not None:
        # The first trajectory of a rollout names itself, and no later one: [0, 0, 2] is possible, [1, 1] is not.
        named = rollouts[rollouts >= 0]
        inside = bool((rollouts >= -1).all() and (rollouts <= np.arange(num)).all())
        if not inside or (rollouts[named] != named).any():
            raise TreepackError(f"row {row.row_id}: trajectory_rollouts is impossible; pack the trie again")
        # Trajectories of one rollout have one number, and others have others.
        numbers = terms.rollout_number
        if numbers is not None and not np.array_equal(np.where(numbers < 0, -1, first_of_each(numbers)), rollouts):
            raise TreepackError(f"row {row.row_id}: trajectory_rollout_numbers is impossible; pack the trie again")
    inside = _all_below(terms.token, row.num_tokens) and _all_below(terms.trajectory, num)
    if len(sizes) != 1 or not inside:
        raise TreepackError(f"row {row.row_id}: its terms point outside the row; pack the trie again")


def _all_below(values: Int32, limit: int) -> bool:
    return bool(values.min(initial=0) >= 0 and values.max(initial=-1) < limit)
