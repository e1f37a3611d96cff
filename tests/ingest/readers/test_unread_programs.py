"""Exports of programs that treepack does not read are refused by the name of the program."""

from __future__ import annotations

import json
from pathlib import Path

from support.read_rollouts import read_trajectories
from treepack.trajectory import Skipped

ASK, FIVE = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
WEAVE = {
    "id": "c",
    "op_name": "weave:///team/shop/op/openai.chat:v0",
    "trace_id": "t",
    "started_at": "2026-01-01T00:00:00Z",
    "inputs": {"messages": [ASK]},
    "output": {"choices": [{"message": FIVE}]},
}


def test_an_export_among_other_files_of_a_folder_is_skipped_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [ASK, FIVE]}))
    (tmp_path / "b.jsonl").write_text(json.dumps(WEAVE))
    (skipped,) = (item for item in read_trajectories([tmp_path]) if isinstance(item, Skipped))
    assert skipped.reason == "export of Weave, which is not read"
