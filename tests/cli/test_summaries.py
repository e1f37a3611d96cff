"""Summaries of the commands: the same names everywhere, skipped rollouts counted, notes that wrap."""

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
from typing import Any

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


def rollout(number: int, group: str | None, *, trained: bool = True) -> dict[str, Any]:
    named = {} if group is None else {"group_id": group}
    return {
        "id": str(number),
        "input_ids": [1, 2, 3 + number],
        "loss_mask": [0, 0, int(trained)],
        "reward": 1.0,
    } | named


def write(path: Path, rollouts: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rollouts))
    return str(path)


@pytest.fixture
def rollouts(tmp_path: Path) -> str:
    """Thirty rollouts: group a lost one of its two, group b its only one, and one without a group is lost."""
    lost = [rollout(0, "a", trained=False), rollout(1, "b", trained=False), rollout(2, None, trained=False)]
    return write(tmp_path / "r.jsonl", [*lost, rollout(3, "a"), *(rollout(i, "c") for i in range(4, 30))])


def test_many_skipped_rollouts_are_the_first_line_and_the_first_are_named(
    treepack: Run, tmp_path: Path, rollouts: str
) -> None:
    lines = treepack("build-trie", rollouts, "--out", str(tmp_path / "trie")).out.splitlines()
    assert lines[0] == "3 of 30 rollouts (10.0 %) were skipped, 3 of them for this reason: no trained token"
    assert lines[-6:] == [
        "skipped rollouts: 3",
        *(f"  {rollouts}:{line}: no trained token" for line in (1, 2, 3)),
        "groups that lost a rollout: 2 (all of their rollouts: 1)",
        "skipped rollouts that name no group: 1",
    ]


def test_the_summary_of_packed_rows_opens_with_many_skipped_rollouts_too(
    treepack: Run, tmp_path: Path, rollouts: str
) -> None:
    built = treepack("build-trie", rollouts, "--out", str(tmp_path / "trie")).out.splitlines()
    packed = treepack("pack", str(tmp_path / "trie"), "--out", str(tmp_path / "packed")).out.splitlines()
    assert packed[0] == built[0]
    # The rows remember it, in text and in JSON.
    skipped = read_manifest(tmp_path / "trie")["skipped"]
    assert treepack("stats", str(tmp_path / "packed")).out.splitlines()[0] == built[0]
    assert treepack("stats", str(tmp_path / "packed"), "--json").json["skipped"] == skipped


@pytest.mark.parametrize("step", ["rollouts", "trie", "packed"])
def test_the_page_of_a_report_opens_with_many_skipped_rollouts(
    treepack: Run, tmp_path: Path, rollouts: str, step: str
) -> None:
    assert treepack("prepare", rollouts, "--out", tmp_path).status == 0
    path = {"rollouts": rollouts, "trie": tmp_path / "trie", "packed": tmp_path / "packed"}[step]
    assert treepack("report", path, "--out", tmp_path / "page.html").status == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<strong>3 of 30 rollouts (10.0 %) were skipped" in page


def test_few_skipped_rollouts_are_not_the_first_line(treepack: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [rollout(i, "a", trained=i > 0) for i in range(20)])
    lines = treepack("build-trie", path, "--out", str(tmp_path / "trie")).out.splitlines()
    assert "skipped, " not in lines[0]
    assert lines[-2] == f"  {path}:1: no trained token"


def test_the_manifest_and_the_json_of_stats_name_skipped_rollouts(treepack: Run, tmp_path: Path, rollouts: str) -> None:
    treepack("build-trie", rollouts, "--out", str(tmp_path / "trie"))
    entry = read_manifest(tmp_path / "trie")["skipped"]
    assert entry == {
        "num_rollouts": 27,
        "num_skipped": 3,
        "main_reason": "no trained token",
        "num_main_reason": 3,
        "rollouts": [
            {"source": f"{rollouts}:{line}", "reason": f"{rollouts}:{line}: no trained token"} for line in (1, 2, 3)
        ],
        "num_groups": 2,
        "num_groups_lost": 1,
        "num_without_group": 1,
        "groups": ["a"],
    }
    for path in (rollouts, str(tmp_path / "trie")):
        assert treepack("stats", path, "--json").json["skipped"] == entry


