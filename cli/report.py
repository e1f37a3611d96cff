"""`treepack report`: the sharing in rollouts, a trie or a packed directory, as one page or as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treepack.analysis.options import ReportOptions

from .output import quoted, show, show_end
from .paths import LOOK, READ, WRITE
from .planning import search_options
from .progress import progress_bars, quiet_option
from .reading import reading_options
from .sizes import TokenCounts

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.ingest.options import BuildOptions
    from treepack.pack.options import PackOptions
    from treepack.report.write import ReportSummary

USUAL = ReportOptions()


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=LOOK)
@click.option("--out", type=WRITE, metavar="FILE", help="HTML page to write.")
@click.option("--png", type=WRITE, metavar="DIRECTORY", help="Directory to write PNG pictures to.")
@click.option(
    "--trie",
    "trie_path",
    type=READ,
    help="Trie of a packed directory; default: the one it was packed from, or else one built from its rows.",
)
@click.option(
    "--capacity",
    type=TokenCounts(),
    help="Capacities at which ERR is compared with POR; default: powers of two that every rollout fits.",
)
@click.option(
    "--model",
    metavar="NAME|PATH",
    default=USUAL.model,
    show_default=True,
    help="Forecast for this model: a preset or a config.json; see docs/forecast.md.",
)
@click.option("--no-text", is_flag=True, help="Leave the text of the rollouts out of the page.")
@click.option(
    "--text-limit",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    default=USUAL.text_limit,
    show_default=True,
    help="Maximum number of tokens shown as text; every node shows the same number of its first tokens.",
)
@search_options(USUAL.pack.effort)
@reading_options
@click.option("--overwrite", is_flag=True, help="Replace existing outputs.")
@quiet_option
def report(
    paths: tuple[str, ...],
    out: AnyPath | None,
    png: AnyPath | None,
    trie_path: AnyPath | None,
    capacity: tuple[int, ...] | None,
    model: str,
    no_text: bool,
    text_limit: int,
    search: PackOptions,
    build: BuildOptions,
    overwrite: bool,
) -> None:
    """Write a page about the sharing of rollouts and the causes of lost sharing: charts, and an explorer of the trees.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie. The page is one file that needs no
    network. Texts are decoded by the tokenizer that the trie was built with, or --tokenizer; without one, token ids are
    shown. Everyone who gets the page can read the texts: leave them out with --no-text.
    """
    from treepack.report.write import write_report

    if out is None and png is None:
        raise click.UsageError("give --out for a page, --png for pictures, or both")
    options = ReportOptions(
        build=build,
        capacities=capacity or (),
        pack=search,
        model=model,
        trie=trie_path,
        text=not no_text,
        text_limit=text_limit,
    )
    with progress_bars() as progress:
        summary = write_report(
            paths,
            page=out,
            pictures=png,
            options=options,
            overwrite=overwrite,
            progress=progress,
            note=lambda remark: click.echo(f"note: {remark}", err=True),
        )
    if summary.page is not None:
        show({"page": str(summary.page), "bytes": summary.page_bytes, **_text_rows(summary)})
    if summary.pictures is not None:
        show({"pictures": str(summary.pictures)})
    show_end(out, png, then=None if out is None else f"open {quoted(out)} in a browser")


def _text_rows(summary: ReportSummary) -> dict[str, Any]:
    """Return the rows of the output about the text in the page."""
    if not summary.has_text:
        return {"text": "left out"}
    text = "decoded" if summary.decoded else "token ids, because there is no tokenizer; give --tokenizer"
    return {"text": text} | ({"tokens left out": summary.tokens_left_out} if summary.tokens_left_out else {})
