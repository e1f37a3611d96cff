"""Traces of Langfuse: the generations among their observations, from the UI, the API or an export to a bucket.

    {"trace": {"id", "scores": [score]}, "observations": [observation, ..]}   a trace of the UI
    {"id", "observations": [observation, ..], "scores": [score, ..]}          a trace of the API
    {"data": [trace or observation, ..], "meta": {..}}                        a page of the API
    {"id", "traceId" or "trace_id", "type": "GENERATION", "input", "output"}  an observation in a row

    observation  input       output                          modelParameters
    call         the prompt  the response, or several        temperature              in a form that `api_forms` reads

A trace is a rollout. Calls that continue each other are joined. A generation around other generations repeats them and
is skipped. The scores of the trace are its rewards: numbers, and true or false. If an observation of a trace cannot be
read, the whole trace is skipped.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from treepack.calls.apis.api_forms import prompt_of, responses_of
from treepack.calls.apis.otel_parts import messages_of_parts
from treepack.calls.spans.span_calls import INSTRUCTIONS
from treepack.calls.spans.trace_spans import get, tree
from treepack.files.input_files.json_text import parsed
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcome,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    as_id,
    is_messages,
    mark_prefills,
    object_or_empty,
    read_chats,
    shown,
    skip_reason,
    with_notes,
    without,
)
from treepack.formats.model_calls.langfuse.langfuse_fields import ALSO, FINISHED, METADATA, SCHEMAS, USED, langfuse_view
from treepack.ingest.readers.fields.unread import not_used, unread
from treepack.ingest.readers.fields.values import start_time
from treepack.ingest.readers.kinds import TEXT, Fields, ValueKind, first, some
from treepack.ingest.readers.messages.conversation_settings import normalise_tools

_NO_CALL_NOTE = "observation without an LLM call"
_AROUND_NOTE = "generation around other generations, which repeats them"
_FAILED_NOTE = "LLM call that failed"
_NO_CONTENT_NOTE = "LLM call whose input or output was not captured"
_NO_OBSERVATIONS_NOTE = "trace without its observations; export the observations, too"
_DAMAGED_NOTE = "trace with an observation that cannot be read"
_CORRECTIONS_NOTE = "corrections of outputs not used"
_OTHER_TOOLS_NOTE = "tool definitions beside other tools of the input not used"
_TYPES = frozenset("GENERATION SPAN EVENT AGENT TOOL CHAIN RETRIEVER EVALUATOR EMBEDDING GUARDRAIL".split())


@dataclass(slots=True)
class _TraceFacts:
    """The generations of a trace, the ids of observations that are parents of one, and the facts of the trace."""

    record: Record
    generations: list[tuple[str, JsonObject]] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)  # of all observations
    scores: dict[str, list[float]] = field(default_factory=dict)
    value: JsonObject = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    fault: str = ""


def _read_langfuse(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the traces of one file, in the order of their first records.

    Raises:
        TreepackError: a record is neither a trace nor an observation.
    """
    traces: dict[str, _TraceFacts] = {}
    for record in records:
        for name, item in _items(record):
            trace = traces.setdefault(name, _TraceFacts(replace(record, value={})))
            if _is_observation(item):
                skipped = _add_observation(trace, item, record.source)
                if skipped is not None:
                    yield skipped
            else:
                _add_facts(trace, item, record.source)
                if not _observations(item):
                    yield Skipped(
                        record.source, _NO_OBSERVATIONS_NOTE, is_rollout=not is_messages(item.get("observations"))
                    )
    for name, trace in traces.items():
        yield from _read(name, trace, options)


