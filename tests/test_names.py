"""Public names of the library: each stands for one thing."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

from support.paths import ROOT

# Every format has a reader of this name; the registry calls it.
READERS = ("read", "read_file", "recognise")


@cache
def homes() -> dict[str, list[str]]:
    """Return the modules of every public class and function at the top of a module."""
    found = defaultdict(list)
    for path in sorted((ROOT / "treepack").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def is_reader(name: str, paths: list[str]) -> bool:
    outside = [path for path in paths if "formats" not in Path(path).parts]
    return name in READERS and len(outside) <= 1


def test_no_public_name_stands_for_two_things() -> None:
    doubled = {name: paths for name, paths in homes().items() if len(paths) > 1 and not is_reader(name, paths)}
    assert doubled == {}
