"""The line of `--columns` that would read records of an unknown layout, tried on the records before it is printed.

    {"log": {"steps": [{"who": "customer", "said": "Bolts?"}, {"who": "clerk", "said": "Seven."}]}}
    --suggested_columns-->  messages=log.steps,role=who,content=said,user=customer,assistant=clerk

Words in names of fields, and the kinds of their values, give candidates: a list of messages, or a prompt with one or
several answers. A user types a printed candidate, so a word that may mean two things gives no candidate, and no
candidate trains a text of a tool or of a user, or JSON of a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import column_map
from treepack.ingest.readers.column_records import read_columns
from treepack.ingest.readers.columns.mapped_messages import ROLE_NAMES, as_messages
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rewards import REWARDS
from treepack.ingest.readers.fields.unread import is_prose
from treepack.ingest.readers.fields.values import JsonObject
from treepack.ingest.readers.kinds import TEXTS
from treepack.ingest.readers.messages.conversation_settings import TOOLS
from treepack.ingest.readers.messages.normal_form import RENAMED_ROLES, ROLES
from treepack.ingest.readers.turn_flags import said_turns
from treepack.trajectory import Trajectory

_DEPTH, _MAX_FIELDS = 4, 500  # of fields that are searched: inside of each other, and in total
_PLAIN = re.compile(r"[^,=+\[\]?]+")  # names that a line of --columns can contain
_SPEAKERS = "role from speaker sender author who participant name source agent actor".split()
_SPEECH = "content value text message body msg utterance said parts output".split()
_PROMPTS = set("prompt question query instruction instructions problem request task ask input inputs puzzle q".split())
# The first of these words in a name counts: assistant_response before assistant_note.
_ANSWERS = (
    "response responses completion completions answer answers output outputs reply replies generation generations "
    "generated said solution solutions prediction predictions rollout rollouts sample samples assistant bot a"
).split()
_LISTS, _OF_TURNS = {*_ANSWERS, *"candidates choices tries attempts".split()}, "turn step action role from".split()
# No answers: thoughts, facts, references, and texts of a tool or a user.
_NO_ANSWERS = _PROMPTS | set(
    "scratchpad reasoning thinking thought thoughts language format type hash sha url path canonical reference gold "
    "expected tool tools observation id system user human customer environment env directory dir folder file name key "
    "count length limit mode config".split()
)
_REWARD = re.compile(r"reward|score|return|correct|pass", re.I)
_KINDS = {  # in this order: a tool_response is not an answer of the model
    "": re.compile(r"call|action|thought|plan"),
    "tool": re.compile(r"tool|env|observ|function|result"),
    "user": re.compile(r"user|human|customer|client|student|patient|caller"),
    "assistant": re.compile(r"assist|agent|bot|\bai\b|gpt|llm|clerk"),
}


def suggested_columns(records: Sequence[Record], options: ReadOptions) -> str | None:
    """Return the value of `--columns` that reads all `records`, None if no candidate from the last of them does."""
    fields = dict(islice(_fields(records[-1].with_lists().value, "", _DEPTH), _MAX_FIELDS))
    rewards = [path for path, each in fields.items() if type(each) in (int, float) and "reward" in path.lower()]
    reward = f",reward={rewards[0]}" if len(rewards) == 1 and not fields.keys() & set(REWARDS) else ""
    # Several objects that no column reads may be turns of the same conversation.
    talks = {path for path, field in fields.items() if len(as_messages(field) or ()) > 1} - TOOLS
    for line in chain(_conversations(fields), _answers(fields)):
        line += "" if "reward=" in line else reward
        read = {part.partition("=")[2].partition("[].")[0] for part in line.split(",")}
        if talks <= read and all(_is_right(record, line, options) for record in records):
            return f"'{line}'" if " " in line else line
    return None


def _is_right(record: Record, line: str, options: ReadOptions) -> bool:
    """Return True if `line` makes something to train of `record`, and no answer of it is JSON of a program."""
    try:
        items = list(read_columns(record.with_lists(), replace(options, columns=column_map(line))))
    except TreepackError:
        return False
    said = [turn for item in items if isinstance(item, Trajectory) for _, turn in said_turns(item)]
    return bool(said) and all(parsed_json(turn["content"]) is None for turn in said if isinstance(turn, dict))


def _fields(value: JsonObject, before: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each field, outer ones first, in JSON text and the first of a list: `tries[].text`."""
    inner = []
    for name, field in value.items():
        if field is None or not isinstance(name, str) or not _PLAIN.fullmatch(name):
            continue
        opened = parsed_json(field)
        opened = field if opened is None else opened
        yield f"{before}{name}", opened
        objects = as_messages(opened)
        if isinstance(opened, dict) and depth > 1:
            inner.append((opened, f"{before}{name}.", depth - 1))
        elif objects and _words(name) & _LISTS and not objects[0].keys() & {*_PROMPTS, *_OF_TURNS}:
            first = {key: each for key, each in objects[0].items() if all(key in other for other in objects)}
            inner.append((first, f"{before}{name}[].", 1))
    for each in inner:
        yield from _fields(*each)


