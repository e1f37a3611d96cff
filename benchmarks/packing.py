"""Every packing method on families of trees: tokens over the certified bound, rows and seconds.

    python benchmarks/packing.py [--sizes 8,64,1000] [--families star,comb] [--methods ...] [--effort normal]
    python benchmarks/packing.py --large      100,000 and 1,000,000 trajectories, each in a process of its own
    python benchmarks/packing.py --real TRIE ...    what `treepack build-trie` wrote, at 8,192 and 32,768

Needs the development install; prints one Markdown table. Each cell of a method is

    percent of tokens over the bound / rows / seconds

and for real tries N_pack/N_tree / rows / seconds, with a column for the gap of auto; what is too long is truncated.
The bound is the best that any of the methods proves. Every plan is checked here, by a walk that shares nothing with the
library. `never worse` says whether auto needs at most the tokens of contiguous, heuristic and greedy-online, and at
most their rows where the tokens are equal. greedy-online gets the trajectories depth-first, its best case, or with
`--arrival random` shuffled inside each tree. Times are those of `plan_rows` on a trie in memory, one process unless
`--workers` says more.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import families as made
import numpy as np

from treepack.pack.capacity import fit_capacity
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import FOREST_METHODS, METHODS, plan_rows
from treepack.pack.plan.problem import EFFORTS, Search
from treepack.trajectory import Int64
from treepack.trie.files import read_trie
from treepack.trie.trie import Trie

ALL = [*METHODS, *FOREST_METHODS]
BASELINES = ("contiguous", "heuristic", "greedy-online")
CAPACITIES = (8192, 32768, 131072)
REAL_CAPACITIES = (8192, 32768)
EXACT_LEAVES = 24
EXACT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Problem:
    """What to pack, and into how many tokens a row."""

    name: str
    trie: Trie
    capacity: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a method made of a problem; `memory` is the peak of the process in bytes."""

    tokens: int
    rows: int
    bound: int
    seconds: float
    memory: int = 0


def solve(problem: Problem, method: str, *, search: Search, workers: int) -> Outcome:
    """Plan, time and check."""
    began = time.perf_counter()
    plan = plan_rows(problem.trie, capacity=problem.capacity, method=method, search=search, workers=workers)
    seconds = time.perf_counter() - began
    if method == "sequence":
        tokens = flat_tokens(problem.trie, plan)
    else:
        tokens = union_tokens(problem.trie, plan)
        assert (check_plan(problem.trie, plan).row_tokens == tokens).all(), "the two counts of row tokens differ"
    assert 0 < tokens.min() <= tokens.max() <= problem.capacity, f"{method}: a row is empty or too long"
    assert plan.lower_bound <= tokens.sum(), f"{method}: fewer tokens than the bound"
    return Outcome(int(tokens.sum()), plan.num_rows, plan.lower_bound, seconds)


def union_tokens(trie: Trie, plan: Plan) -> Int64:
    """Tokens of each row, [num_rows], from a set of nodes per row; each trajectory is in one row by construction."""
    assert plan.row_of.shape == (trie.num_trajectories,)
    parent, size, end_node = trie.parent.tolist(), trie.node_length.tolist(), trie.end_node.tolist()
    tokens = np.zeros(plan.num_rows, np.int64)
    for row, members in enumerate(plan.members()):
        held: set[int] = set()
        for trajectory in members.tolist():
            node = end_node[trajectory]
            while node >= 0 and node not in held:
                held.add(node)
                node = parent[node]
        tokens[row] = sum(size[node] for node in held)
    return tokens


def flat_tokens(trie: Trie, plan: Plan) -> Int64:
    """Tokens of each row, [num_rows], where nothing is shared."""
    return np.bincount(plan.row_of, weights=trie.lengths, minlength=plan.num_rows).astype(np.int64)


def warm_up(method: str) -> None:
    """Load and compile what `method` needs, on a tree that is not solved at first sight."""
    family = {family.name: family for family in made.families()}["random turns"]
    for leaves in (12, 40):
        tree = made.make_tree(family, leaves)
        trie = made.trie_of(made.forest_of_trees([tree]))
        plan_rows(trie, capacity=int(1.3 * tree.length.max()), method=method, search=Search("low", time_limit=1.0))


