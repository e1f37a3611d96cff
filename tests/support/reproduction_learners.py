"""Small learners for the tests of the arms: random weights, and a reward that random rollouts get half of the time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from learner import Learner, start_learner
from policy import make_policy, save_policy

from treepack.rollout.episode import Episode, SingleTurn
from treepack.rollout.query import Query
from treepack.trajectory import Int32

DIALS: dict[str, dict[str, Any]] = {
    "steps": {"levels": [2], "dial": {"modulus": 3, "largest": 2}},
    "maze": {"levels": [5], "dial": {"longest": 6}},
}


def small_learner(folder: Path, task: str) -> Learner:
    """Return a learner with random weights; `folder` is new."""
    save_policy(make_policy("test", seed=0), folder)
    (folder / "warm_up.json").write_text(json.dumps({"task": task, **DIALS[task]}))
    return start_learner(folder, device="cpu", rate=1e-3, rows=32)


def save_small_policy(folder: Path) -> Path:
    """Save a policy with random weights for prompts of two operations; `folder` is new."""
    save_policy(make_policy("test", seed=3), folder)
    (folder / "warm_up.json").write_text(json.dumps({"task": "steps", "levels": [2], "dial": {}}))
    return folder


async def even_start(query: Query) -> tuple[Int32, Episode]:
    """Start an episode that about half of all random responses solve: an even last token is right."""

    async def score(response: Int32) -> float:
        return float(response[-1] % 2 == 0)

    return query.prompt, SingleTurn(score)


def coin_learner(folder: Path) -> Learner:
    """Return a learner of the task steps in which a rollout succeeds if the sum of its token ids is even."""
    learner = small_learner(folder, "steps")

    async def start(query: Query) -> tuple[Int32, Episode]:
        async def score(response: Int32) -> float:
            return float(response.sum() % 2 == 0)

        return query.prompt, SingleTurn(score)

    # Short responses, because random ones rarely stop.
    return replace(learner, task=replace(learner.task, start=start, max_tokens=20))
