"""Telemetry of LLM calls: OpenTelemetry spans and LangSmith runs; the calls among them, and the fields of a rollout."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.readings import only_chat, read_as, turns
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.formats.model_calls import otel_genai
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.trajectory import Skipped, Trajectory

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SCHEMA = {"name": "f", "parameters": {"type": "object"}}


def skipped(items: list[Any]) -> list[tuple[str, str]]:
    return [(item.source, item.reason) for item in items if isinstance(item, Skipped)]


# OpenTelemetry


def said(role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    texts = [{"type": "text", "content": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "parts": texts, **more}


def span(prompt: list[Any], answers: list[Any], **more: Any) -> dict[str, Any]:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": prompt, "gen_ai.output.messages": answers}
    attributes |= more.pop("also", {})
    return {"span_id": "1", "trace_id": "t", "start_time": 5, "attributes": attributes} | more


def wrapped(value: Any) -> dict[str, Any]:
    """A value as OTLP wraps it."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [wrapped(each) for each in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": key, "value": wrapped(each)} for key, each in value.items()]}}
    return {} if value is None else {"stringValue": value}


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    done = []
    for each in spans:
        attributes = [{"key": key, "value": wrapped(value)} for key, value in each["attributes"].items()]
        done.append(
            {"traceId": each["trace_id"], "startTimeUnixNano": str(each["start_time"]), "attributes": attributes}
        )
    return {"resourceSpans": [{"scopeSpans": [{"spans": done}]}]}


ASK = said("user", "2 + 3?")
CALL = said(
    "assistant",
    {"type": "reasoning", "content": "Add."},
    {"type": "tool_call", "id": "c1", "name": "f", "arguments": {}},
)
RESULT = said("tool", {"type": "tool_call_response", "id": "c1", "response": "5"})
ROUNDS = [span([ASK], [CALL], start_time=5), span([ASK, CALL, RESULT], [said("assistant", "It is 5.")], start_time=7)]


@pytest.mark.parametrize("records", [ROUNDS, ROUNDS[::-1], [otlp(*ROUNDS)], [otlp(*ROUNDS[::-1])]])
def test_spans_of_a_trace_are_joined_in_the_order_of_their_time(records: list[dict[str, Any]]) -> None:
    trajectory, content = only_chat(read_as("otel-genai", *records))
    assert turns(content) == [
        ("user", "2 + 3?", 0.0),
        ("assistant", "", 1.0),
        ("tool", "5", 0.0),
        ("assistant", "It is 5.", 1.0),
    ]
    assert content.messages[1]["reasoning_content"] == "Add."
    assert content.messages[1]["tool_calls"][0]["function"]["name"] == "f"
    assert (trajectory.trajectory_id, trajectory.notes) == ("t", ())


@given(st.dictionaries(TEXT, JSON.filter(lambda value: value is not None), max_size=3))
def test_arguments_and_results_survive_the_wrapping_of_otlp(arguments: dict[str, Any]) -> None:
    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nulls(each) for key, each in value.items()}
        return [without_nulls(each) for each in value] if isinstance(value, list) else {} if value is None else value

    call = said("assistant", {"type": "tool_call", "id": "c1", "name": "f", "arguments": arguments})
    _, content = only_chat(read_as("otel-genai", otlp(span([ASK], [call]))))
    assert content.messages[1]["tool_calls"][0]["function"]["arguments"] == without_nulls(arguments)


def test_a_conversation_spans_traces_and_names_its_model() -> None:
    also = {"gen_ai.conversation.id": "v", "gen_ai.request.model": "m"}
    first = span([ASK], [said("assistant", "5")], also=also)
    second = span(
        [ASK, said("assistant", "5"), ASK], [said("assistant", "Yes.")], trace_id="u", start_time=9, also=also
    )
    trajectory, content = only_chat(read_as("otel-genai", first, second))
    assert (trajectory.trajectory_id, trajectory.metadata) == ("v", {"model": "m"})
    assert content.message_weights == [0.0, 1.0, 0.0, 1.0]


