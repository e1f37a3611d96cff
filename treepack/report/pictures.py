"""The charts of a report as PNG files for papers.

    ReportFigures --write_pictures--> rewards.png, overlap-by-depth.png, ...

The charts of the page in its light colours, one file per chart. Equal figures give equal bytes under one version of
vl-convert, which is imported only when something is drawn.
"""

from __future__ import annotations

import re
from typing import Any

from treepack.files.directory import finished_file
from treepack.files.remote.address import AnyPath
from treepack.report.charts import FONT, ReportChart, Spec, charts, renderer
from treepack.report.figures import ReportFigures
from treepack.report.page import page_file
from treepack.report.words import printable

_DPI = 300  # the usual minimum of journals
_SIZE = {"width": 420, "height": 260}  # pixels of the page, 100 per inch: a column of a paper has 4.2 inches
_PIXELS_PER_INCH = 100

_FILES = {
    "reward_counts": "rewards.png",
    "pass_rates": "pass-rates.png",
    "depths": "overlap-by-depth.png",
    "lengths": "lengths.png",
    "group_overlap": "group-overlap.png",
    "group_sizes": "group-sizes.png",
    "fill": "fill.png",
    "capacities": "capacities.png",
    "rewards": "reward-by-node.png",
}
PICTURES = tuple(_FILES.values())


def write_pictures(figures: ReportFigures, directory: AnyPath, *, overwrite: bool = False) -> list[AnyPath]:
    """Write a PNG file for each chart with data, and return their paths.

    Raises:
        TreepackError: vl-convert-python is not installed, or a file cannot be written.
    """
    return [write_chart(chart, directory / _FILES[chart.name], overwrite=overwrite) for chart in charts(figures)]


def write_chart(chart: ReportChart, path: AnyPath, *, overwrite: bool = False) -> AnyPath:
    """Write a chart as a PNG file, and return its path.

    Raises:
        TreepackError: vl-convert-python is not installed, or the file cannot be written.
    """
    scale = 72 / _PIXELS_PER_INCH  # vl-convert takes 72 pixels of a chart for an inch
    picture = renderer().vegalite_to_png(printed_spec(chart, light_colours()), scale=scale, ppi=_DPI)
    with finished_file(path, overwrite=overwrite, option="--png") as temporary:
        temporary.write_bytes(picture)
    return path


def light_colours() -> dict[str, str]:
    """Return the light colours of the page by the names of its CSS variables."""
    light = page_file("page.css").split("@media")[0]
    return dict(re.findall(r"--([\w-]+): (#\w+);", light))


def printed_spec(chart: ReportChart, colours: dict[str, str]) -> Spec:
    """Return the specification of a chart with the colours, size and title that the page sets for its charts."""
    spec: Spec = _replaced(chart.spec, colours) | _SIZE | {"autosize": {"type": "fit", "contains": "padding"}}
    title = {"text": chart.title, "anchor": "start", "fontSize": 12, "color": colours["text"]}
    if chart.name == "rewards":  # the page shows the tokens of a cell in a tooltip
        spec["encoding"]["opacity"]["legend"] = {"title": "tokens"}
    return spec | {"title": title, "background": colours["card"]}


def _replaced(value: Any, colours: dict[str, str]) -> Any:
    """Return a copy in which every CSS variable is its colour, the font a common one, and all text printable."""
    if isinstance(value, dict):
        return {key: _replaced(each, colours) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, colours) for each in value]
    if not isinstance(value, str):
        return value
    variable = re.fullmatch(r"var\(--([\w-]+)\)", value)
    return "sans-serif" if value == FONT else colours[variable[1]] if variable else printable(value)
