"""Compare all packing methods on families of trees: tokens over the certified bound, rows and seconds.

    python benchmarks/packing.py [--sizes 8,64,1000] [--families star,comb] [--methods ...] [--effort normal]
    python benchmarks/packing.py --large      100,000 and 1,000,000 trajectories, each problem in a new process
    python benchmarks/packing.py --real TRIE ...    directories of `treepack build-trie`, at 8,192 and 32,768

Needs the development install, and prints one Markdown table. Each cell of a method is

    percent of tokens over the bound / rows / seconds

For real tries it is N_pack/N_tree / rows / seconds, with a column for the gap of auto; longer trajectories are
truncated. The bound is the best bound of all methods. Every plan is checked here, by a walk that uses no code of the
library. The column `never worse` is yes if auto needs at most the tokens of contiguous, heuristic and greedy-online,
and at most their rows if the tokens are equal. greedy-online gets the trajectories in depth-first order, its best case,
or with `--arrival random` shuffled inside each tree. Times are for `plan_rows` on a trie in memory, in one process or
in `--workers` processes. The trees come from `families.py`.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import families as made
import numpy as np
from made_tries import forest_of_trees, trie_of
from measure import commit

from treepack.pack.capacity import fit_capacity
from treepack.pack.options import EFFORTS
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import FOREST_METHODS, METHODS, plan_rows
from treepack.pack.plan.problem import SearchOptions
from treepack.trajectory import Int64
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie

ALL = [*METHODS, *FOREST_METHODS]
BASELINES = ("contiguous", "heuristic", "greedy-online")
CAPACITIES = (8192, 32768, 131072)
REAL_CAPACITIES = (8192, 32768)
EXACT_LEAVES = 24  # the method exact is exponential: it runs on trees of at most so many leaves
EXACT_SECONDS = 20.0  # its time limit for each tree


@dataclass(frozen=True, slots=True)
class Problem:
    """A trie to pack, and the capacity of a row in tokens."""

    name: str
    trie: Trie
    capacity: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a method for a problem; `memory` is the peak of the process in bytes, 0 if not measured."""

    tokens: int
    rows: int
    bound: int
    seconds: float
    memory: int = 0


def solve(problem: Problem, method: str, *, search: SearchOptions, workers: int) -> Outcome:
    """Plan a problem, time it and check the plan."""
    began = time.perf_counter()
    plan = plan_rows(problem.trie, capacity=problem.capacity, method=method, search=search, workers=workers)
    seconds = time.perf_counter() - began
    # The method sequence shares nothing, so its rows are counted flat.
    if method == "sequence":
        tokens = flat_tokens(problem.trie, plan)
    else:
        tokens = union_tokens(problem.trie, plan)
        assert (check_plan(problem.trie, plan).row_tokens == tokens).all(), "the two counts of row tokens differ"
    assert 0 < tokens.min() <= tokens.max() <= problem.capacity, f"{method}: a row is empty or too long"
    assert plan.lower_bound <= tokens.sum(), f"{method}: fewer tokens than the bound"
    return Outcome(int(tokens.sum()), plan.num_rows, plan.lower_bound, seconds)


def union_tokens(trie: Trie, plan: Plan) -> Int64:
    """Return the tokens of each row, [num_rows], from the set of its nodes.

    `plan.row_of` has one row for each trajectory, so no trajectory is in two rows.
    """
    assert plan.row_of.shape == (trie.num_trajectories,)
    parent, size, end_node = trie.parent.tolist(), trie.node_length.tolist(), trie.end_node.tolist()
    tokens = np.zeros(plan.num_rows, np.int64)
    for row, members in enumerate(plan.members()):
        nodes: set[int] = set()
        for trajectory in members.tolist():
            node = end_node[trajectory]
            # If the row already contains a node, it contains all ancestors too.
            while node >= 0 and node not in nodes:
                nodes.add(node)
                node = parent[node]
        tokens[row] = sum(size[node] for node in nodes)
    return tokens


def flat_tokens(trie: Trie, plan: Plan) -> Int64:
    """Return the tokens of each row, [num_rows], if its trajectories share nothing."""
    return np.bincount(plan.row_of, weights=trie.lengths, minlength=plan.num_rows).astype(np.int64)


def warm_up(method: str) -> None:
    """Load the code and the solvers of `method`, so that no timing contains it."""
    family = {family.name: family for family in made.families()}["random turns"]
    # 12 leaves need the program over sets, 40 the search and the multi-path program.
    for leaves in (12, 40):
        tree = made.make_tree(family, leaves)
        trie = trie_of(forest_of_trees([tree]))
        plan_rows(
            trie, capacity=int(1.3 * tree.length.max()), method=method, search=SearchOptions("low", time_limit=1.0)
        )


