"""Conversations to text by the tokenizer's chat template, with the spans of characters that the model generated.

    messages[:k]      P = template(..., add_generation_prompt)   <|user|>Hi<|end|><|assistant|>
    messages[:k + 1]  F = template(...)                          <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                                                                               ~~~~~~~~~~~~ trained

The model generated the part of F that follows P. If a template has `{% generation %}` marks, the marks decide instead.
Each turn is rendered as its sampler saw it, without the messages after it, because templates rewrite earlier turns (for
example, they drop old reasoning). Templates run in the sandbox of transformers. `tokenization` turns the text into ids.
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
CLOCK = re.compile(r"\bstrftime_now\b")  # the only clock that transformers gives to a template
# One key and one value that no template prints by itself, so that finding them shows that the arguments were printed.
PROBE_TEXT = '{"probe_key": "probe_value"}'
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}
PROBE_ID = "probe0000"  # Mistral's templates accept only ids of nine letters and digits

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """A trained assistant turn: the rendering up to its end, and the spans of characters in it that are trained.

    `index` counts the assistant messages from 0, and `message` counts all messages. `weight` is the loss weight.
    """

    index: int
    message: int
    text: str
    spans: tuple[tuple[int, int], ...]
    weight: float


@dataclass(frozen=True, slots=True)
class _Setting:
    """Inputs of a template besides the messages, and the `source` that errors name."""

    source: str
    template: str
    tools: Tools
    variables: dict[str, Any]

    def at(self, source: str) -> _Setting:
        """Return the same inputs for another `source`."""
        return replace(self, source=source)


class ChatTemplate:
    """The chat template of one tokenizer, and the form of tool-call arguments that it renders."""

    def __init__(self, tokenizer: Any) -> None:
        """Take the template for conversations with tools, and the one for conversations without tools.

        Raises:
            TreepackError: the tokenizer has no chat template, or it has several and none is named default.
        """
        named, name = tokenizer.chat_template, tokenizer.name_or_path
        if not named:
            raise TreepackError(
                f"{name}: the tokenizer has no chat template; use a tokenizer that has one, or token ids"
            )
        if isinstance(named, dict) and "default" not in named:
            raise TreepackError(
                f"{name}: none of the chat templates {', '.join(sorted(named))} is named default; rename one to default"
            )
        self._plain = str(tokenizer.get_chat_template())
        self._with_tools = str(tokenizer.get_chat_template(tools=[PROBE_TOOL]))
        self._special_tokens = tokenizer.special_tokens_map
        # A token may be added as special without a role such as eos, and a token with a role may not be marked special.
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple({token.content for token in added if token.special} | set(tokenizer.all_special_tokens))
        # (template, with tools or not) -> how to convert arguments, or the reason why no form works. Probing renders
        # up to 24 short conversations, so it is done once per template.
        self._converters: dict[tuple[str, bool], Convert | str] = {}

    def turns(self, chat: Chat, *, tools: Tools, source: str) -> list[RenderedTurn]:
        """Render each assistant turn of `chat` that has a non-zero weight and generated text, as the last message.

        O(turns * length of the conversation), because each turn is rendered with all messages before it.

        Raises:
            TreepackError: the template refuses the messages, or does not continue its own generation prompt, or
                prints no form of the arguments of tool calls.
        """
        setting = self._setting(chat, tools, source)
        messages = self._with_arguments(chat.messages, setting)
        turns: list[RenderedTurn] = []
        index = -1
        for k, message in enumerate(messages):
            index += message["role"] == "assistant"
            if chat.message_weights[k] == 0:
                continue
            text, spans = self._render_turn(messages[: k + 1], setting.at(f"{source}: turn {k + 1}"))
            if spans:
                # The text ends with the last trained character: a newline after <|im_end|> belongs to the next prompt.
                turns.append(RenderedTurn(index, k, text[: spans[-1][1]], spans, chat.message_weights[k]))
        return turns

    def whole(self, chat: Chat, *, tools: Tools, source: str, prompt: bool = False) -> str:
        """Render all messages of `chat` at once, with `prompt` also the generation prompt.

        Raises:
            TreepackError: the template refuses the messages, or prints no form of the arguments of tool calls.
        """
        setting = self._setting(chat, tools, source)
        return _render(self._with_arguments(chat.messages, setting), setting, prompt=prompt)[0]

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens of the tokenizer, by one of which a turn may end."""
        return self._special

    def reads_clock(self, tools: Tools) -> bool:
        """Return True if the template for conversations with `tools` prints the date, so its text changes daily."""
        return CLOCK.search(self._template(tools)) is not None

    def _template(self, tools: Tools) -> str:
        return self._plain if tools is None else self._with_tools

    def _setting(self, chat: Chat, tools: Tools, source: str) -> _Setting:
        # Templates use bos_token and the like as variables; the conversation may set more, and overrides them.
        variables = self._special_tokens | (chat.chat_template_kwargs or {})
        return _Setting(source, self._template(tools), tools, variables)

    def _render_turn(self, messages: list[Message], setting: _Setting) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Render `messages`, and find the spans of characters that the model generated for the last message."""
        if GENERATION_MARK.search(setting.template):
            return _render_marked_turn(messages, setting)
        prompt, _ = _render(messages[:-1], setting, prompt=True)
        text, _ = _render(messages, setting)
        if not text.startswith(prompt):
            raise TreepackError(
                f"{setting.source}: the chat template does not continue its own generation prompt; "
                "use a template that does, or one with {% generation %} marks"
            )
        # "...Hello<|im_end|>\n" -> trained up to <|im_end|>; "...Hello\n" without a special token -> up to the newline.
        stripped = text.rstrip()
        # If nothing follows the prompt, the special token at the end belongs to the prompt.
        ends_special = stripped.endswith(self._special) and len(stripped) > len(prompt)
        end = len(stripped) if ends_special else len(text)
        return text, ((len(prompt), end),) if end > len(prompt) else ()

    def _with_arguments(self, messages: list[Message], setting: _Setting) -> list[Message]:
        """Convert the arguments of the tool calls in `messages` to the form that the template prints."""
        if not any(message.get("tool_calls") for message in messages):
            return messages
        key = (setting.template, setting.tools is not None)
        if key not in self._converters:
            self._converters[key] = _converter(replace(setting, variables=self._special_tokens))
        convert = self._converters[key]
        if isinstance(convert, str):
            raise TreepackError(
                f"{setting.source}: the chat template does not print the arguments of tool calls{convert}; "
                "use another template, or remove the tool calls"
            )
        return [_map_arguments(message, convert) if message.get("tool_calls") else message for message in messages]


def _render_marked_turn(messages: list[Message], setting: _Setting) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Render `messages`, and return the spans of the generation marks of the last message.

    Raises:
        TreepackError: the marks cannot be assigned to turns, or the last turn has none.
    """
    text, marks = _render(messages, setting, marks=True)
    num_assistant = sum(message["role"] == "assistant" for message in messages)
    if len(marks) == num_assistant:
        spans = marks[-1:]
    else:
        # Some turns have several marks, or none: the marks of the last turn start after the text of all others.
        before = _render(messages[:-1], setting)[0] if len(messages) > 1 else ""
        if not text.startswith(before):
            raise TreepackError(
                f"{setting.source}: the chat template has {len(marks)} generation marks for {num_assistant} "
                "assistant turns; mark each turn once"
            )
        spans = [mark for mark in marks if mark[0] >= len(before)]
    if not spans:
        raise TreepackError(
            f"{setting.source}: the chat template puts no generation mark on this turn; mark every assistant turn"
        )
    return text, tuple(span for span in spans if span[1] > span[0])


