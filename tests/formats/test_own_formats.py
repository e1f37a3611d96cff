"""Formats of other packages, which register under the entry point group `treepack.formats`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
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


def test_it_comes_before_the_formats_of_treepack(tmp_path: Path, fresh: pytest.MonkeyPatch) -> None:
    fresh.syspath_prepend(installed(tmp_path))
    record = Record("r:1", "r", {"diary": [5], "wrote": [6], "input_ids": [5, 6], "loss_mask": [0, 1]})
    assert detect_format(record) == "diary"


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


def test_an_entry_point_that_is_not_a_format_is_refused(tmp_path: Path, fresh: pytest.MonkeyPatch) -> None:
    sentence = refusal(installed(tmp_path, value="diary_logs:read_diary"), fresh)
    assert sentence.endswith("has the type function; expected a Format of treepack.ingest.readers")


def test_the_ranks_of_treepacks_own_formats_differ() -> None:
    ranks = [each.rank for each in all_formats()]
    assert ranks == sorted(set(ranks))
    assert ranks[0] > 0
    assert [each.name for each in all_formats()][-3:] == ["tokens", "chat", "columns"]


def test_no_format_is_imported_before_one_is_needed() -> None:
    program = "import sys, treepack.ingest.readers.reading; print([m for m in sys.modules if 'treepack.formats' in m])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
