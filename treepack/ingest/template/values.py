"""Compare values of a template in two renderings: equal for everything that a template can do with them."""

from __future__ import annotations

from typing import Any

from jinja2.runtime import Macro, Undefined
from markupsafe import Markup

from treepack.ingest.template import sandbox
from treepack.ingest.template.views import MISSING, MessageView, number_of, start_of

_SCALARS = frozenset({str, int, bool, type(None), Markup})


def is_plain(value: Any) -> bool:
    """Return True if `value` has no state and belongs to no rendering: JSON's types and what `undefined` is."""
    kind = type(value)
    if kind in _SCALARS or kind is float:
        return True
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, Undefined)


def is_comparable(value: Any) -> bool:
    """Return True if `same` can compare `value`: plain, or the messages, a namespace or a macro."""
    return value is MISSING or isinstance(value, MessageView | sandbox.SandboxNamespace | Macro) or is_plain(value)


def same(a: Any, b: Any) -> bool:
    """Return True if no template can distinguish `a` and `b`, the same variable in two renderings."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _SCALARS:
        return bool(a == b)
    if kind is float:
        return repr(a) == repr(b)  # 0.0 == -0.0, but they are printed differently
    if kind in (list, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if kind is dict:
        return len(a) == len(b) and all(map(same, a, b)) and all(map(same, a.values(), b.values()))
    if kind is MessageView:
        return start_of(a) == start_of(b)
    if isinstance(a, sandbox.SandboxNamespace):
        return number_of(a) == number_of(b) >= 0
    if isinstance(a, Macro):
        return a._func.__code__ is b._func.__code__
    return isinstance(a, Undefined)  # they differ in the text of errors only, which ends a rendering
