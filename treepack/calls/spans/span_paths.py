"""The fields of spans that `spans`, `span_calls` and `span_rollouts` read, as declared paths.

{"context": {"trace_id"}, "attributes": {..}}     -->  "context.trace_id", "attributes.llm.tools.tool.json_schema", ..
{"resourceSpans": [{"scopeSpans": [{"spans": ..   -->  "resourceSpans.scopeSpans.spans.traceId", ..
"""

from __future__ import annotations

from treepack.ingest.readers.fields.unread import below

_PARTS = "type content id name arguments response result modality".split()
_MESSAGE = "role name tool_call_id finish_reason content".split()
_GEMINI_CONFIG = "system_instruction tools temperature".split()
_SDK_PARTS = "type text toolCallId toolName input args output result".split()
_CALL = "id type name arguments function.name function.arguments".split()


_TREE_MESSAGE = [
    *_MESSAGE,
    *"reasoning_content function_call_name function_call_arguments_json".split(),
    *below(["tool_calls", "tool_calls.tool_call", "contents.tool_call"], _CALL),
    *below(["contents.message_content"], ("type", "text")),
]
_INDEXED = [*_MESSAGE, "content{}", *below(["content"], ("type", "text")), *below(["tool_calls"], _CALL)]
_SCORES = [f"{target}{kind}s" for target in ("", "trace.", "session.") for kind in ("annotation", "evaluation")]
_ATTRIBUTES = [
    *(
        """
        openinference.span.kind gen_ai.operation.name gen_ai.conversation.id session.id
        traceloop.association.properties.session_id gen_ai.response.model gen_ai.request.model llm.model_name
        gen_ai.agent.name agent.name gen_ai.request.temperature gen_ai.response.finish_reasons
        gen_ai.response.finish_reason gen_ai.response.stop_reason llm.response.finish_reason llm.response.stop_reason
        llm.finish_reason gen_ai.evaluation.name gen_ai.evaluation.score.value gen_ai.tool.definitions
        llm.request.functions metadata{} metadata.* llm.invocation_parameters{} llm.invocation_parameters.temperature
        llm.invocation_parameters.n llm.invocation_parameters.tools llm.tools{} llm.tools.tool.json_schema
        gen_ai.system_instructions{} gen_ai.system_instructions.type gen_ai.system_instructions.content
        gcp.vertex.agent.session_id gcp.vertex.agent.llm_request{} gcp.vertex.agent.llm_response{}
        ai.telemetry.metadata.sessionId ai.response.text ai.response.toolCalls ai.response.reasoning
        ai.response.finishReason ai.response.object ai.response.model ai.prompt.messages{} ai.prompt.tools
        """.split()
    ),
    *below(["gen_ai.input", "gen_ai.output"], ["messages{}", *below(["messages"], _MESSAGE), "messages.parts{}"]),
    *below(["gen_ai.input.messages", "gen_ai.output.messages"], below(["parts", "content"], _PARTS)),
    *below(["llm.input_messages", "llm.output_messages"], [*_TREE_MESSAGE, *below(["message"], _TREE_MESSAGE)]),
    *below(["llm"], ("input_messages{}", "output_messages{}")),
    *below(["gen_ai.prompt", "gen_ai.completion"], _INDEXED),
    *below(["gcp.vertex.agent.llm_request"], ["contents", *below(["config"], _GEMINI_CONFIG)]),
    *below(["gcp.vertex.agent.llm_response"], ["content", "finish_reason", "partial"]),
    *below(["ai.prompt.messages"], [*_MESSAGE, *below(["content"], _SDK_PARTS)]),
    *(f"{name}{mark}" for name in _SCORES for mark in ("{}", ".name!", ".score")),
    *(
        f"{name}.{name.rpartition('.')[2].removesuffix('s')}.{field}"
        for name in _SCORES
        for field in ("name!", "score")
    ),
]
_SPAN = [
    *(
        """
        traceId trace_id spanId span_id parentSpanId parent_span_id parent_id startTimeUnixNano start_time! startTime!
        span_kind status_code status.code status.status_code events{} events.name attributes{} events.attributes{}
        """.split()
    ),
    *below(["context"], "traceId trace_id spanId span_id parentSpanId parent_span_id parent_id".split()),
    *below(["attributes", "events.attributes"], _ATTRIBUTES),
]
SPANS = [*_SPAN, *below(["resourceSpans.scopeSpans.spans"], _SPAN)]
