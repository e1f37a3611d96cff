"""A report as one self-contained HTML page: no network, no other file.

    ReportSubject, ReportFigures, PageContents --render_page--> page

The page contains page.html, page.css and the scripts of this folder, the specifications of the charts, the blocks of
the explorer, and Vega from the package vl-convert-python. Every text from a rollout is in a compressed block or
escaped, and is shown as text only. A content policy keeps the page from loading or sending anything.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from treepack import __version__
from treepack.analysis.glossary import REASONS
from treepack.analysis.summary import skipped_sentence
from treepack.report.causes import LostSharing
from treepack.report.charts import charts, renderer
from treepack.report.contents import PageContents
from treepack.report.figures import ReportFigures, ReportSubject
from treepack.report.payload import compress, explorer_settings, payload
from treepack.report.words import CAUSES, captions, gain, headline, lost_sentence, percent, report_summary

# The scripts of every page; start.js or live/run.js comes last.
SCRIPTS = ("data.js", "colours.js", "layout.js", "tree.js", "text.js", "list.js", "page.js")
# Text near the beginning of page.html, by which --overwrite recognises a page of treepack.
MARK = '<meta name="generator" content="treepack report'


def render_page(subject: ReportSubject, figures: ReportFigures, contents: PageContents) -> str:
    """Return the page.

    Args:
        subject: the data of the report.
        figures: its numbers, from `measure`.
        contents: its texts, roles and causes of lost sharing, from `read_contents`.

    Raises:
        TreepackError: vl-convert-python, which contains Vega, is not installed.
    """
    lists, drawn = figures.explorer, charts(figures)
    blocks, settings = payload(subject.trie, lists, contents), explorer_settings(lists, contents)
    return fill_page(
        "page.html",
        name=subject.name,
        js="\n".join(page_file(name) for name in (*SCRIPTS, "start.js")),
        sources=figures.summary,
        skipped=skipped_sentence(subject.skipped),
        headline=headline(figures),
        gain=gain(figures),
        gain_note=_gain_note(figures),
        summary=report_summary(subject, figures),
        baselines=_baselines(figures),
        tiles=_tiles(subject, figures),
        charts=drawn,
        captions=captions(subject, figures),
        lost=lost_sentence(contents.sharing, figures.totals["tokens_tree"]),
        reasons=_reasons(contents.sharing, figures.totals["tokens_tree"]),
        causes=_causes(subject, figures, contents.sharing),
        text_note=_text_note(contents),
        has_text=contents.texts is not None,
        footer=_footer(subject),
        counts=[(what, f"{number:,}") for what, number in (subject.counts or {}).items()],
        settings=as_json({"charts": {chart.name: chart.spec for chart in drawn}} | settings),
        blocks=[*blocks.items(), ("vega", compressed_vega())],
    )


def fill_page(template: str, **values: Any) -> str:
    """Return a page of this folder, or of the folder `live`, with its values; names and sentences are escaped."""
    from jinja2 import Environment, FunctionLoader

    # autoescape: names, counts and sentences come from rollouts. css, js and blocks are marked safe in the templates.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(page_file))
    return environment.get_template(template).render(version=__version__, css=page_file("page.css"), **values)


def as_json(value: Any) -> str:
    """Return JSON for a data block of a page."""
    # No "</script>" may end the block early, whatever a rollout contains.
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


@cache
def vega() -> str:
    """Return the JavaScript of Vega, Vega-Lite and Vega-Embed, which takes three seconds to make.

    Raises:
        TreepackError: vl-convert-python is not installed.
    """
    return str(renderer().javascript_bundle("window.vegaEmbed = vegaEmbed;"))


@cache
def compressed_vega() -> str:
    """Return `vega` as the block of a page.

    Raises:
        TreepackError: vl-convert-python is not installed.
    """
    return compress(vega().encode(), level=9)


def page_file(name: str) -> str:
    """Return the text of a file of the page."""
    return resources.files("treepack.report").joinpath(name).read_text(encoding="utf-8")


def _baselines(figures: ReportFigures) -> list[dict[str, Any]]:
    """Return the bars beside the headline: the tokens of each baseline, and then the tokens of the tree."""
    entries = figures.forecast["baselines"]
    decisive = figures.forecast["gain"]["baseline"]
    chosen = next(entry for entry in entries if entry["baseline"] == decisive)
    computed, capacity = chosen["tokens_computed"], chosen["capacity"]
    most = max([computed, *(entry["tokens_flat"] for entry in entries)])
    bars = [
        {
            "what": entry["label"],
            "tokens": entry["tokens_flat"],
            "gain": f"{entry['speedup']:.1f}x",
            "kind": "decisive" if entry["baseline"] == decisive else "other",
        }
        for entry in sorted(entries, key=lambda entry: (entry["baseline"] != decisive, entry["tokens_flat"]))
    ]
    rows = "the tree, in rows" + ("" if capacity is None else f" of {capacity:,} tokens")
    bars.append({"what": rows, "tokens": computed, "gain": "", "kind": "tree"})
    return [bar | {"value": f"{bar['tokens']:,}", "share": f"{100 * bar['tokens'] / most:.2f}"} for bar in bars]


def _gain_note(figures: ReportFigures) -> str:
    notes = [f"{note[0].upper()}{note[1:]}." for note in figures.forecast["notes"]]
    return " ".join([f"A forecast of floating-point operations, for {figures.forecast['model']}.", *notes])


def _reasons(sharing: LostSharing, tokens_tree: int) -> list[dict[str, str]]:
    """Return the parts of the bar of stored tokens by reason."""
    return [
        {
            "name": name.replace(" ", "-"),
            "what": REASONS[name],
            "value": f"{tokens:,}",
            "share": percent(tokens / tokens_tree),
        }
        | {"width": f"{100 * tokens / tokens_tree:.3f}"}
        for name, tokens in sharing.reasons.items()
        if tokens
    ]


def _causes(subject: ReportSubject, figures: ReportFigures, sharing: LostSharing) -> list[dict[str, Any]]:
    """Return the rows of the section on lost sharing."""
    ids: list[str] = subject.trie.trajectories["trajectory_id"].to_pylist()
    total = figures.totals["tokens_tree"]
    return [
        {
            "name": cause.name,
            "meaning": CAUSES.get(cause.name, ""),
            "tokens": f"{cause.tokens:,}",
            "share": percent(cause.tokens / total),
            "width": f"{100 * cause.tokens / max(1, sharing.causes[0].tokens):.2f}",
            "places": cause.num_places,
            "examples": [
                {
                    "id": ids[one.trajectory],
                    "other": ids[one.other],
                    "sample": one.trajectory,
                    "at": one.position,
                    "lost": f"{one.lost:,}",
                    "position": f"{one.position:,}",
                    "before": one.before,
                    "texts": [(ids[one.other], one.expected), (ids[one.trajectory], one.actual)],
                }
                for one in cause.examples
            ],
        }
        for cause in sharing.causes
    ]


def _tiles(subject: ReportSubject, figures: ReportFigures) -> list[tuple[str, str]]:
    totals, packed = figures.totals, subject.packed
    tiles = [
        ("rollouts", f"{len(figures.rollouts.names):,}"),
        ("trajectories", f"{totals['num_trajectories']:,}"),
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


def _text_note(contents: PageContents) -> str:
    texts = contents.texts
    if texts is None:
        return "This page contains no text (--no-text)."
    sentences = []
    if not contents.decoded:
        sentences.append("The page shows token ids, not text, because no tokenizer is known (--tokenizer).")
    elif not contents.headers:
        sentences.append("Roles are not shown, because the headers of the chat template are not known.")
    if texts.kept is not None:
        kept = f"the first {texts.kept:,} tokens" if texts.kept else "no token"
        left_out = f"{texts.tokens_left_out:,} are left out (--text-limit)"
        sentences.append(f"The page contains {kept} of each node: {left_out}.")
    return " ".join(sentences)


def _footer(subject: ReportSubject) -> str:
    text = f"Made by treepack {__version__} from {subject.name}."
    if subject.rebuilt:
        text += " The trie was rebuilt from the rows, because the trie they were packed from is missing."
    return text
