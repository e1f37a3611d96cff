"""Find prompt and answer in a record of chat, whatever fields they are in.

    messages [user, assistant]                             all turns are trained
    messages [user, assistant, user], completion [answer]  the answer alone is trained: it answers the last message
    messages [.., answer], response "answer"               the answer is there twice, so all turns are trained
    prompt [user], completion [answer], messages [both]    the answer alone is trained
    messages [.., assistant "A"], response "B"             refused: two answers
    messages [.., user], model_reply "A"                   refused: the name of the field means an answer

A record with an answer next to its messages is the usual log of a request: the turns in the request belong to other
calls. Reading the messages alone would train those turns and lose the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.ingest.readers.fields.rollout_facts import METADATA_DICTS
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import JsonObject, is_messages, shown
from treepack.ingest.readers.kinds import TEXTS
from treepack.ingest.readers.messages.containers import objects_of
from treepack.ingest.readers.messages.content_blocks import split_blocks
from treepack.ingest.readers.messages.prefills import is_prefill, mark_prefills

Message = JsonObject

# Names of the answer next to the messages of a request, as text, a message, or a list of messages.
ANSWER_FIELDS = tuple(
    "completion response output generation generated_text model_output model_response raw_output raw_response "
    "prediction reply assistant assistant_response answer".split()
)
# Words of the names of answers that are not known, such as `llm_response` and `final_answer`, and of other things.
_ANSWER_WORDS = frozenset("completion response output generation prediction reply answer result".split())
_WORDS_OF_TEXT = frozenset(
    "text texts content contents message messages raw str string full data obj object json".split()
)
_REFERENCE_WORDS = frozenset(
    """
    gold golden expected reference ref correct true truth ground target label ideal oracle human user tool judge grader
    critic reviewer environment env previous last prior example num
    """.split()
)
_CALLS = ("tool_calls", "function_call")
_ANSWERS_BY_NAME = frozenset("content message text tool_calls function_call choices candidates generations".split())
# Names of a text that a template made of the messages.
_RENDERED = ("text", "texts")


@dataclass(frozen=True, slots=True)
class _ChatDialogue:
    """Messages in the form of chat, the first `num_prompt` of which are not trained.

    `used` are the fields of the record that became messages or repeat them, and `notes` name the fields that repeat.
    """

    messages: list[Any]
    num_prompt: int
    used: frozenset[str]
    notes: tuple[str, ...] = ()


def dialogue(value: Message, source: str) -> _ChatDialogue:
    """Return the dialogue of a record that has `messages`.

    Raises:
        TreepackError: fields contradict each other, or one of them cannot be understood.
    """
    messages = split_blocks(message_list(value["messages"], "messages", source))
    answers = _answers(value, messages, source)
    prompt = _prompt(value.get("prompt"), messages, answers, source)
    rendered = [name for name in _RENDERED if _is_rendering(value.get(name), messages)]
    used = frozenset({"messages", "prompt", *answers, *rendered})
    notes = tuple(f"field '{name}' not used, because it repeats the messages" for name in rendered)
    if not answers:
        _refuse_unknown_answer(value, messages, source)
        return _ChatDialogue(messages, prompt, used, notes)
    name, answer = next(iter(answers.items()))
    if _same(messages[len(messages) - len(answer) :], answer):
        notes += (f"field '{name}' not used, because the messages end with it",)
        # With the prompt as messages too, the rest is the answer; otherwise earlier turns belong to this rollout as
        # well.
        return _ChatDialogue(messages, prompt, used, notes)
    messages = mark_prefills(messages, value, model=value.get("model"))
    if messages and _role(messages[-1]) in ("assistant", "model") and not is_prefill(messages[-1]):
        raise TreepackError(
            f"{source}: messages end with an answer, and {name} is another one; leave it out with --columns "
            f"ignore={name} if the messages were sampled, or add --columns prompt=messages,answer={name}"
        )
    beside = [each for each in (*_CALLS, "reasoning_content") if not is_empty(value.get(each))]
    if len(answer) == 1 and beside and answer[0].keys().isdisjoint(beside):
        # {"response": "Let me look.", "tool_calls": [..]}: the parts of one answer next to each other
        answer, used = [answer[0] | {each: value[each] for each in beside}], used | frozenset(beside)
    return _ChatDialogue([*messages, *answer], len(messages), used, notes)


def answer_messages(answer: Any, source: str = "") -> list[Any] | None:
    """Return an answer as messages: a text, messages, or the response of an API; None if it is something else.

    JSON text of messages or of a response is parsed; any other JSON is text that the model wrote.
    """
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], str):
        answer = answer[0]
    if isinstance(answer, str):
        parsed = parsed_json(answer)
        if not (_is_response(parsed) or (is_messages(parsed) and parsed and all("role" in each for each in parsed))):
            return [{"role": "assistant", "content": answer}]
        answer = parsed
    if isinstance(answer, dict) and not _is_response(answer) and ("content" in answer or "tool_calls" in answer):
        return split_blocks([{"role": "assistant"} | answer])
    if is_messages(answer) and answer and all("role" in each and "type" not in each for each in answer):
        return split_blocks(answer)
    return _of_api(answer, source)


def _is_response(value: Any) -> bool:
    """Return whether `value` is a response of an API, or a message of the assistant."""
    if not isinstance(value, dict):
        return False
    names = ("choices", "candidates", "output")
    if value.get("role") in ("assistant", "model"):
        return not value.keys().isdisjoint(("content", "tool_calls", "parts"))
    return any(is_messages(value.get(name)) and value[name] for name in names)


def _of_api(answer: Any, source: str) -> list[Any] | None:
    """Return the messages of the only response in `answer`, None if it has another form, or several responses."""
    # A module that imports readers of formats, which import this one.
    from treepack.calls.apis.api_forms import responses_of

    if not isinstance(answer, dict) and not (is_messages(answer) and answer):
        return None
    has_items = isinstance(answer, list) and any(each.get("type") == "message" for each in answer)
    try:
        responses = responses_of({"output": answer} if has_items else answer, source=source)
    except TreepackError:
        return None
    return split_blocks(responses[0]) if len(responses) == 1 else None


def message_list(value: Any, name: str, source: str) -> list[Any]:
    """Return the list `value` of messages, as it is, as JSON text or as columns: {"role": [..], "content": [..]}.

    Raises:
        TreepackError: it is something else.
    """
    listed = value if isinstance(value, list) else objects_of(value)
    if listed is None:
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a list of messages")
    return listed


def texts_of(talk: Any) -> list[str]:
    """Return the texts of messages, or of one text."""
    return [talk] if isinstance(talk, str) else [_text(each) for each in talk] if isinstance(talk, list) else []


def _answers(value: Message, messages: list[Any], source: str) -> dict[str, list[Any]]:
    """Return the answers next to the messages by their fields; all are equal."""
    answers: dict[str, list[Any]] = {}
    for name in ANSWER_FIELDS:
        if is_empty(value.get(name)):
            continue
        # An `answer` next to a whole conversation is the answer that a task expects, such as a number.
        if name == "answer" and messages and _role(messages[-1]) == "assistant":
            continue
        answer = answer_messages(value[name], source)
        if answer is None:
            raise TreepackError(
                f"{source}: {name} is {shown(value[name])}; expected the answer to the messages as text or messages; "
                f"leave it out with --columns ignore={name}"
            )
        first = next(iter(answers), None)
        if first is not None and not _same(answers[first], answer):
            raise TreepackError(
                f"{source}: {first} and {name} are different answers; leave the one out that was not sampled with "
                f"--columns ignore={first} or --columns ignore={name}"
            )
        answers[name] = answer
    return answers


def _refuse_unknown_answer(value: Message, messages: list[Any], source: str) -> None:
    """Refuse a record whose messages wait for an answer, and that has a field with a name of answers.

    Raises:
        TreepackError: without this field, earlier turns of the conversation would be trained, and the answer would not.
    """
    if not messages or _role(messages[-1]) in ("assistant", "model", "gpt", "ai"):
        return
    inner = ((f"{name}.", value[name]) for name in METADATA_DICTS if isinstance(value.get(name), dict))
    for prefix, fields in (("", value), *inner):
        for name, field in fields.items():
            is_text = isinstance(field, str | dict) or is_messages(field) or TEXTS.test(field)
            if is_text and not is_empty(field) and _is_answer_name(name):
                path = f"{prefix}{name}"
                say = f"say so with --columns prompt=messages,answer={path}"
                if name in _CALLS:
                    say = "move it into a message of the assistant"
                raise TreepackError(
                    f"{source}: messages end with role {_role(messages[-1])}, and the field '{path}' may be the "
                    f"answer; {say}, or leave it out with --columns ignore={path}"
                )


def _is_answer_name(name: str) -> bool:
    """Return whether a name that is not known may be an answer's: "llm_response", "finalAnswer", "output_text"."""
    if name in _ANSWERS_BY_NAME or name in ANSWER_FIELDS:
        return True
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower().split("_")
    if _REFERENCE_WORDS.intersection(words):
        return False
    while len(words) > 1 and words[-1] in _WORDS_OF_TEXT:
        words.pop()
    singular = words[-1].removesuffix("s")
    return singular in _ANSWER_WORDS or words == ["assistant"]


