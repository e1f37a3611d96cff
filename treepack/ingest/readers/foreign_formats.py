"""Formats of other packages: whatever their code does wrong is an error that names the package.

    Format of a package  --guarded_format-->  the same, if its fields have the declared types, with guarded functions

A guarded function turns any exception, and sys.exit, into one sentence. Readers must yield trajectories and skipped
rollouts whose fields have the declared types, because later stages trust them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from treepack.entry_points import REMEDY
from treepack.errors import TreepackError, foreign_code, quoted_value
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.kinds import Requirement, ValueKind
from treepack.trajectory import Chat, Outcomes, Skipped, Tokens, Trajectory, check_scalars

FAILED = "its code failed"


def guarded_format(found: Format, source: str) -> Format:
    """Return the format of the package that `source` names, with guarded functions.

    Raises:
        TreepackError: a field of it has another type than it declares.
    """
    with foreign_code(f"{source}: {FAILED}", REMEDY):
        if wrong := _wrong_field(found):
            raise TreepackError(f"{source}: its format has {wrong}; {REMEDY}")
        return replace(
            found,
            requires=_guarded_requirement(found.required, source),
            read=found.read and _guarded_reader(found.read, source),
            read_file=found.read_file and _guarded_reader(found.read_file, source),
            view=found.view and _guarded(found.view, source),
        )


def _guarded(function: Callable[..., Any], source: str) -> Callable[..., Any]:
    def guarded(*arguments: Any) -> Any:
        with foreign_code(f"{source}: {FAILED}", REMEDY):
            return function(*arguments)

    return guarded


def _guarded_requirement(requires: Requirement, source: str) -> Requirement:
    if callable(requires):
        return _guarded(requires, source)
    return [
        {names: replace(kind, test=_guarded(kind.test, source)) for names, kind in each.items()} for each in requires
    ]


def _guarded_reader(read: Callable[..., Any], source: str) -> Callable[..., Outcomes]:
    """Return `read` with a check of everything that it yields."""

    def guarded(*arguments: Any) -> Outcomes:
        with foreign_code(f"{source}: {FAILED}", REMEDY):
            for item in read(*arguments):
                if wrong := _fault(item):
                    raise TreepackError(f"{source}: yielded {wrong}; {REMEDY}")
                yield item

    return guarded


def _fault(item: Any) -> str | None:
    """Return the first fault of a value that a reader yielded, or None."""
    if not isinstance(item, Trajectory | Skipped):
        return f"{quoted_value(item)}; expected a Trajectory or a Skipped of treepack.trajectory"
    wrong = _wrong_field(item)
    if wrong is None and isinstance(item, Trajectory):
        content = item.content
        try:
            check_scalars(item)
        except TreepackError as error:
            wrong = str(error)
        if isinstance(content, Tokens):
            wrong = wrong or _wrong_spans(content)
        elif isinstance(content, Chat):
            wrong = wrong or _wrong_messages(content)
    return f"a {type(item).__name__} with {wrong}" if wrong else None


def _wrong_spans(content: Tokens) -> str | None:
    """Return the fault of spans that are not ascending inside of the tokens, or of a list with another length."""
    num, starts, ends = len(content.tokens), content.starts, content.ends
    if content.tokens.ndim != 1 or not starts.shape == ends.shape == content.span_weights.shape == (len(starts),):
        return "tokens or spans of unequal or wrong shapes"
    # starts 1 4, ends 3 5 of 5 tokens: 1 < 3 <= 4 < 5 <= 5
    order = np.stack([starts, ends], axis=1).reshape(-1)
    if len(order) and (order[0] < 1 or order[-1] > num or (starts >= ends).any() or (np.diff(order) < 0).any()):
        return f"spans that are not ascending within [1, {num}]"
    if (content.tokens < 0).any():
        return "a negative token id"
    listed = [each.name for each in fields(Tokens) if each.name not in ("tokens", "starts", "ends", "span_weights")]
    for name in listed:
        values = getattr(content, name)
        expected = num if name == "routes" else content.num_trained
        if values is not None and len(values) != expected:
            return f"{len(values)} values of {name}; expected {expected}"
    return None


def _wrong_messages(content: Chat) -> str | None:
    num = len(content.messages)
    for name in ("message_weights", "message_temperatures", "message_cuts"):
        values = getattr(content, name)
        if values is not None and len(values) != num:
            return f"{len(values)} {name} for {num} messages"
    for message in content.messages:
        if not isinstance(message.get("role"), str):
            return f"a message without a role: {quoted_value(message)}"
    return None


@cache
def _hints(kind: Any) -> dict[str, Any]:
    given = {each.name for each in fields(kind) if each.init}  # the others are derived from them
    return {name: hint for name, hint in get_type_hints(kind).items() if name in given}


def _wrong_field(value: Any) -> str | None:
    """Return the first field of a dataclass whose value has another type than it declares, with the value."""
    kind: Any = type(value)
    for name, hint in _hints(kind).items():
        given = getattr(value, name)
        if is_dataclass(given) and type(given) in (hint, *get_args(hint)):
            if wrong := _wrong_field(given):
                return f"{name}.{wrong}"
        elif not _fits(given, hint):
            return f"{name} {quoted_value(given)}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    """Return True if `value` has the type `hint`, which a field of a format or a trajectory declares."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin is np.ndarray:  # NDArray[np.int32] has the arguments of a shape and of a dtype
        return isinstance(value, np.ndarray) and value.dtype == get_args(inner[1])[0]
    if origin in (Sequence, AbstractSet, list, tuple):
        is_kind = isinstance(value, origin) and not isinstance(value, str)
        return is_kind and all(_fits(each, inner[0]) for each in value)
    if origin in (dict, Mapping):
        return isinstance(value, origin) and all(
            _fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items()
        )
    if origin is Callable:
        return callable(value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return (
        isinstance(value, ValueKind) and _wrong_field(value) is None if hint is ValueKind else isinstance(value, hint)
    )
