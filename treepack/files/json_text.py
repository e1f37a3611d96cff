"""Change one field of a JSON file; every other byte stays.

    b'{ "a":1e-6 }'        --set_field("b", 2)----> b'{ "a":1e-6, "b": 2 }'
    b'{"a": 1,  "b": 2}'   --without_field("a")---> b'{"b": 2}'

The content is an object that `json` can read. Its fields are found in the text, so numbers, line ends, unknown fields
and their order stay as another program wrote them.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BLANKS = re.compile(r"\s*")


def set_field(content: bytes, name: str, value: Any) -> bytes:
    """Return the object with the field `name` set to `value`; a new field comes after the others."""
    text, fields = content.decode(), _fields(content.decode())
    for found, _, start, end in reversed(fields):  # of several equal names the last one counts
        if found == name:
            return (text[:start] + json.dumps(value) + text[end:]).encode()
    brace = text.index("{") + 1
    end = fields[-1][3] if fields else brace
    comma, gap = "," * bool(fields), text[brace : fields[0][1] if fields else text.index("}")]
    return f"{text[:end]}{comma}{gap}{json.dumps(name)}: {json.dumps(value)}{text[end:]}".encode()


def without_field(content: bytes, name: str) -> bytes:
    """Return the object without the field `name`, if it has one."""
    text, fields = content.decode(), _fields(content.decode())
    place = next((i for i, field in enumerate(fields) if field[0] == name), None)
    if place is None:
        return content
    if place + 1 < len(fields):  # {"a": 1, "b": 2} -> {"b": 2}
        start, end = fields[place][1], fields[place + 1][1]
    else:  # {"a": 1, "b": 2} -> {"a": 1}
        start, end = fields[place - 1][3] if place else fields[place][1], fields[place][3]
    return without_field((text[:start] + text[end:]).encode(), name)


def _fields(text: str) -> list[tuple[str, int, int, int]]:
    """Return the name of each field, and where in `text` its name begins, its value begins and its value ends."""
    decode = json.JSONDecoder().raw_decode

    def skip(at: int) -> int:
        blanks = _BLANKS.match(text, at)
        assert blanks is not None
        return blanks.end()

    found, at = [], skip(text.index("{") + 1)
    while text[at] != "}":
        name, end = decode(text, at)
        start = skip(skip(end) + 1)  # after the colon
        _, end = decode(text, start)
        found.append((name, at, start, end))
        at = skip(end)
        at = skip(at + 1) if text[at] == "," else at
    return found
