"""OpenTelemetry spans of LLM calls in the conventions for generative AI: OTLP as JSON, or one span per line.

    {"resourceSpans": [{"scopeSpans": [{"spans": [span, ..]}]}]}      attributes as [{"key", "value": {"stringValue"}}]
    {"trace_id", "span_id", "start_time", "attributes": {"gen_ai...": ..}}                   ids also in "context"

    span  gen_ai.system_instructions  gen_ai.input.messages   gen_ai.output.messages      of gen_ai.conversation.id
    call  system                      the rest of the prompt  the response, or several    of a rollout

Messages are `{role, parts: [text | reasoning | tool_call | tool_call_response]}`, as objects or as JSON text, in the
span or in one of its events. The prompt of a call is the whole conversation, and calls that continue each other are
joined. Spans without a conversation are joined by their trace. The scores of `gen_ai.evaluation.result` events are the
reward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.calls import ChatCall, read_chats
from treepack.ingest.readers.content_blocks import skip_reason
from treepack.ingest.readers.fields import ReadOptions, shown, temperature_of
from treepack.ingest.readers.format import LIST, REWARDS, SET, Format, Kind
from treepack.ingest.readers.messages import is_messages
from treepack.ingest.readers.records import Record
from treepack.trajectory import Skipped, Trajectory

# Operations of an LLM call; older instrumentations name no operation.
CALLS = (None, "chat", "generate_content", "text_completion")
# Names of events and attributes in the conventions.
EVALUATION = "gen_ai.evaluation.result"
INSTRUCTIONS, INPUT, OUTPUT = "gen_ai.system_instructions", "gen_ai.input.messages", "gen_ai.output.messages"
TOOLS, TEMPERATURE = "gen_ai.tool.definitions", "gen_ai.request.temperature"
FINISH = "gen_ai.response.finish_reasons"
RENAMED_ROLES = {"Human": "user", "AI": "assistant", "model": "assistant"}  # as LangChain and Gemini have them
NO_CALL_NOTE = "span without an LLM call"
NO_CONTENT_NOTE = "LLM call whose messages were not captured"


@dataclass(frozen=True, slots=True)
class _TraceSpan:
    source: str
    trace: str
    start: Any
    attributes: dict[str, Any]
    scores: dict[str, Any]


@dataclass(slots=True)
class _Conversation:
    """The spans of the LLM calls of one conversation, and the record of the first span."""

    record: Record
    spans: list[_TraceSpan] = field(default_factory=list)


def read_file(records: Iterator[Record], options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Read the trajectories of the conversations of one file, in the order of their first spans.

    Spans without an LLM call are skipped.

    Raises:
        TreepackError: messages or attributes that are not of the form above.
    """
    conversations: dict[str, _Conversation] = {}
    for record in records:
        for span in _spans(record):
            if span.attributes.get("gen_ai.operation.name") not in CALLS:
                yield Skipped(record.source, NO_CALL_NOTE, is_rollout=False)
                continue
            if not {INPUT, OUTPUT} <= span.attributes.keys():
                is_call = any(name.startswith("gen_ai.") for name in span.attributes)
                yield Skipped(record.source, NO_CONTENT_NOTE if is_call else NO_CALL_NOTE, is_rollout=is_call)
                continue
            name = str(span.attributes.get("gen_ai.conversation.id") or span.trace)
            bare = replace(record, value={})  # a whole file of spans must not stay in memory
            conversations.setdefault(name, _Conversation(bare)).spans.append(span)
    for name, talk in conversations.items():
        # A file may mix nanoseconds and ISO times; integers are sorted before texts, because they do not compare.
        spans = sorted(talk.spans, key=lambda span: (isinstance(span.start, str), span.start))
        calls = []
        for span in spans:
            span_calls = list(_calls(span))
            reason = skip_reason([message for call in span_calls for message in (*call.prompt, *call.response)])
            if reason is None:
                calls += span_calls
            else:
                yield Skipped(span.source, reason)
        if calls:
            yield from read_chats(_description(talk.record, name, spans), calls, options)


