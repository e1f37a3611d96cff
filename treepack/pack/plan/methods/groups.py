"""The method groups: each group whole in one row, for objectives that compare the trajectories of a group (dpo).

    groups   g0: t0 t1 t2   g1: t3 t4   g2: t5      items 0 0 0 1 1 2     rows of whole items by `fill.py`

Groups in one row share their common prefixes, but common prefixes are not a reason to put groups into one row.
"""

from __future__ import annotations

from treepack.errors import TreepackError
from treepack.pack.plan.problem import RowLimits
from treepack.pack.plan.unions import row_sizes
from treepack.rl.group_tree import group_codes
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


def whole_groups(trie: Trie, limits: RowLimits) -> Int64:
    """Return the item of each trajectory, int64 [num_trajectories]: one item for each training step and group.

    Raises:
        TreepackError: a group exceeds a limit.
    """
    items = group_codes(trie)
    sizes = row_sizes(trie, items, int(items.max(initial=-1)) + 1)
    checked = (
        (sizes.tokens, "tokens", "the capacity", limits.capacity),
        (sizes.pairs, "score pairs", "the budget of pairs", limits.pairs),
        (sizes.terms, "loss terms", "the budget of terms", limits.terms),
    )
    for values, unit, name, limit in checked:
        if limit is not None and (values > limit).any():
            worst = int(values.argmax())
            group = trie.trajectories["group_id"][int((items == worst).argmax())].as_py()
            raise TreepackError(
                f"group {group} has {values[worst]} {unit} and {name} is {limit} ({int((values > limit).sum())} such "
                "groups); raise it, or use a --method that splits groups"
            )
    return items
