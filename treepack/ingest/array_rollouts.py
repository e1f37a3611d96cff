"""Rollouts in memory, as arrays of token ids and values, to trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    check_logprobs,
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
    given: dict[str, Sequence[Any] | None] = {"group_ids": group_ids, "rewards": rewards, "advantages": advantages}
    given |= {"sampling_logprobs": sampling_logprobs, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    given |= {
        "teacher_logprobs": teacher_logprobs,
        "temperatures": temperatures,
        "routes": routes,
        "kept_ids": kept_ids,
    }
    known = {name: values for name, values in given.items() if values is not None}
    for name, values in known.items():
        if not hasattr(values, "__len__"):
            raise TreepackError(f"{name} is {values!r}; give a list with one for each of the input_ids")
        if len(values) != len(input_ids):
            raise TreepackError(f"there are {len(input_ids)} input_ids and {len(values)} {name}; give one for each")
    # Advantages and temperatures may be one number for each trajectory.
    lists = [
        name
        for name, values in known.items()
        if name.endswith("logprobs")
        or (name in ("advantages", "temperatures") and len(values) > 0 and np.ndim(values[0]) == 1)
    ]
    return [
        _trajectory(i, ids, mask, {name: values[i] for name, values in known.items()}, lists)
        for i, (ids, mask) in enumerate(zip(input_ids, loss_mask, strict=True))
    ]


def _trajectory(i: int, ids: Any, mask: Any, given: Mapping[str, Any], lists: Sequence[str]) -> Trajectory:
    """Return trajectory `i` with its arguments `given`; the names in `lists` have one value per token."""
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
        name.removesuffix("s"): _trained_values(given[name], i, tokens, trained, name) for name in lists
    }
    if given.get("routes") is not None:
        per_token["routes"] = as_routes(np.asarray(given["routes"]), len(tokens), source=source, name="routes")
    if "kept_ids" in given:
        sets = sets_of_tokens(given["kept_ids"], tokens, trained, source=source, name="kept_ids")
        per_token["kept_ids"] = known_sets(sets)
    if "temperature" in per_token:
        check_temperatures(per_token["temperature"], source=source, name="a temperature")
    content = Tokens(tokens, starts, ends, span_weights, **per_token)
    # advantages=[0.5, -1] -> advantage 0.5 of trajectory 0
    scalars: dict[str, Any] = {
        name.removesuffix("s"): float(given[name])
        for name in ("rewards", "advantages", "temperatures")
        if name in given and name not in lists
    }
    group = str(given["group_ids"]) if "group_ids" in given else derived_group(prompt_tokens(content))
    return check_scalars(Trajectory(str(i), source, content, group_id=group, **scalars))


def _trained_values(values: Any, i: int, tokens: Int32, trained: Int64, name: str) -> NDArray[Any]:
    """Return the values of trajectory `i` at its trained positions."""
    array_of_tokens = np.asarray(values, np.float64 if name == "advantages" else np.float32)
    if array_of_tokens.shape != tokens.shape or not np.isfinite(array_of_tokens[trained]).all():
        raise TreepackError(f"trajectory {i}: {name} needs a finite value for each of the {len(tokens)} tokens")
    if name.endswith("logprobs"):
        check_logprobs(array_of_tokens[trained], source=f"trajectory {i}", name=name)
    return array_of_tokens[trained]
