"""Every reader, given its sample with a value of a different kind somewhere in it: read, or refused in one sentence."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from support.paths import ROLLOUTS
from treepack.errors import TreepackError
from treepack.files.input_files.inputs import list_inputs
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.registry import formats_by_name
from treepack.trajectory import Skipped, Trajectory

SAMPLES = ROLLOUTS
KINDS = [7, -1.5, "x", "", None, True, [], {}, [7], ["x"], [None], {"x": 7}, [[]]]
Place = tuple[str | int, ...]


@cache
def files(name: str) -> list[list[Record]]:
    """The records of each file of the sample of format `name`."""
    (sample,) = [each for each in SAMPLES.iterdir() if each.name.partition(".")[0] == name]
    return [list(read_records(path)) for path in list_inputs([sample])[0]]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where in `value` there are values, other than in lists of numbers but for their first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, field in inner:
        if key == 0 or not isinstance(field, int | float):
            yield (*place, key)
            yield from places(field, (*place, key))


def replaced(value: Any, place: Place, other: Any) -> Any:
    """A copy of `value` with `other` at `place`."""
    changed = copy.deepcopy(value)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = copy.deepcopy(other)
    return changed


def reading(name: str, records: list[Record]) -> str | None:
    """The error of the reader of format `name` for `records`; None if it reads them."""
    try:
        items = list(formats_by_name()[name].trajectories(records, ReadOptions(shapes=True)))
    except TreepackError as error:
        return str(error)
    assert all(isinstance(each, Trajectory | Skipped) for each in items)
    return None


# Chosen without hypothesis, whose choices take longer than the reading.
@pytest.mark.parametrize("name", formats_by_name())
def test_a_value_of_another_kind_is_read_or_refused_in_one_sentence(name: str) -> None:
    rng = random.Random(name)
    for _ in range(60):
        records = rng.choice(files(name))
        number = rng.randrange(len(records))
        place, other = rng.choice(list(places(records[number].value))), rng.choice(KINDS)
        value = replaced(records[number].value, place, other)
        record = Record(records[number].source, records[number].path, value)
        said = reading(name, [*records[:number], record, *records[number + 1 :]])
        assert said is None or re.fullmatch(r"[^\n]+[;,] [^\n]+", said), (place, other, said)
