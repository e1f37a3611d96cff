"""The counter of hard phrases finds each of them, and lets the plain form pass."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path

import plain_english
import pytest

from support.paths import ROOT

SOURCE = r"""# first
url = 'a#b'  # it's one
path = r"\"#"  # two
text = '''not # "this"
or # that\'''' # ' too'''
call(f"{url}#", '"')  #: "three
"""
PAIRS = {
    "is no (is not a)": ("The value is no number.", "There is no number, and it is no longer here."),
    "nobody": ("A copy that nobody awaits.", "An asynchronous copy."),
    "of another (from a different)": ("Rows of another run.", "Rows from a different run."),
    "as many as, as few as": ("It takes as many as fit.", "It takes all rows that fit."),
    "at one time (at once)": ("Two layers at one time.", "Two layers at once, one row at a time."),
    "also if (even if)": ("It is read also if it is empty.", "It is read even if it is empty."),
    "by itself (alone)": ("Each row by itself.", "Each row alone."),
    "behind (after)": ("The token behind it.", "The token after it."),
    "where (if)": ("Where it is empty, and where there is none.", "If it is empty."),
    "those that": ("Keep those that fit.", "Keep the rows that fit."),
    "things that speak, stand or lie": ("The file says so.", "The file contains it."),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_hard_phrase_is_counted_and_its_plain_form_is_not(kind: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    hard, plain = PAIRS[kind]
    page.write_text(hard)
    assert {hit.kind for hit in plain_english.hits(page)[0]} == {kind}
    page.write_text(plain)
    assert plain_english.hits(page)[0] == []


def test_phrases_in_code_are_not_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Not `nobody`.\n```\nnobody\n```\n")
    assert plain_english.hits(page) == ([], 1)


def test_comments_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    page = tmp_path / "code.py"
    page.write_text(SOURCE)
    tokens = tokenize.generate_tokens(io.StringIO(page.read_text()).readline)
    expected = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    assert len(expected) == 5
    assert plain_english.comments(page) == expected


def test_the_table_has_a_line_for_each_group_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in plain_english.OWN:
        if name.endswith(".md"):
            (tmp_path / name).write_text("Nobody is here. There is nobody.")
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "code.py").write_text('"""A header of four words."""\n')
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    plain_english.main([])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("    in ")]
    assert [line[1] for line in lines] == list(plain_english.OWN)
    assert {line[1]: int(line[2]) for line in lines} == {name: int(name.endswith(".md")) for name in plain_english.OWN}


def test_the_rules_name_the_counter() -> None:
    assert "python docs/plain_english.py" in (ROOT / "CONTRIBUTING.md").read_text()
