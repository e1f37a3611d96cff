"""The line of `--columns` that would read records of an unknown layout, tried on the records before it is printed.

    {"log": {"steps": [{"who": "customer", "said": "Bolts?"}, {"who": "clerk", "said": "Seven."}]}}
    --suggested_columns-->  messages=log.steps,role=who,content=said,user=customer,assistant=clerk

Words in names of fields, and the kinds of their values, give candidates: a list of messages, a prompt with one or
several answers, or token ids. A user types a printed candidate, so a word that may mean two things gives no candidate,
and no candidate trains a text of a tool or of a user, or JSON of a program.
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
from treepack.ingest.readers.fields.values import JsonObject
from treepack.ingest.readers.kinds import IDS
from treepack.ingest.readers.messages.conversation_settings import TOOLS
from treepack.ingest.readers.messages.normal_form import RENAMED_ROLES, ROLES
from treepack.trajectory import Chat, PromptCompletion, Trajectory

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
_LISTS = {*_ANSWERS, *"candidates choices tries attempts".split()}  # of answers to one prompt
# No answers: thoughts, facts, references, and what a tool or a user said.
_NO_ANSWERS = _PROMPTS | set(
    "scratchpad reasoning thinking thought thoughts language format type hash sha url path canonical reference gold "
    "expected tool tools observation id system user human customer environment env".split()
)
_OF_TURNS = _PROMPTS | set("turn step observation action role from speaker".split())
_REWARD, _MASK = re.compile(r"reward|score|return|correct|pass", re.I), re.compile(r"mask|train|loss|flag", re.I)
# In this order: a tool_response is not an answer of the model.
_KINDS = {
    "": re.compile(r"call|action|thought|plan", re.I),
    "tool": re.compile(r"tool|env|observ|function|result", re.I),
    "user": re.compile(r"user|human|customer|client|student|patient|caller", re.I),
    "assistant": re.compile(r"assist|agent|bot|\bai\b|gpt|llm|clerk", re.I),
}
_FLAG = re.compile(r"(?:is|from|by)_?(?:(user|human)|bot|assistant|agent|model|ai)", re.I)


def suggested_columns(records: Sequence[Record], options: ReadOptions) -> str | None:
    """Return the value of `--columns` that reads all `records`, None if no candidate from the last of them does."""
    fields = dict(islice(_fields(records[-1].with_lists().value, "", _DEPTH), _MAX_FIELDS))
    rewards = [path for path, each in fields.items() if type(each) in (int, float) and "reward" in path.lower()]
    reward = f",reward={rewards[0]}" if len(rewards) == 1 and not fields.keys() & set(REWARDS) else ""
    for line in chain(_conversations(fields), _ids(fields), _answers(fields)):
        line += "" if "reward=" in line else reward
        if all(_is_right(record, line, options) for record in records):
            return f"'{line}'" if " " in line else line
    return None


def _is_right(record: Record, line: str, options: ReadOptions) -> bool:
    """Return True if `line` makes something to train of `record`, and no answer of it is JSON of a program."""
    try:
        items = list(read_columns(record.with_lists(), replace(options, columns=column_map(line))))
    except TreepackError:
        return False
    trained: list[Any] = []
    for content in (item.content for item in items if isinstance(item, Trajectory)):
        if isinstance(content, Chat):
            turns = zip(content.messages, content.message_weights, strict=True)
            trained += [message["content"] for message, weight in turns if weight]
        else:
            trained.append(content.completion if isinstance(content, PromptCompletion) else "ids")
    return bool(trained) and all(parsed_json(text) is None for text in trained)


def _fields(value: JsonObject, before: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each field that is not null, outer fields first; JSON text is read.

    Fields of the first element of a list of answers are among them: `tries[].text`.
    """
    inner = []
    for name, field in value.items():
        if field is None or not isinstance(name, str) or not _PLAIN.fullmatch(name):
            continue
        opened = parsed_json(field)
        opened = field if opened is None else opened
        yield f"{before}{name}", opened
        objects = as_messages(opened)
        if isinstance(opened, dict) and depth > 1:
            inner.append((opened, f"{before}{name}."))
        elif objects and _words(name) & _LISTS and not objects[0].keys() & _OF_TURNS:
            first = {key: each for key, each in objects[0].items() if all(key in other for other in objects)}
            inner.append((first, f"{before}{name}[]."))
    for opened, path in inner:
        yield from _fields(opened, path, 1 if path.endswith("[].") else depth - 1)


