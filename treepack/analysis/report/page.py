"""A report as one self-contained HTML page: no network, no other file.

    Subject, Figures, Texts --render--> page

The page contains page.html, page.css and the three scripts of this folder, the specifications of the charts, the blocks
of the explorer, and Vega from the package vl-convert-python. Every text from a rollout is in a compressed block or
escaped, and is shown as text only. A content policy keeps the page from loading or sending anything.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from treepack import __version__
from treepack.analysis.report.charts import charts
from treepack.analysis.report.figures import Figures, Subject
from treepack.analysis.report.payload import payload
from treepack.analysis.report.texts import Texts
from treepack.analysis.report.words import captions, headline, percent, summary
from treepack.errors import TreepackError, install_hint

SCRIPTS = ("data.js", "tree.js", "page.js")
# Text near the beginning of page.html, by which --overwrite recognises a page of treepack.
MARK = '<meta name="generator" content="treepack report'


def render(
    subject: Subject,
    figures: Figures,
    texts: Texts | None,
    *,
    decoded: bool = True,
    special: Sequence[str] = (),
) -> str:
    """Return the page.

    Args:
        subject: the data of the report.
        figures: its numbers, from `measure`.
        texts: the texts of its nodes; None leaves all text out.
        decoded: whether they are text, not token ids.
        special: special tokens, which are paler than the text around them.

    Raises:
        TreepackError: vl-convert-python, which contains Vega, is not installed.
    """
    from jinja2 import Environment

    blocks = payload(subject.trie, figures, texts)
    # mtime=0: a time stamp in the compressed data would change the bytes of equal pages.
    blocks["vega"] = base64.b64encode(gzip.compress(vega().encode(), 9, mtime=0)).decode("ascii")
    drawn = charts(figures)
    settings = {
        "charts": {chart.name: chart.spec for chart in drawn},
        "text": "none" if texts is None else "text" if decoded else "ids",
        "firstNode": [] if texts is None else texts.first_node,
        # Longest first, because the page joins them into one pattern, which takes the first match.
        "special": sorted(special, key=lambda token: (-len(token), token)),
        "kept": None if texts is None else texts.kept,
    }
    # autoescape: names, counts and sentences come from rollouts. css, js and blocks are marked safe in page.html.
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_file("page.html"))
    return page.render(
        version=__version__,
        name=subject.name,
        css=_file("page.css"),
        js="\n".join(_file(name) for name in SCRIPTS),
        headline=headline(figures.totals["por"]),
        verdict=f"{figures.verdict[0].upper()}{figures.verdict[1:]}.",
        verdict_note=f"A forecast: floating-point operations of {figures.model}, flat packing over tree.",
        summary=summary(subject, figures),
        totals=_totals(subject, figures),
        tiles=_tiles(subject, figures),
        charts=drawn,
        captions=captions(subject, figures),
        text_note=_text_note(texts, decoded=decoded),
        footer=_footer(subject),
        counts=[(what, f"{number:,}") for what, number in (subject.counts or {}).items()],
        # No "</script>" may end the block early, whatever a rollout contains.
        settings=json.dumps(settings, separators=(",", ":")).replace("<", "\\u003c"),
        blocks=list(blocks.items()),
    )


def vega() -> str:
    """Return the JavaScript of Vega, Vega-Lite and Vega-Embed.

    Raises:
        TreepackError: vl-convert-python is not installed.
    """
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise TreepackError(f"charts cannot be drawn ({error}); {install_hint('report')}") from error
    return _bundle()


@cache
def _bundle() -> str:
    """Return the bundle of Vega's packages, which takes three seconds to make."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _file(name: str) -> str:
    return resources.files("treepack.analysis.report").joinpath(name).read_text(encoding="utf-8")


def _totals(subject: Subject, figures: Figures) -> list[dict[str, Any]]:
    flat = figures.totals["tokens_flat"]
    bars = [("every rollout alone", flat, "flat")]
    if subject.packed is not None:
        bars.append(("in packed rows", subject.packed.totals["tokens_packed"], "packed"))
    bars.append(("every shared prefix once", figures.totals["tokens_tree"], "tree"))
    return [
        {"what": what, "value": f"{tokens:,}", "kind": kind, "share": f"{100 * min(1, tokens / flat):.2f}"}
        for what, tokens, kind in bars
    ]


def _tiles(subject: Subject, figures: Figures) -> list[tuple[str, str]]:
    totals, packed = figures.totals, subject.packed
    tiles = [
        ("rollouts", f"{totals['num_trajectories']:,}"),
        ("groups", f"{totals['num_groups']:,}"),
        ("trees", f"{totals['num_trees']:,}"),
        ("nodes", f"{totals['num_nodes']:,}"),
        ("trained tokens", f"{totals['tokens_trained']:,}"),
        ("POR", percent(totals["por"])),
    ]
    if packed is not None:
        tiles += [("ERR", percent(packed.totals["err"])), ("rows", f"{packed.totals['num_rows']:,}")]
        tiles += [("fill", percent(packed.totals["fill"]))]
    return tiles


def _text_note(texts: Texts | None, *, decoded: bool) -> str:
    if texts is None:
        return "This page contains no text (--no-text)."
    sentences = [] if decoded else ["The page shows token ids, not text, because no tokenizer is known (--tokenizer)."]
    if texts.kept is not None:
        kept = f"the first {texts.kept:,} tokens" if texts.kept else "no token"
        left_out = f"{texts.tokens_left_out:,} are left out (--text-limit)"
        sentences.append(f"The page contains {kept} of each node: {left_out}.")
    return " ".join(sentences)


def _footer(subject: Subject) -> str:
    text = f"Made by treepack {__version__} from {subject.name}."
    if subject.rebuilt:
        text += " The trie was rebuilt from the rows, because the trie they were packed from is missing."
    return text
