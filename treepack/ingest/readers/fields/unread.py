"""Find the fields of a record that a reader did not use, so that nothing of a record vanishes in silence.

    {"id": 7, "steps": [{"text": "Hi there", "cost": 2}], "note": "be brief"}
    used of the format: "id", "steps.text"; texts of its trajectories: "Hi there"   -->   "steps.cost", "note"

A text of several words is used if the trajectories contain it, wherever it was in the record. A number, a boolean or a
single word is used if the format declares its path; lists are looked through. A declared path without deeper declared
paths covers everything under it, and "steps.*" covers the rest of each step. Null, "", [] and {} are nothing.

Two kinds of names are never harmless: a possible answer or mask decides which tokens are trained. `danger` names the
kind, and readers of general layouts refuse a record with such a field that they do not understand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from treepack.files.input_files.json_text import parsed_json
from treepack.trajectory import Chat, Outcome, PromptCompletion, Trajectory

Declared = dict[str, Any]  # name -> Declared; an empty one covers everything under the name
_MAX_WORD = 64  # characters of a single word; a longer one is text, for example in a language without spaces
_HERE = ""  # key of a declared path that has deeper declared paths: a value that is not an object is used
_SAME = "="  # key of a field whose objects have the form of a different path, with this path and its declared paths
NAME = "!"  # key, and end of a declared path, of a text that is a name
JSON = "{}"  # key, and end of a declared path, of a value that is used, and looked through if it is JSON text
_ROOT = "."  # the record itself, as the form of a field
_COVERED: Declared = {_HERE: {}, "*": {}}

ANSWER, MASK = "an answer", "a mask or a label"
_MAX_SEARCHED = 1 << 30  # characters of trajectories in which the lines of one record or file are searched
_MAX_UNREAD = 200  # fields of one record that are named; documents keyed by task have thousands
_MORE = "more fields not used"

# Names of answers next to a conversation, whatever program wrote them.
ANSWERS = frozenset(
    """
    completion completions response responses output outputs raw_output raw_response raw_completion generation
    generations generated_text generated model_output model_response prediction predictions reply replies text texts
    value answers chosen rejected chosen_response rejected_response candidates choices continuation assistant
    assistant_response messages conversations conversation dialog dialogue trajectory turns history
    """.split()
)
# Names of masks and flags; `loss` is one only if it is a boolean or a list: a number is the loss of a trainer.
MASKS = frozenset(
    """
    mask masks train trainable trained is_trained train_on train_detail label labels kto_tag loss loss_weight
    loss_weights loss_scale token_weights sample_weight sample_weights example_weight
    """.split()
)


# Words of the names of flags and lists that choose the trained tokens.
_NO_MARKS = frozenset("is_train is_training train_split mask_sample".split())  # parts of a data set; a mark of NeMo Gym
_MARKS = frozenset("train trainable trained untrained masked mask loss weights".split())


def declare(paths: Iterable[str]) -> Declared:
    """Return declared `paths` as a tree: ["a", "b.c", "b"] -> {"a": {}, "b": {"c": {}, "": {}}}.

    "root.children=root" declares that the children have the fields of the root, "kind!" that a text is a name even if
    it has several words, and "request{}" that JSON text is looked through, for declared paths below it.
    """
    tree: Declared = {}
    ends: list[Declared] = []
    for path, _, same in (path.partition("=") for path in paths):
        node = _at(tree, path.removesuffix(NAME).removesuffix(JSON))
        for mark in (NAME, JSON):
            if path.endswith(mark):
                node[mark] = {}
        if same:
            target = "" if same == _ROOT else same
            node[_SAME] = (f"{target}." if target else "", _at(tree, target) if target else tree)
        ends.append(node)
    for node in ends:
        if node:
            node[_HERE] = {}
    return tree


def below(prefixes: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return each of `names` below each of `prefixes`: ["a", "b"], ["x"] -> ["a.x", "b.x"]."""
    names = list(names)
    return [f"{prefix}.{name}" for prefix in prefixes for name in names]


def _at(tree: Declared, path: str) -> Declared:
    for name in path.split("."):
        tree = tree.setdefault(name, {})
    return tree


class TrajectoryTexts:
    """All texts of trajectories, in which the texts of their records are searched."""

    def __init__(self, items: Iterable[Outcome]) -> None:
        """Take the trajectories; their texts are collected when the first one is searched."""
        self._items = list(items)
        self._texts: set[str] = set()
        self._lines: set[str] | None = None
        self._whole = ""
        self._budget = _MAX_SEARCHED

    def add(self, item: Outcome) -> None:
        """Collect the texts of one more item, before the first search."""
        if isinstance(item, Trajectory):
            self._add(list(_texts_of(item)))

    def _add(self, value: Any) -> None:
        if isinstance(value, str):
            self._texts.add(value)
        elif isinstance(value, dict):
            for name, field in value.items():
                self._texts.add(str(name))
                self._add(field)
        elif isinstance(value, list | tuple):
            for each in value:
                self._add(each)

    def has(self, text: str, *, is_declared: bool = True) -> bool:
        """Return whether the trajectories contain `text`, or each of its lines, or if it is declared, its JSON."""
        for item in self._items:
            self.add(item)
        self._items.clear()
        if text in self._texts:
            return True
        # Readers cut texts into thought and call, or take off white space: "I look.\n<call>\n" -> "I look.", "<call>"
        if all(map(self._has_line, text.splitlines())):
            return True
        parsed = parsed_json(text) if is_declared else None
        # Numbers of JSON are used like other numbers, because the field is declared.
        return parsed is not None and all(
            self.has(each) if is_prose(each) else each in self._texts for each in _leaves(parsed)
        )

    def _has_line(self, line: str) -> bool:
        line = line.strip()
        if self._lines is None:
            self._lines = {each.strip() for text in self._texts for each in text.splitlines()}
            self._whole = "\n".join(sorted(self._texts))
        if not line or line in self._lines:
            return True
        # A part of a line. Each search costs the whole text, so a very long record is searched for some lines only.
        self._budget -= len(self._whole)
        return self._budget > 0 and line in self._whole


