"""Chat messages in the forms of various logs, converted to the one form that chat templates read.

    {role, content: str | parts | null, tool_calls: flat | nested, function_call, reasoning, ...}
        --normalise_messages-->  {role, content: str, tool_calls: nested, tool_call_id, name, reasoning_content}

Readers call `content_blocks.split_blocks` before, because it changes the number of messages.

Tool-call arguments stay a string or an object, as they are in the log; `template.forms` converts them to the form that
a template prints. A call without an id gets an id of nine letters and digits, because Mistral's templates accept no
other form. Errors count messages from 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from treepack.errors import TreepackError
from treepack.ingest.readers import endings
from treepack.ingest.readers.fields import BadValueError, fault_in_json, quoted, shown
from treepack.ingest.readers.turn_weights import WEIGHT_FIELDS, weight_of
from treepack.ingest.readers.unread import MASK, danger, is_empty

ROLES = frozenset({"system", "user", "assistant", "tool"})
RENAMED_ROLES = {"developer": "system", "function": "tool", "human": "user", "model": "assistant", "ai": "assistant"}
KEPT = ("name", "tool_call_id")  # copied as they are
# Names of the reasoning of a turn in APIs and data sets: text, or parts with text. The first one counts.
REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "reasoning_text",
    "thought",
    "thoughts",
    "reasoning_details",
    "thinking_blocks",
)
# Names of the calls of a turn: a list, or one call. The first one counts.
CALLS = ("tool_calls", "tool_call", "toolCalls", "function_calls", "functionCall")
# Names of the text in a part of reasoning, and of its summary.
REASONING_TEXTS = ("text", "thinking", "reasoning", "content", "summary")
# Names of the arguments of a call.
ARGUMENTS = ("arguments", "args", "input", "parameters")
# Fields of a message that are read; every other field becomes a note.
READ = frozenset(
    [
        *KEPT,
        *REASONING,
        *"role content refusal tool_calls function_call".split(),
        *WEIGHT_FIELDS,
    ]
)
# Fields of parts and calls that say nothing about their text.
OF_PARTS = frozenset({"type", "text"})
OF_CALLS = frozenset({"id", "type", "function", "index", "name"})
NO_CONTENT = "message without content"
MEDIA = ("images", "videos", "audios")
# Names of the tool schemas of a record, and of the parameters of a schema.
TOOLS = frozenset("tools functions tool_definitions tool_schemas available_tools".split())
PARAMETERS = ("input_schema", "inputSchema", "parameters_json_schema", "parametersJsonSchema", "json_schema", "schema")
# Variables that `chat_template` passes to the template itself, or that would change its mode.
RESERVED = frozenset(
    "messages conversations tools chat_template add_generation_prompt continue_final_message "
    "return_assistant_tokens_mask".split()
)


@dataclass(frozen=True, slots=True)
class Messages:
    """Normalised messages, the loss weight of each (0 for every role but assistant), and remarks to be counted.

    `cuts[i]` is True if message i is an answer that a limit or a filter cut.
    """

    messages: list[dict[str, Any]]
    weights: list[float]
    notes: tuple[str, ...]
    cuts: list[bool]


def is_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return True if `value` is a list of dicts, the container of messages; it may be empty."""
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def has_media(record: dict[str, Any]) -> bool:
    """Return True if `record` has images, videos or sounds in a field of its own; messages then have placeholders."""
    # An empty list is no media: exporters write the field for every record of a mixed data set.
    values = (record.get(name) for name in MEDIA)
    return any(isinstance(value, list | str | dict) and len(value) > 0 for value in values)


