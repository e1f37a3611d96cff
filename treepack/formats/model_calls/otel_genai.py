"""OpenTelemetry spans of LLM calls in the conventions for generative AI: OTLP as JSON, or one span per line.

    {"resourceSpans": [{"scopeSpans": [{"spans": [span, ..]}]}]}      attributes as [{"key", "value": {"stringValue"}}]
    {"trace_id", "span_id", "start_time", "attributes": {"gen_ai...": ..}}                   ids also in "context"

    span  gen_ai.system_instructions  gen_ai.input.messages   gen_ai.output.messages      of gen_ai.conversation.id
    call  system                      the rest of the prompt  the response, or several    of a rollout

Messages are `{role, parts: [text | reasoning | tool_call | tool_call_response]}`, as objects or as JSON text, in the
span or in one of its events. OpenLLMetry writes them as `gen_ai.prompt.0.content` and `gen_ai.completion.0.content`,
Google ADK as `gcp.vertex.agent.llm_request` and `llm_response`, the AI SDK as `ai.prompt.messages` and `ai.response`.
The prompt of a call is the whole conversation, and calls that continue each other are joined. Spans without a
conversation are joined by their trace. The scores of `gen_ai.evaluation.result` events are the reward. The attributes
of OpenLLMetry are read after its source.
"""

from __future__ import annotations

from treepack.calls.spans.span_paths import SPANS
from treepack.calls.spans.span_rollouts import DROPPED, is_openinference, read_file
from treepack.calls.spans.trace_spans import span_view
from treepack.formats.kit import Format
from treepack.ingest.readers.kinds import SET, ValueKind

_ATTRIBUTES = ValueKind(
    "an object or a list, in other conventions than OpenInference",
    lambda value: isinstance(value, dict | list) and not is_openinference({"attributes": value}),
)
OTLP = ValueKind(
    "a list of spans in other conventions than OpenInference",
    lambda value: isinstance(value, list) and not is_openinference({"resourceSpans": value}),
)
FORMAT = Format(
    name="otel-genai",
    rank=580,
    program="OpenTelemetry (generative AI conventions), OpenLLMetry (after its source), Google ADK, AI SDK (Vercel)",
    recognised_by="`resourceSpans`, or a span id beside `attributes`",
    requires=[
        {"resourceSpans": OTLP},
        {("span_id", "spanId", "context.span_id", "context.spanId"): SET, "attributes": _ATTRIBUTES},
    ],
    used="""
        resourceSpans.scopeSpans.spans.attributes resourceSpans.scopeSpans.spans.events.name
        resourceSpans.scopeSpans.spans.events.attributes resourceSpans.scopeSpans.spans.traceId
        resourceSpans.scopeSpans.spans.spanId resourceSpans.scopeSpans.spans.parentSpanId
        resourceSpans.scopeSpans.spans.startTimeUnixNano resourceSpans.scopeSpans.spans.status
        context.trace_id context.span_id trace_id start_time status attributes events.name events.attributes
    """,
    also=SPANS,
    view=span_view,
    dropped=(*DROPPED, "blobs, files, uris and server-side tools (calls that have some are skipped)"),
    keeps="rewards",
    read_file=read_file,
)
