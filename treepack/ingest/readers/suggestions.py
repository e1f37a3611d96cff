"""The line of `--columns` that would read a record of an unknown layout, tried on the record before it is printed.

    {"log": {"steps": [{"who": "customer", "said": "Bolts?"}, {"who": "clerk", "said": "Seven."}]}}
    --suggested_columns-->  messages=log.steps,role=who,content=said,user=customer,assistant=clerk

Names of fields and the kinds of their values give candidates: a list of messages, a prompt with one or several answers,
or token ids. Candidates are guesses; the user sees them as an example.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
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
from treepack.ingest.readers.messages.normal_form import RENAMED_ROLES, ROLES
from treepack.trajectory import Chat, Trajectory

_DEPTH = 4  # of fields inside of fields that are searched
MAX_FIELDS = 500  # values of a record that are searched
_SPEAKERS = "role from speaker sender author who participant name type source agent actor".split()
_NO_SPEAKERS = frozenset("model id".split())  # neither are these what somebody said
_SPEECH = "content value text message body msg utterance said parts output".split()
_PROMPTS = frozenset(
    "prompt question query instruction problem request task ask input inputs user human puzzle q".split()
)
# The first of these words in a name counts: assistant_response before assistant_note.
_ANSWERS = (
    "response responses completion completions answer answers output outputs reply replies generation generations "
    "generated said solution solutions prediction predictions rollout rollouts sample samples assistant bot text "
    "target targets a"
).split()
# No answers: thoughts, facts, references, and what a tool said.
_THOUGHTS = frozenset(
    "scratchpad reasoning thinking thought thoughts language format type hash sha url path canonical reference gold "
    "expected tool tools observation".split()
)
_REWARD = re.compile(r"reward|score|return|correct|pass", re.I)
_MASK = re.compile(r"mask|train|loss|flag", re.I)
_USERS = re.compile(r"user|human|customer|client|student|patient|caller|question|prompt", re.I)
_MODELS = re.compile(r"assist|agent|bot|model|\bai\b|gpt|llm|clerk|answer|respon", re.I)
_TOOLS = re.compile(r"tool|env|observ|function|result", re.I)
_PLAIN = re.compile(r"[^,=+\[\]?]+")  # names that a line of --columns can contain


def suggested_columns(record: Record, options: ReadOptions) -> str | None:
    """Return the value of `--columns` that reads `record`, None if no candidate does."""
    for line in _candidates(record.with_lists().value):
        if _reads(record, line, options):
            return f"'{line}'" if " " in line else line
    return None


def _reads(record: Record, line: str, options: ReadOptions) -> bool:
    """Return True if `line` makes at least one trajectory with something to train of `record`."""
    try:
        items = list(read_columns(record.with_lists(), replace(options, columns=column_map(line))))
    except TreepackError:
        return False
    made = [item.content for item in items if isinstance(item, Trajectory)]
    return any(not isinstance(content, Chat) or any(content.message_weights) for content in made)


def _candidates(value: dict[str, Any]) -> Iterator[str]:
    fields = dict(list(_fields(value, "", _DEPTH))[:MAX_FIELDS])
    reward = _reward(fields)
    for path, field in fields.items():
        messages = as_messages(field)
        # "" if the names are the usual ones
        if messages and (parts := _parts(messages)) is not None:
            yield f"messages={path}{parts}{reward}"
    yield from (line + reward for line in _token_candidates(fields))
    yield from (line if "reward=" in line else line + reward for line in _answer_candidates(fields))


def _fields(value: dict[str, Any], before: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each field that is not null, outer fields first."""
    inner = []
    for name, field in value.items():
        if field is None or not isinstance(name, str) or not _PLAIN.fullmatch(name):
            continue
        path = f"{before}{name}"
        yield path, field
        opened = parsed_json(field) if isinstance(field, str) else field
        if isinstance(opened, dict) and depth > 1:
            inner.append((opened, f"{path}."))
    for opened, path in inner:
        yield from _fields(opened, path, depth - 1)


def _parts(messages: list[dict[str, Any]]) -> str | None:
    """Return the columns of the parts of messages, as ",role=who,content=said"; None if they are not messages."""
    names = [name for name in messages[0] if _PLAIN.fullmatch(name) and not _words(name) & _NO_SPEAKERS]
    roles = [name for name in names if all(isinstance(each.get(name), str | bool) for each in messages)]
    speakers = sorted(
        (name for name in roles if _is_speaker(name, messages)), key=lambda name: _rank(name.lower(), _SPEAKERS)
    )
    for role in speakers[:3]:
        speech = [name for name in names if name != role and any(_is_speech(each.get(name)) for each in messages)]
        speech.sort(key=lambda name: (_rank(name.lower(), _SPEECH), -_length(name, messages)))
        if not speech:
            continue
        columns = "" if role == "role" else f",role={role}"
        columns += "" if speech[0] == "content" else f",content={speech[0]}"
        named = _roles([each[role] for each in messages], role)
        if named is not None:
            return columns + named
    return None


def _is_speaker(name: str, messages: list[dict[str, Any]]) -> bool:
    values = {each[name] for each in messages}
    return all(isinstance(value, bool) or 0 < len(value) <= 40 for value in values) and (
        len(values) < len(messages) or name.lower() in _SPEAKERS or len(values) <= 2
    )


def _is_speech(value: Any) -> bool:
    return isinstance(value, str | list) and len(value) > 0


def _length(name: str, messages: list[dict[str, Any]]) -> int:
    return sum(len(str(each.get(name) or "")) for each in messages)