def _items(record: Record) -> Iterator[tuple[str, JsonObject]]:
    """Yield the traces and the observations of `record`, each with the id of its trace."""
    value = record.value
    items = value["data"] if isinstance(value.get("data"), list) else [value]
    if not is_messages(items):
        raise TreepackError(f"{record.source}: data is {shown(items)}; expected a list of traces or observations")
    for item in items:
        if isinstance(trace := item.get("trace"), dict):
            if twice := [name for name in item if item[name] and trace.get(name) and trace[name] != item[name]]:
                raise TreepackError(f"{record.source}: {twice[0]} is in the trace and beside it; expected one of them")
            item = without(item, ("trace",)) | {name: each for name, each in trace.items() if each or name not in item}
        if _is_observation(item):
            yield _trace_id(item, record.source), item
            continue
        observations = _observations(item)
        inner = [_trace_id(each, record.source) for each in observations if "traceId" in each or "trace_id" in each]
        name = str(item.get("id") or next(iter(inner), record.label))
        if others := set(inner) - {name}:
            raise TreepackError(f"{record.source}: trace {name} has an observation of trace {min(others)}; split them")
        yield name, item
        yield from ((name, {"traceId": name} | without(each, ("observations",))) for each in observations)


def _is_observation(item: JsonObject) -> bool:
    return ("traceId" in item or "trace_id" in item) and not isinstance(item.get("observations"), list)


def _trace_id(observation: JsonObject, source: str) -> str:
    return str(as_id(_either(observation, "traceId", "trace_id"), source=source, name="traceId of an observation"))


def _observations(trace: JsonObject) -> list[JsonObject]:
    # Lists of traces have the ids of the observations only.
    observations = trace.get("observations")
    return observations if is_messages(observations) else []


def _add_observation(trace: _TraceFacts, value: JsonObject, source: str) -> Skipped | None:
    name = str(value.get("id"))
    trace.parents[name] = str(_either(value, "parentObservationId", "parent_observation_id") or "")
    try:
        _add_scores(trace, value.get("scores"), source)
    except TreepackError as error:
        trace.fault = trace.fault or str(error)
    # Texts are searched in the trajectories by the caller of the reader.
    metadata = parsed(value.get("metadata"))
    unused = unread(metadata, METADATA, "metadata.") if isinstance(metadata, dict) else ()
    trace.notes |= dict.fromkeys(not_used(path) for path, text, _ in unused if text is None)
    if str(value.get("type")).upper() != "GENERATION":
        return Skipped(source, _NO_CALL_NOTE, is_rollout=False)
    if str(value.get("level")).upper() == "ERROR":
        return Skipped(source, _FAILED_NOTE)
    if value.get("input") is None or value.get("output") is None:
        return Skipped(source, _NO_CONTENT_NOTE)
    trace.generations.append((source, value))
    return None


def _either(value: JsonObject, *names: str) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)


def _add_facts(trace: _TraceFacts, value: JsonObject, source: str) -> None:
    metadata = parsed(value.get("metadata"))
    facts = {
        "session": _either(value, "sessionId", "session_id"),
        "user": _either(value, "userId", "user_id"),
        "metadata": metadata if isinstance(metadata, dict) else None,
    }
    if metadata and not isinstance(metadata, dict):
        trace.notes[not_used("metadata")] = None
    known = {name: each for name, each in facts.items() if each}
    changed = (name for name, each in known.items() if trace.value.get(name, each) != each)
    trace.notes |= dict.fromkeys(f"{name} of the trace differs between records, the last one used" for name in changed)
    trace.value |= known
    if value.get("corrections"):
        trace.notes[_CORRECTIONS_NOTE] = None
    try:
        _add_scores(trace, value.get("scores"), source)
    except TreepackError as error:
        trace.fault = trace.fault or str(error)


def _add_scores(trace: _TraceFacts, scores: Any, source: str) -> None:
    """Add the scores of a trace or an observation: a list of scores, or an object of values by name."""
    scores = parsed(scores)
    if isinstance(scores, dict):
        values = {name: each if isinstance(each, list) else [each] for name, each in scores.items()}
        scores = [{"name": name, "value": each} for name, listed in values.items() for each in listed]
    if scores is None or (isinstance(scores, list) and all(isinstance(each, str) for each in scores)):
        return  # the ids of scores only
    if not is_messages(scores):
        raise TreepackError(f"{source}: scores is {shown(scores)}; expected a list of scores")
    for score in scores:
        value, kind = score.get("value"), str(_either(score, "dataType", "data_type") or "NUMERIC").upper()
        if kind in ("NUMERIC", "BOOLEAN") and isinstance(value, int | float):
            trace.scores.setdefault(str(score.get("name")), []).append(float(value))
        else:
            trace.notes[f"score '{str(score.get('name'))[:40]}' that is no number not used"] = None


