"""Measure the house: its size, names and English, and the floor plan of every room.

    python tools/house_numbers.py            tables of the whole library and of its rooms
    python tools/house_numbers.py --json     the same as one JSON object, to compare two commits

A room is a folder of treepack/, and a box is a module or folder on its first level. An arrow goes from a box to one
that it imports: at the top of a file, in a function, or for types. Floors are the boxes of the longest path along
arrows, where the boxes of a circle count as one. Modules that import each other in a circle count as one circle. The
core is everything except `EXTRAS`. The budget of CONTRIBUTING.md is tested in `tests/project/test_house_numbers.py`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import plain_english  # noqa: E402  # it is a script in docs/

PACKAGE = "treepack"
EXTRAS = frozenset({"research", "integrations", "rollout", "cluster", "report", "formats"})
SOURCES = frozenset({".py", ".c", ".js"})

Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Room:
    """The size and the floor plan of one folder of the library."""

    name: str
    lines: int
    files: int
    boxes: int
    floors: int
    arrows: int
    circles: int


@dataclass(frozen=True)
class House:
    """The numbers of the whole library."""

    lines: int
    core_lines: int
    files: int
    classes: int
    public_names: int
    public_classes_twice: tuple[str, ...]
    public_functions_twice: tuple[str, ...]
    circles: tuple[tuple[str, ...], ...]
    hard_phrases: float  # in 10,000 words of code, docs and the pages beside them
    comment_share: float  # lines with a comment, of all lines of Python
    rooms: tuple[Room, ...]


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file; to keep all trees would cost more in garbage collections."""
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(folder: Path) -> list[Path]:
    """Return the Python, C and JavaScript files below `folder`."""
    return sorted(path for path in folder.rglob("*") if path.suffix in SOURCES)