def _spans(record: Record) -> Iterator[_TraceSpan]:
    value, source = record.value, record.source
    flat = [value]
    if "resourceSpans" in value:
        scopes = _below(value["resourceSpans"], "scopeSpans", source)
        flat = _below(scopes, "spans", source)
    for span in flat:
        context = span.get("context")
        holders = (span, context) if isinstance(context, dict) else (span,)
        trace = next((holder[name] for holder in holders for name in ("traceId", "trace_id") if holder.get(name)), "")
        start = next((span[name] for name in ("startTimeUnixNano", "start_time", "startTime") if span.get(name)), 0)
        # OTLP writes nanoseconds as text: "1700" -> 1700
        start = int(start) if isinstance(start, str) and start.isdecimal() else start
        attributes: dict[str, Any] = {}
        scores: dict[str, Any] = {}
        for event in _below([span], "events", source):
            event_attributes = _attributes(event.get("attributes"), source)
            if event.get("name") == EVALUATION:
                score = event_attributes.get("gen_ai.evaluation.score.value")
                scores |= (
                    {}
                    if score is None
                    else {str(event_attributes.get("gen_ai.evaluation.name", "score")): {"score": score}}
                )
            else:
                attributes |= event_attributes
        # The attributes of the span come last and replace equal ones of its events.
        attributes |= _attributes(span.get("attributes"), source)
        yield _TraceSpan(source, str(trace), start if isinstance(start, int | float | str) else 0, attributes, scores)


def _below(objects: Any, name: str, source: str) -> list[dict[str, Any]]:
    """Return the objects in the lists `name` of `objects`."""
    lists: list[Any] = [each.get(name) or [] for each in objects] if is_messages(objects) else [None]
    if not all(map(is_messages, lists)):
        raise TreepackError(f"{source}: {name} is not a list of objects; expected spans as OTLP has them")
    return [each for inner in lists for each in inner]


def _attributes(attributes: Any, source: str) -> dict[str, Any]:
    """Return attributes as a dict, with the values of OTLP unwrapped."""
    if attributes is None or isinstance(attributes, dict):
        return attributes or {}
    if not is_messages(attributes) or not all(isinstance(each.get("key"), str) for each in attributes):
        raise TreepackError(
            f"{source}: attributes is {shown(attributes)}; expected an object, or a list of keys and values"
        )
    return {each["key"]: _unwrap(each.get("value")) for each in attributes}


def _unwrap(value: Any) -> Any:
    # {"stringValue": "a"} -> "a", {"intValue": "7"} -> 7, {"arrayValue": {"values": [{"boolValue": true}]}} -> [True]
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_unwrap(each) for each in (content or {}).get("values", [])]
    if kind == "kvlistValue":
        return {str(each.get("key")): _unwrap(each.get("value")) for each in (content or {}).get("values", [])}
    return (
        int(content) if kind == "intValue" and isinstance(content, str) and content.lstrip("-").isdecimal() else content
    )


def _calls(span: _TraceSpan) -> Iterator[ChatCall]:
    """Yield one call for each response of `span`."""
    instructions = _parse(span, INSTRUCTIONS)
    # Instructions are text, or a list of parts.
    parts = [{"type": "text", "content": instructions}] if isinstance(instructions, str) else instructions
    prompt = _messages([{"role": "system", "parts": parts}], span, INSTRUCTIONS) if parts else []
    prompt += _messages(_parse(span, INPUT) or [], span, INPUT)
    responses = _parse(span, OUTPUT)
    if not is_messages(responses):
        raise TreepackError(f"{span.source}: {OUTPUT} is {shown(responses)}; expected a list of messages")
    # One reason for each response, also in the span itself.
    reasons = _parse(span, FINISH)
    for number, response in enumerate(responses):
        finish = reasons[number] if isinstance(reasons, list) and number < len(reasons) else None
        said = _messages([{"role": "assistant"} | response], span, OUTPUT)
        temperature = temperature_of({"temperature": span.attributes.get(TEMPERATURE)})
        ending = response.get("finish_reason")
        yield ChatCall(prompt, said, _parse(span, TOOLS) or None, temperature=temperature, ending=ending or finish)