def test_advantages_say_that_baselines_are_over_fewer_rollouts(treepack: Run, tmp_path: Path, rollouts: str) -> None:
    treepack("build-trie", rollouts, "--out", str(tmp_path / "trie"))
    notes = treepack(
        "advantages", str(tmp_path / "trie"), "--estimator", "grpo", "--out", str(tmp_path / "advantages")
    ).err
    assert f"note: groups that lost a rollout when {tmp_path}/trie was built: 1; their baselines" in notes
    assert f"note: rollouts of unknown groups that were skipped when {tmp_path}/trie was built: 1;" in notes


def test_an_input_without_a_usable_rollout_is_refused_with_its_reasons(treepack: Run, tmp_path: Path) -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    paths = [
        write(tmp_path / "chats.jsonl", [image, image]),
        write(tmp_path / "tokens.jsonl", [rollout(0, "a", trained=False)]),
    ]
    expected = (
        "treepack: no trajectory with a trained token was found; nothing to build; skipped: images, audio and video "
        "are not read (2), no trained token (1)\n"
    )
    for command in (["build-trie", "--out", str(tmp_path / "trie")], ["stats"], ["show"]):
        result = treepack(command[0], *paths, *command[1:])
        assert (result.status, result.err) == (1, expected)


def test_strict_refuses_the_first_rollout_that_would_be_skipped(treepack: Run, tmp_path: Path, rollouts: str) -> None:
    result = treepack("build-trie", rollouts, "--strict", "--out", str(tmp_path / "trie"))
    refusal = f"treepack: {rollouts}:1: no trained token; fix or remove the rollout, or skip it without --strict\n"
    assert (result.status, result.err) == (1, refusal)
    assert not (tmp_path / "trie").exists()


def test_strict_accepts_a_folder_with_other_files(treepack: Run, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [rollout(0, "a")])
    (tmp_path / "notes.md").write_text("not read")
    assert "file extension .md not read" in treepack("stats", str(tmp_path), "--strict").out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--strict", "--skip-bad"], "Error: --strict and --skip-bad exclude each other; give one of them"),
        (["--max-record-size", "1K"], "Error: --max-record-size is 1024; expected at least 1048576 bytes"),
        (["--max-record-size", "big"], "'big' is not a number of bytes such as 500M or 2G"),
        (["--control-tokens", "drop"], "is not one of 'keep', 'text', 'skip'"),
    ],
)
def test_reading_options_that_make_no_sense_are_wrong_usage(
    treepack: Run, rollouts: str, options: list[str], sentence: str
) -> None:
    result = treepack("stats", rollouts, *options)
    assert result.status == 2
    assert sentence in result.err


def test_a_record_size_has_suffixes(treepack: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [rollout(0, "a") | {"pad": "x" * (3 << 20)}])
    for size in ("2M", "2MB", str(2 << 20)):
        assert "the line has more than 2 MB" in treepack("stats", path, "--max-record-size", size).err
    assert treepack("stats", path, "--max-record-size", "4m").status == 0


def test_fields_that_are_not_used_are_one_line_with_three_names_and_without_bookkeeping(
    treepack: Run, tmp_path: Path
) -> None:
    names = ["grid", "leaves", "moods", "shelves"]
    fields = {name: [["x"]] for name in names} | {"usage": {"grid": [["x"]]}, "created_at": [["x"]]}
    path = write(tmp_path / "r.jsonl", [rollout(1, None) | fields])
    line = "fields not used: grid, leaves, moods, ... (4 in total, listed by treepack formats --record FILE)"
    built = treepack("build-trie", path, "--out", str(tmp_path / "trie")).out
    assert [each for each in built.splitlines() if "not used" in each] == [f"- {line}"]
    assert f"note: {line}" in treepack("show", path).err.splitlines()
    verbose = treepack("stats", path, "--verbose").out
    assert all(f"- field '{name}' not used: 1" in verbose for name in (*names, "usage", "created_at"))


def test_an_error_without_any_trajectory_names_the_reason_before_the_counts(treepack: Run, tmp_path: Path) -> None:
    bad = {"input_ids": [1, 2], "loss_mask": [0, 1], "reward": "much", "grid": [["x"]]}
    error = treepack("build-trie", write(tmp_path / "r.jsonl", [bad]), "--out", str(tmp_path / "trie")).err
    assert 0 < error.index("the first: ") < error.index("expected a finite number") < error.index("; skipped: ")
