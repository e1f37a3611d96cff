"""Logs of sessions with a user, a person or a simulated one: the pi coding agent, tau2-bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.read_rollouts import read_trajectories
from support.readings import Items, chats, read_as, read_value, read_whole, reasons, said_in, turns
from treepack.errors import TreepackError
from treepack.formats.evaluations import tau2
from treepack.trajectory import Skipped

HEADER = {"type": "session", "version": 3, "id": "S", "timestamp": "t", "cwd": "/w"}


def entry(name: str, parent: str | None, role: str = "", content: Any = None, **more: Any) -> dict[str, Any]:
    said = {"type": "message", "message": {"role": role, "content": content, **more}} if role else more
    return {"id": name, "parentId": parent, **said}


def text(content: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}]


def read_pi(*entries: dict[str, Any], **header: Any) -> Items:
    return read_as("pi", HEADER | header, *entries)


def linear(letters: str) -> list[dict[str, Any]]:
    """Entries in a row: capitals are the assistant's."""
    return [
        entry(each, letters[place - 1] if place else None, "assistant" if each.isupper() else "user", text(each))
        for place, each in enumerate(letters)
    ]


def test_a_pi_session_without_branches_is_one_trajectory() -> None:
    call = {"type": "toolCall", "id": "c", "name": "ls", "arguments": {"all": True}}
    parts = [{"type": "thinking", "thinking": "Hm."}, *text("I look."), call]
    entries = [
        entry("1", None, "user", "q"),
        entry("2", "1", "assistant", parts, stopReason="toolUse", model="m"),
        entry("3", "2", "toolResult", text("x"), toolCallId="c", toolName="ls"),
        entry("4", "3", type="model_change", modelId="n"),
        entry("5", "4", "assistant", text("A"), stopReason="stop", model="n"),
        entry("6", "5", "user", "unanswered"),
    ]
    ((trajectory, content),) = chats(read_pi(*entries))
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.notes) == ("S", "S", ())
    assert trajectory.metadata == {"cwd": "/w", "model": "m, n"}
    assert content.messages[1:3] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": {"all": True}}}],
        },
        {"role": "tool", "content": "x", "name": "ls", "tool_call_id": "c"},
    ]
    assert content.message_weights == [0.0, 1.0, 0.0, 1.0]


def test_calls_behind_an_image_are_left_out_of_a_pi_session() -> None:
    image = entry("i", "A", "user", [{"type": "image", "data": "", "mimeType": "image/png"}])
    seen = [entry("B", "i", "assistant", text("B")), entry("C", "B", "assistant", text("C"))]
    summary = entry("s", "C", type="compaction", summary="z", firstKeptEntryId="none")
    trajectories = read_pi(*linear("qA"), image, *seen, summary, entry("D", "s", "assistant", text("D")))
    assert said_in(trajectories, "") == {"S/turn-1": "qA", "S/turn-2": "summary of the conversation so far:\n\nzD"}
    assert "call after an image not used" in [note for item in trajectories for note in item.notes]  # type: ignore[union-attr]


def test_what_the_user_ran_and_what_an_extension_said_is_in_the_prompt_of_a_pi_session() -> None:
    ran = entry("r", None, "bashExecution", None, command="ls", output="x\n", exitCode=2)
    hidden = entry("h", "r", "bashExecution", None, command="pwd", output="", excludeFromContext=True)
    added = entry("e", "h", type="custom_message") | {"content": "note"}
    left = entry("l", "e", type="branch_summary", summary="z")
    ((_, content),) = chats(read_pi(ran, hidden, added, left, entry("A", "l", "assistant", text("A"))))
    said = [words for _, words, _ in turns(content)]
    assert said == ["$ ls\nx\n[exit code 2]", "note", "Summary of another branch of the conversation:\n\nz", "A"]


