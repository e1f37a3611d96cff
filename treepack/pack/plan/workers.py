"""Plans of all trees of a forest by a method that plans one tree at a time, in this process or in several.

    forest --parts of about equal work--> worker, worker, ... --> rows and bounds of each part --> of all trees

Trees do not depend on each other, so the result does not depend on the number of workers. The workers come from
`processes.unordered`: the largest parts go first, and each worker gets its next part when it returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np

from treepack.pack.plan.bounds import lower_bound as bounds
from treepack.pack.plan.problem import PlanForest, PlanTree, RowLimits, SearchOptions, TreeSolution
from treepack.processes import Progress, ReportProgress, unordered
from treepack.trajectory import Int64

Method = Callable[[PlanTree, RowLimits, SearchOptions], TreeSolution]
_RowsAndBounds = tuple[Int64, Int64]

# Parts are equal in nodes, not in time. With 8 parts per worker, the last parts are small and end at about one time.
_PARTS_PER_WORKER = 8
# In one process a part only ends with a report of progress.
_PARTS_OF_ONE_PROCESS = 200
# Fixed work of a tree, in nodes: even a tree of one node costs a method call and its bounds.
_WORK_PER_TREE = 20


def plan_trees(
    forest: PlanForest,
    limits: RowLimits,
    method: Method,
    search: SearchOptions,
    *,
    workers: int = 1,
    progress: ReportProgress | None = None,
) -> _RowsAndBounds:
    """Plan all trees. Return the row of each leaf, int64 [num_leaves], and a bound for each tree, int64 [num_trees].

    No plan of a tree has fewer tokens than its bound.

    Rows are numbered over all trees, from 0. With several `workers`, the calling script needs its
    `if __name__ == "__main__":` guard. `progress` is called with the trees planned so far.

    Raises:
        TreepackError: the method refuses a tree, or a worker died.
    """
    job = (limits, method, replace(search, num_leaves=forest.num_leaves))
    parts = _parts(forest, _PARTS_PER_WORKER * workers if workers > 1 else _PARTS_OF_ONE_PROCESS)
    # Parts of 3, 9, 5 nodes -> [1, 2, 0]; results come as (number in this list, plan) and go back to their part.
    largest_first = sorted(range(len(parts)), key=lambda i: -parts[i].joined.num_nodes)
    results = unordered(_planner, job, [parts[i] for i in largest_first], workers=min(workers, len(parts)))
    plan_of: dict[int, _RowsAndBounds] = {}
    for number, plan in results:
        plan_of[largest_first[number]] = plan
        if progress is not None:
            progress(_progress(forest, [parts[i] for i in plan_of]))
    return _join(plan_of[i] for i in range(len(parts)))


def _progress(forest: PlanForest, planned: list[PlanForest]) -> Progress:
    """Return the progress after the parts `planned`; the share is one of work, because trees differ in size."""
    done = sum(part.num_trees for part in planned)
    work = sum(part.joined.num_nodes + _WORK_PER_TREE * part.num_trees for part in planned)
    share = work / (forest.joined.num_nodes + _WORK_PER_TREE * forest.num_trees)
    return Progress("planning", done, forest.num_trees, "trees", share)


_Job = tuple[RowLimits, Method, SearchOptions]


def _planner(job: _Job) -> Callable[[PlanForest], _RowsAndBounds]:
    return partial(_plan, job)


def _plan(job: _Job, forest: PlanForest) -> _RowsAndBounds:
    limits, method, search = job
    plans = []
    for tree in forest.trees():
        solution = method(tree, limits, search)
        # A method may prove less than the general bound, and the general bound less than an exact method.
        bound = max(solution.lower_bound, bounds.recursive_bound(tree, limits.capacity))
        plans.append((solution.row_of_leaf, np.array([bound], np.int64)))
    return _join(plans)


def _join(plans: Iterable[_RowsAndBounds]) -> _RowsAndBounds:
    """Join plans that each number their rows from 0: rows [0, 1, 0] and [0, 0, 1] -> [0, 1, 0, 2, 2, 3]."""
    rows, tree_bounds, num_rows = [], [], 0
    for row_of_leaf, bounds_of_plan in plans:
        rows.append(row_of_leaf + num_rows)
        num_rows += int(row_of_leaf.max()) + 1
        tree_bounds.append(bounds_of_plan)
    return np.concatenate(rows), np.concatenate(tree_bounds)


def _parts(forest: PlanForest, count: int) -> list[PlanForest]:
    """Cut the forest into runs of whole trees of about equal work, at most about `count`."""
    # Trees of 10, 10, 60, 10 nodes, count 2: work 30 60 140 170, share 85 -> 0 0 1 2, parts begin at trees 0, 2, 3.
    work = np.cumsum(np.diff(forest.node_start) + _WORK_PER_TREE)
    share = -(-int(work[-1]) // count)
    begins = np.flatnonzero(np.diff(work // share, prepend=-1))
    stops = np.append(begins[1:], forest.num_trees)
    return [_trees_between(forest, a, b) for a, b in zip(begins.tolist(), stops.tolist(), strict=True)]


def _trees_between(forest: PlanForest, first: int, stop: int) -> PlanForest:
    joined, node, leaf = forest.joined, int(forest.node_start[first]), int(forest.leaf_start[first])
    nodes, leaves = slice(node, int(forest.node_start[stop])), slice(leaf, int(forest.leaf_start[stop]))
    part = PlanTree(
        joined.size[nodes],
        joined.depth[nodes],
        # Node ids become ids of the part, roots stay -1: node 5, parents [-1, 5, 5] -> [-1, 0, 0].
        np.maximum(joined.parent[nodes] - node, -1),
        joined.end[nodes] - node,
        joined.leaf[leaves] - node,
        joined.terms[leaves],
    )
    starts = forest.node_start[first : stop + 1] - node, forest.leaf_start[first : stop + 1] - leaf
    return PlanForest(part, *starts, np.arange(part.num_leaves))
