"""Loops in C: each gives the result of its twin in Python, checks its arrays, and may be missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import strategies
from support.paths import ROOT
from support.plan_costs import alone
from support.strategies import Nested, tree_of
from treepack.native.library import is_compiled
from treepack.pack.plan.bounds import column_generation, counting, knapsack
from treepack.pack.plan.bounds.counting import count_rows
from treepack.pack.plan.bounds.lower_bound import ProofEffort, lower_bound
from treepack.pack.plan.methods import anneal, dominance, first_fit, jump_tree, online, subsets
from treepack.pack.plan.methods.contiguous import contiguous
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions, path_pairs
from treepack.research.trace import greedy

count_any: Any = count_rows


PLAN = """
import treepack, numpy as np
from treepack.native.library import is_compiled
from treepack.pack.plan.auto import auto
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions
size = np.array([5, *(3 + i * 7 % 11 for i in range(20))])
depth, parent = np.array([0] + 20 * [5]), np.array([-1] + 20 * [0])
tree = PlanTree(size, depth, parent, np.array([21, *range(2, 22)]), np.arange(1, 21), np.ones(20, np.int64))
solution = auto(tree, RowLimits(30), SearchOptions("low"))
print(treepack.__file__, is_compiled(), solution.row_of_leaf.tolist(), solution.lower_bound)
"""


COMMANDS = """
import sys, treepack, treepack_cli
for line in sys.argv[1:]:
    treepack_cli.commands.main(line.split(), standalone_mode=False)
print(treepack.__file__)
"""


@pytest.mark.parametrize(
    "wrong",
    [np.arange(3, dtype=np.int32), np.arange(6)[::2], np.arange(3.0), [0, 1, 2], None],
    ids=["int32", "strided", "float64", "list", "None"],
)
def test_an_array_of_another_type_or_layout_is_refused(wrong: object) -> None:
    right = [np.arange(3) for _ in range(6)]
    for i in range(6):
        with pytest.raises(TypeError, match="expected a contiguous array of int64"):
            count_any(*right[:i], wrong, *right[i + 1 :])


def test_a_call_with_too_few_arrays_is_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        count_any(np.arange(3))


def copy_of_package(folder: Path, *, with_library: bool) -> Path:
    """Copy the library and the command line, as an installation has them."""
    ignored = shutil.ignore_patterns("__pycache__", *(() if with_library else ("*.so",)))
    shutil.copytree(ROOT / "treepack", folder / "treepack", ignore=ignored)
    shutil.copytree(ROOT / "cli", folder / "treepack_cli", ignore=ignored)
    return folder


def run(code: str, *arguments: str, package: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that imports `package`, without the rights of root."""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package), **environment}
    done = subprocess.run(
        [*drop, sys.executable, "-c", code, *arguments],
        cwd=package,  # -c imports from this folder first
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_without_the_library_the_plan_is_the_same_after_one_note(tmp_path: Path) -> None:
    package = copy_of_package(tmp_path, with_library=False)
    slow, fast = (run(PLAN, package=folder) for folder in (package, ROOT))
    assert slow.stdout.split()[:2] == [str(package / "treepack" / "__init__.py"), "False"]
    assert fast.stdout.split()[1:2] == ["True"]
    assert slow.stdout.split()[2:] == fast.stdout.split()[2:]
    (line,) = slow.stderr.splitlines()
    assert line.startswith("note: treepack's loops in C are missing")
    assert fast.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() == 0 and shutil.which("setpriv") is None, reason="root can write everywhere")