def _conversations(fields: JsonObject) -> Iterator[str]:
    # {"ask": .., "reply": .., "rounds": [..]}: the turns may be other ones than a question and its answer.
    texts = {path: field for path, field in fields.items() if isinstance(field, str)}
    asked = {path for path, text in texts.items() if is_prose(text) and _words(path) & _PROMPTS}
    beside = [text for path, text in texts.items() if path in asked or _is_answer(path)]
    for path, messages in ((path, as_messages(field) or []) for path, field in fields.items() if "[]" not in path):
        first = messages[0] if messages else {}
        for role in _SPEAKERS:
            said = next((name for name in _SPEECH if name != role and isinstance(first.get(name), str | list)), None)
            roles = _roles([each.get(role) for each in messages])
            if said and roles and all(any(text in str(each.get(said)) for each in messages) for text in beside):
                # The usual names need no column: content=content.
                parts = (f"{key}={name}" for key, name in (("role", role), ("content", said), *roles) if key != name)
                yield ",".join((f"messages={path}", *parts))
                break


def _roles(names: list[Any]) -> list[tuple[str, str]]:
    """Return each role with its `names`, as (user, customer); none if one of them is not clear."""
    found: dict[str, list[str]] = {}
    is_known = False  # the role assistant
    for name in dict.fromkeys(names) if all(isinstance(name, str) for name in names) else ():
        text = name.lower()
        known = ROLE_NAMES.get(text) or RENAMED_ROLES.get(text) or (text if text in ROLES else "")
        role = known or next((kind for kind, words in _KINDS.items() if words.search(text)), "")
        if not role or not _PLAIN.fullmatch(text):
            return []
        is_known |= known == "assistant"
        found.setdefault(role, []).extend([] if known else [name])
    # Beside the role assistant, another name of the model may be anybody.
    is_clear = "assistant" in found and not (is_known and found["assistant"])
    return [(role, "+".join(each) or role) for role, each in found.items()] if is_clear else []


def _answers(fields: JsonObject) -> Iterator[str]:
    """Yield the columns of each prompt with each answer, or with the list of answers and their rewards."""
    talks = {path: field for path, field in fields.items() if isinstance(field, str) or as_messages(field)}
    systems = [path for path in talks if "system" in _words(path) and isinstance(fields[path], str)]
    prompts = [path for path in talks if _words(path) & _PROMPTS and "[]" not in path and path not in systems]
    # Texts, or messages; a list of texts is several answers.
    said = [path for path, field in fields.items() if path in talks or (TEXTS.test(field) and field)]
    answers = [path for path in said if _is_answer(path) and all("role" in m for m in as_messages(fields[path]) or ())]
    ranks = {word: rank for rank, word in enumerate(_ANSWERS)}
    answers.sort(key=lambda path: (path.count("."), min(ranks.get(word, len(ranks)) for word in _words(path))))
    # "prompt" before "task"
    for prompt in sorted(prompts, key=lambda path: "prompt" not in _words(path)):
        for path in answers:
            if path == prompt:
                continue
            whole = f"{path.rpartition('[].')[0]}[]."
            scores = (each for each in fields if "[]" in path and each.startswith(whole) and _REWARD.search(each))
            more = [f",reward={each}" for each in scores if isinstance(fields[each], int | float)][:1]
            more += [f",system_prompt={each}" for each in systems[:1]]
            yield f"{'prompt' if 'prompt' in _words(prompt) else 'question'}={prompt},answer={path}{''.join(more)}"


def _is_answer(path: str) -> bool:
    words, more = _words(path), ["content", "text"] if "[]" in path else []  # tries[].text
    return bool(words.intersection([*_ANSWERS, *more])) and not words & _NO_ANSWERS


def _words(path: str) -> set[str]:
    """Return the words of the last name of a path, in lower case: "log.userQuery_text" -> user query text."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", path.rpartition(".")[2])}
