"""Types of the columns of a part, compared with the schema of its format when the part is opened.

    footer, schema --check_part_columns--> nothing, or one sentence about a column      table, schema --with_types-->
    table

Numbers have the types of the schema. Other programs may store lists, texts and bytes in another of Arrow's containers:

    list<int32>    large_list<int32>, fixed_size_list<int32>[N]
    string         large_string, string_view, a dictionary of one of them
    binary         large_binary, binary_view, fixed_size_binary[N]
    may be null    null: a column without a value

`with_types` converts these. A list of int64, as polars writes it, is refused: its values might not fit.
"""

from __future__ import annotations

import re

import pyarrow as pa
from pyarrow import types

from treepack.errors import TreepackError

_MAX_SHOWN = 80  # characters of a type in an error: a struct may have thousands of fields


def check_part_columns(found: pa.Schema, expected: pa.Schema, part: str, remedy: str) -> None:
    """Refuse a part in which a column of `expected` has another type, or is there twice.

    Args:
        found: the Arrow schema of the part; it may lack columns, and have others.
        expected: columns of the format.
        part: the path or address that the error names.
        remedy: what to do, for example "pack the trie again".

    Raises:
        TreepackError: naming the part, the column and both types.
    """
    for field in expected:
        places = found.get_all_field_indices(field.name)
        if len(places) > 1:
            raise TreepackError(f"{part}: has the column {field.name} {len(places)} times; {remedy}")
        for place in places:
            kind = found.field(place).type
            if not _is_equivalent(kind, field.type) and not (field.nullable and types.is_null(kind)):
                raise TreepackError(
                    f"{part}: the column {field.name} has the type {shown_type(kind)}, expected "
                    f"{shown_type(field.type)}; write it with this type, or {remedy}"
                )


def with_types(table: pa.Table, expected: pa.Schema) -> pa.Table:
    """Return `table` with the fields of `expected` for each of its columns; `check_part_columns` has accepted it.

    Raises:
        pyarrow.ArrowException: a column of large lists does not fit into lists.
        ValueError: a column has a null, also inside of its lists, although the format forbids it; naming the column.
    """
    arrays, fields = [], []
    for column, own in zip(table.columns, table.schema, strict=True):
        at = expected.get_field_index(own.name)
        field = own if at < 0 else expected.field(at)
        arrays.append(column if column.type == field.type else column.cast(field.type))
        fields.append(field.remove_metadata())
        if at >= 0 and _has_wrong_null(arrays[-1], field):
            raise ValueError(f"a null in {field.name}")
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _has_wrong_null(column: pa.ChunkedArray, field: pa.Field) -> bool:
    if not field.nullable and column.null_count:
        return True
    # A number that is missing in a list becomes NaN, and an index cannot be NaN.
    if not types.is_list(field.type) or (field.nullable and types.is_floating(field.type.value_type)):
        return False
    for chunk in column.chunks:
        values = chunk.flatten()
        inner = values.flatten() if types.is_struct(values.type) else []
        inner = [values.flatten()] if types.is_large_list(values.type) else inner
        if values.null_count or any(each.null_count for each in inner):
            return True
    return False


def shown_type(kind: pa.DataType) -> str:
    """Return the name of a type as docs/format.md writes it: list<item: int32> -> list<int32>."""
    name = re.sub(r"(?<=<)\w+: | not null", "", str(kind)) if _is_list(kind) else str(kind)
    return name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..."


def _is_equivalent(found: pa.DataType, expected: pa.DataType) -> bool:
    if _is_list(expected):
        return _is_list(found) and _is_equivalent(found.value_type, expected.value_type)
    if types.is_struct(expected):
        if not types.is_struct(found) or found.num_fields != expected.num_fields:
            return False
        pairs = [(found.field(i), expected.field(i)) for i in range(expected.num_fields)]
        return all(own.name == other.name and _is_equivalent(own.type, other.type) for own, other in pairs)
    if types.is_string(expected):
        return _is_text(found) or (types.is_dictionary(found) and _is_text(found.value_type))
    if types.is_binary(expected):
        others = (types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
        return types.is_binary(found) or any(is_other(found) for is_other in others)
    return bool(found == expected)


def _is_list(kind: pa.DataType) -> bool:
    # No views of lists: Parquet has none, and pyarrow casts them wrongly.
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
