"""Records of a homemade layout to records of `chat`, `tokens` or `trl-preference`, by a `ColumnMap`.

    {"ask": "2 + 2?", "tries": [{"text": "4", "ok": 1}, {"text": "5", "ok": 0}], "set": "sums"}
        question=ask,answer=tries[].text,reward=tries[].ok
    --records_of-->  {"prompt": [user "2 + 2?"], "completion": [assistant "4"], "reward": 1, "set": "sums"}
                     {"prompt": [user "2 + 2?"], "completion": [assistant "5"], "reward": 0, "set": "sums"}

Fields that no column takes stay in the record, and the reader of the new record uses, keeps or names them. A field that
has the name of a mapped one, but is another field, is named in a note, or refused if it could be the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import CONTENT, IN_MESSAGES, WHERE, ColumnMap, ColumnPath
from treepack.ingest.readers.columns.edits import masked, without_ignored
from treepack.ingest.readers.columns.mapped_messages import MappedConversation
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.field_paths import GONE, MISSING, value_at, without_paths
from treepack.ingest.readers.fields.rewards import REWARDS
from treepack.ingest.readers.fields.rollout_facts import GROUPS, IDS, STEPS
from treepack.ingest.readers.fields.values import JsonObject, is_messages, shown

# Names of the fields of the new record. Of several names, those first in the lists of `rollout_facts` count.
_NAMES = {
    "id": IDS[0],
    "group": GROUPS[0],
    "step": STEPS[0],
    "reward": REWARDS[0],
    "ids": "input_ids",
    "answer_ids": "response_ids",
    "mask": "loss_mask",
    "logprobs": "rollout_log_probs",
}
# Values of a record with several answers, which may be lists with one value for each answer.
_PER_ANSWER = ("id", "reward", "weight", "mask", "logprobs", "advantage", "temperature", "finish_reason", "step")
_READ_AS_CONTENT = frozenset({"messages", "completion", "chosen", "rejected"})  # by the readers of the new record
_TOKEN_KEYS = frozenset({"ids", "prompt_ids", "answer_ids"})


@dataclass(frozen=True, slots=True)
class _MappedRecords:
    """The new records of one record; of several, each is an answer to the same prompt. `notes` are about all.

    A record is None if its answer is empty.
    """

    records: list[Record | None]
    notes: tuple[str, ...]
    has_answers: bool = False


def map_record(record: Record, columns: ColumnMap) -> _MappedRecords:
    """Return the new records of `record`.

    Raises:
        TreepackError: a path leads to nothing, or to a value of the wrong kind.
    """
    # Ignored fields are removed first, so that they may be inside of messages.
    record, notes = without_ignored(record, columns)
    is_inside = partial(_is_in_messages, record=record, columns=columns)
    paths = {key: paths for key, paths in columns.paths.items() if not is_inside(key)}
    found = {key: _value(record, key, each) for key, each in paths.items()}
    values = {key: value for key, value in found.items() if value is not None or key in CONTENT}
    rest = without_paths(record.value, [path.steps for each in paths.values() for path in each])
    rest = {} if rest is GONE else rest
    talk = MappedConversation(record.source, columns)
    if "answer" in values:
        values["answer"] = talk.answers(values["answer"])
    contents = _contents(values, talk, rest)
    has_answers = _has_answers(values, talk)
    if has_answers and "reward" not in values:
        _take_rewards(values, rest, len(contents))
    if has_answers and "finish_reason" not in values:
        _take_endings(values, rest, len(contents))
    others = {key: value for key, value in values.items() if key not in CONTENT and key != "system_prompt"}
    if talk.took_mask:
        others.pop("mask", None)
    records: list[Record | None] = []
    hidden: dict[str, None] = {}
    for number, content in enumerate(contents):
        if content is None:
            records.append(None)
            continue
        own = others
        if has_answers:
            own = {key: _one_of(each, key, number, len(contents), record) for key, each in others.items()}
        fields = content | {_NAMES.get(key, key): value for key, value in own.items()}
        kept = _beside(rest, fields, record.source)
        hidden |= dict.fromkeys(name for name in rest if name not in kept and rest[name] is not None)
        records.append(replace(record, value=kept | fields, line=None))
    notes += [f"field '{name}' not used" for name in hidden]
    return _MappedRecords(records, (*notes, *talk.notes()), has_answers)


def _beside(rest: JsonObject, fields: JsonObject, source: str) -> JsonObject:
    """Return the fields of `rest` that the new `fields` do not hide.

    Raises:
        TreepackError: a hidden field may be the content.
    """
    is_talk = bool(fields.keys() & (_READ_AS_CONTENT | {"prompt"}))
    for name in _READ_AS_CONTENT & rest.keys() if is_talk else ():
        if rest[name] not in (None, "", []):
            raise TreepackError(
                f"{source}: has the field {name} beside the columns of {WHERE}; add ignore={name}, or map it"
            )
    # Readers of the new record would take these for its content.
    hidden = fields.keys() | (_READ_AS_CONTENT | {"prompt"} if is_talk else set())
    hidden |= {"system"} if "completion" in fields else set()
    return {name: value for name, value in rest.items() if name not in hidden}


def has_content(value: JsonObject, columns: ColumnMap) -> bool:
    """Return True if the record `value` has all paths of the content in `columns`."""
    paths = [path for key in columns.content for path in columns.paths[key] if not path.is_optional]
    return all(value_at(value, path.steps) is not MISSING for path in paths)


def _is_in_messages(key: str, record: Record, columns: ColumnMap) -> bool:
    if key != "mask" or _TOKEN_KEYS & columns.content or not columns.content:
        return key in IN_MESSAGES
    return value_at(record.value, columns.paths[key][0].steps) is MISSING


def _value(record: Record, key: str, paths: Sequence[ColumnPath]) -> Any:
    """Return the value of one column; several paths are joined."""
    values = [value_at(record.value, path.steps) for path in paths]
    for path, value in zip(paths, values, strict=True):
        if value is MISSING and not path.is_optional:
            optional = "" if key in CONTENT else f", or write {key}={path.text}? if records may lack it"
            raise TreepackError(f"{record.source}: has no {path.text} (column {key}); correct the path{optional}")
    found = [value for value in values if value is not MISSING]
    if len(paths) == 1:
        return found[0] if found else None
    filled = [value for value in found if value not in (None, "", [])]
    if all(isinstance(value, str) for value in filled):
        return "\n".join(filled)
    if all(is_messages(value) for value in filled):
        return [message for value in filled for message in value]
    names = " and ".join(path.text for path in paths)
    raise TreepackError(f"{record.source}: {names} (column {key}) are not all text, or all messages; give one path")


def _contents(values: JsonObject, talk: MappedConversation, rest: JsonObject) -> list[JsonObject | None]:
    """Return the fields that are the content of each new record, None for an empty answer."""
    if _TOKEN_KEYS & values.keys():
        return _token_contents(values, talk)
    if "messages" in values:
        messages = talk.messages(values["messages"])
        if messages is None:
            raise _wrong_kind(talk.source, "messages", values["messages"], "a list of messages")
        if values.get("mask") is not None:
            messages, talk.took_mask = masked(messages, values["mask"], talk.source), True
        return [{"messages": [*_system(values, talk, messages), *messages]}]
    if "chosen" in values:
        return [_pair(values, talk)]
    if "answer" in values:
        answers = values["answer"] if _has_answers(values, talk) else [values["answer"]]
        return [None if answer in (None, "", []) else _completion(values, answer, talk) for answer in answers]
    # No content is mapped: the record has a known layout. Parts of messages belong to the field `messages`.
    if talk.has_parts:
        found = rest.get("messages")
        messages = talk.messages(found)
        if messages is None:
            raise _wrong_kind(talk.source, "messages", found, "a list of messages; name them with messages=PATH")
        del rest["messages"]
        return [{"messages": [*_system(values, talk, messages), *messages]}]
    return [{"system": values["system_prompt"]} if "system_prompt" in values else {}]


def _token_contents(values: JsonObject, talk: MappedConversation) -> list[JsonObject | None]:
    content = {_NAMES.get(key, key): values[key] for key in sorted(_TOKEN_KEYS & values.keys())}
    if not _has_answers(values, talk):
        return [content]
    return [content | {"response_ids": each} if len(each) else None for each in content["response_ids"]]


def _has_answers(values: JsonObject, talk: MappedConversation) -> bool:
    """Return True if the record has a list of answers, also of one."""
    answer, ids = values.get("answer"), values.get("answer_ids")
    if isinstance(ids, list) and ids and all(isinstance(each, list | np.ndarray) for each in ids):
        return True
    if is_messages(answer) and len(answer) > 1 and talk.has_answers(answer):
        return True
    # Texts may be JSON of any kind, so they are messages only with a role.
    is_one = is_messages(answer) or talk.is_talk(answer)
    return isinstance(answer, list) and bool(answer) and not is_one


def _completion(values: JsonObject, given: Any, talk: MappedConversation) -> JsonObject:
    """Return prompt and completion, both as text or the prompt as messages.

    A completion of text stays text beside messages, because it may be the response of an API as JSON text.
    """
    answer = talk.answer(given)
    if answer is None:
        raise _wrong_kind(talk.source, "answer", given, "text or messages")
    prompt = _prompt(values, talk)
    if isinstance(prompt, str) and isinstance(answer, str) and "system_prompt" not in values:
        return {"prompt": prompt, "completion": answer}
    prompt = _as_talk(prompt, "user")
    return {"prompt": [*_system(values, talk, prompt), *prompt], "completion": answer}


def _pair(values: JsonObject, talk: MappedConversation) -> JsonObject:
    sides = {}
    for key in ("chosen", "rejected"):
        side = talk.answer(values[key])
        if side is None:
            raise _wrong_kind(talk.source, key, values[key], "text or messages")
        sides[key] = side
    prompt = _prompt(values, talk) if {"prompt", "question"} & values.keys() else None
    if prompt is None:
        return dict(sides)
    if all(isinstance(each, str) for each in (prompt, *sides.values())) and "system_prompt" not in values:
        return {"prompt": prompt, **sides}
    prompt = _as_talk(prompt, "user")
    talks = {key: _as_talk(side, "assistant") for key, side in sides.items()}
    return {"prompt": [*_system(values, talk, prompt), *prompt], **talks}


def _prompt(values: JsonObject, talk: MappedConversation) -> list[JsonObject] | str:
    """Return the prompt as text as it was sent to the model, or as messages."""
    key = "question" if "question" in values else "prompt"
    prompt = talk.prompt(values[key])
    if prompt is None:
        raise _wrong_kind(talk.source, key, values[key], "text or messages")
    return _as_talk(prompt, "user") if key == "question" else prompt


def _as_talk(value: list[JsonObject] | str, role: str) -> list[JsonObject]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _system(values: JsonObject, talk: MappedConversation, messages: Sequence[JsonObject]) -> list[JsonObject]:
    text = values.get("system_prompt")
    if text is not None and not isinstance(text, str):
        raise _wrong_kind(talk.source, "system_prompt", text, "text")
    if text and messages and messages[0].get("role") == "system":
        raise TreepackError(
            f"{talk.source}: has a system message, and the column system_prompt; leave system_prompt out, or ignore it"
        )
    return [{"role": "system", "content": text}] if text else []


def _take_rewards(values: JsonObject, rest: JsonObject, num_answers: int) -> None:
    """Use a list of rewards under a usual name, one for each answer."""
    for name in (*REWARDS, "scores"):
        listed = rest.get(name)
        if isinstance(listed, list | np.ndarray) and len(listed) == num_answers:
            values["reward"] = rest.pop(name)
            return


def _take_endings(values: JsonObject, rest: JsonObject, num_answers: int) -> None:
    """Use a list of reasons why the answers ended, or of flags that they were cut, under a usual name."""
    for name, listed in list(rest.items()):
        kind = endings.kind_of(name)
        if kind not in (endings.REASON, endings.FLAG) or not isinstance(listed, list | np.ndarray):
            continue
        if len(listed) == num_answers:
            values["finish_reason"] = [
                ("truncated" if endings.is_set(each) else None) if kind == endings.FLAG else each
                for each in rest.pop(name)
            ]
            return


def _one_of(value: Any, key: str, number: int, num_answers: int, record: Record) -> Any:
    """Return the value of one answer: an element of a list, or the value of all."""
    if key not in _PER_ANSWER or not isinstance(value, list | np.ndarray):
        return value
    if len(value) != num_answers:
        raise TreepackError(
            f"{record.source}: has {num_answers} answers, and {len(value)} values in the column {key}; give one each"
        )
    return value.tolist()[number] if isinstance(value, np.ndarray) else value[number]


def _wrong_kind(source: str, key: str, value: Any, expected: str) -> TreepackError:
    return TreepackError(f"{source}: the column {key} is {shown(value)}; expected {expected}")