def normalise_messages(messages: Sequence[Any], *, source: str, before: Messages | None = None) -> Messages:
    """Return the messages of one conversation in normal form; with `before`, the messages of `before` come first.

    Raises:
        TreepackError: a role is unknown, content is not text, or a tool call is malformed; the message names the place.
    """
    done: list[dict[str, Any]] = list(before.messages) if before else []
    weights: list[float] = list(before.weights) if before else []
    cuts: list[bool] = list(before.cuts) if before else []
    # A dict without values is an ordered set: each note once, in the order of the messages.
    notes: dict[str, None] = dict.fromkeys(before.notes if before else ())
    for index, message in enumerate(messages, len(done)):
        where = f"{source}: message {index + 1}"
        if not isinstance(message, dict):
            raise TreepackError(f"{where} is {shown(message)}; expected an object with role and content")
        role = _role(message, where)
        if message["role"] in RENAMED_ROLES and message["role"] != "function":
            notes[f"role '{message['role']}' read as '{role}'"] = None
        content = message.get("content")
        # {"ok": true}, the result of a tool as an object, is no part of a content
        if role == "tool" and isinstance(content, dict) and not content.keys() & {"type", "text"}:
            content = json.dumps(content, ensure_ascii=False, default=str)
        normal: dict[str, Any] = {"role": role, "content": _content(content, where, notes)}
        reasoning, used = _reasoning(message, where)
        # SWE-agent writes the text of a turn twice, as content and as thought.
        if reasoning and reasoning.strip() == normal["content"].strip():
            reasoning = None
            notes["reasoning not used, because it repeats the content"] = None
        if reasoning is not None:
            normal["reasoning_content"] = reasoning
        others = () if message.get(CALLS[0]) else CALLS[1:]
        named = next((name for name in others if _has_calls(message.get(name))), CALLS[0])
        used |= {named}
        if calls := _tool_calls(message, named, index, where, notes):
            if role != "assistant":
                raise TreepackError(f"{where} has role '{role}' and tool calls; only the assistant can call a tool")
            normal["tool_calls"] = calls
        # A refusal is text that the model wrote in place of the content.
        if message.get("content") is None and isinstance(message.get("refusal"), str):
            normal["content"] = message["refusal"]
            used |= {"refusal"}
        is_cut, more = _ending(message, normal) if role == "assistant" else (False, ())
        if not is_cut:  # a filter may leave nothing
            _check_content(message, normal, where, notes)
        normal.update({key: _name(message[key], key, where) for key in KEPT if message.get(key) is not None})
        # OpenAI's older form has no ids: a message of role "function" is the result of the call just before it.
        if message["role"] == "function" and "tool_call_id" not in normal and done:
            normal.update(_id_of_last_call(done))
        done.append(normal)
        weight, remarks = weight_of(message, where) if role == "assistant" else (0.0, ())
        weights.append(0.0 if endings.EMPTY_NOTE in more else weight)
        cuts.append(is_cut)
        notes |= dict.fromkeys((*remarks, *more))
        if role != "assistant" and any(message.get(name) is True for name in ("loss", "trainable", "train")):
            notes[f"role '{role}' marked as trained, not trained"] = None
        known = used.union(endings.FIELDS) if role == "assistant" else used
        unused = [key for key, value in message.items() if key not in known and not is_empty(value)]
        for key in unused:
            if danger(key, message[key]) == MASK:
                raise TreepackError(
                    f"{where} has the field '{key}', which can be a mask and is not read; remove it, or say which "
                    "turns are trained with loss, true or false"
                )
        notes.update({f"message field '{key}' not used": None for key in unused})
    return Messages(done, weights, tuple(notes), cuts)


