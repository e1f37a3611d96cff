"""Spans of LLM calls in the OpenInference conventions, as Phoenix and its client export them, or as OTLP.

    {"context": {"trace_id", "span_id"}, "span_kind": "LLM", "attributes": {"llm.input_messages.0.message.role": ..}}
    {"context.trace_id": .., "span_kind": "LLM", "attributes.llm.input_messages": [{"message.role": ..}, ..]}
    {"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"key": "openinference.span.kind", ..}, ..]}]}]}]}

    span  llm.input_messages  llm.output_messages               llm.tools  llm.invocation_parameters   of session.id
    call  the prompt          the response (`n`: several)       tools      temperature                 of a rollout

Attributes are flat or nested, and nested ones may be JSON text. The prompt of a call is the whole conversation, and
calls that continue each other are joined. Spans without a session are joined by their trace. Annotations and
evaluations with a score are the reward. `input.value` and `output.value` repeat the call in no fixed form, so a call
that has nothing else is skipped. Rows of tables are read after the description of Phoenix's client.
"""

from __future__ import annotations

from typing import Any

from treepack.ingest.readers.format import REWARDS, Format
from treepack.ingest.readers.messages.normal_form import is_messages
from treepack.ingest.readers.spans.span_paths import SPANS
from treepack.ingest.readers.spans.span_rollouts import read_file
from treepack.ingest.readers.spans.trace_spans import COLUMN, parsed, view

KINDS = frozenset("LLM EMBEDDING CHAIN RETRIEVER RERANKER TOOL AGENT GUARDRAIL EVALUATOR PROMPT UNKNOWN".split())
MARKS = ("openinference.", "llm.input_messages", "llm.output_messages")
NESTED_MARKS = (("openinference", "span"), ("llm", "input_messages"), ("llm", "output_messages"))
DROPPED = (
    "spans of tools, agents, chains and embeddings (the calls contain their results)",
    "settings of the call other than the temperature, usage, costs, resources",
)


def is_openinference(value: dict[str, Any]) -> bool:
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
    is_kind = isinstance(kind, str) and kind.upper() in KINDS
    attributes = value.get("attributes")
    return "attributes" in value and (_is_marked(attributes) or ((has_id or "context.span_id" in value) and is_kind))


def _is_marked(attributes: Any) -> bool:
    attributes = parsed(attributes)
    if is_messages(attributes):
        return any(str(each.get("key")).startswith(MARKS) for each in attributes)
    if not isinstance(attributes, dict):
        return False
    nested = any(isinstance(attributes.get(name), dict) and inner in attributes[name] for name, inner in NESTED_MARKS)
    return nested or any(name.startswith(MARKS) for name in attributes)


FORMAT = Format(
    name="openinference",
    program="Phoenix, or any instrumentation of OpenInference",
    recognised_by="`span_kind` beside `attributes` and a span id, columns `attributes.llm...`, or spans of OTLP that "
    "have `openinference.span.kind`",
    requires=is_openinference,
    checked="none",
    used="""
        context.trace_id context.span_id parent_id span_kind start_time status_code attributes events.name
        events.attributes resourceSpans.scopeSpans.spans.attributes resourceSpans.scopeSpans.spans.traceId
        resourceSpans.scopeSpans.spans.spanId resourceSpans.scopeSpans.spans.parentSpanId
        resourceSpans.scopeSpans.spans.startTimeUnixNano resourceSpans.scopeSpans.spans.status.code
        resourceSpans.scopeSpans.spans.events.name resourceSpans.scopeSpans.spans.events.attributes
    """.split(),
    also=SPANS,
    view=view,
    dropped=(
        *DROPPED,
        "input.value and output.value (the same call in the client's words)",
        "signatures and encrypted reasoning",
        "labels and explanations of annotations",
    ),
    keeps={REWARDS},
    read_file=read_file,
)
