"""The exact method: a plan with minimum tokens, then minimum rows, and its proof, by the multi-path program.

    best quick plan --> narrow runs --> runs with rising targets --> run for a better plan: none, so the best is proven

One run of the program (`traversals.py`) finds the best plan within a target of tokens, or proves that none exists.
Bounds (`completion.py`) drop every partial plan that cannot stay within the target, so a low target makes a run cheap.

1. Quick methods give a first plan, and the bound of the whole tree a first target. Often they are equal.
2. Narrow runs keep only the cheapest states of each node. They nearly always find a better plan.
3. Runs have targets between the bound and the best plan. A run without a plan raises the bound; the first run with a
   plan has found the best plan.
4. If no target had a plan, the last run looks for a plan with fewer tokens, or with equal tokens and fewer rows.

Traversals are bins, and there are two ways to pack them. At inner nodes the room left in each bin matters, and any
packing can be the best one, so all packings are enumerated. At the root only the number of bins matters.
There, the traversals of two children are matched. With more children, packings are enumerated if there are few
states; if there are many, CP-SAT packs them (`packing.py`). States do not contain score pairs and loss terms. If the
best plan for the capacity alone exceeds a budget, the problem becomes an integer program (`direct.py`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from treepack.pack.plan.methods.completion import IMPOSSIBLE, CompletionBounds, SubtreeShape
from treepack.pack.plan.methods.contiguous import contiguous, deepest_first
from treepack.pack.plan.methods.direct import direct
from treepack.pack.plan.methods.single_path import single_path
from treepack.pack.plan.methods.traversals import OutOfWorkError, PlacementBudget, SearchOutcome, TraversalProgram
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, TreeSolution, path_pairs
from treepack.pack.plan.unions import row_tokens
from treepack.trajectory import Int64

_MAX_LEAVES = 500  # of trees that are searched; bounds need leaves * nodes of memory
_MAX_LEAVES_WITH_BUDGETS = 60  # the same for integer programs, which have leaves * nodes variables
_NARROW_WIDTHS = (8, 64)  # states per node of the narrow runs
_TARGETS = (0.0, 0.125, 0.5)  # shares of the way from the bound to the best plan: bound 100, best 108 -> 100, 101, 104
_ALL_STATES = 1 << 50  # a width that no node reaches


def exact(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> TreeSolution:
    """Return the plan with minimum tokens, then minimum rows, or the best plan that the work or time allows.

    The plan is proven to have minimum tokens if they equal `lower_bound`.

    Tree Training (arXiv 2511.00413), section 2.2.2, eq. 6-11. Exponential in the worst case. Every leaf must fit alone.
    """
    best = _quick_plan(tree, limits, search)
    if limits.pairs is not None or limits.terms is not None:
        return _exact_with_budgets(tree, limits, search, best)
    if tree.num_leaves > _MAX_LEAVES:
        return TreeSolution(best.row_of_leaf)
    shape = SubtreeShape.of(tree, limits.capacity)
    bounds = CompletionBounds(shape, best.tokens, best.rows)
    proof = _ExactProof(tree, shape, best, bounds.bound(), PlacementBudget.of(search))
    # argmax finds the first True: [F, F, F, T, T] -> at least 3 rows.
    min_rows = int(np.argmax(bounds.lifted[0] < IMPOSSIBLE))
    if (proof.lower, min_rows) != (best.tokens, best.rows):
        with contextlib.suppress(OutOfWorkError):
            proof.find()
    return TreeSolution(proof.best.row_of_leaf, proof.lower)


def _exact_with_budgets(tree: PlanTree, limits: RowLimits, search: SearchOptions, best: _MeasuredPlan) -> TreeSolution:
    """Return the best plan for the capacity alone if it is within all limits, else the plan of the integer program."""
    # Each of the two gets half of the time.
    seconds = None if search.time_limit is None else search.time_limit / 2
    search = SearchOptions(search.effort, seconds)
    unlimited = exact(tree, RowLimits(limits.capacity), search)
    tokens = _measure(tree, unlimited.row_of_leaf).tokens
    if unlimited.lower_bound == tokens and _is_within(tree, unlimited.row_of_leaf, limits):
        return unlimited
    if tree.num_leaves > _MAX_LEAVES_WITH_BUDGETS:
        return TreeSolution(best.row_of_leaf, unlimited.lower_bound)
    limited = direct(tree, limits, search, incumbent=best.row_of_leaf)
    return TreeSolution(limited.row_of_leaf, max(limited.lower_bound, unlimited.lower_bound))


@dataclass(frozen=True, slots=True)
class _MeasuredPlan:
    """The rows of the leaves, int64 [leaves], and the tokens and the number of these rows."""

    row_of_leaf: Int64
    tokens: int
    rows: int


@dataclass(slots=True)
class _ExactProof:
    """The best plan and the highest bound so far."""

    tree: PlanTree
    shape: SubtreeShape
    best: _MeasuredPlan
    lower: int
    budget: PlacementBudget

    def find(self) -> None:
        """Close the gap between the best plan and the bound.

        Raises:
            OutOfWorkError: the work or the time is used up; the best plan and the bound so far are valid.
        """
        for width in _NARROW_WIDTHS:
            # A narrow run that dropped no state for its width has proven the best plan.
            if self._better_plan(width).exhaustive:
                self.lower = self.best.tokens
                return
        for part in _TARGETS:
            target = self.lower + int(part * (self.best.tokens - self.lower))
            if target < self.best.tokens:
                outcome = self._run(target, self.tree.num_leaves, _ALL_STATES)
                if outcome.rows is not None:
                    self.lower = self.best.tokens if outcome.exhaustive else self.lower
                    return
                # No plan is within the target, and every plan is at least `excess` above it.
                self.lower = min(self.best.tokens, target + outcome.excess)
        if self._better_plan(_ALL_STATES).exhaustive:
            self.lower = self.best.tokens

    def _better_plan(self, width: int) -> SearchOutcome:
        return self._run(self.best.tokens, self.best.rows - 1, width)

    def _run(self, tokens: int, rows: int, width: int) -> SearchOutcome:
        outcome = TraversalProgram(self.shape, CompletionBounds(self.shape, tokens, rows), self.budget, width).run()
        if outcome.rows is not None:
            plan = _measure(self.tree, outcome.rows)
            assert (plan.tokens, plan.rows) < (self.best.tokens, self.best.rows), "a run found nothing better"
            self.best = plan
        return outcome


def _quick_plan(tree: PlanTree, limits: RowLimits, search: SearchOptions) -> _MeasuredPlan:
    methods = (contiguous, deepest_first, single_path)
    plans = [_measure(tree, method(tree, limits, search).row_of_leaf) for method in methods]
    return min(plans, key=lambda plan: (plan.tokens, plan.rows))


def _measure(tree: PlanTree, row_of_leaf: Int64) -> _MeasuredPlan:
    num_rows = int(row_of_leaf.max()) + 1
    tokens = row_tokens(tree.length, tree.shared, row_of_leaf, num_rows)
    return _MeasuredPlan(row_of_leaf, int(tokens.sum()), num_rows)


def _is_within(tree: PlanTree, row_of_leaf: Int64, limits: RowLimits) -> bool:
    """Return whether every row is within the limits on score pairs and loss terms."""
    num_rows = int(row_of_leaf.max()) + 1
    pairs = row_tokens(path_pairs(tree.length), path_pairs(tree.shared), row_of_leaf, num_rows)
    terms = np.bincount(row_of_leaf, tree.terms)
    within_pairs = limits.pairs is None or int(pairs.max()) <= limits.pairs
    return within_pairs and (limits.terms is None or int(terms.max()) <= limits.terms)
