"""The changelog has the version of the package, and the numbers of all formats on disk."""

from __future__ import annotations

import re
from importlib import import_module

import treepack
from support.command_line import Run
from support.paths import ROOT
from treepack.files import schema

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", CHANGELOG, re.MULTILINE | re.DOTALL))
# Modules with the format and the number of one kind of file.
MODULES = (
    "treepack.pack.plan.files",
    "treepack.rollout.output",
    "treepack.train.saving.checkpoint_files",
    "treepack.train.saving.run_directory",
    "treepack.research.predictor.model",
)


def test_the_newest_section_is_that_of_the_package() -> None:
    assert next(iter(SECTIONS)) == treepack.__version__
    assert len(SECTIONS[treepack.__version__].splitlines()) < 150


def test_the_version_has_the_numbers_of_all_formats() -> None:
    modules = [import_module(name) for name in MODULES]
    expected = {module.FORMAT: module.VERSION for module in modules} | {
        schema.TRIE_FORMAT: schema.FORMAT_VERSION,
        schema.PACKED_FORMAT: schema.FORMAT_VERSION,
        schema.SELECTION_FORMAT: schema.SELECTION_VERSION,
    }
    table = re.findall(r"^\| .+ \| `(treepack-\w+)` \| (\d+) \|$", SECTIONS[treepack.__version__], re.MULTILINE)
    assert {name: int(number) for name, number in table} == expected


def test_no_format_is_left_out() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "treepack").rglob("*.py"))
    assigned = set(re.findall(r'^\w*FORMAT(?:, VERSION)? = "(treepack-[\w-]+)"', code, re.MULTILINE))
    assert len(assigned) == 8
    assert [name for name in sorted(assigned) if f"`{name}`" not in CHANGELOG] == []


def test_the_command_prints_the_version_of_the_code(treepack: Run) -> None:
    result = treepack("--version")
    assert result.status == 0
    assert result.out.startswith(f"treepack {next(iter(SECTIONS))}\n")
