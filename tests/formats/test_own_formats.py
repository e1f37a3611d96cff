"""Formats of other packages, which register under the entry point group `treepack.formats`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import Run
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import detect_format
from treepack.ingest.readers.registry import all_formats, formats_by_name
from treepack.trie.store.trie_files import read_trie

MODULE = '''
"""Diaries: {"diary": [5, 6], "wrote": [7]}."""

from dataclasses import replace

from treepack.ingest.readers.format import Format
from treepack.ingest.readers.kinds import IDS
from treepack.ingest.readers.tokens.token_records import read_tokens


def read_diary(record, options):
    """Read the one trajectory of `record`."""
    fields = {"prompt_ids": record.value["diary"], "response_ids": record.value["wrote"]}
    yield from read_tokens(replace(record, value=fields), options)


FORMAT = Format(
    name="NAME",
    program="a diary",
    recognised_by="`diary` and `wrote`",
    requires=[{"diary": IDS, "wrote": IDS}],
    used=["diary", "wrote"],
    read=read_diary,
)
'''


def installed(folder: Path, *, name: str = "diary", module: str = MODULE, value: str = "diary_logs:FORMAT") -> Path:
    """Write the package diary-logs with one entry point, as an installer would write it."""
    info = folder / "diary_logs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: diary-logs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[treepack.formats]\ndiary = {value}\n")
    (folder / "diary_logs.py").write_text(module.replace("NAME", name))
    return folder


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The registry without the formats that it found before, in this test and after it."""

    def clear() -> None:
        all_formats.cache_clear()
        formats_by_name.cache_clear()
        sys.modules.pop("diary_logs", None)

    clear()
    yield monkeypatch
    monkeypatch.undo()
    clear()


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(TreepackError) as caught:
        all_formats()
    return str(caught.value)


