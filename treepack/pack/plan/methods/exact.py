"""The exact method: a plan of fewest tokens and, of these, fewest rows, with its proof, by the multi-path program.

    incumbent --> narrow runs --> runs with rising targets --> run at the incumbent: proven

One run of the program (`traversals.py`) finds the best plan within a target of tokens, or that there is none: bounds
(`completion.py`) drop every partial plan that cannot stay within the target, so a low target makes a run cheap.

1. The cheap methods give a first plan, the bound of the whole tree a first target. Often they meet.
2. Narrow runs keep only the cheapest states of each node. They find plans that are nearly always better.
3. Runs with targets between the bound and the best plan: a run without a plan raises the bound, the first run with one
   has found the best.
4. If all fail, a run that looks for something better than the best plan, by one row or more.

Bins are packed in two ways. At inner nodes not only the number of bins counts but what each has left, and every
packing may be the right one: these are enumerated. At the root only their number counts, which is bin packing proper:
two sets of traversals are matched, more are enumerated as long as few states come of it and then given to CP-SAT
(`packing.py`). Limits on score pairs or loss terms are not in the states: if the best plan for the capacity alone is
not within them, the problem is an integer program (`direct.py`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.methods import contiguous as cuts
from treepack.pack.plan.methods import single_path
from treepack.pack.plan.methods.completion import IMPOSSIBLE, Completion, SubtreeShape
from treepack.pack.plan.methods.direct import direct
from treepack.pack.plan.methods.traversals import Budget, Outcome, OutOfWorkError, TraversalProgram
from treepack.pack.plan.problem import Limits, PlanTree, Search, Solution
from treepack.trajectory import Int64

MOST_LEAVES = 500  # of trees that are searched; bounds take leaves * nodes of memory
MOST_LEAVES_OF_LIMITED = 60  # the same for integer programs
_NARROW = (8, 64)  # states kept of each node
_TARGETS = (0.0, 0.125, 0.5)  # between the bound and the best plan
_ALL = 1 << 50


def exact(tree: PlanTree, limits: Limits, search: Search) -> Solution:
    """The plan of fewest tokens, then fewest rows; the best one found if the time or work allowed does not suffice.

    It has the fewest tokens for certain if they equal `lower_bound`.

    Tree Training (arXiv 2511.00413), section 2.2.2, eq. 6-11. Exponential in the worst case. Every leaf must fit alone.
    """
    best = _incumbent(tree, limits, search)
    if limits.pairs is not None or limits.terms is not None:
        return _exact_within(tree, limits, search, best)
    if tree.num_leaves > MOST_LEAVES:
        return Solution(best.row_of_leaf)
    shape = SubtreeShape.of(tree, limits.capacity)
    bounds = Completion(shape, best.tokens, best.rows)
    proof = _ExactProof(tree, shape, best, bounds.bound(), Budget.of(search))
    least_rows = int(np.argmax(bounds.lifted[0] < IMPOSSIBLE))
    if (proof.lower, least_rows) != (best.tokens, best.rows):
        with contextlib.suppress(OutOfWorkError):
            proof.find()
    return Solution(proof.best.row_of_leaf, proof.lower)


def _exact_within(tree: PlanTree, limits: Limits, search: Search, best: _Incumbent) -> Solution:
    """The best plan for the capacity alone if it is within all limits, else the integer program's."""
    seconds = None if search.time_limit is None else search.time_limit / 2
    search = Search(search.effort, seconds)
    unlimited = exact(tree, Limits(limits.capacity), search)
    tokens = _measured(tree, unlimited.row_of_leaf).tokens
    if unlimited.lower_bound == tokens and _is_within(tree, unlimited.row_of_leaf, limits):
        return unlimited
    if tree.num_leaves > MOST_LEAVES_OF_LIMITED:
        return Solution(best.row_of_leaf, unlimited.lower_bound)
    limited = direct(tree, limits, search, incumbent=best.row_of_leaf)
    return Solution(limited.row_of_leaf, max(limited.lower_bound, unlimited.lower_bound))


@dataclass(frozen=True, slots=True)
class _Incumbent:
    row_of_leaf: Int64
    tokens: int
    rows: int


@dataclass(slots=True)
class _ExactProof:
    """The best plan and the greatest bound known so far."""

    tree: PlanTree
    shape: SubtreeShape
    best: _Incumbent
    lower: int
    budget: Budget

    def find(self) -> None:
        """Close the gap between the two, or run out of work."""
        for width in _NARROW:
            if self._better_plan(width).exhaustive:
                self.lower = self.best.tokens
                return
        for part in _TARGETS:
            target = self.lower + int(part * (self.best.tokens - self.lower))
            if target < self.best.tokens:
                outcome = self._run(target, self.tree.num_leaves, _ALL)
                if outcome.rows is not None:
                    self.lower = self.best.tokens if outcome.exhaustive else self.lower
                    return
                self.lower = min(self.best.tokens, target + outcome.excess)
        if self._better_plan(_ALL).exhaustive:
            self.lower = self.best.tokens

    def _better_plan(self, width: int) -> Outcome:
        return self._run(self.best.tokens, self.best.rows - 1, width)

    def _run(self, tokens: int, rows: int, width: int) -> Outcome:
        outcome = TraversalProgram(self.shape, Completion(self.shape, tokens, rows), self.budget, width).run()
        if outcome.rows is not None:
            found = _measured(self.tree, outcome.rows)
            assert (found.tokens, found.rows) < (self.best.tokens, self.best.rows), "a run found nothing better"
            self.best = found
        return outcome


def _incumbent(tree: PlanTree, limits: Limits, search: Search) -> _Incumbent:
    methods = (cuts.contiguous, cuts.deepest_first, single_path.single_path)
    plans = [_measured(tree, method(tree, limits, search).row_of_leaf) for method in methods]
    return min(plans, key=lambda plan: (plan.tokens, plan.rows))


def _measured(tree: PlanTree, row_of_leaf: Int64) -> _Incumbent:
    sizes = tree.size.tolist()
    tokens = sum(sizes[node] for node, _ in _held(tree, row_of_leaf))
    return _Incumbent(row_of_leaf, tokens, int(row_of_leaf.max()) + 1)


def _is_within(tree: PlanTree, row_of_leaf: Int64, limits: Limits) -> bool:
    """Whether no row has more score pairs or loss terms than the limits."""
    nodes, rows = np.array(sorted(_held(tree, row_of_leaf))).T
    pairs = np.zeros(rows.max() + 1, np.int64)
    terms = np.zeros_like(pairs)
    np.add.at(pairs, rows, tree.pairs[nodes])
    np.add.at(terms, row_of_leaf, tree.terms)
    within_pairs = limits.pairs is None or int(pairs.max()) <= limits.pairs
    return within_pairs and (limits.terms is None or int(terms.max()) <= limits.terms)


def _held(tree: PlanTree, row_of_leaf: Int64) -> set[tuple[int, int]]:
    """Every node with every row that holds it."""
    parent = tree.parent.tolist()
    held: set[tuple[int, int]] = set()
    for leaf, row in zip(tree.leaf.tolist(), row_of_leaf.tolist(), strict=True):
        node = leaf
        while node >= 0 and (node, row) not in held:
            held.add((node, row))
            node = parent[node]
    return held
