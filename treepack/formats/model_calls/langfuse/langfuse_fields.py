"""The fields of Langfuse's traces and observations that `formats.langfuse` reads, as declared paths.

{"trace": {"id", "scores"}, "observations": [{"id", "input": {"messages": ..}, "output": ..}]}
-->  "trace.id", "trace.scores.value", "observations.id", "observations.input.messages.content", ..
"""

from __future__ import annotations

from treepack.calls.apis.api_paths import requests, responses
from treepack.calls.spans.span_calls import INSTRUCTIONS
from treepack.files.input_files.json_text import parsed
from treepack.formats.kit import JsonObject, is_messages, without
from treepack.ingest.readers.fields.unread import declare

# Where integrations put the reason why a response ends, and the schemas of tools, among the attributes of their spans.
FINISHED = ("ai.response.finishReason", "llm.finish_reason", "gen_ai.response.finish_reasons")
SCHEMAS = ("gen_ai.tool.definitions", "ai.prompt.tools", "llm.tools")


def _paths(prefixes: str, names: str) -> tuple[str, ...]:
    # ("a. ", "x y") -> a.x a.y x y: the fields `names` below each prefix, and below none if the prefixes end with " "
    listed = prefixes.split(" ")
    return tuple(prefix + name for prefix in listed for name in names.split())


# The metadata of an observation.
METADATA = declare(
    [
        *("tools", "attributes{}", f"attributes.{INSTRUCTIONS}"),
        *(f"attributes.{name}" for name in (*FINISHED, *SCHEMAS)),
    ]
)
_PREFIXES = ("", "observations.", "data.", "data.observations.")  # of observations and scores


def langfuse_view(value: JsonObject) -> JsonObject:
    """Return a record without the scores that are values by name: all of them are used or noted."""
    done = {
        name: langfuse_view(each) if name == "trace" and isinstance(each, dict) else each
        for name, each in value.items()
    }
    for name in ("data", "observations"):
        if is_messages(value.get(name)):
            done[name] = [langfuse_view(each) for each in value[name]]
    scores = parsed(done.get("scores"))
    return without(done, ("scores",)) if isinstance(scores, dict) else done | ({"scores": scores} if scores else {})


USED = (
    *_paths("trace. ", "id sessionId userId metadata scores.name scores.value scores.dataType corrections"),
    *_paths(
        "observations. data. ",
        "id traceId type parentObservationId startTime level input output model modelParameters.temperature "
        "toolDefinitions toolCalls metadata",
    ),
    *"trace_id parent_observation_id start_time provided_model_name tool_definitions".split(),
)
ALSO = (
    *_paths("trace. data. ", "session_id user_id metadata{} metadata.*"),
    *(
        prefix + name
        for prefix in _PREFIXES
        for name in (
            *"trace_id parent_observation_id start_time startTime! start_time! providedModelName".split(),
            *"provided_model_name tool_definitions modelParameters{} modelParameters.temperature".split(),
            *"model_parameters{} model_parameters.temperature metadata{} metadata.* id traceId type level".split(),
            *"parentObservationId model toolDefinitions sessionId userId corrections".split(),
            *_paths("toolCalls.", "id name arguments type input args toolName toolCallId"),
            *("toolCalls{}", *_paths("scores. trace.scores.", "name! value dataType data_type")),
            *requests("input"),
            *responses("output"),
        )
    ),
)
