"""Spans of a tracing system as values: their ids, times, status and attributes, in the forms of several exporters.

    {"resourceSpans": [{"scopeSpans": [{"spans": [span, ..]}]}]}      attributes as [{"key", "value": {"stringValue"}}]
    {"trace_id", "span_id", "start_time", "attributes": {"llm...": ..}}              ids also in "context"
    {"context.trace_id": .., "attributes.llm.input_messages": [..], ..}              a row of a table of Phoenix

    attributes, flat or nested --tree--> {"llm": {"input_messages": [{"message": {"role": "user"}}]}}

`span_calls` gives the attributes their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.values import JsonObject, as_id, is_messages, shown, start_time

COLUMN = "attributes."  # beginning of the columns of a table that contain attributes
_EVALUATION = "gen_ai.evaluation.result"
# Attributes whose values may be objects with dots in their names: they are not names of attributes.
_RAW = frozenset("arguments json_schema parameters content value".split())
_FAILED = frozenset({"ERROR", "STATUS_CODE_ERROR", "2"})


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span. `attributes` have the names that the exporter wrote; `scores` come from its evaluation events.

    `kind` is the kind of Phoenix (LLM, TOOL, ..), empty if the exporter wrote none. `events` are names of events.
    `fault` is the sentence of an error if the span is damaged; it then has no attributes.
    """

    source: str
    trace: str
    name: str
    parent: str
    start: int | float | str
    kind: str
    failed: bool
    attributes: JsonObject
    scores: JsonObject
    events: tuple[str, ...] = ()
    fault: str = ""


def spans_of(record: Record) -> Iterator[TraceSpan]:
    """Yield the spans of `record`, which is one span, or OTLP with many.

    Raises:
        TreepackError: OTLP without spans in it.
    """
    value, source = record.value, record.source
    flat = [value]
    if "resourceSpans" in value:
        flat = _below(_below(value["resourceSpans"], "scopeSpans", source), "spans", source)
    for span in flat:
        yield _span(span, source)


def _span(span: JsonObject, source: str) -> TraceSpan:
    context = span.get("context")
    columns = {name.removeprefix("context."): each for name, each in span.items() if name.startswith("context.")}
    holders = (span, context if isinstance(context, dict) else {}, columns)
    found = [
        next(((each, holder[each]) for holder in holders for each in names if holder.get(each)), ("", ""))
        for names in (("traceId", "trace_id"), ("spanId", "span_id"), ("parentSpanId", "parent_span_id", "parent_id"))
    ]
    trace, name, parent = (str(value) for _, value in found)
    start: int | float | str = 0
    try:
        start = start_time(span, "startTimeUnixNano", "start_time", "startTime", source=source) or 0
        # OTLP writes nanoseconds as text: "1700" -> 1700
        start = int(start) if isinstance(start, str) and start.isdecimal() else start
        for field, value in found:
            if field:
                as_id(value, source=source, name=field)
        attributes, scores, events = _contents(span, source)
    except TreepackError as error:
        return TraceSpan(source, trace, name, parent, start, "", False, {}, {}, (), str(error))
    kind, failed = _kind(span, attributes), _has_failed(span)
    return TraceSpan(source, trace, name, parent, start, kind, failed, attributes, scores, events)


def _contents(span: JsonObject, source: str) -> tuple[JsonObject, JsonObject, tuple[str, ...]]:
    """Return the attributes, the scores and the names of the events of a span."""
    attributes: JsonObject = {}
    scores: JsonObject = {}
    names: list[str] = []
    for event in _below([span], "events", source):
        event_attributes = _span_attributes(event.get("attributes"), source)
        if event.get("name") == _EVALUATION:
            score = event_attributes.get("gen_ai.evaluation.score.value")
            if score is None:
                attributes |= event_attributes  # a label only, which becomes a note
            else:
                scores[str(event_attributes.get("gen_ai.evaluation.name", "score"))] = {"score": score}
        else:
            names.append(str(event.get("name")))
            attributes |= event_attributes
    # The attributes of the span come last and replace equal ones of its events.
    attributes |= _span_attributes(span.get("attributes"), source)
    attributes |= {name.removeprefix(COLUMN): each for name, each in span.items() if name.startswith(COLUMN)}
    return attributes, scores, tuple(names)


def _kind(span: JsonObject, attributes: JsonObject) -> str:
    kind = span.get("span_kind") or get(attributes, "openinference.span.kind")
    return kind.upper() if isinstance(kind, str) else ""


def _has_failed(span: JsonObject) -> bool:
    status = span.get("status")
    status = status if isinstance(status, dict) else {"code": status}
    codes = (span.get("status_code"), status.get("code"), status.get("status_code"))
    return any(str(code).upper() in _FAILED for code in codes)


