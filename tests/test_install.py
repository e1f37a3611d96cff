"""The installed package as a user meets it: importable everywhere, with install commands that name real extras."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.paths import ROOT


def test_the_package_is_imported_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "treepack" / "docs").mkdir(parents=True)  # as a clone named treepack lies in its parent folder
    program = "import treepack; print(treepack.__version__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)


WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *a: None if name.partition(".")[0] == "triton" else find(name, *a))

from treepack import build_trie_directory, load_model, make_batch, pack_trie, plan_packing, read_to_trie, row_loss
from treepack_cli import main

trie, _ = read_to_trie("sample_data/tokens.jsonl")
loaded = load_model("sample_data/tiny-qwen3.json")
row_loss(loaded, make_batch(next(iter(plan_packing(trie))))).backward()
assert all(weight.grad is not None for weight in loaded.model.parameters())
out = sys.argv[1]
build_trie_directory("sample_data/tokens.jsonl", f"{out}/trie")
pack_trie(f"{out}/trie", f"{out}/packed")
sys.argv[1:] = f"train {out}/packed --model sample_data/tiny-qwen3.json --steps 1 --out {out}/model".split()
try:
    main()
except SystemExit as end:
    assert not end.code
print("triton" in sys.modules)
"""


@pytest.mark.slow
def test_a_cpu_trains_without_triton(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "model" / "config.json").is_file()


def test_triton_is_a_need_of_the_tests_alone() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name, packages in extras.items() if any("triton" in each for each in packages)] == ["dev"]


def test_every_folder_of_the_library_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "treepack").rglob("__init__.py")]
    assert len(folders) > 30
    assert {".".join(folder.parts) for folder in folders} <= set(packages)


def test_every_install_command_names_extras_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    pages = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").glob("*.md"))]
    code = [path for folder in ("treepack", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]
    named: list[str] = []
    for path in [*pages, *code]:
        text = path.read_text(encoding="utf-8")
        assert "treepack[" not in re.sub(r"`[^`]*`", "", text), f"{path}: no index has a package of this name"
        named += [name for group in re.findall(r"'\.\[([\w,-]+)\]'", text) for name in group.split(",")]
        named += re.findall(r"install_hint\(['\"](\w+)", text)
    assert set(named) <= extras
    assert {"train", "report"} <= set(named)
