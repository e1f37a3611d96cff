"""Known containers of a record in another place or as JSON text: brought to their own before the format is recognised.

    {"messages": "[{\\"role\\": \\"user\\", ..}]"}              ->  {"messages": [{"role": "user", ..}]}
    {"messages": ["{\\"role\\": \\"user\\", ..}", ..]}          ->  the same: a list of JSON texts
    {"prompt": "[{\\"role\\": ..}]", "completion": "[..]"}      ->  both, or neither
    {"role": "tool", "tool_call_ids": ["c"]}                ->  {"role": "tool", "tool_call_id": "c"}
    {"metadata": {"tools": [..]}}, or in the system message ->  {"tools": [..]}, if the record has none
    {"contents": [.., {"role": "model", ..}]}               ->  {"messages": [..]}: data for Gemini's tuning

Parquet and tables of CSV cannot store nested values of changing types, so many data sets have such columns. Only a text
that is a list of objects is parsed; if the field may also be prose, all must be messages. The rest stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treepack.files.input_files.json_text import parsed_json
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.values import JsonObject, is_messages
from treepack.ingest.readers.messages.conversation_settings import TOOLS, tools_of
from treepack.ingest.readers.messages.gemini_parts import gemini_messages

_TALKS = ("messages", "conversations", "children")  # always lists of messages, or of the nodes of a tree
# Text or messages. The fields of a row are parsed together: a prompt in prose may ask for an answer in JSON.
_PROSE = (("prompt", "completion"), ("chosen", "rejected"))
_SPEAKERS = ("role", "from")
_MOVED = object()
_HOLDERS = ("metadata", "extra_info", "extra")  # of tool schemas beside a conversation
_OF_SCHEMAS = frozenset("function parameters input_schema inputSchema description".split())
_OF_CALLS = frozenset({"messages", "candidates", "request", "response"})  # beside the contents of a logged call


def with_containers(record: Record) -> Record:
    """Return `record` with its known containers as lists of objects; the same record if nothing is to be parsed."""
    value = record.value
    changed: JsonObject = {}
    for name in _TALKS:
        if is_messages(objects := objects_of(value.get(name))):
            changed[name] = objects
    for names in _PROSE:
        changed |= _parsed_together({name: value[name] for name in names if value.get(name) is not None})
    tools = value.get("tools")
    if isinstance(tools, list) and is_messages(objects := objects_of(tools)):
        changed["tools"] = objects
    for name in (*_TALKS, "prompt", "completion", "chosen", "rejected"):
        messages = changed.get(name, value.get(name))
        if is_messages(messages) and any(_is_stored(message) for message in messages):
            changed[name] = [_message(message) for message in messages]
    changed |= _gemini_talk(value, record.source)
    changed |= _moved_tools(value | changed)
    if not changed:
        return record
    # `line` has the record as it is stored, so it would undo the changes.
    fields = record.with_lists().value | changed
    return replace(record.with_lists(), value={name: field for name, field in fields.items() if field is not _MOVED})


def _gemini_talk(value: JsonObject, source: str) -> JsonObject:
    """Return the messages of `contents` that end with an answer, and the fields that they replace."""
    contents = value.get("contents")
    is_talk = is_messages(contents) and all("parts" in each for each in contents) and not _OF_CALLS & value.keys()
    if not is_talk or not contents or contents[-1].get("role") != "model":
        return {}
    name = next((each for each in ("systemInstruction", "system_instruction") if value.get(each)), "contents")
    system = value[name] if name != "contents" else None
    return {"messages": gemini_messages(contents, system, source), "contents": _MOVED, name: _MOVED}


def _moved_tools(value: JsonObject) -> JsonObject:
    """Return `tools`, and the field that had them, of a conversation whose schemas are in its system message or beside.

    Only lists of schemas are moved: a name of tools in metadata stays there.
    """
    # The nodes of a tree, the last of _TALKS, have no system message of their own.
    talks = [name for name in (*_TALKS[:2], "prompt") if is_messages(value.get(name)) and value[name]]
    if tools_of(value) is not None or not (talks or is_messages(value.get("completion"))):
        return {}
    for name in (*talks, *_HOLDERS):
        place: Any = value.get(name)
        holder: Any = place[0] if isinstance(place, list) and name in talks else place
        for field in TOOLS.intersection(holder) if isinstance(holder, dict) else ():
            tools = objects_of(holder[field]) or holder[field]
            if is_messages(tools) and tools and all(_OF_SCHEMAS & tool.keys() for tool in tools):
                rest: Any = {key: each for key, each in holder.items() if key != field}
                return {"tools": tools, name: [rest, *place[1:]] if isinstance(place, list) else rest}
    return {}


def objects_of(value: Any) -> list[JsonObject] | None:
    """Return the list in a JSON text, or of JSON texts; None if there is none, or it is a list of objects already."""
    if isinstance(value, str):
        parsed = parsed_json(value)
        return parsed if isinstance(parsed, list) and is_messages(parsed) else None
    if isinstance(value, dict) and all(isinstance(column, list) for column in value.values()):
        # {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}: a table of messages
        is_table = len({len(column) for column in value.values()}) == 1
        rows = zip(*value.values(), strict=True) if is_table else ()
        return [dict(zip(value, row, strict=True)) for row in rows] or None
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        parts = [parsed_json(each) for each in value]
        return parts if is_messages(parts) else None
    return None


def _parsed_together(fields: JsonObject) -> JsonObject:
    """Return the parsed `fields` if each is a list of messages, as text or as it is; else nothing.

    An answer in prose to a prompt of messages stays text.
    """
    parsed = {name: objects_of(value) for name, value in fields.items()}
    talks = {name: value for name, value in parsed.items() if value and _is_talk(value)}
    is_talk = {name: name in talks or is_messages(value) for name, value in fields.items()}
    first = next(iter(fields), None)
    return talks if all(is_talk.values()) or (first == "prompt" and is_talk["prompt"]) else {}


def _is_talk(messages: list[JsonObject]) -> bool:
    return all(any(isinstance(message.get(name), str) for name in _SPEAKERS) for message in messages)


def _is_stored(message: JsonObject) -> bool:
    return objects_of(message.get("tool_calls")) is not None or _result_of(message) is not None


def _result_of(message: JsonObject) -> Any:
    """Return the only id of a list `tool_call_ids`, or None if the message has no such list."""
    ids = message.get("tool_call_ids")
    has_one = isinstance(ids, list) and len(ids) == 1 and message.get("tool_call_id") is None
    return ids[0] if has_one and isinstance(ids, list) and isinstance(ids[0], str | int) else None


def _message(message: JsonObject) -> JsonObject:
    message = dict(message)
    if (calls := objects_of(message.get("tool_calls"))) is not None:
        message["tool_calls"] = calls
    if (call := _result_of(message)) is not None:
        del message["tool_call_ids"]
        message["tool_call_id"] = call
    return message
