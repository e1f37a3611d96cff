"""The page of a run, in parts that the server sends, or as one file that needs no network.

RunWatch --live_page--> HTML          style, scripts, events and rollouts come from the server
RunWatch --whole_page--> HTML         everything is inside, with the explorer of the newest steps

Every text of the run is in JSON of a data block, or escaped.
"""

from __future__ import annotations

from typing import Any

from treepack.report.live.step_rollouts import StepRollouts
from treepack.report.live.watch import RunWatch, as_bytes
from treepack.report.page import SCRIPTS, as_json, compressed_vega, fill_page, page_file
from treepack.report.payload import compress
from treepack.report.words import printable

_TEMPLATE = "live/run.html"
_EMPTY: dict[str, Any] = {"special": [], "roles": [], "headers": [], "firstNode": [], "kept": None, "text": "none"}


def page_scripts() -> str:
    """Return the scripts of the page."""
    return "\n".join(page_file(name) for name in (*SCRIPTS, "live/run.js"))


def live_page(watch: RunWatch) -> str:
    """Return the page that a server sends, which contains no data of the run but its name."""
    settings = as_json({**_EMPTY, "live": True, "hasRollouts": watch.rows is not None})
    return fill_page(_TEMPLATE, name=_name(watch), live=True, text_note="", settings=settings, blocks=[])


def whole_page(watch: RunWatch, rollouts: StepRollouts | None) -> str:
    """Return the page as one file.

    Raises:
        TreepackError: vl-convert-python, which contains Vega, is not installed.
    """
    settings = {**_EMPTY, "live": False, "hasRollouts": rollouts is not None}
    blocks = {"run": compress(as_bytes(watch.snapshot())), "vega": compressed_vega()}
    if rollouts is not None:
        settings |= {**rollouts.settings, "first": rollouts.first, "last": rollouts.last, "about": rollouts.about}
        blocks |= rollouts.blocks
    return fill_page(
        _TEMPLATE,
        name=_name(watch),
        live=False,
        text_note="",
        settings=as_json(settings),
        blocks=list(blocks.items()),
        style=page_file("live/run.css"),
        js=page_scripts(),
    )


def _name(watch: RunWatch) -> str:
    return printable(watch.folder.path.resolve().name)