def _ending(message: dict[str, Any], normal: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Return whether the answer `message` was cut, and notes; `normal` is its normal form."""
    ending, notes = endings.ending_of(message)
    if ending == endings.ENDED:
        return False, notes
    return True, notes if endings.has_text(normal) else (*notes, endings.EMPTY_NOTE)


def _check_content(message: dict[str, Any], normal: dict[str, Any], where: str, notes: dict[str, None]) -> None:
    """Refuse a message without content that nothing explains; note an empty one.

    Raises:
        BadValueError: the content is missing, or null in a turn without reasoning and calls.
        TreepackError: another field may have the text.
    """
    if normal["content"] or (normal["role"] == "assistant" and normal.keys() & {"tool_calls", "reasoning_content"}):
        return
    texts = [key for key, value in message.items() if key not in READ and isinstance(value, str | list) and value]
    if message.get("content") is None and (texts or "content" not in message or normal["role"] == "assistant"):
        if texts:
            raise TreepackError(
                f"{where} has no content, but {', '.join(texts[:3])}; name the field of the text with "
                f"--columns content={texts[0]}"
            )
        raise BadValueError(f"{where} has no content; expected text, or the calls of a turn", NO_CONTENT)
    # The result of a tool may be empty; an empty turn of the model trains the end of a turn only.
    if normal["role"] == "assistant" or message.get("content") is None:
        notes[f"message of role '{normal['role']}' without text"] = None


def tools_of(value: dict[str, Any]) -> Any:
    """Return the tool schemas of a record under the first of `TOOLS` that is not empty, None if there are none."""
    return next((value[name] for name in sorted(TOOLS, reverse=True) if not is_empty(value.get(name))), None)


def normalise_tools(tools: Any, *, source: str) -> list[dict[str, Any]] | None:
    """Return tool schemas in the nested form, from a list, an object by name, or JSON text; None if there are none.

    Raises:
        TreepackError: `tools` is something else.
    """
    tools = _parsed(tools, source)
    if tools is None:
        return None
    if isinstance(tools, dict):
        # One schema, or schemas by their names: {"f": {"description": ..}} -> [{"name": "f", "description": ..}]
        is_one = "name" in tools or "function" in tools
        tools = [tools] if is_one else [{"name": name, **_object(tool)} for name, tool in tools.items()]
    if isinstance(tools, list):
        tools = [_parsed(tool, source) for tool in tools]  # a column of texts
    if not is_messages(tools):
        raise TreepackError(f"{source}: tools is {shown(tools)}; expected a list of schemas or one as JSON text")
    if (fault := fault_in_json(tools)) is not None:
        raise TreepackError(f"{source}: tools is {fault}; expected schemas in JSON")
    return [_nest(tool) for tool in tools] or None


def _parsed(tools: Any, source: str) -> Any:
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except (ValueError, RecursionError) as error:
        raise TreepackError(f"{source}: tools is not JSON ({error}); expected a list of schemas") from None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _nest(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a function `tool` in the nested form; another tool, such as the search of a server, stays as it is."""
    # {"name": "f", "input_schema": S} -> {"type": "function", "function": {"name": "f", "parameters": S}}
    if "function" in tool or not isinstance(tool.get("name"), str) or tool.get("type", "function") != "function":
        return tool
    renamed = {"parameters" if key in PARAMETERS else key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": renamed}


def normalise_template_kwargs(kwargs: Any, *, source: str) -> dict[str, Any] | None:
    """Return the variables that a conversation sets for its chat template; None if it sets none.

    Raises:
        TreepackError: they are not an object in JSON, or include a variable that treepack sets.
    """
    if kwargs is None:
        return None
    if not isinstance(kwargs, dict):
        raise TreepackError(
            f"{source}: chat_template_kwargs is {shown(kwargs)}; expected an object of the template's variables"
        )
    if reserved := sorted(RESERVED.intersection(kwargs)):
        raise TreepackError(f"{source}: chat_template_kwargs sets {reserved[0]}, which treepack sets; remove it there")
    if (fault := fault_in_json(kwargs)) is not None:
        raise TreepackError(f"{source}: chat_template_kwargs is {fault}; expected an object in JSON")
    return kwargs or None


def _role(message: dict[str, Any], where: str) -> str:
    role = message.get("role")
    if role is None:
        raise TreepackError(f"{where} has no role; expected system, user, assistant or tool")
    role = RENAMED_ROLES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise TreepackError(f"{where} has role {quoted(role)}; expected system, user, assistant or tool")
    return role


def _name(value: Any, key: str, where: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TreepackError(f"{where} has the {key} {shown(value)}; expected text or an integer")
    return value


def _content(content: Any, where: str, notes: dict[str, None]) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    # One part in place of a list of parts means the same.
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list):
        raise TreepackError(f"{where} has the content {shown(content)}; expected text or a list of text parts")
    return "".join(_part(part, where, notes) for part in parts)


def _part(part: Any, where: str, notes: dict[str, None]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise TreepackError(f"{where} has a content part of type {quoted(kind)}; expected text parts only")
    _note_rest(part, OF_PARTS, "content part", notes)
    return str(part["text"])


def _note_rest(value: dict[str, Any], known: frozenset[str], what: str, notes: dict[str, None]) -> None:
    rest = (key for key, field in value.items() if key not in known and not is_empty(field))
    notes.update({f"{what} field '{key}' not used": None for key in rest})


def _reasoning(message: dict[str, Any], where: str) -> tuple[str | None, frozenset[str]]:
    """Return the reasoning of a turn, and the fields of the message that are read: a second reasoning is not."""
    texts = {name: _reasoning_text(message[name], name, where) for name in REASONING if not is_empty(message.get(name))}
    # An empty text is a reasoning without words, which templates print; other values without content are none.
    names = [name for name in REASONING if message.get(name) == ""]
    first = next(iter(texts), names[0] if names else None)
    reasoning = None if first is None else texts.get(first, "")
    unread = {name for name, text in texts.items() if text != reasoning}
    return reasoning, READ - unread - {"refusal"}


def _reasoning_text(value: Any, name: str, where: str) -> str:
    """Return the text of reasoning, which is text or parts: [{"type": "thinking", "thinking": "A"}, ..] -> "A..".."""
    parts = [value] if isinstance(value, str | dict) else value
    texts = []
    for part in parts if isinstance(parts, list) else [None]:
        text = next((part[key] for key in REASONING_TEXTS if key in part), "") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise TreepackError(f"{where} has the {name} {shown(value)}; expected text")
        texts.append(text)
    return "".join(texts)


def _has_calls(value: Any) -> bool:
    """Return whether the field `value` of a message has calls: objects, the first of which names a function."""
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list) or not calls or not isinstance(calls[0], dict):
        return False
    return isinstance(_object(calls[0].get("function", calls[0])).get("name"), str)


def _tool_calls(
    message: dict[str, Any], name: str, index: int, where: str, notes: dict[str, None]
) -> list[dict[str, Any]]:
    # A message may have both forms; the older one, function_call, has room for one call only.
    calls = message.get(name) or []
    calls = [calls] if isinstance(calls, dict) else calls
    if is_messages(calls) and message.get("function_call"):
        calls = [*calls, message["function_call"]]
    if not is_messages(calls):
        raise TreepackError(f"{where} has the tool calls {shown(calls)}; expected a list of objects")
    return [_tool_call(call, f"call{index:03}{number:02}", where, notes) for number, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], default_id: str, where: str, notes: dict[str, None]) -> dict[str, Any]:
    function = call.get("function", call)  # nested, or flat: the call is the function
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise TreepackError(f"{where} has the tool call {shown(call)}; expected a name and arguments")
    # A flat call of Anthropic has the type "tool_use", and one of the Responses API "function_call".
    if call.get("type") not in (None, "function", "function_call", "tool_use", "tool_call"):
        notes[f"tool call of type '{str(call['type'])[:40]}' read as a function"] = None
    # Arguments beside the function, and not in it, mean the same.
    places = [(holder, key) for holder in (function, call) for key in ARGUMENTS if holder.get(key) is not None]
    arguments = _without_nothing(places[0][0][places[0][1]]) if places else "{}"
    if not places:
        notes["tool call without arguments"] = None
    if not isinstance(arguments, str | dict):
        raise TreepackError(f"{where} calls {name} with {shown(arguments)}; expected an object or JSON text")
    if isinstance(arguments, dict) and (fault := fault_in_json(arguments)) is not None:
        raise TreepackError(f"{where} calls {name} with arguments {fault}; expected an object in JSON")
    for each in (call, function) if function is not call else (call,):
        rest = {key: value for key, value in each.items() if not places or (each, key) != places[0]}
        _note_rest(rest, OF_CALLS, "tool call", notes)
    return {
        "id": default_id if call.get("id") is None else _name(call["id"], "id", where),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _without_nothing(arguments: Any) -> Any:
    """Return the arguments of a call; those of a call without arguments, in any form, are the text of an object."""
    # Logs have null, "", "  ", "null", [] and '""' for {}; a template would print them as they are.
    if arguments is None or arguments == []:
        return "{}"
    return "{}" if isinstance(arguments, str) and arguments.strip() in ("", "null", "None", '""', "[]") else arguments


def _id_of_last_call(done: list[dict[str, Any]]) -> dict[str, str | int]:
    calls = done[-1].get("tool_calls")
    return {"tool_call_id": calls[-1]["id"]} if calls else {}
