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
from dataclasses import dataclass
from typing import Any

from treepack.errors import TreepackError
from treepack.trajectory import Chat

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE_TEXT = '{"probe_key": "probe_value"}'

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Turn:
    """A trained assistant turn: the rendering up to its end, and the spans of characters in it that are trained.

    `index` counts the assistant messages from 0, `message` all messages; `weight` is the message's loss weight.
    """

    index: int
    message: int
    text: str
    spans: tuple[tuple[int, int], ...]
    weight: float


class ChatTemplate:
    """The chat template of one tokenizer, and which form of tool-call arguments it renders."""

    def __init__(self, tokenizer: Any) -> None:
        """Probe the template with one tool call.

        Raises:
            TreepackError: the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise TreepackError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template; give one that has, or give token ids"
            )
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple({token.content for token in added if token.special} | set(tokenizer.all_special_tokens))
        self._takes_text = self._probe(PROBE_TEXT)
        self._takes_objects = self._probe(json.loads(PROBE_TEXT))

    def turns(self, chat: Chat, *, tools: Tools, source: str) -> list[Turn]:
        """The assistant turns of `chat` with non-zero weight and something generated, each rendered as its last.

        Raises:
            TreepackError: the template refuses the messages, or does not continue its own generation prompt.
        """
        messages = self._with_arguments(chat.messages)
        found: list[Turn] = []
        index = -1
        for k, message in enumerate(messages):
            index += message["role"] == "assistant"
            if chat.message_weights[k] == 0:
                continue
            text, spans = self._generated(messages[: k + 1], tools=tools, source=f"{source}: turn {k + 1}")
            if spans:
                found.append(Turn(index, k, text[: spans[-1][1]], spans, chat.message_weights[k]))
        return found

    def whole(self, chat: Chat, *, tools: Tools, source: str) -> str:
        """All messages of `chat`, rendered at once."""
        return self._render(self._with_arguments(chat.messages), tools=tools, source=source)[0]

    def _generated(
        self, messages: list[Message], *, tools: Tools, source: str
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The rendering of `messages` and what of it the last message generated."""
        if GENERATION_MARK.search(self._template(tools)):
            return self._marked(messages, tools=tools, source=source)
        prompt, _ = self._render(messages[:-1], tools=tools, source=source, prompt=True)
        text, _ = self._render(messages, tools=tools, source=source)
        if not text.startswith(prompt):
            raise TreepackError(
                f"{source}: the chat template does not continue its own generation prompt; "
                "use one that does, or one with {% generation %} marks"
            )
        stripped = text.rstrip()
        ends_special = stripped.endswith(self._special) and len(stripped) > len(prompt)
        end = len(stripped) if ends_special else len(text)
        return text, ((len(prompt), end),) if end > len(prompt) else ()

    def _marked(self, messages: list[Message], *, tools: Tools, source: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        text, marks = self._render(messages, tools=tools, source=source, marks=True)
        num_assistant = sum(message["role"] == "assistant" for message in messages)
        if len(marks) == num_assistant:
            own = marks[-1:]
        else:
            before = self._render(messages[:-1], tools=tools, source=source)[0] if len(messages) > 1 else ""
            if not text.startswith(before):
                raise TreepackError(
                    f"{source}: the chat template has {len(marks)} generation marks for {num_assistant} "
                    "assistant turns; mark each turn once"
                )
            own = [mark for mark in marks if mark[0] >= len(before)]
        if not own:
            raise TreepackError(f"{source}: the chat template puts no generation mark on it; mark every assistant turn")
        return text, tuple(mark for mark in own if mark[1] > mark[0])

    def _template(self, tools: Tools) -> str:
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _render(
        self, messages: list[Message], *, tools: Tools, source: str, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `messages`, and the spans of its generation marks if they are asked for."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, found = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._template(tools),
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise TreepackError(
                f"{source}: the chat template refuses the messages ({error}); mend them or use another template"
            ) from error
        return rendered[0], found[0] if marks else []

    def _probe(self, arguments: str | dict[str, str]) -> bool:
        """Whether a tool call's `arguments` come out as the JSON they are."""
        call = {"id": "call_0_0", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            text, _ = self._render(messages, tools=None, source="probe")
        except TreepackError:
            return False
        return PROBE_TEXT in text if isinstance(arguments, str) else "probe_value" in text and "'probe_key'" not in text

    def _with_arguments(self, messages: list[Message]) -> list[Message]:
        """`messages` with the arguments of their tool calls in the form that the template renders."""
        if self._takes_text and self._takes_objects:
            return messages
        if not self._takes_text and not self._takes_objects:
            return messages
        convert = _as_text if self._takes_text else _as_object
        return [_map_arguments(message, convert) if message.get("tool_calls") else message for message in messages]


def _map_arguments(message: Message, convert: Any) -> Message:
    calls = [
        call | {"function": call["function"] | {"arguments": convert(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    """The object that JSON text holds; text that a model wrote and that is no JSON stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments
