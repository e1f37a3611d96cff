"""A field of a JSON file is set or taken out, and every other byte stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.files.json_text import set_field, without_field

_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists)
_NAMES = st.sampled_from(["a", "eos_token_id", 'q"', "\u00e9", "b}"])


@given(st.dictionaries(_NAMES, _JSON), _NAMES, _JSON, st.sampled_from([None, 2]), st.booleans())
def test_a_field_is_set_and_every_other_byte_stays(
    fields: dict[str, Any], name: str, value: Any, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(fields, indent=indent, ensure_ascii=ascii_only) + "\n"
    changed = set_field(text.encode(), name, value).decode()
    assert json.loads(changed) == {**fields, name: value}
    if name in fields:
        assert (
            set_field(changed.encode(), name, fields[name]).decode()
            == json.dumps(fields, indent=indent, ensure_ascii=ascii_only).replace(
                json.dumps(name, ensure_ascii=ascii_only) + ": " + json.dumps(fields[name], ensure_ascii=ascii_only),
                json.dumps(name, ensure_ascii=ascii_only) + ": " + json.dumps(fields[name]),
            )
            + "\n"
            or indent
        )
    else:
        assert changed.startswith(text.rstrip()[:-1].rstrip())


def test_of_two_equal_names_the_one_that_counts_is_set() -> None:
    assert set_field(b'{"a": 1, "a": 2}', "a", 3) == b'{"a": 1, "a": 3}'


@given(st.dictionaries(_NAMES, _JSON), _NAMES, st.sampled_from([None, 2]))
def test_a_field_is_taken_out_of_the_text_alone(fields: dict[str, Any], name: str, indent: int | None) -> None:
    text = json.dumps(fields, indent=indent)
    rest = {key: value for key, value in fields.items() if key != name}
    assert json.loads(without_field(text.encode(), name)) == rest
    if name not in fields or rest:
        assert without_field(text.encode(), name).decode() == json.dumps(rest, indent=indent)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "a": 2}', "{}"),
        ('{"b": 1e-06,\r\n\t"a" :{"a": [3]}\r\n}\n', '{"b": 1e-06\r\n}\n'),
        ('\ufeff{ "a":1 , "b":"a" }', '\ufeff{ "b":"a" }'),
        ('{"a": 1, "b": 2, "a": 3}', '{"b": 2}'),
    ],
)
def test_a_field_is_taken_out_as_often_as_it_is_there(text: str, expected: str) -> None:
    assert without_field(text.encode(), "a").decode() == expected
