"""Kinds of values that a format requires of the fields of a record, as text or as values of Python.

    state.history:objects, task      the field `history` of `state` is a list of objects, and `task` is present
    messages|ticks                   at least one of these fields is present
    type:=user|assistant, id:=T-*    a text that is one of these, a text that starts with T-
    samples:each(tokens)             a list of objects, and every object has the field `tokens`; `filled` needs one
    steps:first(role; from)          a list of objects, whose first has `role` or `from`; `some`: one of them
    samples:!list, prompt:?talk      the field is absent or not a list; it is absent or of this kind

A semicolon separates alternatives. The same as values: [{"state.history": OBJECTS, "task": ANY}].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from treepack.ingest.readers.fields.field_paths import MISSING, field_at
from treepack.ingest.readers.fields.values import JsonObject, is_messages
from treepack.ingest.readers.messages.turn_weights import as_flag
from treepack.ingest.readers.tokens.trainer_batches import is_column


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value. `text` completes "expected ..."; `test` gets the value of a field, or `MISSING`."""

    text: str
    test: Callable[[Any], bool]


# One alternative: the kind of each required field. A tuple of names requires one of these fields.
Fields = dict[str | tuple[str, ...], ValueKind]
Requirement = Sequence[Fields] | Callable[[JsonObject], bool]
ANY = ValueKind("any value", lambda value: value is not MISSING)
SET = ValueKind("a value other than null", lambda value: value is not MISSING and value is not None)
TEXT = ValueKind("text", lambda value: isinstance(value, str))
FLAG = ValueKind("true or false", lambda value: as_flag(value) is not None)  # also 0, 1 and their texts
OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))
OBJECTS = ValueKind("a list of objects", is_messages)
TALK = ValueKind("text or a list of messages", lambda value: isinstance(value, str) or is_messages(value))
TALK_OR_NULL = ValueKind("text, a list of messages or null", lambda value: value is None or TALK.test(value))
LIST = ValueKind("a list", lambda value: isinstance(value, list))
OBJECT_OR_LIST = ValueKind("an object or a list", lambda value: isinstance(value, dict | list))
FILLED_LIST = ValueKind("a list that is not empty", lambda value: isinstance(value, list) and len(value) > 0)
TEXTS = ValueKind(
    "a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)
)
# A list of numbers is a numpy array if it was read from Parquet or Arrow.
ARRAY = ValueKind("a list of values", lambda value: isinstance(value, list | np.ndarray))
ARRAYS = ValueKind("a list of lists", lambda value: isinstance(value, list) and all(map(ARRAY.test, value)))
# Other programs use the same names for texts and messages, so the first value decides.
IDS = ValueKind(
    "a list of token ids", lambda value: ARRAY.test(value) and (len(value) == 0 or not isinstance(value[0], str | dict))
)
OF_MLFLOW = ValueKind(
    "attributes of MLflow", lambda value: isinstance(value, dict) and "mlflow.traceRequestId" in value
)
COLUMN = ValueKind("a list with one list for each row", is_column)


def no(kind: ValueKind) -> ValueKind:
    """The kind of a field that is absent or of a different kind."""
    return ValueKind(f"anything but {kind.text}", lambda value: not kind.test(value))


def optional(kind: ValueKind) -> ValueKind:
    """The kind of a field that is absent or of `kind`."""
    return ValueKind(kind.text, lambda value: value is MISSING or kind.test(value))


def one_of(*values: str) -> ValueKind:
    """The kind of a text that is equal to one of `values`."""
    return ValueKind(" or ".join(values), lambda value: isinstance(value, str) and value in values)


def starting(prefix: str) -> ValueKind:
    """The kind of a text that starts with `prefix`."""
    return ValueKind(
        f"text that starts with {prefix}", lambda value: isinstance(value, str) and value.startswith(prefix)
    )


def each(fields: Fields, *, minimum: int = 0) -> ValueKind:
    """The kind of a list of at least `minimum` objects that all have `fields`."""

    def test(value: Any) -> bool:
        return is_messages(value) and len(value) >= minimum and all(has_fields(item, [fields]) for item in value)

    return ValueKind(f"a list of objects with {_names(fields)}" if fields else "a list of objects", test)


def some(fields: Fields) -> ValueKind:
    """The kind of a list of objects of which at least one has `fields`."""
    return ValueKind(
        f"a list of objects, one of them with {_names(fields)}",
        lambda value: is_messages(value) and any(has_fields(item, [fields]) for item in value),
    )


def first(*alternatives: Fields) -> ValueKind:
    """The kind of a list of objects whose first has the fields of one of `alternatives`."""
    return ValueKind(
        f"a list of objects with {' or '.join(map(_names, alternatives))}",
        lambda value: is_messages(value) and len(value) > 0 and has_fields(value[0], alternatives),
    )


FILLED = each({}, minimum=1)  # a list of objects that is not empty


_NAMED = {"": ANY} | {name.lower(): value for name, value in globals().items() if isinstance(value, ValueKind)}
_NESTED: dict[str, Callable[..., ValueKind]] = {
    "each": each,
    "filled": lambda fields: each(fields, minimum=1),
    "some": some,
    "first": first,
}


def _kind(word: str) -> ValueKind:
    if word[:1] in ("!", "?"):
        return (no if word[0] == "!" else optional)(_kind(word[1:]))
    if word[:1] == "=":
        return starting(word[1:-1]) if word.endswith("*") else one_of(*word[1:].split("|"))
    return _NAMED[word]


@cache
def alternatives(text: str) -> list[Fields]:
    """Return the alternatives of fields that `text` describes, as in the header of this file."""
    # "a|\n  b" is one word
    return _alternatives(iter(re.findall(r"[),;]|[^(),;\s]+\(?", re.sub(r"\|\s+", "|", text))))


def _alternatives(words: Iterator[str]) -> list[Fields]:
    """Return the alternatives of `words` until the end, or until a parenthesis that closes."""
    found: list[Fields] = [{}]
    for word in words:
        if word == ")":
            break
        if word == ";":
            found.append({})
        elif word != ",":
            path, _, kind = word.partition(":")
            names = tuple(path.split("|"))
            found_kind = _NESTED[kind[:-1]](*_alternatives(words)) if kind.endswith("(") else _kind(kind)
            found[-1][names if len(names) > 1 else path] = found_kind
    return found


def has_fields(value: JsonObject, requires: Requirement | str) -> bool:
    """Return whether `value` has all fields of one alternative of `requires`."""
    if callable(requires):
        return requires(value)
    if isinstance(requires, str):
        requires = alternatives(requires)
    return any(all(has_field(value, names, kind) for names, kind in fields.items()) for fields in requires)


def as_names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a required field: one, or several of which a record needs one."""
    return (names,) if isinstance(names, str) else names


def has_field(value: JsonObject, names: str | tuple[str, ...], kind: ValueKind) -> bool:
    """Return whether the record `value` has a field of `kind` at one of `names`."""
    names = as_names(names)
    # A field that must be absent fails only if all names of the tuple are present.
    return any(kind.test(field_at(value, name)) for name in names)


def _names(fields: Fields) -> str:
    return " and ".join(names if isinstance(names, str) else " or ".join(names) for names in fields)
