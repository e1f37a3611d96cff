"""Files `<task>.traj.json` of mini-swe-agent: the messages of one run of a task.

    {"info": {"config": {"model": {"model_name": ".."}}, "exit_status": "Submitted", "mini_version": "2.1.0", ..},
     "messages": [{"role": "system", ..}, {"role": "user", ..}, {"role": "assistant", .., "extra": {..}}, ..,
                  {"role": "exit", ..}],
     "trajectory_format": "mini-swe-agent-1.1"}

A reply that the agent could not use is not among the messages. It is in `extra` of the user message that complains
about it. No later prompt contains this reply, so it is trained in a separate trajectory. Calls of OpenAI's Responses
API are logged as whole responses, with their items and tools. If the server added token ids to every response in
`extra`, these ids are read. An `exit_status` such as LimitsExceeded ends a run between two answers, so it cuts none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treepack.calls.served_tokens import SOME_NOTE, token_call
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    TokenCall,
    as_objects,
    endings,
    folder_and_document,
    is_messages,
    messages_of_items,
    object_or_empty,
    read_calls,
    read_chats,
    temperature_of,
    with_notes,
    without,
)

_EXIT = "exit"  # the role of the last message, which no model read
# Fields of the agent and of LiteLLM that no model read.
_BOOKKEEPING = frozenset(
    {"extra", "timestamp", "provider_specific_fields", "thinking_blocks", "annotations", "refusal"}
)
_UNREADABLE_NOTE = "refused reply in an unknown form not used"


def read_mini_swe_agent(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of `record`, named `<run>/<task>`: one, and one more for each reply that was refused.

    Raises:
        TreepackError: messages of a different kind.
    """
    value = record.value
    notes: dict[str, None] = {}
    calls: list[ChatCall] = []
    tokens: list[TokenCall | None] = []
    history: list[JsonObject] = []
    # A logged response of the Responses API repeats the tools of its request.
    tools = next((message["tools"] for message in value["messages"] if message.get("tools")), None)
    # [system, user, assistant, user] -> one call, with 2 messages of prompt
    for message in value["messages"]:
        if message.get("role") == _EXIT:
            continue
        # The refused reply answered the same prompt as the next accepted reply.
        if (refused := _refused_reply(message, record.source, notes)) is not None:
            calls.append(ChatCall(list(history), [refused], tools, ending=_ending(message)))
            tokens.append(_token_call(message))
        said = _chat_message(message, record.source, notes)
        if said is not None and said.get("role") == "assistant":
            calls.append(ChatCall(list(history), [said], tools, ending=_ending(message)))
            tokens.append(_token_call(message))
        history += [] if said is None else [said]
    description = replace(record, value=_description(record))
    with_ids = [call for call in tokens if call is not None]
    if calls and len(with_ids) == len(calls):
        yield from read_calls(description, with_ids, options)
        return
    notes |= {SOME_NOTE: None} if with_ids else {}
    yield from with_notes(read_chats(description, calls, options), tuple(notes))


def _ending(message: JsonObject) -> Any:
    """Return why the response in `message` ended: a field of its choice, or of the response itself."""
    response = message if message.get("object") == "response" else object_or_empty(message.get("extra")).get("response")
    if not isinstance(response, dict):
        return None
    choices = response.get("choices")
    return endings.raw_of(choices[0]) if is_messages(choices) and choices else endings.raw_of_response(response)


def _token_call(message: JsonObject) -> TokenCall | None:
    """Return the call whose response is in `message`, by its token ids; None if it has none."""
    response = object_or_empty(message.get("extra")).get("response")
    if not isinstance(response, dict) or not is_messages(response.get("choices")) or not response["choices"]:
        return None
    return token_call(response, response["choices"][0])


def _chat_message(message: JsonObject, source: str, notes: dict[str, None]) -> JsonObject | None:
    """Return `message` in chat form; None for an empty response."""
    if message.get("object") == "response":
        done = messages_of_items(message.get("output"), source=source)
        notes.update(dict.fromkeys(done.notes))
        return done.messages[0] if done.messages else None
    if message.get("role") is None and message.get("type") == "function_call_output":
        return messages_of_items([message], source=source).messages[0]
    kept = without(message, _BOOKKEEPING | {"type"})
    if isinstance(kept.get("content"), list) and message.get("type") == "message":
        return messages_of_items([message], source=source).messages[0]
    return kept


def _refused_reply(message: JsonObject, source: str, notes: dict[str, None]) -> JsonObject | None:
    """Return the reply that `message` complains about, or None if it does not complain."""
    extra = message.get("extra")
    if not isinstance(extra, dict) or extra.get("interrupt_type") != "FormatError":
        return None
    response = extra.get("response")
    if isinstance(response, dict) and response.get("object") == "response":
        return _chat_message(response, source, notes)
    if isinstance(response, dict):
        choices = as_objects(response.get("choices"), source=source, name="extra.response.choices")
        said = choices[0].get("message") if choices else None
        if isinstance(said, dict):
            return _chat_message(said, source, notes)
    if isinstance(extra.get("model_response"), str):
        return {"role": "assistant", "content": extra["model_response"]}
    notes[_UNREADABLE_NOTE] = None
    return None


def _description(record: Record) -> JsonObject:
    value = record.value
    info = object_or_empty(value.get("info"))
    # <run>/<task>/<task>.traj.json and <run>/<task>.traj.json -> run "<run>", task "<task>"
    folder, stem = folder_and_document(record)
    task = str(value.get("instance_id") or stem)
    run = Path(record.path).parent.parent.name if folder == task else folder
    rest = without(value, ("messages", "info", "trajectory_format"))
    rest.pop("instance_id", None)
    return {
        **rest,
        "trajectory_id": f"{run}/{task}" if run else task,
        "group_id": task,
        "model": _model_name(info),
        "temperature": temperature_of(_model(info).get("model_kwargs")),
        "exit_status": info.get("exit_status"),
        "mini_version": info.get("mini_version"),
    }


def _model(info: JsonObject) -> JsonObject:
    """Return the settings of the model, {} if the file has none."""
    return object_or_empty(object_or_empty(info.get("config")).get("model"))


def _model_name(info: JsonObject) -> str | None:
    name = _model(info).get("model_name")
    return name if isinstance(name, str) else None


FORMAT = Format(
    name="mini-swe-agent",
    rank=40,
    program="mini-swe-agent",
    recognised_by="`messages` and `trajectory_format` that begins with mini-swe-agent, or `info.mini_version`",
    requires="messages:objects, trajectory_format:=mini-swe-agent*; messages:objects, info.mini_version",
    used="""
        messages messages.extra.interrupt_type messages.extra.response messages.tools info.exit_status
        messages.extra.response.prompt_token_ids messages.extra.response.choices.logprobs
        messages.extra.response.choices.provider_specific_fields.token_ids info.mini_version
        info.config.model.model_name info.config.model.model_kwargs.temperature instance_id messages.role
        messages.content messages.tool_calls messages.tool_call_id messages.object messages.output
        messages.type messages.call_id messages.id
    """,
    dropped="""
        info.config (all but the model's name and temperature);
        info.submission (repeats the edits);
        info.model_stats;
        messages.extra (costs, times, parsed actions, raw outputs)
    """,
    keeps="token ids, masks, log-probabilities, lineage",
    failed="exit_status",
    read=read_mini_swe_agent,
)