def unread(
    value: Mapping[str, Any], declared: Declared | None, prefix: str = ""
) -> Iterator[tuple[str, str | None, bool]]:
    """Yield the fields of a record that may not be used: path, text and whether the path is declared.

    A text of several words may be in the trajectories, whether its path is declared or not. Other values, whose text is
    None here, are yielded if their path is not declared. O(keys of all objects).
    """
    for name, field in value.items():
        if is_empty(field):
            continue
        path = f"{prefix}{name}"
        below = None if declared is None else _below(declared, str(name))
        if below and NAME in below:
            continue
        covered = below is not None and (not below or _HERE in below or below.get("*") == {})
        # Nothing is declared under a covered path, so its numbers are used, but its texts must still be said.
        inner = _COVERED if covered and not below else below
        # {"children": [{"children": [..]}]}: the path of all levels is that of the first one.
        inner_prefix, inner = inner[_SAME] if inner and _SAME in inner else (f"{path}.", inner)
        is_open = below is not None and JSON in below
        for each in _values(field, is_open=is_open):
            if isinstance(each, dict):
                yield from unread(each, inner, inner_prefix)
            elif isinstance(each, str) and is_prose(each):
                yield path, each, covered
            elif not covered and not is_empty(each):
                yield path, None, False
                break


def unsaid(fields: Iterable[tuple[str, str | None, bool]], said: TrajectoryTexts) -> Iterator[str]:
    """Yield the paths of the `fields` of `unread` that the trajectories do not contain, each once for each value."""
    lost: set[str] = set()
    for path, text, is_declared in fields:
        if path not in lost and (text is None or not said.has(text, is_declared=is_declared)):
            lost.add(path)
            yield path


def is_prose(text: str) -> bool:
    """Return whether `text` is more than a word: a reader acts on a name or a type, and does not copy it."""
    return len(text) > _MAX_WORD or text[:1] in ("{", "[") or any(map(str.isspace, text.strip()))


def _texts_of(item: Trajectory) -> Iterator[Any]:
    content = item.content
    if isinstance(content, Chat):
        yield from (content.messages, content.tools, content.chat_template_kwargs)
    elif isinstance(content, PromptCompletion):
        # A line of the record may begin in the prompt and end in the completion: "Assistant: Yes."
        yield from (content.prompt, content.completion, content.prompt + content.completion)
    yield from (item.metadata, item.trajectory_id, item.group_id, item.rollout_id)


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)


def named(paths: Iterable[str]) -> tuple[str, ...]:
    """Return one note for each of the `paths`, in order; of very many, one note for the rest."""
    notes = [not_used(path) for path in dict.fromkeys(paths)]
    return (*notes[:_MAX_UNREAD], *([_MORE] if len(notes) > _MAX_UNREAD else []))


def not_used(path: str) -> str:
    """Return the note on a field that is not used."""
    return f"field '{' '.join(path.split())[:100]}' not used"


def danger(name: str, value: Any) -> str | None:
    """Return ANSWER or MASK if the field `name` can choose the trained tokens, or None if it is harmless."""
    if is_empty(value):
        return None
    lowered = name.lower()
    if isinstance(value, bool | list) and _is_mark(lowered):
        return MASK
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if lowered in MASKS or lowered.endswith(("_mask", "_masks")):
        return None if lowered == "loss" and is_number else MASK
    if lowered in ANSWERS:
        # A number, such as the value of a critic, is not an answer.
        return None if isinstance(value, int | float) else ANSWER
    return None


def _is_mark(name: str) -> bool:
    """Return whether a flag or list of this name can choose the trained tokens: is_masked, roles_to_train."""
    words = set(name.split("_"))
    return name not in _NO_MARKS and bool(words & _MARKS) and (len(words) > 1 or name == "weights")


def is_empty(value: Any) -> bool:
    """Return True for null, and for a text, list, object or array without content."""
    return value is None or (isinstance(value, str | list | dict | np.ndarray) and len(value) == 0)


def _below(declared: Declared, name: str) -> Declared | None:
    """Return the declared paths under `name`, None if nothing is; names of OpenTelemetry contain dots themselves."""
    if (below := declared.get(name)) is not None:
        found: Declared = below
        return found
    if "." in name:
        node: Declared | None = declared
        for part in name.split("."):
            node = None if node is None else node.get(part)
        if node is not None:
            return node
    rest: Declared | None = declared.get("*")
    return _COVERED if rest == {} else rest


def _values(field: Any, *, is_open: bool) -> Iterator[Any]:
    """Yield the values in `field`: itself, or the values of a list, also of lists in it; of numbers only the first.

    With `is_open`, JSON text is the object or list that it contains.
    """
    if is_open and (content := parsed_json(field)) is not None:
        field = content
    if not isinstance(field, list):
        yield field
    elif field and isinstance(field[0], int | float):
        yield field[0]
    else:
        for each in field:
            yield from _values(each, is_open=is_open)
