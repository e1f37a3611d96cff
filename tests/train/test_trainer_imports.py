"""The trainer and attention import no package that only some runs need: each would cost every run seconds."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

STARTS = ("treepack.train.setup.opening", "treepack.train.loop", "treepack.attention")
# Beside torch itself. transformers is imported by the command, which shows the seconds of it.
ALLOWED = {"numpy", "orjson", "pyarrow", "torch"}


def module_path(name: str) -> Path | None:
    """Return the file of a module of treepack, None if it is a name inside a module."""
    path = ROOT / Path(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def statements(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when a module is imported, without those for type checkers."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from statements(statement.orelse)
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from statements([each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)])


def imported(path: Path) -> Iterator[str]:
    for statement in statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        else:
            assert statement.module is not None
            assert not statement.level
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def foreign_names() -> set[str]:
    """Return the names that the trainer and all modules below it import from other packages."""
    left, seen, foreign = [*STARTS], set(), set()
    while left:
        name = left.pop()
        if name.partition(".")[0] != "treepack":
            foreign.add(name)
            continue
        for depth in range(name.count(".") + 1):
            path = module_path(name.rsplit(".", depth)[0])
            if path is not None and path not in seen:
                seen.add(path)
                left += imported(path)
    assert len(seen) > 150
    return foreign


def test_the_trainer_imports_few_packages_and_no_compiler() -> None:
    names = foreign_names()
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == ALLOWED
    assert not {name for name in names if name.startswith(("torch._dynamo", "torch._inductor"))}