def problems(options: argparse.Namespace) -> Iterator[Problem]:
    """One tree of each family and size at every capacity that it fits and needs several rows of; and forests."""
    for family in made.families():
        for size in options.sizes:
            if not chosen(family.name, options.families):
                continue
            tree = made.make_tree(family, size, seed=options.seed)
            trie = made.trie_of(made.forest_of_trees([tree]), shuffle=shuffle(options))
            longest = int(tree.length.max())
            fixed = [family.capacity] if family.capacity else options.capacities
            scaled = [int(ratio * longest) for ratio in options.capacity_ratio if family.capacity is None]
            for capacity in sorted({*fixed, *scaled}):
                if longest <= capacity < tree.tokens:
                    yield Problem(family.name, trie, capacity)
    for name, make in made.forests().items():
        for size in options.sizes:
            if size >= 64 and chosen(name, options.families):
                trie = made.trie_of(make(size, options.seed), shuffle=shuffle(options))
                for capacity in options.capacities:
                    if trie.lengths.max() <= capacity < trie.tokens_tree:
                        yield Problem(name, trie, capacity)


def shuffle(options: argparse.Namespace) -> int | None:
    """The seed of the order of arrival."""
    return options.seed if options.arrival == "random" else None


def chosen(name: str, wanted: list[str]) -> bool:
    """Whether `name` contains one of `wanted`, or nothing particular is wanted."""
    return not wanted or any(part in name for part in wanted)


def print_table(given: Iterable[Problem], methods: list[str], *, search: Search, workers: int = 1) -> None:
    """Run all methods on all problems; print a line each, then means and maxima."""
    print_header(methods)
    over: dict[str, list[tuple[str, float]]] = {method: [] for method in methods}
    worse = 0
    for problem in given:
        found = {
            method: solve(problem, method, search=search, workers=workers)
            for method in methods
            if method != "exact" or problem.trie.num_trajectories <= EXACT_LEAVES
        }
        bound = max(outcome.bound for outcome in found.values())
        for method, outcome in found.items():
            over[method].append((problem.name, 100 * (outcome.tokens / bound - 1)))
        verdict = never_worse(found)
        worse += verdict == "no"
        print_line([*facts_of(problem), f"{bound:,}", *(cell(found.get(method), bound) for method in methods), verdict])
    print_summary(over, worse)


def never_worse(found: dict[str, Outcome]) -> str:
    """Whether auto is at least as good as each baseline that ran; "-" without auto."""
    if "auto" not in found:
        return "-"
    auto = (found["auto"].tokens, found["auto"].rows)
    return "yes" if all(auto <= (found[m].tokens, found[m].rows) for m in BASELINES if m in found) else "no"


def print_header(methods: list[str]) -> None:
    """The first two lines."""
    names = ["family", "leaves", "C", "longest/C", "POR %", "bound", *methods, "never worse"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)


def facts_of(problem: Problem) -> list[str]:
    """The cells that describe a problem."""
    trie, capacity = problem.trie, problem.capacity
    por = 100 * (1 - trie.tokens_tree / trie.tokens_flat)
    longest = trie.lengths.max() / capacity
    return [problem.name, f"{trie.num_trajectories:,}", f"{capacity:,}", f"{longest:.2f}", f"{por:.1f}"]


