"""ATIF: trajectories of Harbor's trials."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.read_rollouts import read_trajectories
from support.readings import chats, only, read_value, reasons, turns
from treepack.errors import TreepackError
from treepack.formats.evaluations.atif import atif
from treepack.trajectory import MAX_INSIDE, Skipped, Tokens, Trajectory

IDS = st.lists(st.integers(0, 99), min_size=1, max_size=4)


def agent_step(message: str, **more: Any) -> dict[str, Any]:
    return {"source": "agent", "message": message, **more}


def user_step(message: Any, **more: Any) -> dict[str, Any]:
    return {"source": "user", "message": message, **more}


def ids(prompt: list[int], completion: list[int], logprobs: list[float] | None = None) -> dict[str, Any]:
    return {"metrics": {"prompt_token_ids": prompt, "completion_token_ids": completion, "logprobs": logprobs}}


def read_atif(*steps: dict[str, Any], **more: Any) -> list[Trajectory | Skipped]:
    value = {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": {"name": "a"}, "steps": list(steps)}
    return read_value(atif.read_atif, value | more)


@given(calls=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5))
def test_the_calls_of_a_linear_atif_run_are_its_tokens_with_one_span_each(
    calls: list[tuple[list[int], list[int]]],
) -> None:
    """Written as prompts that hold all before them, read back as the whole, its spans and log-probabilities."""
    steps, starts = [], []
    history: list[int] = []
    for number, (given_ids, said) in enumerate(calls):
        history = history + given_ids
        starts.append(len(history))
        steps.append(agent_step("", **ids(history, said, [-float(number + 1)] * len(said))))
        history = history + said
    trajectory = only(read_atif(*steps))
    assert isinstance(trajectory.content, Tokens)
    assert trajectory.content.tokens.tolist() == history
    assert trajectory.content.starts.tolist() == starts
    assert (trajectory.content.ends - trajectory.content.starts).tolist() == [len(said) for _, said in calls]
    expected = np.repeat([-float(number + 1) for number in range(len(calls))], [len(said) for _, said in calls])
    assert trajectory.content.sampling_logprob is not None
    assert np.array_equal(trajectory.content.sampling_logprob, expected.astype(np.float32))


def test_steps_after_a_summary_are_not_trained_behind_a_history_that_their_model_did_not_see() -> None:
    summary = {"source": "system", "message": "Summed up.", "observation": {"results": [{"content": "short"}]}}
    ((trajectory, chat),) = chats(
        read_atif(user_step("Q"), agent_step("A"), summary, user_step("Go on."), agent_step("B"))
    )
    assert trajectory.notes == (atif.CONTEXT_NOTE,)
    assert turns(chat) == [("user", "Q", 0.0), ("assistant", "A", 1.0)]
    ((whole, same),) = chats(read_atif(summary, user_step("Q"), agent_step("A"), summary))
    assert (turns(same), whole.notes) == (turns(chat), ())


def event(*texts: Any, boundary: str = "replace", **more: Any) -> dict[str, Any]:
    results = [{"content": text} for text in texts]
    extra = {"context_management": {"type": "compaction", "boundary": boundary}}
    return {"source": "system", "message": "Summed up.", "observation": {"results": results}, "extra": extra, **more}


def test_a_context_that_replaces_the_old_one_is_the_prompt_of_the_next_steps() -> None:
    steps = (user_step("Q"), agent_step("A"), event("short"), user_step("Go on."), agent_step("B"), event("shorter"))
    (first, old), (second, new), (third, last) = chats(read_atif(*steps, agent_step("C")))
    assert turns(old) == [("user", "Q", 0.0), ("assistant", "A", 1.0)]
    assert turns(new) == [("user", "short", 0.0), ("user", "Go on.", 0.0), ("assistant", "B", 1.0)]
    assert turns(last) == [("user", "shorter", 0.0), ("assistant", "C", 1.0)]
    found = [first, second, third]
    assert [item.trajectory_id for item in found] == ["s/turn-1", "s/turn-2", "s/turn-3"]
    assert [(item.rollout_id, item.rollout_part) for item in found] == [("s", 0), ("s", 1), ("s", 2)]
    assert len({item.group_id for item in found}) == 1


def test_a_copied_context_that_replaces_the_old_one_is_the_prompt_of_a_continuation() -> None:
    copied = [step | {"is_copied_context": True} for step in (user_step("Q"), agent_step("A"), event("short"))]
    ((trajectory, chat),) = chats(read_atif(*copied, user_step("Go on."), agent_step("B")))
    assert turns(chat) == [("user", "short", 0.0), ("user", "Go on.", 0.0), ("assistant", "B", 1.0)]
    assert (trajectory.trajectory_id, trajectory.notes) == ("s", ())


def test_atif_steps_without_token_ids_are_a_conversation() -> None:
    call = {"tool_call_id": "c", "function_name": "ls", "arguments": {"all": True}}
    results = {"results": [{"source_call_id": "c", "content": "x"}, {"content": "y"}]}
    tools = [{"type": "function", "function": {"name": "ls"}}]
    looked = agent_step("I look.", reasoning_content="Hm.", tool_calls=[call], observation=results)
    last = agent_step("B")
    asked = user_step([{"type": "text", "text": "Q"}])
    steps = [{"source": "system", "message": "S"}, asked, looked, {"source": "system", "message": ""}, last]
    ((item, content),) = chats(read_atif(*steps, agent={"name": "a", "model_name": "m", "tool_definitions": tools}))
    assert (item.trajectory_id, item.group_id) == ("s", None)
    assert item.metadata == {"session_id": "s", "agent": "a", "model": "m"}
    assert content.tools == tools
    assert content.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": {"all": True}}}],
        },
        {"role": "tool", "content": "x", "name": "ls", "tool_call_id": "c"},
        {"role": "user", "content": "y"},
        {"role": "assistant", "content": "B"},
    ]
    assert [weight for *_, weight in turns(content)] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_atif_steps_that_were_copied_or_that_no_model_made_are_not_trained() -> None:
    steps = [
        user_step("Q"),
        agent_step("A", is_copied_context=True),
        agent_step("B", llm_call_count=0),
        agent_step("C"),
    ]
    ((_, content),) = chats(read_atif(*steps))
    assert [weight for *_, weight in turns(content)] == [0.0, 0.0, 0.0, 1.0]
    assert reasons(read_atif(*steps[:3])) == ["no step of a model that can be trained"]
    ((_, content),) = chats(read_atif(user_step("Q"), agent_step("A", is_copied_context="false")))
    assert content.message_weights == [0.0, 1.0]


@pytest.mark.parametrize("odd", [{"llm_call_count": "0"}, {"llm_call_count": [0]}, {"metrics": [{}]}])
def test_a_step_whose_calls_or_metrics_have_another_form_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(TreepackError, match=rf"{next(iter(odd))} is .*; expected"):
        read_atif(user_step("Q"), agent_step("A", **odd))


def test_atif_steps_from_an_image_on_are_left_out() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image", "source": {"path": "x.png"}}]
    ((trajectory, content),) = chats(read_atif(user_step("Q"), agent_step("A"), user_step(parts), agent_step("B")))
    assert turns(content) == [("user", "Q", 0.0), ("assistant", "A", 1.0)]
    assert trajectory.notes == ("steps from the first image or sound to the end not used",)


def test_embedded_agents_are_trajectories_of_their_own_in_one_rollout() -> None:
    steps = [user_step("P"), agent_step("C")]
    inner = {"schema_version": "ATIF-v1.7", "trajectory_id": "t", "agent": {"name": "b"}, "steps": steps}
    pairs = chats(read_atif(user_step("Q"), agent_step("A"), subagent_trajectories=[inner]))
    assert [(item.trajectory_id, item.metadata["agent"]) for item, _ in pairs] == [("s", "a"), ("s/t", "b")]
    assert [(item.rollout_id, item.rollout_part) for item, _ in pairs] == [("s", 0), ("s", MAX_INSIDE)]
    assert len({(item.source, item.group_id) for item, _ in pairs}) == 1
    with pytest.raises(
        TreepackError, match=r"subagent_trajectories\[0\] is \{\}; expected a trajectory with schema_version ATIF"
    ):
        read_atif(user_step("Q"), agent_step("A"), subagent_trajectories=[{}])


def trial(folder: Path, result: dict[str, Any], *files: str) -> Path:
    document = {
        "schema_version": "ATIF-v1.6",
        "session_id": "s",
        "agent": {},
        "steps": [user_step("Q"), agent_step("A")],
    }
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(document))
    named = {"task_name": "task", "trial_name": "task__1", "agent_info": {}}
    (folder / "result.json").write_text(json.dumps(named | result))
    return folder


def test_the_result_of_a_trial_names_and_rewards_its_trajectories(tmp_path: Path) -> None:
    names = ("agent/trajectory.json", "agent/trajectory.cont-1.json", "agent/trajectory.summary-2.json")
    folder = trial(tmp_path, {"verifier_result": {"rewards": {"score": 0.25}}}, *names)
    items = list(read_trajectories([folder]))
    rewards = {item.trajectory_id: (item.group_id, item.reward) for item, _ in chats(items)}
    assert rewards == dict.fromkeys(("task__1", "task__1/cont-1", "task__1/summary-2"), ("task", 0.25))
    assert reasons(items) == ["result of a trial, read with its trajectories"]


def rollouts(items: Iterable[Trajectory | Skipped]) -> dict[str, list[str]]:
    """Return the trajectories of each rollout in the order of their parts, by its place and name."""
    trajectories = [item for item in items if isinstance(item, Trajectory)]
    found: dict[str, list[str]] = {}
    for item in sorted(trajectories, key=lambda item: item.rollout_part or 0):
        found.setdefault(f"{item.source}: {item.rollout_id}", []).append(item.trajectory_id)
    return found


def test_files_of_a_trial_without_a_result_are_one_rollout_by_their_sessions(tmp_path: Path) -> None:
    def write(name: str, session: str, **fields: Any) -> None:
        steps = [user_step("Q"), agent_step("A")]
        document = {"schema_version": "ATIF-v1.6", "session_id": session, "agent": {}, "steps": steps}
        (tmp_path / name).write_text(json.dumps(document | fields))

    write("c.json", "s-cont-1")
    write("a.json", "s", continued_trajectory_ref="trajectory.cont-1.json")
    write("b.json", "s-summarization-1-summary")
    write("d.json", "t")
    found = rollouts(read_trajectories([tmp_path]))
    assert found == {
        f"{tmp_path}: s": ["s", "s-summarization-1-summary", "s-cont-1"],
        f"{tmp_path / 'd.json'}:1: None": ["t"],
    }


def test_a_step_of_a_trial_has_its_own_reward_and_group(tmp_path: Path) -> None:
    steps = [{"step_name": "one", "verifier_result": {"rewards": {"reward": 1}}}, {"step_name": "two"}]
    names = [f"steps/{name}/agent/trajectory.json" for name in ("one", "two", "three")]
    folder = trial(tmp_path, {"verifier_result": {"rewards": {"reward": 0.5}}, "step_results": steps}, *names)
    items = chats(read_trajectories([folder]))
    rewards = {item.trajectory_id: (item.group_id, item.reward) for item, _ in items}
    expected = {"task__1/one": ("task/one", 1.0), "task__1/two": ("task/two", None)}
    assert rewards == expected | {"task__1/three": ("task/three", None)}
    assert {item.rollout_id for item, _ in items} == {None}


DETAILS = [
    {"prompt_token_ids": [[1], [1, 2, 3]], "completion_token_ids": [[2], [4]], "logprobs": [[-1.0], [-2.0]]},
    {"prompt_token_ids": [[5]], "completion_token_ids": [[6]]},
]


def tokens(items: Iterable[Trajectory | Skipped]) -> dict[str, list[int]]:
    contents = {item.trajectory_id: item.content for item in items if isinstance(item, Trajectory)}
    return {name: content.tokens.tolist() for name, content in contents.items() if isinstance(content, Tokens)}


def test_token_ids_that_only_the_result_holds_are_read_with_the_main_trajectory(tmp_path: Path) -> None:
    names = ("agent/trajectory.json", "agent/trajectory.cont-1.json")
    folder = trial(tmp_path, {"agent_result": {"rollout_details": DETAILS}}, *names)
    items = list(read_trajectories([folder]))
    assert tokens(items) == {"task__1": [1, 2, 3, 4], "task__1/segment-1": [5, 6]}
    assert tokens(read_trajectories([folder / names[0]])) == tokens(items)
    expected = ["its token ids are read with trajectory.json", "result of a trial, read with its trajectories"]
    assert reasons(items) == expected


def test_token_ids_of_a_trial_without_a_trajectory_are_read_from_its_result(tmp_path: Path) -> None:
    steps = [{"step_name": "one", "agent_result": {"rollout_details": DETAILS[1:]}}]
    folder = trial(tmp_path, {"agent_result": {"rollout_details": DETAILS[:1]}, "step_results": steps})
    assert tokens(read_trajectories([folder])) == {"task__1": [1, 2, 3, 4], "task__1/one": [5, 6]}


def test_prompts_and_completions_of_a_result_must_be_as_many(tmp_path: Path) -> None:
    detail = {"prompt_token_ids": [[1]], "completion_token_ids": [[2], [3]]}
    folder = trial(tmp_path, {"agent_result": {"rollout_details": [detail]}})
    with pytest.raises(
        TreepackError, match="rollout_details has different numbers of prompts and completions; expected one of"
    ):
        list(read_trajectories([folder]))


@pytest.mark.parametrize(
    ("rewards", "key", "expected"),
    [
        ({"reward": 1, "speed": 2}, None, 1.0),
        ({"reward": 1, "speed": 2}, "speed", 2.0),
        ({}, None, None),
        (None, "x", None),
    ],
)
def test_the_reward_is_the_one_asked_for_or_called_so(
    tmp_path: Path, rewards: Any, key: str | None, expected: float | None
) -> None:
    folder = trial(tmp_path, {"verifier_result": {"rewards": rewards}}, "agent/trajectory.json")
    ((trajectory, _),) = chats(read_trajectories([folder / "agent"], reward_key=key))
    assert trajectory.reward == expected


def test_of_several_rewards_one_must_be_named(tmp_path: Path) -> None:
    folder = trial(tmp_path, {"verifier_result": {"rewards": {"tests": 1, "speed": 2}}}, "agent/trajectory.json")
    with pytest.raises(TreepackError, match=r"result.json: reward is a dict with the keys tests, speed; choose one"):
        list(read_trajectories([folder]))
