"""The default method: the optimum of small trees, and a search with a certified bound for all others.

    up to 13 leaves    a program over sets of leaves: the optimum
    up to 60           the multi-path program, which nearly always proves the optimum
    more               the best of quick plans --ruin and recreate--> plan;  --programs for subtrees--> bound

Unless the effort is high, a plan within 0.1 % of the bound by counting is good enough, and nothing follows it.
The amount of work depends on `effort` and on the number of leaves of all trees, never on the clock. The parts are in
`methods/` and `bounds/`; this file chooses between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from treepack.pack.plan.bounds.counting import passes
from treepack.pack.plan.bounds.lower_bound import ProofEffort, count_tree, lower_bound
from treepack.pack.plan.methods import online
from treepack.pack.plan.methods.anneal import anneal
from treepack.pack.plan.methods.contiguous import contiguous, deepest_first
from treepack.pack.plan.methods.exact import exact
from treepack.pack.plan.methods.subsets import MAX_LEAVES, subsets
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution, path_pairs
from treepack.trajectory import Int64

# Total leaves above which the steps per leaf are scaled by sqrt(LEAVES_FOR_FULL_EFFORT / leaves), so that ten times the
# leaves cost about three times the steps in total, not ten times.
_LEAVES_FOR_FULL_EFFORT = 600
_MIN_STEPS = 8  # per leaf and pass; the effort normal comes down to it at 843,750 leaves
_MIN_STEPS_FOR_ALL_PASSES = 50  # per leaf; with fewer there are two passes: above 21,600 leaves at the effort normal
# Unless the effort is high, the search ends at a plan within these multiples of the lower bounds of tokens and rows.
TOKENS_TO_STOP, _ROWS_TO_STOP = 1.001, 1.01


@dataclass(frozen=True, slots=True)
class _SearchWork:
    """Work of one effort: passes of the search, steps per leaf and pass, and the effort of the proof.

    `proofs` are pairs of a maximum number of leaves of all trees and the effort of the proof up to this number,
    ascending. Above `_LEAVES_FOR_FULL_EFFORT` leaves there are fewer steps.
    """

    steps: int
    passes: int
    proofs: tuple[tuple[float, ProofEffort], ...]

    def search_for(self, leaves: int) -> tuple[int, int]:
        """Return the steps per leaf and pass, and the number of passes, for `leaves` leaves in total."""
        # steps 300: 600 leaves -> 300 steps in 3 passes, 2,400 -> 150 in 3, 60,000 -> 30 in 2
        scale = math.sqrt(_LEAVES_FOR_FULL_EFFORT / max(_LEAVES_FOR_FULL_EFFORT, leaves))
        steps = max(_MIN_STEPS, int(self.steps * scale))
        return steps, self.passes if steps >= _MIN_STEPS_FOR_ALL_PASSES else min(2, self.passes)

    def proof_for(self, tree_leaves: int, leaves: int) -> ProofEffort:
        """Return the effort of the proof for a tree of `tree_leaves` leaves, one of several with `leaves` in total."""
        proof = next(proof for max_leaves, proof in self.proofs if leaves <= max_leaves)
        # Each tree gets its share of the work of column generation.
        return replace(proof, entries=proof.entries * tree_leaves / leaves)


# Column generation improves bounds for up to a few hundred leaves at once, so larger trees use it for smaller subtrees.
# All trees share `entries`, so the more leaves they have in total, the fewer and smaller the programs must be.
_BASIC = (float("inf"), ProofEffort(sets=12, exact=12, programs=(), entries=0))
_SMALL_PARTS = (20_000, ProofEffort(sets=12, exact=20, programs=(), entries=0))
_WORK = {
    "low": _SearchWork(steps=30, passes=2, proofs=(_SMALL_PARTS, _BASIC)),
    "normal": _SearchWork(
        steps=300,
        passes=3,
        proofs=(
            (400, ProofEffort(sets=12, exact=60, programs=(120, 300), entries=5e9)),
            (3000, ProofEffort(sets=12, exact=40, programs=(120,), entries=2.5e9)),
            _SMALL_PARTS,
            (150_000, ProofEffort(sets=13, exact=17, programs=(), entries=0)),
            _BASIC,
        ),
    ),
    "high": _SearchWork(
        steps=2000,
        passes=6,
        proofs=(
            (400, ProofEffort(sets=12, exact=60, programs=(120, 400), entries=4e10)),
            (3000, ProofEffort(sets=12, exact=60, programs=(120, 240), entries=4e10)),
            (20_000, ProofEffort(sets=12, exact=60, programs=(120,), entries=4e10)),
            _BASIC,
        ),
    ),
}


def auto(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    """Plan a tree for minimum tokens, then minimum rows, within the work of the effort; return a bound too.

    The plan is never worse than the plan of `contiguous`. With more than 13 leaves it is never worse than the other
    quick plans that were made before one was close enough to the bound: first fit and `heuristic`.
    """
    rows = contiguous(tree, limits, search).row_of_leaf
    known = count_tree(tree, limits.capacity)
    bound = int(known.tokens[0])
    # As many rows as pass through the root, or as contain so many tokens.
    best = bound, max(int(known.times[0]), -(-bound // limits.capacity))
    # The bound is met in tokens, and there cannot be fewer rows: nothing can be better.
    if _cost(tree, rows) == best:
        return TreeSolution(rows, bound)
    if tree.num_leaves <= MAX_LEAVES:
        return subsets(tree, limits, search)
    enough = best if search.effort == "high" else (int(best[0] * TOKENS_TO_STOP), int(best[1] * _ROWS_TO_STOP))
    rows = _quick_plan(tree, limits, rows, enough)
    if _is_enough(_cost(tree, rows), enough):
        return TreeSolution(rows, bound)
    work, leaves = _WORK[search.effort], max(search.num_leaves, tree.num_leaves)
    steps, passes = work.search_for(leaves)
    rows = anneal(tree, limits, rows, steps_per_leaf=steps, passes=passes, enough=enough)
    proof = work.proof_for(tree.num_leaves, leaves)
    if tree.num_leaves <= proof.exact and limits.pairs is None and limits.terms is None:
        return _exact(tree, limits, rows, bound)
    if _cost(tree, rows)[0] > enough[0]:
        bound = lower_bound(tree, limits.capacity, rows, proof)
    return TreeSolution(rows, bound)


def _is_enough(cost: tuple[int, int], enough: tuple[int, int]) -> bool:
    return cost[0] <= enough[0] and cost[1] <= enough[1]


def _quick_plan(tree: PlanTree, limits: RowLimits, rows: Int64, enough: tuple[int, int]) -> Int64:
    """Return the best of `rows` and the plans of quick methods; stop at the first plan that is good enough."""
    best = _cost(tree, rows)
    for plan in _quick_plans(tree, limits):
        if _is_enough(best, enough):
            break
        cost = _cost(tree, plan)
        if cost < best:
            rows, best = plan, cost
    return rows


def _quick_plans(tree: PlanTree, limits: RowLimits) -> Iterator[Int64]:
    """Yield the plans of first fit, longest leaf first and in depth-first order, and of `heuristic`."""
    if online.num_first_fit_steps(tree) <= online.MAX_FIRST_FIT_STEPS:
        pairs, steps = path_pairs(tree.depth + tree.size), np.zeros(tree.num_leaves, np.int64)
        for order in (np.argsort(-tree.length, kind="stable"), np.arange(tree.num_leaves)):
            yield online.fill_rows(tree, pairs, order, steps, limits)
    yield deepest_first(tree, limits, SearchOptions()).row_of_leaf


def _exact(tree: PlanTree, limits: RowLimits, rows: Int64, bound: int) -> TreeSolution:
    """Return the better of `rows` and the plan of the multi-path program with little work."""
    solution = exact(tree, limits, SearchOptions("low"))
    best = min(rows, solution.row_of_leaf, key=lambda plan: _cost(tree, plan))
    return TreeSolution(best, max(bound, solution.lower_bound))


def _cost(tree: PlanTree, rows: Int64) -> tuple[int, int]:
    """Return the tokens and the rows of a plan, in the order in which plans are compared."""
    used = passes(tree.parent, tree.leaf, rows)
    return int(np.dot(tree.size, used)), int(used[0])
