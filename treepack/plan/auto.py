"""The default method: exact for small trees, a search with a certificate for all others.

    up to 13 leaves    a program over sets of leaves: the optimum
    more               the better of two quick plans --ruin and recreate--> plan;  recursive bound --programs--> bound

How much work is done follows from `effort` and from the leaves of all trees together, never from the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treepack.plan import bounds, cuts
from treepack.plan.problem import Limits, Search, Solution, Tree
from treepack.trajectory import Int64


@dataclass(frozen=True, slots=True)
class Work:
    """Steps of the search for each leaf in each pass, passes, and the largest subtree that is bounded by a program.

    From `plenty` leaves on the work for each leaf shrinks, but not the work for all of them.
    """

    steps: int
    passes: int
    largest: int
    plenty: int

    def for_leaves(self, count: int) -> Work:
        """The work for each leaf among `count` leaves of all trees."""
        if count <= self.plenty:
            return self
        share = self.plenty / count
        return Work(max(LEAST_STEPS, int(self.steps * share)), self.passes, max(12, int(self.largest * share)), count)


LEAST_STEPS = 8
WORK = {
    "low": Work(steps=30, passes=2, largest=12, plenty=3000),
    "normal": Work(steps=150, passes=3, largest=300, plenty=400),
    "high": Work(steps=1000, passes=6, largest=500, plenty=1000),
}


def auto(tree: Tree, limits: Limits, search: Search) -> Solution:
    """Fewest tokens, then fewest rows, as far as the effort reaches, and a proof of how far that can be from the least.

    Never worse than `contiguous` and `heuristic`.
    """
    quick = [method(tree, limits, search).row_of_leaf for method in (cuts.contiguous, cuts.deepest_first)]
    rows = min(quick, key=lambda found: _cost(tree, found))
    bound = bounds.recursive_bound(tree, limits.capacity)
    if _cost(tree, rows) == (bound, -(-bound // limits.capacity)):
        return Solution(rows, bound)
    from treepack.plan.subsets import MOST_LEAVES, subsets

    if tree.num_leaves <= MOST_LEAVES:
        return subsets(tree, limits, search)
    from treepack.plan.anneal import anneal

    work = WORK[search.effort].for_leaves(max(search.num_leaves, tree.num_leaves))
    rows = anneal(tree, limits, rows, steps_per_leaf=work.steps, passes=work.passes)
    if _cost(tree, rows)[0] > bound:
        bound = bounds.lower_bound(tree, limits.capacity, rows, largest=work.largest)
    return Solution(rows, bound)


def _cost(tree: Tree, rows: Int64) -> tuple[int, int]:
    """Tokens and rows of a plan."""
    from treepack.plan.counting import passes

    used = passes(tree.parent, tree.leaf, rows)
    return int(np.dot(tree.size, used)), int(used[0])
