"""The line of `--columns` that would read records of an unknown layout, tried on the records before it is printed.

    {"log": {"steps": [{"who": "customer", "said": "Bolts?"}, {"who": "clerk", "said": "Seven."}]}}
    --suggested_columns-->  messages=log.steps,role=who,content=said,user=customer,assistant=clerk

Names of fields and the kinds of their values give candidates: a list of messages, a prompt with one or several answers,
or token ids. A user types what is printed, so no candidate trains the text of a tool, of a user or of another program:
a name of a role or field that may mean two things gives no line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.files.input_files.records import Record
from treepack.ingest.column_map import column_map
from treepack.ingest.readers.column_records import read_columns
from treepack.ingest.readers.columns.mapped_messages import ROLE_NAMES, as_messages
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rewards import REWARDS
from treepack.ingest.readers.kinds import IDS
from treepack.ingest.readers.messages.conversation_settings import TOOLS
from treepack.ingest.readers.messages.normal_form import RENAMED_ROLES, ROLES
from treepack.trajectory import Chat, PromptCompletion, Tokens, Trajectory

_DEPTH = 4  # of fields inside of fields that are searched
MAX_FIELDS = 500  # values of a record that are searched
_SPEAKERS = "role from speaker sender author who participant name source agent actor".split()
_SPEECH = "content value text message body msg utterance said parts output".split()
_PROMPTS = frozenset(
    "prompt question query instruction instructions problem request task ask input inputs puzzle q".split()
)
# The first of these words in a name counts: assistant_response before assistant_note.
_ANSWERS = (
    "response responses completion completions answer answers output outputs reply replies generation generations "
    "generated said solution solutions prediction predictions rollout rollouts sample samples assistant bot a"
).split()
_LISTS = frozenset((*_ANSWERS, *"candidates choices tries attempts".split()))  # of answers to one prompt
# No answers: thoughts, facts, references, and what a tool or a user said.
_NO_ANSWERS = frozenset(
    "scratchpad reasoning thinking thought thoughts language format type hash sha url path canonical reference gold "
    "expected tool tools observation id system user human customer environment env".split()
)
_OF_TURNS = _PROMPTS | frozenset("turn step observation action role from speaker".split())
_REWARD = re.compile(r"reward|score|return|correct|pass", re.I)
_MASK = re.compile(r"mask|train|loss|flag", re.I)
# In this order: a tool_response is not an answer of the model.
_KINDS = {
    "": re.compile(r"call|action|thought|plan", re.I),
    "tool": re.compile(r"tool|env|observ|function|result", re.I),
    "user": re.compile(r"user|human|customer|client|student|patient|caller", re.I),
    "assistant": re.compile(r"assist|agent|bot|\bai\b|gpt|llm|clerk", re.I),
}
_BY_FLAG = re.compile(r"(?:is|from|by)_?(?:user|human|bot|assistant|agent|model|ai)", re.I)
_PLAIN = re.compile(r"[^,=+\[\]?]+")  # names that a line of --columns can contain


def suggested_columns(records: Sequence[Record], options: ReadOptions) -> str | None:
    """Return the value of `--columns` that reads all `records`, None if no candidate from the last of them does."""
    for line in _candidates(records[-1].with_lists().value):
        if all(_is_right(record, line, options) for record in records):
            return f"'{line}'" if " " in line else line
    return None


def _is_right(record: Record, line: str, options: ReadOptions) -> bool:
    """Return True if `line` makes something to train of `record`, and no answer of it is JSON of a program."""
    try:
        items = list(read_columns(record.with_lists(), replace(options, columns=column_map(line))))
    except TreepackError:
        return False
    trained = [text for item in items if isinstance(item, Trajectory) for text in _trained(item.content)]
    return bool(trained) and all(parsed_json(text) is None for text in trained)


def _trained(content: Chat | PromptCompletion | Tokens) -> list[str]:
    if isinstance(content, Chat):
        turns = zip(content.messages, content.message_weights, strict=True)
        return [str(message["content"]) for message, weight in turns if weight]
    return [content.completion] if isinstance(content, PromptCompletion) else ["ids"]


def _candidates(value: dict[str, Any]) -> Iterator[str]:
    fields = dict(islice(_fields(value, "", _DEPTH), MAX_FIELDS))
    has_reward = any(name in fields for name in REWARDS)
    rewards = [
        path for path, field in fields.items() if type(field) in (int, float) and re.search("reward", path, re.I)
    ]
    reward = f",reward={rewards[0]}" if len(rewards) == 1 and not has_reward else ""
    for path, field in fields.items():
        messages = as_messages(field)
        # "" if the names are the usual ones
        if messages and (parts := _parts(messages)) is not None:
            yield f"messages={path}{parts}{reward}"
    yield from (line + reward for line in _token_candidates(fields))
    yield from (line if "reward=" in line else line + reward for line in _answer_candidates(fields))


def _fields(value: dict[str, Any], before: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each field that is not null, outer fields first; JSON text is what it contains."""
    inner = []
    for name, field in value.items():
        if field is None or not isinstance(name, str) or not _PLAIN.fullmatch(name):
            continue
        opened = parsed_json(field)
        yield f"{before}{name}", field if opened is None else opened
        if isinstance(opened := field if opened is None else opened, dict) and depth > 1:
            inner.append((opened, f"{before}{name}."))
    for opened, path in inner:
        yield from _fields(opened, path, depth - 1)


