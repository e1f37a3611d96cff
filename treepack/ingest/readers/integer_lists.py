"""Lines of JSON with long lists of integers, several times faster than a JSON parser alone reads them.

    {"input_ids": [5, 6], "id": "a"}  --cut_integers-->  values 5 6, rest {"input_ids": 0, "id": "a"}
                                      --JSON parser--->  {"input_ids": 0, "id": "a"}  -->  the dict with an int32 array

Only lists of plain integers of 32 bits are cut out, and only from fields of the line's own object. Any other list stays
in the rest. A line with a field twice, an escape in a field name, or no object at all is left to the JSON parser. So is
a line whose rest is no valid JSON, and the error is about the line.

If the rest is valid JSON, then so is the line, with the same fields. Both have the same strings and brackets, because a
list that was cut out has neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from treepack.native.library import INT, INT32, INT64, UINT8, in_c, is_compiled
from treepack.trajectory import Int32, Int64

MAX_NAMES = 64  # of the fields whose lists are cut out

_SPACE = rb"[ \t\r\n]*"
_INTEGER = rb"(?:-?[1-9][0-9]{0,9}|0)"
_LIST = re.compile(rb"\[%s%s(?:%s,%s%s)*%s\]" % (_SPACE, _INTEGER, _SPACE, _SPACE, _INTEGER, _SPACE))
_FIELD = re.compile(rb'%s"([^"\\]*)"%s:%s' % (_SPACE, _SPACE, _SPACE))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


@in_c(UINT8, UINT8, INT32, INT64, UINT8, returns=INT)
def cut_integers(
    line: NDArray[np.uint8], names: NDArray[np.uint8], values: Int32, lists: Int64, rest: NDArray[np.uint8]
) -> int:
    """Cut the lists of integers in the fields `names` out of `line`.

    Args:
        line: the bytes of one line, [num_bytes].
        names: the names of fields, at most `MAX_NAMES`, each with a zero after it.
        values: receives the integers of all lists, [num_bytes // 2 + 1].
        lists: receives the index of the name, the start and the end in `values` of each list, and a row of -1 after the
            last one, [num_names + 1, 3].
        rest: receives the line with 0 in place of each list, [num_bytes].

    Returns the number of bytes in `rest`, or -1 if the JSON parser should read the whole line.
    """
    text, known = line.tobytes(), names.tobytes().split(b"\0")[:-1]
    seen: set[bytes] = set()
    parts, copied, num_values = [], 0, 0
    lists[0] = -1
    start = re.compile(_SPACE).match(text)
    at = 0 if start is None else start.end()
    if text[at : at + 1] != b"{":
        return -1
    while text[at : at + 1] in (b"{", b","):
        field = _FIELD.match(text, at + 1)
        if field is None or field.end() == len(text):
            return -1
        name, at = field[1], field.end()
        if name in known:
            if name in seen:
                return -1
            seen.add(name)
            integers = _integers(text, at)
            if integers is not None:
                parts += [text[copied:at], b"0"]
                at = copied = at + integers[1]
                end = num_values + len(integers[0])
                values[num_values:end] = integers[0]
                lists[len(parts) // 2 - 1] = known.index(name), num_values, end
                lists[len(parts) // 2] = -1
                num_values = end
        at = _end_of_value(text, at)
        if at < 0:
            return -1
    joined = b"".join([*parts, text[copied:]])
    rest[: len(joined)] = np.frombuffer(joined, np.uint8)
    return len(joined)


def _integers(text: bytes, at: int) -> tuple[list[int], int] | None:
    """Return the integers of the list at `at` and its size in bytes, or None if it is no list of int32."""
    match = _LIST.match(text, at)
    if match is None:
        return None
    integers = [int(digits) for digits in match[0][1:-1].split(b",")]
    return (integers, len(match[0])) if all(-(2**31) <= each < 2**31 for each in integers) else None


def _end_of_value(text: bytes, at: int) -> int:
    """Return the position of the first comma or brace after the value at `at`, at its depth, or -1."""
    depth = 0
    while at < len(text):
        byte = text[at : at + 1]
        if byte == b'"':
            string = _STRING.match(text, at)
            if string is None:
                return -1
            at = string.end()
            continue
        if byte in b",}]" and depth == 0:
            return -1 if byte == b"]" else at
        depth += (byte in b"[{") - (byte in b"]}")
        at += 1
    return -1


class LineParser:
    """Parse lines of JSON; lists of integers in the fields `names` become int32 arrays, if the loops are compiled."""

    def __init__(self, names: Sequence[str]) -> None:
        assert len(names) <= MAX_NAMES, len(names)
        self._names = list(names)
        self._terminated = np.frombuffer("".join(f"{name}\0" for name in names).encode(), np.uint8)
        self._is_fast = bool(names) and is_compiled()
        self._lists = np.empty((len(names) + 1, 3), np.int64)
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        self._values = np.empty(num_bytes // 2 + 1, np.int32)
        self._rest = np.empty(num_bytes, np.uint8)

    def parse(self, line: bytes | memoryview) -> tuple[Any, bool]:
        """Return the value of `line`, and True if it contains arrays.

        Raises:
            orjson.JSONDecodeError: the line is not valid JSON.
        """
        if not self._is_fast:
            return orjson.loads(line), False
        if len(line) > len(self._rest):
            self._make_room(2 * len(line))
        size = cut_integers(np.frombuffer(line, np.uint8), self._terminated, self._values, self._lists, self._rest)
        if size < 0 or self._lists[0, 0] < 0:
            return orjson.loads(line), False
        try:
            value = orjson.loads(self._rest.data[:size])
        except orjson.JSONDecodeError:
            return orjson.loads(line), False
        for name, start, end in self._lists.tolist():
            if name < 0:
                break
            value[self._names[name]] = self._values[start:end].copy()
        return value, True
