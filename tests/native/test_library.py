"""Calls into C check their arrays; treepack plans without the library, and where it may write nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from support.paths import ROOT
from treepack.pack.plan.bounds.counting import count_rows

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
