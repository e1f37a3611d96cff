"""Lines of JSON with long lists of numbers, several times faster than a JSON parser alone reads them.

    {"input_ids": [5, 6], "id": "a"}  --cut_numbers-->  integers 5 6, rest {"input_ids": 0, "id": "a"}
                                      --JSON parser-->  {"input_ids": 0, "id": "a"}  -->  the dict with an int32 array

Lists of plain integers of 32 bits become int32 arrays, and lists with a fraction or an exponent float64 arrays of the
same values, correctly rounded as by the JSON parser. They are cut out only from fields of the line's own object.
Any other list stays in the rest. A line with a field twice, an escape in a field name, or no object at all is left to
the JSON parser. So is a line whose rest is not valid JSON, and the error is about the line.

If the rest is valid JSON, then so is the line, with the same fields. Both have the same strings and brackets, because a
list that was cut out has neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from treepack.native.library import FLOAT64, INT, INT32, INT64, UINT8, in_c, is_compiled
from treepack.trajectory import Float64, Int32, Int64

_MAX_NAMES = 64  # of the fields whose lists are cut out
# Limits of the floats: digits without leading zeros, places after the point as in 12e-3 = 0.012, digits of an exponent.
# Within them, one division of integers is exact, because 10**19 and 5**27 are less than 2**64.
_MAX_DIGITS, _MAX_PLACES, _MAX_EXPONENT_DIGITS = 19, 27, 4

LARGE = 1 << 20  # bytes of a line that is read as few times, and copied as little, as possible

_SPACE = rb"[ \t\r\n]*"
_NUMBER = re.compile(rb"(-?)(0|[1-9][0-9]*)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?")
_FLAT_LIST = re.compile(rb"\[([-+.0-9eE, \t\r\n]+)\]")
_FIELD = re.compile(rb'%s"([^"\\]*)"%s:%s' % (_SPACE, _SPACE, _SPACE))
_LIST_FIELD = re.compile(rb'"([^"\\\x00-\x1f]{1,64})"%s:%s\[%s-?[0-9]' % (_SPACE, _SPACE, _SPACE))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


@in_c(UINT8, UINT8, INT32, FLOAT64, INT64, UINT8, returns=INT)
def cut_numbers(
    line: NDArray[np.uint8],
    names: NDArray[np.uint8],
    integers: Int32,
    floats: Float64,
    lists: Int64,
    rest: NDArray[np.uint8],
) -> int:
    """Cut the lists of numbers in the fields `names` out of `line`.

    Args:
        line: the bytes of one line, [num_bytes].
        names: the names of fields, at most `_MAX_NAMES`, each with a zero after it.
        integers: receives the numbers of all lists of integers, [num_bytes // 2 + 1].
        floats: receives the numbers of all other lists, [num_bytes // 2 + 1].
        lists: receives for each list the index of the name, 0 for `integers` or 1 for `floats`, and its start and end
            there; and a row that begins with -1 after the last list, [num_names + 1, 4].
        rest: receives the line with 0 in place of each list, [num_bytes].

    Returns the number of bytes in `rest`, or -1 if the JSON parser should read the whole line.
    """
    text, known = line.tobytes(), names.tobytes().split(b"\0")[:-1]
    seen: set[bytes] = set()
    parts, copied, ends = [], 0, [0, 0]
    lists[0, 0] = -1
    at = len(text) - len(text.lstrip(b" \t\r\n"))
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
            match = _FLAT_LIST.match(text, at)
            numbers = None if match is None else _numbers(match[1].split(b","))
            if match is not None and numbers is not None:
                parts += [text[copied:at], b"0"]
                at = copied = match.end()
                kind = int(isinstance(numbers[0], float))
                end = ends[kind] + len(numbers)
                (floats if kind else integers)[ends[kind] : end] = numbers
                lists[len(parts) // 2 - 1] = known.index(name), kind, ends[kind], end
                lists[len(parts) // 2, 0] = -1
                ends[kind] = end
        at = _end_of_value(text, at)
        if at < 0:
            return -1
    joined = b"".join([*parts, text[copied:]])
    rest[: len(joined)] = np.frombuffer(joined, np.uint8)
    return len(joined)


def _numbers(texts: list[bytes]) -> list[int] | list[float] | None:
    """Return the numbers of a list, all of them integers or all of them floats; None if the JSON parser reads them."""
    matches = [_NUMBER.fullmatch(text.strip(b" \t\r\n")) for text in texts]
    if any(match is None or match[0] == b"-0" for match in matches):
        return None
    numbers = [match.groups(b"") for match in matches if match is not None]
    if not any(fraction or exponent for _, _, fraction, exponent in numbers):
        integers = [int(sign + whole[:11]) for sign, whole, _, _ in numbers]
        return integers if all(-(2**31) <= each < 2**31 for each in integers) else None
    for _, whole, fraction, exponent in numbers:
        digits = (whole + fraction).lstrip(b"0")
        if len(digits) > _MAX_DIGITS or len(exponent.lstrip(b"+-")) > _MAX_EXPONENT_DIGITS:
            return None
        if not fraction and not exponent and int(digits or b"0") >= 2**53:
            return None
        if digits and not 0 <= len(fraction) - int(exponent or b"0") <= _MAX_PLACES:
            return None
    return [float(match[0]) for match in matches if match is not None]


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


def list_fields(text: bytes) -> list[str]:
    """Return the names of the first fields of `text`, at most `_MAX_NAMES`, that contain lists of numbers.

    They may be fields of an inner object, and a text may look like one, which costs `LineParser` nothing.
    """
    names = dict.fromkeys(match[1] for match in islice(_LIST_FIELD.finditer(text), 4 * _MAX_NAMES))
    return [name.decode("utf-8", "replace") for name in islice(names, _MAX_NAMES)]


class LineParser:
    """Parse lines of JSON; lists of numbers in the fields `names` become arrays, if the loops are compiled."""

    def __init__(self, names: Sequence[str]) -> None:
        assert len(names) <= _MAX_NAMES, len(names)
        self._names = list(names)
        self._terminated = np.frombuffer("".join(f"{name}\0" for name in names).encode(), np.uint8)
        self._is_fast = bool(names) and is_compiled()
        self._lists = np.empty((len(names) + 1, 4), np.int64)
        self._make_room(0)

    def _make_room(self, num_bytes: int) -> None:
        # Only the parts that a line needs take memory, because the system gives memory when it is written.
        self._integers = np.empty(num_bytes // 2 + 1, np.int32)
        self._floats = np.empty(num_bytes // 2 + 1, np.float64)
        self._rest = np.empty(num_bytes, np.uint8)

    def parse(self, line: bytes | memoryview) -> tuple[Any, bool]:
        """Return the value of `line`, and True if it contains arrays.

        Raises:
            orjson.JSONDecodeError: the line is not valid JSON.
        """
        if not self._is_fast:
            return orjson.loads(line), False
        if len(line) > len(self._rest):
            self._make_room(len(line) + min(len(line), LARGE))  # more, so that not every longer line needs new room
        text = np.frombuffer(line, np.uint8)
        size = cut_numbers(text, self._terminated, self._integers, self._floats, self._lists, self._rest)
        if size < 0 or self._lists[0, 0] < 0:
            return orjson.loads(line), False
        try:
            value = orjson.loads(self._rest.data[:size])
        except orjson.JSONDecodeError:
            return orjson.loads(line), False
        integers, floats = self._integers, self._floats
        if len(line) > LARGE:
            self._make_room(0)  # the arrays of a large line are views, because copies would need its memory once more
        for name, kind, start, end in self._lists.tolist():
            if name < 0:
                break
            numbers = (floats if kind else integers)[start:end]
            value[self._names[name]] = numbers if len(line) > LARGE else numbers.copy()
        return value, True
