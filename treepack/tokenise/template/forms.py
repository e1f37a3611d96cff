"""Determine by probes the form of messages that a chat template prints, and convert messages to this form.

    content                text, or [{"type": "text", "text": ...}] for templates of vision models
    empty content          "" or None, next to tool calls
    arguments of calls     JSON text, or an object

A probe is a short conversation. It has keys and values that no template prints on its own, so that finding them in the
text shows that the template printed them. A probe is rendered when a conversation needs its answer, once per template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from treepack.tokenise.template.rendering import (
    ANOTHER_TEMPLATE,
    Message,
    TemplateSetting,
    Tools,
    UnfaithfulError,
    render,
)

PROBE_TEXT = '{"probe_key": "probe_value"}'
OTHER_TEXT = '{"probe_key": "probe_other"}'
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "probe"}}},
    },
}
_PROBE_ID = "probe0000"  # Mistral's templates accept only ids of nine letters and digits
PROBE_CONTENT = "probe_content"
_USER: Message = {"role": "user", "content": "probe"}
_SYSTEM: Message = {"role": "system", "content": "probe"}
CONTEXTS = (
    [_USER],
    [_SYSTEM, _USER],
)  # shortest conversations before a turn; a template may refuse or require a system

_NO_CALLS = "the chat template does not print the arguments of tool calls"
_NO_RESULTS = "the chat template does not print the results of tool calls"
_NO_SYSTEM = "the chat template does not print the system message"
_ONE_CALL = "the chat template prints only one tool call of a turn"

_Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _CallForm:
    """The form of messages with tool calls: how to convert arguments, and the content if the text is missing."""

    convert: _Convert
    empty: str | None


class MessageForms:
    """The forms that one template prints, with tools or without; each is probed when it is first needed."""

    def __init__(self, setting: TemplateSetting) -> None:
        """Take from `setting` the template, the variables of every conversation, and whether there are tools."""
        self._has_tools = setting.tools is not None
        self.setting = replace(setting, source="probe", tools=[PROBE_TOOL] if self._has_tools else None)

    def check(self, messages: list[Message], source: str) -> None:
        """Refuse a conversation with messages that the template leaves out.

        Raises:
            UnfaithfulError: the template prints no tool call, only one of several, no result, or no system message.
        """
        calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
        if calls and isinstance(form := self._call_form, str):
            raise UnfaithfulError(f"{source}: {_NO_CALLS}{form}; {_remedy('remove the tool calls')}", _NO_CALLS)
        if any(len(each) > 1 for each in calls) and not self._prints_two_calls:
            raise UnfaithfulError(f"{source}: {_ONE_CALL}; {_remedy('split the turns with several calls')}", _ONE_CALL)
        roles = {message["role"] for message in messages}
        if "tool" in roles and not self._prints_results:
            raise UnfaithfulError(f"{source}: {_NO_RESULTS}; {_remedy('remove them')}", _NO_RESULTS)
        if "system" in roles and not self._prints_system:
            raise UnfaithfulError(
                f"{source}: {_NO_SYSTEM}; {_remedy('put it into the first user message')}", _NO_SYSTEM
            )

    def convert(self, message: Message) -> Message:
        """Return `message` in the form that the template prints."""
        changes: Message = {}
        form = self._call_form if message.get("tool_calls") else ""
        if isinstance(form, _CallForm):
            changes["tool_calls"] = [_converted(call, form.convert) for call in message["tool_calls"]]
            if message["content"] == "":
                changes["content"] = form.empty
        if self._takes_parts and isinstance(message["content"], str):
            changes["content"] = _parts(message["content"])
        return message | changes if changes else message

    @cached_property
    def _takes_parts(self) -> bool:
        """Return True if the template prints content in parts only, not as text."""
        conversations = [[*context, {"role": "assistant", "content": PROBE_CONTENT}] for context in CONTEXTS]
        as_text = [self._render(messages) for messages in conversations]
        if any(text is not None and PROBE_CONTENT in text for text in as_text):
            return False
        in_parts = [self._render(list(map(_with_parts, messages))) for messages in conversations]
        return any(text is not None and PROBE_CONTENT in text for text in in_parts)

    @cached_property
    def _call_form(self) -> _CallForm | str:
        """Return the form of messages with tool calls, or if the template prints none, the reason in brackets.

        Arguments are JSON text or an object; a template prints one form, both or none. Some templates require or refuse
        a system message, tools, or a result after the call. The first probe whose arguments are printed in either form
        decides. Some templates print the calls of a message only if its content is None.
        """
        reason = ""
        for empty, probe in product(("", None), self._probes()):
            prints: dict[type, str] = {}
            for arguments in (PROBE_TEXT, json.loads(PROBE_TEXT)):
                try:
                    text = self._render_calls(probe, [arguments], empty)
                except UnfaithfulError as error:
                    if empty is not None:  # many templates refuse None, with calls and without
                        reason = reason or " (" + str(error).partition("(")[2].rpartition(");")[0] + ")"
                    continue
                is_text = isinstance(arguments, str)
                # Text: the template must print it unchanged, because `tojson` would escape its quotes. Object: either
                # quote style of JSON is right, but 'probe_key' in single quotes is the repr of a Python dict.
                if PROBE_TEXT in text if is_text else "probe_value" in text and "'probe_key'" not in text:
                    prints[type(arguments)] = text
            # JSON for both -> unchanged; only text -> text; only an object, or an object in another form -> object;
            # none -> next probe. Gemma 4 prints an object as {probe_key:<|"|>probe_value<|"|>}, and text in two braces.
            if dict in prints and (str not in prints or PROBE_TEXT not in prints[dict]):
                return _CallForm(_as_object, empty)
            if str in prints:
                return _CallForm(_identity if dict in prints else _as_text, empty)
        return reason

    @cached_property
    def _prints_two_calls(self) -> bool:
        form = self._call_form
        if isinstance(form, str):
            return False
        arguments = [form.convert(PROBE_TEXT), form.convert(OTHER_TEXT)]
        texts = []
        for probe in self._probes():
            with suppress(UnfaithfulError):
                texts.append(self._render_calls(probe, arguments, form.empty))
        return _is_printed(texts, "probe_value", "probe_other")

    @cached_property
    def _prints_results(self) -> bool:
        """Return True if the template prints a message of role tool, after a call or, for text actions, without one."""
        form = self._call_form
        result = {"role": "tool", "tool_call_id": _PROBE_ID, "name": "probe", "content": PROBE_CONTENT}
        turns: list[Message] = [{"role": "assistant", "content": "probe"}]
        if isinstance(form, _CallForm):
            turns.insert(0, _calling([form.convert(PROBE_TEXT)], form.empty))
        ends: tuple[list[Message], ...] = ([], [{"role": "assistant", "content": "probe"}])
        conversations = [[*context, turn, result, *end] for turn, context, end in product(turns, CONTEXTS, ends)]
        return _is_printed(map(self._text, conversations), PROBE_CONTENT)

    @cached_property
    def _prints_system(self) -> bool:
        return _is_printed([self._text([{"role": "system", "content": PROBE_CONTENT}, _USER])], PROBE_CONTENT)

    def _text(self, messages: list[Message]) -> str | None:
        """Return the rendering of a probe, or None if the template refuses it."""
        return self._render(self._in_form(messages))

    def _in_form(self, messages: list[Message]) -> list[Message]:
        return [_with_parts(message) for message in messages] if self._takes_parts else messages

    def _render(self, messages: list[Message]) -> str | None:
        try:
            return render(messages, self.setting)
        except UnfaithfulError:
            return None

    def _probes(self) -> Iterator[tuple[list[Message], Tools, list[Message]]]:
        """Yield 12 probes: messages before the call, tools, and messages after the call."""
        result: Message = {"role": "tool", "tool_call_id": _PROBE_ID, "name": "probe", "content": "probe"}
        schemas: list[Tools] = [[PROBE_TOOL], None] if self._has_tools else [None, [PROBE_TOOL]]
        return product(CONTEXTS, schemas, ([], [result], [result, {"role": "assistant", "content": "probe"}]))

    def _render_calls(
        self, probe: tuple[list[Message], Tools, list[Message]], arguments: list[Any], empty: str | None
    ) -> str:
        leading, tools, trailing = probe
        messages = [*leading, _calling(arguments, empty), *trailing]
        return render(self._in_form(messages), replace(self.setting, tools=tools))


def calls_of(arguments: list[Any]) -> list[dict[str, Any]]:
    """Return calls of the probe tool with each of `arguments`."""
    return [
        {"id": f"{_PROBE_ID[:-1]}{i}", "type": "function", "function": {"name": "probe", "arguments": each}}
        for i, each in enumerate(arguments)
    ]


def _calling(arguments: list[Any], empty: str | None) -> Message:
    return {"role": "assistant", "content": empty, "tool_calls": calls_of(arguments)}


def _remedy(other: str) -> str:
    return f"{ANOTHER_TEMPLATE}, or {other}"


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_parts(message: Message) -> Message:
    return message | {"content": _parts(message["content"])} if isinstance(message["content"], str) else message


def _is_printed(texts: Iterable[str | None], *marks: str) -> bool:
    """Return True if one of `texts`, the renderings of probes, has all `marks`, or if the template refused all probes.

    A template that refuses all probes refuses the conversation too, and then the error of the template is clearer.
    """
    rendered = [text for text in texts if text is not None]
    return not rendered or any(all(mark in text for mark in marks) for text in rendered)


def _converted(call: dict[str, Any], convert: _Convert) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": convert(call["function"]["arguments"])}}


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
