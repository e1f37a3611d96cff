"""Rollout files of the Codex CLI: one trajectory for each stretch of the history that only grows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from support.readings import Items, chats, read_whole, said_in, turns
from treepack.errors import TreepackError
from treepack.ingest.readers.messages.response_items import ENCRYPTED_NOTE
from treepack.trajectory import MAX_INSIDE, Chat, Trajectory

Line = dict[str, Any]


def line(kind: str, **payload: Any) -> Line:
    return {"timestamp": "t", "type": kind, "payload": payload}


def message(role: str, words: str) -> Line:
    part = {"type": "output_text" if role == "assistant" else "input_text", "text": words}
    return {"type": "message", "role": role, "content": [part]}


def item(**payload: Any) -> Line:
    return line("response_item", **payload)


def talk(letters: str) -> list[Line]:
    """Messages as letters: capitals are the model's."""
    return [item(**message("assistant" if each.isupper() else "user", each)) for each in letters]


def read(*lines: Line) -> Items:
    return read_whole("codex", line("session_meta", id="S", base_instructions={"text": "b"}), *lines)


def letters(*lines: Line) -> dict[str, str]:
    """The texts of each trajectory after the base instructions "b"; small letters are not trained."""
    return {name: said.removeprefix("b") for name, said in said_in(read(*lines), "").items()}


def compacted(*items: Line, **more: Any) -> Line:
    return line("compacted", message="z", replacement_history=list(items) or None, **more)


def test_a_compaction_without_a_history_keeps_the_messages_of_the_user() -> None:
    assert letters(*talk("qA"), compacted(), *talk("bB")) == {"S/turn-1": "qA", "S/turn-2": "qzbB"}


def test_a_session_of_an_early_version_has_the_items_on_its_lines(tmp_path: Path) -> None:
    lines = [{"id": "S", "timestamp": "t", "instructions": None, "git": {}}, {"record_type": "state"}]
    lines += [each["payload"] for each in talk("uAuB")]
    path = tmp_path / "rollout-S.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    (item,) = read_trajectories([path])
    assert isinstance(item, Trajectory)
    assert item.trajectory_id == "S"
    assert isinstance(item.content, Chat)
    assert [(words, weight) for _, words, weight in turns(item.content)] == [
        ("u", 0.0),
        ("A", 1.0),
        ("u", 0.0),
        ("B", 1.0),
    ]
    assert not [note for note in item.notes if "content" in note or "role" in note]


def test_context_of_codex_is_no_turn_of_the_user() -> None:
    context = item(**message("user", "<cwd/>"))
    back = line("event_msg", type="thread_rolled_back", num_turns=1)
    lines = [context, *talk("qA"), context, *talk("bB"), back, *talk("cC")]
    assert letters(*lines)["S/turn-3"] == "<cwd/>qa<cwd/>cC"


def test_reasoning_that_is_encrypted_is_counted() -> None:
    thought = item(type="reasoning", summary=[], encrypted_content="Z0FB")
    ((trajectory, content),) = chats(read(*talk("q"), thought, *talk("A")))
    assert ENCRYPTED_NOTE in trajectory.notes
    assert "reasoning_content" not in content.messages[-1]


def shell(**action: Any) -> Line:
    return item(type="local_shell_call", call_id="c", action=action)


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (line("compacted", message="z", replacement_history=7), "replacement_history is 7; expected a list of objects"),
        (line("compacted", message=["z"]), 'message is ["z"]; expected text'),
        (line("event_msg", type="thread_rolled_back"), "num_turns is null; expected the number of turns"),
        (line("event_msg", type="thread_rolled_back", num_turns=True), "num_turns is true; expected the number"),
        (item(**message("assistant", "z")) | {"metadata": [{"compaction_output": True}]}, "metadata is [{"),
        (talk("A")[0] | {"type": 7}, "type is 7; expected text"),
        (line("event_msg", type=["thread_rolled_back"], num_turns=1), "payload.type is"),
        (item(type="custom_tool_call", call_id="c", name="patch", input=["x"]), 'input is ["x"]; expected text'),
        (shell(type="exec", command="ls"), 'action.command is "ls"; expected a list'),
        (shell(command=["ls"]), "expected an object of type exec"),
    ],
)
def test_an_event_of_another_form_is_refused(odd: Line, sentence: str) -> None:
    with pytest.raises(TreepackError, match=re.escape(sentence)):
        read(*talk("qA"), odd)


def write(path: Path, meta: dict[str, Any], *lines: Line) -> None:
    path.write_text("\n".join(json.dumps(each) for each in (line("session_meta", **meta), *lines)))


def spawned_by(parent: str) -> dict[str, Any]:
    return {"source": {"subagent": {"thread_spawn": {"parent_thread_id": parent, "depth": 1}}}}


def test_a_session_and_its_sub_agents_are_one_rollout_over_files(tmp_path: Path) -> None:
    for number, (name, parent) in enumerate({"S": None, "T": "S", "U": "T", "V": None, "W": "gone"}.items()):
        meta = {"id": name} | (spawned_by(parent) if parent else {})
        write(tmp_path / f"rollout-2026-0{number}-{name}.jsonl", meta, *talk(f"{name.lower()}A"))
    found = [each for each in read_trajectories([tmp_path]) if isinstance(each, Trajectory)]
    facts = {each.trajectory_id: (each.rollout_id, each.rollout_part) for each in found}
    expected = {"S": ("S", 0), "T": ("S", 2 * MAX_INSIDE), "U": ("S", 3 * MAX_INSIDE)}
    assert facts == expected | {"V": (None, None), "W": (None, None)}
    assert len({(each.source, each.group_id) for each in found[:3]}) == 1


@pytest.mark.parametrize(
    "origin", [{"forked_from_id": "S"}, spawned_by("S") | {"forked_from_id": "S"}, spawned_by("S")]
)
def test_turns_that_a_fork_copied_are_trained_in_their_own_session_only(tmp_path: Path, origin: Any) -> None:
    write(tmp_path / "rollout-1-S.jsonl", {"id": "S"}, *talk("qArBsC"))
    fork = [line("session_meta", id="S"), *talk("qAxrBtDsC")]
    write(tmp_path / "rollout-2-T.jsonl", {"id": "T"} | origin, *fork)
    assert said_in(read_trajectories([tmp_path]), "") == {"S": "qArBsC", "T": "qaxrbtDsC"}
    (tmp_path / "rollout-1-S.jsonl").unlink()
    assert said_in(read_trajectories([tmp_path]), "") == {"T": "qAxrBtDsC"}


@pytest.mark.parametrize("base", ['{"text": "Be brief."}', ["Be brief."], {"text": ["Be brief."]}])
def test_base_instructions_of_a_different_form_are_refused(base: Any) -> None:
    with pytest.raises(TreepackError, match="expected text"):
        read_whole("codex", line("session_meta", id="S", base_instructions=base), *talk("aB"))
