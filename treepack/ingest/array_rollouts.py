"""Rollouts in memory, as arrays of token ids and values, to trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.kept_sets import known_sets, sets_of_tokens
from treepack.trajectory import (
    WEIGHTS,
    Int32,
    Int64,
    Tokens,
    Trajectory,
    as_routes,
    as_token_ids,
    check_scalars,
    check_temperatures,
    derived_group,
    is_weight,
    positions,
    prompt_tokens,
    spans_of_mask,
)


def trajectories_from_arrays(
    input_ids: Sequence[Sequence[int] | NDArray[Any]],
    loss_mask: Sequence[Sequence[float] | NDArray[Any]],
    *,
    group_ids: Sequence[str] | None = None,
    rewards: Sequence[float] | None = None,
    advantages: Sequence[float] | Sequence[NDArray[Any]] | None = None,
    sampling_logprobs: Sequence[NDArray[Any]] | None = None,
    old_logprobs: Sequence[NDArray[Any]] | None = None,
    ref_logprobs: Sequence[NDArray[Any]] | None = None,
    temperatures: Sequence[float] | Sequence[NDArray[Any]] | None = None,
    routes: Sequence[NDArray[Any] | None] | None = None,
    kept_ids: Sequence[Sequence[Any] | None] | None = None,
    teacher_logprobs: Sequence[NDArray[Any]] | None = None,
) -> list[Trajectory]:
    """Return trajectories from token ids in memory, for `build_trie`.

    Args:
        input_ids: token ids of each trajectory, [num_tokens].
        loss_mask: loss weight of each token, [num_tokens]: 0 if it is not trained, 1 as usual. The first token is never
            trained, because no token predicts it.
        group_ids: the prompt or task of each trajectory (GRPO's group). By default, equal prompts are one group.
        rewards: reward of each trajectory.
        advantages: advantage of each trajectory, or one per token, [num_tokens].
        sampling_logprobs, old_logprobs, ref_logprobs, teacher_logprobs: log-probability of each token, [num_tokens];
            only trained tokens keep them.
        temperatures: temperature of the sampler for each trajectory, or one per token, [num_tokens].
        routes: experts that the sampler's routers chose, [n, layers, k] with n <= num_tokens; see `as_routes`.
        kept_ids: token ids that the sampler's top-p, top-k or min-p left: for each trajectory None, or a list for each
            token, [num_tokens], that has the token itself; an empty list is the whole vocabulary.

    Raises:
        TreepackError: naming the trajectory by its index, if lengths differ, a value is not finite, or none is trained.
    """
    if len(input_ids) != len(loss_mask):
        raise TreepackError(f"there are {len(input_ids)} input_ids and {len(loss_mask)} loss masks; give one for each")
    given = {"group_ids": group_ids, "rewards": rewards, "advantages": advantages, "temperatures": temperatures}
    given |= {"sampling_logprobs": sampling_logprobs, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    given["teacher_logprobs"] = teacher_logprobs
    for name, values in (given | {"routes": routes, "kept_ids": kept_ids}).items():
        if values is not None and not hasattr(values, "__len__"):
            raise TreepackError(f"{name} is {values!r}; give a list with one for each of the input_ids")
        if values is not None and len(values) != len(input_ids):
            raise TreepackError(f"there are {len(input_ids)} input_ids and {len(values)} {name}; give one for each")
    lists = {
        "advantages": advantages if _are_lists(advantages) else None,
        "sampling_logprobs": sampling_logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "teacher_logprobs": teacher_logprobs,
        "temperatures": temperatures if _are_lists(temperatures) else None,
    }
    trajectories = []
    for i, (ids, mask) in enumerate(zip(input_ids, loss_mask, strict=True)):
        source = f"trajectory {i}"
        tokens = as_token_ids(ids, source=source, name="input_ids")
        weights = np.array(mask, np.float64)
        if weights.shape != tokens.shape:
            raise TreepackError(f"{source}: loss_mask has {weights.size} values for {len(tokens)} tokens")
        weights[:1] = 0
        starts, ends, span_weights = spans_of_mask(weights)
        if len(starts) == 0 or not all(is_weight(weight) for weight in span_weights.tolist()):
            raise TreepackError(f"{source}: loss_mask trains no token, or has a weight that is not {WEIGHTS}")
        trained = positions(starts, ends)
        per_token: dict[str, Any] = {
            name: _trained_values(values, i, tokens, trained, name) for name, values in lists.items()
        }
        own = None if routes is None or (rows := routes[i]) is None else np.asarray(rows)
        recorded = None if own is None else as_routes(own, len(tokens), source=source, name="routes")
        kept = (
            None if kept_ids is None else sets_of_tokens(kept_ids[i], tokens, trained, source=source, name="kept_ids")
        )
        content = Tokens(tokens, starts, ends, span_weights, **per_token, kept_ids=known_sets(kept), routes=recorded)
        if per_token["temperatures"] is not None:
            check_temperatures(per_token["temperatures"], source=source, name="a temperature")
        scalars: dict[str, Any] = {
            name: float(values[i]) if values is not None and per_token[f"{name}s"] is None else None
            for name, values in (("advantage", advantages), ("temperature", temperatures))
        }
        trajectory = Trajectory(
            trajectory_id=str(i),
            source=source,
            content=content,
            group_id=str(group_ids[i]) if group_ids is not None else derived_group(prompt_tokens(content)),
            reward=None if rewards is None else float(rewards[i]),
            **scalars,
        )
        trajectories.append(check_scalars(trajectory))
    return trajectories


def _are_lists(values: Sequence[Any] | None) -> bool:
    """Return True if each trajectory has a list of values, and not one value."""
    return values is not None and len(values) > 0 and np.ndim(values[0]) == 1


def _trained_values(
    values: Sequence[Any] | None, i: int, tokens: Int32, trained: Int64, name: str
) -> NDArray[Any] | None:
    """Return the values of trajectory `i` at its trained positions, or None if there are no values."""
    if values is None:
        return None
    array_of_tokens = np.asarray(values[i], np.float64 if name == "advantages" else np.float32)
    if array_of_tokens.shape != tokens.shape or not np.isfinite(array_of_tokens[trained]).all():
        raise TreepackError(f"trajectory {i}: {name} needs a finite value for each of the {len(tokens)} tokens")
    return array_of_tokens[trained]
