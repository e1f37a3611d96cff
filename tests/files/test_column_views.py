"""Views of columns have the values that Arrow gives as Python objects, for any chunks and any slice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.files.column_views import FEW_ROWS, ColumnView, FilledView, ListView, NoValues, View

LISTS = st.lists(st.none() | st.lists(st.integers(0, 9).map(float), max_size=3), max_size=8)


def chunked(values: list[Any], kind: pa.DataType, cuts: list[int]) -> pa.ChunkedArray:
    """The values as chunks that are slices of one array, so that they have an offset."""
    whole = pa.array(values, kind)
    places = sorted({0, len(values), *(min(cut, len(values)) for cut in cuts)})
    return pa.chunked_array([whole.slice(a, b - a) for a, b in pairwise(places)], kind)


def as_lists(view: View) -> list[list[float] | float | None]:
    return [None if each is None else each.tolist() for each in view]


@given(LISTS, st.lists(st.integers(0, 8), max_size=3))
def test_lists_are_those_of_the_column(values: list[list[float] | None], cuts: list[int]) -> None:
    view = ListView(chunked(values, pa.list_(pa.float64()), cuts))
    assert as_lists(view) == values
    assert [None if view[i] is None else view[i].tolist() for i in range(len(view))] == values
    assert len(view) == len(values)
    assert view.is_missing == all(each is None for each in values)
    with pytest.raises(IndexError):
        view[len(values)]


@given(
    st.lists(st.none() | st.lists(st.lists(st.integers(0, 9).map(float), max_size=3), max_size=3), max_size=8),
    st.lists(st.integers(0, 8), max_size=3),
)
def test_lists_of_lists_are_those_of_the_column(values: list[list[list[float]] | None], cuts: list[int]) -> None:
    view = ListView(chunked(values, pa.list_(pa.large_list(pa.float64())), cuts))
    rows = [None if row is None else [row.list(i).tolist() for i in range(len(row))] for row in view]
    assert rows == values
    assert [view[i] is None for i in range(len(view))] == [row is None for row in rows]
    assert view.is_missing == (not any(each for row in values if row for each in row))


@given(LISTS, st.lists(st.integers(0, 8), max_size=3), st.lists(st.none() | st.just(0.5), min_size=8, max_size=8))
def test_numbers_fill_missing_lists(
    values: list[list[float] | None], cuts: list[int], scalars: list[float | None]
) -> None:
    numbers = scalars[: len(values)]
    expected = [number if each is None else each for each, number in zip(values, numbers, strict=True)]
    for lists in (ListView(chunked(values, pa.list_(pa.float64()), cuts)), NoValues(len(values))):
        view = FilledView(lists, chunked(numbers, pa.float64(), cuts), np.float32)
        wanted = numbers if isinstance(lists, NoValues) else expected
        assert as_lists(view) == wanted
        assert [None if view[i] is None else view[i].tolist() for i in range(len(view))] == wanted
        assert view.is_missing == all(each is None for each in wanted)


@given(st.lists(st.none() | st.text(max_size=2), min_size=1, max_size=8), st.lists(st.integers(0, 8)), st.data())
def test_texts_are_read_in_any_order(values: list[str | None], cuts: list[int], data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=9))
    rows = some * data.draw(st.sampled_from([1, FEW_ROWS]))
    view = ColumnView(chunked(values, pa.string(), cuts))
    assert view.values(np.array(rows, np.int64)) == [values[row] for row in rows]