def test_scores_are_the_reward() -> None:
    def score(name: str, value: float) -> dict[str, Any]:
        attributes = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}
        return {"name": "gen_ai.evaluation.result", "attributes": attributes}

    value = span([ASK], [said("assistant", "5")], events=[score("right", 1.0), score("short", 0.25)])
    assert only_chat(read_as("otel-genai", value))[0].reward == 1.25
    assert only_chat(read_as("otel-genai", value, reward_key="short"))[0].reward == 0.25


def test_a_score_without_a_number_and_an_attribute_without_a_value_are_not_lost() -> None:
    label = {"gen_ai.evaluation.name": "right", "gen_ai.evaluation.score.label": "yes"}
    value = span([ASK], [said("assistant", "5")], events=[{"name": "gen_ai.evaluation.result", "attributes": label}])
    (item,) = otel_genai.FORMAT.trajectories([Record("r.jsonl:1", "r.jsonl", value)], ReadOptions())
    assert item.notes == ("field 'events.attributes.gen_ai.evaluation.score.label' not used",)  # type: ignore[union-attr]
    bad = otlp(span([ASK], [said("assistant", "5")]))
    bad["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"][0] = {"key": "a", "text": "b"}
    (fault,) = read_as("otel-genai", bad)
    assert fault.detail == "r.jsonl:1: an attribute has text; expected key and value only"
    attributes = bad["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["attributes"]
    attributes[0] = attributes[1]
    (fault,) = read_as("otel-genai", bad)
    assert fault.detail.endswith(" is there twice; expected one value of each attribute")


def test_a_call_with_a_part_that_is_no_text_is_skipped() -> None:
    image = span([said("user", {"type": "blob", "modality": "image", "content": "aGk="})], [said("assistant", "5")])
    text = span([ASK], [said("assistant", "5")], start_time=9)
    items = read_as("otel-genai", image, text)
    assert skipped(items) == [("r.jsonl:1", "images, audio and video are not read")]
    assert turns(only_chat(items)[1]) == [("user", "2 + 3?", 0.0), ("assistant", "5", 1.0)]


def test_a_damaged_span_skips_its_conversation_only() -> None:
    bad = span([said("user", {"type": "text", "content": 5})], [said("assistant", "5")])
    items = read_as("otel-genai", *ROUNDS, bad, *(each | {"trace_id": "u"} for each in ROUNDS))
    assert [item.trajectory_id for item in items if isinstance(item, Trajectory)] == ["u"]
    (fault,) = (item for item in items if isinstance(item, Skipped))
    assert (fault.source, fault.reason, fault.is_rollout) == ("r.jsonl:1", "conversation with a damaged span", True)
    expected = 'gen_ai.input.messages has the part {"type": "text", "content": 5}; expected text under content'
    assert fault.detail == f"r.jsonl:3: {expected}"


# LangSmith


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"trace_id": ["r"]}, 'trace_id is ["r"]; expected an id'),
        ({"trace_id": None, "parent_run_id": "q"}, "has a parent and no trace_id; expected the id of its trace"),
    ],
)
def test_a_run_whose_trace_is_not_known_is_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TreepackError, match=re.escape(sentence)):
        read_as("langsmith", run("a", [HUMAN], generated(END), **more))


def attributed(number: int, **attributes: Any) -> dict[str, Any]:
    return {"span_id": str(number), "trace_id": "t", "start_time": number, "attributes": attributes}


def adk(number: int, contents: list[Any], said: list[Any], **more: Any) -> dict[str, Any]:
    request = {"model": "g", "config": {"system_instruction": "s", "temperature": 0.5}, "contents": contents}
    response = {"content": {"role": "model", "parts": said}, "finish_reason": "STOP"} | more
    logged = {"llm_request": json.dumps(request), "llm_response": json.dumps(response), "session_id": "S"}
    return attributed(number, **{f"gcp.vertex.agent.{name}": value for name, value in logged.items()})


@pytest.mark.parametrize("more", [{"finish_reason": "MAX_TOKENS"}, {"partial": True, "finish_reason": None}])
def test_an_answer_of_google_adk_that_is_not_whole_has_no_end(more: dict[str, Any]) -> None:
    (item,) = read_as("otel-genai", adk(1, [{"role": "user", "parts": [{"text": "u"}]}], [{"text": "A"}], **more))
    assert item.content.message_cuts == [False, False, True]


