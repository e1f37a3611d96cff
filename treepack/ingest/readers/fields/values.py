"""Values of fields, checked: numbers, facts of a rollout, lists of objects; and values quoted in messages."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, TypeGuard

import numpy as np

from treepack.errors import TreepackError

JsonObject = dict[str, Any]
SIMILAR = 0.8  # share of equal characters above which a name may be misspelled
_MAX_DEPTH = 100  # of nested values: far from 1000, at which Python's json raises RecursionError


class BadValueError(TreepackError):
    """A fact of one rollout, such as its reward, has an impossible value: this rollout cannot be used.

    `reason` is the same for all rollouts with the fault, so that they can be counted.
    """

    def __init__(self, sentence: str, reason: str) -> None:
        """Keep the sentence about the rollout, and the reason for its count."""
        super().__init__(sentence)
        self.reason = reason


def as_number(value: Any, *, source: str, name: str) -> float:
    """Return `value` as a float.

    Raises:
        TreepackError: it is not a number (a boolean or a string is not), or too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a number")
    try:
        return float(value)
    except OverflowError:
        raise TreepackError(f"{source}: {name} does not fit a float; expected a finite number") from None


def as_fact(value: Any, *, source: str, name: str) -> float:
    """Return `value`, a fact of a rollout such as its reward, as a finite float; text and booleans may mean a number.

    Raises:
        BadValueError: it means no finite number, which concerns this rollout only.
    """
    # "0.5" -> 0.5, true -> 1.0, and numpy's numbers
    try:
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            value = value.strip().lower() == "true"
        number = float(value) if isinstance(value, str | int | float | np.number | np.bool_) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadValueError(f"{source}: {name} is {shown(value)}; expected a finite number", f"bad value of {name}")
    return number


def as_objects(value: Any, *, source: str, name: str) -> list[JsonObject]:
    """Return the list of objects `value`, or an empty list for null.

    Raises:
        TreepackError: it is something else.
    """
    if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a list of objects")
    return value or []


def as_id(value: Any, *, source: str, name: str) -> str | int:
    """Return the id `value`.

    Raises:
        TreepackError: it is neither text nor an integer, or it is an empty text, which many records could share.
    """
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected an id, which is text or a number")
    return value


def as_integer(value: Any, *, source: str, name: str, minimum: int) -> int:
    """Return the integer `value`; 3.0 is 3, because pandas writes a column of integers as floats if some are missing.

    Raises:
        TreepackError: it is something else, below `minimum`, or has more than 64 bits.
    """
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if type(number) is not int or not minimum <= number < 2**63:
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected an integer of at least {minimum}")
    return number


def as_text(value: Any, *, source: str, name: str, default: str | None = None) -> str:
    """Return the text `value`, or for null the `default` if there is one.

    Raises:
        TreepackError: it is something else.
    """
    value = default if value is None else value
    if not isinstance(value, str):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected text")
    return value


def as_texts(value: Any, *, source: str, name: str) -> list[str]:
    """Return the list of texts `value`.

    Raises:
        TreepackError: it is something else.
    """
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a list of text")
    return value


def shown(value: Any) -> str:
    """Return `value` as JSON of at most 40 characters, to be quoted in a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = " ".join(repr(value).split())  # one line, also for a numpy array
    except RecursionError:
        return "nested too deeply to be shown"
    return text if len(text) <= 40 else text[:37] + "..."


def quoted(value: Any) -> str:
    """Return a name in single quotes, shortened, to be used in a message; a value that is not text becomes JSON."""
    if not isinstance(value, str):
        return shown(value)
    return f"'{value}'" if len(value) <= 40 else f"'{value[:37]}...'"


def fault_in_json(value: Any, *, allow_nan: bool = True) -> str | None:
    """Return the reason why `value` cannot be written as JSON (its depth or its types), or None if it can."""
    if _is_deeper(value, _MAX_DEPTH):
        return f"nested more than {_MAX_DEPTH} deep"
    try:
        json.dumps(value, allow_nan=allow_nan)
    except (TypeError, ValueError):
        return "not plain JSON"
    return None


def _is_deeper(value: Any, levels: int) -> bool:
    # The recursion stops at `levels`, so the depth of the value cannot overflow Python's stack.
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(children) and (levels == 0 or any(_is_deeper(child, levels - 1) for child in children))


def is_messages(value: Any) -> TypeGuard[list[JsonObject]]:
    """Return True if `value` is a list of dicts, the container of messages; it may be empty."""
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def object_at(value: JsonObject, name: str, source: str) -> JsonObject:
    """Return the object `value[name]`, or an empty one if it is null or missing.

    Raises:
        TreepackError: it is something else.
    """
    field = value.get(name)
    if not isinstance(field, dict | None):
        raise TreepackError(f"{source}: {name} is {shown(field)}; expected an object")
    return field or {}


def objects_at(value: JsonObject, name: str, source: str) -> list[JsonObject]:
    """Return the list of objects `value[name]`, or an empty list if it is null or missing.

    Raises:
        TreepackError: it is something else.
    """
    return as_objects(value.get(name), source=source, name=name)


def object_or_empty(value: Any) -> JsonObject:
    """Return `value` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def close_names(value: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the names of fields in `value` that are nearly one of `names`: mesages for messages."""
    return [field for field in value if field not in names and difflib.get_close_matches(field, names, 1, SIMILAR)]


def start_time(value: JsonObject, *names: str, source: str) -> int | float | str | None:
    """Return the first of the fields `names` of a call that is set: the time at which it started, or None.

    Raises:
        TreepackError: it is neither text nor a number.
    """
    field, start = next(((name, value[name]) for name in names if value.get(name)), ("", None))
    start = start.isoformat() if isinstance(start, datetime) else start
    if isinstance(start, bool) or not isinstance(start, int | float | str | None):
        raise TreepackError(f"{source}: {field} is {shown(start)}; expected a time")
    return start