def _parts(messages: list[dict[str, Any]]) -> str | None:
    """Return the columns of the parts of messages, as ",role=who,content=said"; None if they are not messages."""
    flags = [name for name in messages[0] if _BY_FLAG.fullmatch(name)]
    for role in (
        name for name in (*_SPEAKERS, *flags) if all(isinstance(each.get(name), str | bool) for each in messages)
    ):
        speech = [name for name in messages[0] if name != role and isinstance(messages[0][name], str | list)]
        speech = sorted((name for name in speech if name in _SPEECH), key=_SPEECH.index)
        roles = _roles_by_flag(role) if role in flags else _roles([str(each[role]) for each in messages])
        if speech and roles is not None:
            columns = "" if role == "role" else f",role={role}"
            return columns + ("" if speech[0] == "content" else f",content={speech[0]}") + roles
    return None


def _roles(names: list[str]) -> str | None:
    """Return the columns of the names of roles that are not known, as ",user=customer"; None if a role is not clear."""
    found: dict[str, list[str]] = {}
    known = {name: _known_role(name) for name in names}
    for name, role in known.items():
        guess = role or next((kind for kind, words in _KINDS.items() if words.search(name)), "")
        if not guess or not _PLAIN.fullmatch(name):
            return None
        found.setdefault(guess, [])
        if role is None:
            found[guess].append(name)
    # Beside a role `assistant`, another name of the model may be anybody.
    is_clear = not found.get("assistant") or "assistant" not in known.values()
    lines = (f",{role}={'+'.join(each)}" for role, each in found.items() if each)
    return "".join(lines) if "assistant" in found and is_clear else None


def _roles_by_flag(name: str) -> str:
    # is_bot: true -> assistant; is_user: false -> assistant
    model = "false" if _KINDS["user"].search(name) else "true"
    return f",assistant={model},user={'true' if model == 'false' else 'false'}"


def _known_role(name: str) -> str | None:
    lower = name.lower()
    return ROLE_NAMES.get(lower) or RENAMED_ROLES.get(lower) or (lower if lower in ROLES else None)


def _token_candidates(fields: dict[str, Any]) -> Iterator[str]:
    lists = [path for path, field in fields.items() if IDS.test(field) and _is_ids(field)]
    masks = [path for path in lists if _MASK.search(path) and set(fields[path]) <= {0, 1}]
    ids = [path for path in lists if path not in masks]
    prompts = [path for path in ids if _words(path) & _PROMPTS]
    others = [path for path in ids if path not in prompts]
    answers = [path for path in others if _is_answer(path)] or (others if len(ids) == 2 else [])
    if prompts and answers:
        yield f"prompt_ids={prompts[0]},answer_ids={answers[0]}"
    for path in ids:
        yield from (f"ids={path},mask={mask}" for mask in masks if len(fields[mask]) == len(fields[path]))


def _is_ids(field: Any) -> bool:
    numbers = field if isinstance(field, list) else field.tolist()
    return len(numbers) > 0 and all(type(each) is int and each >= 0 for each in numbers)


def _answer_candidates(fields: dict[str, Any]) -> Iterator[str]:
    talks = [path for path, field in fields.items() if isinstance(field, str) or as_messages(field)]
    systems = [path for path in talks if "system" in _words(path) and isinstance(fields[path], str)]
    # "prompt" before "task"
    prompts = sorted(
        (path for path in talks if _words(path) & _PROMPTS and not _is_answer(path) and path not in systems),
        key=lambda path: "prompt" not in _words(path),
    )
    answers = [line for path, field in fields.items() for line in _answers(path, field)]
    answers.sort(key=lambda each: (each[0].count("."), min(map(_rank, _words(each[0])))))
    # Several objects that no column reads may be the turns between the prompt and the answer.
    turns = {path for path in fields if len(as_messages(fields[path]) or ()) > 1 and path not in TOOLS}
    for prompt in prompts:
        key = "prompt" if "prompt" in _words(prompt) else "question"
        for path, line in answers:
            if path != prompt and turns <= {prompt, path}:
                yield f"{key}={prompt},{line}" + (f",system_prompt={systems[0]}" if systems else "")


def _answers(path: str, field: Any) -> Iterator[tuple[str, str]]:
    """Yield the path and the columns of one answer, or of a list of answers with their rewards."""
    objects = as_messages(field)
    is_text = isinstance(field, str) or (isinstance(field, list) and bool(field) and isinstance(field[0], str))
    if _is_answer(path) and (is_text or (objects and all("role" in each for each in objects))):
        yield path, f"answer={path}"
    if objects and _words(path) & _LISTS and not objects[0].keys() & _OF_TURNS:
        names = [key for key in objects[0] if all(isinstance(each.get(key), str) for each in objects)]
        texts = [key for key in names if _is_answer(key) or key in ("content", "text")]
        scored = [key for key in objects[0] if _REWARD.search(key) and isinstance(objects[0][key], int | float)]
        rewards = f",reward={path}[].{scored[0]}" if scored else ""
        yield from ((path, f"answer={path}[].{text}{rewards}") for text in texts[:1])


def _is_answer(path: str) -> bool:
    words = _words(path)
    return bool(words.intersection(_ANSWERS)) and not words & (_NO_ANSWERS | _PROMPTS)


def _rank(word: str) -> int:
    return _ANSWERS.index(word) if word in _ANSWERS else len(_ANSWERS)


def _words(path: str) -> set[str]:
    """Return the words of the last name of a path, in lower case."""
    # "log.userQuery_text" -> user query text
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", path.rpartition(".")[2])}
