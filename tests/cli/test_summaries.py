"""Summaries of build-trie, pack and stats: the same names everywhere, the input first, notes that wrap."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest

from support.command_line import Run
from support.paths import SAMPLE_DATA
from treepack.analysis.glossary import GLOSSARY, INTERNAL, RATIOS
from treepack.files.manifest import read_manifest

TREEPACK = Path(sys.executable).parent / "treepack"
CHATS = (str(SAMPLE_DATA / "chat.jsonl"), "--tokenizer", str(SAMPLE_DATA / "tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trie of the sample conversations and its rows, and the output of both commands."""
    path = tmp_path_factory.mktemp("summaries")
    commands = {
        "trie": ["build-trie", *CHATS],
        "packed": ["pack", str(path / "trie"), "--capacity", "4096", "--verbose"],
    }
    for name, command in commands.items():
        with redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["treepack", *command, "--out", str(path / name)])
            with pytest.raises(SystemExit, match="0"):
                import_module("treepack_cli").main()
        (path / f"{name}.txt").write_text(output.getvalue())
    return path


def figures(output: str) -> dict[str, str]:
    """Return the values of the figures in the output of a command, by their names."""
    lines = [line.split() for line in output.splitlines()]
    return {
        words[0]: words[1].replace(",", "")
        for words in lines
        if len(words) > 2 and words[0] in GLOSSARY and words[1] != "rows"
    }


def test_every_command_names_a_figure_by_its_key_in_json(treepack: Run, folder: Path) -> None:
    outputs = [(folder / f"{name}.txt").read_text() for name in ("trie", "packed")]
    outputs += [treepack("stats", folder / name, "--verbose").out for name in ("trie", "packed")]
    reports = [json.loads(treepack("stats", folder / name, "--json").out) for name in ("trie", "packed")]
    for output, report in zip(outputs, [*reports, *reports], strict=True):
        values = figures(output)
        assert len(values) >= 8
        assert list(values) == [name for name in GLOSSARY if name in values]  # in one order everywhere
        for name in values.keys() & report.keys():
            number = report[name]
            if name in RATIOS:
                assert float(values[name]) == pytest.approx(100 * number, abs=0.051)
            elif isinstance(number, int):
                assert int(values[name]) == number
    names = [figures(output).keys() for output in outputs]
    assert names[0] & names[1] >= {"num_trajectories", "tokens_flat", "tokens_tree", "por"}
    assert names[3] >= names[1] - {"bytes_per_token"}


def test_internals_need_verbose(treepack: Run, folder: Path) -> None:
    assert figures(treepack("stats", folder / "packed").out).keys() & INTERNAL == set()
    assert figures(treepack("stats", folder / "packed", "--verbose").out).keys() & INTERNAL >= {"tiles_partial"}
    assert figures((folder / "packed.txt").read_text()).keys() >= {"bytes_per_token", "lower_bound"}


def test_every_summary_begins_with_conversations_samples_and_the_reason(treepack: Run, folder: Path) -> None:
    read = "32 conversations, 96 trajectories: the template rewrites earlier turns"
    for name in ("trie", "packed"):
        assert (folder / f"{name}.txt").read_text().splitlines()[0] == read
        report = json.loads(treepack("stats", folder / name, "--json").out)
        assert report["summary"] == read
        assert report["conversations"] == read_manifest(folder / name)["conversations"]
        assert treepack("stats", folder / name).out.startswith(f"{read}\n{report['forecast']['verdict']}.\n")


def test_rows_without_some_samples_have_no_append_only_baseline(treepack: Run, folder: Path, tmp_path: Path) -> None:
    options = ("--capacity", 1500, "--too-long", "drop")
    assert treepack("pack", folder / "trie", *options, "--out", tmp_path / "p").status == 0
    report = json.loads(treepack("stats", tmp_path / "p", "--json").out)
    assert report["summary"].endswith(f", of which {report['num_trajectories']} trajectories remain")
    assert {line["baseline"] for line in report["forecast"]["lines"]} == {"samples"}
    assert report["forecast"]["notes"] == [
        "trajectories were removed since the conversations were read, so their append-only sequences are not known"
    ]


@pytest.mark.slow
def test_on_a_terminal_sentences_are_wrapped(folder: Path) -> None:
    columns = 60
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [str(TREEPACK), "stats", str(folder / "packed"), "--verbose"]
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(terminal)
        output = b""
        try:
            while data := os.read(control, 4096):
                output += data
        except OSError:  # the other end of the terminal is closed
            pass
        assert process.wait() == 0
    os.close(control)
    lines = output.decode().splitlines()
    # Tables of numbers are never cut, but they fit 80 columns.
    assert max(map(len, lines)) <= 80
    prose = [line for line in lines if line.startswith(("- ", "  ", "32 ", "Tree "))]
    sentences = [line for line in prose if "  " not in line.strip()]
    assert len(sentences) >= 4
    assert all(len(line) <= columns for line in sentences)
