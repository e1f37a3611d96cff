"""Progress on stderr: lines off a terminal, bars on one, nothing with --quiet or for a short command."""

from __future__ import annotations

import io
import re
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from support.command_line import Run
from support.paths import SAMPLE_DATA
from treepack.processes import Progress

progress = import_module("treepack_cli.progress")


class Terminal(io.StringIO):
    """A stderr that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("state", "seconds", "line"),
    [
        (Progress("packing", 50, 200, "rows"), 10.0, "packing: 25 %, 50 of 200 rows, 5 rows/s, 30 s left"),
        (Progress("packing", 200, 200, "rows"), 10.0, "packing: 100 %, 200 of 200 rows, 20 rows/s"),
        (
            Progress("reading", 12_345_678, None, "tokens", share=0.2),
            100.0,
            "reading: 20 %, 12.3M tokens, 123k tokens/s, 6 min 40 s left",
        ),
        (Progress("reading", 999_600, None, "tokens"), 1000.0, "reading: 1M tokens, 1k tokens/s"),
        (Progress("merging rows", 0, None, ""), 3670.0, "merging rows: 1 h 1 min so far"),
    ],
)
def test_a_line_has_what_is_done_the_rate_and_the_time_left(state: Progress, seconds: float, line: str) -> None:
    assert progress._line(state, seconds) == line


def test_lines_come_while_a_stage_computes_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    with progress.progress_bars() as report:
        report(Progress("planning", 1, 4, "trees"))
        while written.getvalue().count("\n") < 3:  # one report, several lines
            time.sleep(0.01)
        report(Progress("packing", 4, 4, "rows"))
    lines = written.getvalue().splitlines()
    planning = [line for line in lines if line.startswith("planning")]
    assert len(planning) > 2
    assert planning[0].startswith("planning: 25 %, 1 of 4 trees, ")
    assert planning[-1].startswith("planning: 1 of 4 trees, done in ")
    assert lines.index(planning[-1]) == len(planning) - 1


def test_a_short_command_writes_no_progress_off_a_terminal(
    treepack: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = treepack("build-trie", SAMPLE_DATA / "tokens.jsonl", "--out", tmp_path / "trie")
    assert (result.status, result.notes) == (0, "")


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_writes_neither_bars_nor_lines(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 1e-4)
    off = ["--quiet"] if quiet else []
    result = treepack("build-trie", SAMPLE_DATA / "tokens.jsonl", "--out", tmp_path / "trie", *off)
    assert ("tokens/s" in result.err) is not quiet
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    treepack("pack", tmp_path / "trie", "--capacity", 4096, "--out", tmp_path / "packed", *off)
    assert ("packing: 100%" in terminal.getvalue()) is not quiet


def test_steps_have_a_line_each_or_one_in_every_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.step_progress("training", 3, first=1) as report:
        report(2, {"loss": "1.5"})
        report(3, {"loss": "1.25"})
    assert capsys.readouterr().err.splitlines() == [
        "training: step 2 of 3, loss 1.5, 0 s left",
        "training: step 3 of 3, loss 1.25",
    ]
    with progress.step_progress("training", 9, first=2, every=4) as report:
        for step in range(2, 10):
            report(step, {})
    assert re.findall(r"step (\d)", capsys.readouterr().err) == ["2", "4", "8", "9"]
    with progress.step_progress("fitting", 2, interval=1000) as report:
        report(1, {})
        report(2, {})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("columns", [40, 80, 110, 200])
def test_a_bar_of_steps_shows_the_values_for_which_there_is_room(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_shape", lambda: {"ncols": columns, "nrows": 24})
    values = {"loss": "1.2345", "reward": "0.575", "entropy": "0.403", "KL from the sampler": "0.188", "lr": "5e-05"}
    with progress.step_progress("training", 20) as report:
        report(4, values)
    lines = [line for line in re.split("[\r\n]", terminal.getvalue()) if "4/20" in line]
    assert lines
    for line in lines:
        assert len(line) <= columns
        if columns >= 80:
            bar, shown = line.split("|")[1], re.findall(r"[A-Za-z ]+=[^,\]]+", line)
            assert len(bar) >= 8
            assert shown[0] == " loss=1.2345"
            assert len(shown) == {80: 1, 110: 2, 200: 5}[columns]
            assert line.endswith("]")


def test_a_bar_of_unknown_length_gets_one_from_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.progress_bars() as report:
        report(Progress("reading", 100, None, "tokens", share=0.1))
        time.sleep(0.2)  # tqdm draws ten times a second
        report(Progress("reading", 250, None, "tokens", share=0.25))
        assert "| 250/1.00k [" in terminal.getvalue()
    assert "| 250/250 [" in terminal.getvalue()


def test_a_stage_that_counts_nothing_goes_when_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.progress_bars() as report:
        report(Progress("planning", 1, 2, "trees"))
        report(Progress("merging rows", 0, None, ""))
        report(Progress("planning", 2, 2, "trees"))
        report(Progress("packing", 1, 1, "rows"))
    # tqdm moves the cursor up with ESC [A.
    lines = terminal.getvalue().replace("\x1b[A", "").replace("\r", "\n").splitlines()
    assert "merging rows ..." in lines[:-1]
    assert [line.partition("|")[0] for line in lines if "100%" in line] == ["planning: 100%", "packing: 100%"]