def ai_sdk(number: int, messages: list[Any], **said: Any) -> dict[str, Any]:
    tool = json.dumps({"type": "function", "name": "f", "inputSchema": {"type": "object"}})
    asked = {"ai.prompt.messages": json.dumps(messages), "ai.prompt.tools": [tool]}
    return attributed(number, **asked, **{f"ai.response.{name}": value for name, value in said.items()})


def test_calls_of_the_ai_sdk_are_joined_with_their_tools() -> None:
    ask = {"role": "user", "content": [{"type": "text", "text": "u"}]}
    use = {"toolCallId": "c", "toolName": "f", "input": {"x": 1}}
    result = {"type": "tool-result", "toolCallId": "c", "toolName": "f", "output": {"type": "text", "value": "7"}}
    after = [
        ask,
        {"role": "assistant", "content": [{"type": "tool-call"} | use]},
        {"role": "tool", "content": [result]},
    ]
    records = [
        ai_sdk(1, [ask], toolCalls=json.dumps([use]), finishReason="tool-calls"),
        ai_sdk(2, after, text="A", finishReason="stop"),
    ]
    (item,) = read_as("otel-genai", *records)
    assert item.content.tools == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert turns(item.content) == [
        ("user", "u", 0.0),
        ("assistant", "", 1.0),
        ("tool", "7", 0.0),
        ("assistant", "A", 1.0),
    ]


def run(name: str, question: Any, answer: Any, **more: Any) -> dict[str, Any]:
    order = f"1Zr.{name}"
    inputs = {"messages": question}
    return {
        "id": name,
        "run_type": "llm",
        "trace_id": "r",
        "dotted_order": order,
        "inputs": inputs,
        "outputs": answer,
    } | more


def constructor(kind: str, content: Any, **more: Any) -> dict[str, Any]:
    return {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", kind],
        "kwargs": {"content": content} | more,
    }


def generated(*messages: Any) -> dict[str, Any]:
    return {"generations": [[{"text": "", "message": message} for message in messages]]}


ARGS = {"name": "f", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
HUMAN, AI = constructor("HumanMessage", "2 + 3?"), constructor("AIMessage", "", tool_calls=[ARGS])
SEEN = constructor("ToolMessage", "5", tool_call_id="c1", status="success")
END = constructor("AIMessage", "It is 5.")


def test_llm_runs_of_a_trace_are_joined_in_dotted_order() -> None:
    root = {"id": "r", "run_type": "chain", "inputs": {}, "dotted_order": "1Zr", "reference_example_id": "e"}
    root["feedback_stats"] = {"correct": {"n": 2, "avg": 0.5}, "note": {"n": 1, "avg": None}}
    later = run("3Zb", [[HUMAN, AI, SEEN]], generated(END), parent_run_id="r", feedback_stats={"correct": {"avg": 0.0}})
    first = run("2Za", [[HUMAN]], generated(AI), parent_run_id="r")
    trajectory, content = only_chat(read_as("langsmith", root, later, first))
    assert turns(content) == [
        ("user", "2 + 3?", 0.0),
        ("assistant", "", 1.0),
        ("tool", "5", 0.0),
        ("assistant", "It is 5.", 1.0),
    ]
    assert content.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.reward) == ("r", "e", 0.5)


def test_runs_below_their_root_and_runs_in_a_row_are_the_same() -> None:
    below = [run("2Za", [[HUMAN]], generated(AI)), run("3Zb", [[HUMAN, AI, SEEN]], generated(END))]
    root = {"id": "r", "run_type": "chain", "inputs": {}, "dotted_order": "1Zr"}
    (_, nested), (_, flat) = (
        only_chat(read_as("langsmith", root | {"child_runs": below})),
        only_chat(read_as("langsmith", root, *below)),
    )
    assert nested == flat == only_chat(read_as("langsmith", {"runs": [root, *below]}))[1]


PLAIN = {"role": "assistant", "content": "5"}


