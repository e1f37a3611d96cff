"""Calls that LiteLLM has logged: its standard logging payload, and the rows of its spend logs.

    {"id", "call_type": "acompletion", "status": "success", "messages", "response", "model_parameters", "trace_id", ..}
    {"request_id", "call_type": "acompletion", "messages", "response", "proxy_server_request", "session_id", ..}

    payload  messages    response                        model_parameters     session_id, or else trace_id
    call     the prompt  one response for each choice    tools, temperature   of a rollout

Messages and responses have the forms of chat completions, of text completions, of the Responses API or of Anthropic's
API, as objects or as JSON text. Calls of one session that continue each other are joined. A call without a session is a
rollout of its own, and several choices of it are a group. Token ids of a server are read in place of text, as in
`openai_chat`. A session with a call that cannot be read is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from treepack.calls.apis.api_forms import prompt_of, responses_of
from treepack.calls.apis.api_paths import requests, responses
from treepack.calls.served_tokens import ServedCall, read_choices, read_served, served_call
from treepack.files.input_files.json_text import parsed
from treepack.files.input_files.records import DAMAGED_RECORD
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    as_id,
    is_empty,
    is_messages,
    mark_prefills,
    object_or_empty,
    skip_reason,
    temperature_of,
    with_notes,
    without,
)
from treepack.ingest.readers.fields.unread import not_used
from treepack.ingest.readers.fields.values import start_time

_FAILED_NOTE = "LLM call that failed"
_NO_CONTENT_NOTE = "LLM call whose messages or response were not logged"
_CACHED_NOTE = "response from the cache, not from the model"
_DAMAGED_NOTE = "session with a call that cannot be read"
# Calls of a model that writes text; others are embeddings, images, speech, files and so on.
_CALLS = frozenset("completion text_completion responses generate_content anthropic_messages".split())
_COPIES = frozenset("model_map_information usage_object additional_usage_values status".split())
_REDACTED = "redacted-by-litellm"


@dataclass(slots=True)
class _SessionCalls:
    record: Record
    # By the time at which they started.
    calls: list[tuple[str, list[ServedCall]]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    models: dict[str, None] = field(default_factory=dict)
    value: JsonObject = field(default_factory=dict)
    fault: str = ""


def _read_litellm(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the calls of one file. Calls without a session come first, sessions at the end."""
    sessions: dict[str, _SessionCalls] = {}
    for record in records:
        value = record.value
        if (reason := _no_call(value)) is not None:
            yield Skipped(record.source, reason, is_rollout=not reason.startswith("record of"))
            continue
        name = _name(value, record.source)
        session = _SessionCalls(replace(record, value={})) if name is None else sessions.get(name)
        if session is None:
            assert name is not None
            session = sessions[name] = _SessionCalls(replace(record, value={}))
        try:
            reason = _add(session, record)
        except TreepackError as error:
            session.fault = session.fault or str(error)
            if name is None:
                yield Skipped(record.source, DAMAGED_RECORD, detail=str(error))
            continue
        if reason is not None:
            yield Skipped(record.source, reason)
        elif name is None:
            own, ((_, calls),) = str(value.get("id") or value.get("request_id") or record.label), session.calls
            yield from _rollout(session, partial(read_choices, name=own, calls=calls, options=options), own)
    for name, session in sessions.items():
        if session.fault:
            yield Skipped(session.record.source, _DAMAGED_NOTE, detail=session.fault)
        elif session.calls:
            calls = [call for _, found in sorted(session.calls, key=lambda item: item[0]) for call in found]
            yield from _rollout(session, partial(read_served, calls=calls, options=options), name)


def _name(value: JsonObject, source: str) -> str | None:
    """Return the session of a call, or the trace that it shares with retries and other calls, or None."""
    holders = (value, object_or_empty(parsed(value.get("metadata"))))
    names = ("session_id", "litellm_session_id", "trace_id")
    field, name = next(((each, holder[each]) for each in names for holder in holders if holder.get(each)), ("", None))
    return None if name is None or name == value.get("id") else str(as_id(name, source=source, name=field))


def _no_call(value: JsonObject) -> str | None:
    """Return why a payload is not a call of a model that can be read."""
    kind = str(value.get("call_type"))
    # "acompletion" is the asynchronous "completion".
    if kind not in _CALLS and kind.removeprefix("a") not in _CALLS:
        return f"record of the call '{kind[:40]}', which writes no text"
    states = (value.get("status"), object_or_empty(parsed(value.get("metadata"))).get("status"))
    if "failure" in states or value.get("error_str"):
        return _FAILED_NOTE
    if value.get("cache_hit") in (True, "True", "true"):
        return _CACHED_NOTE
    messages, response = _prompt(value), parsed(value.get("response"))
    if not messages or not response or _REDACTED in str(messages)[:200] or _REDACTED in str(response)[:400]:
        return _NO_CONTENT_NOTE
    return None


def _prompt(value: JsonObject) -> Any:
    """Return the messages of a payload, or the request that a row of the spend logs has in their place."""
    request = parsed(value.get("proxy_server_request"))
    messages = parsed(value.get("messages"))
    return request if not messages and isinstance(request, dict) and request else messages


