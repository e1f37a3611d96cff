"""The end of answers in logs: complete, cut by a limit, stopped by a filter, in every format that records it."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import only, read_as
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.messages.normal_form import normalise_messages
from treepack.trajectory import Chat, PromptCompletion, Tokens

ASK = {"role": "user", "content": "How many screws?"}
SAID = {"role": "assistant", "content": "There are fo"}
BLOCK = {"type": "text", "text": "There are fo"}
IDS = {"prompt_ids": [1, 2], "response_ids": [3, 4]}


def node(message: dict[str, Any], parent: int | None, **more: Any) -> dict[str, Any]:
    return {"parent": parent, "message": message, "sampled": message["role"] == "assistant", **more}


def claude(kind: str, uuid: str, parent: str | None, message: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "sessionId": "s", "uuid": uuid, "parentUuid": parent, "message": message}


def entry(name: str, parent: str | None, message: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "id": name, "parentId": parent, "message": message}


def mini(finish: str) -> dict[str, Any]:
    response = {"choices": [{"message": SAID, "finish_reason": finish}]}
    return {
        "messages": [ASK, SAID | {"extra": {"response": response}}],
        "info": {},
        "trajectory_format": "mini-swe-agent-1",
    }


def openhands_events(finish: str) -> list[dict[str, Any]]:
    response = {"id": "r", "choices": [{"message": SAID, "finish_reason": finish}]}
    action = {
        "id": 2,
        "action": "run",
        "source": "agent",
        "args": {},
        "tool_call_metadata": {"model_response": response},
    }
    return [{"id": 1, "action": "message", "source": "user", "args": {"content": "How many?"}}, action]


def simulation(finish: str) -> dict[str, Any]:
    said = SAID | {"raw_data": {"finish_reason": finish}}
    return {"task_id": "3", "termination_reason": "max_steps", "start_time": "t", "messages": [ASK, said]}


def event(finish: str) -> dict[str, Any]:
    output = {"choices": [{"message": SAID, "stop_reason": finish}]}
    samples = [{"id": "a", "epoch": 1, "events": [{"event": "model", "input": [ASK], "output": output}]}]
    return {"eval": {"task": "t"}, "samples": samples}


def results(**step: Any) -> dict[str, Any]:
    steps = [{"prompt": [ASK], "completion": [SAID], **step}]
    return {"example_id": 1, "prompt": [ASK], "completion": [SAID], "reward": 0.0, "trajectory": steps}


def trace(**more: Any) -> dict[str, Any]:
    return {"id": "t", "nodes": [node(ASK, None), node(SAID, 0)], "calls": [{"node": 1, **more}]}


def generation(**info: Any) -> dict[str, Any]:
    outputs = {"generations": [[{"message": SAID | {"type": "ai"}, "generation_info": info}]]}
    inputs = {"messages": [[ASK]]}
    return {"id": "a", "run_type": "llm", "trace_id": "t", "dotted_order": "a", "inputs": inputs, "outputs": outputs}


def span(finish: str) -> dict[str, Any]:
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "How many?"}]}],
        "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "There"}]}],
        "gen_ai.response.finish_reasons": [finish],
    }
    return {"trace_id": "t", "span_id": "s", "attributes": attributes}


def harbor_row(result: str) -> dict[str, Any]:
    return {"conversations": [ASK, SAID], "task": "t", "trial_name": "t__1", "episode": "episode-0", "result": result}


def responses(**more: Any) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "There"}]}]
    return {"id": "r", "object": "response", "input": "How many?", "output": output, **more}


def gym(**more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "How many?"}, "response": responses(**more)}


def episode(reason: str, **step: Any) -> dict[str, Any]:
    return {
        "id": "t:0",
        "termination_reason": reason,
        "trajectories": [{"steps": [{"chat_completions": [ASK, SAID], **step}]}],
    }


# Reader, records with an answer that was cut, and records with the same answer, complete.
CASES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "openai-chat",
        [{"messages": [ASK], "choices": [{"message": SAID, "finish_reason": "length"}]}],
        [{"messages": [ASK], "choices": [{"message": SAID, "finish_reason": "stop"}]}],
    ),
    (
        "anthropic-messages",
        [
            {
                "request": {"messages": [ASK]},
                "response": {"role": "assistant", "content": [BLOCK], "stop_reason": "max_tokens"},
            }
        ],
        [
            {
                "request": {"messages": [ASK]},
                "response": {"role": "assistant", "content": [BLOCK], "stop_reason": "end_turn"},
            }
        ],
    ),
    (
        "openai-responses",
        [responses(status="incomplete", incomplete_details={"reason": "max_output_tokens"})],
        [responses(status="completed", incomplete_details=None)],
    ),
    ("nemo-gym", [gym(incomplete_details={"reason": "max_output_tokens"})], [gym(incomplete_details=None)]),
    ("otel-genai", [span("length")], [span("stop")]),
    ("langsmith", [generation(finish_reason="length")], [generation(finish_reason="stop")]),
    ("inspect", [event("max_tokens")], [event("stop")]),
    ("verifiers", [trace(finish_reason="length")], [trace(finish_reason="stop")]),
    ("verifiers-results", [results(is_truncated=True)], [results(is_truncated=False)]),
    ("rllm", [episode("max_response_length_exceeded")], [episode("max_turns_exceeded")]),
    ("rllm", [episode("env_done", finish_reason="length")], [episode("env_done", finish_reason="stop")]),
    (
        "rllm-gateway",
        [{"trace_id": "a", "session_id": "s", "messages": [ASK], "response_message": SAID, "finish_reason": "length"}],
        [{"trace_id": "a", "session_id": "s", "messages": [ASK], "response_message": SAID, "finish_reason": "stop"}],
    ),
    (
        "art",
        [{"messages_and_choices": [ASK, {"message": SAID, "finish_reason": "length"}]}],
        [{"messages_and_choices": [ASK, {"message": SAID, "finish_reason": "stop"}]}],
    ),
    ("harbor-traces", [harbor_row("OUTPUT_LENGTH_EXCEEDED")], [harbor_row("AgentTimeoutError")]),
    ("harbor-traces", [harbor_row("OutputLengthExceededError")], [harbor_row("ContextLengthExceededError")]),
    ("mini-swe-agent", [mini("length")], [mini("stop")]),
    ("openhands", openhands_events("length"), openhands_events("stop")),
    ("tau2", [simulation("length")], [simulation("stop")]),
    (
        "claude-code",
        [
            claude("user", "u", None, {"content": "How many?"}),
            claude("assistant", "a", "u", {"id": "m", "model": "m", "content": [BLOCK], "stop_reason": "max_tokens"}),
        ],
        [
            claude("user", "u", None, {"content": "How many?"}),
            claude("assistant", "a", "u", {"id": "m", "model": "m", "content": [BLOCK], "stop_reason": "end_turn"}),
        ],
    ),
    (
        "pi",
        [{"type": "session", "id": "p"}, entry("u", None, ASK), entry("a", "u", SAID | {"stopReason": "length"})],
        [{"type": "session", "id": "p"}, entry("u", None, ASK), entry("a", "u", SAID | {"stopReason": "stop"})],
    ),
    (
        "chat",
        [{"messages": [ASK, SAID | {"finish_reason": "length"}]}],
        [{"messages": [ASK, SAID | {"finish_reason": "stop"}]}],
    ),
    (
        "chat",
        [{"messages": [ASK, SAID], "finish_reason": "length"}],
        [{"messages": [ASK, SAID], "finish_reason": "stop"}],
    ),
    ("chat", [{"messages": [ASK, SAID], "truncated": 1}], [{"messages": [ASK, SAID], "truncated": 0}]),
    ("chat", [{"prompt": "a", "completion": "b", "is_truncated": True}], [{"prompt": "a", "completion": "b"}]),
    (
        "sharegpt",
        [
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b", "stop_reason": "max_tokens"},
                ]
            }
        ],
        [
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b", "stop_reason": "end_turn"},
                ]
            }
        ],
    ),
    (
        "skyrl-dump",
        [{"input_prompt": "a", "output_response": "b", "stop_reason": "length"}],
        [{"input_prompt": "a", "output_response": "b", "stop_reason": "stop"}],
    ),
    (
        "slime",
        [{"tokens": [], "response_length": 0, "prompt": "a", "response": "b", "status": "truncated"}],
        [{"tokens": [], "response_length": 0, "prompt": "a", "response": "b", "status": "completed"}],
    ),
    # Token ids are exact; the rollout is known to be truncated.
    (
        "slime",
        [{"tokens": [1, 2], "response_length": 1, "status": "truncated"}],
        [{"tokens": [1, 2], "response_length": 1, "status": "completed"}],
    ),
    ("tokens", [IDS | {"finish_reason": "length"}], [IDS | {"finish_reason": "stop"}]),
    ("tokens", [IDS | {"finish": "depth"}], [IDS | {"finish": "repetition"}]),
    (
        "verl",
        [IDS | {"extra_fields": {"stop_reason": "length"}}],
        [IDS | {"extra_fields": {"stop_reason": "completed"}}],
    ),
    (
        "tinker",
        [{"transitions": [{"ob": [1], "ac": {"tokens": [2], "stop_reason": "length"}}]}],
        [{"transitions": [{"ob": [1], "ac": {"tokens": [2], "stop_reason": "stop"}}]}],
    ),
]


@pytest.mark.parametrize(("reader", "cut", "whole"), CASES)
def test_a_cut_answer_is_marked_and_a_complete_one_is_not(reader: str, cut: Any, whole: Any) -> None:
    for values, is_cut in ((cut, True), (whole, False)):
        item = only(read_as(reader, *values))
        assert item.is_truncated == is_cut
        if isinstance(item.content, Chat):
            assert (item.content.message_cuts or [False] * len(item.content.messages))[-1] == is_cut
            assert not any((item.content.message_cuts or [False])[:-1])
        elif isinstance(item.content, PromptCompletion):
            assert item.content.is_cut == is_cut
        else:
            assert isinstance(item.content, Tokens)


@pytest.mark.parametrize(
    ("outcome", "values"),
    [
        (
            endings.ENDED,
            ["stop", "end_turn", "tool_calls", "toolUse", "STOP", "FinishReason.STOP", "eos_token", "COMPLETE"],
        ),
        (endings.CUT, ["length", "MAX_TOKENS", "model_length", "FINISH_REASON_MAX_TOKENS", "incomplete", "abort"]),
        (endings.CUT, [{"type": "length", "length": 100}, {"reason": "max_output_tokens"}, "finish.Length"]),
        (
            endings.FILTERED,
            ["content_filter", "content-filter", "SAFETY", "refusal", "RECITATION", "guardrail_intervened"],
        ),
        (None, ["magic", 7, None, {"type": None}]),
    ],
)
def test_values_of_all_apis_are_known(outcome: str | None, values: list[Any]) -> None:
    assert [endings.classify(value) for value in values] == [outcome] * len(values)


def test_an_unknown_value_counts_as_complete_and_a_note_names_field_and_value() -> None:
    done = normalise_messages([ASK, SAID | {"stop_reason": "magic"}], source="s")
    assert (done.cuts, done.weights) == ([False, False], [0.0, 1.0])
    assert done.notes == ("stop_reason 'magic' not known, answer read as complete",)


def test_of_several_fields_a_cut_counts_first() -> None:
    assert endings.ending_of({"finish_reason": "stop", "is_truncated": True})[0] == endings.CUT
    assert endings.ending_of({"finish_reason": "content_filter", "stop_reason": "end_turn"})[0] == endings.FILTERED


@pytest.mark.parametrize("reason", ["content_filter", "length"])
@pytest.mark.parametrize("content", [None, "", "  \n"])
def test_a_stopped_answer_without_text_trains_nothing(reason: str, content: str | None) -> None:
    done = normalise_messages([ASK, {"role": "assistant", "content": content, "finish_reason": reason}], source="s")
    assert (done.weights, done.cuts, done.notes) == ([0.0, 0.0], [False, True], (endings.EMPTY_NOTE,))