def _conversations(fields: JsonObject) -> Iterator[str]:
    for path, messages in ((path, as_messages(field)) for path, field in fields.items()):
        if not messages or "[]" in path:
            continue
        texts = sorted({*_SPEECH}.intersection(messages[0]), key=_SPEECH.index)
        flags = [name for name, each in messages[0].items() if _FLAG.fullmatch(name) and isinstance(each, bool)]
        for role in (*_SPEAKERS, *flags):
            said = [name for name in texts if name != role and isinstance(messages[0][name], str | list)]
            names: list[Any] = [True, False] if role in flags else [each.get(role) for each in messages]
            if said and all(isinstance(name, str | bool) for name in names) and (roles := _roles(role, names)):
                # The usual names need no column: content=content.
                parts = (f"{key}={name}" for key, name in (("role", role), ("content", said[0]), *roles) if key != name)
                yield ",".join((f"messages={path}", *parts))
                break


def _roles(field: str, names: list[str | bool]) -> list[tuple[str, str]]:
    """Return each role with its names in the field `field`, as (user, customer); none if one of them is not clear."""
    found: dict[str, list[str]] = {}
    is_known = False  # the role assistant
    for name in dict.fromkeys(names):
        text = str(name).lower()
        role = ROLE_NAMES.get(text) or RENAMED_ROLES.get(text) or (text if text in ROLES else None)
        # is_bot: true -> assistant; is_user: false -> assistant
        of_user = _FLAG.fullmatch(field)
        by_flag = "user" if name == bool(of_user and of_user[1]) else "assistant"
        by_word = next((kind for kind, words in _KINDS.items() if words.search(text)), "")
        guess = role or (by_flag if isinstance(name, bool) else by_word)
        if not guess or not _PLAIN.fullmatch(text):
            return []
        is_known |= role == "assistant"
        found.setdefault(guess, []).extend([] if role else [text if isinstance(name, bool) else name])
    # Beside the role assistant, another name of the model may be anybody.
    is_clear = "assistant" in found and not (is_known and found["assistant"])
    return [(role, "+".join(each) or role) for role, each in found.items()] if is_clear else []


def _ids(fields: JsonObject) -> Iterator[str]:
    listed = {path: list(field) for path, field in fields.items() if IDS.test(field)}
    ids = {path: field for path, field in listed.items() if field and all(type(n) is int and n >= 0 for n in field)}
    masks = [path for path in ids if _MASK.search(path) and {*ids[path]} <= {0, 1}]
    plain = [path for path in ids if path not in masks]
    for prompt in (path for path in plain if _words(path) & _PROMPTS):
        answers = [path for path in plain if path != prompt and (_is_answer(path) or len(plain) == 2)]
        yield from (f"prompt_ids={prompt},answer_ids={path}" for path in answers[:1])
    for path in plain:
        yield from (f"ids={path},mask={mask}" for mask in masks if len(ids[mask]) == len(ids[path]))


def _answers(fields: JsonObject) -> Iterator[str]:
    """Yield the columns of each prompt with each answer, or with the list of answers and their rewards."""
    talks = {path: field for path, field in fields.items() if isinstance(field, str) or as_messages(field)}
    systems = [path for path in talks if "system" in _words(path) and isinstance(fields[path], str)]
    prompts = [path for path in talks if _words(path) & _PROMPTS and "[]" not in path and path not in systems]
    answers = [path for path, field in fields.items() if _is_answer(path) and _is_said(field)]
    answers.sort(key=lambda path: (path.count("."), min(map(_rank, _words(path)))))
    # Several objects that no column reads may be the turns between the prompt and the answer.
    turns = {path for path in fields if len(as_messages(fields[path]) or ()) > 1 and path not in TOOLS}
    # "prompt" before "task"
    for prompt in sorted(prompts, key=lambda path: "prompt" not in _words(path)):
        for path in answers:
            whole, _, inner = path.rpartition("[].")
            if path == prompt or not turns <= {prompt, path, whole}:
                continue
            line = f"{'prompt' if 'prompt' in _words(prompt) else 'question'}={prompt},answer={path}"
            scores = (each for each in fields if inner and each.startswith(f"{whole}[].") and _REWARD.search(each))
            numbers = [each for each in scores if isinstance(fields[each], int | float)]
            line += f",reward={numbers[0]}" if numbers else ""
            yield line + (f",system_prompt={systems[0]}" if systems else "")


def _is_said(field: Any) -> bool:
    messages = as_messages(field)
    is_text = isinstance(field, str) or (isinstance(field, list) and bool(field) and isinstance(field[0], str))
    return is_text or (bool(messages) and all("role" in each for each in messages or ()))


def _is_answer(path: str) -> bool:
    words = _words(path)
    is_text = "[]" in path and bool(words & {"content", "text"})  # of one of several answers
    return (is_text or bool(words.intersection(_ANSWERS))) and not words & _NO_ANSWERS


def _rank(word: str) -> int:
    return _ANSWERS.index(word) if word in _ANSWERS else len(_ANSWERS)


def _words(path: str) -> set[str]:
    """Return the words of the last name of a path, in lower case."""
    # "log.userQuery_text" -> user query text
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", path.rpartition(".")[2])}
