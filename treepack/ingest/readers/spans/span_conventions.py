"""Distinguish the conventions of OpenInference from the conventions of OpenTelemetry for generative AI."""

from __future__ import annotations

from typing import Any

from treepack.ingest.readers.fields.values import is_messages
from treepack.ingest.readers.spans.trace_spans import COLUMN, parsed

_KINDS = frozenset("LLM EMBEDDING CHAIN RETRIEVER RERANKER TOOL AGENT GUARDRAIL EVALUATOR PROMPT UNKNOWN".split())
_MARKS = ("openinference.", "llm.input_messages", "llm.output_messages")
_NESTED_MARKS = (("openinference", "span"), ("llm", "input_messages"), ("llm", "output_messages"))
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
