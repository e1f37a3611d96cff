"""Documentation and schemas are what the code says."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

import treepack
from support.command_line import Run
from support.paths import ROOT
from support.strategies import make
from treepack.files import schema
from treepack.ingest.readers.registry import all_formats
from treepack.pack.plan.check import check_plan
from treepack.pack.plan.planning import plan_rows
from treepack.trie.builders.in_memory import build_trie


def test_generated_pages_are_current(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert import_module("generate").main() == 0
    assert capsys.readouterr() == ("", "")


def test_the_help_of_commands_does_not_depend_on_commands_before(treepack: Run) -> None:
    generate = import_module("generate")
    before = generate.cli_page()
    assert treepack("--version").status == 0
    assert generate.cli_page() == before


def test_files_for_agents_name_every_page_and_command(tmp_path: Path) -> None:
    import_module("generate").write_agent_files(tmp_path)
    pages, skill = (tmp_path / "llms.txt").read_text(), (tmp_path / "SKILL.md").read_text()
    linked = set(re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\): \S", pages, re.MULTILINE))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert [name for name in import_module("treepack_cli").SUMMARIES if f"- `treepack {name}`: " not in skill] == []
    assert skill.startswith("---\nname: treepack\ndescription: ")
    assert "treepack prepare rollouts/" in skill


def test_the_pages_that_only_the_site_has_are_complete() -> None:
    generate = import_module("generate")
    commands = import_module("treepack_cli").commands
    names = commands.list_commands(click.Context(commands))
    groups = {name: getattr(commands.get_command(None, name), "commands", {}) for name in names}
    paths = ["treepack", *(f"treepack {name}" for name in groups)]
    paths += [f"treepack {name} {below}" for name, group in groups.items() for below in group]
    assert sorted(re.findall(r"^## (.+)$", generate.cli_page(), re.MULTILINE)) == sorted(paths)
    assert len(paths) > 15
    offered = set(re.findall(r"^## (.+)$", generate.api_page(), re.MULTILINE))
    assert offered == set(treepack.__all__) - {"__version__"}
    listed = re.findall(r"^\| `([\w-]+)` \|", generate.formats_page(), re.MULTILINE)
    assert listed == 2 * [each.name for each in all_formats()]


def test_schemas_are_current() -> None:
    for name, text in schema.documents().items():
        assert (ROOT / "schemas" / name).read_text() == text


def test_readme_shows_the_commands_of_the_demo() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "").replace("$(DEMO)", "demo_out")
    readme = (ROOT / "README.md").read_text().replace("\\\n", "")
    shown = [" ".join(line.split()) for line in re.findall(r"^\$ (treepack .*)$", readme, re.MULTILINE)]
    run = [" ".join(line.split()) for line in re.findall(r"^\t(treepack .*)$", makefile, re.MULTILINE)]
    assert shown == run
    assert len(run) == 5


def test_public_names_exist() -> None:
    assert [name for name in treepack.__all__ if not hasattr(treepack, name)] == []


def test_few_names_are_offered_without_their_room() -> None:
    assert len(treepack.__all__) <= 35


def test_the_stub_has_the_types_of_all_public_names() -> None:
    text = (ROOT / "treepack" / "__init__.pyi").read_text()
    imports = re.findall(r"^from treepack\.(\S+) import (\w+) as (\w+)$", text, re.MULTILINE)
    homes = {name: home if ":" in home else f"{home}:{name}" for name, home in treepack._HOME.items()}
    assert {name: f"{home}:{own}" for home, own, name in imports} == homes


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_readme_names_every_room() -> None:
    cells = re.findall(r"^\| ([^|]*`treepack/[^|]*) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    rooms = {path.parent.name for path in (ROOT / "treepack").glob("*/__init__.py")}
    assert sorted(re.findall(r"`treepack/(\w+)/`", " ".join(cells))) == sorted(rooms)


def test_the_pages_of_the_index_are_all_pages() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_eight_files_to_read_first_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Read these eight files first")[1].split("## Rules")[0]
    assert len(re.findall(r"^\d\. `", text, re.MULTILINE)) == 8
    paths = re.findall(r"`([\w./]+\.py)`", text)
    assert paths[0] == "examples/nanotree.py"
    assert sum(len((ROOT / path).read_text().splitlines()) for path in paths) < 1500


IN_PYTHON = ("docs/your-trainer.md", "\n## The commands in Python\n")


def python_blocks(page: str, heading: str = "") -> list[str]:
    """Return the programs of a page, or of the part that starts with `heading`."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text[text.index(heading) :], re.MULTILINE | re.DOTALL)


def printed_blocks(page: str, heading: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(r"^```text\n(.*?)^```", text[text.index(heading) :], re.MULTILINE | re.DOTALL)


def test_the_quickstart_of_the_readme_is_that_of_the_page() -> None:
    assert python_blocks("README.md") == python_blocks(*IN_PYTHON)[:1]


@pytest.mark.parametrize("number", [0, 1])
def test_programs_in_python_print_what_the_page_shows(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program = python_blocks(*IN_PYTHON)[number]
    assert len(program.splitlines()) <= 12
    exec(compile(program, "docs/your-trainer.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed_blocks(*IN_PYTHON)[number]


def test_sentences_are_plain_and_code_has_comments() -> None:
    plain_english = import_module("plain_english")
    paths = [ROOT / name for name in plain_english.OWN]
    total, counts, _ = plain_english.density(paths)
    assert total <= plain_english.MAX_PER_10_000_WORDS, counts
    share = plain_english.comment_share([ROOT / name for name in plain_english.CODE])
    assert share >= plain_english.MIN_COMMENT_SHARE


def test_the_worked_tree_of_the_packing_page() -> None:
    prompt, b, d = [1] * 4, [2], [3] * 4
    sequences = {
        "A": [*prompt, 1, 1],
        "B": [*prompt, *b, 1, 1, 1, 1],
        "C": [*prompt, *b, 2, 2],
        "D": [*prompt, *d, 1],
        "E": [*prompt, *d, 2, 2, 2, 2],
    }
    trie = build_trie([make(name, tokens) for name, tokens in sequences.items()])
    page = (ROOT / "docs" / "packing.md").read_text()
    assert f"N_flat {trie.tokens_flat}, N_tree {trie.tokens_tree}, capacity 12" in page
    table = re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)?) \| ([A-E, ]+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(table) == 4
    names = trie.trajectories["trajectory_id"].to_pylist()
    for methods, rows, tokens in table:
        for method in re.findall(r"[\w-]+", methods):
            plan = plan_rows(trie, capacity=12, method=method)
            shown = {" ".join(sorted(names[i] for i in row)) for row in plan.members()}
            assert (shown, check_plan(trie, plan).tokens_packed) == (set(rows.split(", ")), int(tokens)), method
            assert plan.lower_bound == 34