@pytest.mark.parametrize(
    "outputs",
    [
        generated(constructor("AIMessage", "5")),
        {"generations": [{"text": "5", "message": {"type": "ai", "data": {"content": "5"}}}]},
        {"generations": [[{"text": "5"}]]},
        {"generations": [[{"text": "", "message": json.dumps(constructor("AIMessage", "5"))}]]},
        {"choices": [{"index": 0, "message": PLAIN | {"refusal": None}}]},
        {"choices": [{"index": 0, "message": json.dumps(PLAIN)}]},
        {"message": PLAIN},
        {"output": {"type": "ai", "content": "5"}},
        {"messages": [{"role": "user", "content": "2 + 3?"}, PLAIN]},
        {"role": "assistant", "content": [{"type": "text", "text": "5"}], "stop_reason": "end_turn"},
    ],
)
def test_responses_come_in_many_forms(outputs: dict[str, Any]) -> None:
    _, content = only_chat(read_as("langsmith", run("2Za", [{"role": "user", "content": "2 + 3?"}], outputs)))
    assert turns(content) == [("user", "2 + 3?", 0.0), ("assistant", "5", 1.0)]


def test_parts_of_a_provider_become_reasoning_calls_and_results() -> None:
    questions = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "5"}]},
    ]
    answer = {"role": "assistant", "content": [{"type": "thinking", "thinking": "So."}, {"type": "text", "text": "5"}]}
    value = run("2Za", questions, answer)
    value["inputs"] |= {"system": "Count.", "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    _, content = only_chat(read_as("langsmith", value))
    assert [message["role"] for message in content.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert content.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (content.messages[4]["reasoning_content"], content.messages[4]["content"]) == ("So.", "5")
    assert content.tools == [{"type": "function", "function": SCHEMA}]


def test_parts_that_repeat_the_calls_of_a_message_are_left_out() -> None:
    parts = [
        {"type": "reasoning", "reasoning": "So."},
        {"type": "tool_call", "name": "f", "args": {"a": 1}, "id": "c1"},
    ]
    _, content = only_chat(
        read_as("langsmith", run("2Za", [[HUMAN]], generated(constructor("AIMessage", parts, tool_calls=[ARGS]))))
    )
    assert len(content.messages[1]["tool_calls"]) == 1
    assert (content.messages[1]["reasoning_content"], content.messages[1]["content"]) == ("So.", "")


def test_what_is_no_call_failed_or_repeats_another_is_skipped() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    items = read_as(
        "langsmith",
        {"id": "t", "run_type": "tool", "trace_id": "r", "inputs": {}},
        run("2Za", messages, None, error="overloaded"),
        run("3Zb", messages, {"message": PLAIN}),
        run("3Zb.4Zc", messages, {"message": PLAIN}),
        run("5Zd", None, {"message": PLAIN}),
        run("6Ze", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {"message": PLAIN}),
    )
    assert skipped(items) == [
        ("r.jsonl:1", "run without an LLM call"),
        ("r.jsonl:2", "LLM run that failed"),
        ("r.jsonl:4", "run inside another LLM run"),
        ("r.jsonl:5", "LLM run without messages"),
        ("r.jsonl:6", "images, audio and video are not read"),
    ]
    assert only_chat(items)[0].source == "r.jsonl:1"


def test_a_trace_with_a_run_that_cannot_be_read_is_skipped_and_the_others_are_read() -> None:
    bad = run("2Za", [constructor("RemoveMessage", "")], generated(END))
    worse = run("3Zb", [[HUMAN]], generated(END), trace_id="s", feedback_stats={"right": {"avg": "good"}})
    invalid = constructor("AIMessage", "", invalid_tool_calls=[{"name": "f", "args": "{"}])
    items = read_as("langsmith", bad, worse, run("5Zd", [[HUMAN]], generated(invalid), trace_id="u"), *GOOD)
    faults = [item for item in items if isinstance(item, Skipped)]
    assert {item.reason for item in faults} == {"trace with a run that cannot be read"}
    assert [item.detail.partition(";")[0] for item in faults] == [
        "r.jsonl:1: has a message of type 'RemoveMessage'",
        'r.jsonl:2: feedback_stats.right.avg is "good"',
        "r.jsonl:3: has a tool call that is not JSON",
    ]
    assert only_chat(items)[0].trajectory_id == "t"


GOOD = [run("2Za", [[HUMAN]], generated(END), trace_id="t")]