def _prompt(prompt: Any, messages: list[Any], answers: Message, source: str) -> int:
    """Return the number of the first messages that the field `prompt` repeats, which are not trained.

    Raises:
        TreepackError: the prompt is not in the messages.
    """
    if is_empty(prompt):
        return 0
    if isinstance(prompt, list) and is_messages(prompt):
        parts = split_blocks(prompt)
        if _same(messages[: len(parts)], parts):
            return len(parts)
    elif isinstance(prompt, str) and any(prompt.strip() in _text(message) for message in messages):
        return 0
    raise TreepackError(
        f"{source}: messages do not contain the prompt, which is {shown(prompt)}; leave one of them out with --columns "
        f"ignore={'messages' if answers else 'prompt'}"
    )


def _is_rendering(text: Any, messages: list[Any]) -> bool:
    """Return whether `text` is a rendering of `messages`: it contains each of their texts."""
    whole = text if isinstance(text, str) else "\n".join(map(str, text)) if isinstance(text, list) else ""
    return bool(whole) and all(_text(message).strip() in whole for message in messages)


def _same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists have the same messages: roles, texts and calls."""
    return len(one) == len(other) and all(
        _role(a) == _role(b) and _text(a).strip() == _text(b).strip() and _calls(a) == _calls(b)
        for a, b in zip(one, other, strict=True)
    )


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _calls(message: Any) -> Any:
    return (message.get("tool_calls") or None) if isinstance(message, dict) else None


def _text(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))