def _parse(span: _TraceSpan, name: str) -> Any:
    """Return the attribute `name`, parsed if it is JSON text."""
    value = span.attributes.get(name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _messages(messages: Any, span: _TraceSpan, name: str) -> list[dict[str, Any]]:
    """Return messages in chat form; each response of a tool becomes a separate message."""
    if not is_messages(messages):
        raise TreepackError(f"{span.source}: {name} is {shown(messages)}; expected a list of messages")
    done: list[dict[str, Any]] = []
    for message in messages:
        parts = message.get("parts", message.get("content"))
        parts = [{"type": "text", "content": parts}] if isinstance(parts, str) else parts or []
        if not is_messages(parts):
            raise TreepackError(f"{span.source}: {name} has the parts {shown(parts)}; expected a list of parts")
        results = [part for part in parts if part.get("type") == "tool_call_response"]
        done += [{"role": "tool", "tool_call_id": part.get("id"), "content": _result(part)} for part in results]
        others = [part for part in parts if part.get("type") != "tool_call_response"]
        if others or not results:
            role = message.get("role")
            role = RENAMED_ROLES.get(role, role) if isinstance(role, str) else role
            done.append(_message(role, others, span, name))
    return done


def _message(role: Any, parts: list[dict[str, Any]], span: _TraceSpan, name: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": ""}
    for part in parts:
        kind, content = part.get("type"), part.get("content")
        if kind == "tool_call":
            message.setdefault("tool_calls", []).append({key: part.get(key) for key in ("id", "name", "arguments")})
        elif kind in ("text", "reasoning") and isinstance(content, str):
            key = "content" if kind == "text" else "reasoning_content"
            message[key] = message.get(key, "") + content
        # A blob or a file: `skip_reason` finds the part, and the call is skipped.
        elif isinstance(kind, str) and kind not in ("text", "reasoning"):
            return {"role": role, "content": [{"type": str(part.get("modality") or kind)}]}
        else:
            raise TreepackError(f"{span.source}: {name} has the part {shown(part)}; expected text under content")
    return message


def _result(part: dict[str, Any]) -> str:
    response = part.get("response", part.get("result"))
    return (
        response if isinstance(response, str) else "" if response is None else json.dumps(response, ensure_ascii=False)
    )


def _description(record: Record, name: str, spans: list[_TraceSpan]) -> Record:
    """Return a record with the facts that the spans of a conversation give besides their calls."""
    value: dict[str, Any] = {"rollout_id": name}
    for key, names in (
        ("model", ("gen_ai.response.model", "gen_ai.request.model")),
        ("agent", ("gen_ai.agent.name",)),
    ):
        values = [next((span.attributes[each] for each in names if each in span.attributes), None) for span in spans]
        if distinct := dict.fromkeys(str(each) for each in values if each is not None):
            value[key] = ", ".join(distinct)
    if scores := {key: score for span in spans for key, score in span.scores.items()}:
        value["rewards"] = scores
    return replace(record, value=value)


OBJECT_OR_LIST = Kind("an object or a list", lambda value: isinstance(value, dict | list))
FORMAT = Format(
    name="otel-genai",
    program="OpenTelemetry (generative AI conventions), by any instrumentation of them",
    recognised_by="`resourceSpans`, or a span id beside `attributes`",
    requires=[
        {"resourceSpans": LIST},
        {("span_id", "spanId", "context.span_id", "context.spanId"): SET, "attributes": OBJECT_OR_LIST},
    ],
    used="""
        resourceSpans.scopeSpans.spans.attributes resourceSpans.scopeSpans.spans.events context.trace_id start_time
        attributes.gen_ai.operation.name attributes.gen_ai.conversation.id attributes.gen_ai.system_instructions
        attributes.gen_ai.input.messages attributes.gen_ai.tool.definitions attributes.gen_ai.request.model
        attributes.gen_ai.request.temperature attributes.gen_ai.agent.name events.attributes.gen_ai.output.messages
        events.attributes.gen_ai.evaluation.score.value
    """.split(),
    dropped=(
        "spans of tools, agents and embeddings (the calls contain their results)",
        "blobs, files, uris and server-side tools (calls that have some are skipped)",
        "usage, finish reasons, resources",
    ),
    keeps={REWARDS},
    read_file=read_file,
)
