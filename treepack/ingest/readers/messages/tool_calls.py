"""Tool calls of a message in the nested form of OpenAI, from the names that programs give them."""

from __future__ import annotations

import json
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import (
    JsonObject,
    as_objects,
    fault_in_json,
    is_messages,
    object_or_empty,
    shown,
)

# Names of the calls of a turn: a list, or one call. The first one counts.
CALLS = ("tool_calls", "tool_call", "toolCalls", "function_calls", "functionCall")
# Names of the arguments of a call.
_ARGUMENTS = ("arguments", "args", "input", "parameters")
_OF_CALLS = frozenset({"id", "type", "function", "index", "name"})


def checked_name(value: Any, key: str, where: str) -> str | int:
    """Return the name or id `value`.

    Raises:
        TreepackError: it is neither text nor an integer.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TreepackError(f"{where} has the {key} {shown(value)}; expected text or an integer")
    return value


def note_rest(value: JsonObject, known: frozenset[str], what: str, notes: dict[str, None]) -> None:
    """Add a note on each field of `value` that is not `known` and not empty."""
    rest = (key for key, field in value.items() if key not in known and not is_empty(field))
    notes.update({f"{what} field '{key}' not used": None for key in rest})


def has_calls(value: Any) -> bool:
    """Return whether the field `value` of a message has calls: objects, the first of which names a function."""
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list) or not calls or not isinstance(calls[0], dict):
        return False
    return isinstance(object_or_empty(calls[0].get("function", calls[0])).get("name"), str)


def normalise_calls(message: JsonObject, name: str, index: int, where: str, notes: dict[str, None]) -> list[JsonObject]:
    # A message may have both forms; the older one, function_call, has room for one call only.
    calls = opened_json(message.get(name)) or []
    calls = [calls] if isinstance(calls, dict) else calls
    if is_messages(calls) and message.get("function_call"):
        calls = [*calls, opened_json(message["function_call"])]
    listed = enumerate(as_objects(calls, source=where, name=name))
    return [_tool_call(call, f"call{index:03}{number:02}", where, notes) for number, call in listed]


def opened_json(value: Any) -> Any:
    """Return the object or list in a JSON text, else `value` itself."""
    parsed = parsed_json(value)
    return value if parsed is None else parsed


def _tool_call(call: JsonObject, default_id: str, where: str, notes: dict[str, None]) -> JsonObject:
    if call.get("type") == "custom" and isinstance(custom := call.get("custom"), dict):
        # A custom tool takes free text; chat messages need JSON: "ls" -> {"input": "ls"}.
        function = {name: field for name, field in custom.items() if name != "input"}
        function["arguments"] = json.dumps({"input": custom.get("input") or ""}, ensure_ascii=False)
        call = {name: field for name, field in call.items() if name != "custom"} | {
            "type": "function",
            "function": function,
        }
    function = opened_json(call.get("function", call))  # nested, or flat: the call is the function
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise TreepackError(f"{where} has the tool call {shown(call)}; expected a name and arguments")
    # A flat call of Anthropic has the type "tool_use", and one of the Responses API "function_call".
    if call.get("type") not in (None, "function", "function_call", "tool_use", "tool_call"):
        notes[f"tool call of type '{str(call['type'])[:40]}' read as a function"] = None
    # Arguments next to the function, and not in it, mean the same.
    found = [(holder, key) for holder in (function, call) for key in _ARGUMENTS if holder.get(key) is not None]
    arguments = _without_nothing(found[0][0][found[0][1]]) if found else "{}"
    if not found:
        notes["tool call without arguments"] = None
    if not isinstance(arguments, str | dict):
        raise TreepackError(f"{where} calls {name} with {shown(arguments)}; expected an object or JSON text")
    if isinstance(arguments, str) and parsed_json(arguments) is None:
        notes["arguments of a call are no object in JSON, printed as the chat template prints text"] = None
    if isinstance(arguments, dict) and (fault := fault_in_json(arguments)) is not None:
        raise TreepackError(f"{where} calls {name} with arguments {fault}; expected an object in JSON")
    for each in (call, function) if function is not call else (call,):
        rest = {key: value for key, value in each.items() if not found or (each, key) != found[0]}
        note_rest(rest, _OF_CALLS, "tool call", notes)
    return {
        "id": default_id if call.get("id") is None else checked_name(call["id"], "id", where),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _without_nothing(arguments: Any) -> Any:
    """Return the arguments of a call; no arguments, in any form, are the text of an object."""
    # Logs have null, "", "  ", "null", [] and '""' for {}; a template would print them as they are.
    if arguments is None or arguments == []:
        return "{}"
    return "{}" if isinstance(arguments, str) and arguments.strip() in ("", "null", "None", '""', "[]") else arguments


def id_of_last_call(done: list[JsonObject]) -> dict[str, str | int]:
    calls = done[-1].get("tool_calls")
    return {"tool_call_id": calls[-1]["id"]} if calls else {}
