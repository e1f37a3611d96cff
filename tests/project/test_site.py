"""The site has the pages of docs/ in the order of their index; `make site` checks its links."""

from __future__ import annotations

import re

from support.paths import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text()


def test_the_navigation_is_that_of_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    parts = re.findall(r"^\*\*(.+)\*\*$|^- (.+)", index, re.MULTILINE)
    expected = ["index.md"]
    for heading, line in parts:
        expected += [heading] if heading else re.findall(r"\]\(([\w-]+\.md)\)", line)
    nav = CONFIG.split("\nnav:\n")[1]
    shown = [page or heading for heading, page in re.findall(r"^ +- (.+?):(?: ([\w-]+\.md))?$", nav, re.MULTILINE)]
    assert shown == expected
    assert len(expected) > 30


def test_a_link_to_nothing_is_a_warning_and_a_warning_an_error() -> None:
    validation = CONFIG.split("\nvalidation:\n")[1].split("\nnav:\n")[0]
    assert set(re.findall(r"\w+: (\w+)$", validation, re.MULTILINE)) == {"warn"}
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()


def test_pages_link_only_to_pages() -> None:
    outside = {
        f"{path.name}: {link}"
        for path in (ROOT / "docs").glob("*.md")
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text())
        if "://" not in link and not (ROOT / "docs" / link).is_file()
    }
    assert outside == set()
