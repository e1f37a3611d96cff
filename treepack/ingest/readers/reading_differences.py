"""Differences between two readings of a record, by the uses of the values that a trajectory has.

reading of {"reward": 1, ..}, reading of {"reward": 2, ..}   --differences-->  {"reward"}
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from treepack.columns import COLUMNS, Numbers
from treepack.ingest.readers.fields.values import JsonObject
from treepack.ingest.readers.turn_flags import said_turns
from treepack.trajectory import Chat, Outcome, PromptCompletion, Trajectory, positions

STRUCTURE, METADATA = "structure", "metadata"
_TRAINED, _PROMPT, _MASK = "trained", "prompt", "mask"
# Facts of a trajectory that a field may set, and values of trained tokens with the names of their fields in `Tokens`.
_FACTS = {name: name for name in "step weight reward advantage temperature metadata".split()}
_FACTS |= {"id": "trajectory_id", "group": "group_id", "rollout": "rollout_id"}
_LISTS = {c.stored.replace("_", " "): c.name for c in COLUMNS if c.stored is not None and isinstance(c.kind, Numbers)}


def changes_of(value: Any) -> list[Any]:
    """Return other values in the place of `value`: a text, a flag, a number, or a list of numbers."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + " X"]
    if isinstance(value, int | float):
        return [value + 1, value - 1]
    numbers = value.tolist() if isinstance(value, np.ndarray) else list(value)
    if all(each in (0, 1) for each in numbers):
        # Flags of a mask: the first and the last one, of which padding may hide one.
        return [[1 - numbers[0], *numbers[1:]], [*numbers[:-1], 1 - numbers[-1]]]
    return [[each if each is None else each + 1 for each in numbers]]


def differences(before: list[Outcome], after: list[Outcome]) -> set[str]:
    """Return the uses of values by which the reading changed from `before` to `after`."""
    uses: set[str] = set()
    for one, other in zip_longest(map(_ways, before), map(_ways, after), fillvalue={STRUCTURE: None}):
        names = {name for name in one | other if one.get(name) != other.get(name)}
        if STRUCTURE in names:
            names = {STRUCTURE}
        elif _MASK in names:  # other marks are other trained tokens, and other values of them
            names -= {_TRAINED, _PROMPT, *_LISTS}
        uses |= names
    return uses


def _ways(item: Outcome) -> JsonObject:
    """Return the values of `item` by their use."""
    if not isinstance(item, Trajectory):
        return {STRUCTURE: item}
    one, said = item.content, [turn for _, turn in said_turns(item)]
    ways: JsonObject = {way: getattr(item, name) for way, name in _FACTS.items()} | {_TRAINED: said}
    if isinstance(one, PromptCompletion):
        return ways | {STRUCTURE: type(one), _PROMPT: one.prompt}
    if isinstance(one, Chat):
        asked = [each for each, weight in zip(one.messages, one.message_weights, strict=True) if not weight]
        ways |= {_MASK: one.message_weights, _PROMPT: (asked, one.tools, one.chat_template_kwargs)}
        return ways | {STRUCTURE: [m["role"] for m in one.messages], "temperature": one.message_temperatures}
    lists = {name: getattr(one, column) for name, column in _LISTS.items()}
    lists[_PROMPT] = np.delete(one.tokens, positions(one.starts, one.ends))
    # As bytes, two NaN are equal.
    ways |= {name: None if each is None else np.asarray(each).tobytes() for name, each in lists.items()}
    marks = [each.tobytes() for each in (one.starts, one.ends, one.span_weights)]
    return ways | {STRUCTURE: len(one.tokens), _MASK: marks}