def num_lines(paths: Iterable[Path]) -> int:
    """Return the number of lines of all files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def module_name(path: Path) -> str:
    """Return treepack.trie.trie for treepack/trie/trie.py, and treepack.trie for its __init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(folder: Path) -> dict[str, set[str]]:
    """Return the modules of the library that each module imports; imports for types count too."""
    modules = {module_name(path): path for path in folder.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = {each for each in _imported(parsed(path), package, modules) if each != name}
    return graph


def _imported(tree: ast.AST, package: str, modules: Mapping[str, Path]) -> set[str]:
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # "from treepack.trie import trie" imports a module, "from treepack.trie.trie import Trie" from one
            named = {f"{base}.{alias.name}" for alias in node.names}
            imported |= {name for name in named if name in modules}
            if base in modules and not named <= modules.keys():
                imported.add(base)
    return imported


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Return the sets of nodes that reach one another, each sorted, in the order of their first names.

    {a: {b}, b: {a, c}, c: {}} -> [(a, b)]
    """
    reached = {node: _reachable(graph, node) for node in graph}
    groups = {
        tuple(sorted(other for other in reached[node] if node in reached[other]))
        for node in graph
        if node in reached[node]
    }
    return sorted(group for group in groups if len(group) > 1)


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for node in graph[waiting.pop()]:
            if node in graph and node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen


def num_floors(graph: Graph) -> int:
    """Return the nodes of the longest path, where the nodes of a circle count as one."""
    merged = {node: group for group in circles(graph) for node in group}
    below: dict[object, set[object]] = {}
    for node, targets in graph.items():
        group: object = merged.get(node, node)
        below.setdefault(group, set()).update(merged.get(each, each) for each in targets)

    @cache
    def height(group: object) -> int:
        return 1 + max((height(each) for each in below[group] if each != group), default=0)

    return max(map(height, below), default=0)


def box_graph(room: str, graph: Graph) -> dict[str, set[str]]:
    """Return the arrows between the boxes of a room; treepack.trie.store.parts belongs to the box store."""
    prefix = f"{PACKAGE}.{room}."
    boxes: dict[str, set[str]] = {}
    for name, targets in graph.items():
        if name.startswith(prefix):
            box = name.removeprefix(prefix).split(".")[0]
            inside = {each.removeprefix(prefix).split(".")[0] for each in targets if each.startswith(prefix)}
            boxes.setdefault(box, set()).update(inside - {box})
    return boxes


def measure_room(folder: Path, graph: Graph) -> Room:
    """Return the numbers of one room."""
    files = sources(folder)
    boxes = box_graph(folder.name, graph)
    inside = {name: targets for name, targets in graph.items() if name.startswith(f"{PACKAGE}.{folder.name}.")}
    return Room(
        name=folder.name,
        lines=num_lines(files),
        files=len(files),
        boxes=len(boxes),
        floors=num_floors(boxes),
        arrows=sum(len(targets) for targets in boxes.values()),
        circles=len(circles(inside)),
    )


def top_level(paths: Iterable[Path], kinds: tuple[type[ast.stmt], ...]) -> list[str]:
    """Return the names of the classes or functions at the top of Python files, once for each definition."""
    return [
        node.name  # type: ignore[attr-defined]
        for path in paths
        for node in parsed(path).body
        if isinstance(node, kinds)
    ]


def constants(paths: Iterable[Path]) -> list[str]:
    """Return the names that are assigned at the top of Python files."""
    names = []
    for path in paths:
        for node in parsed(path).body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def public(names: Iterable[str]) -> list[str]:
    """Return the names without a leading underscore."""
    return [name for name in names if not name.startswith("_")]


def twice(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are there more than once, sorted."""
    return tuple(sorted(name for name, count in Counter(names).items() if count > 1))


def measure_house() -> House:
    """Return the numbers of this checkout."""
    library = ROOT / PACKAGE
    files = sources(library)
    python = [path for path in files if path.suffix == ".py"]
    graph = import_graph(library)
    folders = sorted(path.parent for path in library.glob("*/__init__.py"))
    rooms = tuple(measure_room(folder, graph) for folder in folders)
    classes = top_level(python, (ast.ClassDef,))
    functions = top_level(python, (ast.FunctionDef, ast.AsyncFunctionDef))
    lines = num_lines(files)
    return House(
        lines=lines,
        core_lines=lines - sum(room.lines for room in rooms if room.name in EXTRAS),
        files=len(files),
        classes=len(classes),
        public_names=len(public([*classes, *functions, *constants(python)])),
        public_classes_twice=twice(public(classes)),
        public_functions_twice=twice(public(functions)),
        # A folder is imported before its modules, so its __init__ would be in a circle with each of them.
        circles=tuple(circles({name: targets for name, targets in graph.items() if name.count(".") > 1})),
        hard_phrases=plain_english.density([ROOT / name for name in plain_english.OWN])[0],
        comment_share=plain_english.comment_share([library]),
        rooms=rooms,
    )


def main(argv: list[str]) -> None:
    """Print the numbers as tables, or with --json as one object."""
    house = measure_house()
    if "--json" in argv:
        print(json.dumps(asdict(house), indent=1))
        return
    figures = {
        "lines of Python, C and JavaScript": f"{house.lines:,}",
        "lines of the core": f"{house.core_lines:,}",
        "files": f"{house.files:,}",
        "classes": f"{house.classes:,}",
        "public names at the top of files": f"{house.public_names:,}",
        "public class names used twice": f"{len(house.public_classes_twice)}",
        "public function names used twice": f"{len(house.public_functions_twice)}",
        "circles of imports": f"{len(house.circles)}",
        "hard phrases in 10,000 words": f"{house.hard_phrases:.1f}",
        "lines with a comment": f"{100 * house.comment_share:.2f} %",
    }
    for name, figure in figures.items():
        print(f"{name:<36}{figure:>8}")
    for circle in house.circles:
        print("circle:", ", ".join(circle))
    print(f"\n{'room':<14}{'lines':>8}{'files':>7}{'boxes':>7}{'floors':>8}{'arrows':>8}{'circles':>9}")
    for room in house.rooms:
        print(
            f"{room.name:<14}{room.lines:>8,}{room.files:>7}{room.boxes:>7}{room.floors:>8}{room.arrows:>8}{room.circles:>9}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