def problems(options: argparse.Namespace) -> Iterator[Problem]:
    """Yield a tree of each family and size, and the forests, at every capacity that needs several rows."""
    for family in made.families():
        for size in options.sizes:
            if not is_chosen(family.name, options.families):
                continue
            tree = made.make_tree(family, size, seed=options.seed)
            trie = trie_of(forest_of_trees([tree]), shuffle=shuffle(options))
            longest = int(tree.length.max())
            fixed = [family.capacity] if family.capacity else options.capacities
            scaled = [int(ratio * longest) for ratio in options.capacity_ratio if family.capacity is None]
            for capacity in sorted({*fixed, *scaled}):
                # Below `longest` there is no plan, and from `tree.tokens` on one row is enough.
                if longest <= capacity < tree.tokens:
                    yield Problem(family.name, trie, capacity)
    for name, make in made.forests().items():
        for size in options.sizes:
            if size >= 64 and is_chosen(name, options.families):
                trie = trie_of(make(size, options.seed), shuffle=shuffle(options))
                for capacity in options.capacities:
                    if trie.lengths.max() <= capacity < trie.tokens_tree:
                        yield Problem(name, trie, capacity)


def shuffle(options: argparse.Namespace) -> int | None:
    """Return the seed of the order of arrival, None for depth-first order."""
    return options.seed if options.arrival == "random" else None


def is_chosen(name: str, parts: list[str]) -> bool:
    """Return True if `name` contains one of `parts`, or if there are no `parts`."""
    return not parts or any(part in name for part in parts)


def print_table(
    every_problem: Iterable[Problem], methods: list[str], *, search: SearchOptions, workers: int = 1
) -> None:
    """Run all methods on all problems; print a line for each problem, then means and maxima."""
    print_header(methods)
    over: dict[str, list[tuple[str, float]]] = {method: [] for method in methods}
    worse = 0
    for problem in every_problem:
        outcomes = {
            method: solve(problem, method, search=search, workers=workers)
            for method in methods
            if method != "exact" or problem.trie.num_trajectories <= EXACT_LEAVES
        }
        bound = max(outcome.bound for outcome in outcomes.values())
        for method, outcome in outcomes.items():
            over[method].append((problem.name, 100 * (outcome.tokens / bound - 1)))
        verdict = never_worse(outcomes)
        worse += verdict == "no"
        cells = [cell(outcomes.get(method), bound) for method in methods]
        print_line([*facts_of(problem), f"{bound:,}", *cells, verdict])
    print_summary(over, worse)


def never_worse(outcomes: dict[str, Outcome]) -> str:
    """Return "yes" if auto is at least as good as each baseline that ran, else "no", and "-" without auto."""
    if "auto" not in outcomes:
        return "-"
    # Pairs compare tokens first, then rows: (34, 3) <= (34, 4) and (34, 4) <= (35, 3)
    costs = {method: (outcome.tokens, outcome.rows) for method, outcome in outcomes.items()}
    return "yes" if all(costs["auto"] <= costs[method] for method in BASELINES if method in costs) else "no"


def print_header(methods: list[str]) -> None:
    """Print the first two lines of the table."""
    names = ["family", "leaves", "C", "longest/C", "POR %", "bound", *methods, "never worse"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)


def facts_of(problem: Problem) -> list[str]:
    """Return the cells that describe a problem."""
    trie, capacity = problem.trie, problem.capacity
    # POR, the share of tokens that sharing removes: 43 flat tokens, 22 in the trie -> 48.8 %
    por = 100 * (1 - trie.tokens_tree / trie.tokens_flat)
    longest = trie.lengths.max() / capacity
    return [problem.name, f"{trie.num_trajectories:,}", f"{capacity:,}", f"{longest:.2f}", f"{por:.1f}"]


