"""Conversations of OpenHands: actions and observations, and the events of its SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import chats, reasons, turns
from treepack.calls.event_views import command_output
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.formats.agents.openhands import openhands
from treepack.formats.agents.openhands.openhands_actions import NO_RESPONSE, RECALL_NOTE
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON
from treepack.trajectory import Skipped, Trajectory

SAMPLES = ROLLOUTS / "openhands"
Event = dict[str, Any]


def read(*events: Event, **more: Any) -> list[Trajectory | Skipped]:
    record = Record("runs/output.jsonl:1", "runs/output.jsonl", {"instance_id": "t", "history": list(events)} | more)
    return list(openhands.FORMAT.trajectories([record], ReadOptions()))


def only_turns(*events: Event, **more: Any) -> list[tuple[str, str, float]]:
    ((_, content),) = chats(read(*events, **more))
    return turns(content)


def user(words: str) -> Event:
    return {"source": "user", "action": "message", "args": {"content": words}}


def called(response: str, *calls: str, action: str = "run", content: str = "", **args: Any) -> Event:
    tool_calls = [{"id": call, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call in calls]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    metadata = {"tool_call_id": calls[0], "model_response": {"id": response, "choices": [{"message": message}]}}
    return {"source": "agent", "action": action, "args": args, "tool_call_metadata": metadata}


def observed(call: str, content: str, kind: str = "think", **extras: Any) -> Event:
    metadata = {"tool_call_id": call, "function_name": "f"}
    return {
        "source": "agent",
        "observation": kind,
        "content": content,
        "extras": extras,
        "tool_call_metadata": metadata,
    }


def event(name: str, kind: str, source: str = "agent", **more: Any) -> Event:
    return {"id": name, "kind": kind, "source": source, "timestamp": "t"} | more


def text(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


def said(name: str, role: str, words: str, **more: Any) -> Event:
    source = "user" if role == "user" else "agent"
    return event(name, "MessageEvent", source, llm_message={"role": role, "content": text(words)} | more)


def acted(name: str, response: str, thought: str = "") -> Event:
    call = {"id": name, "name": "f", "arguments": "{}"}
    return event(name, "ActionEvent", thought=text(thought), tool_call=call, llm_response_id=response)


def result(call: str, **observation: Any) -> Event:
    return event(f"{call}-result", "ObservationEvent", "environment", tool_call_id=call, observation=observation)


def test_the_output_of_a_benchmark_is_read_as_the_agent_sent_it() -> None:
    items = list(read_trajectories([SAMPLES / "output.jsonl"]))
    (first, opening), (_, finish), (_, later) = chats(items)
    assert (first.trajectory_id, first.group_id, first.reward) == ("openhands/output/task-7/turn-1", "task-7", 1.0)
    assert first.metadata == {"model": "m"}
    assert RECALL_NOTE in first.notes
    assert turns(opening) == [("system", "You fix bugs.", 0.0), ("user", "Fix it.", 0.0), ("assistant", "I look.", 1.0)]
    assert [tool["function"]["name"] for tool in opening.tools or []] == ["execute_bash", "finish"]
    # The condensation has replaced the call and its result.
    assert turns(finish)[2:] == [("user", "a.py exists.", 0.0), ("assistant", "All done.", 1.0)]
    assert finish.messages[-1]["tool_calls"][0]["function"]["name"] == "finish"
    # Later prompts have the end of a task as text without its call.
    assert turns(later)[3:] == [
        ("assistant", "All done.", 0.0),
        ("user", "And tests?", 0.0),
        ("assistant", "None.", 1.0),
    ]
    assert "tool_calls" not in later.messages[3]


def test_parallel_calls_are_one_response_before_all_their_results() -> None:
    first, second = called("r", "a", "b"), called("r", "a", "b")
    said = only_turns(user("q"), first, observed("a", "1"), second, observed("b", "2"), called("s", "c", content="d"))
    assert [(role, words) for role, words, _ in said[1:]] == [
        ("assistant", ""),
        ("tool", "1"),
        ("tool", "2"),
        ("assistant", "d"),
    ]


def test_results_have_the_lines_that_the_agent_adds() -> None:
    shell = {"exit_code": 1, "working_dir": "/w", "prefix": "<", "suffix": ">", "py_interpreter_path": "/py"}
    lines = "<x>\n[Current working directory: /w]\n[Python interpreter: /py]\n[Command finished with exit code 1]"
    assert command_output("x", shell) == lines
    assert command_output("x", None) == "x"
    events = [user("q"), called("r", "a"), observed("a", "x", "run", metadata=shell), called("s", "b", content="c")]
    assert only_turns(*events)[2] == ("tool", lines, 0.0)
    failed = observed("a", "x", "error")
    assert only_turns(user("q"), called("r", "a"), failed, called("s", "b"))[2][1] == (
        "x\n[Error occurred in processing last action]"
    )


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (
            {"kind": "FileObservation", "content": text("x"), "is_error": True},
            "[An error occurred during execution.]\nx",
        ),
        ({"kind": "FileObservation", "output": "", "error": "no such file"}, "no such file"),
        ({"kind": "ThinkObservation", "content": "logged"}, "logged"),
        ({"kind": "FinishObservation", "message": "done"}, "done"),
        ({"kind": "TerminalObservation", "content": text("x"), "metadata": {"exit_code": 0}}, None),
    ],
)
def test_the_text_of_a_result_is_what_the_sdk_sends(observation: Event, words: str | None) -> None:
    events = [said("u", "user", "q"), acted("a", "r"), result("a", **observation), said("b", "assistant", "d")]
    expected = "x\n[Command finished with exit code 0]" if words is None else words
    assert only_turns(*events)[2] == ("tool", expected, 0.0)


def test_blocks_of_reasoning_are_paragraphs() -> None:
    blocks = [{"type": "thinking", "thinking": each, "signature": "s"} for each in ("One.", "Two.")]
    ((_, content),) = chats(read(said("u", "user", "q"), acted("a", "r", "T") | {"thinking_blocks": blocks}))
    assert content.messages[1]["reasoning_content"] == "One.\n\nTwo."


@pytest.mark.parametrize("response", [["r"], 1, True, {"id": "r"}, None, ""])
def test_a_response_whose_name_is_not_text_is_refused(response: Any) -> None:
    action = event("a", "ActionEvent", thought=[{"type": "text", "text": "A"}], tool_call=None, llm_response_id="r")
    assert reasons(read(action | {"llm_response_id": response})) == ["llm_response_id of an action is not text"]


def test_a_thought_that_is_json_text_of_its_parts_is_refused() -> None:
    action = event("a", "ActionEvent", thought='[{"type": "text"}]', tool_call=None, llm_response_id="r")
    with pytest.raises(TreepackError, match=r"thought is .*; expected a list of objects"):
        read(action)


def test_a_conversation_whose_actions_have_no_response_is_skipped() -> None:
    (skipped,) = read(user("q"), {"source": "agent", "action": "run", "args": {"command": "ls"}})
    assert skipped == Skipped("runs/output.jsonl:1", NO_RESPONSE, group_id="t")
    assert reasons(read(user("q"), {"source": "agent", "action": "change_agent_state", "args": {}})) == [
        openhands.NO_CALL
    ]


def test_a_call_after_a_picture_is_left_out_and_counted() -> None:
    picture = {"source": "user", "action": "message", "args": {"content": "q", "image_urls": ["data:"]}}
    ((trajectory, content),) = chats(read(user("q"), called("r", "a", content="A"), picture, called("s", "b")))
    assert turns(content)[-1] == ("assistant", "A", 1.0)
    assert f"call not used: {MEDIA_REASON}" in trajectory.notes


def test_one_file_per_event_is_one_conversation(tmp_path: Path) -> None:
    folder = tmp_path / "conversation-1" / "events"
    folder.mkdir(parents=True)
    events = [said("u", "user", "q"), acted("a", "r", "T"), result("a", content=text("x")), said("b", "assistant", "d")]
    for number, each in enumerate(events):
        (folder / f"event-{number:05}-{each['id']}.json").write_text(json.dumps(each))
    items = list(read_trajectories([tmp_path]))
    ((trajectory, content),) = chats(items)
    assert trajectory.trajectory_id == "conversation-1"
    assert [words for _, words, _ in turns(content)] == ["q", "T", "x", "d"]
    assert reasons(items) == ["read with event-00000"] * 3


PART = '{"type": "text", "text": "hi"}'


@pytest.mark.parametrize(
    "given",
    [
        event("m", "MessageEvent", "user", llm_message={"role": "user", "content": [PART]}),
        event("m", "MessageEvent", "user", llm_message={"role": "user", "content": []}, extended_content=[PART]),
        event("o", "ObservationEvent", "environment", tool_call_id="c", observation={"content": [PART]}),
        event("o", "ObservationEvent", "environment", tool_call_id="c", observation={}, extended_content=[PART]),
    ],
)
def test_a_content_part_that_is_an_object_as_json_text_is_refused(given: Event) -> None:
    with pytest.raises(TreepackError, match=r"has the content part .*; expected text, or an object in place of JSON"):
        read(given)


@pytest.mark.parametrize("place", [True, "1", 1.5])
def test_a_summary_whose_place_is_not_a_number_skips_the_conversation(place: Any) -> None:
    condensed = event("s", "Condensation", "environment", forgotten_event_ids=[], summary="S", summary_offset=place)
    older = {"source": "agent", "action": "condensation", "args": {"summary": "S", "summary_offset": place}}
    for given in (condensed, older):
        assert reasons(read(user("q"), given, called("r", "a", content="A"))) == ["summary_offset is not a number"]
