"""An oracle for trained spans of conversations: a unique marker in each text of each message, and what must follow.

    {"role": "user", "content": "Hi"}                         {"role": "user", "content": "mark0cz"}
    {"role": "assistant", "content": "", "tool_calls": ...}   ... arguments {"city": "mark1a0z"}

It looks at decoded samples only, and renders with transformers itself, so it shares no code with the spans it checks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from treepack.trajectory import Chat, Skipped, Tokens, Trajectory

Message = dict[str, Any]

GENERATION = re.compile(r"\{%-?\s*generation\b")
MARK = re.compile(r"mark(\d+)([crax])(\d*)z")


@dataclass(frozen=True)
class DecodedSample:
    """The text of a sample, and the character spans of it that are trained."""

    text: str
    spans: list[tuple[int, int]]

    @property
    def trained(self) -> list[str]:
        """The text of each span."""
        return [self.text[start:end] for start, end in self.spans]


def marked(chat: Chat, *, limit: int = 12) -> Chat:
    """Return the first `limit` messages of `chat`, with every text replaced by a marker of its message.

    The letter of a marker is its kind: c content, r reasoning, a argument of a call, x a text that is no assistant's.
    """
    messages = []
    for i, message in enumerate(chat.messages[:limit]):
        new = dict(message)
        is_assistant = message["role"] == "assistant"
        text = message.get("content") or ""
        if text.strip():
            new["content"] = f"mark{i}{'c' if is_assistant else 'x'}z"
            if is_assistant and "</think>" in text:
                new["content"] = f"<think>\nmark{i}rz\n</think>\n\nmark{i}cz"
        if (message.get("reasoning_content") or "").strip():
            new["reasoning_content"] = f"mark{i}rz"
        if message.get("tool_calls"):
            new["tool_calls"] = [_marked_call(call, i, j) for j, call in enumerate(message["tool_calls"])]
        messages.append(new)
    cuts = None if chat.message_cuts is None else chat.message_cuts[:limit]
    return replace(chat, messages=messages, message_weights=chat.message_weights[:limit], message_cuts=cuts)


def _marked_call(call: dict[str, Any], i: int, j: int) -> dict[str, Any]:
    """Return `call` number j of message i, with a marker for each of its arguments."""
    arguments = call["function"]["arguments"]
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = None
    if not isinstance(value, dict):
        new: Any = f"mark{i}a{100 * j}z"
    else:
        new = {key: f"mark{i}a{100 * j + n}z" for n, key in enumerate(value)}
        new = json.dumps(new) if isinstance(arguments, str) else new
    return call | {"function": call["function"] | {"arguments": new}}


def decode(tokenizer: Any, sample: Trajectory) -> DecodedSample:
    """Return the text of `sample`, piece by piece between the ends of its spans."""
    content = sample.content
    assert isinstance(content, Tokens)
    ends = [0, *(int(p) for span in zip(content.starts, content.ends, strict=True) for p in span), len(content.tokens)]
    texts = [tokenizer.decode(content.tokens[a:b], clean_up_tokenization_spaces=False) for a, b in pairwise(ends)]
    places = [0]
    for text in texts:
        places.append(places[-1] + len(text))
    # Pieces alternate: context, span, context, span, ..., context. places[1] to places[2] is the first span.
    return DecodedSample("".join(texts), list(zip(places[1:-1:2], places[2::2], strict=True)))


def render(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any, variables: dict[str, Any], **more: Any
) -> str:
    """Render `messages` with transformers alone, in the form that the template prints."""
    form = _form(tokenizer, tokenizer.chat_template)
    return _render([_in_form(message, form) for message in messages], tokenizer, tools=tools, **variables, **more)


def _render(messages: list[Message], tokenizer: Any, **more: Any) -> str:
    # Not `apply_chat_template`, which removes content that is None; servers pass it to the template.
    texts, _ = render_jinja_template(
        conversations=[messages], chat_template=tokenizer.chat_template, **tokenizer.special_tokens_map, **more
    )
    return str(texts[0])


# Content as text or as parts, arguments of calls as objects or as text, empty content beside calls as "" or None. A
# template takes the first of these forms in which it prints all of a conversation with a call, or else without one.
FORMS = list(product((False, True), (False, True), ("", None)))
Form = tuple[bool, bool, str | None]


def _form(tokenizer: Any, template: str) -> Form:
    if template not in _FORM_OF_TEMPLATE:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"k": "mark1a0z"}}}
        asks: Message = {"role": "user", "content": "mark0xz"}
        calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        says: Message = {"role": "assistant", "content": "mark1cz"}
        printed = [form for turn in (calls, says) for form in FORMS if _prints(tokenizer, [asks, turn], form)]
        _FORM_OF_TEMPLATE[template] = printed[0] if printed else FORMS[0]
    return _FORM_OF_TEMPLATE[template]


_FORM_OF_TEMPLATE: dict[str, Form] = {}


def _prints(tokenizer: Any, messages: list[Message], form: Form) -> bool:
    try:
        text = _render([_in_form(message, form) for message in messages], tokenizer)
    except Exception:  # the template refuses this form
        return False
    # {"k": ...} as text in the braces of an object is no JSON: {{"k": ...}}
    return len(MARK.findall(text)) == 2 and "{{" not in text


def _in_form(message: Message, form: Form) -> Message:
    in_parts, as_text, empty = form
    content = message.get("content")
    if calls := message.get("tool_calls"):
        content = content or empty
        arguments = [json.dumps(_object(call)) if as_text else _object(call) for call in calls]
        calls = [c | {"function": c["function"] | {"arguments": a}} for c, a in zip(calls, arguments, strict=True)]
        message = message | {"tool_calls": calls}
    if in_parts and content is not None:
        return message | {"content": [{"type": "text", "text": content}]}
    return message | {"content": content}


def _object(call: dict[str, Any]) -> Any:
    arguments = call["function"]["arguments"]
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def end_of_turn(tokenizer: Any) -> str:
    """Return the text that the template writes after the last message of an assistant, without the last newline."""
    messages = [{"role": "user", "content": "mark0xz"}, {"role": "assistant", "content": "mark1cz"}]
    return render(tokenizer, messages, None, {}).partition("mark1cz")[2].rstrip()


def stop_of_turn(tokenizer: Any, following: str) -> str:
    """Return the text by which a turn without calls stops a sampler, before a message of the role `following`.

    That is the end of the turn, or if the template writes none, the special token that begins the next message.
    """
    if end := end_of_turn(tokenizer):
        return end
    messages = [{"role": "user", "content": "mark0xz"}, {"role": "assistant", "content": "mark1cz"}]
    try:
        text = render(tokenizer, [*messages, {"role": following, "content": "mark2xz"}], None, {})
    except Exception:  # the template refuses such a conversation
        return ""
    after = text.partition("mark1cz")[2].lstrip()
    is_next = following != "assistant"
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return next((token for token in special if is_next and after.startswith(token)), "")


def faults(tokenizer: Any, chat: Chat, samples: list[Trajectory | Skipped], tools: Any) -> list[str]:
    """Return what is wrong with `samples` of the marked conversation `chat`: nothing if they are right or skipped."""
    if any(isinstance(sample, Skipped) for sample in samples):
        return [] if len(samples) == 1 else ["a skip beside samples of the same conversation"]
    decoded = [decode(tokenizer, sample) for sample in samples if isinstance(sample, Trajectory)]
    trained = [text for sample in decoded for text in sample.trained]
    return [
        *_faults_of_markers(chat, trained),
        *_faults_of_reasoning(tokenizer, chat, trained, tools),
        *_faults_of_ends(tokenizer, chat, trained),
        *(fault for sample in decoded for fault in _faults_of_order(sample)),
    ]


def _faults_of_markers(chat: Chat, trained: list[str]) -> list[str]:
    """Each text of a trained message must be trained once, and no other text."""
    counts = Counter(match[0] for text in trained for match in MARK.finditer(text))
    wanted = Counter[str]()
    for message, weight in zip(chat.messages, chat.message_weights, strict=True):
        if weight:
            texts = [
                message.get("content") or "",
                *(json.dumps(c["function"]) for c in message.get("tool_calls") or []),
            ]
            wanted.update(match[0] for text in texts for match in MARK.finditer(text) if match[2] != "r")
    wrong = []
    for mark in sorted(counts.keys() | wanted.keys()):
        kind = MARK.fullmatch(mark)
        assert kind
        if kind[2] == "r":
            i = int(kind[1])
            if counts[mark] > 1 or not chat.message_weights[i]:
                wrong.append(f"{mark} is trained {counts[mark]} times")
        elif counts[mark] != wanted[mark]:
            wrong.append(f"{mark} is trained {counts[mark]} times and should be {wanted[mark]} times")
    return wrong


def _faults_of_reasoning(tokenizer: Any, chat: Chat, trained: list[str], tools: Any) -> list[str]:
    """If the template prints the reasoning of a message that comes last, it must be trained."""
    wrong = []
    for i, message in enumerate(chat.messages):
        mark = f"mark{i}rz"
        if chat.message_weights[i] and mark in json.dumps(message) and not any(mark in text for text in trained):
            try:
                text = render(tokenizer, chat.messages[: i + 1], tools, chat.chat_template_kwargs or {})
            except Exception:  # the template refuses what our own rendering has mended
                continue
            if mark in text:
                wrong.append(f"{mark} is printed and not trained")
    return wrong


def _faults_of_ends(tokenizer: Any, chat: Chat, trained: list[str]) -> list[str]:
    """A turn without calls must end as its sampler ended it, unless generation marks decide where it ends."""
    if GENERATION.search(tokenizer.chat_template):
        return []
    wrong = []
    for text in trained:
        marks = list(MARK.finditer(text))
        if not marks or chat.messages[place := int(marks[-1][1])].get("tool_calls"):
            continue
        following = chat.messages[place + 1]["role"] if place + 1 < len(chat.messages) else "user"
        is_cut = chat.message_cuts is not None and chat.message_cuts[place]
        end = "" if is_cut else stop_of_turn(tokenizer, following)
        if text[marks[-1].end() :].strip() != end:
            wrong.append(f"{marks[-1][0]} ends with {text[marks[-1].end() :]!r} and should with {end!r}")
    return wrong


def _faults_of_order(sample: DecodedSample) -> list[str]:
    """Trained messages stand in their order; a prompt may repeat text, because templates do so in earlier turns."""
    order = [int(match[1]) for text in sample.trained for match in MARK.finditer(text)]
    return [] if order == sorted(order) else [f"the trained messages stand in the order {order}"]


def faults_of_prompt(tokenizer: Any, chat: Chat, sample: Trajectory, tools: Any) -> list[str]:
    """Return what is wrong with the prompt of `sample`, one turn: it must end with the generation prompt."""
    decoded = decode(tokenizer, sample)
    marks = list(MARK.finditer("".join(decoded.trained)))
    if not marks:
        return []
    i = int(marks[0][1])
    prompt = render(tokenizer, chat.messages[:i], tools, chat.chat_template_kwargs or {}, add_generation_prompt=True)
    before = decoded.text[: decoded.spans[0][0]]
    if GENERATION.search(tokenizer.chat_template):
        # The marks decide: some count the whole header of the turn to it, and some leave out more than the header.
        longer, shorter = sorted((prompt, before), key=len, reverse=True)
        is_same = longer.startswith(shorter) and not MARK.search(longer[len(shorter) :])
    else:
        # A block that the prompt opened may be closed before the turn, if the turn has no reasoning.
        is_same = before.startswith(prompt) and not re.sub(r"</?think>|\s", "", before[len(prompt) :])
    return [] if is_same else [f"turn {i} has another prompt: {before[-80:]!r} for {prompt[-80:]!r}"]
