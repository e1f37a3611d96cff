"""The calls of a language model in a span's attributes, in the conventions of several instrumentations.

    gen_ai.input.messages, gen_ai.output.messages                OpenTelemetry: messages of parts
    llm.input_messages.0.message.role, llm.output_messages...    OpenInference (Phoenix)
    gen_ai.prompt.0.role, gen_ai.completion.0.content            OpenLLMetry (Traceloop)
    gcp.vertex.agent.llm_request, gcp.vertex.agent.llm_response  Google ADK: requests and responses of Gemini
    ai.prompt.messages, ai.response.text, ai.response.toolCalls  AI SDK (Vercel), in spans doGenerate and doStream

    TraceSpan --calls_of_span--> SpanCalls: calls, notes     or the reason why the span has none

`span_paths` declares the attributes that are read here; all others become notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from treepack.calls.apis.api_forms import prompt_of, responses_of
from treepack.calls.apis.otel_parts import messages_of_parts
from treepack.calls.chat_calls import ChatCall
from treepack.calls.spans.trace_spans import TraceSpan, get, tree
from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed
from treepack.ingest.readers.fields.rollout_facts import temperature_of
from treepack.ingest.readers.fields.values import JsonObject, as_objects, is_messages, shown
from treepack.ingest.readers.messages.content_blocks import split_blocks
from treepack.ingest.readers.messages.merged_turns import answered, left_over, merged_turns
from treepack.ingest.readers.messages.message_trees import RENAMED_ROLES, message_of_tree
from treepack.ingest.readers.messages.prefills import mark_prefills
from treepack.trajectory import Skipped

Message = JsonObject

# Operations of an LLM call; older instrumentations name no operation.
_OPERATIONS = (None, "chat", "generate_content", "text_completion", "call_llm")
INSTRUCTIONS, _INPUT, _OUTPUT = "gen_ai.system_instructions", "gen_ai.input.messages", "gen_ai.output.messages"
_TOOLS, _TEMPERATURE, REASONS = (
    "gen_ai.tool.definitions",
    "gen_ai.request.temperature",
    "gen_ai.response.finish_reasons",
)
_LLM_INPUT, _LLM_OUTPUT = "llm.input_messages", "llm.output_messages"
_SETTINGS = "llm.invocation_parameters"
# Names of the model and its provider, of which Anthropic continues the last answer of a request.
_MODELS = (
    "gen_ai.request.model gen_ai.response.model gen_ai.system gen_ai.provider.name llm.model_name llm.provider "
    "llm.system"
).split()
_PROMPT, _COMPLETION, _FUNCTIONS = "gen_ai.prompt", "gen_ai.completion", "llm.request.functions"
_ADK_REQUEST, _ADK_RESPONSE = "gcp.vertex.agent.llm_request", "gcp.vertex.agent.llm_response"
_SDK_PROMPT, _SDK_RESPONSE = "ai.prompt.messages", "ai.response"
_SDK_SAID = ("text", "toolCalls", "reasoning", "finishReason")
_NO_CALL_NOTE = "span without an LLM call"
_AROUND_NOTE = "span around LLM calls, whose messages are not those of one call"
_NO_CONTENT_NOTE = "LLM call whose messages were not captured"
FAILED_NOTE = "LLM call that failed"
_RAW_NOTE = "LLM call with input.value and output.value only, which have no fixed form"
_INDEXED_REASONS = (
    "gen_ai.response.finish_reason",
    "gen_ai.response.stop_reason",
    "llm.response.finish_reason",
    "llm.response.stop_reason",
)
_EMPTY_SCHEMA_NOTE = "empty tool schema not used"
# Attributes of calls in conventions that are not read, each with the name of the convention.
_UNREAD = {
    "ai.result": "the Vercel AI SDK before version 4",
    "langfuse.observation.input": "Langfuse's SDK",
    "langfuse.observation.output": "Langfuse's SDK",
    "mlflow.spanInputs": "MLflow",
    "mlflow.spanOutputs": "MLflow",
    "weave.input": "Weave",
    "weave.output": "Weave",
    "request_data": "Logfire",
    "response_data": "Logfire",
    "events": "Pydantic AI before version 1.0",
    "all_messages_events": "Pydantic AI before version 1.0",
    "braintrust.input_json": "Braintrust",
    "braintrust.output_json": "Braintrust",
    "lk.chat_ctx": "LiveKit",
}
_CHOICE_EVENTS = frozenset({"gen_ai.choice", "gen_ai.assistant.message", "gen_ai.content.completion"})


@dataclass(frozen=True, slots=True)
class SpanCalls:
    """The calls of one span, and remarks to be counted."""

    calls: list[ChatCall]
    notes: tuple[str, ...]


def calls_of_span(span: TraceSpan) -> SpanCalls | Skipped:
    """Return the calls of `span`, or why it has none that can be read.

    Raises:
        TreepackError: messages of the span are not of a form above.
    """
    attributes = span.attributes
    is_other = span.kind != "" and span.kind not in ("LLM", "UNKNOWN")
    if is_other or get(attributes, "gen_ai.operation.name") not in _OPERATIONS:
        around = _has(attributes, _INPUT) and _has(attributes, _OUTPUT)
        return Skipped(span.source, _AROUND_NOTE if around else _NO_CALL_NOTE, is_rollout=False)
    for prompt, response, read in _CONVENTIONS:
        # Google ADK writes "{}" in place of messages that are not to be captured.
        if _has(attributes, prompt) and _has(attributes, response) and parsed(get(attributes, prompt)) != {}:
            if span.failed:
                return Skipped(span.source, FAILED_NOTE)
            notes: dict[str, None] = {}
            settings = parsed(get(attributes, _SETTINGS))
            model = " ".join(str(get(attributes, name)) for name in _MODELS)
            name = f"{span.trace}/{span.name}" if span.name else ""
            calls = [
                replace(
                    call, prompt=mark_prefills(call.prompt, settings, model=model), name=name and f"{name}/{number}"
                )
                for number, call in enumerate(read(span, notes))
            ]
            return SpanCalls(calls, tuple(notes))
    return _without_messages(span)


def _has(attributes: JsonObject, name: str) -> bool:
    return get(attributes, name) is not None or any(each.startswith(name + ".") for each in attributes)


def _without_messages(span: TraceSpan) -> Skipped:
    """Return the reason why the messages of `span` cannot be read."""
    attributes = span.attributes
    convention = next((name for mark, name in _UNREAD.items() if _has(attributes, mark)), None)
    is_call = span.kind == "LLM" or any(name.startswith(("gen_ai.", "llm.")) for name in attributes)
    if span.failed and is_call:
        return Skipped(span.source, FAILED_NOTE)
    if convention is not None:
        return Skipped(span.source, f"span in the convention of {convention}, which is not read")
    if _CHOICE_EVENTS & set(span.events):
        return Skipped(span.source, "LLM call whose messages are in events of an older convention, which is not read")
    if not is_call:
        around = _has(attributes, "ai.prompt") and _has(attributes, _SDK_RESPONSE)
        return Skipped(span.source, _AROUND_NOTE if around else _NO_CALL_NOTE, is_rollout=False)
    is_raw = _has(attributes, "input.value") and _has(attributes, "output.value")
    return Skipped(span.source, _RAW_NOTE if is_raw else _NO_CONTENT_NOTE)


# OpenTelemetry


def _genai(span: TraceSpan, notes: dict[str, None]) -> Iterator[ChatCall]:
    """Yield one call for each response of `span`."""
    instructions = _value(span, INSTRUCTIONS)
    # Instructions are text, or a list of parts.
    parts = [{"type": "text", "content": instructions}] if isinstance(instructions, str) else instructions
    prompt = messages_of_parts([{"role": "system", "parts": parts}], span.source, INSTRUCTIONS) if parts else []
    prompt += messages_of_parts(_value(span, _INPUT) or [], span.source, _INPUT)
    responses = _value(span, _OUTPUT)
    if not is_messages(responses):
        raise TreepackError(f"{span.source}: {_OUTPUT} is {shown(responses)}; expected a list of messages")
    reasons = _value(span, REASONS)
    for number, response in enumerate(responses):
        if isinstance(reasons, list) and number < len(reasons):
            response = {"finish_reason": reasons[number]} | response
        said = answered(messages_of_parts([{"role": "assistant"} | response], span.source, _OUTPUT))
        yield ChatCall(prompt, said, _tools(_value(span, _TOOLS), notes), temperature=_temperature(span))


def _value(span: TraceSpan, name: str) -> Any:
    return parsed(get(span.attributes, name))


def _temperature(span: TraceSpan) -> float | None:
    return temperature_of({"temperature": get(span.attributes, _TEMPERATURE)})


# OpenInference


def _openinference(span: TraceSpan, notes: dict[str, None]) -> Iterator[ChatCall]:
    """Yield the call of `span`, or one for each answer if several were asked for."""
    settings = parsed(get(span.attributes, _SETTINGS))
    settings = settings if isinstance(settings, dict) else {}
    prompt = [message_of_tree(each, span.source, notes) for each in _list(span, _LLM_INPUT)]
    said = [{"role": "assistant"} | message_of_tree(each, span.source, notes) for each in _list(span, _LLM_OUTPUT)]
    if said and (reason := get(span.attributes, "llm.finish_reason")) is not None:
        said[-1].setdefault("finish_reason", reason)
    schemas = [parsed(get(each, "tool.json_schema")) for each in _list(span, "llm.tools")]
    tools = _tools(schemas or settings.get("tools"), notes)
    temperature = temperature_of(settings)
    # The items of one response may be several messages, and so may be several answers to one question.
    is_several = isinstance(settings.get("n"), int) and settings["n"] > 1
    for responses in [[each] for each in said] if is_several else [said]:
        asked, answers = (merged_turns(split_blocks(each, between="")) for each in (prompt, responses))
        yield ChatCall(asked, answered(answers), tools, temperature=temperature)


def _list(span: TraceSpan, name: str) -> list[Message]:
    value = tree(span.attributes, name)
    return as_objects(None if value == {} else value, source=span.source, name=name)


# OpenLLMetry


def _traceloop(span: TraceSpan, notes: dict[str, None]) -> Iterator[ChatCall]:
    """Yield one call for each completion of `span`."""
    prompt = [_message_of_index({"role": "user"} | each) for each in _list(span, _PROMPT)]
    functions = [
        each | {"parameters": parsed(each.get("parameters"))} if "parameters" in each else each
        for each in _list(span, _FUNCTIONS)
    ]
    reason = next((found for name in _INDEXED_REASONS if (found := get(span.attributes, name)) is not None), None)
    for completion in _list(span, _COMPLETION):
        said = _message_of_index({"role": "assistant", "finish_reason": reason} | completion)
        yield ChatCall(prompt, answered([said]), _tools(functions, notes), temperature=_temperature(span))


def _message_of_index(message: Message) -> Message:
    done = dict(message)
    role = done["role"]
    done["role"] = RENAMED_ROLES.get(role, role) if isinstance(role, str) else role
    # Content parts are written as JSON text: '[{"type": "text", "text": "Hi"}]'
    content = parsed(done.get("content"))
    if is_messages(content) and content and all(isinstance(part.get("type"), str) for part in content):
        done["content"] = content
    if is_messages(calls := done.get("tool_calls")):
        done["tool_calls"] = [{key: call[key] for key in ("id", "name", "arguments") if key in call} for call in calls]
        for call in calls:
            done |= left_over(call, ("id", "type", "name", "arguments"), "tool_calls")
    return done


# Requests and responses of an API


def _adk(span: TraceSpan, notes: dict[str, None]) -> Iterator[ChatCall]:
    """Yield the call of `span`; a part of a response that was streamed has no end."""
    response = _value(span, _ADK_RESPONSE)
    is_part = isinstance(response, dict) and response.pop("partial", False) is True
    yield from _logged(span, notes, _value(span, _ADK_REQUEST), response, ending="incomplete" if is_part else None)


def _ai_sdk(span: TraceSpan, notes: dict[str, None]) -> Iterator[ChatCall]:
    """Yield the call of `span`, whose answer may be an object in JSON."""
    response = {name: get(span.attributes, f"{_SDK_RESPONSE}.{name}") for name in _SDK_SAID}
    text = next((each for each in (response["text"], get(span.attributes, "ai.response.object")) if each), "")
    schemas = _value(span, "ai.prompt.tools")
    schemas = [parsed(each) for each in schemas] if isinstance(schemas, list) else schemas
    said = {name: value for name, value in response.items() if value is not None} | {"text": text}
    yield from _logged(span, notes, get(span.attributes, _SDK_PROMPT), said, schemas)


def _logged(
    span: TraceSpan, notes: dict[str, None], request: Any, response: Any, tools: Any = None, ending: Any = None
) -> Iterator[ChatCall]:
    prompt = prompt_of(request, source=span.source)
    heat = prompt.temperature if prompt.temperature is not None else _temperature(span)
    for said in responses_of(response, source=span.source):
        yield ChatCall(prompt.messages, said, _tools(tools or prompt.tools, notes), temperature=heat, ending=ending)


# All conventions


def _tools(schemas: Any, notes: dict[str, None]) -> Any:
    """Return schemas without empty ones, which exporters write in place of removed ones; None if all are empty."""
    if not isinstance(schemas, list):
        return schemas or None
    if any(schema in ({}, None) for schema in schemas):
        notes[_EMPTY_SCHEMA_NOTE] = None
    return [schema for schema in schemas if schema not in ({}, None)] or None


_ReadSpan = Callable[[TraceSpan, dict[str, None]], Iterator[ChatCall]]
# The attributes of prompt and response of each convention; the first one that a span has counts.
_CONVENTIONS: tuple[tuple[str, str, _ReadSpan], ...] = (
    (_INPUT, _OUTPUT, _genai),
    (_LLM_INPUT, _LLM_OUTPUT, _openinference),
    (_PROMPT, _COMPLETION, _traceloop),
    (_ADK_REQUEST, _ADK_RESPONSE, _adk),
    (_SDK_PROMPT, _SDK_RESPONSE, _ai_sdk),
)
