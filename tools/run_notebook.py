"""Run the code cells of a notebook in one namespace, without Jupyter, and write what they print and draw into it.

    python tools/run_notebook.py examples/first_hour.ipynb

    cells --exec, one after the other--> printed text, and the last value if it draws a PNG --write--> the same file

The tests run the cells in the same way and compare the text with the file, so a notebook with old results fails.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Shown(NamedTuple):
    """What a cell prints and draws: text, and pictures as PNG."""

    text: str
    pictures: list[bytes]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that are code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cells(notebook: dict[str, Any], name: str) -> Iterator[Shown]:
    """Run the code cells in order and yield what each one shows; `name` is the file in tracebacks."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        source = "".join(cell["source"])
        tree = ast.parse(source, f"{name}, code cell {number}")
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
        namespace["_"] = None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.fix_missing_locations(tree), f"{name}, code cell {number}", "exec"), namespace)
        draw = getattr(namespace["_"], "_repr_png_", None)  # as Jupyter asks the last value of a cell
        yield Shown(printed.getvalue(), [draw()] if draw else [])


def outputs(shown: Shown) -> list[dict[str, Any]]:
    """Return the outputs of a cell in the format of notebooks."""
    text = (
        [{"name": "stdout", "output_type": "stream", "text": shown.text.splitlines(keepends=True)}]
        if shown.text
        else []
    )
    pictures = [
        {
            "data": {"image/png": base64.b64encode(picture).decode("ascii")},
            "metadata": {},
            "output_type": "display_data",
        }
        for picture in shown.pictures
    ]
    return [*text, *pictures]


def main(argv: list[str]) -> None:
    """Run a notebook and write its outputs."""
    path = Path(argv[0])
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, shown) in enumerate(
        zip(code_cells(notebook), run_cells(notebook, path.name), strict=True), start=1
    ):
        cell["outputs"], cell["execution_count"] = outputs(shown), number
        print(f"cell {number}: {len(shown.text.splitlines())} lines, {len(shown.pictures)} pictures")
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
