"""The budget of the library, its core and its rooms: fixed numbers, which only a person changes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import house_numbers
import pytest
from house_numbers import Room

from support.paths import ROOT

# Lines of Python. A person changes them, and the commit has one sentence about the use of the growth.
MAX_LINES, MAX_CORE_LINES = 114_500, 84_900
MAX_BOXES = 25  # on the first level of a room


@cache
def rooms() -> tuple[Room, ...]:
    library = ROOT / house_numbers.PACKAGE
    graph = house_numbers.import_graph(library)
    return tuple(house_numbers.measure_room(path.parent, graph) for path in sorted(library.glob("*/__init__.py")))


def test_library_and_core_have_no_more_lines_than_their_budget() -> None:
    every = house_numbers.num_lines(house_numbers.sources(ROOT / house_numbers.PACKAGE))
    core = every - sum(room.lines for room in rooms() if room.name in house_numbers.EXTRAS)
    # Numbers that are far above the code would allow any growth.
    assert 0.99 * MAX_LINES < every <= MAX_LINES
    assert 0.99 * MAX_CORE_LINES < core <= MAX_CORE_LINES


def test_no_room_has_more_boxes_than_its_budget() -> None:
    boxes = {room.name: room.boxes for room in rooms()}
    assert sum(boxes.values()) > 100
    assert {name: num for name, num in boxes.items() if num > MAX_BOXES} == {}


def test_contributing_states_the_budget() -> None:
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    (shown,) = re.findall(r"at most ([\d,]+) lines, its core ([\d,]+), and a room (\d+) boxes", text)
    assert tuple(int(each.replace(",", "")) for each in shown) == (MAX_LINES, MAX_CORE_LINES, MAX_BOXES)


@pytest.mark.parametrize(
    ("graph", "circles", "floors"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, [], 3),
        ({"a": {"b"}, "b": {"a", "c"}, "c": set()}, [("a", "b")], 2),
        ({"a": {"b", "outside"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}, [("b", "c")], 3),
        ({"a": set(), "b": set()}, [], 1),
    ],
)
def test_circles_and_floors_of_a_graph(graph: dict[str, set[str]], circles: list[tuple[str, ...]], floors: int) -> None:
    assert house_numbers.circles(graph) == circles
    inside = {node: targets & graph.keys() for node, targets in graph.items()}
    assert house_numbers.num_floors(inside) == floors


def test_arrows_follow_every_form_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "treepack" / "room"
    room.mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "a": "import treepack.room.b",
        "b": "from treepack.room import c, a",
        "c": "def f():\n    from treepack.room.d import g",
        "d": "from . import e\nimport json",
        "e": "from .a import name",
    }.items():
        (room / f"{name}.py").write_text(text)
    monkeypatch.setattr(house_numbers, "ROOT", tmp_path)
    graph = house_numbers.import_graph(tmp_path / "treepack")
    arrows = [(name[-1], target[-1]) for name, targets in graph.items() for target in targets]
    assert sorted(arrows) == [("a", "b"), ("b", "a"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "a")]
