"""All trees of a forest by a method that plans one tree at a time, in this process or in several.

    forest --parts of about equal work--> worker, worker, ... --rows, bound of each part--> the same as in one process

Trees do not depend on each other, so the result does not depend on the number of workers. A worker is a fresh
interpreter (spawn: safe with threads, the same on Linux and macOS) that ignores Ctrl-C and ends with this process; the
largest parts go first, each worker gets its next part when it hands one in.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from treepack.pack.plan.bounds import lower_bound as bounds
from treepack.pack.plan.problem import Limits, PlanForest, PlanTree, Search, Solution
from treepack.processes import deaths_named, ignore_interrupts, started
from treepack.trajectory import Int64

Method = Callable[[PlanTree, Limits, Search], Solution]
Planned = tuple[Int64, int]

PARTS = 8  # per worker: enough that the last ones end together
TREE = 20  # work of a tree besides its nodes, in nodes


def plan_trees(forest: PlanForest, limits: Limits, method: Method, search: Search, *, workers: int = 1) -> Planned:
    """Rows of all leaves, numbered over all trees, and a lower bound on the tokens of all.

    With several `workers` the calling script needs its `if __name__ == "__main__":` guard.

    Raises:
        TreepackError: what a method raises, or a worker that died.
    """
    job = (limits, method, replace(search, num_leaves=forest.num_leaves))
    parts = _parts(forest, PARTS * workers) if workers > 1 else [forest]
    workers = min(workers, len(parts))
    planned = _in_processes(parts, job, workers) if workers > 1 else [_plan(part, job) for part in parts]
    rows, num_rows, bound = [], 0, 0
    for row_of_leaf, of_part in planned:
        rows.append(row_of_leaf + num_rows)
        num_rows += int(row_of_leaf.max()) + 1
        bound += of_part
    return np.concatenate(rows), bound


_Job = tuple[Limits, Method, Search]


def _plan(forest: PlanForest, job: _Job) -> Planned:
    limits, method, search = job
    rows, num_rows, bound = [], 0, 0
    for tree in forest.trees():
        solution = method(tree, limits, search)
        rows.append(solution.row_of_leaf + num_rows)
        num_rows += int(solution.row_of_leaf.max()) + 1
        bound += max(solution.lower_bound, bounds.recursive_bound(tree, limits.capacity))
    return np.concatenate(rows), bound


def _parts(forest: PlanForest, count: int) -> list[PlanForest]:
    """Runs of whole trees, at most about `count` of about equal work."""
    work = np.cumsum(np.diff(forest.node_start) + TREE)
    share = -(-int(work[-1]) // count)
    begins = np.flatnonzero(np.diff(work // share, prepend=-1))
    stops = np.append(begins[1:], forest.num_trees)
    return [_trees_between(forest, a, b) for a, b in zip(begins.tolist(), stops.tolist(), strict=True)]


def _trees_between(forest: PlanForest, first: int, stop: int) -> PlanForest:
    joined, at, leaves = forest.joined, int(forest.node_start[first]), int(forest.leaf_start[first])
    nodes, own = slice(at, int(forest.node_start[stop])), slice(leaves, int(forest.leaf_start[stop]))
    part = PlanTree(
        joined.size[nodes],
        joined.depth[nodes],
        np.maximum(joined.parent[nodes] - at, -1),
        joined.end[nodes] - at,
        joined.leaf[own] - at,
        joined.terms[own],
    )
    starts = forest.node_start[first : stop + 1] - at, forest.leaf_start[first : stop + 1] - leaves
    return PlanForest(part, *starts, np.arange(part.num_leaves))


def _in_processes(parts: list[PlanForest], job: _Job, workers: int) -> list[Planned]:
    waiting = deque(sorted(range(len(parts)), key=lambda i: -parts[i].joined.num_nodes))
    results: dict[int, Planned] = {}
    under_way: dict[Connection, int] = {}
    with contextlib.ExitStack() as stack, deaths_named("planning"):
        idle = [started(_serve, (job,), stack) for _ in range(workers)]
        while len(results) < len(parts):
            while idle and waiting:
                connection, part = idle.pop(), waiting.popleft()
                connection.send(parts[part])
                under_way[connection] = part
            for ready in wait(list(under_way)):
                assert isinstance(ready, Connection)
                answer: Any = ready.recv()
                if isinstance(answer, BaseException):
                    raise answer
                results[under_way.pop(ready)] = answer
                idle.append(ready)
    return [results[i] for i in range(len(parts))]


def _serve(connection: Connection, job: _Job) -> None:
    """Answer parts with their plans until the other side is gone."""
    ignore_interrupts()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            part = connection.recv()
            try:
                answer: Any = _plan(part, job)
            except Exception as error:  # handed to the other side, which raises it
                answer = error
            connection.send(answer)
