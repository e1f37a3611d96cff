"""Calls of a rollout: the calls that become one trajectory, the tokens that they train, and their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.read_rollouts import tokenize
from treepack.calls.chat_calls import ChatCall, join_chats, read_chats
from treepack.calls.token_calls import TokenCall, join_calls, read_calls
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.trajectory import Chat, Skipped, Tokens, Trajectory, derived_group, prompt_messages

ROLLOUT = {"trajectory_id": "run-7", "group_id": "task", "reward": 0.5}
RECORD = Record("r.jsonl:1", "r.jsonl", ROLLOUT)
USER, TOOL = {"role": "user", "content": "Hi"}, {"role": "tool", "content": "42"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
ONE, TWO = {"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}


def of_calls(*calls: TokenCall) -> list[Trajectory]:
    items = list(read_calls(RECORD, calls, ReadOptions()))
    return [item for item in items if isinstance(item, Trajectory)]


def of_chats(*calls: ChatCall) -> list[Trajectory]:
    items = list(read_chats(RECORD, calls, ReadOptions()))
    return [item for item in items if isinstance(item, Trajectory)]


def tokens_of(item: Trajectory) -> Tokens:
    assert isinstance(item.content, Tokens)
    return item.content


def chat_of(item: Trajectory) -> tuple[list[Any], list[float]]:
    assert isinstance(item.content, Chat)
    return [message["content"] for message in item.content.messages], item.content.message_weights


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1), st.lists(st.integers(0, 3), max_size=3)), max_size=6)
)
def test_every_response_is_trained_once_behind_its_own_prompt(pairs: list[tuple[list[int], list[int]]]) -> None:
    calls = [TokenCall(prompt, response) for prompt, response in pairs]
    joined = join_calls(calls, source="r")
    assert sorted(number for part in joined for number in part.calls) == [i for i, (_, r) in enumerate(pairs) if r]
    for part in joined:
        expected = np.zeros(len(part.fields["input_ids"]))
        for number in part.calls:
            prompt, response = pairs[number]
            end = len(prompt) + len(response)
            assert part.fields["input_ids"][:end].tolist() == prompt + response
            expected[len(prompt) : end] = 1
        assert part.fields["loss_mask"].tolist() == expected.tolist()


def test_values_that_only_some_joined_calls_have_are_left_out_and_noted() -> None:
    (trajectory,) = of_calls(TokenCall([1], [2], {"rollout_log_probs": [-1.0]}), TokenCall([1, 2], [3]))
    assert tokens_of(trajectory).sampling_logprob is None
    assert trajectory.notes == ("rollout_log_probs of some calls only, not used",)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (TokenCall(7, [1]), "r.jsonl:1: call 1: prompt is 7; expected a list of token ids"),
        (
            TokenCall([1], [2, 3], {"loss_mask": [1]}),
            "r.jsonl:1: call 1: loss_mask has 1 values; expected 2, one per token of the response",
        ),
        (
            TokenCall([1], [2, 3], {"loss_mask": [1, 0], "rollout_log_probs": [0.0, 0.0, 0.0]}),
            "r.jsonl:1: call 1: rollout_log_probs has 3 values; expected 2 (the response) or 1 (its trained tokens)",
        ),
    ],
)
def test_a_call_that_contradicts_itself_is_refused(call: TokenCall, said: str) -> None:
    with pytest.raises(TreepackError) as caught:
        of_calls(call)
    assert str(caught.value) == said


def test_conversations_under_other_tools_are_not_joined() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    trajectories = of_chats(ChatCall([USER], [ONE], tools=tools), ChatCall([USER, ONE, TOOL], [TWO]))
    assert [chat_of(item)[1] for item in trajectories] == [[0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]


def test_the_parts_of_a_rollout_without_a_group_are_in_the_group_of_its_first_prompt() -> None:
    unnamed = Record("r.jsonl:1", "r.jsonl", {})

    def groups(trajectory: Iterable[Trajectory | Skipped]) -> list[str | None]:
        done = tokenize(trajectory, tokenizer=None)
        return [item.group_id for item in done if isinstance(item, Trajectory)]

    one, other = TokenCall([1, 2], [3]), TokenCall([7], [8])
    whole = groups(read_calls(unnamed, [one], ReadOptions()))
    assert groups(read_calls(unnamed, [one, other], ReadOptions())) == whole * 2
    first, second = read_chats(unnamed, [ChatCall([USER], [ONE]), ChatCall([TOOL], [TWO])], ReadOptions())
    assert isinstance(first, Trajectory)
    assert isinstance(second, Trajectory)
    assert isinstance(first.content, Chat)
    assert first.group_id == second.group_id == derived_group(prompt_messages(first.content, None))


MESSAGES = st.lists(
    st.sampled_from([USER, TOOL, ONE, TWO, ONE | {"content": ""}, TWO | {"tool_calls": [CALL]}]), max_size=4
)


@given(st.lists(st.tuples(MESSAGES, MESSAGES.filter(bool)), max_size=6))
def test_joined_conversations_hold_each_call_as_it_is_alone(pairs: list[tuple[list[Any], list[Any]]]) -> None:
    calls = [ChatCall(prompt, response) for prompt, response in pairs]
    joined = join_chats(calls, source="r")
    assert sorted(number for part in joined for number in part.calls) == list(range(len(pairs)))
    for part in joined:
        for number in part.calls:
            (alone,) = join_chats([calls[number]], source="r")
            num_prompt, num = len(pairs[number][0]), len(alone.content.messages)
            assert part.content.messages[:num] == alone.content.messages
            assert part.content.message_weights[num_prompt:num] == alone.content.message_weights[num_prompt:]
            assert set(alone.notes) <= set(part.notes)
        assert len(part.content.messages) == max(len(pairs[k][0]) + len(pairs[k][1]) for k in part.calls)