def _render(
    messages: list[Message], setting: _Setting, *, prompt: bool = False, marks: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """Render `messages`. Return the text and, with `marks`, the spans of its generation marks.

    Raises:
        TreepackError: the template raises anything.
    """
    # Imported here, because importing transformers is slow and token ids need no template.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=setting.tools,
            chat_template=setting.template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **setting.variables,
        )
    except Exception as error:  # a template is foreign code, which can raise anything
        message = str(error).strip().partition("\n")[0]
        # raise_exception('no system') of a template -> "no system"; 1 // 0 -> "ZeroDivisionError: integer division ..."
        kind = "" if isinstance(error, TemplateError) and message else type(error).__name__
        reason = ": ".join(part for part in (kind, message) if part)
        raise TreepackError(
            f"{setting.source}: the chat template refuses the messages ({reason}); fix them or use another template"
        ) from error
    return texts[0], spans[0] if marks else []


def _converter(setting: _Setting) -> Convert | str:
    """Return the conversion of tool-call arguments for a template, or if it prints no form, the reason in brackets.

    Arguments are JSON text or an object; a template prints one form, both or none. Some templates require or refuse a
    system message, tools, or a result after the call. The first probe whose arguments are printed in either form
    decides.
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
            # Text: the template must print it unchanged, because `tojson` would escape its quotes. Object: either quote
            # style of JSON is right, but 'probe_key' in single quotes is the repr of a Python dict.
            prints[type(arguments)] = (
                PROBE_TEXT in text if is_text else "probe_value" in text and "'probe_key'" not in text
            )
        # prints: {str: True, dict: True} -> unchanged; only str -> as text; only dict -> as object; none -> next probe.
        if prints.get(str):
            return _identity if prints.get(dict) else _as_text
        if prints.get(dict):
            return _as_object
    return reason


def _probes(*, with_tools: bool) -> Iterator[tuple[list[Message], Tools, list[Message]]]:
    """Yield messages before the call, tools, and messages after it, for each of 12 probes."""
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


def _identity(arguments: Any) -> Any:
    return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    """Parse JSON text. Text that is not JSON stays as it is, because a model may write anything."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
