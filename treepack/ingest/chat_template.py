"""Conversations to text by the tokenizer's chat template, with the characters that the model generated.

    messages[:k]      P = template(..., add_generation_prompt)   <|user|>Hi<|end|><|assistant|>
    messages[:k + 1]  F = template(...)                          <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                                                                               ~~~~~~~~~~~~ trained

What turn k generated is F behind P. A template with `{% generation %}` marks says it itself, and is believed. Each turn
is rendered as its sampler saw it, with nothing behind it, because templates rewrite earlier turns (dropping old
reasoning, say). Templates run in the sandbox of transformers; turning text into ids is left to `tokenization`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from treepack.errors import TreepackError
from treepack.trajectory import Chat

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = re.compile(r"\bstrftime_now\b")
PROBE_TEXT = '{"probe_key": "probe_value"}'
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}
PROBE_ID = "probe0000"  # Mistral's templates take ids of nine letters and digits only

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A trained assistant turn: the rendering up to its end, and the spans of characters in it that are trained.

    `index` counts the assistant messages from 0, `message` all messages; `weight` is the message's loss weight.
    """

    index: int
    message: int
    text: str
    spans: tuple[tuple[int, int], ...]
    weight: float


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a template is rendered with besides the messages, and the `source` that errors name."""

    source: str
    template: str
    tools: Tools
    variables: dict[str, Any]

    def at(self, source: str) -> _Setting:
        return replace(self, source=source)


class ChatTemplate:
    """The chat template of one tokenizer, and which form of tool-call arguments it renders."""

    def __init__(self, tokenizer: Any) -> None:
        """Take the template for conversations with tools, and the one for those without.

        Raises:
            TreepackError: the tokenizer has no chat template, or several and none of them is the default.
        """
        named, name = tokenizer.chat_template, tokenizer.name_or_path
        if not named:
            raise TreepackError(f"{name}: the tokenizer has no chat template; give one that has, or give token ids")
        if isinstance(named, dict) and "default" not in named:
            raise TreepackError(
                f"{name}: none of the chat templates {', '.join(sorted(named))} is named default; name one so"
            )
        self._plain = str(tokenizer.get_chat_template())
        self._with_tools = str(tokenizer.get_chat_template(tools=[PROBE_TOOL]))
        self._special_tokens = tokenizer.special_tokens_map
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple({token.content for token in added if token.special} | set(tokenizer.all_special_tokens))
        self._converters: dict[tuple[str, bool], Convert | str] = {}

    def turns(self, chat: Chat, *, tools: Tools, source: str) -> list[RenderedTurn]:
        """The assistant turns of `chat` with non-zero weight and something generated, each rendered as its last.

        Raises:
            TreepackError: the template refuses the messages, or does not continue its own generation prompt, or
                renders no form of the arguments of tool calls.
        """
        setting = self._setting(chat, tools, source)
        messages = self._with_arguments(chat.messages, setting)
        found: list[RenderedTurn] = []
        index = -1
        for k, message in enumerate(messages):
            index += message["role"] == "assistant"
            if chat.message_weights[k] == 0:
                continue
            text, spans = self._generated(messages[: k + 1], setting.at(f"{source}: turn {k + 1}"))
            if spans:
                found.append(RenderedTurn(index, k, text[: spans[-1][1]], spans, chat.message_weights[k]))
        return found

    def whole(self, chat: Chat, *, tools: Tools, source: str) -> str:
        """All messages of `chat`, rendered at once."""
        setting = self._setting(chat, tools, source)
        return _render(self._with_arguments(chat.messages, setting), setting)[0]

    def reads_clock(self, tools: Tools) -> bool:
        """Whether the template for conversations with `tools` asks for today's date, so that its text changes daily."""
        return CLOCK.search(self._template(tools)) is not None

    def _template(self, tools: Tools) -> str:
        return self._plain if tools is None else self._with_tools

    def _setting(self, chat: Chat, tools: Tools, source: str) -> _Setting:
        variables = self._special_tokens | (chat.chat_template_kwargs or {})
        return _Setting(source, self._template(tools), tools, variables)

    def _generated(self, messages: list[Message], setting: _Setting) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The rendering of `messages` and what of it the last message generated."""
        if GENERATION_MARK.search(setting.template):
            return _marked(messages, setting)
        prompt, _ = _render(messages[:-1], setting, prompt=True)
        text, _ = _render(messages, setting)
        if not text.startswith(prompt):
            raise TreepackError(
                f"{setting.source}: the chat template does not continue its own generation prompt; "
                "use one that does, or one with {% generation %} marks"
            )
        stripped = text.rstrip()
        ends_special = stripped.endswith(self._special) and len(stripped) > len(prompt)
        end = len(stripped) if ends_special else len(text)
        return text, ((len(prompt), end),) if end > len(prompt) else ()

    def _with_arguments(self, messages: list[Message], setting: _Setting) -> list[Message]:
        """`messages` with the arguments of their tool calls in the form that the template renders."""
        if not any(message.get("tool_calls") for message in messages):
            return messages
        key = (setting.template, setting.tools is not None)
        if key not in self._converters:
            self._converters[key] = _converter(replace(setting, variables=self._special_tokens))
        convert = self._converters[key]
        if isinstance(convert, str):
            raise TreepackError(
                f"{setting.source}: the chat template prints the arguments of no tool call{convert}; "
                "use another template, or take the tool calls out"
            )
        return [_map_arguments(message, convert) if message.get("tool_calls") else message for message in messages]


def _marked(messages: list[Message], setting: _Setting) -> tuple[str, tuple[tuple[int, int], ...]]:
    text, marks = _render(messages, setting, marks=True)
    num_assistant = sum(message["role"] == "assistant" for message in messages)
    if len(marks) == num_assistant:
        own = marks[-1:]
    else:
        before = _render(messages[:-1], setting)[0] if len(messages) > 1 else ""
        if not text.startswith(before):
            raise TreepackError(
                f"{setting.source}: the chat template has {len(marks)} generation marks for {num_assistant} "
                "assistant turns; mark each turn once"
            )
        own = [mark for mark in marks if mark[0] >= len(before)]
    if not own:
        raise TreepackError(
            f"{setting.source}: the chat template puts no generation mark on it; mark every assistant turn"
        )
    return text, tuple(mark for mark in own if mark[1] > mark[0])


def _render(
    messages: list[Message], setting: _Setting, *, prompt: bool = False, marks: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """The text of `messages`, and the spans of its generation marks if they are asked for."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, found = render_jinja_template(
            conversations=[messages],
            tools=setting.tools,
            chat_template=setting.template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **setting.variables,
        )
    except Exception as error:  # a template is foreign code, which can raise anything
        said = str(error).strip().partition("\n")[0]
        kind = "" if isinstance(error, TemplateError) and said else type(error).__name__
        reason = ": ".join(part for part in (kind, said) if part)
        raise TreepackError(
            f"{setting.source}: the chat template refuses the messages ({reason}); mend them or use another template"
        ) from error
    return rendered[0], found[0] if marks else []


