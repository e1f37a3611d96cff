"""Values at the paths of a `ColumnMap`, and records without them; both go into JSON text as if it were parsed.

    {"log": "{\\"turns\\": [{\\"text\\": \\"Hi\\"}]}", "n": 1}   log.turns[].text  --value_at-->  ["Hi"]
                                                       log.turns[].text  --without_paths-->  {"n": 1}

A field name may contain dots: `a.b` is the field `b` of `a`, or else the field "a.b".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from treepack.files.input_files.json_text import parsed_json
from treepack.ingest.column_map import Steps

MISSING = object()  # the value of a field that is absent, because null is a value
GONE = object()  # the rest of a value that has been taken as a whole


def field_at(value: Any, path: str) -> Any:
    """Return the field at `path`, MISSING if there is none: "info.reward" of {"info": {"reward": 1.0}} -> 1.0."""
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return MISSING
        value = value[name]
    return value


def value_at(value: Any, steps: Steps) -> Any:
    """Return the value at `steps`, a list of values if a step means all elements; MISSING if nothing is there."""
    if not steps:
        return value
    value = _opened(value)
    step, rest = steps[0], steps[1:]
    if isinstance(step, str):
        name, rest = _field(value, steps)
        return MISSING if name is None else value_at(value[name], rest)
    if not isinstance(value, list):
        return MISSING
    if step is None:
        values = [value_at(each, rest) for each in value]
        return MISSING if any(each is MISSING for each in values) else values
    return value_at(value[step], rest) if -len(value) <= step < len(value) else MISSING


def without_paths(value: Any, paths: Sequence[Steps]) -> Any:
    """Return `value` without the values at `paths`, GONE if nothing of it is left. Emptied lists and objects go too."""
    if any(not steps for steps in paths):
        return GONE
    if not paths:
        return value
    value = _opened(value)
    if isinstance(value, dict):
        below: dict[str, list[Steps]] = {}
        for steps in paths:
            name, rest = _field(value, steps)
            if name is not None:
                below.setdefault(name, []).append(rest)
        kept = {name: without_paths(field, below.get(name, [])) for name, field in value.items()}
        kept = {name: field for name, field in kept.items() if field is not GONE}
        return GONE if below and not kept else kept
    if isinstance(value, list):
        num = len(value)
        inner = [
            [steps[1:] for steps in paths if steps[0] is None or steps[0] in (index, index - num)]
            for index in range(num)
        ]
        items = [without_paths(each, below) for each, below in zip(value, inner, strict=True)]
        items = [each for each in items if each is not GONE]
        return GONE if value and not items else items
    return value


def _opened(value: Any) -> Any:
    """Return `value`, parsed if it is JSON text, and as a list if it is an array of numbers."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    parsed = parsed_json(value)
    return value if parsed is None else parsed


def _field(value: Any, steps: Steps) -> tuple[str | None, Steps]:
    """Return the name of the field of `value` that the first steps name, and the steps after it."""
    if not isinstance(value, dict):
        return None, ()
    # steps a, b, 0 -> the field "a", or else the field "a.b"
    name = ""
    for number, step in enumerate(steps):
        if not isinstance(step, str):
            break
        name = f"{name}.{step}" if number else step
        if name in value:
            return name, steps[number + 1 :]
    return None, ()
