"""Sessions of Claude Code: every turn is trained once, after the messages that Claude Code sent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.read_rollouts import read_trajectories
from support.readings import Items, chats, read_whole, reasons, said_in, turns
from treepack.calls import stream_lines
from treepack.calls.call_logs import NO_CALL, ORDER_NOTE
from treepack.calls.copied_turns import COPIED_NOTE
from treepack.errors import TreepackError
from treepack.formats.agents import claude_code
from treepack.trajectory import MAX_INSIDE, Skipped, Trajectory

Line = dict[str, Any]


def read(lines: list[Line]) -> Items:
    return read_whole("claude-code", *lines)


def entry(uuid: str, parent: str | None, kind: str = "user", content: Any = None, **more: Any) -> Line:
    message = {"message": {"role": kind, "content": content}} if content is not None else {}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "S"} | message | more


def block(uuid: str, parent: str | None, name: str | None, part: Any, **more: Any) -> Line:
    message = {"id": name, "role": "assistant", "model": "m", "content": [part]} | more
    return {"type": "assistant", "uuid": uuid, "parentUuid": parent, "sessionId": "S", "message": message}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@dataclass
class Program:
    """A slow twin: writes the lines of a session as Claude Code does, and remembers the messages of each prompt."""

    lines: list[Line] = field(default_factory=list)
    prompts: dict[str, list[str]] = field(default_factory=dict)  # what the model saw before the message of this name
    states: list[tuple[str | None, list[str]]] = field(default_factory=lambda: [(None, [])])

    def write(self, line: Line) -> str:
        self.lines.append(line)
        return str(line["uuid"])

    def ask(self, state: int) -> None:
        """The user writes after any earlier state: a branch, if that state was continued before."""
        parent, history = self.states[state]
        name = f"u{len(self.lines)}"
        self.states.append((self.write(entry(name, parent, content=name)), [*history, name]))

    def answer(self, num_calls: int, order: list[int]) -> None:
        """The model writes text and parallel calls; each result hangs at its own call, in the order that they end."""
        last, history = self.states[-1]
        name = f"m{len(self.lines)}"
        self.prompts[name] = history
        calls = []
        last = self.write(block(f"{name}-text", last, name, text(name)))
        for number in range(num_calls):
            use = {"type": "tool_use", "id": f"{name}-{number}", "name": "f", "input": {}}
            last = self.write(block(f"{name}-{number}", last, name, use))
            calls.append(last)
        results = [calls[place] for place in order if place < num_calls]
        for call in results:
            part = {"type": "tool_result", "tool_use_id": call, "content": call}
            last = self.write(entry(f"{call}-result", call, content=[part]))
        self.states.append((last, [*history, name, *results]))

    def compact(self, keep_last: bool) -> None:
        """A summary replaces the history, all of it or all but the last message of the model with its results."""
        tail, history = self.states[-1]
        heads = [name for name in history if name in self.prompts]
        kept = history[history.index(heads[-1]) :] if keep_last and heads else []
        name = f"s{len(self.lines)}"
        segment = {"headUuid": f"{kept[0]}-text", "anchorUuid": name, "tailUuid": tail} if kept else None
        metadata = {"compactMetadata": {"preservedSegment": segment}}
        top = self.write(entry(f"{name}-top", None, "system", subtype="compact_boundary", **metadata))
        self.states.append((self.write(entry(name, top, content=name)), [name, *kept]))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    for _ in range(draw(st.integers(1, 6))):
        program.ask(draw(st.integers(0, len(program.states) - 1)))
        for _ in range(draw(st.integers(0, 3))):
            program.answer(draw(st.integers(1, 3)), draw(st.permutations(range(3))))
        program.answer(0, [])
        if draw(st.booleans()):
            program.compact(draw(st.booleans()))
    return program


@given(program=programs())
def test_every_turn_is_trained_once_after_its_own_prompt(program: Program) -> None:
    trained = []
    for _, content in chats(read(program.lines)):
        names = [words for _, words, _ in turns(content)]
        for place, (name, weight) in enumerate(zip(names, content.message_weights, strict=True)):
            if weight:
                trained.append(name)
                assert names[:place] == program.prompts[name]
    assert sorted(trained) == sorted(program.prompts)


def test_a_result_whose_parent_is_not_in_the_file_follows_its_call() -> None:
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "ab"]
    results = [[{"type": "tool_result", "tool_use_id": name, "content": name}] for name in "ab"]
    lines = [
        entry("u", None, content="q"),
        block("m", "u", "m", calls[0]),
        block("n", "m", "m", calls[1]),
        entry("r", "a line of progress that is not in the file", content=results[0]),
        entry("s", "r", content=results[1]),
        block("o", "s", "o", text("B")),
    ]
    whole = [line if line["uuid"] != "r" else {**line, "parentUuid": "n"} for line in lines]
    assert said_in(read(lines)) == said_in(read(whole))
    assert len(chats(read(lines))) == 1
    assert claude_code.PARENT_NOTE not in chats(read(lines))[0][0].notes


def lines_of_agent(agent: str) -> list[Line]:
    return [
        entry(f"u{agent}", None, content="search", agentId=agent, isSidechain=True),
        block(f"m{agent}", f"u{agent}", f"m{agent}", text("A")),
    ]


def write(path: Path, lines: list[Line]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.parametrize("folder", [".", "S/subagents"])
def test_a_session_and_its_sub_agents_are_one_rollout_over_files(tmp_path: Path, folder: str) -> None:
    task = {"type": "tool_use", "id": "t", "name": "Task", "input": {"subagent_type": "explorer"}}
    done = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    result = entry("r", "m1", content=[done], toolUseResult={"agentId": "a2"})
    lines = [entry("u", None, content="q"), block("m1", "u", "m1", task), result, block("m2", "r", "m2", text("B"))]
    write(tmp_path / "S.jsonl", lines)
    write(tmp_path / folder / "agent-a2.jsonl", lines_of_agent("a2"))
    found = [item for item in read_trajectories([tmp_path]) if isinstance(item, Trajectory)]
    facts = sorted((item.rollout_part, item.trajectory_id, item.rollout_id, item.source) for item in found)
    place = str(tmp_path / "S.jsonl")
    assert facts == [(0, "S", "S", place), (MAX_INSIDE, "S/a2", "S", place)]
    assert len({item.group_id for item in found}) == 1
    # `treepack advantages --by agent` compares sub-agents of a kind.
    assert {item.trajectory_id: item.metadata.get("agent") for item in found} == {"S": None, "S/a2": "explorer"}


def test_a_sub_agent_that_its_session_does_not_name_is_a_rollout_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "S.jsonl", [entry("u", None, content="q"), block("m", "u", "m", text("A"))])
    write(tmp_path / "agent-a2.jsonl", lines_of_agent("a2"))
    found = [item for item in read_trajectories([tmp_path]) if isinstance(item, Trajectory)]
    assert [(item.trajectory_id, item.rollout_id) for item in found] == [("S", None), ("S/a2", None)]


def test_an_interrupted_turn_is_context_but_not_trained() -> None:
    stop = entry("i", "m1", content=[text(claude_code.INTERRUPTED)])
    lines = [
        entry("u", None, content="q"),
        block("m1", "u", "m1", text("A")),
        stop,
        entry("v", "i", content="r"),
        block("m2", "v", "m2", text("B")),
    ]
    items = read(lines)
    assert said_in(items) == {"S": "q a [request interrupted by user] r B"}
    assert claude_code.INTERRUPTED_NOTE in chats(items)[0][0].notes


@pytest.mark.parametrize("model", [[claude_code.SYNTHETIC], {"name": "m"}, 1, True, None, ""])
def test_a_message_whose_model_is_not_text_is_left_out_and_counted(model: Any) -> None:
    lines = [entry("u", None, content="q"), block("a", "u", "a", text("A")), block("n", "a", "n", text("B"))]
    lines[2]["message"]["model"] = model
    items = read(lines)
    assert [turn for turn in chats(items)[0][0].notes if "call" in turn] == ["call not used: its model is not text"]
    assert len(chats(items)) == len(chats(read(lines[:2]))) == 1


@pytest.mark.parametrize("line", [block("b", "u", None, text("A")), block("b", None, "m", text("A"))])
def test_a_line_of_the_model_without_its_message_or_its_parent_is_refused(line: Line) -> None:
    with pytest.raises(TreepackError, match=r"r\.jsonl:2: a line of the model lacks message\.id or parentUuid"):
        read([entry("u", None, content="q"), line])


def test_a_file_without_a_turn_is_skipped() -> None:
    title = {"type": "summary", "summary": "Files", "leafUuid": "x"}
    (skipped,) = read([title])
    assert skipped == Skipped("r.jsonl", NO_CALL, is_rollout=False)
    (beside,) = read([{"agentType": "general-purpose", "toolUseId": "toolu_1"}])
    assert beside == Skipped("r.jsonl:1", claude_code.SUB_AGENT, is_rollout=False)


def test_a_prompt_that_begins_after_a_line_of_a_different_file_is_counted() -> None:
    rest = [entry("u", "gone", content="a"), block("b", "u", "m1", text("B"))]
    ((cut, _),) = chats(read(rest))
    assert claude_code.PARENT_NOTE in cut.notes
    ((whole, _),) = chats(read([entry("gone", None, content="x"), *rest]))
    assert claude_code.PARENT_NOTE not in whole.notes


def streamed(kind: str, content: Any, *, agent: str | None = None, session: str = "S", **more: Any) -> Line:
    message = {"role": kind, "content": content} | (
        {"id": more.pop("id", None), "model": "m"} if kind != "user" else {}
    )
    return {"type": kind, "message": message, "parent_tool_use_id": agent, "session_id": session, "uuid": "x"} | more


def without_content(line: Line) -> Line:
    return line | {"message": {name: field for name, field in line["message"].items() if name != "content"}}


def call(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "f", "input": {}}


def result(name: str) -> Line:
    return {"type": "tool_result", "tool_use_id": name, "content": f"result {name}"}


INIT = {"type": "system", "subtype": "init", "session_id": "S", "tools": ["f"], "cwd": "/w"}
BOUNDARY = {"type": "system", "subtype": "compact_boundary", "session_id": "S"}


def told(*lines: Line) -> list[list[tuple[str, float]]]:
    """Texts and weights of each conversation of a stream, in the order of the file."""
    return [[(str(words), weight) for _, words, weight in turns(chat)] for _, chat in chats(read([INIT, *lines]))]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([streamed("assistant", [text("A")], id="m")], stream_lines.NO_PROMPT),
        ([streamed("user", [result("c")]), streamed("assistant", [text("A")], id="m")], stream_lines.NO_PROMPT),
        ([BOUNDARY, streamed("user", "u"), streamed("assistant", [text("A")], id="m")], stream_lines.NO_SUMMARY),
        (
            [
                streamed("user", "u"),
                without_content(streamed("assistant", None, id="m1")),
                streamed("user", [result("c")]),
                streamed("assistant", [text("A")], id="m2"),
            ],
            stream_lines.NO_CONTENT,
        ),
        # A type that is a list is no prompt of a known kind, and no fault of the reader.
        ([streamed("user", [{"type": ["tool_result"]}, result("c")])], stream_lines.NO_PROMPT),
    ],
)
def test_a_stream_with_missing_parts_is_skipped_and_the_remedy_is_named(lines: list[Line], reason: str) -> None:
    (item,) = read([INIT, *lines])
    assert isinstance(item, Skipped)
    assert (item.reason, item.is_rollout) == (reason, True)
    assert "below ~/.claude/projects" in str(item.detail)


@pytest.mark.parametrize(
    "end",
    [
        {"type": "result", "session_id": "S", "stop_reason": "max_tokens", "result": "A"},
        {"type": "stream_event", "session_id": "S", "event": {"delta": {"stop_reason": "max_tokens"}}},
    ],
)
def test_an_answer_that_a_limit_cut_is_cut_in_a_stream(end: Line) -> None:
    ((_, chat),) = chats(read([INIT, streamed("user", "u"), streamed("assistant", [text("A")], id="m"), end]))
    assert chat.message_cuts == [False, True]


def test_lines_without_links_are_read_in_the_order_of_the_file() -> None:
    def line(kind: str, content: Any) -> Line:
        return {"type": kind, "sessionId": "S", "message": {"role": kind, "content": content}}

    lines = [line("user", "u"), line("assistant", [text("A")]), line("assistant", [call("c")])]
    lines += [line("user", [result("c")]), line("assistant", "B")]
    ((_, chat),) = chats(read(lines))
    assert [(words, weight) for _, words, weight in turns(chat)] == [
        ("u", 0.0),
        ("A", 1.0),
        ("result c", 0.0),
        ("B", 1.0),
    ]


def test_a_stream_of_cursor_is_refused_by_its_name() -> None:
    tool = {"type": "tool_call", "subtype": "started", "session_id": "S", "tool_call": {"readToolCall": {}}}
    with pytest.raises(TreepackError, match="3: is an export of Cursor"):
        read([INIT, streamed("user", "u"), tool, streamed("assistant", [text("A")], id="m")])


def test_an_api_error_in_a_stream_is_neither_trained_nor_in_a_prompt() -> None:
    failed = streamed("assistant", [text("API Error")], id="m1", error="overloaded")
    failed["message"]["model"] = claude_code.SYNTHETIC
    lines = [streamed("user", "u"), failed, streamed("user", "again"), streamed("assistant", [text("B")], id="m2")]
    assert told(*lines) == [[("u", 0.0), ("again", 0.0), ("B", 1.0)]]


def said(line: str, parent: str, name: str, *parts: Any, **more: Any) -> Line:
    return block(line, parent, name, None, **more) | {
        "message": {"id": name, "role": "assistant", "model": "m", "content": list(parts)} | more
    }


HIDDEN = {"type": "thinking", "thinking": "", "signature": "s"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([[text("I look.")], [text("I")]], "I look.I"),  # a shorter text is a block of its own
        ([[text("I look.")], [text("I look.")]], "I look."),
        ([[text("I look.")], [text("Seven.")]], "I look.Seven."),
        (["I look", "I look."], "I look."),
        ([[HIDDEN, text("I look")], [HIDDEN, text("I look.")]], "I look."),
        ([[text("I")], [text("I look."), {"type": "tool_use", "id": "c", "name": "f", "input": {}}]], "I look."),
    ],
)
@pytest.mark.parametrize("has_uuids", [True, False])
def test_only_a_line_that_continues_the_text_before_replaces_it(
    lines: list[Any], expected: str, has_uuids: bool
) -> None:
    names = [f"a{i}" if has_uuids else "a" for i in range(len(lines))]
    rows = [said(name, before, "m1") for name, before in zip(names, ["u", *names], strict=False)]
    for row, parts in zip(rows, lines, strict=True):
        row["message"]["content"] = parts
    ((_, chat),) = chats(read([entry("u", None, content="Bolts?"), *rows]))
    assert chat.messages[-1]["content"] == expected


COMMON = [entry("u1", None, content="Bolts?"), said("a1", "u1", "m1", text("Seven."))]
NUTS = [entry("u2", "a1", content="Nuts?"), said("a2", "u2", "m2", text("None."))]
RINGS = [entry("u3", "a1", content="Rings?"), said("a3", "u3", "m3", text("Nine."))]


def _copied(lines: list[Line], **more: Any) -> list[Line]:
    return [line | {"sessionId": "T"} | more for line in lines]


def _forked(lines: list[Line]) -> list[Line]:
    """A fork whose lines have new uuids, and name the lines that they are copies of."""
    new = {line["uuid"]: f"new-{line['uuid']}" for line in lines}
    origins = ({"forkedFrom": {"sessionId": "S", "messageUuid": line["uuid"]}} for line in lines)
    links = ({"uuid": new[line["uuid"]], "parentUuid": new.get(line["parentUuid"])} for line in lines)
    return [line | {"sessionId": "T"} | link | origin for line, link, origin in zip(lines, links, origins, strict=True)]


def _renamed(lines: list[Line]) -> list[Line]:
    """A copy whose lines have new uuids; the ids of requests stay."""
    return [
        {name: field for name, field in line.items() if name != "forkedFrom"} | {"requestId": f"r{k}"}
        for k, line in enumerate(_forked(lines))
    ]


@pytest.mark.parametrize("names", [("s/s.jsonl", "s/t.jsonl"), ("s/t.jsonl", "s/s.jsonl"), ("a/s.jsonl", "b/t.jsonl")])
@pytest.mark.parametrize(
    "copy",
    [_copied(COMMON, sessionKind="bg") + _copied(RINGS), _forked(COMMON + RINGS), _renamed(COMMON + RINGS)],
    ids=["background", "fork", "new uuids"],
)
def test_a_turn_of_several_files_is_trained_once(tmp_path: Path, names: tuple[str, str], copy: list[Line]) -> None:
    own = [line | {"requestId": f"r{k}"} for k, line in enumerate(COMMON)]
    for name, lines in zip(names, (own + NUTS, copy), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    items = list(read_trajectories([tmp_path]))
    trained = [words for _, chat in chats(items) for _, words, weight in turns(chat) if weight]
    assert sorted(trained) == ["Nine.", "None.", "Seven."]
    assert sum(item.notes.count(COPIED_NOTE) for item in items if isinstance(item, Trajectory)) == 1


def test_a_session_of_copied_turns_only_is_skipped_with_this_reason(tmp_path: Path) -> None:
    for name, lines in (("a", COMMON + NUTS), ("b", _copied(COMMON))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert reasons(list(read_trajectories([tmp_path]))) == [COPIED_NOTE]


def test_a_session_whose_answers_pass_over_results_is_skipped_with_this_reason() -> None:
    call = {"type": "tool_use", "id": "c", "name": "stock", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
    lines = [entry("u", None, content="Bolts?"), said("a", "u", "m1", call), entry("r", "a", content=[result])]
    assert reasons(read([*lines, said("b", "u", "m2", text("Seven."))])) == [ORDER_NOTE]
    ((_, chat),) = chats(
        read([*lines[:2], said("b", "r", "m2", text("Seven.")), lines[2]])
    )  # only the file has this order
    assert [message["content"] for message in chat.messages] == ["Bolts?", "", "7", "Seven."]
