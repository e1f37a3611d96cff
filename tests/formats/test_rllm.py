"""rLLM: episodes, and the traces of its gateway with their chains of prompts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from support.paths import ROLLOUTS
from support.readings import Items, chat_of, only, read_as, read_whole, tokens_of, trajectories
from support.token_rollouts import back
from treepack.errors import TreepackError
from treepack.formats.trainers.rllm import SOME_NOTE
from treepack.trajectory import Chat, Tokens, Trajectory

SAMPLES = ROLLOUTS
EPISODE = json.loads((SAMPLES / "rllm" / "episode_hash1a2b_idq7_0.json").read_text())
TRACES = [json.loads(line) for line in (SAMPLES / "rllm-gateway.jsonl").read_text().splitlines()]
IDS = [151644, 872, 198, 17, 151645, 198, 50, 51, 2, 8, 9, 52, 2]
USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def items(value: dict[str, Any]) -> Items:
    return read_as("rllm", value, path="e.json")


def read(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(items(value))


def sessions(traces: list[dict[str, Any]]) -> Items:
    return read_whole("rllm-gateway", *traces)


def episode(steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": "q:3", "is_correct": True, "trajectories": [{"steps": steps} | more]}


def test_steps_with_token_ids_are_joined_and_agents_have_groups_of_their_own() -> None:
    solver, judge = read(EPISODE)
    assert back(solver) == (IDS, [6, 7, 8, 11, 12], [-0.5, -0.25, -0.125, -1.0, -0.0625], 1.0)
    content = tokens_of(solver)
    assert content.advantage is not None
    assert content.advantage.tolist() == [0.5, 0.5, 0.5, 0.5, 0.25]
    assert back(judge) == ([151644, 60, 61, 2], [2, 3], [-0.25, -0.5], 1.0)
    assert [(item.trajectory_id, item.group_id) for item in (solver, judge)] == [
        ("q7:0/0", "q7:solver"),
        ("q7:0/1", "q7:judge"),
    ]
    assert (solver.metadata["agent"], solver.metadata["weight_version"]) == ("solver", 7)


def test_steps_without_token_ids_are_joined_by_their_messages() -> None:
    steps: list[dict[str, Any]] = [
        {"chat_completions": [USER, ANSWER]},
        {"chat_completions": [USER, ANSWER, USER, ANSWER, {"role": "user", "content": "Thanks"}]},
    ]
    (trajectory,) = read(episode(steps, name="default_traj_name", reward=None))
    assert chat_of(trajectory).message_weights == [0.0, 1.0, 0.0, 1.0]
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.reward) == ("q:3", "q", 1.0)


def test_what_the_logger_writes_is_read_too() -> None:
    value = episode([{"chat_completions": [USER, ANSWER]}]) | {"training_step": 5, "episode_id": "q:3"}
    (trajectory,) = read({name: field for name, field in value.items() if name != "id"})
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.step) == ("q:3", "q", 5)


def test_token_ids_of_some_steps_only_are_not_mixed_with_text() -> None:
    steps: list[dict[str, Any]] = [
        {"prompt_ids": [1], "response_ids": [2], "chat_completions": [USER, ANSWER]},
        {"chat_completions": [USER, ANSWER, USER, ANSWER]},
    ]
    (trajectory,) = read(episode(steps))
    assert isinstance(trajectory.content, Chat)
    assert trajectory.notes == (SOME_NOTE,)


def test_fields_that_nobody_knows_are_metadata_or_noted() -> None:
    (trajectory,) = read(episode([{"chat_completions": [USER, ANSWER]}], difficulty=3, signals={"a": 1.0}))
    assert (trajectory.metadata["difficulty"], trajectory.notes) == (3, ("field 'signals' not used",))
    session = only(sessions([TRACES[0] | {"region": "eu"}]))
    assert session.metadata["region"] == "eu"


def test_a_session_with_sub_agents_is_one_rollout_whatever_its_lineage_tags_are() -> None:
    def trace(name: str, lineage: str, prompt: list[int], said: list[int]) -> dict[str, Any]:
        ids = {"prompt_token_ids": prompt, "completion_token_ids": said, "logprobs": [-0.5] * len(said)}
        facts = {"messages": [USER], "response_message": ANSWER, "metadata": {"task_id": "q", "reward": 1.0}}
        return {"trace_id": name, "session_id": "s", "lineage_id": lineage} | ids | facts

    main = [trace("a", "main", [1], [2]), trace("c", "main", [1, 2, 3], [4])]
    found = [item for item in sessions([main[0], trace("b", "sub", [9], [8]), main[1]]) if isinstance(item, Trajectory)]
    contents = [item.content.tokens.tolist() for item in found if isinstance(item.content, Tokens)]
    assert contents == [[1, 2, 3, 4], [9, 8]]
    assert {(item.rollout_id, item.group_id, item.source) for item in found} == {("s", "q", "r.jsonl:1")}
    assert not any("lineage_id" in item.metadata for item in found)


def test_prompts_are_found_by_parents_in_whatever_order_the_traces_are() -> None:
    chain, prompt = [], [0]
    for number in range(12):
        delta: dict[str, Any] = {"prompt_delta_token_ids": None, "prompt_token_ids": prompt}
        if number:
            delta = {"prompt_delta_token_ids": [100 + number], "parent_trace_id": str(number - 1)}
        chain.append({"trace_id": str(number), "session_id": "s", "completion_token_ids": [number]} | delta)
        prompt = [*prompt, number, 101 + number]
    whole = only(sessions(chain))
    assert back(whole)[0] == prompt[:-1]
    random.Random(0).shuffle(chain)
    trajectories = [item for item in sessions(chain) if isinstance(item, Trajectory)]
    assert sum(len(back(item)[1]) for item in trajectories) == 12
    assert max((back(item)[0] for item in trajectories), key=len) == prompt[:-1]


def test_a_file_of_something_else_is_refused() -> None:
    with pytest.raises(TreepackError, match="has no session_id; expected trace_id and session_id"):
        sessions([{"trace_id": "a"}])
