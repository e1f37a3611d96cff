"""Logs of agents that mend software: SWE-agent, mini-swe-agent, AutoCodeRover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from support.readings import chats, only, read_value, real, reasons, turns
from treepack.calls.served_tokens import SOME_NOTE
from treepack.errors import TreepackError
from treepack.formats.agents import mini_swe_agent, swe_agent
from treepack.trajectory import Tokens

SYSTEM, ASKED = {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}


def test_a_swe_agent_run_is_named_by_its_folder_and_its_task() -> None:
    value = {
        "environment": "e",
        "history": [
            {"role": "system", "content": "S", "agent": "a"},
            {"role": "assistant", "content": "demo", "is_demo": True},
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": "A", "thought": "A", "action": "ls", "agent": "a", "is_demo": "false"},
        ],
        "trajectory": [{"action": "ls"}],
        "info": {"exit_status": "submitted", "submission": "diff"},
    }
    ((trajectory, content),) = chats(read_value(swe_agent.read_swe_agent, value, "runs/one/task-1.traj.gz"))
    assert (trajectory.trajectory_id, trajectory.group_id) == ("one/task-1", "task-1")
    assert trajectory.metadata == {"environment": "e", "info": {"exit_status": "submitted"}}
    assert content.message_weights == [0.0, 0.0, 0.0, 1.0]
    assert content.messages[3] == {"role": "assistant", "content": "A"}
    assert trajectory.notes == ()


def test_what_swe_agent_said_when_it_gave_up_is_not_trained() -> None:
    said = [
        ("I exit now.", "exit_cost", 1.0),
        ("Exit due to cost limit", "exit_cost", 0.0),
        ("Exit due to context window", "", 0.0),
        ("Exit due to boredom, then ls", "ls", 1.0),
    ]
    replies = [{"role": "assistant", "content": text, "action": action} for text, action, _ in said]
    value = {"history": [SYSTEM, ASKED, *replies], "trajectory": [], "info": {}}
    ((_, content),) = chats(read_value(swe_agent.read_swe_agent, value))
    assert content.message_weights[2:] == [weight for _, _, weight in said]


def reply(text: str, action: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "action": action, **more}


def seen(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def swe_run(*steps: tuple[dict[str, Any], dict[str, Any]], history: list[dict[str, Any]]) -> list[Any]:
    """Steps are a reply and the prompt under the name that the version has for it."""
    named = [{"response": item["content"], "action": item["action"], **prompt} for item, prompt in steps]
    value = {"history": history, "trajectory": named, "info": {"exit_status": "submitted"}}
    return read_value(swe_agent.read_swe_agent, value, "runs/r/t.traj")


A, B, C = reply("a", "ls"), reply("b", "cat"), reply("c", "submit")


def test_a_shortened_observation_begins_a_trajectory() -> None:
    opening = [SYSTEM, ASKED]
    parts = [opening, [*opening, A, seen("long")], [*opening, A, seen("short"), B, seen("2")]]
    history = [*opening, A, seen("long"), B, seen("2"), C]
    pairs = chats(
        swe_run(*((item, {"query": part}) for item, part in zip((A, B, C), parts, strict=True)), history=history)
    )
    assert [item.trajectory_id for item, _ in pairs] == ["r/t/turn-1", "r/t/turn-3"]
    assert [text for _, text, weight in turns(pairs[0][1]) if weight] == ["a", "b"]
    assert turns(pairs[1][1])[2:] == [
        ("assistant", "a", 0.0),
        ("user", "short", 0.0),
        ("assistant", "b", 0.0),
        ("user", "2", 0.0),
        ("assistant", "c", 1.0),
    ]


def test_tool_calls_come_from_the_history_and_are_answered_by_their_id() -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
    thinking = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    called = reply("", "ls", tool_calls=calls, thinking_blocks=thinking)
    result = {"role": "tool", "content": "1", "tool_call_ids": ["x"]}
    refused = reply("", "")
    steps = [(refused, {"query": [ASKED]}), (called, {"query": [ASKED]}), (B, {"query": [ASKED, called, result]})]
    ((trajectory, content),) = chats(swe_run(*steps, history=[ASKED, called, result, B]))
    assert content.messages[1:3] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "x"},
    ]
    assert trajectory.notes == ("refused reply without its tool calls in the file not used",)


def test_the_messages_of_version_1_0_are_those_behind_the_reply() -> None:
    refused, opening = reply("bad", ""), [SYSTEM, ASKED]
    after_a = [*opening, A, seen("1")]
    after_b = [*opening, A, seen("short"), B, seen("2")]
    steps = [(A, {"messages": after_a}), (B, {"messages": after_b}), (refused, {"messages": after_b})]
    steps.append((C, {"messages": [*after_b, C, seen("3")]}))
    pairs = chats(swe_run(*steps, history=[*after_a, B, seen("2"), C, seen("3")]))
    trained = [[text for _, text, weight in turns(content) if weight] for _, content in pairs]
    assert trained == [["a", "b"], ["bad"]]
    assert [text for _, text, _ in turns(pairs[0][1])] == ["S", "Q", "a", "1", "b"]
    assert [text for _, text, _ in turns(pairs[1][1])] == ["S", "Q", "a", "short", "b", "2", "bad"]
    assert "call without its prompt in the file not used" in pairs[0][0].notes


def test_attempts_are_rollouts_of_one_task() -> None:
    one, two = ({"history": [ASKED, item], "trajectory": [], "info": {}} for item in (A, B))
    pairs = chats(read_value(swe_agent.read_swe_agent, {"attempts": [one, two], **two}, "runs/r/t.traj"))
    assert [(item.trajectory_id, item.group_id) for item, _ in pairs] == [
        ("r/t/attempt-0", "t"),
        ("r/t/attempt-1", "t"),
    ]
    assert [turns(content)[1][1] for _, content in pairs] == ["a", "b"]


def mini(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "trajectory_format": "mini-swe-agent-1.1", "info": {}, **more}


def test_a_run_of_mini_swe_agent_is_named_by_run_and_task() -> None:
    left = {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}}
    info = {"exit_status": "Submitted", "submission": "diff", "config": {"model": {"model_name": "m"}, "agent": {}}}
    value = mini(SYSTEM, ASKED, {"role": "assistant", "content": "A", "extra": {"cost": 1}}, left, info=info)
    ((trajectory, content),) = chats(
        read_value(mini_swe_agent.read_mini_swe_agent, value, "runs/one/lib-1/lib-1.traj.json")
    )
    assert (trajectory.trajectory_id, trajectory.group_id) == ("one/lib-1", "lib-1")
    assert trajectory.metadata == {"model": "m", "exit_status": "Submitted"}
    assert turns(content) == [("system", "S", 0.0), ("user", "Q", 0.0), ("assistant", "A", 1.0)]
    assert trajectory.notes == ()


REFUSED = {"interrupt_type": "FormatError"}


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"response": {"choices": [{"message": {"role": "assistant", "content": "bad"}}]}}, "bad"),
        (
            {
                "response": {
                    "object": "response",
                    "output": [{"type": "message", "role": "assistant", "content": "bad"}],
                }
            },
            "bad",
        ),
        ({"model_response": "bad", "n_actions": 2}, "bad"),
        ({"response": "<object>"}, None),
        ({}, None),
    ],
)
def test_a_reply_that_mini_swe_agent_refused_is_a_trajectory_of_its_own(
    extra: dict[str, Any], expected: str | None
) -> None:
    complaint = {"role": "user", "content": "no", "extra": REFUSED | extra}
    answers = [{"role": "assistant", "content": text} for text in "AB"]
    pairs = chats(read_value(mini_swe_agent.read_mini_swe_agent, mini(ASKED, answers[0], complaint, answers[1])))
    trained = [[text for _, text, weight in turns(content) if weight] for _, content in pairs]
    if expected is None:
        assert trained == [["A", "B"]]
        assert pairs[0][0].notes == ("refused reply in an unknown form not used",)
    else:
        assert trained == [["A", expected], ["B"]]
        assert [text for _, text, _ in turns(pairs[1][1])] == ["Q", "A", "no", "B"]


def test_responses_of_mini_swe_agent_are_read_by_their_items() -> None:
    output = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "x", "name": "bash", "arguments": "{}"},
    ]
    told = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}
    result = {"type": "function_call_output", "call_id": "x", "output": "1"}
    value = mini(
        ASKED, {"object": "response", "output": output, "extra": {}}, result, told, mini()["info"] | reply("b", "")
    )
    ((_, content),) = chats(read_value(mini_swe_agent.read_mini_swe_agent, value))
    assert [(message["role"], message["content"]) for message in content.messages] == [
        ("user", "Q"),
        ("assistant", "I look."),
        ("tool", "1"),
        ("user", "Go on."),
        ("assistant", "b"),
    ]
    assert content.messages[1]["tool_calls"][0]["function"]["name"] == "bash"


def test_token_ids_in_the_responses_of_mini_swe_agent_are_used_if_all_calls_have_them() -> None:
    def answer(text: str, prompt: list[int], generated: list[int]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        choice = {"message": message, "provider_specific_fields": {"token_ids": generated}}
        return message | {"extra": {"response": {"choices": [choice], "prompt_token_ids": prompt}}}

    first, second = answer("A", [1, 2], [3]), answer("B", [1, 2, 3, 4], [5, 6])
    trajectory = only(read_value(mini_swe_agent.read_mini_swe_agent, mini(ASKED, first, ASKED, second)))
    assert isinstance(trajectory.content, Tokens)
    assert trajectory.content.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert list(zip(trajectory.content.starts, trajectory.content.ends, strict=True)) == [(2, 3), (4, 6)]
    ((some, _),) = chats(
        read_value(mini_swe_agent.read_mini_swe_agent, mini(ASKED, first, ASKED, second | {"extra": {}}))
    )
    assert some.notes == (SOME_NOTE,)


def write(path: Path, *texts: str, system: str = "S") -> None:
    roles = ["system", *["user", "assistant"] * len(texts)]
    path.parent.mkdir(exist_ok=True)
    said = zip(roles, (system, *texts), strict=False)
    path.write_text(json.dumps([{"role": role, "content": text} for role, text in said]))


def test_a_field_that_is_not_read_does_not_part_a_round_from_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "conversation_round_1.json"
    write(path, "Q", "A")
    system, *others = json.loads(path.read_text())
    path.write_text(json.dumps([system, *(each | {"cost": 1} for each in others)]))
    write(tmp_path / "conversation_round_2.json", "Q", "A", "R", "B")
    assert reasons(list(read_trajectories([tmp_path]))) == ["beginning of conversation_round_2.json"]


def test_a_round_that_the_next_one_does_not_continue_is_read(tmp_path: Path) -> None:
    write(tmp_path / "conversation_round_1.json", "Q", "A")
    write(tmp_path / "conversation_round_2.json", "Q", "B")
    assert [turns(content)[-1][1] for _, content in chats(read_trajectories([tmp_path]))] == ["A", "B"]


def test_a_file_of_arrays_in_a_folder_is_counted_and_refused_where_it_is_named(tmp_path: Path) -> None:
    write(tmp_path / "conversation_round_1.json", "Q", "A")
    (tmp_path / "agent_proxy_1.json").write_text(json.dumps([[{"role": "user", "content": "Q"}]]))
    assert reasons(read_trajectories([tmp_path])) == ["file of no known format"]
    with pytest.raises(TreepackError, match="contains an array; expected a JSON object"):
        list(read_trajectories([tmp_path / "agent_proxy_1.json"]))


def test_real_swe_agent_rollouts_are_read() -> None:
    pairs = chats(read_trajectories([real("swe-agent-lite")]))
    assert len(pairs) == len({item.trajectory_id for item, _ in pairs}) == 341
    assert len({item.group_id for item, _ in pairs}) == 114
    for _, content in pairs:
        roles = [message["role"] for message in content.messages]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
    assert sum(item.metadata["info"].get("exit_status") == "submitted" for item, _ in pairs) == 325
    said = [(text, weight) for _, content in pairs for role, text, weight in turns(content) if role == "assistant"]
    assert [text for text, weight in said if weight == 0] == ["Exit due to cost limit"] * 4