def print_line(cells: list[str]) -> None:
    """Print one line of the table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def cell(outcome: Outcome | None, bound: int) -> str:
    """Return the cell of an outcome: percent over the bound / rows / seconds, and memory if it was measured."""
    if outcome is None:
        return "-"
    memory = f" / {outcome.memory / 2**30:.2f} GiB" if outcome.memory else ""
    return f"{100 * (outcome.tokens / bound - 1):.2f} / {outcome.rows:,} / {outcome.seconds:.2f}{memory}"


def print_summary(over: dict[str, list[tuple[str, float]]], worse: int) -> None:
    """Print the mean over the means of the families, and the maximum over all problems."""
    means, worst = [], []
    # A family with many problems must not outweigh the others, so the mean is taken of the means.
    for problems_and_values in over.values():
        by_family: dict[str, list[float]] = {}
        for name, value in problems_and_values:
            by_family.setdefault(name, []).append(value)
        means.append(f"{np.mean([np.mean(values) for values in by_family.values()]):.2f}" if by_family else "-")
        worst.append(f"{max(value for _, value in problems_and_values):.2f}" if by_family else "-")
    blank = " | ".join([""] * 5)
    print_line(["mean of families", blank, *means, ""])
    print_line(["maximum", blank, *worst, f"{worse} no"])


def large_problem(name: str, size: int, seed: int) -> Problem:
    """Return the problem `name` with `size` trajectories, as one tree or as a forest."""
    if name in made.forests():
        return Problem(name, trie_of(made.forests()[name](size, seed)), 32768)
    family = {family.name: family for family in made.families()}[name]
    tree = made.make_tree(family, size, seed=seed)
    capacity = family.capacity or max(32768, int(1.3 * tree.length.max()))
    return Problem(name, trie_of(forest_of_trees([tree])), capacity)


LARGE = ("star, long prompt", "random turns", "sub-agents", "one-token branches", "stars of 16", "mixed trees")


def solve_large(
    name: str, size: int, seed: int, method: str, search: SearchOptions, workers: int
) -> tuple[list[str], Outcome]:
    """Return the facts of a problem and the outcome of `method`, with the peak memory of this process."""
    warm_up(method)
    problem = large_problem(name, size, seed)
    outcome = solve(problem, method, search=search, workers=workers)
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if platform.system() == "Darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return facts_of(problem), replace(outcome, memory=memory)


def print_large(options: argparse.Namespace, search: SearchOptions) -> None:
    """Print the table of large problems. The peak memory includes the problem and the check of its plan."""
    print_header(options.methods)
    # A new process for every job, so that the peak memory belongs to this job alone.
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    for name in LARGE:
        for size in options.sizes:
            if not is_chosen(name, options.families):
                continue
            outcomes: dict[str, Outcome] = {}
            for method in options.methods:
                job = pool.submit(solve_large, name, size, options.seed, method, search, options.workers)
                facts, outcomes[method] = job.result()
            bound = max(outcome.bound for outcome in outcomes.values())
            cells = [cell(outcomes[method], bound) for method in options.methods]
            print_line([*facts, f"{bound:,}", *cells, never_worse(outcomes)])


def print_real(options: argparse.Namespace, search: SearchOptions) -> None:
    """Print the table of real tries."""
    methods = options.methods
    names = ["trie", "samples", "POR %", "C", "truncated", *methods, "gap of auto", "never worse"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    for path in options.real:
        whole = read_trie(path)
        for capacity in options.capacities:
            trie, counts = fit_capacity(whole, capacity, too_long="truncate")
            problem = Problem(path.name, trie, capacity)
            outcomes = {method: solve(problem, method, search=search, workers=options.workers) for method in methods}
            name, samples, _, _, por = facts_of(problem)
            cells = [name, samples, por, f"{capacity:,}", f"{counts['truncated to the capacity']:,}"]
            cells += [
                f"{outcome.tokens / trie.tokens_tree:.4f} / {outcome.rows:,} / {outcome.seconds:.2f}"
                for outcome in outcomes.values()
            ]
            bound = max(outcome.bound for outcome in outcomes.values())
            gap = f"{100 * (outcomes['auto'].tokens / bound - 1):.2f} %" if "auto" in outcomes else "-"
            print_line([*cells, gap, never_worse(outcomes)])


def words(text: str) -> list[str]:
    """Return comma-separated words as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    """Return comma-separated integers as a list."""
    return [int(part) for part in words(text)]


def main() -> None:
    """Read the options and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=numbers, help="leaves of a problem; default 8,64,1000, or 100000,1000000")
    parser.add_argument(
        "--capacities",
        type=numbers,
        help="tokens of a row; default 8192,32768, and 131072 without --real",
    )
    parser.add_argument("--capacity-ratio", type=lambda text: [float(x) for x in words(text)], default=[1.3])
    parser.add_argument(
        "--methods", type=words, help=f"of {', '.join(ALL)}; default all, but exact only for trees of the families"
    )
    parser.add_argument("--families", type=words, default=[], help="parts of their names; default all")
    parser.add_argument("--effort", choices=EFFORTS, default="normal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arrival", choices=("depth-first", "random"), default="depth-first")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--real", type=Path, nargs="+", metavar="TRIE", help="directories of build-trie")
    options = parser.parse_args()
    options.capacities = options.capacities or list(REAL_CAPACITIES if options.real else CAPACITIES)
    options.sizes = options.sizes or ([100_000, 1_000_000] if options.large else [8, 64, 1000])
    options.methods = options.methods or [
        method for method in ALL if method != "exact" or not (options.large or options.real)
    ]
    search = SearchOptions(options.effort, time_limit=EXACT_SECONDS)
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, commit {commit()}\n")
    if options.large:
        print_large(options, search)
        return
    # With --large every job warms up in its own process.
    for method in options.methods:
        warm_up(method)
    if options.real:
        print_real(options, search)
        return
    print_table(problems(options), options.methods, search=search, workers=options.workers)


if __name__ == "__main__":
    main()
