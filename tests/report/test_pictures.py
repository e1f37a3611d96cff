"""Pictures of a report: the charts of the page in colours of their own, and the tree as a drawing of its segments."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from support.strategies import make
from treepack.costs.model_cost import read_shape
from treepack.report.charts import charts
from treepack.report.contents import PageContents, read_contents
from treepack.report.figures import ReportFigures, ReportSubject, measure
from treepack.report.outline import outline
from treepack.report.pictures import PICTURES, light_colours, printed_spec, write_pictures
from treepack.report.tree_picture import HEIGHT, LEFT, WIDTH, PictureScale, tree_svg
from treepack.trie.builders.in_memory import build_trie

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '</text><script>a & "b"\x1b\u200b'


@pytest.fixture(scope="module")
def report() -> tuple[ReportSubject, ReportFigures, PageContents]:
    """Return one group with a trained branch, a rollout that ends inside another one, and names full of markup."""
    made = [
        make(f"{NASTY}0", [1, 2, 3, 4, 5], group=NASTY, reward=1.0, spans=[(2, 5, 1.0)]),
        make(f"{NASTY}1", [1, 2, 3, 6, 7, 8], group=NASTY, reward=0.0),
        make(f"{NASTY}2", [1, 2, 3], group=NASTY, reward=0.5),
    ]
    subject = ReportSubject("made", build_trie(made))
    figures = measure(subject, read_shape("qwen3-8b"))
    return subject, figures, read_contents(subject.trie, None, limit=None)


def test_every_picture_is_a_png_of_its_size(
    report: tuple[ReportSubject, ReportFigures, PageContents], tmp_path: Path
) -> None:
    written = write_pictures(*report, tmp_path)
    assert sorted(path.name for path in written) == sorted(PICTURES)
    for name in PICTURES:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG"), name
        # 300 dots per inch: 7 x 3.6 inches for the tree, 4.2 x 2.6 for a chart
        assert struct.unpack(">II", data[16:24]) == ((2100, 1080) if name == "tree.png" else (1260, 780)), name


def test_a_printed_chart_needs_no_colour_or_size_of_a_page(
    report: tuple[ReportSubject, ReportFigures, PageContents],
) -> None:
    colours = light_colours()
    assert colours["card"] == "#ffffff"
    for chart in charts(report[1]):
        spec = printed_spec(chart, colours)
        assert "var(" in str(chart.spec)
        assert [word for word in ("var(", "system-ui", "container") if word in str(spec)] == []
        assert len(spec["data"]["values"]) == len(chart.spec["data"]["values"])


def test_the_drawn_tree_has_all_segments_and_no_markup_of_a_rollout(
    report: tuple[ReportSubject, ReportFigures, PageContents],
) -> None:
    subject, figures, contents = report
    svg = ElementTree.fromstring(tree_svg(subject, figures, contents, light_colours()))
    assert {element.tag for element in svg.iter()} == {SVG + tag for tag in ("svg", "rect", "defs", "pattern", "text")}
    rectangles = svg.findall(f"{SVG}rect")
    fills = [rectangle.get("fill") for rectangle in rectangles]
    # 1 2 | 3, then 4 5 and 6 7 8; only 1 2 is not trained, and one hatch is in the legend
    assert fills.count("none") == len(outline(subject.trie, np.arange(3), figures.rollouts))
    assert fills.count("url(#hatch)") == 4
    assert all(float(each.get("x", 0)) + float(each.get("width", 0)) <= WIDTH for each in rectangles)
    assert all(float(each.get("y", 0)) + float(each.get("height", 0)) <= HEIGHT for each in rectangles)
    texts = [element.text or "" for element in svg.findall(f"{SVG}text")]
    assert any(text.startswith('</text><script>a & "b"') for text in texts)
    assert "\x1b" not in "".join(texts)


def test_a_folded_prompt_takes_its_share_of_the_width() -> None:
    # 800 of 1,000 tokens are the prompt, which is drawn as wide as 100 tokens
    scale = PictureScale(prompt=800, folded=100.0, end=1000, rows=2, right=LEFT + 300.0)
    assert [scale.x(token) for token in (0, 400, 800, 900, 1000)] == [LEFT + x for x in (0, 50, 100, 200, 300)]
