"""Layouts that many data sets share, each as the line of `--columns` that reads it.

    {"instruction": "Add.", "context": "2, 3", "response": "5"}  --columns_of-->  question=instruction+context,answer=..

They are tried after all formats. A record that two lines read differently is refused with both lines, because the
record does not show which field was sampled. Fields that a line does not name stay in the record.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import ColumnMap, column_map
from treepack.ingest.readers.columns.mapped_messages import ROLE_NAMES, as_messages
from treepack.ingest.readers.fields.field_paths import MISSING, value_at
from treepack.ingest.readers.fields.rewards import REWARDS
from treepack.ingest.readers.fields.values import BadValueError, JsonObject

SYSTEM = "system_prompt=system?+system_prompt?"
ALIASES = (
    f"prompt=prompt,answer=response,{SYSTEM}",
    f"prompt=prompt,answer=responses,reward=rewards?,{SYSTEM}",
    f"prompt=prompt,answer=completions,reward=rewards?,{SYSTEM}",
    f"prompt=prompt,answer=raw_output,{SYSTEM}",
    f"question=instruction+input?+context?,answer=response,{SYSTEM}",
    f"question=instruction+input?+context?,answer=answer,{SYSTEM}",
    f"question=instruction+input?+context?,answer=responses,reward=rewards?,{SYSTEM}",
    f"question=question,answer=answer,{SYSTEM}",
    f"question=question,answer=response,{SYSTEM}",
    f"question=question,answer=responses,reward=rewards?,{SYSTEM}",
    f"question=question,answer=solution,{SYSTEM}",
    f"question=problem,answer=solution,{SYSTEM}",
    f"question=problem,answer=response,{SYSTEM}",
    f"question=problem,answer=responses,reward=rewards?,{SYSTEM}",
    f"question=query,answer=answer,{SYSTEM}",
    f"question=query,answer=response,{SYSTEM}",
    f"question=query,answer=responses,reward=rewards?,{SYSTEM}",
    *(
        f"question={name},chosen=chosen,rejected=rejected,{SYSTEM}"
        for name in ("question", "query", "input", "problem")
    ),
    "prompt_ids=prompt_tokens,answer_ids=response_tokens,group=prompt_idx?",
    "prompt_ids=prompt_tokens,answer_ids=completion_tokens,group=prompt_idx?",
)
CONTAINERS = "conversation trajectory dialog dialogue history chat turns conversations".split()
# Parts of messages in such a container: who speaks, and what.
_PARTS = (
    "role=role,content=content",
    "role=from,content=value",
    "role=speaker,content=text",
    "role=role,content=text",
    "role=speaker,content=content",
    "role=sender,content=text",
    "role=author,content=content",
)
FIELDS = (*"prompt response responses instruction question problem answer solution query".split(), *CONTAINERS)
# Names of fields that may be the answer of the model. A record with two of them is ambiguous.
_ANSWERS = frozenset(
    "response responses completion completions output outputs generation generations answer raw_output".split()
)
# Next to `response` and a reward, `answer` is the reference that the reward compares: metadata. A `solution` next to
# a response is one also without a reward.
_REFERENCES, _SAMPLED = ("answer", "solution"), frozenset({"response", "responses", "completions", "raw_output"})


def matches(value: JsonObject) -> bool:
    """Return True if at least one line reads the record `value`, or messages in a field of a usual name."""
    return any(True for _ in _matching(value))


def columns_of(record: Record) -> ColumnMap:
    """Return the columns of the line that reads `record`.

    Raises:
        TreepackError: no line reads it, or the record has several fields that may be the answer.
    """
    value, source = record.value, record.source
    lines = [_present(line, value) for line in dict.fromkeys(_matching(value))]
    empty = [name for name in FIELDS if name in value and value[name] is None]
    if not lines and empty:
        raise BadValueError(f"{source}: {empty[0]} is null; expected text or messages", f"{empty[0]} is null")
    if not lines:
        raise TreepackError(
            f"{source}: has none of the layouts that are read without --columns; name its fields, for example "
            "--columns prompt=FIELD,answer=FIELD, or list the layouts with 'treepack formats columns'"
        )
    _refuse_left_out(value, source, lines[0])
    readings = [line for line in lines if not (_reads_reference(line, value) and len(lines) > 1)]
    answers = {name for name in _ANSWERS if _is_filled(value.get(name))}
    answers -= {name for name in _REFERENCES if _is_reference(name, value)}
    if len(readings) == 1 and answers <= _fields(readings[0]):
        return _compiled(readings[0])
    named = [_with_ignore(line, answers | _fields_of(readings)) for line in readings]
    # {"conversation": [..], "response": ".."}: one line, and an answer that it does not read
    for name in sorted(answers - _fields_of(readings)):
        if (line := _answer_line(readings[0], name)) is not None:
            named.append(line)
    raise TreepackError(
        f"{source}: can be read in several ways; choose one: " + " or ".join(f"--columns {line}" for line in named)
    )


def _refuse_left_out(value: JsonObject, source: str, line: str) -> None:
    """Refuse a record with a part of the prompt that `line` does not read.

    Raises:
        TreepackError: earlier rounds are next to a question, or a prompt is next to messages that begin with an answer.
    """
    others = {name: as_messages(value[name]) or [] for name in value.keys() - _fields(line) - {"history"}}
    rounds = ["history"] if _is_filled(value.get("history")) and "history" not in _fields(line) else []
    rounds += sorted(name for name, each in others.items() if each and any(_has_parts(each, parts) for parts in _PARTS))
    if rounds:
        raise TreepackError(
            f"{source}: has earlier rounds in {rounds[0]}, which belong to the prompt; write them as messages, or "
            f"leave them out with --columns {line},ignore={rounds[0]}"
        )
    prompt = next((name for name in ("prompt", "question") if _is_filled(value.get(name))), None)
    if prompt is None or not line.startswith("messages="):
        return
    name = next(iter(_compiled(line).paths["messages"])).text
    role = next((part.partition("=")[2] for part in line.split(",") if part.startswith("role=")), "role")
    first = str((as_messages(value[name]) or [{}])[0].get(role)).lower()
    if ROLE_NAMES.get(first, first) == "assistant":
        raise TreepackError(
            f"{source}: can be read in several ways; choose one: --columns {_answer_line(line, name, prompt)} or "
            f"--columns {line},ignore={prompt}"
        )


def _matching(value: JsonObject) -> list[str]:
    lines = [line for line in ALIASES if _reads(line, value)]
    for name in CONTAINERS:
        messages = as_messages(value.get(name))
        if not messages or not all(isinstance(value.get(key), str | type(None)) for key in ("prompt", "question")):
            continue
        lines += [f"messages={name},{parts}" for parts in _PARTS if _has_parts(messages, parts)][:1]
    return lines


def _has_parts(messages: list[JsonObject], parts: str) -> bool:
    role, content = (part.partition("=")[2] for part in parts.split(","))
    return all(isinstance(each.get(role), str) for each in messages) and any(content in each for each in messages)


def _reads(line: str, value: JsonObject) -> bool:
    """Return True if `value` has the content of `line`, of the right kinds."""
    columns = _compiled(line)
    found = {key: value_at(value, columns.paths[key][0].steps) for key in columns.content}
    return all(each is not MISSING and _is_kind(key, each) for key, each in found.items())


def _is_kind(key: str, value: Any) -> bool:
    if key.endswith("ids"):
        numbers = value.tolist() if isinstance(value, np.ndarray) else value
        return isinstance(numbers, list) and bool(numbers) and all(type(each) is int for each in numbers)
    if isinstance(value, str) or as_messages(value):
        return True
    if key == "answer" and isinstance(value, list):
        return bool(value) and all(isinstance(each, str) or as_messages(each) for each in value)
    return key != "question" and isinstance(value, dict) and isinstance(value.get("content"), str)


def _is_filled(value: Any) -> bool:
    return isinstance(value, str | list | dict | np.ndarray) and len(value) > 0


def _is_reference(name: str, value: JsonObject) -> bool:
    """Return True if the field `name` is the reference of a rollout, and not its answer."""
    has_reward = any(value.get(reward) is not None for reward in (*REWARDS, "correct", "is_correct"))
    return (has_reward or name == "solution") and any(_is_filled(value.get(sampled)) for sampled in _SAMPLED)


def _reads_reference(line: str, value: JsonObject) -> bool:
    return any(f"answer={name}" in line.split(",") and _is_reference(name, value) for name in _REFERENCES)


@cache
def _compiled(line: str) -> ColumnMap:
    return column_map(line)


def _fields(line: str) -> set[str]:
    columns = _compiled(line)
    return {str(path.steps[0]) for paths in columns.paths.values() for path in paths}


def _fields_of(lines: list[str]) -> set[str]:
    return {name for line in lines for name in _fields(line)}


def _present(line: str, value: JsonObject) -> str:
    """Return `line` without the optional fields that `value` lacks: the shortest line that reads it."""
    pairs = []
    for pair in line.split(","):
        key, _, paths = pair.partition("=")
        present = [path.removesuffix("?") for path in paths.split("+") if value.get(path.removesuffix("?")) is not None]
        if present and key not in ("role", "content"):
            pairs.append(f"{key}={'+'.join(present)}")
        elif key in ("role", "content") and key != paths:
            pairs.append(pair)
    return ",".join(pairs)


def _with_ignore(line: str, answers: set[str]) -> str:
    others = sorted((answers & _ANSWERS) - _fields(line))
    return f"{line},ignore={'+'.join(others)}" if others else line


def _answer_line(line: str, answer: str, prompt: str | None = None) -> str | None:
    """Return the line that reads the field `answer` with the prompt of `line`, or with the field `prompt`."""
    columns = _compiled(line)
    if "messages" in columns.paths:
        parts = [pair for pair in line.split(",") if pair.startswith(("role=", "content="))]
        return ",".join([f"prompt={prompt or columns.paths['messages'][0].text}", f"answer={answer}", *parts])
    if "answer" not in columns.paths:
        return None
    pairs = [f"answer={answer}" if pair.startswith("answer=") else pair for pair in line.split(",")]
    return _with_ignore(",".join(pairs), {columns.paths["answer"][0].text})
