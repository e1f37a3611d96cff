"""Public names of the library: each stands for one thing."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

from support.paths import ROOT

# Every format has a reader of this name; the registry calls it.
READERS = ("read", "read_file", "recognise")
# Names that several modules may have.
ALLOWED = set(
    """
    Config Environment KeyWork Marks Piece Pointers Reads RowGroup Shared
    attributes_of backward check_attention check_temperatures cut describe extend file_of_session finish forward
    forward_launch ids_of is_exchange is_message is_recorded key_launch outer parts_of place query_launch records_of
    rounds row_values rows_of shown spans_of start_of store_rows temperature_of text_of view
    """.split()
)


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
    assert {name: paths for name, paths in doubled.items() if name not in ALLOWED} == {}


def test_no_name_is_allowed_twice_without_need() -> None:
    assert sorted(name for name in ALLOWED if len(homes()[name]) < 2) == []