def _read(name: str, trace: _TraceFacts, options: ReadOptions) -> Outcomes:
    around = _ancestors(trace)
    calls: list[ChatCall] = []
    models: dict[str, None] = {}
    items: list[Outcome] = []
    try:
        if trace.fault:
            raise TreepackError(trace.fault)
        # Exports are in any order; a list is sorted by the time at which a call started.
        for source, value in sorted(
            trace.generations, key=lambda item: str(start_time(item[1], "startTime", "start_time", source=item[0]))
        ):
            if str(value.get("id")) in around:
                items.append(Skipped(source, _AROUND_NOTE, is_rollout=False))
                continue
            found = _calls(value, source, trace.notes)
            reason = skip_reason([message for call in found for message in (*call.prompt, *call.response)])
            if reason is not None:
                items.append(Skipped(source, reason))
                continue
            calls += found
            if isinstance(model := _either(value, "model", "providedModelName", "provided_model_name"), str):
                models[model] = None
        facts: JsonObject = {"rollout_id": name, "model": ", ".join(models) or None, **trace.value}
        if trace.scores:
            facts["rewards"] = {score: {"score": fmean(values)} for score, values in trace.scores.items()}
        if calls:
            items += with_notes(read_chats(replace(trace.record, value=facts), calls, options), tuple(trace.notes))
    except TreepackError as error:
        items = [Skipped(trace.record.source, _DAMAGED_NOTE, detail=str(error))]
    yield from items


def _ancestors(trace: _TraceFacts) -> set[str]:
    """Return the ids of all observations around a generation."""
    around: set[str] = set()
    for _, value in trace.generations:
        name = trace.parents.get(str(value.get("id")))
        while name and name not in around:
            around.add(name)
            name = trace.parents.get(name)
    return around


def _calls(value: JsonObject, source: str, notes: dict[str, None]) -> list[ChatCall]:
    where = f"{source}: observation {value.get('id')}"
    metadata = object_or_empty(parsed(value.get("metadata")))
    attributes = object_or_empty(parsed(metadata.get("attributes")))
    prompt = prompt_of(value["input"], source=where)
    responses = responses_of(value["output"], source=where)
    instructions = parsed(get(attributes, INSTRUCTIONS))
    if instructions and not any(message.get("role") == "system" for message in prompt.messages):
        parts = [{"type": "text", "content": instructions}] if isinstance(instructions, str) else instructions
        system = messages_of_parts([{"role": "system", "parts": parts}], where, INSTRUCTIONS)
        prompt = replace(prompt, messages=[*system, *prompt.messages])
    if len(responses) == 1 and responses[0] and (reason := _finish_reason(attributes)) is not None:
        responses[0][-1].setdefault("finish_reason", reason)
    if parsed(value.get("toolCalls")) and not any(_has_calls(each) for response in responses for each in response):
        raise TreepackError(f"{where}: has toolCalls that are not in its output; log the calls in the output")
    settings = parsed(_either(value, "modelParameters", "model_parameters"))
    temperature = prompt.temperature
    if isinstance(settings, dict) and isinstance(heat := settings.get("temperature"), int | float | str):
        temperature = _number(heat)
    defined = _defined(value)
    if prompt.tools and defined and not _are_same(prompt.tools, defined, where):
        notes[_OTHER_TOOLS_NOTE] = None
    tools = prompt.tools or defined or _schemas(metadata, attributes)
    model = _either(value, "model", "providedModelName", "provided_model_name")
    messages = mark_prefills(prompt.messages, settings, model=model)
    # Observations of one trace may be in several pages or exports.
    name = f"{_either(value, 'traceId', 'trace_id')}/{value.get('id')}"
    about: JsonObject = {"tools": tools, "temperature": temperature}
    return [ChatCall(messages, said, **about, name=f"{name}/{k}") for k, said in enumerate(responses)]


