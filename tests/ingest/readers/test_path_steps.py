"""The training step that the path of a file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from treepack.ingest.readers.path_steps import STEP_NOTE, step_of_path
from treepack.trajectory import Trajectory


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("rollouts/step_12/train_rollouts.jsonl:3", 12),
        ("run/step-12/r.json[4]", 12),
        ("run/step12/r.jsonl.gz:1", 12),
        ("run/step=000012/part-0.parquet[5]", 12),
        ("run/global_step_12/a/b/r.jsonl", 12),
        ("s3://bucket/iter_12/r.jsonl:1", 12),
        ("run/iteration_12/r.jsonl:1", 12),
        ("run/train_rollouts_step_12/r.jsonl:1", 12),
        ("run/rollouts_step_12.jsonl:1", 12),
        ("run/step_12_rank_0.jsonl:1", 12),
        ("step_3/step_12.jsonl:1", 12),
        ("step_3/iter_12/r.jsonl:1", 12),
        ("rollouts.jsonl:12", None),
        ("run/12/r.jsonl:1", None),
        ("run/12.jsonl:1", None),
        ("run/footstep_x/stepwise_12/r.jsonl", None),
        ("two_step_tasks/r.jsonl", None),
        ("run/step_12b/r.jsonl", None),
        ("run/test_of_a_step12/r.jsonl", None),
        ("", None),
    ],
)
def test_a_folder_or_a_file_names_the_step(path: str, expected: int | None) -> None:
    assert step_of_path(path, "prime-rl") == expected


def read(path: Path, record: dict[str, Any]) -> Trajectory:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    (item,) = read_trajectories([path])
    assert isinstance(item, Trajectory)
    return item


IDS = {"prompt_ids": [5, 6], "response_ids": [7]}
CHAT = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}


def test_a_step_of_the_record_counts_before_the_path(tmp_path: Path) -> None:
    item = read(tmp_path / "step_3" / "r.jsonl", IDS | {"reward": 1.0, "step": 8})
    assert (item.step, item.notes) == (8, ())


@pytest.mark.parametrize("record", [IDS, CHAT])
def test_of_any_data_only_rollouts_with_a_reward_have_a_step(tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "step_3" / "r.jsonl"
    assert read(path, record).step is None
    item = read(path, record | {"reward": 1.0})
    assert (item.step, item.notes) == (3, (STEP_NOTE,))


def test_a_dump_of_verl_without_a_step_has_that_of_its_file(tmp_path: Path) -> None:
    item = read(tmp_path / "41.jsonl", {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0})
    assert item.step == 41
