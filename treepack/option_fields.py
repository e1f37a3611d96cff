"""Options as fields of dataclasses: the default, the help, the choices and the bounds of an option in one place.

    workers: int = option(1, "Processes that plan; the plan is the same.", minimum=1)

    field --check_options--> TreepackError for a value that is not a choice or out of bounds
    field --command line--> --workers INTEGER RANGE, with this help and default

A field without `option` is not an option of a command. Help is a sentence for the page of a command; what only a caller
from Python needs is in a comment above the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from treepack.errors import TreepackError

T = TypeVar("T")

_KEY = "treepack"


@dataclass(frozen=True, slots=True)
class OptionText:
    """The help of an option, and its values: one of `choices`, or a number from `minimum` to `maximum`."""

    help: str
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None


def option(
    default: T,
    text: str,
    *,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> T:
    """Return a field of a dataclass that is an option with the help `text`; None is in any bounds."""
    about = OptionText(text, None if choices is None else tuple(choices), minimum, maximum)
    return field(default=default, metadata={_KEY: about})


def option_texts(options: Any) -> Iterator[tuple[Field[Any], OptionText]]:
    """Yield the fields of a dataclass, or of a value of it, that are options."""
    for each in fields(options):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def check_options(options: Any) -> None:
    """Refuse values that are not among the choices of their option, or out of its bounds.

    Raises:
        TreepackError: with the name of the option.
    """
    for each, text in option_texts(options):
        name, value = each.name, getattr(options, each.name)
        if value is None and "None" in str(each.type):
            continue
        if text.choices is not None and value not in text.choices:
            raise TreepackError(f"{name} is {value!r}; expected one of {', '.join(text.choices)}")
        if text.minimum is None:
            continue
        maximum = math.inf if text.maximum is None else text.maximum
        is_float = str(each.type).startswith("float")
        # Not `value < minimum`, which is False for NaN.
        if not text.minimum <= value <= maximum or (is_float and not math.isfinite(value)):
            kind = "a finite number of at least" if is_float else "at least"
            bounds = f"{kind} {text.minimum}" if text.maximum is None else f"{text.minimum} to {text.maximum}"
            raise TreepackError(f"{name} is {value}; expected {bounds}")