def _are_same(tools: Any, defined: list[JsonObject], source: str) -> bool:
    """Return whether the `tools` of a request are the `defined` ones, in the forms of most APIs."""
    one, other = (
        [json.dumps(each, sort_keys=True, default=str) for each in normalise_tools(each, source=source) or ()]
        for each in (tools, defined)
    )
    return sorted(one) == sorted(other)


def _has_calls(message: JsonObject) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return bool(message.get("tool_calls")) or any(isinstance(p, dict) and p.get("type") == "tool_use" for p in parts)


def _number(value: int | float | str) -> float | None:
    # Some integrations log settings as text: "0.7", or "null" for none.
    try:
        return None if isinstance(value, bool) else float(value)
    except ValueError:
        return None


def _finish_reason(attributes: JsonObject) -> str | None:
    reason = next((found for name in FINISHED if (found := get(attributes, name))), None)
    if isinstance(reason, str) and reason.startswith("["):
        try:
            reason = ast.literal_eval(reason)  # '["stop"]' of JSON and "['stop']" of Python
        except (ValueError, SyntaxError):
            return None
    reason = reason[0] if isinstance(reason, list) and reason else reason
    return reason if isinstance(reason, str) else None


def _defined(value: JsonObject) -> list[JsonObject] | None:
    """Return the schemas in `toolDefinitions`: {"f": '{"description": .., "parameters": ..}'}."""
    defined = parsed(_either(value, "toolDefinitions", "tool_definitions"))
    if not isinstance(defined, dict):
        return None
    schemas = ((name, parsed(each)) for name, each in defined.items())
    return [{"name": name} | object_or_empty(each) for name, each in schemas] or None


def _schemas(metadata: JsonObject, attributes: JsonObject) -> list[JsonObject] | None:
    """Return the schemas of tools in the metadata of an observation."""
    listed = next((found for name in SCHEMAS if (found := tree(attributes, name))), None) or parsed(
        metadata.get("tools")
    )
    schemas = [parsed(each) for each in listed] if isinstance(listed, list) else []
    # {"tool": {"json_schema": '{"name": "f"}'}} -> {"name": "f"}
    unwrapped = [parsed(get(each, "tool.json_schema")) or each for each in schemas if isinstance(each, dict)]
    return [each for each in unwrapped if isinstance(each, dict)] or None


_KIND = ValueKind("a type of observation", lambda value: isinstance(value, str) and value.upper() in _TYPES)
_OBSERVATION: Fields = {"id": TEXT, ("traceId", "trace_id"): TEXT, "type": _KIND}
_NAMES = ValueKind(
    "a list of ids", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
)
_TRACE: Fields = {"id": TEXT, "timestamp": TEXT, "observations": _NAMES}
_FULL: Fields = {"observations": some(_OBSERVATION)}
FORMAT = Format(
    name="langfuse",
    rank=590,
    program="Langfuse (traces and observations of the UI, the API, or an export)",
    recognised_by="`observations` with `traceId` and `type`, or one of them, or `data` with traces or observations",
    requires=[_FULL, _OBSERVATION, _TRACE, {"data": first(_OBSERVATION, _TRACE)}],
    checked="none",
    used=USED,
    also=ALSO,
    view=langfuse_view,
    dropped="""
        input and output of a trace (its calls contain them);
        observations that are not generations (the calls contain the results of tools);
        scores that are not numbers, and corrections (named in a note);
        scores in a file of their own;
        usage, costs, times, versions, prompts
    """,
    keeps="rewards",
    read_file=_read_langfuse,
)
