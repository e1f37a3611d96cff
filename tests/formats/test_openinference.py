"""Spans in the conventions of OpenInference and OpenLLMetry: their calls, and the reasons to skip a span."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import only_chat, read_as, reasons
from treepack.trajectory import Skipped


def read(*values: dict[str, Any], **options: Any) -> list[Any]:
    return read_as("openinference", *values, **options)


def flat(name: str, *messages: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{i}.message.{key}": value for i, message in enumerate(messages) for key, value in message.items()}


def span(attributes: dict[str, Any], number: int = 1, **more: Any) -> dict[str, Any]:
    context = {"trace_id": "t", "span_id": f"s{number}"}
    return {"context": context, "span_kind": "LLM", "start_time": number, "attributes": attributes} | more


ASK = {"role": "user", "content": "2 + 3?"}
FIVE = {"role": "assistant", "content": "5"}
CALL = flat("llm.input_messages", ASK) | flat("llm.output_messages", FIVE)


def test_items_of_one_response_are_one_turn_and_several_answers_are_several() -> None:
    call = {"role": "assistant", "tool_calls.0.tool_call.function.name": "f"}
    thought = {
        "role": "assistant",
        "contents.0.message_content.type": "reasoning",
        "contents.0.message_content.text": "Add.",
    }
    items = flat("llm.input_messages", ASK) | flat("llm.output_messages", thought, FIVE, call, call)
    _, content = only_chat(read(span(items)))
    (_, said) = content.messages
    assert (said["reasoning_content"], said["content"], len(said["tool_calls"])) == ("Add.", "5", 2)
    several = {"llm.invocation_parameters": '{"n": 2}'}
    answers = flat("llm.input_messages", ASK) | flat("llm.output_messages", FIVE, {**FIVE, "content": "6"})
    names = [item.trajectory_id for item in read(span(answers | several))]
    assert names == ["t/turn-1", "t/turn-2"]


def test_a_part_that_is_no_text_skips_the_call_and_hidden_reasoning_is_noted() -> None:
    image = {
        "role": "user",
        "contents.0.message_content.type": "image",
        "contents.0.message_content.image.image.url": "u",
    }
    assert reasons(read(span(flat("llm.input_messages", image) | flat("llm.output_messages", FIVE)))) == [
        "images, audio and video are not read"
    ]
    hidden = {
        "role": "assistant",
        "content": "5",
        "contents.0.message_content.type": "reasoning",
        "contents.0.message_content.data": "x",
    }
    trajectory, _ = only_chat(read(span(flat("llm.input_messages", ASK) | flat("llm.output_messages", hidden))))
    assert trajectory.notes == ("encrypted reasoning left out",)


def test_scores_of_annotations_are_the_reward_and_labels_are_noted() -> None:
    scores = {"annotations.0.annotation.name": "right", "annotations.0.annotation.score": 1}
    labels = {"evaluations.0.evaluation.name": "tone", "evaluations.0.evaluation.label": "rude"}
    root = span({"trace.annotations.0.annotation.name": "short", "trace.annotations.0.annotation.score": 0.5}, 2)
    items = read(span(CALL | scores | labels), root | {"span_kind": "AGENT"})
    trajectory, _ = only_chat(items)
    assert trajectory.reward == 1.5
    assert trajectory.notes == ("evaluation 'tone' without a score not used",)
    assert only_chat(read(span(CALL | scores), reward_key="right"))[0].reward == 1.0


def test_spans_without_a_trace_are_not_joined() -> None:
    items = read(*(span(CALL, number) | {"context": {"span_id": f"s{number}"}} for number in (1, 2)))
    assert [item.trajectory_id for item in items] == ["r.jsonl:1/s1", "r.jsonl:2/s2"]
    assert {item.notes for item in items} == {("span without a trace",)}


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (FIVE | {"contents.0.message_content.type": "text", "contents.0.message_content.text": "6"},
         'has the content "5" and other contents; expected one of them'),
        ({"role": "assistant", "contents.0.message_content.text": "6"},
         'has the content {"text": "6"}; expected text'),
        ({"role": "judge", "content": "5"},
         "call 1: message 2 has role 'judge'; expected system, user, assistant or tool"),
    ],
)  # fmt: skip
def test_a_message_that_is_not_understood_skips_its_conversation_only(answer: dict[str, Any], detail: str) -> None:
    bad = span(flat("llm.input_messages", ASK) | flat("llm.output_messages", answer))
    items = read(bad, span(CALL | {"session.id": "v"}) | {"context": {"trace_id": "u"}})
    assert only_chat(items)[0].trajectory_id == "v"
    assert [item.detail for item in items if isinstance(item, Skipped)] == [f"r.jsonl:1: {detail}"]


def test_a_call_that_two_libraries_log_is_read_once() -> None:
    outer, inner = span(CALL), span(CALL, 2, parent_id="s1")
    items = read(inner, outer)
    assert only_chat(items)[1].message_weights == [0.0, 1.0]
    assert reasons(items) == ["span inside the span of the same LLM call"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (span({"input.value": "a", "output.value": "b"}), "LLM call with input.value and output.value only, which have "
         "no fixed form"),
        (span({"llm.model_name": "m"}), "LLM call whose messages were not captured"),
        (span(CALL) | {"status_code": "ERROR"}, "LLM call that failed"),
        (span(CALL) | {"span_kind": "AGENT"}, "span without an LLM call"),
        (span({"ai.result.text": "b"}, span_kind=None), "span in the convention of the Vercel AI SDK before version 4, "
         "which is not read"),
        (span({"ai.prompt": "{}", "ai.response.text": "b"}, span_kind=None), "span around LLM calls, whose messages "
         "are not those of one call"),
        (span({"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": "[]", "gen_ai.output.messages": "[]"},
              span_kind=None), "span around LLM calls, whose messages are not those of one call"),
        (span({"gen_ai.operation.name": "call_llm", "gcp.vertex.agent.llm_request": "{}",
               "gcp.vertex.agent.llm_response": "{}"}, span_kind=None), "LLM call whose messages were not captured"),
        (span({"mlflow.spanInputs": "{}"}, span_kind=None), "span in the convention of MLflow, which is not read"),
    ],
)  # fmt: skip
def test_a_reason_to_skip_a_span_is_true(value: dict[str, Any], reason: str) -> None:
    assert reasons(read(value)) == [reason]


def test_indexed_attributes_of_openllmetry_are_messages() -> None:
    prompt = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": '[{"type": "text", "text": "2 + 3?"}]'}
    answer = {"gen_ai.completion.0.content": "5", "gen_ai.completion.0.finish_reason": "stop"}
    call = {"gen_ai.completion.0.tool_calls.0.name": "f", "gen_ai.completion.0.tool_calls.0.arguments": "{}"}
    _, content = only_chat(read(span(prompt | answer | call, span_kind=None)))
    assert [each["content"] for each in content.messages] == ["2 + 3?", "5"]
    assert content.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
