"""PLACEHOLDER"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass

import numpy as np

from treepack.plan import cuts, single_path
from treepack.plan.completion import IMPOSSIBLE, Completion, Shape
from treepack.plan.direct import direct
from treepack.plan.problem import Limits, Search, Solution, Tree
from treepack.plan.traversals import Budget, Outcome, OutOfWorkError, Program
from treepack.trajectory import Int64

_ALL = 1 << 50
_WORK = {"low": 3e5, "normal": 3e6, "high": 3e7}  # placements for one tree without a time limit


def exact(tree: Tree, limits: Limits, search: Search) -> Solution:
    start = time.monotonic()
    best = _incumbent(tree, limits, search)
    if limits.pairs is not None or limits.terms is not None:
        return direct(tree, limits, search, incumbent=best.row_of_leaf)
    shape = Shape.of(tree, limits.capacity)
    relaxed = Completion(shape, best.tokens, best.rows)
    lower = relaxed.bound()
    if (lower, int(np.argmax(relaxed.lifted[0] < IMPOSSIBLE))) == (best.tokens, best.rows):
        return Solution(best.row_of_leaf, lower)
    limit = search.time_limit
    budget = Budget(_WORK[search.effort] if limit is None else math.inf, start + (limit or math.inf))
    state = _Search(tree, shape, best, lower, budget)
    with contextlib.suppress(OutOfWorkError):
        state.prove()
    return Solution(state.best.row_of_leaf, state.lower)


@dataclass(frozen=True, slots=True)
class _Incumbent:
    row_of_leaf: Int64
    tokens: int
    rows: int


@dataclass(slots=True)
class _Search:
    tree: Tree
    shape: Shape
    best: _Incumbent
    lower: int
    budget: Budget

    def prove(self) -> None:
        for width in (8, 64):
            if self._run(self.best.tokens, self.best.rows - 1, width).exhaustive:
                self.lower = self.best.tokens
                return
        for part in (0.0, 0.125, 0.5):
            target = self.lower + int(part * (self.best.tokens - self.lower))
            if target < self.best.tokens:
                outcome = self._run(target, self.tree.num_leaves, _ALL)
                if outcome.rows is not None:
                    self.lower = self.best.tokens if outcome.exhaustive else self.lower
                    return
                self.lower = min(self.best.tokens, target + outcome.excess)
        if self._run(self.best.tokens, self.best.rows - 1, _ALL).exhaustive:
            self.lower = self.best.tokens

    def _run(self, tokens: int, rows: int, width: int) -> Outcome:
        completion = Completion(self.shape, tokens, rows)
        outcome = Program(self.shape, completion, self.budget, width).run()
        if outcome.rows is not None:
            found = _incumbent_of(self.tree, outcome.rows)
            assert (found.tokens, found.rows) < (self.best.tokens, self.best.rows)
            self.best = found
        return outcome


def _incumbent(tree: Tree, limits: Limits, search: Search) -> _Incumbent:
    methods = (cuts.contiguous, cuts.deepest_first, single_path.single_path)
    plans = [_incumbent_of(tree, method(tree, limits, search).row_of_leaf) for method in methods]
    return min(plans, key=lambda plan: (plan.tokens, plan.rows))


def _incumbent_of(tree: Tree, row_of_leaf: Int64) -> _Incumbent:
    sizes, parent = tree.size.tolist(), tree.parent.tolist()
    held: set[tuple[int, int]] = set()
    for node, row in zip(tree.leaf.tolist(), row_of_leaf.tolist(), strict=True):
        while node >= 0 and (node, row) not in held:
            held.add((node, row))
            node = parent[node]
    return _Incumbent(row_of_leaf, sum(sizes[node] for node, _ in held), int(row_of_leaf.max()) + 1)
