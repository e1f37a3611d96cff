"""Episodes of rLLM: one file each, written by its logger or by `Episode.to_dict`.

    {"id": "task:rollout", "is_correct": true, "trajectories": [{"name": "solver", "reward": 1.0, "steps": [
       {"prompt_ids": [..], "response_ids": [..], "logprobs": [..], "advantage": 0.5,
        "chat_completions": [.., {"role": "assistant", ..}]}, ..]}, ..], "metrics": {..}, "info": {..}}
    {"episode_id": "task:rollout", "training_step": 5, "trajectories": [{"steps": [{"chat_completions": [..]}]}], ..}

A step is a call. If all steps of a trajectory have token ids, these ids are read. If not, the messages are read, and
the last assistant message of a step is its response. The trajectories of one episode belong to its agents, by name.
A `termination_reason` of max_response_length_exceeded means that the last response was cut; the other limits end an
episode between two responses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    as_id,
    as_text,
    endings,
    object_or_empty,
    objects_at,
    read_calls,
    read_chats,
    with_notes,
    without,
)

# Fields that are read under another name, or that `FORMAT.dropped` lists.
_KNOWN = frozenset(
    """
    id episode_id task task_hash termination_reason is_correct session_id trajectories metrics info metadata
    training_step epoch timing uid name steps reward num_steps
    """.split()
)
# Names that rLLM gives to the only agent of an episode.
_UNNAMED = frozenset({None, "", "default_traj_name", "agent"})
_CUT_RESPONSE = "max_response_length_exceeded"
SOME_NOTE = "token ids of some steps only, all steps read as text"


def _read_rllm(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of an episode, named after it, or `<episode>/<index>` if there are several.

    Their group is the task, which is the part of the episode's id before the colon, and the name of the agent if it has
    one.

    Raises:
        TreepackError: an id or a name that is not text, or an error of the readers of tokens and messages.
    """
    value, source = record.value, record.source
    if not value["trajectories"]:
        yield Skipped(source, "episode without a trajectory")
    name = value.get("id") if value.get("id") is not None else value.get("episode_id")
    if name is not None:
        as_id(name, source=source, name="id")
    for index, trajectory in enumerate(value["trajectories"]):
        episode = record.label if name is None else str(name)
        several = len(value["trajectories"]) > 1
        agent = trajectory.get("name")
        as_text(agent, source=source, name="name of a trajectory", default="")
        # "math-7:2" -> "math-7"
        task = None if name is None else str(name).partition(":")[0]
        named = {
            "trajectory_id": f"{episode}/{index}" if several else episode,
            "group_id": task if task is None or agent in _UNNAMED else f"{task}:{agent}",
            "agent": None if agent in _UNNAMED else agent,
        }
        yield from _read_trajectory(replace(record, value=_facts(value, trajectory) | named), trajectory, options)


def _facts(episode: JsonObject, trajectory: JsonObject) -> JsonObject:
    """Return the facts of a trajectory besides its steps, under the names that every reader uses."""
    correct, reward = episode.get("is_correct"), trajectory.get("reward")
    return {
        **without(episode | trajectory, _KNOWN),
        "step": episode.get("training_step"),
        # An episode that only judges right or wrong: true -> 1.0
        "reward": float(correct) if reward is None and isinstance(correct, bool) else reward,
        "is_correct": correct,
        "termination_reason": episode.get("termination_reason"),
        "session_id": episode.get("session_id"),
        "extra": episode.get("metrics") or None,
        "info": episode.get("info") or episode.get("metadata") or None,
    }


def _read_trajectory(record: Record, trajectory: JsonObject, options: ReadOptions) -> Outcomes:
    source = record.source
    steps = objects_at(trajectory, "steps", source)
    calls = [_token_call(step) for step in steps]
    # The weights may change during a rollout; the last version is the one that wrote its end.
    reason = str(record.value.get("termination_reason")).rpartition(".")[2].lower()
    ended = reason if reason == _CUT_RESPONSE else None
    versions = [step["weight_version"] for step in steps if step.get("weight_version") is not None]
    one = replace(record, value=record.value | ({"weight_version": versions[-1]} if versions else {}))
    if calls and all(call is not None for call in calls):
        token_calls = [call for call in calls if call is not None]
        token_calls[-1] = replace(token_calls[-1], ending=token_calls[-1].ending or ended)
        yield from read_calls(one, token_calls, options)
        return
    notes = (SOME_NOTE,) if any(call is not None for call in calls) else ()
    chats = [_chat_call(step, source) for step in steps]
    chats[-1:] = [replace(chat, ending=chat.ending or ended) for chat in chats[-1:]]
    yield from with_notes(read_chats(one, chats, options), notes)


def _ending(step: JsonObject) -> Any:
    raw = endings.raw_of(step)
    return endings.raw_of(object_or_empty(step.get("model_output"))) if raw is None else raw


def _token_call(step: JsonObject) -> TokenCall | None:
    """Return the call of a step by its token ids, or None if it has none."""
    output = object_or_empty(step.get("model_output"))
    prompt = step.get("prompt_ids") or output.get("prompt_ids")
    response = step.get("response_ids") or output.get("completion_ids")
    if not prompt or not response:
        return None
    logprobs = step.get("logprobs") or output.get("logprobs")
    values = {"rollout_log_probs": logprobs, "advantages": step.get("advantage")}
    return TokenCall(prompt, response, values, ending=_ending(step))


def _chat_call(step: JsonObject, source: str) -> ChatCall:
    """Return the call of a step by its messages: its response is the last assistant message."""
    messages = objects_at(step, "chat_completions", source)
    # roles [user, assistant, tool] -> last 1: a prompt of 1 message
    last = next((k for k in reversed(range(len(messages))) if messages[k].get("role") == "assistant"), len(messages))
    return ChatCall(messages[:last], messages[last : last + 1], ending=_ending(step))


FORMAT = Format(
    name="rllm",
    rank=470,
    program="rLLM (episodes)",
    recognised_by="`trajectories` with `steps`, beside `termination_reason` or `is_correct`",
    requires="trajectories:each(steps), termination_reason|is_correct",
    used="""
        id trajectories.name trajectories.reward is_correct termination_reason info metrics
        trajectories.steps.prompt_ids trajectories.steps.response_ids trajectories.steps.logprobs
        trajectories.steps.chat_completions trajectories.steps.advantage trajectories.steps.weight_version
        trajectories.steps.model_output
    """,
    dropped="""
        trajectories.steps.reward and mc_return (the trajectory has its own reward);
        observation, thought, action, model_response and done (parts of the messages);
        routing_matrices;
        task, task_hash, epoch, uid and timing;
        trajectories.info and trajectories.steps.info
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    failed="termination_reason",
    read=_read_rllm,
)
