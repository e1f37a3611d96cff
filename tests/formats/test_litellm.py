"""Calls that LiteLLM has logged: sessions, the requests of spend logs, token ids, and payloads that are not calls."""

from __future__ import annotations

from typing import Any

import pytest

from support.readings import chat_of, read_as, reasons, trajectories
from treepack.trajectory import Chat, Trajectory

ASK = {"role": "user", "content": "2 + 3?"}
FIVE = {"role": "assistant", "content": "5"}


def read(*values: dict[str, Any]) -> list[Any]:
    return read_as("litellm", *values)


def payload(messages: Any, *answers: dict[str, Any], start: float = 1.0, **more: Any) -> dict[str, Any]:
    choices = [{"index": i, "message": each, "finish_reason": "stop"} for i, each in enumerate(answers)]
    value = {"id": "c", "call_type": "acompletion", "status": "success", "messages": messages, "model": "m"}
    return value | {"response": {"choices": choices}, "startTime": start, "model_parameters": {}} | more


def test_facts_that_differ_between_the_calls_of_a_session_are_noted() -> None:
    first = payload([ASK], FIVE, session_id="s", metadata={"shop": 1}, reward=0.5)
    second = payload([ASK, FIVE, ASK], FIVE, start=2.0, session_id="s", metadata={"shop": 2}, reward=1.0)
    (item,) = trajectories(read(first, second))
    assert (item.metadata["metadata"], item.reward) == ({"shop": 2}, 1.0)
    assert item.notes == tuple(
        f"field '{name}' differs between calls, the last one used" for name in ("metadata.shop", "reward")
    )


def outline(item: Trajectory) -> list[tuple[str, str]]:
    assert isinstance(item.content, Chat)
    return [(message["role"], message["content"]) for message in item.content.messages]


def test_calls_of_a_session_are_joined_in_the_order_of_their_start() -> None:
    later = payload([ASK, FIVE, ASK], {"role": "assistant", "content": "Yes."}, start=9.0, trace_id="s")
    (item,) = trajectories(read(later, payload([ASK], FIVE, trace_id="s")))
    assert outline(item) == [("user", "2 + 3?"), ("assistant", "5"), ("user", "2 + 3?"), ("assistant", "Yes.")]
    assert chat_of(item).message_weights == [0.0, 1.0, 0.0, 1.0]
    assert item.trajectory_id == "s"


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"choices": [{"text": " 5", "finish_reason": "stop"}]}, " 5"),
        (
            {"output": [{"type": "message", "role": "assistant", "content": "5"}]},
            "5",
        ),
        ({"role": "assistant", "content": [{"type": "text", "text": "5"}], "stop_reason": "end_turn"}, "5"),
        ("5", "5"),
    ],
)
def test_responses_of_other_apis_are_read(response: Any, text: str) -> None:
    (item,) = trajectories(read(payload([ASK], response=response)))
    assert outline(item)[1:] == [("assistant", text)]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (payload([ASK], FIVE, call_type="aembedding"), "record of the call 'aembedding', which writes no text"),
        (payload([ASK], FIVE, status="failure"), "LLM call that failed"),
        (payload([ASK], FIVE, metadata='{"status": "failure"}'), "LLM call that failed"),
        (payload([ASK], FIVE, cache_hit=True), "response from the cache, not from the model"),
        (payload([{"role": "user", "content": "redacted-by-litellm"}], FIVE),
         "LLM call whose messages or response were not logged"),
        (payload("{}", response="{}"), "LLM call whose messages or response were not logged"),
        (payload([ASK], response={"results": []}), "damaged record"),
        (payload([ASK], {"content": 5}), "damaged record"),
        (payload([ASK], response={"results": []}, session_id="s"), "session with a call that cannot be read"),
        (payload([{"role": "user", "content": [{"type": "image_url"}]}], FIVE), "images, audio and video are not read"),
    ],
)  # fmt: skip
def test_a_payload_without_a_call_is_skipped_for_a_true_reason(value: dict[str, Any], reason: str) -> None:
    items = read(value, payload([ASK], FIVE))
    assert reasons(items) == [reason]
    assert len(trajectories(items)) == 1
