"""Traces of Langfuse: which observations are calls, the forms of input and output, and scores."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import Items, only_chat, read_as, reasons
from treepack.errors import TreepackError
from treepack.trajectory import Skipped

SAMPLE = ROLLOUTS / "langfuse"
ASK = {"role": "user", "content": "2 + 3?"}
FIVE = {"role": "assistant", "content": "5"}


def read(*values: dict[str, Any], **options: Any) -> Items:
    return read_as("langfuse", *values, **options)


def generation(number: int, prompt: Any, answer: Any, **more: Any) -> dict[str, Any]:
    value = {"id": f"o{number}", "traceId": "t", "type": "GENERATION", "startTime": f"2026-01-01T00:00:0{number}Z"}
    return value | {"input": prompt, "output": answer} | more


def score(value: Any, name: str = "right", **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "dataType": "NUMERIC"} | more


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"id": "u", "observations": [generation(1, "2 + 3?", "5")]}, "trace u has an observation of trace t"),
        (generation(1, "2 + 3?", "5") | {"traceId": ""}, 'traceId of an observation is ""'),
        ({"trace": {"id": "t", "scores": [1]}, "scores": [2], "observations": []}, "scores is in the trace and beside"),
    ],
)
def test_traces_that_contradict_themselves_are_refused(value: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TreepackError, match=re.escape(sentence)):
        read(value)


def test_every_kind_of_export_gives_the_same_conversation() -> None:
    found = [only_chat(list(read_trajectories([path])))[1] for path in sorted(SAMPLE.iterdir())]
    assert len(found) == 5
    assert all(content == found[0] for content in found)
    assert found[0].message_weights == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert found[0].message_temperatures == [None, None, 0.4, None, 0.4]
    assert found[0].tools is not None


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("2 + 3?", "5"),
        ([ASK], FIVE),
        (json.dumps([ASK]), json.dumps(FIVE)),
        ({"messages": [ASK]}, {"choices": [{"index": 0, "message": FIVE, "finish_reason": "stop"}]}),
        ({"prompt": "2 + 3?"}, {"text": "5", "finishReason": "stop"}),
        ([{"role": "user", "parts": [{"type": "text", "content": "2 + 3?"}]}],
         [{"role": "assistant", "parts": [{"type": "text", "content": "5"}], "finish_reason": "stop"}]),
        ([{"content": "2 + 3?", "role": "user"}],
         {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "5"}]}]}),
        ({"contents": "2 + 3?"}, {"candidates": [{"content": {"parts": [{"text": "5"}], "role": "model"}}]}),
        ({"contents": [{"role": "user", "parts": [{"text": "2 + "}, {"text": "3?"}]}]},
         {"content": {"parts": [{"text": "5"}], "role": "model"}, "finish_reason": "STOP"}),
        ([[{"type": "human", "content": "2 + 3?"}]], {"generations": [[{"text": "5"}]]}),
        ([ASK], {"type": "AIMessage", "content": "5", "response_metadata": {}, "tool_calls": []}),
        ([ASK], {"role": "assistant", "content": [{"type": "text", "text": "5"}], "stop_reason": "end_turn"}),
        ([{"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}], {"message": FIVE, "index": 0}),
        ({"args": ["2 + 3?"]}, {"role": "assistant", "content": None, "refusal": "5"}),
    ],
)  # fmt: skip
def test_a_call_may_be_logged_in_many_forms(prompt: Any, answer: Any) -> None:
    trajectory, content = only_chat(read(generation(1, prompt, answer)))
    assert [(message["role"], message["content"]) for message in content.messages] == [
        ("user", "2 + 3?"),
        ("assistant", "5"),
    ]
    assert content.message_weights == [0.0, 1.0]
    assert trajectory.notes == ()


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "additional_kwargs": {"tool_calls": [CALL]}},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"output": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        {"candidates": [{"content": {"parts": [{"functionCall": {"name": "f", "args": {}}}], "role": "model"}}]},
        [{"toolCallId": "c", "toolName": "f", "input": "{}"}],
        {"role": "assistant", "content": [{"type": "tool-call", "toolCallId": "c", "toolName": "f", "input": {}}]},
        [{"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "f", "arguments": {}}]}],
    ],
)
def test_a_tool_call_may_be_logged_in_many_forms(answer: Any) -> None:
    _, content = only_chat(read(generation(1, [ASK], answer)))
    (call,) = content.messages[-1]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) in [("f", {}), ("f", "{}")]


def test_schemas_and_tool_names_that_langchain_logs_as_messages_are_understood() -> None:
    schema = {"role": "tool", "content": {"type": "function", "function": {"name": "f", "parameters": {}}}}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    _, content = only_chat(
        read(generation(1, [ASK, called, {"role": "f", "content": "5", "additional_kwargs": {}}, schema], FIVE))
    )
    assert [each["role"] for each in content.messages] == ["user", "assistant", "tool", "assistant"]
    assert content.messages[2]["tool_call_id"] == "c"
    assert content.tools == [schema["content"]]


def test_scores_are_rewards_by_name_and_labels_are_noted() -> None:
    scores = [score(0.5), score(1.0), score(1, "short", dataType="BOOLEAN"), score(0, "tone", dataType="CATEGORICAL")]
    value = {"id": "t", "observations": [generation(1, [ASK], FIVE)], "scores": scores}
    trajectory, _ = only_chat(read(value))
    assert (trajectory.reward, trajectory.notes) == (1.75, ("score 'tone' that is no number not used",))
    assert only_chat(read(value, reward_key="right"))[0].reward == 0.75


def test_only_the_inner_one_of_two_generations_is_read() -> None:
    outer, inner = generation(1, {"prompt": "2 + 3?"}, "5"), generation(2, [ASK], FIVE, parentObservationId="s")
    step = {"id": "s", "traceId": "t", "type": "SPAN", "parentObservationId": "o1"}
    items = read(outer, step, inner)
    assert only_chat(items)[1].message_weights == [0.0, 1.0]
    assert reasons(items) == [
        "observation without an LLM call",
        "generation around other generations, which repeats them",
    ]


@pytest.mark.parametrize(
    ("bad", "detail"),
    [
        (generation(1, {"question": 2}, FIVE), 'the prompt is {"question": 2}; expected messages or text'),
        (generation(1, [ASK], {"answer": 5}), 'the response is {"answer": 5}; expected a message or text'),
        (generation(1, '{"question": 2}', FIVE), r'the prompt is "{\"question\": 2}"; expected messages or text'),
        (generation(1, [{"role": "tool", "content": "5"}], FIVE),
         "the prompt begins with the result of a tool; log the whole conversation as the prompt of each call"),
        (generation(1, [ASK], FIVE | {"finish_reason": "tool_calls"}),
         "a response that ends with a tool call has none; log its tool calls as tool_calls of the message"),
        (generation(1, [ASK], FIVE, toolCalls=['{"id": "c"}']),
         "has toolCalls that are not in its output; log the calls in the output"),
        (generation(1, [ASK], [ASK, FIVE]),
         "the response has a message of role 'user'; expected the assistant's"),
        (generation(1, {"messages": [ASK], "completion": "6"}, FIVE),
         "the prompt has completion; expected a request without a response"),
        (generation(1, "user: 2 + 3?", FIVE), 'the prompt is a transcript, "user: 2 + 3?"; log the messages as a list'),
    ],
)  # fmt: skip
def test_an_observation_that_cannot_be_read_skips_its_trace_only(bad: dict[str, Any], detail: str) -> None:
    items = read(bad, generation(2, [ASK], FIVE), generation(1, [ASK], FIVE, traceId="u"))
    assert only_chat(items)[0].trajectory_id == "u"
    (fault,) = (item for item in items if isinstance(item, Skipped))
    assert fault.reason == "trace with an observation that cannot be read"
    assert fault.detail == f"r.jsonl:1: observation o1: {detail}"


def test_calls_without_content_that_failed_or_are_missing_are_skipped_for_a_true_reason() -> None:
    items = read(
        generation(1, [ASK], None),
        generation(2, [ASK], "x", level="ERROR"),
        {"id": "a", "timestamp": "2026-01-01", "observations": ["o1"], "input": "2 + 3?", "output": "5"},
    )
    assert reasons(items) == [
        "LLM call whose input or output was not captured",
        "LLM call that failed",
        "trace without its observations; export the observations, too",
    ]
