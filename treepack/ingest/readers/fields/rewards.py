"""The reward of a rollout among the fields of its record: a number, a list to be summed, or an object of scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import JsonObject, as_fact

REWARDS = ("reward", "score", "reward_score", "rewards", "rm_scores", "token_level_scores", "token_level_rewards")
_SCORES = frozenset({"score", "value", "reward"})
_NULLS = frozenset("nan inf infinity none null na n/a true false".split())  # texts that stand for a missing reward


def is_equal(value: Any, reward: float | None) -> bool:
    """Return whether `value` of a field is the `reward` of its rollout: the number, or a list with this sum."""
    numbers = value.tolist() if isinstance(value, np.ndarray) else value
    parts = numbers if isinstance(numbers, list) else [numbers]
    is_number = all(isinstance(part, int | float) for part in parts)
    return reward is not None and is_number and math.isclose(sum(parts), reward, rel_tol=1e-6)


def reward_of(value: JsonObject, source: str, *, reward_key: str | None) -> tuple[float | None, str | None]:
    """Return the reward and the name of its field. The value is a number, a list to be summed, or a dict of scores.

    Raises:
        TreepackError: a value is not a number, or a dict has neither scores and weights nor the key `reward_key`.
    """
    for name in REWARDS:
        reward = value.get(name)
        # Without a score a rollout has no reward, which is different from a reward of 0.
        if reward is None or (isinstance(reward, dict | list | np.ndarray) and len(reward) == 0) or is_names(reward):
            continue
        return _reward(reward, source=source, name=name, reward_key=reward_key), name
    info = value.get("reward_info")
    if isinstance(info, dict) and info.get("reward") is not None:
        return _reward(info["reward"], source=source, name="reward_info.reward", reward_key=reward_key), "reward_info"
    return None, None


def is_names(value: Any) -> bool:
    """Return whether `value` lists functions that compute a reward, and no rewards: names, or objects with a name."""
    # ["accuracy", "format"] or [{"name": "accuracy", "weight": 0.5}]; not ["0.5", "nan"] or [{"name": "a", "score": 1}]
    parts = value if isinstance(value, list) else []
    names = [each.get("name") if isinstance(each, dict) and not _SCORES & each.keys() else each for each in parts]
    return bool(names) and all(
        isinstance(name, str) and name.lower() not in _NULLS and name[:1].isalpha() for name in names
    )


def _reward(reward: Any, *, source: str, name: str, reward_key: str | None) -> float:
    if isinstance(reward, dict):
        return _reward_of_dict(reward, source=source, name=name, reward_key=reward_key)
    if isinstance(reward, np.ndarray):
        reward = reward.tolist()
    if isinstance(reward, list):
        return sum(as_fact(part, source=source, name=f"a value of {name}") for part in reward)
    return as_fact(reward, source=source, name=name)


def _reward_of_dict(reward: JsonObject, *, source: str, name: str, reward_key: str | None) -> float:
    if reward_key is not None:
        if reward_key not in reward:
            raise TreepackError(f"{source}: {name} has no key '{reward_key}'; expected one of {', '.join(reward)}")
        chosen = reward[reward_key]
        # {"accuracy": {"score": 1, "weight": 0.5}} with the key "accuracy" -> 1, without the weight
        chosen = chosen.get("score") if isinstance(chosen, dict) else chosen
        return as_fact(chosen, source=source, name=f"{name}.{reward_key}")
    # {"accuracy": {"score": 1, "weight": 0.5}, "format": {"score": 2}} -> 0.5 * 1 + 1 * 2 = 2.5
    total = 0.0
    for key, part in reward.items():
        if not isinstance(part, dict) or "score" not in part:
            raise TreepackError(
                f"{source}: {name} is a dict with the keys {', '.join(reward)}; choose one with --reward-key"
            )
        weight = as_fact(part.get("weight", 1.0), source=source, name=f"{name}.{key}.weight")
        total += weight * as_fact(part["score"], source=source, name=f"{name}.{key}.score")
    return total
