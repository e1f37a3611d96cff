"""Public names of the library: each stands for one thing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.paths import ROOT

MODULES = sorted((ROOT / "treepack").rglob("*.py"))


@cache
def homes() -> dict[str, list[str]]:
    """Return the modules of every public class and function at the top of a module."""
    found = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_no_public_name_stands_for_two_things() -> None:
    doubled = {name: paths for name, paths in homes().items() if len(paths) > 1}
    assert doubled == {}


def references() -> Iterator[tuple[str, list[str]]]:
    """Yield each `module.name` in the text of the library with its file, without a leading `treepack.`."""
    for path in MODULES:
        for match in re.finditer(r"(?<!`)`(?:treepack\.)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)`", path.read_text()):
            yield str(path.relative_to(ROOT)), match[1].split(".")


def ends_with(path: str, words: list[str]) -> bool:
    """Return True for treepack/objectives/losses.py and ["losses"], and for treepack/rl/__init__.py and ["rl"]."""
    parts = [part for part in Path(path).with_suffix("").parts if part != "__init__"]
    return parts[-len(words) :] == words


@cache
def members() -> frozenset[str]:
    """Return the names of all fields and methods of classes."""
    classes = [
        node for path in MODULES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    entries = [entry for each in classes for entry in each.body]
    fields = {ast.unparse(entry.target) for entry in entries if isinstance(entry, ast.AnnAssign)}
    return frozenset(fields | {entry.name for entry in entries if isinstance(entry, ast.FunctionDef)})


def test_a_name_after_its_module_is_in_that_module() -> None:
    wrong, num_checked = [], 0
    for path, words in references():
        *module, name = words
        if any(ends_with(str(each), words) for each in MODULES) or name not in homes() or name in members():
            continue  # a module, a name of another package, or perhaps a field of a value
        num_checked += 1
        (home,) = homes()[name]
        if not ends_with(home, module):
            wrong.append(f"{path}: {'.'.join(words)} is in {home}")
    assert num_checked > 100
    assert wrong == []