def test_a_read_only_package_without_a_home_builds_packs_and_measures(tmp_path: Path) -> None:
    package, out = copy_of_package(tmp_path / "package", with_library=True), tmp_path / "out"
    out.mkdir()
    rng = np.random.default_rng(0)
    lines = [{"input_ids": [1, 2, 3, *rng.integers(4, 9, 30 + i).tolist()]} for i in range(80)]
    (out / "rollouts.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    folders = [path for path in (package, *package.rglob("*")) if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    try:
        can_write = run("import os, sys; print(os.access(sys.argv[1], os.W_OK))", str(package), package=package)
        assert can_write.stdout == "False\n"
        done = run(
            COMMANDS,
            f"build-trie {out}/rollouts.jsonl --train-all --out {out}/trie",
            f"pack {out}/trie --capacity 400 --effort low --out {out}/packed",
            f"stats {out}/packed --check",
            package=package,
            HOME="/nonexistent",
            TMPDIR="/nonexistent",
        )
    finally:
        for path in folders:
            path.chmod(0o755)
    assert done.stdout.splitlines()[-1] == str(package / "treepack" / "__init__.py")
    assert "missing" not in done.stderr
    assert (out / "packed" / "manifest.json").is_file()


STAR: Nested = (5, [(size, []) for size in (7, 7, 1, 0, 9, 3, 7, 0, 2, 2, 8, 8, 1)])


EQUAL: Nested = (0, [(4, []) for _ in range(40)])


EMPTY: Nested = (0, [(0, []), (0, [(0, []), (0, [])])])


ONE: Nested = (3, [])


def comb(num_leaves: int) -> Nested:
    """A chain of nodes with one leaf each."""
    node: Nested = (2, [(1, []), (1, [])])
    for i in range(num_leaves - 2):
        node = (1 + i % 3, [(i % 5, []), node] if i % 2 else [node, (i % 5, [])])
    return node


def random_tree(num_leaves: int, seed: int) -> PlanTree:
    """Forks are anywhere, and terms of the leaves are random."""
    rng = np.random.default_rng(seed)

    def nested(leaves: int) -> Nested:
        if leaves == 1:
            return int(rng.integers(0, 30)), []
        first = int(rng.integers(1, leaves))
        return int(rng.integers(1, 12)), [nested(first), nested(leaves - first)]

    return tree_of(nested(num_leaves), rng.integers(0, 5, num_leaves).tolist())


SHAPES = [tree_of(nested) for nested in (STAR, EQUAL, EMPTY, ONE, comb(60))]


shapes = st.sampled_from(SHAPES) | strategies.trees(max_leaves=12)


larger = st.builds(random_tree, st.integers(2, 120), st.integers(0, 10**6)) | shapes


@st.composite
def problems(draw: st.DrawFn, trees: st.SearchStrategy[PlanTree]) -> tuple[PlanTree, RowLimits]:
    """Return a tree with a capacity that is often tight, and in some cases with limits on pairs and terms."""
    tree = draw(trees)
    longest = max(1, int(tree.length.max()))
    pairs = int(path_pairs(tree.length).max()) + draw(st.integers(0, 300))
    terms = int(tree.terms.max()) + draw(st.integers(0, 9))
    return tree, RowLimits(
        longest + draw(st.just(0) | st.integers(0, 3 * longest)),
        draw(st.none() | st.just(pairs)),
        draw(st.none() | st.just(terms)),
    )


def assert_twins_agree(run: Callable[[], Any], module: ModuleType, *names: str) -> None:
    """Compare the result of `run` with the functions of these names in C, and with their twins."""
    compiled = run()
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(module, name, getattr(module, name).twin)
        slow = run()
    np.testing.assert_equal(compiled, slow)


def test_the_loops_are_compiled_here() -> None:
    assert is_compiled(), "install a C compiler, then pip install --no-deps -e ."


@given(problems(larger))
@settings(max_examples=60)
def test_counting(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    known = np.zeros(tree.num_nodes, np.int64), np.ones(tree.num_nodes, np.int64)

    def counted() -> Any:
        # The second time from bounds that are already proven.
        first = counting.count(tree.end, tree.size, tree.depth + tree.size, limits.capacity, *known)
        again = counting.count(tree.end, tree.size, tree.depth + tree.size, limits.capacity, first[0] + 1, first[1])
        rows = contiguous(tree, limits, SearchOptions()).row_of_leaf
        plans = rows, alone(tree), np.random.default_rng(1).permutation(tree.num_leaves) % 5
        return first, again, [counting.passes(tree.parent, tree.leaf, plan) for plan in plans]

    assert_twins_agree(counted, counting, "count_up", "count_rows")


@given(problems(shapes.filter(lambda tree: tree.num_leaves <= 9)))
@settings(max_examples=40)
def test_subsets(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    tokens, fits = subsets._tokens_of_sets(tree, limits)
    assert_twins_agree(lambda: subsets._best_of_sets(tokens, fits), subsets, "best_of_sets")


@given(problems(larger), st.integers(0, 10**6))
@settings(max_examples=40)
def test_knapsack(problem: tuple[PlanTree, RowLimits], seed: int) -> None:
    tree, limits = problem
    profits = np.random.default_rng(seed).integers(-50, 50, tree.num_nodes).astype(np.int32)

    def table_and_row() -> Any:
        table = np.full((tree.num_nodes + 1, limits.capacity + 1), -1, np.int32)
        knapsack.fill_table(tree.size, profits, tree.end, table)
        return table, knapsack.best_row(tree.size, tree.end, table)

    assert_twins_agree(table_and_row, knapsack, "fill_table", "mark_best_row")
    best = knapsack.best_profits(tree, profits.astype(np.int64), limits.capacity)
    np.testing.assert_array_equal(best, table_and_row()[0][0])


@given(problems(larger.filter(lambda tree: tree.num_leaves <= 30)))
@settings(max_examples=8, deadline=None)
def test_column_generation(problem: tuple[PlanTree, RowLimits]) -> None:
    tree, limits = problem
    rows = contiguous(tree, RowLimits(limits.capacity), SearchOptions()).row_of_leaf
    proof = ProofEffort(sets=2, exact=0, programs=(1000,), entries=3e4)
    assert_twins_agree(lambda: lower_bound(tree, limits.capacity, rows, proof), column_generation, "add_outer_products")


@given(problems(larger), st.integers(0, 10**6), st.sampled_from([1, 3, 1024]))
@settings(max_examples=80)
@example((tree_of(comb(300)), RowLimits(700)), 0, 1)
def test_first_fit(problem: tuple[PlanTree, RowLimits], seed: int, blocks: int) -> None:
    tree, limits = problem
    order = np.random.default_rng(seed).permutation(tree.num_leaves)
    pairs, steps = path_pairs(tree.depth + tree.size), np.zeros(tree.num_leaves, np.int64)
    plan = online.fill_rows(tree, pairs, order, steps, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_fit, "FIRST_BLOCKS", blocks)  # so that blocks are doubled again and again
        np.testing.assert_array_equal(plan, online.fill_rows(tree, pairs, order, steps, limits))
        assert_twins_agree(lambda: online.fill_rows(tree, pairs, order, steps, limits), first_fit, "place_leaves")


@given(problems(larger), st.sampled_from([2, 7, 48]), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_annealing(problem: tuple[PlanTree, RowLimits], window: int, passes: int) -> None:
    tree, limits = problem
    rows = contiguous(tree, limits, SearchOptions()).row_of_leaf
    steps = 1 + 150 // tree.num_leaves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anneal, "WINDOW_ROWS", window)
        for module, names in ((anneal, ["anneal_rows"]), (jump_tree, ["split_paths", "set_jumps"])):
            assert_twins_agree(
                lambda: anneal.anneal(tree, limits, rows, steps_per_leaf=steps, passes=passes), module, *names
            )


@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 10**6), st.integers(1, 40))
@settings(max_examples=60)
def test_dominance(num: int, width: int, seed: int, compared: int) -> None:
    rooms = np.random.default_rng(seed).integers(0, 4, (num, width))

    def best() -> Any:
        out = np.zeros(num, np.bool_)
        dominance.best_of(rooms, compared, np.zeros(num, np.int64), out)
        return out

    assert_twins_agree(best, dominance, "best_of")


@given(st.integers(1, 40), st.integers(0, 10**6), st.integers(0, 200), st.booleans())
@settings(max_examples=100)
def test_greedy_allocation(num: int, seed: int, budget: int, is_rounded: bool) -> None:
    rng = np.random.default_rng(seed)
    value = np.round(rng.random(num), 1) if is_rounded else rng.random(num)  # rounded values give ties, and 0 and 1
    maximum = rng.integers(0, 30, num)
    assert_twins_agree(lambda: greedy.fill_roots(value, maximum, budget), greedy, "spend_on_roots")
    start = np.sort(np.concatenate([[0, num], rng.integers(0, num + 1, 3)]))
    budgets = np.where(np.diff(start) > 0, rng.integers(0, 1 + budget, 4), 0)
    assert_twins_agree(lambda: greedy.fill_prefixes(value, start, budgets), greedy, "spend_on_prefixes")