def _add(session: _SessionCalls, record: Record) -> str | None:
    """Add the calls of a payload to its session, or return why text cannot represent them."""
    value, source = record.value, record.source
    prompt = prompt_of(_prompt(value), source=source)
    responses = responses_of(value["response"], source=source)
    settings = object_or_empty(parsed(value.get("model_parameters")))
    temperature = temperature_of(settings)
    model = f"{value.get('model')} {value.get('custom_llm_provider')}"
    messages = mark_prefills(prompt.messages, settings, model=model)
    calls = [
        ChatCall(
            messages,
            response,
            prompt.tools or settings.get("tools") or settings.get("functions") or None,
            temperature=prompt.temperature if temperature is None else temperature,
            name=f"{value.get('id') or value.get('request_id')}/{number}",
        )
        for number, response in enumerate(responses)
    ]
    reason = skip_reason([message for call in calls for message in (*call.prompt, *call.response)])
    if reason is not None:
        return reason
    start = start_time(value, "startTime", source=source)
    response = object_or_empty(parsed(value["response"]))
    choices = response.get("choices")
    # A response of another API has no choices, and no token ids.
    each = choices if is_messages(choices) and len(choices) == len(calls) else [{}] * len(calls)
    pairs = zip(calls, each, strict=True)
    session.calls.append((str(start or ""), [served_call(response, choice, call) for call, choice in pairs]))
    if isinstance(name := value.get("model"), str):
        session.models[name] = None
    metadata = parsed(value.get("metadata"))
    if isinstance(metadata, dict):
        kept = {name: each for name, each in metadata.items() if each not in (None, [], {})}
        session.notes |= dict.fromkeys(not_used(f"metadata.{name}") for name in kept if name in _COPIES - {"status"})
        before = session.value.get("metadata", {})
        _note_changes(session, before, kept, "metadata.")
        session.value["metadata"] = before | without(kept, _COPIES)
    # Fields that the payload does not have itself, such as a reward, become facts of the rollout or notes.
    session.notes |= dict.fromkeys(not_used(name) for name in value if name in _OWN and not is_empty(value[name]))
    rest = without(value, _KNOWN | _OWN)
    _note_changes(session, session.value, rest, "")
    session.value |= rest
    return None


def _note_changes(session: _SessionCalls, before: JsonObject, after: JsonObject, prefix: str) -> None:
    """Note fields of a call that have other values in the calls of its session before it."""
    names = (name for name, each in after.items() if name in before and before[name] != each)
    session.notes |= dict.fromkeys(f"field '{prefix}{name}' differs between calls, the last one used" for name in names)


def _rollout(session: _SessionCalls, read: Callable[[Record], Outcomes], name: str) -> Outcomes:
    """Read a rollout, and skip it if it is damaged."""
    value = session.value | {"rollout_id": name, "model": ", ".join(session.models) or None}
    try:
        items = list(with_notes(read(replace(session.record, value=value)), tuple(session.notes)))
    except TreepackError as error:
        items = [Skipped(session.record.source, DAMAGED_RECORD, detail=str(error))]
    yield from items


_USED = """
    id request_id call_type status messages response model_parameters.temperature model_parameters.tools model metadata
    startTime! trace_id session_id cache_hit proxy_server_request error_str
""".split()
_KNOWN = frozenset(
    "id request_id call_type status messages response model_parameters model metadata startTime trace_id "
    "session_id cache_hit proxy_server_request error_str".split()
)
# Metadata of the proxy about keys, teams, budgets and costs.
_OWN = frozenset(
    """
    stream response_cost cost_breakdown response_cost_failure_debug_info status_fields
    custom_llm_provider total_tokens prompt_tokens completion_tokens endTime completionStartTime response_time
    model_map_information model_id model_group api_base cache_key saved_cache_cost end_user requester_ip_address
    user_agent error_information hidden_params guardrail_information standard_built_in_tools_params spend api_key user
    request_tags team_id agent_id organization_id mcp_namespaced_tool_name
""".split()
)
_TOKENS = [
    "response.prompt_token_ids",
    *(
        f"response.choices.{name}"
        for name in (
            "token_ids prompt_token_ids logprobs.content.token logprobs.content.logprob "
            "provider_specific_fields.token_ids provider_specific_fields.prompt_token_ids message.prompt_token_ids "
            "message.generation_token_ids message.generation_log_probs"
        ).split()
    ),
]
FORMAT = Format(
    name="litellm",
    rank=500,
    program="LiteLLM (standard logging payloads, spend logs)",
    recognised_by="`call_type` beside `messages` and `response`, with `model_parameters`, `response_cost` or `spend`",
    requires="""
        call_type:text, messages|proxy_server_request, response,
            model_parameters|response_cost|spend|hidden_params
    """,
    used=_USED,
    also=(
        "*",  # fields of other names describe the rollout
        *("metadata{}", "metadata.*", "litellm_session_id", "model_parameters{}", "model_parameters.functions"),
        *requests("messages"),
        *requests("proxy_server_request"),
        *responses("response"),
        *_TOKENS,
    ),
    keeps="token ids, log-probabilities",
    dropped="""
        embeddings, images, speech and other calls (skipped);
        usage, costs, keys and guardrails
    """,
    read_file=_read_litellm,
)
