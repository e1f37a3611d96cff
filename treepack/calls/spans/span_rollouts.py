"""The spans of a file to rollouts: the calls of each conversation in the order of time, and the facts of its spans.

    records --spans.spans_of--> TraceSpan --span_calls.calls_of_span--> calls of "conversation" --read_chats--> rollout

A conversation is `gen_ai.conversation.id`, `session.id`, or else a trace. If one of its spans is damaged, the whole
conversation is skipped: a call without the calls before it would be trained with another prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treepack.calls.chat_calls import ChatCall, read_chats
from treepack.calls.conversations import with_notes
from treepack.calls.spans.span_calls import SpanCalls, calls_of_span
from treepack.calls.spans.trace_spans import COLUMN, TraceSpan, get, spans_of, tree
from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.values import JsonObject, as_id, is_messages
from treepack.ingest.readers.messages.content_blocks import skip_reason
from treepack.trajectory import Outcomes, Skipped

_METADATA = "metadata"
_FACTS = (
    ("model", ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name", "ai.response.model")),
    ("agent", ("gen_ai.agent.name", "agent.name")),
)
_DAMAGED_NOTE = "conversation with a damaged span"
_SPLIT_NOTE = "calls of one trace in several conversations"
_NO_TRACE_NOTE = "span without a trace"
_INSIDE_NOTE = "span inside the span of the same LLM call"
_CONVERSATIONS = (
    "gen_ai.conversation.id",
    "session.id",
    "traceloop.association.properties.session_id",
    "gcp.vertex.agent.session_id",
    "ai.telemetry.metadata.sessionId",
)
# The scores of OpenInference: attributes, and the name of their objects.
_SCORES = tuple(
    (f"{target}{name}s", name) for target in ("", "trace.", "session.") for name in ("annotation", "evaluation")
)


_KINDS = frozenset("LLM EMBEDDING CHAIN RETRIEVER RERANKER TOOL AGENT GUARDRAIL EVALUATOR PROMPT UNKNOWN".split())
_MARKS = ("openinference.", "llm.input_messages", "llm.output_messages")
_NESTED_MARKS = (("openinference", "span"), ("llm", "input_messages"), ("llm", "output_messages"))
DROPPED = (
    "spans of tools, agents, chains and embeddings (the calls contain their results)",
    "settings of the call other than the temperature, usage, costs, resources",
)


@dataclass(slots=True)
class _SpanConversation:
    """The spans of one conversation that have calls, and the record of the first of them."""

    record: Record
    spans: list[tuple[TraceSpan, SpanCalls]] = field(default_factory=list)


def read_file(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the conversations of one file, in the order of their first spans.

    Spans without an LLM call are skipped, and so are conversations with a damaged span.

    Raises:
        TreepackError: OTLP without spans in it.
    """
    conversations: dict[str, _SpanConversation] = {}
    # Damaged spans by trace and conversation, and by trace the facts of spans that are not calls, such as a root.
    faults: dict[str, str] = {}
    others: dict[str, list[TraceSpan]] = {}
    for record in records:
        for span in spans_of(record):
            name = span.trace or span.source
            try:
                name = _name(span)
                found = calls_of_span(span) if not span.fault else None
                sentence = span.fault
            except TreepackError as error:
                found, sentence = None, str(error)
            if found is None:
                faults |= {name: sentence, span.trace or name: sentence}
            elif isinstance(found, Skipped):
                yield found
                if bare := _facts_only(span):
                    others.setdefault(span.trace, []).append(bare)
            else:
                # A whole file of spans must not stay in memory.
                talk = conversations.setdefault(name, _SpanConversation(replace(record, value={})))
                talk.spans.append((span, found))
    # How many conversations have calls of each trace.
    spread = Counter(trace for talk in conversations.values() for trace in {span.trace for span, _ in talk.spans})
    for name, talk in conversations.items():
        fault = next((faults[each] for each in (name, *(span.trace for span, _ in talk.spans)) if each in faults), "")
        if fault:
            yield Skipped(talk.record.source, _DAMAGED_NOTE, detail=fault)
            faults = {each: sentence for each, sentence in faults.items() if sentence != fault}
        else:
            traces = dict.fromkeys(span.trace for span, _ in talk.spans)
            around = [span for trace in traces for span in others.get(trace, [])]
            remark = (
                _NO_TRACE_NOTE if "" in traces else _SPLIT_NOTE if any(spread[each] > 1 for each in traces) else None
            )
            yield from with_notes(_read(name, talk, around, options), () if remark is None else (remark,))
    for sentence in dict.fromkeys(faults.values()):
        yield Skipped(sentence.partition(": ")[0], _DAMAGED_NOTE, detail=sentence)


def _name(span: TraceSpan) -> str:
    """Return the conversation of a span, or else its trace; a span with neither is a conversation by itself.

    Raises:
        TreepackError: the conversation is neither text nor a number.
    """
    for attribute in _CONVERSATIONS:
        if name := get(span.attributes, attribute):
            return str(as_id(name, source=span.source, name=attribute))
    return span.trace or f"{span.source}/{span.name}"


