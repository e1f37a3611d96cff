"""The notebook of the first hour runs, and its stored results are those of the code."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import run_notebook
from packaging.requirements import Requirement

from support.paths import ROOT

PATH = ROOT / "examples" / "first_hour.ipynb"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NOTEBOOK = json.loads(PATH.read_text(encoding="utf-8"))


def number(word: str) -> float | None:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        return None


def site_of_demo(folder: Path) -> Path:
    """Fill a folder with links to the packages that `make demo` installs, and to no others."""
    rule = re.findall(r"run\.stamp:.*?\n\n", MAKEFILE, re.DOTALL)[0]
    extras = re.findall(r"'\.\[([\w,]+)\]'", rule)[0]
    waiting, known = [("treepack", extra) for extra in extras.split(",")], set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in known:
            continue
        known.add((name, extra))
        package = distribution(name)
        for entry in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / entry
            if not link.exists() and not entry.startswith("__editable__") and not entry.endswith(".pth"):
                link.symlink_to(str(package.locate_file(entry)))
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, each) for each in ("", *requirement.extras)]
    return folder


@pytest.mark.slow
def test_cells_print_and_draw_what_is_stored_in_the_environment_of_make_demo(tmp_path: Path) -> None:
    (site := tmp_path / "site").mkdir()
    copy = tmp_path / PATH.name
    shutil.copy(PATH, copy)
    paths = os.pathsep.join(map(str, (site_of_demo(site), ROOT)))
    # Without the module `site`, the environment of the tests is not on the path.
    command = [sys.executable, "-S", str(ROOT / "tools" / "run_notebook.py"), str(copy)]
    run = subprocess.run(
        command, cwd=PATH.parent, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    num_pictures = 0
    for cell, again in zip(
        run_notebook.code_cells(NOTEBOOK),
        run_notebook.code_cells(json.loads(copy.read_text(encoding="utf-8"))),
        strict=True,
    ):
        stored, words = ("".join(printed(each)).split() for each in (cell, again))
        # Losses differ in the last digits from machine to machine; everything else is equal.
        assert [word for word in words if number(word) is None] == [word for word in stored if number(word) is None]
        values, expected = ([x for word in each if (x := number(word)) is not None] for each in (words, stored))
        assert values == pytest.approx(expected, rel=0.03)
        assert len(pictures(cell)) == len(pictures(again))
        assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures(cell) + pictures(again))
        num_pictures += len(pictures(again))
    assert num_pictures == 4


def printed(cell: dict[str, Any]) -> list[str]:
    return [line for out in cell["outputs"] if out["output_type"] == "stream" for line in out["text"]]


def pictures(cell: dict[str, Any]) -> list[str]:
    return [out["data"]["image/png"] for out in cell["outputs"] if out["output_type"] == "display_data"]


def test_every_import_is_installed_by_make_demo(tmp_path: Path) -> None:
    modules = {
        name.split(".")[0]
        for cell in run_notebook.code_cells(NOTEBOOK)
        for node in ast.walk(ast.parse("".join(cell["source"])))
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    } - {"treepack", *sys.stdlib_module_names}
    installed = {path.name.split(".")[0] for path in site_of_demo(tmp_path).iterdir()}
    assert modules == {"numpy", "torch", "vl_convert"}
    assert modules <= installed
    assert "pytest" not in installed


def test_it_reads_looks_packs_and_trains() -> None:
    texts = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"]
    headings = [line for text in texts for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# The first hour", "## Read", "## Look", "## Pack", "## Train", "## Next"]
    assert (NOTEBOOK["nbformat"], len({cell["id"] for cell in NOTEBOOK["cells"]})) == (4, len(NOTEBOOK["cells"]))


def test_an_error_in_a_cell_names_the_cell() -> None:
    broken = {"cells": [{"cell_type": "code", "source": ["x = 1\n"]}, {"cell_type": "code", "source": ["x / 0"]}]}
    with pytest.raises(ZeroDivisionError) as failed:
        list(run_notebook.run_cells(broken, "broken.ipynb"))
    assert failed.traceback[-1].frame.code.raw.co_filename == "broken.ipynb, code cell 2"
