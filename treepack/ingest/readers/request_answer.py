"""Find prompt and answer in a record of chat, whatever fields they are in.

    messages [user, assistant]                             all turns are trained
    messages [user, assistant, user], completion [answer]  the answer alone is trained: it answers the last message
    messages [.., answer], response "answer"               the answer is there twice, so all turns are trained
    prompt [user], completion [answer], messages [both]    the answer alone is trained
    messages [.., assistant "A"], response "B"             refused: two answers

A record with an answer beside its messages is the usual log of a request: the turns in the request belong to other
calls. Reading the messages alone would train those turns and lose the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.content_blocks import split_blocks
from treepack.ingest.readers.fields import shown
from treepack.ingest.readers.messages import is_messages
from treepack.ingest.readers.unread import is_empty

Message = dict[str, Any]

# Names of the answer beside the messages of a request, as text, a message, or a list of messages.
ANSWER_FIELDS = tuple(
    "completion response output generation generated_text model_output model_response raw_output raw_response "
    "prediction reply assistant assistant_response answer".split()
)
# Names of a text that a template made of the messages.
RENDERED = ("text", "texts")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages in the form of chat, the first `num_prompt` of which are not trained.

    `used` are the fields of the record that became messages or repeat them, and `notes` name those that repeat.
    """

    messages: list[Any]
    num_prompt: int
    used: frozenset[str]
    notes: tuple[str, ...] = ()


def dialogue(value: Message, source: str) -> Dialogue:
    """Return the dialogue of a record that has `messages`.

    Raises:
        TreepackError: fields contradict each other, or one of them cannot be understood.
    """
    messages = split_blocks(message_list(value["messages"], "messages", source))
    answers = _answers(value, messages, source)
    prompt = _prompt(value.get("prompt"), messages, answers, source)
    rendered = [name for name in RENDERED if _is_rendering(value.get(name), messages)]
    used = frozenset({"messages", "prompt", *answers, *rendered})
    notes = tuple(f"field '{name}' not used, because it repeats the messages" for name in rendered)
    if not answers:
        return Dialogue(messages, prompt, used, notes)
    name, answer = next(iter(answers.items()))
    if _same(messages[len(messages) - len(answer) :], answer):
        notes += (f"field '{name}' not used, because the messages end with it",)
        # With the prompt as messages too, the rest is the answer; otherwise earlier turns are of this rollout as well.
        return Dialogue(messages, prompt, used, notes)
    if messages and _role(messages[-1]) in ("assistant", "model"):
        raise TreepackError(
            f"{source}: messages end with an answer, and {name} is another one; say which one was sampled with "
            f"--columns answer={name}, or leave it out with --columns ignore={name}"
        )
    return Dialogue([*messages, *answer], len(messages), used, notes)


def answer_messages(answer: Any) -> list[Any] | None:
    """Return an answer as messages: a text, one message, or a list of messages; None if it is something else."""
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], str):
        answer = answer[0]
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    if isinstance(answer, dict) and ("content" in answer or "tool_calls" in answer):
        return split_blocks([{"role": "assistant"} | answer])
    return split_blocks(answer) if is_messages(answer) and all("role" in each for each in answer) else None


def message_list(value: Any, name: str, source: str) -> list[Any]:
    """Return the list `value` of messages; an object of columns is one: {"role": [..], "content": [..]}.

    Raises:
        TreepackError: it is something else.
    """
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        sizes = {len(column) for column in value.values()}
        if len(sizes) == 1:
            return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected a list of messages")
    return value


def texts_of(talk: Any) -> list[str]:
    """Return the texts of messages, or of one text."""
    return [talk] if isinstance(talk, str) else [_text(each) for each in talk] if isinstance(talk, list) else []


def _answers(value: Message, messages: list[Any], source: str) -> dict[str, list[Any]]:
    """Return the answers beside the messages by their fields; all are equal."""
    answers: dict[str, list[Any]] = {}
    for name in ANSWER_FIELDS:
        if is_empty(value.get(name)):
            continue
        # An `answer` beside a whole conversation is what a task expects, such as a number.
        if name == "answer" and messages and _role(messages[-1]) == "assistant":
            continue
        answer = answer_messages(value[name])
        if answer is None:
            raise TreepackError(
                f"{source}: {name} is {shown(value[name])}; expected the answer to the messages as text or messages; "
                f"leave it out with --columns ignore={name}"
            )
        first = next(iter(answers), None)
        if first is not None and not _same(answers[first], answer):
            raise TreepackError(
                f"{source}: {first} and {name} are different answers; say which one was sampled with --columns "
                f"answer={name}, and leave the other out with --columns ignore={first}"
            )
        answers[name] = answer
    return answers


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
    """Return whether `text` is what a template makes of `messages`: it contains each of their texts."""
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
