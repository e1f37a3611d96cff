"""Options as fields of dataclasses: the default, the help, the choices and the bounds of an option in one place.

    workers: int = option(1, "Processes that plan; the plan is the same.", minimum=1)

    field --check_options--> TreepackError for a value that is not a choice or out of bounds
    field --command line--> --workers INTEGER RANGE, with this help and default

A field without `option` is not an option of a command. Help is a sentence for the page of a command; what only a caller
from Python needs is in a comment above the field.
"""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from treepack.errors import TreepackError

_T = TypeVar("_T")

_KEY = "treepack"

# Context lengths are powers of two, so 16k is 16,384 and 1m is 1,048,576.
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_COUNT = re.compile(r"([0-9][0-9_]*)([km]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OptionText:
    """The help of an option, and its values: one of `choices`, or a number from `minimum` to `maximum`."""

    help: str
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None


def option(
    default: _T,
    text: str,
    *,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> _T:
    """Return a field of a dataclass that is an option with the help `text`; None is in any bounds."""
    about = OptionText(text, None if choices is None else tuple(choices), minimum, maximum)
    return field(default=default, metadata={_KEY: about})


def option_texts(options: Any) -> Iterator[tuple[Field[Any], OptionText]]:
    """Yield the fields of a dataclass, or of a value of it, that are options."""
    for each in fields(options):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def parse_count(text: str) -> int | None:
    """Return the number that `text` means, or None: "16k" -> 16384, "4_096" -> 4096, "4x" -> None."""
    match = _COUNT.fullmatch(text.strip())
    return int(match[1].replace("_", "")) * _FACTORS[match[2].lower()] if match else None


def expect_type(value: object, kind: type, name: str, source: str) -> None:
    """Refuse an argument of another type.

    Args:
        value: the argument.
        kind: the type that it must have.
        name: the function and its argument, as "plan_packing: trie".
        source: what makes such a value, for the message.

    Raises:
        TreepackError: with both types.
    """
    if not isinstance(value, kind):
        raise TreepackError(f"{name} has the type {type(value).__name__}; expected {kind.__name__}; use {source}")


def as_count(value: Any, name: str) -> int:
    """Return an integer, or the number that a text such as "4k" means.

    Raises:
        TreepackError: it is neither, with the name of the option.
    """
    if isinstance(value, str):
        number = parse_count(value)
    else:
        number = operator.index(value) if hasattr(value, "__index__") else None
    if number is None:
        raise TreepackError(f"{name} is {value!r}; expected a whole number, such as 8192 or '8k'")
    return number


def read_counts(options: Any, *names: str) -> None:
    """Replace texts such as "4k" in fields of a frozen dataclass by their numbers, also inside of a sequence.

    Raises:
        TreepackError: a value is neither a whole number nor such a text, with the name of the field.
    """
    for name in names:
        value = getattr(options, name)
        if isinstance(value, tuple | list):
            object.__setattr__(options, name, tuple(as_count(each, name) for each in value))
        elif value is not None:
            object.__setattr__(options, name, as_count(value, name))


def check_options(options: Any) -> None:
    """Refuse values that are not among the choices of their option, or out of its bounds; "4k" becomes 4096.

    Raises:
        TreepackError: with the name of the option.
    """
    for each, text in option_texts(options):
        name, value = each.name, getattr(options, each.name)
        if value is None and "None" in str(each.type):
            continue
        if text.choices is not None and value not in text.choices:
            raise TreepackError(f"{name} is {value!r}; expected one of {', '.join(text.choices)}")
        kinds = str(each.type).split(" | ")  # of a field of `int | str`, a word such as "auto" stays
        if "int" in kinds and ("str" not in kinds or (isinstance(value, str) and parse_count(value) is not None)):
            read_counts(options, name)
            value = getattr(options, name)
        if text.minimum is None:
            continue
        maximum = math.inf if text.maximum is None else text.maximum
        is_float = str(each.type).startswith("float")
        if (is_float or value is None) and not isinstance(value, numbers.Real):
            raise TreepackError(f"{name} is {value!r}; expected a number")
        # Not `value < minimum`, which is False for NaN.
        if not text.minimum <= value <= maximum or (is_float and not math.isfinite(value)):
            kind = "a finite number of at least" if is_float else "at least"
            bounds = f"{kind} {text.minimum}" if text.maximum is None else f"{text.minimum} to {text.maximum}"
            raise TreepackError(f"{name} is {value}; expected {bounds}")
