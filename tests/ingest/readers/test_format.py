"""`Format`: required fields decide which records match, and the refusal names the field that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.kinds import (
    ANY,
    TEXT,
    Requirement,
    ValueKind,
    each,
    first,
    has_fields,
    no,
    optional,
    some,
    starting,
)
from treepack.trajectory import Skipped, Trajectory

Checked = Literal["each", "first", "none"]


def skip(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    yield Skipped(record.source, "read")


def skip_file(records: Iterator[Record], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    for record in records:
        yield from skip(record, options)


def make_format(requires: Requirement, checked: Checked = "each") -> Format:
    return Format(
        name="f", program="F", recognised_by="`a`", requires=requires, used=["a"], read_file=skip_file, checked=checked
    )


@pytest.mark.parametrize(
    ("kind", "values", "others"),
    [
        (ANY, [None, 0, "x"], []),
        (optional(TEXT), ["x"], [None, 1]),
        (no(TEXT), [None, 1], ["x"]),
        (starting("ATIF"), ["ATIF-v1"], ["v1", 1, None]),
        (each({"a": ANY}), [[], [{"a": 1}]], [[{"a": 1}, {}], [1], {"a": 1}]),
        (each({"a": ANY}, minimum=1), [[{"a": 1}]], [[]]),
        (some({"a": ANY}), [[{}, {"a": 1}]], [[], [{}], [{"a": 1}, 1]]),
        (first({"a": ANY}, {"b": ANY}), [[{"a": 1}, {}], [{"b": 1}]], [[], [{}, {"a": 1}], [1]]),
    ],
)
def test_a_kind_holds_for_its_values_only(kind: ValueKind, values: list[Any], others: list[Any]) -> None:
    assert [has_fields({"x": value}, [{"x": kind}]) for value in values + others] == [True] * len(values) + [
        False
    ] * len(others)


@pytest.mark.parametrize(("checked", "num_read"), [("each", 1), ("first", 2), ("none", 2)])
def test_the_checked_records_of_a_file_are_refused_when_they_are_reached(checked: Checked, num_read: int) -> None:
    records = [Record("r:1", "r", {"a": 1}), Record("r:2", "r", {})]
    items = make_format([{"a": ANY}], checked).trajectories(records, ReadOptions())
    assert [next(items) for _ in range(num_read)] == [Skipped(record.source, "read") for record in records[:num_read]]
    if checked == "each":
        with pytest.raises(TreepackError, match="r:2: has no a"):
            next(items)
