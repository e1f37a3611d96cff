"""An unexpected exception is one sentence with a file to report; standard streams may be closed or full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from support.command_line import Run
from support.fresh_processes import PROCESSES, lose_a_rank
from support.written_rollouts import write_rollouts

TREEPACK = Path(sys.executable).parent / "treepack"


class RudeError(Exception):
    """An exception whose message cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no message")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the command `formats` raise `error`."""

    def raise_it() -> None:
        raise error

    monkeypatch.setattr("treepack_cli.formats.formats.callback", lambda **options: raise_it())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the command."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("by\nzero"), "ZeroDivisionError: by zero"),
        (RecursionError(), "RecursionError"),
        (UnicodeEncodeError("utf-8", "\udc80", 0, 1, "no"), "UnicodeEncodeError: "),
        (OSError(36, "File name too long"), "OSError: [Errno 36] File name too long"),
        (RudeError(), "RudeError"),
        (KeyError("x" * 1000), "KeyError: 'xxx"),
        # Exceptions that are not an Exception, or that click would turn into an end without a sentence.
        (BaseException("of Rust"), "BaseException: of Rust"),
        (SystemExit(0), "SystemExit: 0"),
        (GeneratorExit(), "GeneratorExit"),
        (EOFError(), "EOFError"),
    ],
)
def test_an_unforeseen_exception_names_a_file_with_its_traceback(
    treepack: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    failing(monkeypatch, error)
    result = treepack("formats")
    assert (result.status, result.out) == (1, "")
    (line,) = result.err.splitlines()
    assert line.startswith(f"treepack: stopped by a fault of its own ({words}")
    assert len(line) < 600
    (report,) = folder.glob("treepack-fault-*.txt")
    assert line.endswith(f"; please report it with {report}, which has the traceback")
    text = report.read_text()
    assert "in raise_it" in text
    assert type(error).__name__ in text
    assert "['treepack', 'formats']" in text


@pytest.mark.slow
def test_a_rank_that_loses_another_one_does_not_ask_for_a_report(tmp_path: Path) -> None:
    ranks = [PROCESSES.Process(target=lose_a_rank, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 9]
    sentence = (tmp_path / "sentence").read_text()
    assert sentence.startswith("stopped because another rank of the run ended or does not answer (RuntimeError: ")
    assert sentence.endswith("); see the error of that rank")
    assert ". " not in sentence
    assert not [*tmp_path.glob("treepack-fault-*")]


def test_the_sentence_names_the_last_line_of_treepack(
    treepack: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treepack.ingest.readers.registry.all_formats", lambda: None)
    result = treepack("formats")
    assert result.status == 1
    assert ", in cli/formats.py:" in result.err or ", in treepack/" in result.err


def test_without_a_place_for_the_file_the_sentence_remains(treepack: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("a"))
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    result = treepack("formats")
    assert result.err == (
        "treepack: stopped by a fault of its own (ZeroDivisionError: a); please report it, with the traceback that "
        "TREEPACK_TRACEBACK=1 prints\n"
    )


def test_the_traceback_is_printed_on_request(treepack: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("a\x1b[2J"))
    monkeypatch.setenv("TREEPACK_TRACEBACK", "1")
    lines = treepack("formats").err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2] == r"ZeroDivisionError: a\x1b[2J"
    assert lines[-1].startswith("treepack: stopped by a fault of its own")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_a_lack_of_memory_is_no_fault(
    treepack: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing(monkeypatch, error)
    result = treepack("formats")
    assert result.status == 1
    assert result.err.startswith("treepack: memory ran out; read fewer inputs at once")
    assert not [*folder.glob("treepack-fault-*")]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (click.UsageError("wrong\x1b]0;a"), 2, "Error: wrong\\x1b]0;a"),
        (KeyboardInterrupt(), 1, "Aborted!"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ],
)
def test_wrong_usage_an_interrupt_and_a_closed_pipe_are_no_faults(
    treepack: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, words: str
) -> None:
    failing(monkeypatch, error)
    result = treepack("formats")
    assert result.status == status
    assert words in result.err
    assert "fault" not in result.err
    assert not list(folder.iterdir())


def close(*numbers: int) -> Callable[[], None]:
    def act() -> None:
        for number in numbers:
            os.close(number)

    return act


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_rollouts(folder / "rollouts.jsonl")
    subprocess.run([TREEPACK, "build-trie", "rollouts.jsonl", "--out", "trie"], cwd=folder, check=True, stdout=-3)
    return folder


@pytest.mark.parametrize("command", ["show trie", "stats trie", "formats"])
def test_a_reader_that_closes_the_pipe_gets_no_word(inputs: Path, command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([TREEPACK, *command.split()], cwd=inputs, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


COMMANDS = {
    "build-trie": "build-trie rollouts.jsonl --out OUT --quiet",
    "stats": "stats trie --check",
    "show": "show trie",
    "json": "stats trie --json",
}


# The work of the entry point, in one process, which closes all three streams before each command.
ALL_CLOSED = """
import json, os, sys
from treepack_cli import main
for words in json.loads(sys.argv[1]):
    os.closerange(0, 3)
    sys.argv = ["treepack", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            os._exit(3)
"""


@pytest.mark.slow
def test_no_command_needs_a_stream(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    commands = [command.replace("OUT", str(out)).split() for command in COMMANDS.values()]
    program = [sys.executable, "-c", ALL_CLOSED, json.dumps(commands)]
    done = subprocess.run(program, cwd=inputs, preexec_fn=close(0, 1, 2), capture_output=True, check=False, stdin=-3)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (out / "manifest.json").exists()


@pytest.mark.parametrize(("command", "closed"), [("json", 1), ("build-trie", 2)])
def test_a_closed_stream_is_no_error(inputs: Path, tmp_path: Path, command: str, closed: int) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in COMMANDS[command].split()]
    done = subprocess.run(
        [TREEPACK, *words], cwd=inputs, preexec_fn=close(closed), capture_output=True, check=False, stdin=-3
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed != 1)


@pytest.mark.parametrize("words", [["stats", "absent"], ["stats", "trie", "--no-such"]])
def test_errors_without_a_place_for_them_keep_their_status(
    treepack: Run, inputs: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    expected = treepack(*words).status
    closed = subprocess.run([TREEPACK, *words], cwd=inputs, preexec_fn=close(2), stdout=-3, check=False)
    with Path("/dev/full").open("w") as full:
        failed = subprocess.run([TREEPACK, *words], cwd=inputs, stderr=full, stdout=-3, check=False)
    assert expected in (1, 2)
    assert [closed.returncode, failed.returncode] == [expected] * 2


def test_a_full_stderr_does_not_stop_a_command(inputs: Path, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [TREEPACK, "build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie"],
            stderr=full,
            stdout=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 0
    assert b"num_trajectories" in done.stdout


WRITE = """
import sys
from importlib import import_module
import click
from treepack.errors import TreepackError
with import_module("treepack_cli.streams").standard_streams():
    try:
        click.echo(b'{"a": 1}')
    except TreepackError as error:
        print(error, file=sys.stderr)
"""


def test_bytes_into_a_full_stdout_are_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", WRITE], stdout=full, stderr=-1, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == (
        "standard output: cannot be written (No space left on device); send it to a place with room\n"
    )


def test_a_terminal_that_lacks_a_letter_gets_an_escape(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"id": "\u4f60", "tokens": [1, 2], "loss_mask": [0, 1]}\n', encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words: list[str | Path] = ["show", tmp_path / "r.jsonl", "--trajectory", "\u4f60"]
    done = subprocess.run([TREEPACK, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\u4f60" in done.stdout
