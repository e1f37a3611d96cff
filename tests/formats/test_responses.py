"""Items of the Responses API and their trajectories: NeMo Gym's rollouts, and logs of the API itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.readings import chat_of, only, read_as, tokens_of
from treepack.errors import TreepackError
from treepack.ingest.readers.messages.response_items import SUMMARY_NOTE, messages_of_items
from treepack.trajectory import Skipped, Trajectory

SOURCE = "r.jsonl:1"
IDS = st.lists(st.integers(0, 50), min_size=1, max_size=4)
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **more}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def called(call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **more}


def result(text: str, call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def messages(items: Any, **options: Any) -> list[dict[str, Any]]:
    return messages_of_items(items, source=SOURCE, **options).messages


def gym(output: Any, **more: Any) -> list[Trajectory | Skipped]:
    params = {"input": "Hi", "instructions": "Be brief."}
    value = {"responses_create_params": params, "response": {"output": output}, "reward": 0.5} | more
    return read_as("nemo-gym", value)


def test_fields_of_a_task_that_the_messages_repeat_are_no_other_answer() -> None:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Guten Tag"}]}]
    item = only(gym(output, text="Be brief.", generation="Guten Tag"))
    assert "field 'text' not used, because it repeats the messages" in item.notes
    with pytest.raises(TreepackError, match="has the field 'generation', which can contain an answer"):
        gym(output, generation="Guten Abend")


def test_reasoning_text_and_calls_that_follow_each_other_are_one_turn() -> None:
    items = [thought("a"), thought("b"), said("I look."), called("c1"), called("c2"), result("x"), result("y", "c2")]
    turn, first, second = messages(items, summaries=True)
    assert (turn["reasoning_content"], turn["content"]) == ("a\n\nb", "I look.")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert (first, second) == (
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "tool", "tool_call_id": "c2", "content": "y"},
    )


def test_a_summary_is_reasoning_only_where_it_is_said_to_be() -> None:
    content = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "whole"}]}
    chat = messages_of_items([thought("short"), said("a"), user("Go on."), content, said("b")], source=SOURCE)
    assert [message.get("reasoning_content") for message in chat.messages] == [None, None, "whole"]
    assert chat.notes == (SUMMARY_NOTE,)


def test_calls_of_other_kinds_keep_what_they_say() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "sh", "input": "ls"}
    server = {"type": "mcp_call", "id": "m1", "name": "f", "arguments": "{}", "output": "x"}
    search = {"type": "web_search_call", "id": "w1"}
    chat = messages_of_items([custom, result("y"), search, server], source=SOURCE)
    first, second, third, fourth = chat.messages
    assert first["tool_calls"][0]["function"] == {"name": "sh", "arguments": '{"input": "ls"}'}
    assert (second["content"], fourth) == ("y", {"role": "tool", "tool_call_id": "m1", "content": "x"})
    assert third["tool_calls"] == [CALLED | {"id": "m1"}]
    assert chat.notes == ("item of type 'web_search_call' not used",)


def test_a_search_for_tools_is_a_call_if_the_client_ran_it() -> None:
    search = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "bolts"}}
    found = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [{"name": "f"}]}
    called_tool, told = messages_of_items([search, found], source=SOURCE).messages
    assert called_tool["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": {"query": "bolts"}}
    assert told == {"role": "tool", "tool_call_id": "c", "content": '[{"name": "f"}]'}
    by_server = messages_of_items([each | {"execution": "server"} for each in (search, found)], source=SOURCE)
    assert by_server.messages == []
    assert len(by_server.notes) == 2


def test_a_refusal_is_text_and_an_image_stays_a_part() -> None:
    refused = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages([refused])[0]["content"] == "No."
    image = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_image"}]}
    assert messages([image])[0]["content"] == [{"type": "input_image"}]
    with pytest.raises(TreepackError, match=r"^r.jsonl:1: has the content part 5; expected text parts only$"):
        messages([{"role": "user", "content": [5]}])
    assert gym([image, said("a")]) == [Skipped(SOURCE, "images, audio and video are not read")]


@given(IDS, IDS, IDS, IDS)
def test_calls_with_ids_that_extend_each_other_are_one_sequence(
    prompt: list[int], first: list[int], between: list[int], second: list[int]
) -> None:
    assume([0] not in (first, second))  # the ids of a placeholder
    whole = [*prompt, *first, *between]
    output = [
        called(prompt_token_ids=prompt, generation_token_ids=first, generation_log_probs=[-1.0] * len(first)),
        result("x"),
        said("a", prompt_token_ids=whole, generation_token_ids=second, generation_log_probs=[-2.0] * len(second)),
    ]
    (item,) = gym(output, _ng_task_index=3, _ng_rollout_index=1, id="row-8")
    content = tokens_of(item)
    assert content.tokens.tolist() == whole + second
    assert list(zip(content.starts.tolist(), content.ends.tolist(), strict=True)) == [
        (len(prompt), len(prompt) + len(first)),
        (len(whole), len(whole) + len(second)),
    ]
    assert content.sampling_logprob is not None
    assert content.sampling_logprob.tolist() == [-1.0] * len(first) + [-2.0] * len(second)
    assert isinstance(item, Trajectory)
    assert (item.trajectory_id, item.group_id, item.metadata) == ("3/1", "3", {"metadata": {"id": "row-8"}})


def test_a_call_whose_prompt_was_rewritten_is_a_trajectory_of_its_own() -> None:
    output = [
        called(prompt_token_ids=[1, 2], generation_token_ids=[3], generation_log_probs=[-1.0]),
        result("x"),
        said("a", prompt_token_ids=[1, 9], generation_token_ids=[4, 5], generation_log_probs=[-1.0, -2.0]),
    ]
    first, second = gym(output, _ng_task_index=3, _ng_rollout_index=1)
    assert isinstance(first, Trajectory)
    assert isinstance(second, Trajectory)
    assert (first.trajectory_id, second.trajectory_id) == ("3/1/turn-1", "3/1/turn-2")
    assert [tokens_of(item).tokens.tolist() for item in (first, second)] == [[1, 2, 3], [1, 9, 4, 5]]


def test_steps_that_repeat_what_came_before_are_calls_that_are_joined() -> None:
    first = [user("Hi"), called(), result("x")]
    (trajectory,) = gym([first, [*first, said("a")]], _ng_task_index=3)
    assert [message["role"] for message in chat_of(trajectory).messages] == ["user", "assistant", "tool", "assistant"]
    assert chat_of(trajectory).message_weights == [0.0, 1.0, 0.0, 1.0]
    ids: list[dict[str, Any]] = [
        {"prompt_token_ids": prompt, "generation_token_ids": [3]} for prompt in ([1, 2], [1, 2, 3, 4])
    ]
    first = [user("Hi"), called(**ids[0]), result("x")]
    (trajectory,) = gym([first, [*first, said("a", **ids[1])]])
    assert tokens_of(trajectory).tokens.tolist() == [1, 2, 3, 4, 3]


def test_a_rollout_that_cannot_be_trained_is_skipped() -> None:
    assert gym(None) == [Skipped(SOURCE, "task without a response", is_rollout=False)]
    assert gym([said("a")], mask_sample=True) == [Skipped(SOURCE, "masked by its environment (mask_sample)")]
    assert gym([said("a")], instance_config={"mask_sample": True}) == gym([said("a")], mask_sample=True)
