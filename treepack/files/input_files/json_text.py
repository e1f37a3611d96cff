"""JSON text that the fast parser refuses: its value if it is usable, else the place and the cause of the fault.

    bytes --parse_leniently--> value with NaN and long integers, or a TreepackError with line and column
    bytes --array_elements-->  the elements of an array that can be read, and a sentence for each damaged one
    text of a field --parsed_json--> the object or list that it contains, or None

Of two equal keys of an object, the last one counts, as in both parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError

# A header of CSV: at least two names, which contain no braces or colons as JSON does.
_CSV_HEADER = re.compile(rb'\s*"?[\w .-]+"?([,;\t]"?[\w .-]+"?)+\s*')
_SPACE = re.compile(r"[ \t\r\n]*")


def parse_leniently(text: bytes, *, path: str, line: int, remedy: str) -> Any:
    """Parse `text` with the standard library, which accepts NaN and long integers and reports the place of an error.

    Raises:
        TreepackError: the text is not UTF-8, malformed, nested too deeply, or has half of a surrogate pair.
    """
    try:
        value = json.loads(text.rstrip(b"\r\n").decode("utf-8"))
        _check_surrogates(value)
        return value
    except UnicodeDecodeError as error:
        at = line + text.count(b"\n", 0, error.start)  # `text` may be a document of many lines
        reason = f"not UTF-8 (byte 0x{text[error.start]:02x})"
    except UnicodeEncodeError:
        at, reason = line, "half of a surrogate pair in a string"
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        reason = f"malformed JSON ({error.msg} at column {error.colno})"
    except (RecursionError, ValueError) as error:
        at, reason = line, f"unusable JSON ({error})"
    raise TreepackError(f"{path}:{at}: {reason}; {remedy}")


def _check_surrogates(value: Any) -> None:
    # "\ud800" is legal JSON but not legal text: writing it as UTF-8 would fail much later, so it is tried here.
    json.dumps(value, ensure_ascii=False).encode("utf-8")


def parsed_json(text: Any) -> Any:
    """Return the object or list that `text` is as JSON, else None, also for a value that is not text."""
    if not isinstance(text, str) or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text)
        if "\\u" in text:
            _check_surrogates(value)
    except (ValueError, RecursionError):  # also half of a surrogate pair
        return None
    return value


def parsed(value: Any) -> Any:
    """Return the object or list that `value` is as JSON text, else `value` itself."""
    found = parsed_json(value)
    return value if found is None else found


def array_elements(data: bytes, path: str) -> Iterator[tuple[int, Any, str | None]]:
    """Yield number, value and fault of each element of a damaged JSON array; one of value and fault is None.

    After a damaged element, reading continues at the next line that begins as the line of the first element, with the
    same indentation and a brace. If the elements do not begin lines of their own, the rest of the array is one fault.

        [                       element 0
          {"id": 0},            element 1, a fault
          {"id": 1, "mess       element 2: the line begins with two spaces and a brace
          {"id": 2}
        ]
    """
    # Bytes that are not UTF-8 become halves of surrogate pairs, which are a fault of the element that contains them.
    text = data.decode("utf-8", "surrogateescape")
    start = _after_space(text, text.index("[") + 1)
    line = text.rfind("\n", 0, start)
    margin = text[line:start]  # "\n" and the indentation of the first element
    is_own_line = line >= 0 and not margin.strip()
    number, at = 0, start
    decoder = json.JSONDecoder()
    while at < len(text) and text[at] != "]":
        try:
            value, end = decoder.raw_decode(text, at)
            end = _after_space(text, end)
            if text[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
            _check_surrogates(value)
            yield number, value, None
        except UnicodeEncodeError:
            yield number, None, f"{path}[{number}]: text that is not UTF-8, or half of a surrogate pair; remove it"
        except (RecursionError, ValueError) as error:
            yield number, None, f"{path}[{number}]: malformed JSON ({error}); fix or remove the element"
            end = text.find(margin + "{", at + 1) if is_own_line else -1
            if end < 0:
                return
            end += len(margin) - 1  # the position before the brace, as if there were the comma
        number += 1
        at = end if text[end] == "]" else _after_space(text, end + 1)
    if at >= len(text):
        yield number, None, f"{path}: is cut off in the middle of an array; write the file again"
    elif text[at + 1 :].strip():
        yield number, None, f"{path}: has text after a JSON array; put all records into one array"


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def is_csv(first: bytes, path: str) -> bool:
    """Return True if a file that is not JSON, with the line `first`, is CSV by its name or its first line."""
    names = {suffix.lower() for suffix in Path(path).suffixes}
    return bool(names & {".csv", ".tsv"}) or _CSV_HEADER.fullmatch(first) is not None


def csv_refusal(path: str) -> TreepackError:
    """Return the error for a file of CSV."""
    return TreepackError(
        f"{path}: is CSV, which is not read; convert it to JSONL or Parquet, for example with "
        "polars.read_csv(...).write_parquet(...)"
    )