def _read(name: str, talk: _SpanConversation, others: Sequence[TraceSpan], options: ReadOptions) -> Outcomes:
    names = {span.name for span, _ in talk.spans if span.name}
    calls: list[ChatCall] = []
    notes: dict[str, None] = {}
    used: list[TraceSpan] = []
    # A file may mix nanoseconds and ISO times; integers are sorted before texts, because they do not compare.
    for span, found in sorted(talk.spans, key=lambda item: (isinstance(item[0].start, str), item[0].start)):
        reason = skip_reason([message for call in found.calls for message in (*call.prompt, *call.response)])
        # A library and the client that it calls may both write a span of the call.
        if span.parent in names:
            yield Skipped(span.source, _INSIDE_NOTE, is_rollout=False)
        elif reason is not None:
            yield Skipped(span.source, reason)
        else:
            calls += found.calls
            used.append(span)
            notes |= dict.fromkeys(found.notes)
    if not calls:
        return
    try:
        record = replace(talk.record, value=_description(name, used, others, notes))
        items = list(with_notes(read_chats(record, calls, options), tuple(notes)))
    except TreepackError as error:
        items = [Skipped(talk.record.source, _DAMAGED_NOTE, detail=str(error))]
    yield from items


def _facts_only(span: TraceSpan) -> TraceSpan | None:
    """Return `span` with only the attributes that describe its conversation, or None if it has none."""
    kept = {
        name: value
        for name, value in span.attributes.items()
        # {"trace": {"annotations": [..]}} has scores as well
        if name in (_METADATA, "trace", "session") or name.startswith(tuple(attribute for attribute, _ in _SCORES))
    }
    return replace(span, attributes=kept) if kept or span.scores else None


def _description(
    name: str, spans: Sequence[TraceSpan], others: Sequence[TraceSpan], notes: dict[str, None]
) -> JsonObject:
    """Return the facts of a conversation besides its calls, under the names that all formats share."""
    value: JsonObject = {"rollout_id": name}
    for key, names in _FACTS:
        found = [next((each for name in names if (each := get(span.attributes, name))), None) for span in spans]
        if distinct := dict.fromkeys(str(each) for each in found if each is not None):
            value[key] = ", ".join(distinct)
    scores: JsonObject = {}
    metadata: JsonObject = {}
    # The root comes last, because its scores and metadata are about the whole trace.
    for span in sorted([*spans, *others], key=lambda span: not span.parent):
        scores |= span.scores | _annotations(span, notes)
        of_span = parsed(get(span.attributes, _METADATA))
        metadata |= of_span if isinstance(of_span, dict) else {}
    return value | ({"rewards": scores} if scores else {}) | ({_METADATA: metadata} if metadata else {})


def _annotations(span: TraceSpan, notes: dict[str, None]) -> JsonObject:
    """Return the scores among the annotations of OpenInference: {"correct": {"score": 1.0}}."""
    scores = {}
    for attribute, kind in _SCORES:
        listed = tree(span.attributes, attribute)
        for each in listed if is_messages(listed) else ():
            fields = each.get(kind, each)
            label = str(fields.get("name")) if isinstance(fields, dict) else attribute
            if isinstance(fields, dict) and fields.get("score") is not None:
                scores[label] = {"score": fields["score"]}
            else:
                notes[f"{kind} '{label}' without a score not used"] = None
    return scores


def is_openinference(value: JsonObject) -> bool:
    """Return whether `value` is a span or a row of Phoenix, or OTLP with such a span."""
    if isinstance(scopes := value.get("resourceSpans"), list):
        for name in ("scopeSpans", "spans"):
            lists = [each.get(name) for each in scopes] if is_messages(scopes) else []
            scopes = [each for inner in lists if is_messages(inner) for each in inner]
        return any(_is_marked(each.get("attributes")) for each in scopes)
    if any(name.startswith(COLUMN) for name in value) and any(
        name in value for name in ("context.span_id", "span_kind")
    ):
        return True
    context = value.get("context")
    has_id = any(isinstance(each, dict) and ("span_id" in each or "spanId" in each) for each in (value, context))
    kind = value.get("span_kind")
    is_kind = isinstance(kind, str) and kind.upper() in _KINDS
    attributes = value.get("attributes")
    return "attributes" in value and (_is_marked(attributes) or ((has_id or "context.span_id" in value) and is_kind))


def _is_marked(attributes: Any) -> bool:
    attributes = parsed(attributes)
    if is_messages(attributes):
        return any(str(each.get("key")).startswith(_MARKS) for each in attributes)
    if not isinstance(attributes, dict):
        return False
    nested = any(isinstance(attributes.get(name), dict) and inner in attributes[name] for name, inner in _NESTED_MARKS)
    return nested or any(name.startswith(_MARKS) for name in attributes)
