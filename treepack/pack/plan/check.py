"""Check a plan against its definition."""

from __future__ import annotations

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan import balance
from treepack.pack.plan.plan import Plan, PlanTotals
from treepack.pack.plan.unions import row_sizes
from treepack.trie.trie import Trie


def check_plan(trie: Trie, plan: Plan) -> PlanTotals:
    """Check `plan` against the definition and count what its rows hold, sharing nothing with the methods.

    Raises:
        TreepackError: a trajectory without a row, a row over a limit, empty, or with several training steps.
    """
    row_of, num_rows = plan.row_of, plan.num_rows
    if row_of.shape != (trie.num_trajectories,) or row_of.min(initial=0) < 0:
        raise TreepackError(f"the plan does not give each of the {trie.num_trajectories} trajectories a row")
    held = np.bincount(row_of, minlength=num_rows)
    if not held.all():
        raise TreepackError(f"row {int(held.argmin())} of the plan is empty")
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
