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

from treepack.calls.spans.span_paths import SPANS
from treepack.calls.spans.span_rollouts import DROPPED, is_openinference, read_file
from treepack.calls.spans.trace_spans import span_view
from treepack.formats.kit import Format

FORMAT = Format(
    name="openinference",
    rank=570,
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
    """,
    also=SPANS,
    view=span_view,
    dropped=(
        *DROPPED,
        "input.value and output.value (the same call in the client's words)",
        "signatures and encrypted reasoning",
        "labels and explanations of annotations",
    ),
    keeps="rewards",
    read_file=read_file,
)
