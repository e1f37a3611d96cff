"""The budget of rooms and of the core: no room outgrows it, and the rooms above it do not grow."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import house_numbers
import pytest
from house_numbers import Room

from support.paths import ROOT

MAX_LINES, MAX_BOXES, MAX_CORE_LINES = 9_000, 25, 60_000
# Numbers of today that are above the budget: lower them when they fall, and remove them when they are within it.
LINES_ABOVE = {"formats": 10_701, "model": 9_520, "train": 9_359}
BOXES_ABOVE: dict[str, int] = {}
CORE_LINES_ABOVE = 84_035


@cache
def rooms() -> tuple[Room, ...]:
    library = ROOT / house_numbers.PACKAGE
    graph = house_numbers.import_graph(library)
    return tuple(house_numbers.measure_room(path.parent, graph) for path in sorted(library.glob("*/__init__.py")))


def test_no_room_has_more_lines_than_its_budget() -> None:
    sizes = {room.name: room.lines for room in rooms()}
    assert len(sizes) > 10
    assert {name: size for name, size in sizes.items() if size > LINES_ABOVE.get(name, MAX_LINES)} == {}


def test_no_room_has_more_boxes_than_its_budget() -> None:
    boxes = {room.name: room.boxes for room in rooms()}
    assert sum(boxes.values()) > 100
    assert {name: num for name, num in boxes.items() if num > BOXES_ABOVE.get(name, MAX_BOXES)} == {}


def test_the_core_has_no_more_lines_than_its_budget() -> None:
    every = house_numbers.num_lines(house_numbers.sources(ROOT / house_numbers.PACKAGE))
    core = every - sum(room.lines for room in rooms() if room.name in house_numbers.EXTRAS)
    assert 0.5 * MAX_CORE_LINES < core <= max(CORE_LINES_ABOVE, MAX_CORE_LINES)


def test_the_numbers_above_the_budget_are_above_it() -> None:
    assert min(LINES_ABOVE.values(), default=MAX_LINES + 1) > MAX_LINES
    assert min(BOXES_ABOVE.values(), default=MAX_BOXES + 1) > MAX_BOXES
    assert {*LINES_ABOVE, *BOXES_ABOVE} <= {room.name for room in rooms()}


def test_contributing_states_the_budget() -> None:
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    (shown,) = re.findall(
        r"at most ([\d,]+) lines and (\d+) boxes on its first level, the core at most ([\d,]+) lines", text
    )
    assert tuple(int(each.replace(",", "")) for each in shown) == (MAX_LINES, MAX_BOXES, MAX_CORE_LINES)


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