@st.composite
def pi_trees(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Entries whose text is their name. Each has any earlier entry or no parent; a compaction keeps any suffix."""
    entries: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 12))):
        name, kind = f"<{number}>", draw(st.sampled_from(["user", "assistant", "assistant", "compaction"]))
        parent = draw(st.none() | st.sampled_from([each["id"] for each in entries])) if entries else None
        if kind == "compaction":
            kept = draw(st.none() | st.sampled_from([each["id"] for each in way_to(entries, parent)] or [None]))
            entries.append(entry(name, parent, type="compaction", summary=name, firstKeptEntryId=kept))
        else:
            entries.append(entry(name, parent, kind, text(name)))
    return entries


def way_to(entries: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    """The entries from the root to the one called `name`."""
    last = next((each for each in entries if each["id"] == name), None)
    return [] if last is None else [*way_to(entries, last["parentId"]), last]


def prompt_of(entries: list[dict[str, Any]], name: str | None) -> list[str]:
    """The prompt of a reply to the entry `name`, as names; a summary has the name of its compaction."""
    way = way_to(entries, name)
    if not way:
        return []
    last = max((place for place, each in enumerate(way) if each.get("type") == "compaction"), default=None)
    if last is None:
        return [each["id"] for each in way]
    kept = [place for place, each in enumerate(way[:last]) if each["id"] == way[last]["firstKeptEntryId"]]
    before = [each["id"] for each in way[kept[0] : last] if each.get("type") != "compaction"] if kept else []
    return [way[last]["id"], *before, *(each["id"] for each in way[last + 1 :])]


@given(entries=pi_trees())
def test_every_reply_of_a_pi_session_is_trained_once_behind_its_own_prompt(entries: list[dict[str, Any]]) -> None:
    replies = {each["id"]: each["parentId"] for each in entries if each.get("message", {}).get("role") == "assistant"}
    trained: list[str] = []
    for _, content in chats(read_pi(*entries)):
        names = [words[words.index("<") :] for _, words, _ in turns(content)]
        for place, (name, weight) in enumerate(zip(names, content.message_weights, strict=True)):
            if weight:
                trained.append(name)
                assert names[:place] == prompt_of(entries, replies[name])
    assert sorted(trained) == sorted(replies)


def test_turns_that_a_fork_of_a_pi_session_copied_are_trained_in_their_own_session_only(tmp_path: Path) -> None:
    def write(name: str, letters: str, **more: Any) -> None:
        header = {"type": "session", "version": 3, "id": name, "timestamp": "t", "cwd": "/work"} | more
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, [header, *linear(letters)])))

    write("a", "qArBsC")
    write("b", "qArBtD", parentSession="/home/a.jsonl")
    assert said_in(read_trajectories([tmp_path]), "") == {"a": "qArBsC", "b": "qarbtD"}
    (tmp_path / "a.jsonl").unlink()
    assert said_in(read_trajectories([tmp_path]), "") == {"b": "qArBtD"}


def test_a_prompt_that_begins_after_an_entry_that_is_missing_is_counted_in_a_pi_session() -> None:
    note = "prompt begins after an entry that is not in the file"
    ((cut, _),) = chats(read_pi(*linear("qA")[1:]))
    ((whole, _),) = chats(read_pi(*linear("qA")))
    assert (note in cut.notes, note in whole.notes) == (True, False)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([HEADER], "r.jsonl:2: begins a second session; put each session into a file of its own"),
        ([entry("a", None, type="wish"), entry("A", "a", "assistant", text("A"))], "r.jsonl:2: has the type 'wish'"),
        ([entry("A", None, "assistant", [5])], "r.jsonl:2: content is [5]; expected a list of objects"),
        ([entry("a", None), {"type": "message"}], "r.jsonl:3: id is null; expected text"),
        ([entry("A", "", "assistant", text("A"))], 'r.jsonl:2: parentId is ""; expected an id'),
        ([entry("A", None) | {"parentId": 7}], "r.jsonl:2: parentId is 7; expected text"),
        ([entry("A", None, "assistant", [{"type": "thinking", "thinking": ["Hm"]}])], 'r.jsonl:2: thinking is ["Hm"]'),
        (
            [entry("s", None, type="compaction", summary=["z"]), entry("A", "s", "assistant", text("A"))],
            'r.jsonl:2: summary is ["z"]; expected text',
        ),
    ],
)
def test_pi_entries_of_another_kind_are_refused(entries: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(TreepackError) as caught:
        read_whole("pi", HEADER, *entries)
    assert str(caught.value).startswith(said)


def simulation(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    times = {"start_time": "t", "termination_reason": "user_stop"}
    return {"id": "i", "task_id": "3", "trial": 1, **times, "messages": list(messages), **more}


def tau2_run(*simulations: dict[str, Any], **environment: Any) -> dict[str, Any]:
    info = {"environment_info": {"domain_name": "d", "policy": "P"} | environment, "agent_info": {"llm": "m"}}
    return {"info": info, "tasks": [], "simulations": list(simulations)}


HELLO = {"role": "assistant", "content": "Hello"}
ASK, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def test_a_simulation_begins_with_the_policy_and_a_greeting_that_is_not_trained() -> None:
    value = tau2_run(simulation(HELLO, ASK, ANSWER, reward_info={"reward": 0.5}))
    ((trajectory, content),) = chats(read_value(tau2.read_tau2, value))
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.reward) == ("d/3/1", "d/3", 0.5)
    assert trajectory.metadata == {"termination_reason": "user_stop", "model": "m"}
    assert turns(content) == [
        ("system", "P", 0.0),
        ("assistant", "Hello", 0.0),
        ("user", "Q", 0.0),
        ("assistant", "A", 1.0),
    ]


def test_the_agent_of_tau2_does_not_see_what_the_user_does_with_tools() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "name": name, "arguments": {"x": 1}, "requestor": "user"}

    def result(name: str, requestor: str) -> dict[str, Any]:
        return {"id": name, "role": "tool", "content": name, "requestor": requestor, "error": False}

    agent = {"role": "assistant", "content": None, "tool_calls": [call("a") | {"requestor": "assistant"}]}
    several = {"role": "tool", "tool_messages": [result("b", "user"), result("a", "assistant")]}
    user = {"role": "user", "content": None, "tool_calls": [call("u")]}
    value = tau2_run(simulation(ASK, agent, several, user, result("u", "user"), ANSWER))
    ((trajectory, content),) = chats(read_value(tau2.read_tau2, value))
    assert [(message["role"], message["content"]) for message in content.messages[1:]] == [
        ("user", "Q"),
        ("assistant", ""),
        ("tool", "a"),
        ("assistant", "A"),
    ]
    called = {"id": "a", "type": "function", "function": {"name": "a", "arguments": {"x": 1}}}
    assert content.messages[2]["tool_calls"] == [called]
    assert content.messages[3] == {"role": "tool", "content": "a", "name": "a", "tool_call_id": "a"}
    assert trajectory.notes == ()


def test_the_messages_that_a_task_begins_with_are_not_trained() -> None:
    value = tau2_run(simulation(ASK, HELLO, ASK, ANSWER))
    value["tasks"] = [{"id": "2"}, {"id": "3", "initial_state": {"message_history": [ASK, HELLO]}}]
    ((_, content),) = chats(read_value(tau2.read_tau2, value))
    assert content.message_weights == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_tools_that_the_run_kept_are_schemas() -> None:
    kept = {"f": {"name": "f", "doc": "Does.", "params": {"type": "object"}, "returns": {}}}
    ((_, content),) = chats(read_value(tau2.read_tau2, tau2_run(simulation(ASK, ANSWER), tool_defs=kept)))
    function = {"name": "f", "description": "Does.", "parameters": {"type": "object"}}
    assert content.tools == [{"type": "function", "function": function}]


def test_simulations_in_files_of_their_own_are_read_with_the_run(tmp_path: Path) -> None:
    run = tau2_run()
    del run["simulations"]
    (tmp_path / "results.json").write_text(json.dumps(run))
    (tmp_path / "simulations").mkdir()
    for name in "ab":
        (tmp_path / "simulations" / f"{name}.json").write_text(json.dumps(simulation(ASK, ANSWER, trial=None, id=name)))
    items = list(read_trajectories([tmp_path]))
    assert [item.trajectory_id for item, _ in chats(items)] == ["d/3/a", "d/3/b"]
    assert reasons(items) == ["read with results.json"] * 2
    (tmp_path / "results.json").unlink()
    alone = chats(read_trajectories([tmp_path]))
    assert [(item.trajectory_id, len(content.messages)) for item, content in alone] == [("3/a", 2), ("3/b", 2)]


def test_simulations_by_voice_and_those_without_messages_are_skipped() -> None:
    voice = simulation(ticks=[{}])
    del voice["messages"]
    items = read_value(tau2.read_tau2, tau2_run(voice, simulation() | {"messages": None}))
    assert reasons(items) == ["simulation by voice, without messages", "no messages"]
    assert reasons(read_value(tau2.read_tau2, tau2_run())) == ["run without simulations"]


def pi_events(*messages: dict[str, Any] | str) -> list[dict[str, Any]]:
    """The output of `pi --mode json`: each message three times, once as the end of a message; a text is an event."""
    lines: list[dict[str, Any]] = [
        {"type": "session", "version": 3, "id": "S", "timestamp": "t", "cwd": "/w"},
        {"type": "agent_start"},
    ]
    for message in messages:
        if isinstance(message, str):
            lines.append({"type": message, "result": {"summary": "s", "firstKeptEntryId": "e"}})
        else:
            lines += [{"type": kind, "message": message} for kind in ("message_start", "message_end", "turn_end")]
    return [*lines, {"type": "agent_end", "messages": [each for each in messages if isinstance(each, dict)]}]


PI_USER = {"role": "user", "content": [{"type": "text", "text": "u"}]}
PI_ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "A"}], "model": "m", "stopReason": "stop"}


@pytest.mark.parametrize("name", ["compaction_end", "auto_compaction_end"])
def test_events_of_pi_after_a_compaction_are_not_used(name: str) -> None:
    items = read_whole("pi", *pi_events(PI_USER, PI_ANSWER, name, PI_USER, PI_ANSWER))
    ((_, chat),) = chats(items)
    assert [(words, weight) for _, words, weight in turns(chat)] == [("u", 0.0), ("A", 1.0)]
    assert any("after a compaction not used" in note for note in items[0].notes)


def test_events_of_pi_without_a_prompt_are_skipped_with_this_reason() -> None:
    (item,) = read_whole("pi", *pi_events(PI_ANSWER))
    assert isinstance(item, Skipped)
    assert item.reason == "turns without their prompt in the events not used"
