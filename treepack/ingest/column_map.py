"""Where the parts of a rollout are in the records of a homemade layout: the value of `--columns`.

    "messages=log.turns,role=who,content=text,assistant=bot+agent,reward=info.score?,ignore=draft"  --column_map-->
    ColumnMap(paths={"messages": ..., ...}, roles={"bot": "assistant", "agent": "assistant"}, ignore=(("draft",),))

A path names fields inside of fields (`log.turns`), elements of lists (`[]` for all, `[0]`, `[-1]`), and goes into JSON
text as if it were parsed. A path that ends in `?` may be absent. `+` joins several paths, names of roles and ignored
fields. `readers.columns` applies the map to records. This file imports no numerical library, because the command line
takes it from here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError, quoted_value

# The content of a rollout: a conversation, a prompt with its answer or its answers, a pair of answers, or token ids.
# `prompt` is text as it was sent to the model, or messages; `question` is text, which becomes the message of a user.
CONTENT = tuple("messages prompt question answer chosen rejected ids prompt_ids answer_ids".split())
IN_MESSAGES = tuple("role content calls reasoning call_id name".split())  # paths inside of a message
_OTHERS = tuple("system_prompt tools mask logprobs advantage reward group step id weight temperature".split())
ROLES = ("system", "user", "assistant", "tool")
_IGNORE = "ignore"
_KEYS = (*CONTENT, *IN_MESSAGES, *_OTHERS, "finish_reason", *ROLES, _IGNORE)
# Each of these is a complete content; further keys of CONTENT are refused, except keys that name a prompt.
_CONTENTS = tuple(
    frozenset(each.split())
    for each in (
        "messages",
        "prompt answer",
        "question answer",
        "prompt chosen rejected",
        "question chosen rejected",
        "chosen rejected",
        "ids",
        "prompt_ids answer_ids",
    )
)
_JOINED = frozenset(
    {"prompt", "question", "system_prompt"}
)  # `question=instruction+input?`: the texts, one after another
_STEP = re.compile(r"([^\[\]]*)((?:\[(?:-?\d{1,9})?\])*)")
_MAX_STEPS = 100  # records nest no deeper
_MAX_CUT = 200  # characters of a path or name in an error
WHERE = "--columns"

Step = str | int | None  # a field, an element of a list, all elements of a list
Steps = tuple[Step, ...]
Given = str | Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, slots=True)
class ColumnPath:
    """One path: its steps, its text for messages, and whether a record may lack it."""

    steps: Steps
    text: str
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """The paths of each key, the role of each name of a role, and the paths of fields that are ignored."""

    paths: Mapping[str, tuple[ColumnPath, ...]]
    roles: Mapping[str, str]
    ignore: tuple[ColumnPath, ...]

    @property
    def content(self) -> frozenset[str]:
        """The keys that name the content of a rollout; empty if the records have a known layout."""
        return frozenset(self.paths).intersection(CONTENT)

    @property
    def is_edit(self) -> bool:
        """True if the map only ignores fields or names a mask, so that the records keep their own format."""
        return not self.roles and self.paths.keys() <= {"mask"}

    @property
    def line(self) -> str:
        """The map as text: the value of `--columns`."""
        pairs = [
            f"{key}={'+'.join(path.text + '?' * path.is_optional for path in paths)}"
            for key, paths in self.paths.items()
        ]
        for role in ROLES:
            if names := [name for name, named in self.roles.items() if named == role]:
                pairs.append(f"{role}={'+'.join(names)}")
        if self.ignore:
            pairs.append(f"{_IGNORE}={'+'.join(path.text for path in self.ignore)}")
        return ",".join(pairs)


def column_map(given: Given) -> ColumnMap:
    """Return the map of `KEY=PATH,...`, of the JSON file with this name, or of an object with the same keys.

    Raises:
        TreepackError: a key is unknown or occurs twice, a path is malformed, or the content is incomplete.
    """
    pairs = _pairs_of_text(given) if isinstance(given, str) else _pairs_of_object(dict(given), WHERE)
    paths: dict[str, tuple[ColumnPath, ...]] = {}
    roles: dict[str, str] = {}
    ignore: tuple[ColumnPath, ...] = ()
    for key, values in pairs:
        if key not in _KEYS:
            similar = difflib.get_close_matches(key, _KEYS, 1)
            hint = f", did you mean {similar[0]}" if similar else ""
            raise TreepackError(f"{WHERE}: has the unknown key '{_cut(key)}'{hint}; expected one of {', '.join(_KEYS)}")
        if key in ROLES:
            for name in values:
                if roles.setdefault(name, key) != key:
                    raise TreepackError(f"{WHERE}: '{_cut(name)}' is {roles[name]} and {key}; give each name one role")
            continue
        if key in paths or (key == _IGNORE and ignore):
            raise TreepackError(f"{WHERE}: has the key {key} twice; give it once, several paths are joined by +")
        parsed = tuple(_column_path(key, value) for value in values)
        if key == _IGNORE:
            ignore = parsed
        elif len(parsed) > 1 and key not in _JOINED:
            raise TreepackError(
                f"{WHERE}: {key} has {len(parsed)} paths; only {' and '.join(sorted(_JOINED))} join some"
            )
        else:
            paths[key] = parsed
    return _checked(ColumnMap(_in_messages(paths), roles, ignore))


def as_record(given: Given) -> dict[str, list[str]]:
    """Return the keys and values of `given` as a manifest records them.

    Raises:
        TreepackError: as `column_map`.
    """
    pairs = _pairs_of_text(given) if isinstance(given, str) else _pairs_of_object(dict(given), WHERE)
    return {key: list(values) for key, values in pairs}


def _column_path(key: str, text: str) -> ColumnPath:
    """Return the path of `text`: "turns[].info.text" -> steps ("turns", None, "info", "text").

    Raises:
        TreepackError: a part of the path is neither a name nor a name with brackets.
    """
    text = text.strip()
    is_optional = text.endswith("?")
    text = text.removesuffix("?")
    steps: list[Step] = []
    for number, part in enumerate(text.split(".")):
        match = _STEP.fullmatch(part)
        # "[0].text" begins with an element of the value itself, which only the first part may.
        if match is None or (not match[1] and (not match[2] or number > 0)):
            raise TreepackError(
                f"{WHERE}: {key}={_cut(text)} is no path; expected names with dots, and [] or [0] for elements of lists"
            )
        steps += [match[1]] if match[1] else []
        steps += [int(index) if index else None for index in re.findall(r"\[(-?\d*)\]", match[2])]
    if len(steps) > _MAX_STEPS:
        raise TreepackError(f"{WHERE}: {key} has a path of {len(steps)} steps; expected at most {_MAX_STEPS}")
    return ColumnPath(tuple(steps), text, is_optional)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CUT else f"{text[:_MAX_CUT]}..."


def _pairs_of_text(text: str) -> list[tuple[str, list[str]]]:
    if "=" not in text:
        return _pairs_of_file(text)
    pairs = []
    for pair in text.split(","):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise TreepackError(
                f"{WHERE}: '{_cut(pair)}' is not KEY=PATH; expected for example messages=log.turns,role=who"
            )
        pairs.append((key.strip(), [each.strip() for each in value.split("+")]))
    return pairs


def _pairs_of_file(name: str) -> list[tuple[str, list[str]]]:
    try:
        value = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise TreepackError(
            f"{WHERE}: '{_cut(name)}' is neither KEY=PATH pairs nor a file that can be read ({error.strerror}); "
            "write for example messages=log.turns,role=who"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TreepackError(f"{_cut(name)}: is not JSON ({error}); expected an object of keys and paths") from error
    return _pairs_of_object(value, name)


def _pairs_of_object(value: Any, where: str) -> list[tuple[str, list[str]]]:
    if not isinstance(value, dict):
        raise TreepackError(f"{where}: is not an object; expected keys and paths, for example messages and log.turns")
    pairs = []
    for key, given in value.items():
        values = [given] if isinstance(given, str) else given
        is_texts = isinstance(values, list | tuple) and all(isinstance(each, str) and each for each in values)
        if not is_texts or not values:
            raise TreepackError(
                f"{where}: {_cut(str(key))} is {quoted_value(given)}; expected a path, or a list of paths or names"
            )
        pairs.append((str(key), list(values)))
    return pairs


def _in_messages(paths: dict[str, tuple[ColumnPath, ...]]) -> dict[str, tuple[ColumnPath, ...]]:
    """Make the paths of parts of messages relative to a message, and find the messages if only their parts are given.

    role=turns[].who, content=turns[].text  ->  messages=turns, role=who, content=text
    """
    paths = dict(paths)
    for key in (*IN_MESSAGES, "mask"):
        (path,) = paths.get(key, (None,))
        if path is None or None not in path.steps:
            continue
        at = path.steps.index(None)
        outer, inner = path.steps[:at], path.steps[at + 1 :]
        text, _, rest = path.text.partition("[].")
        if "messages" not in paths and not _CONTENTS_WITH_PROMPT & paths.keys() and outer and inner:
            paths["messages"] = (ColumnPath(outer, text),)
        if inner and paths.get("messages", (None,))[0] == ColumnPath(outer, text):
            paths[key] = (ColumnPath(inner, rest, path.is_optional),)
    return paths


_CONTENTS_WITH_PROMPT = frozenset(CONTENT) - {"messages"}


def _checked(columns: ColumnMap) -> ColumnMap:
    """Refuse a map whose keys are not complete content.

    Raises:
        TreepackError: the content is incomplete, or has two forms.
    """
    content = columns.content
    if content and content not in _CONTENTS:
        forms = ", ".join(" and ".join(key for key in CONTENT if key in each) for each in _CONTENTS)
        named = " and ".join(key for key in CONTENT if key in content)
        raise TreepackError(f"{WHERE}: names {named}; the content of a rollout is one of: {forms}")
    token_only = [key for key in ("logprobs", "advantage") if key in columns.paths]
    if token_only and content and not content & {"ids", "answer_ids"}:
        raise TreepackError(f"{WHERE}: {token_only[0]} needs token ids; give ids, or prompt_ids and answer_ids")
    if "system_prompt" in columns.paths and content & {"ids", "prompt_ids"}:
        raise TreepackError(f"{WHERE}: system_prompt is text; token ids contain it already, so leave it out")
    return columns
