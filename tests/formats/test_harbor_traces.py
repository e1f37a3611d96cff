"""Harbor's exported traces: one row per call of a trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from treepack.calls.rollout_names import SPLIT_NOTE
from treepack.errors import TreepackError
from treepack.trajectory import Chat, Trajectory

SAMPLE = ROLLOUTS / "harbor-traces.jsonl"
ROWS = [json.loads(line) for line in SAMPLE.read_text().splitlines()]


def read(path: Path) -> dict[str, Trajectory]:
    return {item.trajectory_id: item for item in read_trajectories([path]) if isinstance(item, Trajectory)}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(item: Trajectory) -> list[int]:
    assert isinstance(item.content, Chat)
    return [place for place, weight in enumerate(item.content.message_weights) if weight]


def test_each_answer_of_a_trial_is_trained_once_behind_the_conversation_of_its_call() -> None:
    trajectories = read(SAMPLE)
    names = ["hello-world__a1", "hello-world__b2/turn-1", "hello-world__b2/turn-2"]
    assert [trained(trajectories[name]) for name in names] == [[1, 3], [1], [4]]
    assert trajectories[names[1]].notes == (SPLIT_NOTE,)
    assert {item.group_id for item in trajectories.values()} == {"hello-world"}
    assert [trajectories[name].reward for name in names] == [1.0, 0.0, 0.0]


def test_a_trial_whose_rows_are_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TreepackError, match="rows of the trial 'hello-world__a1' are apart; sort them by trial_name"):
        read(written(tmp_path, ROWS[0], ROWS[2], ROWS[1]))
