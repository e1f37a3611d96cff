"""Rollouts of tinker-cookbook as token ids: trajectories of transitions, alone or in groups.

    {"trajectories_G": [trajectory, ..], "final_rewards_G": [1.0, ..], "metrics_G": [{}, ..]}
    {"transitions": [{"ob": {"chunks": [{"type": "encoded_text", "tokens": [..]}]},
                      "ac": {"tokens": [..], "maybe_logprobs": [..], "stop_reason": "stop"}, "reward": 0.0, ..}, ..]}

A transition is a call, and its observation is the whole prompt. The reward of a trajectory is the sum of the rewards of
its transitions and of the final reward that the group gives to it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treepack.formats.kit import (
    MEDIA_REASON,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    TreepackError,
    objects_at,
    read_calls,
    shown,
    without,
)
from treepack.ingest.readers.fields.values import as_number
from treepack.ingest.readers.tokens.model_inputs import model_input_ids

_MASKED_METRIC = "parse_error_masked"  # tinker does not train a transition with this metric
# Fields of the group that its trajectories do not inherit.
_GROUP = ("trajectories_G", "final_rewards_G", "metrics_G", "rollout_errors")


def _read_tinker(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of a group, `<record>/<index>`, in a group named after the record; or the single one.

    Raises:
        TreepackError: fields of a different form, or an error of the `tokens` reader.
    """
    value, source = record.value, record.source
    if value.get("trajectories_G") is None:
        yield from _read_trajectory(replace(record, value=without(value, _GROUP)), value, 0.0, options)
        return
    members = objects_at(value, "trajectories_G", source)
    if not members:
        yield Skipped(source, "group without a trajectory")
    finals = value.get("final_rewards_G")
    if finals is None:
        finals = [0.0] * len(members)
    if not isinstance(finals, list | np.ndarray) or len(finals) != len(members):
        raise TreepackError(
            f"{source}: final_rewards_G is {shown(finals)}; expected one for each of {len(members)} trajectories"
        )
    rest = without(value, _GROUP)
    for index, (member, final) in enumerate(zip(members, finals, strict=True)):
        fields = rest | {"group_id": source} | member | {"trajectory_id": f"{record.label}/{index}"}
        one = replace(record, value=fields)
        # final_rewards_G may be a numpy array.
        final = as_number(float(final) if isinstance(final, np.floating) else final, source=source, name="final reward")
        yield from _read_trajectory(one, member, final, options)


def _read_trajectory(record: Record, trajectory: JsonObject, final: float, options: ReadOptions) -> Outcomes:
    source = record.source
    calls, reward = [], final
    for step in objects_at(trajectory, "transitions", source):
        prompt, action = model_input_ids(step.get("ob"), source), step.get("ac")
        if prompt is None:
            yield Skipped(source, MEDIA_REASON)
            return
        if not isinstance(action, dict):
            raise TreepackError(f"{source}: ac is {shown(action)}; expected an object with tokens and maybe_logprobs")
        reward += as_number(step.get("reward") or 0.0, source=source, name="reward")
        sampled = action.get("tokens") or []
        metrics = step.get("metrics")
        masked = isinstance(metrics, dict) and bool(metrics.get(_MASKED_METRIC))
        values: JsonObject = {"rollout_log_probs": action.get("maybe_logprobs")}
        # The mask is 0 on the response, so the transition stays context of later ones.
        if masked and isinstance(sampled, list):
            values["loss_mask"] = [0] * len(sampled)
        calls.append(TokenCall(prompt, sampled, values, ending=action.get("stop_reason")))
    rest = without(record.value, ("transitions", "final_ob"))
    yield from read_calls(replace(record, value=rest | {"reward": reward}), calls, options)


FORMAT = Format(
    name="tinker",
    rank=430,
    program="tinker-cookbook (TrajectoryGroup, Trajectory)",
    recognised_by="`trajectories_G`, or `transitions` with `ob` and `ac`",
    requires="trajectories_G:list; transitions:each(ob, ac)",
    used="""
        trajectories_G final_rewards_G trajectories_G.transitions.ob trajectories_G.transitions.ac.tokens
        trajectories_G.transitions.ac.stop_reason
        trajectories_G.transitions.ac.maybe_logprobs trajectories_G.transitions.reward
        trajectories_G.transitions.metrics trajectories_G.stop_reason
    """,
    dropped="""
        final_ob (nothing was sampled after it);
        episode_done and logs;
        metrics_G and rollout_errors;
        chunks that are not text (rollouts that have some are skipped)
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    read=_read_tinker,
)
