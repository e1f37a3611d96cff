"""A report as one HTML page that needs nothing else: no network, no other file.

    Subject, Figures, Texts --render--> page

The page is page.html, page.css and the three scripts beside this file, the specifications of the charts, the blocks of
the explorer, and Vega, which the package vl-convert-python brings. All that rollouts say is in compressed blocks or
escaped, is shown as text only, and a content policy keeps the page from loading or sending anything.
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
from treepack.errors import TreepackError

SCRIPTS = ("data.js", "tree.js", "page.js")
MARK = '<meta name="generator" content="treepack report'


def render(
    subject: Subject,
    figures: Figures,
    texts: Texts | None,
    *,
    decoded: bool = True,
    special: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        subject: what is reported on.
        figures: what `measure` found in it.
        texts: the texts of its nodes; None leaves all text out.
        decoded: whether they are text rather than token ids.
        special: special tokens, which are shown paler than the text around them.

    Raises:
        TreepackError: the package that brings Vega is not installed.
    """
    from jinja2 import Environment

    blocks = payload(subject.trie, figures, texts)
    blocks["vega"] = base64.b64encode(gzip.compress(vega().encode(), 9, mtime=0)).decode("ascii")
    drawn = charts(figures)
    settings = {
        "charts": {chart.name: chart.spec for chart in drawn},
        "text": "none" if texts is None else "text" if decoded else "ids",
        "firstNode": [] if texts is None else texts.first_node,
        "special": sorted(special, key=lambda token: (-len(token), token)),
        "kept": None if texts is None else texts.kept,
    }
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
        made=_made(subject),
        counts=[(what, f"{number:,}") for what, number in (subject.counts or {}).items()],
        settings=json.dumps(settings, separators=(",", ":")).replace("<", "\\u003c"),
        blocks=list(blocks.items()),
    )


def vega() -> str:
    """The JavaScript of Vega, Vega-Lite and Vega-Embed.

    Raises:
        TreepackError: vl-convert-python is not installed.
    """
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise TreepackError(f"charts cannot be drawn ({error}); pip install 'treepack[report]'") from error
    return _bundle()


@cache
def _bundle() -> str:
    """What takes three seconds to put together."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _file(name: str) -> str:
    return resources.files("treepack.analysis.report").joinpath(name).read_text(encoding="utf-8")


def _totals(subject: Subject, figures: Figures) -> list[dict[str, Any]]:
    flat = figures.totals["tokens_flat"]
    found = [("every rollout alone", flat, "flat")]
    if subject.packed is not None:
        found.append(("in packed rows", subject.packed.totals["tokens_packed"], "packed"))
    found.append(("every shared prefix once", figures.totals["tokens_tree"], "tree"))
    return [
        {"what": what, "value": f"{tokens:,}", "kind": kind, "share": f"{100 * min(1, tokens / flat):.2f}"}
        for what, tokens, kind in found
    ]


def _tiles(subject: Subject, figures: Figures) -> list[tuple[str, str]]:
    totals, packed = figures.totals, subject.packed
    found = [
        ("rollouts", f"{totals['num_trajectories']:,}"),
        ("groups", f"{totals['num_groups']:,}"),
        ("trees", f"{totals['num_trees']:,}"),
        ("nodes", f"{totals['num_nodes']:,}"),
        ("trained tokens", f"{totals['tokens_trained']:,}"),
        ("POR", percent(totals["por"])),
    ]
    if packed is not None:
        found += [("ERR", percent(packed.totals["err"])), ("rows", f"{packed.totals['num_rows']:,}")]
        found += [("fill", percent(packed.totals["fill"]))]
    return found


def _text_note(texts: Texts | None, *, decoded: bool) -> str:
    if texts is None:
        return "This page holds no text (--no-text)."
    told = [] if decoded else ["Token ids stand for text, because no tokenizer is at hand (--tokenizer)."]
    if texts.kept is not None:
        kept = f"the first {texts.kept:,} tokens" if texts.kept else "no token"
        told.append(f"Of each node the page holds {kept}: {texts.tokens_left_out:,} are left out (--text-limit).")
    return " ".join(told)


def _made(subject: Subject) -> str:
    told = f"Made by treepack {__version__} from {subject.name}."
    if subject.rebuilt:
        told += " The trie was built anew from the rows, because the one they lay out is not there."
    return told
