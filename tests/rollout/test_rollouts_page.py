"""The programs and commands of the page about rollouts run as they are."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from support.command_line import Run
from support.paths import ROOT
from treepack.rollout.records import OWN_FIELDS

PAGE = (ROOT / "docs" / "rollouts.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run_program(program: str) -> None:
    exec(compile(program, "docs/rollouts.md", "exec"), {"__name__": "__main__"})


def test_the_program_of_the_page_samples_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, program = blocks("python")
    run_program(program)
    assert len((tmp_path / "simulated.jsonl").read_text().splitlines()) == 128


def test_the_page_lists_the_fields_of_the_records() -> None:
    section = PAGE.partition("\n## The file\n")[2].partition("\n## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert listed | {"metadata", "weight"} == {
        *OWN_FIELDS,
        "untrained_prefix",
        "query_id",
        "parent_group",
        "num_reused",
    }


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_they_are(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    program, _ = blocks("python")
    run_program(program)
    _, commands = blocks("sh")  # The first block is the page's opening, with names for a reader to fill in.
    for line in commands.replace("\\\n", "").splitlines():
        name, *arguments = shlex.split(line)
        done = treepack(*arguments)
        assert (name, done.status) == ("treepack", 0), f"{line}: {done.err}"
    records = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(records) == 32
    assert {record["reward"] for record in records} == {0.0, 1.0}