def print_line(cells: list[str]) -> None:
    """One line of the table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def cell(outcome: Outcome | None, bound: int) -> str:
    """Percent over the bound / rows / seconds."""
    if outcome is None:
        return "-"
    memory = f" / {outcome.memory / 2**30:.2f} GiB" if outcome.memory else ""
    return f"{100 * (outcome.tokens / bound - 1):.2f} / {outcome.rows:,} / {outcome.seconds:.2f}{memory}"


def print_summary(over: dict[str, list[tuple[str, float]]], worse: int) -> None:
    """The mean over the means of the families, and the worst problem of all."""
    means, worst = [], []
    for found in over.values():
        by_family: dict[str, list[float]] = {}
        for name, value in found:
            by_family.setdefault(name, []).append(value)
        means.append(f"{np.mean([np.mean(values) for values in by_family.values()]):.2f}" if found else "-")
        worst.append(f"{max(value for _, value in found):.2f}" if found else "-")
    blank = " | ".join([""] * 5)
    print_line(["mean of families", blank, *means, ""])
    print_line(["maximum", blank, *worst, f"{worse} no"])


def large_problem(name: str, size: int, seed: int) -> Problem:
    """A problem of `size` trajectories, as one tree or as a forest."""
    if name in made.forests():
        return Problem(name, made.trie_of(made.forests()[name](size, seed)), 32768)
    family = {family.name: family for family in made.families()}[name]
    tree = made.make_tree(family, size, seed=seed)
    capacity = family.capacity or max(32768, int(1.3 * tree.length.max()))
    return Problem(name, made.trie_of(made.forest_of_trees([tree])), capacity)


LARGE = ("star, long prompt", "random turns", "sub-agents", "one-token branches", "stars of 16", "mixed trees")


def solve_large(
    name: str, size: int, seed: int, method: str, search: Search, workers: int
) -> tuple[list[str], Outcome]:
    """The facts of a problem and what `method` makes of it; for a process of its own, so that its memory counts."""
    warm_up(method)
    problem = large_problem(name, size, seed)
    found = solve(problem, method, search=search, workers=workers)
    unit = 1 if platform.system() == "Darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return facts_of(problem), Outcome(found.tokens, found.rows, found.bound, found.seconds, memory)


def print_large(options: argparse.Namespace, search: Search) -> None:
    """The table of large problems; peak memory is that of the whole process, with the problem and the check."""
    print_header(options.methods)
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    for name in LARGE:
        for size in options.sizes:
            if not chosen(name, options.families):
                continue
            found: dict[str, Outcome] = {}
            for method in options.methods:
                job = pool.submit(solve_large, name, size, options.seed, method, search, options.workers)
                facts, found[method] = job.result()
            bound = max(outcome.bound for outcome in found.values())
            print_line([*facts, f"{bound:,}", *(cell(found[m], bound) for m in options.methods), never_worse(found)])


def print_real(options: argparse.Namespace, search: Search) -> None:
    """The table of real tries."""
    methods = options.methods
    names = ["trie", "samples", "POR %", "C", "truncated", *methods, "gap of auto", "never worse"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    for path in options.real:
        whole = read_trie(path)
        for capacity in options.capacities:
            trie, counts = fit_capacity(whole, capacity, too_long="truncate")
            problem = Problem(path.name, trie, capacity)
            found = {method: solve(problem, method, search=search, workers=options.workers) for method in methods}
            name, samples, _, _, por = facts_of(problem)
            cells = [name, samples, por, f"{capacity:,}", f"{counts['truncated to the capacity']:,}"]
            cells += [
                f"{outcome.tokens / trie.tokens_tree:.4f} / {outcome.rows:,} / {outcome.seconds:.2f}"
                for outcome in found.values()
            ]
            bound = max(outcome.bound for outcome in found.values())
            gap = f"{100 * (found['auto'].tokens / bound - 1):.2f} %" if "auto" in found else "-"
            print_line([*cells, gap, never_worse(found)])


def listed(text: str) -> list[str]:
    """Comma-separated words."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    """Comma-separated integers."""
    return [int(part) for part in listed(text)]


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=numbers, help="leaves of a problem; default 8,64,1000, or 100000,1000000")
    parser.add_argument(
        "--capacities", type=numbers, help="tokens of a row; default 8192,32768, and 131072 of made trees"
    )
    parser.add_argument("--capacity-ratio", type=lambda text: [float(x) for x in listed(text)], default=[1.3])
    parser.add_argument(
        "--methods", type=listed, help=f"of {', '.join(ALL)}; default all, but exact only for made trees"
    )
    parser.add_argument("--families", type=listed, default=[], help="parts of their names; default all")
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
    search = Search(options.effort, time_limit=EXACT_SECONDS)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, commit {commit.stdout.strip()}\n")
    if options.large:
        print_large(options, search)
        return
    for method in options.methods:
        warm_up(method)
    if options.real:
        print_real(options, search)
        return
    print_table(problems(options), options.methods, search=search, workers=options.workers)


if __name__ == "__main__":
    main()
