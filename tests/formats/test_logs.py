"""Logs of agents, one conversation per run: made-up ones, and real ones if they are beside the checkout."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from support.readings import chats, read_value, real, reasons, turns
from treepack.errors import TreepackError
from treepack.formats.evaluations import intercode, mint


def test_a_tau_bench_trial_is_named_by_its_task_and_trial(tmp_path: Path) -> None:
    record = {"task_id": 3, "trial": 1, "reward": 1.0, "info": {}, "traj": [{"role": "assistant", "content": "A"}]}
    path = tmp_path / "r.json"
    path.write_text(json.dumps([record, record]))
    for trajectory, _ in chats(read_trajectories([path])):
        assert (trajectory.trajectory_id, trajectory.group_id, trajectory.reward) == ("3/1", "3", 1.0)


def mint_result(**state: Any) -> dict[str, Any]:
    return {"state": {"history": [{"role": "user", "content": "Q"}]} | state, "task": {"task_id": 7, "task_name": "n"}}


def test_a_mint_rollout_belongs_to_the_task_of_its_folder() -> None:
    answered = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    value = mint_result(history=answered, success=True, terminate_reason="task_success")
    ((item, content),) = chats(read_value(mint.read_mint, value, "out/gsm8k/results.jsonl"))
    assert (item.trajectory_id, item.group_id, item.reward) == ("gsm8k/7/results.jsonl", "gsm8k/7", 1.0)
    assert item.metadata == {"task_name": "n", "terminate_reason": "task_success"}
    assert turns(content) == [("user", "Q", 0.0), ("assistant", "A", 1.0)]
    ((failed, _),) = chats(read_value(mint.read_mint, mint_result(success=False), "results.jsonl"))
    assert (failed.group_id, failed.reward) == ("n/7", 0.0)
    with pytest.raises(TreepackError, match=r"log.json: state.success is 1; expected true or false"):
        read_value(mint.read_mint, mint_result(success=1))


def episode(**history: Any) -> dict[str, Any]:
    return {
        "query": "Q",
        "dataset": "data/fs.json",
        "task_id": 3,
        "turn_history": history,
        "summary": {"max_reward": 1},
    }


def test_an_intercode_turn_is_a_thought_and_an_action() -> None:
    plain = episode(actions=["a", "b"], observations=["1", "2"])
    thinking = episode(thoughts=["t"], actions=["a"], observations=["1"])
    (first, chat), (second, react) = chats(read_value(intercode.read_intercode, {"0": plain, "1": thinking}))
    assert (first.trajectory_id, second.trajectory_id) == ("log/0", "log/1")
    assert (first.group_id, first.reward) == ("fs/3", 1.0)
    assert [content for _, content, _ in turns(chat)] == ["Q", "a", "1", "b", "2"]
    assert turns(react)[1] == ("assistant", "Thought 1: t\nAction 1: a", 1.0)


def test_what_intercode_did_in_the_place_of_the_model_is_left_out() -> None:
    out = episode(thoughts=["t", "EXCEEDED MAX TURNS: submit"], actions=["a", "submit"], observations=["1", "2"])
    blocked = episode(actions=["a", "blocked"], observations=["1"])
    named = episode(actions=["blocked"], observations=["1"])
    never = episode(actions=["blocked"], observations=[])
    items = read_value(intercode.read_intercode, {"logs": {"0": out, "1": blocked, "2": named, "3": never}, "meta": {}})
    assert [len(content.messages) for _, content in chats(items)] == [3, 3, 3]
    assert reasons(items) == ["no turn of the model"]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (5, "is 5; expected an object with query and turn_history"),
        (episode(actions="ls"), 'turn_history.actions is "ls"; expected a list of text'),
        (episode(actions=[1]), "turn_history.actions is [1]; expected a list of text"),
    ],
)
def test_an_intercode_episode_of_another_kind_is_refused(second: Any, said: str) -> None:
    with pytest.raises(TreepackError) as caught:
        read_value(intercode.read_intercode, {"0": episode(actions=["a"]), "1": second})
    assert str(caught.value) == f"runs/one/log.json[1]: {said}"


def test_real_tau_bench_rollouts_are_read() -> None:
    pairs = chats(read_trajectories([real("tau-bench-airline") / "gpt-4o-airline.json.gz"]))
    assert len(pairs) == len({item.trajectory_id for item, _ in pairs}) == 200
    assert Counter(item.group_id for item, _ in pairs) == {str(task): 4 for task in range(50)}
    roles = Counter(message["role"] for _, content in pairs for message in content.messages)
    assert roles == {"assistant": 2454, "user": 1490, "tool": 1164, "system": 200}
    assert {item.reward for item, _ in pairs} == {0.0, 1.0}
    assert all([message["role"] for message in content.messages[:2]] == ["system", "user"] for _, content in pairs)
