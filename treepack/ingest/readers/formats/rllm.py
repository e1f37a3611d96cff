"""rLLM's episodes: one file each, as its logger or `Episode.to_dict` writes them.

    {"id": "task:rollout", "is_correct": true, "trajectories": [{"name": "solver", "reward": 1.0, "steps": [
       {"prompt_ids": [..], "response_ids": [..], "logprobs": [..], "advantage": 0.5,
        "chat_completions": [.., {"role": "assistant", ..}]}, ..]}, ..], "metrics": {..}, "info": {..}}
    {"episode_id": "task:rollout", "training_step": 5, "trajectories": [{"steps": [{"chat_completions": [..]}]}], ..}

A step is a call. Where all steps of a trajectory have token ids these are taken, else the messages, of which the last
one of the assistant is what the step generated. Trajectories of one episode are those of its agents, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from treepack.errors import TreepackError
from treepack.ingest.readers.calls import ChatCall, TokenCall, read_calls, read_chats
from treepack.ingest.readers.fields import ReadOptions, as_objects, shown
from treepack.ingest.readers.format import ANY, EVERYTHING, Format, each
from treepack.ingest.readers.records import Record
from treepack.ingest.readers.trajectories import with_notes, without
from treepack.trajectory import Skipped, Trajectory

KNOWN = frozenset(
    """
    id episode_id task task_hash termination_reason is_correct session_id trajectories metrics info metadata
    training_step epoch timing uid name steps reward num_steps
    """.split()
)
UNNAMED = frozenset({None, "", "default_traj_name", "agent"})
SOME_NOTE = "token ids of some steps only, all read as text"


def read(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """The trajectories of an episode, called after it, or `<episode>/<place>` if there are several.

    Their group is the task, what its id has before the colon, with the agent's name where it has one.

    Raises:
        TreepackError: no episode, or what the readers of tokens and messages refuse.
    """
    value, source = record.value, record.source
    if not value["trajectories"]:
        yield Skipped(source, "episode without a trajectory")
    name = value.get("id") if value.get("id") is not None else value.get("episode_id")
    if name is not None and not isinstance(name, str | int):
        raise TreepackError(f"{source}: id is {shown(name)}; expected text")
    for place, trajectory in enumerate(value["trajectories"]):
        own = record.label if name is None else str(name)
        several = len(value["trajectories"]) > 1
        agent = trajectory.get("name")
        if agent is not None and not isinstance(agent, str):
            raise TreepackError(f"{source}: a trajectory has the name {shown(agent)}; expected text")
        task = None if name is None else str(name).partition(":")[0]
        named = {
            "trajectory_id": f"{own}/{place}" if several else own,
            "group_id": task if task is None or agent in UNNAMED else f"{task}:{agent}",
            "agent": None if agent in UNNAMED else agent,
        }
        yield from _read_trajectory(replace(record, value=_described(value, trajectory) | named), trajectory, options)


def _described(episode: dict[str, Any], trajectory: dict[str, Any]) -> dict[str, Any]:
    """What is known of a trajectory besides its steps, under the names that every reader uses."""
    correct, reward = episode.get("is_correct"), trajectory.get("reward")
    return {
        **without(episode | trajectory, KNOWN),
        "step": episode.get("training_step"),
        "reward": float(correct) if reward is None and isinstance(correct, bool) else reward,
        "is_correct": correct,
        "termination_reason": episode.get("termination_reason"),
        "session_id": episode.get("session_id"),
        "extra": episode.get("metrics") or None,
        "info": episode.get("info") or episode.get("metadata") or None,
    }


def _read_trajectory(
    record: Record, trajectory: dict[str, Any], options: ReadOptions
) -> Iterator[Trajectory | Skipped]:
    source = record.source
    steps = as_objects(trajectory.get("steps"), source=source, name="steps")
    calls = [_token_call(step) for step in steps]
    versions = [step["weight_version"] for step in steps if step.get("weight_version") is not None]
    one = replace(record, value=record.value | ({"weight_version": versions[-1]} if versions else {}))
    if calls and all(call is not None for call in calls):
        yield from read_calls(one, [call for call in calls if call is not None], options)
        return
    notes = (SOME_NOTE,) if any(call is not None for call in calls) else ()
    yield from with_notes(read_chats(one, [_chat_call(step, source) for step in steps], options), notes)


def _token_call(step: dict[str, Any]) -> TokenCall | None:
    """The call of a step by its token ids; None where it has none."""
    output = step.get("model_output") if isinstance(step.get("model_output"), dict) else {}
    prompt = step.get("prompt_ids") or (output or {}).get("prompt_ids")
    response = step.get("response_ids") or (output or {}).get("completion_ids")
    if not prompt or not response:
        return None
    logprobs = step.get("logprobs") or (output or {}).get("logprobs")
    return TokenCall(prompt, response, {"rollout_log_probs": logprobs, "advantages": step.get("advantage")})


def _chat_call(step: dict[str, Any], source: str) -> ChatCall:
    """The call of a step by its messages: its response is the last one of the assistant."""
    messages = as_objects(step.get("chat_completions"), source=source, name="chat_completions")
    last = next((k for k in reversed(range(len(messages))) if messages[k].get("role") == "assistant"), len(messages))
    return ChatCall(messages[:last], messages[last : last + 1])


FORMAT = Format(
    name="rllm",
    program="rLLM (episodes)",
    recognised_by="`trajectories` with `steps`, beside `termination_reason` or `is_correct`",
    requires=[{"trajectories": each({"steps": ANY}), ("termination_reason", "is_correct"): ANY}],
    used="""
        id trajectories.name trajectories.reward is_correct termination_reason info metrics
        trajectories.steps.prompt_ids trajectories.steps.response_ids trajectories.steps.logprobs
        trajectories.steps.chat_completions trajectories.steps.advantage trajectories.steps.weight_version
        trajectories.steps.model_output
    """.split(),
    dropped=(
        "trajectories.steps.reward and mc_return (the trajectory has its own reward)",
        "observation, thought, action, model_response and done (parts of the messages)",
        "routing_matrices",
        "task, task_hash, epoch, uid and timing",
        "trajectories.info and trajectories.steps.info",
    ),
    keeps=EVERYTHING,
    read=read,
)
