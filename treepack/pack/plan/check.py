"""Check a plan against its definition: every trajectory in one row, and every row within its limits.

The checker counts row sizes in the trie (`unions.py`) and uses no code of the methods.
"""

from __future__ import annotations

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan import balance
from treepack.pack.plan.plan import Plan, PlanTotals
from treepack.pack.plan.unions import row_sizes
from treepack.trie.trie import Trie


def check_plan(trie: Trie, plan: Plan) -> PlanTotals:
    """Check `plan` against its definition, and return the totals of its rows.

    Raises:
        TreepackError: a trajectory has no row; a row exceeds a limit, is empty or mixes training steps; the number of
            rows of a step is not a multiple of `plan.multiple_of`; or the plan has fewer tokens than its lower bound.
    """
    row_of, num_rows = plan.row_of, plan.num_rows
    if row_of.shape != (trie.num_trajectories,) or row_of.min(initial=0) < 0:
        raise TreepackError(f"the plan does not give each of the {trie.num_trajectories} trajectories a row")
    trajectories_of_row = np.bincount(row_of, minlength=num_rows)
    if not trajectories_of_row.all():
        raise TreepackError(f"row {int(trajectories_of_row.argmin())} of the plan is empty")
    sizes = row_sizes(trie, row_of, num_rows)
    checked = (
        (sizes.tokens, "tokens", "the capacity of", plan.limits.capacity),
        (sizes.pairs, "score pairs", "the budget of pairs,", plan.limits.pairs),
        (sizes.terms, "loss terms", "the budget of terms,", plan.limits.terms),
    )
    for values, unit, name, limit in checked:
        if limit is not None and (values > limit).any():
            row = int((values > limit).argmax())
            raise TreepackError(f"row {row} of the plan has {values[row]} {unit}, over {name} {limit}")
    steps = trie.step_rank
    # steps_of keeps one step of each row, so a trajectory of a second step differs from it: steps [0, 1], row_of [0, 0]
    # -> step of row 0 is 1 -> [0, 1] != [1, 1] -> trajectory 0 is in a mixed row.
    mixed = steps != balance.steps_of(row_of, steps, num_rows)[row_of]
    if mixed.any():
        raise TreepackError(f"row {int(row_of[mixed].min())} of the plan mixes training steps")
    rows_of_step = np.bincount(balance.steps_of(row_of, steps, num_rows))
    uneven = rows_of_step % plan.multiple_of > 0
    if uneven.any():
        raise TreepackError(
            f"a training step of the plan has {rows_of_step[uneven][0]} rows; expected a multiple of {plan.multiple_of}"
        )
    if plan.lower_bound > sizes.tokens.sum():
        raise TreepackError(f"the plan has {sizes.tokens.sum()} tokens, below its lower_bound of {plan.lower_bound}")
    return PlanTotals(sizes.tokens, sizes.pairs, sizes.terms)
