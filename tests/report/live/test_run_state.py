"""The state of a run, from its files and its lock; looking at a lock never keeps a trainer from it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from support.refusal import refusal
from support.run_folder import run_folder, step_record, write_lines
from treepack.errors import TreepackError
from treepack.files.lock import lock
from treepack.report.live.run_state import RunFolder, is_run
from treepack.report.live.start_log import StartLog


def test_a_run_waits_runs_stops_and_finishes(tmp_path: Path) -> None:
    run = RunFolder(run_folder(tmp_path / "run"))
    with lock(run.path):
        assert run.state().kind == "running"
        assert "process" in run.state().owner
    assert run.state().kind == "stopped"
    run.metrics.unlink()
    assert run.state().kind == "waiting"
    (run.path / "train.json").write_text("{}")
    assert run.state().kind == "finished"


def test_a_killed_run_has_died_and_a_resumed_one_runs(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    code = (
        "import sys, pathlib\nfrom treepack.files.lock import lock\n"
        "with lock(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    run = RunFolder(folder)
    assert run.state().kind == "running"
    holder.kill()
    holder.communicate()
    assert run.state().kind == "died"
    assert f"process {holder.pid}" in run.state().owner
    with lock(folder):  # a view that has seen the free lock does not hinder it, and sees it
        assert run.state().kind == "running"
    assert run.state().kind == "stopped"


def test_a_lock_that_was_free_is_not_probed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(run_folder(tmp_path / "run"))
    (tmp_path / ".run.lock").write_text("process 7 on a machine")
    probes: list[int] = []
    monkeypatch.setattr("fcntl.flock", lambda descriptor, flags: probes.append(flags))
    assert [run.state().kind for _ in range(3)] == ["died"] * 3
    assert len(probes) == 2  # taken and released once


def test_a_command_that_starts_has_its_lines_and_the_sentence_of_its_error(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with lock(out), StartLog(out) as log:
        logging.getLogger("treepack").info("importing torch")
        run = RunFolder(out)  # which does not exist yet
        assert is_run(out)
        assert run.state().kind == "starting"
        assert [text for _, text in run.state().start.lines] == ["importing torch"]
        log.fail(TreepackError("out of memory; pack again\nmore"))
    assert not is_run(out)
    state = run.state()  # after the file is removed
    assert (state.kind, state.start.error) == ("failed", "out of memory; pack again")
    run_folder(out)
    with lock(out), StartLog(out) as log:
        assert (run.state().kind, run.state().start.error) == ("starting", "")
        log.end()
        assert run.state().kind == "running"
    assert list(tmp_path.iterdir()) == [out]


def test_a_command_killed_while_it_starts_has_died(tmp_path: Path) -> None:
    (tmp_path / ".run.start").write_text('{"time": 7.5, "text": "importing \\u202etorch"}\n{"time": 8')
    (tmp_path / ".run.lock").write_text("process 7 on a machine")
    state = RunFolder(tmp_path / "run").state()
    assert (state.kind, state.owner) == ("died", "process 7 on a machine")
    assert state.start.lines == ((7.5, "importing  torch"),)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("run.json", "{", r"run\.json: is damaged \(.*\); restore it from a copy$"),
        ("run.json", "[1]", r"run\.json: is damaged"),
        ("run.json", '{"format": "treepack-values"}', r"is not from treepack train; give the --out of treepack train$"),
        ("other", "x", r"has no run\.json and no metrics\.jsonl; give the --out of treepack train$"),
    ],
)
def test_a_directory_that_is_no_run_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TreepackError, match=sentence):
        RunFolder(tmp_path)


def test_links_to_files_outside_the_run_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (tmp_path / "outside").write_text('{"format": "treepack-train", "packed": "x"}')
    (folder / "run.json").unlink()
    (folder / "run.json").symlink_to(tmp_path / "outside")
    assert is_run(folder)
    assert "run.json: cannot be read (it is a link)" in refusal(RunFolder, folder)


def test_the_process_of_a_trainer_asks_it_and_no_lock(tmp_path: Path) -> None:
    folder, alive = run_folder(tmp_path / "run"), [True]
    write_lines(folder, [step_record(1)])
    run = RunFolder(folder, is_alive=lambda: alive[0])
    assert run.state().kind == "running"
    alive[0] = False
    assert run.state().kind == "stopped"
