"""The notebook of the first hour runs, and its stored results are those of the code."""

from __future__ import annotations

import base64
import json

import pytest
import run_notebook

from support.paths import ROOT

PATH = ROOT / "examples" / "first_hour.ipynb"
NOTEBOOK = json.loads(PATH.read_text(encoding="utf-8"))


def number(word: str) -> float | None:
    try:
        return float(word.replace(",", ""))
    except ValueError:
        return None


@pytest.mark.slow
def test_cells_print_and_draw_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PATH.parent)
    cells = run_notebook.code_cells(NOTEBOOK)
    num_pictures = 0
    for cell, shown in zip(cells, run_notebook.run_cells(NOTEBOOK, PATH.name), strict=True):
        printed = [line for out in cell["outputs"] if out["output_type"] == "stream" for line in out["text"]]
        words, stored = shown.text.split(), "".join(printed).split()
        # Losses differ in the last digits from machine to machine; everything else is equal.
        assert [word for word in words if number(word) is None] == [word for word in stored if number(word) is None]
        values, expected = ([x for word in each if (x := number(word)) is not None] for each in (words, stored))
        assert values == pytest.approx(expected, rel=0.03)
        pictures = [out["data"]["image/png"] for out in cell["outputs"] if out["output_type"] == "display_data"]
        assert len(shown.pictures) == len(pictures)
        assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
        num_pictures += len(pictures)
    assert num_pictures == 4


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
