"""Pictures of a report: the charts of the page in colours of their own."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from support.strategies import make
from treepack.costs.model_cost import read_shape
from treepack.report.charts import charts
from treepack.report.figures import ReportFigures, ReportSubject, measure
from treepack.report.pictures import PICTURES, light_colours, printed_spec, write_pictures
from treepack.trie.builders.in_memory import build_trie

NASTY = '</text><script>a & "b"\x1b\u200b'


@pytest.fixture(scope="module")
def report() -> ReportFigures:
    """Return one group with a trained branch, a rollout that ends inside another one, and names full of markup."""
    made = [
        make(f"{NASTY}0", [1, 2, 3, 4, 5], group=NASTY, reward=1.0, spans=[(2, 5, 1.0)]),
        make(f"{NASTY}1", [1, 2, 3, 6, 7, 8], group=NASTY, reward=0.0),
        make(f"{NASTY}2", [1, 2, 3], group=NASTY, reward=0.5),
    ]
    return measure(ReportSubject("made", build_trie(made)), read_shape("qwen3-8b"))


def test_every_picture_is_a_png_of_its_size(report: ReportFigures, tmp_path: Path) -> None:
    written = write_pictures(report, tmp_path)
    assert sorted(path.name for path in written) == sorted(PICTURES)
    for name in PICTURES:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG"), name
        # 300 dots per inch, 4.2 x 2.6 inches
        assert struct.unpack(">II", data[16:24]) == (1260, 780), name


def test_a_printed_chart_needs_no_colour_or_size_of_a_page(report: ReportFigures) -> None:
    colours = light_colours()
    assert colours["card"] == "#ffffff"
    for chart in charts(report):
        spec = printed_spec(chart, colours)
        assert "var(" in str(chart.spec)
        assert [word for word in ("var(", "system-ui", "container") if word in str(spec)] == []
        assert len(spec["data"]["values"]) == len(chart.spec["data"]["values"])