def _rank(name: str, names: list[str]) -> int:
    return names.index(name) if name in names else len(names)


def _roles(values: list[Any], key: str) -> str | None:
    """Return the columns of the names of roles that are not known, as ",user=customer"; None if no one is the model."""
    distinct = list(dict.fromkeys(values))
    if all(isinstance(value, bool) for value in distinct):
        model = "false" if _USERS.search(key) else "true"
        return f",assistant={model},user={'true' if model == 'false' else 'false'}"
    names: dict[str, list[str]] = {}
    known = {str(value): _known_role(str(value)) for value in distinct}
    for value, role in known.items():
        if role is None and not _PLAIN.fullmatch(value):
            return None
        kinds = (("user", _USERS), ("assistant", _MODELS), ("tool", _TOOLS))
        guess = role or next((kind for kind, words in kinds if words.search(value)), None)
        if guess is None and key.lower() not in _SPEAKERS:
            return None  # a country or a version, and no speaker
        if guess is None:
            # A first speaker of no other role is the user, and all others are the model.
            guess = "assistant" if "user" in names or "user" in known.values() else "user"
        if role is None:
            names.setdefault(guess, []).append(value)
    if "assistant" not in names and "assistant" not in known.values():
        return None
    return "".join(f",{role}={'+'.join(each)}" for role, each in names.items())


def _known_role(name: str) -> str | None:
    lower = name.lower()
    return ROLE_NAMES.get(lower) or RENAMED_ROLES.get(lower) or (lower if lower in ROLES else None)


def _token_candidates(fields: dict[str, Any]) -> Iterator[str]:
    lists = [path for path, field in fields.items() if IDS.test(field) and _is_ids(field)]
    masks = [path for path in lists if _MASK.search(path) and set(fields[path]) <= {0, 1}]
    ids = [path for path in lists if path not in masks]
    prompts = [path for path in ids if _words(path) & _PROMPTS]
    answers = [path for path in ids if _is_answer(path) and path not in prompts]
    if prompts and answers:
        yield f"prompt_ids={prompts[0]},answer_ids={answers[0]}"
    for path in ids:
        yield from (f"ids={path},mask={mask}" for mask in masks if len(fields[mask]) == len(fields[path]))
    if len(ids) == 2 and len(prompts) == 1:
        yield f"prompt_ids={prompts[0]},answer_ids={next(path for path in ids if path not in prompts)}"


def _is_ids(field: Any) -> bool:
    numbers = field if isinstance(field, list) else field.tolist()
    return len(numbers) > 0 and all(type(each) is int and each >= 0 for each in numbers)


def _answer_candidates(fields: dict[str, Any]) -> Iterator[str]:
    texts = [path for path, field in fields.items() if _is_talk(field) and "id" not in _words(path)]
    systems = [path for path in texts if "system" in _words(path) and isinstance(fields[path], str)]
    # "prompt" before "task", and a name such as user_response is an answer.
    prompts = sorted(
        (path for path in texts if _words(path) & _PROMPTS and not _is_answer(path) and path not in systems),
        key=lambda path: "prompt" not in _words(path),
    )
    answers = [line for path, field in fields.items() for line in _answers(path, field)]
    answers.sort(key=lambda each: (each[0].count("."), min(_rank(word, _ANSWERS) for word in _words(each[0]))))
    system = f",system_prompt={systems[0]}" if systems else ""
    for prompt in prompts:
        key = "prompt" if "prompt" in _words(prompt) else "question"
        for path, line in answers:
            if path != prompt:
                yield f"{key}={prompt},{line}{system}"


def _answers(path: str, field: Any) -> Iterator[tuple[str, str]]:
    """Yield the path and the columns of one answer, or of a list of answers with their rewards."""
    is_texts = isinstance(field, list) and bool(field) and all(isinstance(each, str) for each in field)
    if _is_answer(path) and (_is_talk(field) or is_texts):
        yield path, f"answer={path}"
    objects = as_messages(field)
    if not objects or any(name in objects[0] for name in ("role", "from", "speaker")):
        return
    texts = [key for key in objects[0] if all(isinstance(each.get(key), str) for each in objects)]
    texts = [key for key in texts if _is_answer(key) or key == "content"]
    texts.sort(key=lambda key: -_length(key, objects))
    named = [key for key in objects[0] if _REWARD.search(key)]
    numbers = [key for key in named if all(isinstance(each.get(key), int | float) for each in objects)]
    for text in texts if numbers or _is_answer(path) else ():
        rewards = f",reward={path}[].{numbers[0]}" if numbers else ""
        yield path, f"answer={path}[].{text}{rewards}"


def _is_answer(path: str) -> bool:
    words = _words(path)
    return bool(words.intersection(_ANSWERS)) and not words & (_THOUGHTS | {"system"})


def _is_talk(field: Any) -> bool:
    return (isinstance(field, str) and bool(field)) or bool(as_messages(field))


def _reward(fields: dict[str, Any]) -> str:
    """Return the column of the only number that is called a reward and is not read as one anyway."""
    if any(name in fields for name in REWARDS):
        return ""
    names = [path for path, field in fields.items() if type(field) in (int, float) and re.search("reward", path, re.I)]
    return f",reward={names[0]}" if len(names) == 1 else ""


def _words(path: str) -> set[str]:
    """Return the words of the last name of a path, in lower case."""
    # "log.userQuery_text" -> user query text
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", path.rpartition(".")[2])}
