"""`treepack report RUN` and `train --report-to page`: files, pictures, the page of a run that trains, and refusals."""

from __future__ import annotations

import multiprocessing.process
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from support.command_line import Run
from support.fresh_processes import PROCESSES, run_command
from support.oracle_model import packed_directory, tiny_config
from support.run_folder import run_folder, step_record, write_lines
from support.strategies import make
from treepack.report.live.start_log import StartLog
from treepack.train.watch.sinks import RunPage, SinkRun, Sinks


@pytest.mark.slow
def test_a_run_becomes_one_file_and_a_picture_of_each_curve(treepack: Run, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_lines(folder, (step_record(step, reward=0.5) for step in range(1, 60)))
    done = treepack("report", str(folder), "--out", str(tmp_path / "a.html"), "--png", str(tmp_path / "a"))
    assert done.status == 0, done.err
    assert treepack("report", str(folder), "--out", str(tmp_path / "b.html")).status == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    pictures = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert pictures == ["gradient-norm.png", "learning-rate.png", "loss.png", "reward.png", "tokens-per-second.png"]
    for name in pictures:
        assert (tmp_path / "a" / name).read_bytes().startswith(b"\x89PNG")
    again = treepack("report", str(folder), "--out", str(tmp_path / "a.html"))
    assert again.status == 1
    assert "a.html" in again.err
    assert treepack("report", str(folder), "--out", str(tmp_path / "a.html"), "--overwrite").status == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run"], "give --out for a page, --png for pictures, or both; or --watch for a training run"),
        (["run", "--watch", "--out", "x.html"], "--watch writes no file; run report again with --out or --png"),
        (["packed", "--watch"], "packed: is not a training run on this machine; --watch takes the --out of"),
        (["run", "--out", "x.html", "--capacity", "4k"], "--capacity is about rollouts, and PATH is a training run"),
        (["run", "--out", "x.html", "--model", "qwen3-8b"], "--model is about rollouts, and PATH is a training run"),
        (["run", "--out", "packed"], "packed is a directory; choose another --out"),  # before the run is read
        (["run", "--out", "x.html"], "metrics.jsonl: contains no step yet; write the report after the first step"),
        (["run", "--png", "pictures"], "metrics.jsonl: contains no step yet; write the report after the first step"),
        (
            ["linked", "--watch"],
            "metrics.jsonl: cannot be read (it is a link); expected a regular file of a training run",
        ),
        (["damaged", "--watch"], "run.json: is damaged"),
        (["run", "--out", "x.html", "--text-limit", "-1"], "-1 is not in the range x>=0"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "run")
    packed_directory(tmp_path / "packed", [make("a", [1, 2, 3])], capacity=8)
    linked = run_folder(tmp_path / "linked")
    (linked / "metrics.jsonl").unlink()
    (linked / "metrics.jsonl").symlink_to("/etc/passwd")
    (run_folder(tmp_path / "damaged") / "run.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    done = treepack("report", *arguments)
    assert done.status in (1, 2)
    assert sentence in " ".join(done.err.split())
    assert "Traceback" not in done.err
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_lines_are_counted_on_the_page(treepack: Run, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_lines(folder, [step_record(1), {"step": "x"}, step_record(2)])
    done = treepack("report", str(folder), "--out", str(tmp_path / "run.html"))
    assert done.status == 0
    assert "1 line of metrics.jsonl cannot be read, the first is line 2." in done.err


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def test_the_page_of_a_trainer_starts_and_ends_with_its_sink(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    notes: list[str] = []
    with closing(Sinks(["page"], SinkRun(folder, "project", "name", "1f2e", note=notes.append), notes.append)) as sinks:
        (page,) = sinks._sinks.values()
        page._announcing.join(60)  # type: ignore[attr-defined]
        (url,) = re.findall(r"the page of this run is (http://127\.0\.0\.1:\d+/\S+/)$", notes[0])
        sinks.write({"step": 1, "loss": 1.0})
        assert "<title>run: treepack run</title>" in fetch(url)
    with pytest.raises(urllib.error.URLError):
        fetch(url)
    assert len(notes) == 1


def page_note(folder: Path) -> str:
    """Open the page of the run in `folder` as `train` does, close it, and return its note."""
    notes: list[str] = []
    with StartLog(folder):
        page = RunPage(SinkRun(folder, "project", "name", "1f2e", note=notes.append))
        page._announcing.join(60)
        page.close()
    return notes[0]


@pytest.mark.slow
def test_a_resumed_run_has_its_page_at_the_same_address_until_it_is_finished(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    first = page_note(folder)
    kept = tmp_path / ".run.page"
    assert first.endswith(kept.read_text().strip())
    assert kept.stat().st_mode & 0o777 == 0o600
    assert page_note(folder) == first
    port = int(first.split(":")[2].split("/")[0])
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        moved = page_note(folder)
    assert moved.endswith(" (another program has taken the port of its earlier address)")
    assert f":{port}/" not in moved
    (folder / "train.json").write_text("{}")
    assert page_note(folder) in moved
    assert not kept.exists()


def test_watching_waits_for_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    arguments = ["report", str(tmp_path / "run"), "--watch"]
    watching = PROCESSES.Process(target=run_command, args=(arguments, tmp_path), daemon=True)
    watching.start()
    assert line_of(tmp_path / "stderr", watching, "waiting until a training run starts in .*; end with Ctrl-C")
    run_folder(tmp_path / "run")
    url = line_of(tmp_path / "stderr", watching, r"http://127\.0\.0\.1:\d+/\S+/")
    assert "<title>run: treepack run</title>" in fetch(url)
    assert interrupted(watching) == 0


def interrupted(process: multiprocessing.process.BaseProcess) -> int | None:
    """Send Ctrl-C to a process, and return its exit status."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    return process.exitcode


@pytest.mark.slow
def test_a_run_that_trains_has_a_page_until_it_ends(tmp_path: Path) -> None:
    made = [make(f"r{i}", [1, 2 + i, 3, 4], group="g", reward=i / 4) for i in range(4)]
    packed = packed_directory(tmp_path / "packed", made, capacity=8)
    model = str(tiny_config(tmp_path / "tiny.json"))
    arguments = ["train", str(packed), "--model", model, "--out", str(tmp_path / "out"), "--steps", "100000"]
    arguments += ["--report-to", "page", "--checkpoint-every", "0"]
    training = PROCESSES.Process(target=run_command, args=(arguments, tmp_path), daemon=True)
    training.start()
    url = url_in(tmp_path / "stderr", training)
    with urllib.request.urlopen(url + "events", timeout=60) as events:
        states = (line for line in events if line.startswith(b"data: "))
        # The page begins with the parts before the first step.
        assert b'"kind":"running"' in next(line for line in states if b'"kind":"starting"' not in line)
        assert '"first":' in fetch(url + "rollouts")
        training.kill()  # the page ends with it, even so
        training.join()
        assert b"event: end" in events.read()


def url_in(file: Path, process: multiprocessing.process.BaseProcess) -> str:
    """Wait for the note about the page of a process that trains, and return its address."""
    return line_of(file, process, r"note: the page of this run is \S+").split()[-1]


def line_of(file: Path, process: multiprocessing.process.BaseProcess, pattern: str) -> str:
    """Wait until a line of the file matches, and return it."""
    while process.is_alive():
        if file.exists() and (found := re.search(rf"^({pattern})\n", file.read_text(), re.MULTILINE)):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(file.read_text())