def _converter(setting: _Setting) -> Convert | str:
    """What brings a tool call's arguments to the form that the template renders, or why there is none, in brackets.

    Templates differ in what they insist on: with or without a system message, tools, and a result behind the call. The
    first probe that is rendered in either form decides.
    """
    reason = ""
    for leading, tools, trailing in _probes(with_tools=setting.tools is not None):
        probe = replace(setting, source="probe", tools=tools)
        prints: dict[type, bool] = {}
        for arguments in (PROBE_TEXT, json.loads(PROBE_TEXT)):
            call = {"id": PROBE_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
            messages = [*leading, {"role": "assistant", "content": "", "tool_calls": [call]}, *trailing]
            try:
                text, _ = _render(messages, probe)
            except TreepackError as error:
                reason = reason or " (" + str(error).partition("(")[2].rpartition(");")[0] + ")"
                continue
            is_text = isinstance(arguments, str)
            prints[type(arguments)] = (
                PROBE_TEXT in text if is_text else "probe_value" in text and "'probe_key'" not in text
            )
        if prints.get(str):
            return _unchanged if prints.get(dict) else _as_text
        if prints.get(dict):
            return _as_object
    return reason


def _probes(*, with_tools: bool) -> Iterator[tuple[list[Message], Tools, list[Message]]]:
    """Messages before the call, tools, and messages behind it, for each probe."""
    user: Message = {"role": "user", "content": "probe"}
    result: Message = {"role": "tool", "tool_call_id": PROBE_ID, "name": "probe", "content": "probe"}
    schemas: list[Tools] = [[PROBE_TOOL], None] if with_tools else [None, [PROBE_TOOL]]
    return product(
        ([user], [{"role": "system", "content": "probe"}, user]),
        schemas,
        ([], [result], [result, {"role": "assistant", "content": "probe"}]),
    )


def _map_arguments(message: Message, convert: Convert) -> Message:
    calls = [
        call | {"function": call["function"] | {"arguments": convert(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _unchanged(arguments: Any) -> Any:
    return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    """The object that JSON text holds; text that a model wrote and that is no JSON stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
