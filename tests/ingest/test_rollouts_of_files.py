"""Rollouts in several files and lines: each counts once in the group of its task and training step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import ReadLog
from treepack.ingest.readers.path_steps import STEP_NOTE
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.advantages.estimate import estimate_advantages
from treepack.trie.directory import read_to_trie

TOKENIZER = str(Path(__file__).parents[2] / "sample_data" / "tokenizer")


def advantages(inputs: Sequence[Path | str], **options: Any) -> tuple[dict[str, float], ReadLog]:
    """The GRPO advantage of each trajectory of `inputs` by its id, rounded, and the log of reading."""
    trie, log = read_to_trie([str(each) for each in inputs], BuildOptions(tokenizer=TOKENIZER, **options))
    values = estimate_advantages(trie, AdvantageOptions("grpo")).values
    ids = trie.trajectories["trajectory_id"].to_pylist()
    return {name: round(value, 3) for name, value in zip(ids, values.tolist(), strict=True)}, log


def write(path: Path, *records: Any) -> Path:
    """Write `records` as one JSON document or as lines, by the extension of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def trial(folder: Path, reward: float, *files: str) -> None:
    for name in files:
        steps = [{"source": "user", "message": "Do it."}, {"source": "agent", "message": f"{folder.name} {name}"}]
        write(folder / "agent" / name, {"schema_version": "ATIF-v1.6", "session_id": name, "agent": {}, "steps": steps})
    names = {"task_name": "task", "trial_name": folder.name, "agent_info": {}}
    write(folder / "result.json", names | {"verifier_result": {"rewards": {"reward": reward}}})


def test_each_trial_of_harbor_counts_once_in_its_group(tmp_path: Path) -> None:
    inner = ("trajectory.cont-1.json", "trajectory.summarization-1-summary.json")
    trial(tmp_path / "a", 0.0, "trajectory.json")
    trial(tmp_path / "b", 1.0, "trajectory.json", *inner)
    found, _ = advantages([tmp_path])
    assert found == {"a": -0.707, "b": 0.707, "b/cont-1": 0.707, "b/summarization-1-summary": 0.707}


def results(name: str, reward: float) -> dict[str, Any]:
    """A rollout of task 0 that contains no step."""
    talk = {"prompt": [{"role": "user", "content": "Add."}], "completion": [{"role": "assistant", "content": name}]}
    return {"example_id": 0, "reward": reward, "metrics": {}, **talk}


def test_steps_of_folders_separate_the_groups_of_a_run(tmp_path: Path) -> None:
    for step in (0, 1):
        records = [results(f"{step} {number}", float(step)) for number in range(2)]
        write(tmp_path / f"step_{step}" / "train_rollouts.jsonl", *records)
    found, log = advantages([tmp_path])
    assert list(found.values()) == [0.0] * 4  # by mixed groups they would be -0.866 and 0.866
    assert log.counts[STEP_NOTE] == 4


@pytest.mark.slow
def test_steps_of_a_path_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    for step in range(4):
        write(tmp_path / f"step_{step}" / "r.jsonl", *(results(f"{step} {n}", float(n)) for n in range(3)))
    one, other = (read_to_trie([str(tmp_path)], BuildOptions(tokenizer=TOKENIZER, workers=n)) for n in (1, 2))
    assert one[0].trajectories.equals(other[0].trajectories)
    assert sorted(set(one[0].trajectories["step"].to_pylist())) == [0, 1, 2, 3]
    assert one[1].counts == other[1].counts


def test_samples_of_slime_on_lines_count_once_for_each_rollout(tmp_path: Path) -> None:
    def sample(index: int, rollout: int | None, reward: float) -> dict[str, Any]:
        ids = {"tokens": [5, 6, 10 + index], "response_length": 1, "status": "completed"}
        return {"group_index": 0, "index": index, "rollout_id": rollout, "reward": reward, **ids}

    path = write(tmp_path / "r.jsonl", *(sample(index, 1, 1.0) for index in (1, 2, 3)), sample(4, None, 0.0))
    found, _ = advantages([path])
    assert sorted(found.values()) == [-0.707, 0.707, 0.707, 0.707]
