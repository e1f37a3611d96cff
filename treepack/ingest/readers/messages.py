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
from treepack.ingest.readers.fields import fault_in_json, quoted, shown
from treepack.ingest.readers.turn_weights import WEIGHT_FIELDS, weight_of

ROLES = frozenset({"system", "user", "assistant", "tool"})
RENAMED_ROLES = {"developer": "system", "function": "tool"}
KEPT = ("name", "tool_call_id")  # copied as they are
# Fields of a message that are read; every other field becomes a note.
READ = frozenset(
    [
        *KEPT,
        *"role content tool_calls function_call reasoning reasoning_content".split(),
        *WEIGHT_FIELDS,
    ]
)
MEDIA = ("images", "videos", "audios")
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
        if message["role"] == "developer":
            notes["role 'developer' read as 'system'"] = None
        normal: dict[str, Any] = {"role": role, "content": _content(message.get("content"), where)}
        if (reasoning := _reasoning(message, where)) is not None:
            normal["reasoning_content"] = reasoning
        if calls := _tool_calls(message, index, where):
            if role != "assistant":
                raise TreepackError(f"{where} has role '{role}' and tool calls; only the assistant can call a tool")
            normal["tool_calls"] = calls
        normal.update({key: _name(message[key], key, where) for key in KEPT if message.get(key) is not None})
        # OpenAI's older form has no ids: a message of role "function" is the result of the call just before it.
        if message["role"] == "function" and "tool_call_id" not in normal and done:
            normal.update(_id_of_last_call(done))
        done.append(normal)
        weight, remarks = weight_of(message, where) if role == "assistant" else (0.0, ())
        is_cut, more = _ending(message, normal) if role == "assistant" else (False, ())
        weights.append(0.0 if endings.EMPTY_NOTE in more else weight)
        cuts.append(is_cut)
        notes |= dict.fromkeys((*remarks, *more))
        if role != "assistant" and any(message.get(name) is True for name in ("loss", "trainable", "train")):
            notes[f"role '{role}' marked as trained, not trained"] = None
        known = READ.union(endings.FIELDS) if role == "assistant" else READ
        unused = (key for key, value in message.items() if key not in known and value is not None)
        notes.update({f"message field '{key}' not used": None for key in unused})
    return Messages(done, weights, tuple(notes), cuts)


def _ending(message: dict[str, Any], normal: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Return whether the answer `message` was cut, and notes; `normal` is its normal form."""
    ending, notes = endings.ending_of(message)
    if ending == endings.ENDED:
        return False, notes
    return True, notes if endings.has_text(normal) else (*notes, endings.EMPTY_NOTE)


def normalise_tools(tools: Any, *, source: str) -> list[dict[str, Any]] | None:
    """Return tool schemas in the nested form, from a list or from JSON text; None if there are none.

    Raises:
        TreepackError: `tools` is something else.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise TreepackError(f"{source}: tools is not JSON ({error}); expected a list of schemas") from None
    if tools is None:
        return None
    if not is_messages(tools):
        raise TreepackError(f"{source}: tools is {shown(tools)}; expected a list of schemas or one as JSON text")
    if (fault := fault_in_json(tools)) is not None:
        raise TreepackError(f"{source}: tools is {fault}; expected schemas in JSON")
    return [_nest(tool) for tool in tools] or None


def _nest(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a function `tool` in the nested form; another tool, such as the search of a server, stays as it is."""
    # {"name": "f", "input_schema": S} -> {"type": "function", "function": {"name": "f", "parameters": S}}
    if "function" in tool or not isinstance(tool.get("name"), str) or tool.get("type", "function") != "function":
        return tool
    renamed = {"parameters" if key == "input_schema" else key: value for key, value in tool.items() if key != "type"}
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


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TreepackError(f"{where} has the content {shown(content)}; expected text or a list of text parts")
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise TreepackError(f"{where} has a content part of type {quoted(kind)}; expected text parts only")
    return str(part["text"])


def _reasoning(message: dict[str, Any], where: str) -> str | None:
    reasoning = message.get("reasoning_content")
    reasoning = message.get("reasoning") if reasoning is None else reasoning
    if reasoning is not None and not isinstance(reasoning, str):
        raise TreepackError(f"{where} has the reasoning {shown(reasoning)}; expected text")
    return reasoning


def _tool_calls(message: dict[str, Any], index: int, where: str) -> list[dict[str, Any]]:
    # A message may have both forms; the older one, function_call, has room for one call only.
    calls = message.get("tool_calls") or []
    if is_messages(calls) and message.get("function_call"):
        calls = [*calls, message["function_call"]]
    if not is_messages(calls):
        raise TreepackError(f"{where} has the tool calls {shown(calls)}; expected a list of objects")
    return [_tool_call(call, f"call{index:03}{number:02}", where) for number, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], default_id: str, where: str) -> dict[str, Any]:
    function = call.get("function", call)  # nested, or flat: the call is the function
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise TreepackError(f"{where} has the tool call {shown(call)}; expected a name and arguments")
    arguments = _without_nothing(function.get("arguments"))
    if not isinstance(arguments, str | dict):
        raise TreepackError(f"{where} calls {name} with {shown(arguments)}; expected an object or JSON text")
    if isinstance(arguments, dict) and (fault := fault_in_json(arguments)) is not None:
        raise TreepackError(f"{where} calls {name} with arguments {fault}; expected an object in JSON")
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
