"""Files that are copies of other input files are read once, and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import PREFIX, ReadLog
from treepack.ingest.readers.copies import COPY, find_copies, size_of
from treepack.ingest.readers.reading import detect_format
from treepack.trajectory import Skipped, Trajectory
from treepack.trie.directory import read_to_trie
from treepack.trie.trie import Trie

MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CHAT = {"messages": MESSAGES, "reward": 1.0}
IDS = {"prompt_ids": [5, 6], "response_ids": [7], "reward": 1.0}


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def copies(paths: list[Path]) -> dict[str, str]:
    return find_copies(((str(path), size_of(str(path))) for path in paths), detect_format)


def sources(folder: Path) -> list[str]:
    """The files below `folder` from which a rollout was read, by their paths below it."""
    items = [item for item in read_trajectories([folder]) if isinstance(item, Trajectory)]
    return [item.source.partition(":")[0].removeprefix(f"{folder}/") for item in items]


def test_a_copy_of_a_file_of_several_rollouts_is_read_once_and_counted(tmp_path: Path) -> None:
    for name in ("a/r.jsonl", "b/r.jsonl", "b/other name.jsonl"):
        write(tmp_path / name, IDS, IDS | {"response_ids": [8]})
    items = list(read_trajectories([tmp_path]))
    assert [item.source for item in items if isinstance(item, Trajectory)] == [
        f"{tmp_path}/a/r.jsonl:{n}" for n in (1, 2)
    ]
    skipped = [item for item in items if isinstance(item, Skipped)]
    assert {(item.reason, item.is_rollout) for item in skipped} == {(COPY, False)}
    assert [item.source for item in skipped] == [f"{tmp_path}/b/other name.jsonl", f"{tmp_path}/b/r.jsonl"]
    assert (
        skipped[0].sentence == f"{tmp_path}/b/other name.jsonl: has the bytes of {tmp_path}/a/r.jsonl, and is not read"
    )


@pytest.mark.parametrize(
    "fields", [{"session_id": "s"}, {"id": "run-7"}, {"metadata": {"trace_id": "t"}}, {"samples": []}]
)
def test_a_trace_with_an_id_in_two_folders_is_read_once(tmp_path: Path, fields: dict[str, Any]) -> None:
    paths = [write(tmp_path / name / "trace.json", CHAT | fields) for name in "ab"]
    assert copies(paths) == {str(paths[1]): str(paths[0])}


@pytest.mark.parametrize(
    "fields", [{}, {"id": 3}, {"task_id": "task-3"}, {"messages": [{"role": "tool", "id": "call-1"}]}]
)
def test_rollouts_that_sampled_the_same_text_stay(tmp_path: Path, fields: dict[str, Any]) -> None:
    paths = [write(tmp_path / name / "rollout.json", CHAT | fields) for name in "ab"]
    assert copies(paths) == {}


def test_a_conversation_whose_first_event_is_that_of_another_one_stays(tmp_path: Path) -> None:
    facts = {"source": "agent", "timestamp": "t"}
    prompt = {"id": "e0", "kind": "SystemPromptEvent", "system_prompt": {"text": "s"}} | facts
    for name in "ab":
        answer = {"role": "assistant", "content": [{"type": "text", "text": name}]}
        said = {"id": f"e1-{name}", "kind": "MessageEvent", "llm_message": answer} | facts
        for number, event in enumerate((prompt, said)):
            write(tmp_path / name / "events" / f"event-0000{number}-e{number}.json", event)
    assert len(sources(tmp_path)) == 2


def test_copies_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    for number, name in enumerate("cab"):
        write(tmp_path / name / "r.jsonl", IDS, IDS | {"response_ids": [8]})
        write(tmp_path / name / "own.jsonl", IDS | {"response_ids": [10 + number]})

    def build(workers: int) -> tuple[Trie, ReadLog]:
        return read_to_trie([str(tmp_path)], BuildOptions(workers=workers))

    (one, log), (other, log_of_two) = build(1), build(2)
    assert one.trajectories.equals(other.trajectories)
    assert log.counts == log_of_two.counts
    assert (one.num_trajectories, log.counts[PREFIX + COPY]) == (5, 2)


def test_files_that_cannot_be_read_are_no_copies(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, IDS) for name in ("a.jsonl", "b.jsonl")]
    paths[0].write_text("not json\n")
    paths[1].write_text("not json\n")
    assert find_copies([(str(path), 9) for path in [*paths, tmp_path / "missing"]], detect_format) == {}
    assert size_of(str(tmp_path / "missing")) == 0
