"""The iteration of docs/tree-rl.md runs unchanged, and its files have the content that the page describes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.command_line import Run
from support.paths import ROOT
from treepack.research.trace.predictions import read_predictions


def blocks() -> list[tuple[str, str]]:
    """Return language and text of each program of the section, in order."""
    section = (ROOT / "docs" / "tree-rl.md").read_text().partition("\n## Together\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_one_iteration_runs_as_it_stands(treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    commands = []
    for language, text in blocks():
        if language == "python":
            subprocess.run([sys.executable, "-c", text], check=True)
            continue
        # A backslash at the end of a line continues the command.
        for line in text.replace("\\\n", "").splitlines():
            name, *arguments = shlex.split(line)
            done = treepack(*arguments)
            assert (name, done.status) == ("treepack", 0), f"{line}: {done.err}"
            commands.append(arguments[0])
    used = "build-trie advantages pack logprobs train values allocate augment select rollout"
    assert set(commands) - {"stats"} == set(used.split())

    predictions = read_predictions(tmp_path / "predictions.jsonl")
    roots = lines(tmp_path / "roots.jsonl")
    assert [line["group_id"] for line in roots] == predictions.group_ids
    assert sum(line["num_rollouts"] for line in roots) == 32
    # --expand 1: one continuation per rollout, so as many as the trie has rollouts.
    assert sum(line["num_continuations"] for line in lines(tmp_path / "prefixes.jsonl")) == 32
    known = {line["query_id"] for line in lines(tmp_path / "augmented.jsonl")} | set(predictions.group_ids)
    chosen = {line["query_id"] for line in lines(tmp_path / "next.jsonl")}
    assert len(chosen) == 8
    assert chosen <= known == set(pl.read_parquet(tmp_path / "state.parquet")["query_id"])

    continued = lines(tmp_path / "continuations.jsonl")
    assert len(continued) == 32
    assert all(line["parent_rollout"] and line["step"] == 1 for line in continued)
    sampled = lines(tmp_path / "next_rollouts.jsonl")
    assert {line["group_id"] for line in sampled} == chosen
    assert {(line["num_leaves"], line["step"]) for line in sampled} == {(4, 2)}

    # The next iteration starts with the predictor of this one.
    again = treepack("values", "fit", "credited", "--model", "predictor", "--freeze", "--epochs", 1, "--out", "next")
    assert (again.status, again.notes) == (0, "note: the head of predictor is used and fitted further\n")
    assert {path.name for path in (tmp_path / "policy").iterdir()} >= {"config.json", "model.safetensors", "train.json"}
