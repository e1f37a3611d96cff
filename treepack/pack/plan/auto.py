"""The default method: exact for small trees, a search with a certificate for all others.

    up to 13 leaves    a program over sets of leaves: the optimum
    up to 60           the multi-path program, which nearly always proves the optimum
    more               the best of quick plans --ruin and recreate--> plan;  --programs for subtrees--> bound

How much work is done follows from `effort` and from the leaves of all trees together, never from the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from treepack.pack.plan.bounds import lower_bound as bounds
from treepack.pack.plan.bounds.lower_bound import ProofEffort
from treepack.pack.plan.methods import contiguous as cuts
from treepack.pack.plan.methods import online
from treepack.pack.plan.problem import Limits, PlanTree, Search, Solution, path_pairs
from treepack.trajectory import Int64

PLENTY = 600  # leaves of all trees from which on the steps for each shrink, with the root of their number
LEAST_STEPS, FEW_STEPS = 8, 50
MOST_LEAVES_OF_FIRST_FIT = 20_000  # it follows every path to the root: slow where large trees are deep


@dataclass(frozen=True, slots=True)
class SearchWork:
    """Passes of the search, and steps for each leaf in each of them, fewer from `PLENTY` leaves in all trees on.

    `proofs` says how hard a bound is looked for, each with the most leaves in all trees that it is for.
    """

    steps: int
    passes: int
    proofs: tuple[tuple[float, ProofEffort], ...]

    def search_for(self, leaves: int) -> tuple[int, int]:
        """Steps for each of so many leaves in each pass, and passes: fewer ones where steps are few."""
        steps = max(LEAST_STEPS, int(self.steps * math.sqrt(PLENTY / max(PLENTY, leaves))))
        return steps, self.passes if steps >= FEW_STEPS else min(2, self.passes)

    def proof_for(self, own: int, leaves: int) -> ProofEffort:
        """How hard to look for the bound of a tree of `own` leaves among so many in all."""
        proof = next(proof for most, proof in self.proofs if leaves <= most)
        return replace(proof, entries=proof.entries * own / leaves)


# Column generation pays up to a few hundred leaves at once; in larger trees it is given smaller parts.
_BASIC = (float("inf"), ProofEffort(sets=12, exact=12, programs=(), entries=0))
_SMALL_PARTS = (20_000, ProofEffort(sets=12, exact=20, programs=(), entries=0))
WORK = {
    "low": SearchWork(steps=30, passes=2, proofs=(_SMALL_PARTS, _BASIC)),
    "normal": SearchWork(
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
    "high": SearchWork(
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


def auto(tree: PlanTree, limits: Limits, search: Search) -> Solution:
    """Fewest tokens, then fewest rows, as far as the effort reaches, and a proof of how far that can be from the least.

    Never worse than `contiguous`, `heuristic` and, in trees that are not very large, first fit in depth-first order.
    """
    quick = [method(tree, limits, search).row_of_leaf for method in (cuts.contiguous, cuts.deepest_first)]
    rows = min(quick, key=lambda found: _cost(tree, found))
    bound = bounds.recursive_bound(tree, limits.capacity)
    if _cost(tree, rows) == (bound, -(-bound // limits.capacity)):
        return Solution(rows, bound)
    from treepack.pack.plan.methods.subsets import MOST_LEAVES, subsets

    if tree.num_leaves <= MOST_LEAVES:
        return subsets(tree, limits, search)
    from treepack.pack.plan.methods.anneal import anneal

    if tree.num_leaves <= MOST_LEAVES_OF_FIRST_FIT:
        rows = min([rows, *_by_first_fit(tree, limits)], key=lambda found: _cost(tree, found))
    work, leaves = WORK[search.effort], max(search.num_leaves, tree.num_leaves)
    steps, passes = work.search_for(leaves)
    rows = anneal(tree, limits, rows, steps_per_leaf=steps, passes=passes)
    proof = work.proof_for(tree.num_leaves, leaves)
    if tree.num_leaves <= proof.exact and limits.pairs is None and limits.terms is None:
        return _exact(tree, limits, rows, bound)
    if _cost(tree, rows)[0] > bound:
        bound = bounds.lower_bound(tree, limits.capacity, rows, proof)
    return Solution(rows, bound)


def _by_first_fit(tree: PlanTree, limits: Limits) -> list[Int64]:
    """Plans that put leaf after leaf into the first row with room, in depth-first order and longest first."""
    pairs, steps = path_pairs(tree.depth + tree.size), np.zeros(tree.num_leaves, np.int64)
    orders = np.arange(tree.num_leaves), np.argsort(-tree.length, kind="stable")
    return [online.fill_rows(tree, pairs, order, steps, limits) for order in orders]


def _exact(tree: PlanTree, limits: Limits, rows: Int64, bound: int) -> Solution:
    """The better of `rows` and the plan of the multi-path program with little work."""
    from treepack.pack.plan.methods.exact import exact

    found = exact(tree, limits, Search("low"))
    best = min(rows, found.row_of_leaf, key=lambda plan: _cost(tree, plan))
    return Solution(best, max(bound, found.lower_bound))


def _cost(tree: PlanTree, rows: Int64) -> tuple[int, int]:
    """Tokens and rows of a plan."""
    from treepack.pack.plan.bounds.counting import passes

    used = passes(tree.parent, tree.leaf, rows)
    return int(np.dot(tree.size, used)), int(used[0])