@pytest.mark.slow
def test_a_format_of_an_installed_package_is_read_by_the_command_line(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    lines = [{"diary": [5, 6], "wrote": [7]}, {"diary": [5, 6], "wrote": [8, 9]}]
    rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-c", "from treepack_cli import main; main()", "build-trie", str(rollouts)]
    subprocess.run(
        [*command, "--out", str(tmp_path / "trie")],
        env=os.environ | {"PYTHONPATH": str(installed(tmp_path / "site"))},
        check=True,
        capture_output=True,
    )
    trie = read_trie(tmp_path / "trie")
    assert sorted(trie.tokens.tolist()) == [5, 6, 7, 8, 9]


def test_a_name_that_a_format_of_treepack_has_is_refused(tmp_path: Path, fresh: pytest.MonkeyPatch) -> None:
    assert refusal(installed(tmp_path, name="chat"), fresh) == (
        "diary-logs 1.0, entry point 'diary' of treepack.formats: has the format 'chat', which exists already; "
        "uninstall the package or rename it"
    )


def test_a_format_that_cannot_be_imported_is_refused(tmp_path: Path, fresh: pytest.MonkeyPatch) -> None:
    assert refusal(installed(tmp_path, module="import no_such_thing\n"), fresh) == (
        "diary-logs 1.0, entry point 'diary' of treepack.formats: cannot be loaded (ModuleNotFoundError: No module "
        "named 'no_such_thing'); repair or uninstall the package"
    )


# Replacements in MODULE, and the words of the sentence.
READ = "yield from read_tokens(replace(record, value=fields), options)"
TRAJECTORY = (
    "import numpy as np; from treepack.trajectory import Chat, PromptCompletion, Skipped, Tokens, Trajectory; yield "
)


def of_tokens(starts: str, more: str = "") -> str:
    """A reader's last line, which yields two tokens with spans from `starts` to 2."""
    spans = f"np.array({starts}, np.int32), np.array([2], np.int32), np.array([1.0])"
    return f"{TRAJECTORY}Trajectory('a', 'r', Tokens(np.array([5, 6], np.int32), {spans}){more})"


def of_text(identity: str, prompt: str) -> str:
    """A reader's last line, which yields a prompt and its completion."""
    return f"{TRAJECTORY}Trajectory({identity}, 'r', PromptCompletion({prompt}, 'b'))"


CHAT = TRAJECTORY + "Trajectory('a', 'r', Chat"
FAULTS = {
    "exits at import": ('"""Diaries', 'raise SystemExit(0)\n"""', "cannot be loaded (SystemExit: 0)"),
    "raises at import": ('"""Diaries', '1 / 0\n"""', "cannot be loaded (ZeroDivisionError: division by zero)"),
    "exits": (READ, "raise SystemExit(0); yield", "its code failed (SystemExit: 0)"),
    "exits without a status": (READ, "import sys; sys.exit(); yield", "its code failed (SystemExit)"),
    "raises": (READ, "raise KeyError('at'); yield", "its code failed (KeyError: 'at')"),
    "raises a foreign base": (READ, "raise BaseException('odd'); yield", "its code failed (BaseException: odd)"),
    "is cancelled": (READ, "import asyncio; raise asyncio.CancelledError; yield", "its code failed (CancelledError)"),
    "recurses": (READ, "yield from read_diary(record, options)", "its code failed (RecursionError"),
    "has another signature": ("(record, options):", "(record):", "its code failed (TypeError: read_diary() takes 1"),
    "gives None": (READ, "return None", "its code failed (TypeError: 'NoneType' object is not iterable)"),
    "yields None": (READ, "yield None", "yielded None; expected a Trajectory or a Skipped of treepack.trajectory"),
    "yields an object": (READ, "yield {'tokens': [5]}", "yielded {'tokens': [5]}; expected a Trajectory"),
    "yields a list of ids": (READ, TRAJECTORY + "Trajectory('a', 'r', [5, 6])", "a Trajectory with content [5, 6]"),
    "yields a wrong id": (READ, of_text("7", "'a'"), "with trajectory_id 7"),
    "yields a wrong prompt": (READ, of_text("'a'", "7"), "with content.prompt 7"),
    "yields a wrong span": (READ, of_tokens("[0]"), "not ascending within [1, 2]"),
    "yields two starts": (READ, of_tokens("[1, 1]"), "of unequal or wrong shapes"),
    "yields NaN": (READ, of_tokens("[1]", ", reward=float('nan')"), "reward is nan"),
    "yields wrong weights": (
        READ,
        CHAT + "([{'role': 'user', 'content': 'a'}], []))",
        "0 message_weights for 1 messages",
    ),
    "yields no role": (READ, CHAT + "([{'content': 'a'}], [0.0]))", "a message without a role"),
    "yields a wrong reason": (READ, TRAJECTORY + "Skipped('r', 7)", "a Skipped with reason 7"),
    "requires without a test": ('"diary": IDS', '"diary": 7', "its format has requires [{'diary': 7"),
    "requires by an exit": (
        'requires=[{"diary": IDS, "wrote": IDS}]',
        "requires=lambda value: exit(0)",
        "its code failed (SystemExit: 0)",
    ),
    "tests by an exit": (
        '"wrote": IDS}',
        '"wrote": replace(IDS, test=lambda value: 1 / 0)}',
        "its code failed (ZeroDivisionError",
    ),
    "has a rank of text": ("    read=", "    rank='first',\n    read=", "its format has rank 'first'"),
    "has a number as name": ('name="NAME"', "name=7", "its format has name 7"),
    "has a text as fields": ("    read=", "    arrays='diary',\n    read=", "its format has arrays 'diary'"),
    "has a reader of text": ("read=read_diary", "read='read_diary'", "its format has read 'read_diary'"),
    "has two readers": (
        "read=read_diary",
        "read=read_diary, read_file=read_diary",
        "cannot be loaded (AssertionError: diary)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_foreign_code_is_a_sentence_that_names_the_package(
    tmp_path: Path, fresh: pytest.MonkeyPatch, fault: str
) -> None:
    old, new, words = FAULTS[fault]
    assert old in MODULE
    fresh.syspath_prepend(installed(tmp_path, module=MODULE.replace(old, new, 1)))
    record = Record("r:1", "r", {"diary": [5], "wrote": [6]})
    with pytest.raises(TreepackError) as caught:
        list(formats_by_name()[detect_format(record)].trajectories([record], ReadOptions()))
    sentence = str(caught.value)
    assert "diary-logs 1.0, entry point 'diary' of treepack.formats: " in sentence
    assert words in sentence


@pytest.mark.parametrize("words", ["formats", "build-trie r.jsonl --out trie", "stats r.jsonl"])
@pytest.mark.parametrize("fault", ["exits at import", "exits"])
def test_a_package_that_exits_does_not_end_a_command_with_status_0(
    tmp_path: Path, fresh: pytest.MonkeyPatch, treepack: Run, words: str, fault: str
) -> None:
    old, new, sentence = FAULTS[fault]
    fresh.syspath_prepend(installed(tmp_path, module=MODULE.replace(old, new, 1)))
    fresh.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text('{"diary": [5, 6], "wrote": [7]}\n')
    result = treepack(*words.split())
    if (words, fault) == ("formats", "exits"):  # it reads nothing
        assert result.status == 0
        return
    assert result.status == 1
    assert f"diary-logs 1.0, entry point 'diary' of treepack.formats: {sentence}" in result.err
    assert not (tmp_path / "trie").exists()


def test_the_ranks_of_treepacks_own_formats_differ() -> None:
    ranks = [each.rank for each in all_formats()]
    assert ranks == sorted(set(ranks))
    assert ranks[0] > 0
    assert [each.name for each in all_formats()][-3:] == ["tokens", "chat", "columns"]


def test_no_format_is_imported_before_one_is_needed() -> None:
    program = "import sys, treepack.ingest.readers.reading; print([m for m in sys.modules if 'treepack.formats' in m])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
