"""Public names of the library: each stands for one thing."""

import ast
from collections import defaultdict
from functools import cache

from support.paths import ROOT


@cache
def homes() -> dict[str, list[str]]:
    """Return the modules of every public class and function at the top of a module."""
    found = defaultdict(list)
    for path in sorted((ROOT / "treepack").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_no_public_name_stands_for_two_things() -> None:
    doubled = {name: paths for name, paths in homes().items() if len(paths) > 1}
    assert doubled == {}