def _below(objects: Any, name: str, source: str) -> list[JsonObject]:
    """Return the objects in the lists `name` of `objects`."""
    lists: list[Any] = [_list(each.get(name)) for each in objects] if is_messages(objects) else [None]
    if not all(map(is_messages, lists)):
        raise TreepackError(f"{source}: {name} is not a list of objects; expected spans as OTLP has them")
    return [each for inner in lists for each in inner]


def _list(value: Any) -> Any:
    # A table has no events as an array of numbers without elements, or as text.
    value = parsed(value.tolist() if isinstance(value, np.ndarray) else value)
    return [] if value is None else value


def _span_attributes(attributes: Any, source: str) -> JsonObject:
    """Return attributes as a dict, from a list of OTLP or from JSON text; the values of OTLP are unwrapped.

    Raises:
        TreepackError: they are something else.
    """
    attributes = parsed(attributes)
    if attributes is None or isinstance(attributes, dict):
        return attributes or {}
    if not is_messages(attributes) or not all(isinstance(each.get("key"), str) for each in attributes):
        raise TreepackError(
            f"{source}: attributes is {shown(attributes)}; expected an object, or a list of keys and values"
        )
    names = [each["key"] for each in attributes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise TreepackError(
            f"{source}: the attribute {min(twice)} is there twice; expected one value of each attribute"
        )
    if others := {name for each in attributes for name in each if name not in ("key", "value")}:
        raise TreepackError(f"{source}: an attribute has {min(others)}; expected key and value only")
    return {each["key"]: _unwrap(each.get("value")) for each in attributes}


def _unwrap(value: Any) -> Any:
    # {"stringValue": "a"} -> "a", {"intValue": "7"} -> 7, {"arrayValue": {"values": [{"boolValue": true}]}} -> [True]
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, content),) = value.items()
    if kind in ("arrayValue", "kvlistValue"):
        values = content.get("values", []) if isinstance(content, dict) else []
        if not isinstance(values, list):
            return value
        if kind == "arrayValue":
            return [_unwrap(each) for each in values]
        return {str(each.get("key")): _unwrap(each.get("value")) for each in values if isinstance(each, dict)}
    is_number = kind == "intValue" and isinstance(content, str) and content.lstrip("-").isdecimal()
    return int(content) if is_number else content


def span_view(value: Any) -> Any:
    """Return a record of spans with its attributes as nested objects, whatever form the exporter has written."""
    if isinstance(value, list):
        return [span_view(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _plain(each) if name == "attributes" else span_view(each) for name, each in value.items()}


def _plain(attributes: Any) -> Any:
    attributes = parsed(attributes)
    if is_messages(attributes):
        attributes = {str(each.get("key")): _unwrap(each.get("value")) for each in attributes}
    return _nested(attributes)


def get(attributes: JsonObject, name: str) -> Any:
    """Return the attribute `name`, written flat or nested, or None if it is missing."""
    # {"llm.model_name": "m"} and {"llm": {"model_name": "m"}} have "llm.model_name".
    if name in attributes:
        return attributes[name]
    first, dot, rest = name.partition(".")
    while dot:
        inner = attributes.get(first)
        if isinstance(inner, dict) and (found := get(inner, rest)) is not None:
            return found
        part, dot, rest = rest.partition(".")
        first = f"{first}.{part}"
    return None


def tree(attributes: JsonObject, prefix: str) -> Any:
    """Return the attributes below `prefix`, flat or nested, as nested objects and lists; None if none exist."""
    # prefix "llm.tools", {"llm.tools.0.tool.json_schema": "{}"} -> [{"tool": {"json_schema": "{}"}}]
    whole = parsed(get(attributes, prefix))
    start = prefix + "."
    below = {name.removeprefix(start): each for name, each in attributes.items() if name.startswith(start)}
    if not below:
        return _nested(whole)
    return _nested({**(whole if isinstance(whole, dict) else {}), **below})


def _nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_nested(each) for each in value]
    if not isinstance(value, dict):
        return value
    inner: JsonObject = {}
    # "a" before "a.b", so that neither hides the other.
    for name, each in sorted(value.items(), key=lambda item: "." in item[0]):
        if each is None:
            continue
        first, dot, rest = name.partition(".")
        if not dot:
            inner[first] = dict(each) if isinstance(each, dict) else each
        elif isinstance(inner.setdefault(first, {}), dict):
            inner[first][rest] = each
        else:  # {"a": 1, "a.b": 2}: neither may hide the other
            inner[name] = each
    nested = {name: each if name in _RAW else _nested(each) for name, each in inner.items()}
    # {"0": a, "10": b, "2": c} -> [a, c, b]; an exporter may leave numbers out.
    if nested and all(name.isdecimal() for name in nested):
        return [nested[name] for name in sorted(nested, key=int)]
    return nested
