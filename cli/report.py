"""`treepack report`: the sharing in rollouts, a trie or a packed directory, or the course of a training run.

rollouts, trie/, packed/ --write_report--> page about sharing, pictures
run/ --write_run_report--> page of the run, curves       run/ --watch_run--> the same page while the run continues
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treepack.analysis.options import ReportOptions
from treepack.errors import TreepackError

from .config import common_options
from .option_groups import as_usage, field_options, option_group, refuse_given
from .output import quoted, show, show_end
from .paths import LOOK, READ, WRITE, refuse_missing
from .planning import search_options
from .progress import progress_bars
from .reading import reading_options
from .sections import SectionedCommand
from .sizes import TokenCounts

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.ingest.options import BuildOptions
    from treepack.pack.options import PackOptions
    from treepack.report.write import ReportSummary

# Options about rollouts, plans and the forecast.
_WITHOUT_RUN = ["trie", "model", "method", "effort", "time_limit", "format", "columns", "expand"]

_page_options = option_group(
    "page",
    field_options(
        ReportOptions,
        "trie capacities model no_text text_limit",
        trie={"type": READ},
        capacities={"name": "capacity", "type": TokenCounts(), "default": None, "show_default": False},
        model={"metavar": "NAME|PATH"},
        text_limit={"metavar": "TOKENS"},
    ),
    dict,
)


@click.command(cls=SectionedCommand)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=LOOK)
@click.option("--out", type=WRITE, metavar="FILE", help="HTML page to write.")
@click.option("--png", type=WRITE, metavar="DIRECTORY", help="Directory to write PNG pictures to.")
@click.option(
    "--watch", is_flag=True, help="Serve the page of a training run to browsers of this machine, until Ctrl-C."
)
@_page_options
@search_options(ReportOptions().pack.effort)
@reading_options
@click.option("--overwrite", is_flag=True, help="Replace existing outputs.")
@common_options
def report(
    paths: tuple[str, ...],
    out: AnyPath | None,
    png: AnyPath | None,
    watch: bool,
    page: dict[str, Any],
    search: PackOptions,
    build: BuildOptions,
    overwrite: bool,
) -> None:
    """Write a page about the sharing of rollouts and the causes of lost sharing: charts, and an explorer of the trees.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie. The page is one file that needs no
    network. Texts are decoded by the tokenizer that the trie was built with, or --tokenizer; without one, token ids are
    shown. Everyone who gets the page can read the texts: leave them out with --no-text.

    Or PATH is the --out of `treepack train`: a page with the curves of the run, its plan, its slowest steps, and the
    rollouts of its newest steps. With --watch the page is at an address of this machine and follows the run, which need
    not have started.
    """
    page["capacities"] = page["capacities"] or ()
    options = as_usage(ReportOptions)(build=build, pack=search, **page)
    if out is None and png is None and not watch:
        raise click.UsageError("give --out for a page, --png for pictures, or both; or --watch for a training run")
    if watch and (out is not None or png is not None):
        raise click.UsageError("--watch writes no file; run report again with --out or --png")
    if _is_run(paths, watch=watch):
        _report_run(Path(paths[0]), out, png, options, watch=watch, overwrite=overwrite)
        return
    refuse_missing(paths)
    from treepack.report.write import write_report

    with progress_bars() as progress:
        summary = write_report(
            paths,
            page=out,
            pictures=png,
            options=options,
            overwrite=overwrite,
            progress=progress,
            note=_note,
        )
    _show(summary)


def _is_run(paths: tuple[str, ...], *, watch: bool) -> bool:
    """Return true if the paths are one training run, or with --watch a place where one can start.

    Raises:
        TreepackError: they are not, and --watch needs one.
    """
    from treepack.files.remote.address import is_address
    from treepack.report.live.run_state import is_run

    run = Path(paths[0])
    can_start = not is_address(paths[0]) and (not run.exists() or (run.is_dir() and not any(run.iterdir())))
    if len(paths) == 1 and (is_run(run) or (watch and can_start)):
        return True
    if watch:
        raise TreepackError(
            f"{paths[0]}: is not a training run on this machine; --watch takes the --out of treepack train"
        )
    return False


def _report_run(
    run: Path, out: AnyPath | None, png: AnyPath | None, options: ReportOptions, *, watch: bool, overwrite: bool
) -> None:
    from treepack.report.live.run_state import is_run, wait_for_run
    from treepack.report.live.write_run import watch_run, write_run_report

    refuse_given(_WITHOUT_RUN, "{} is about rollouts, and PATH is a training run")
    if options.capacities:
        raise click.UsageError("--capacity is about rollouts, and PATH is a training run; leave one of them out")
    if not watch:
        _show(write_run_report(run, page=out, pictures=png, options=options, overwrite=overwrite, note=_note))
        return
    with suppress(KeyboardInterrupt):
        if not is_run(run):
            click.echo(f"waiting until a training run starts in {quoted(run)}; end with Ctrl-C", err=True)
            wait_for_run(run)
        watch_run(run, options, lambda url: click.echo(f"{url}\nThe page follows the run; end with Ctrl-C.", err=True))


def _note(remark: str) -> None:
    click.echo(f"note: {remark}", err=True)


def _show(summary: ReportSummary) -> None:
    if summary.page is not None:
        show({"page": str(summary.page), "bytes": summary.page_bytes, **_text_rows(summary)})
    if summary.pictures is not None:
        show({"pictures": str(summary.pictures)})
    page = summary.page
    show_end(page, summary.pictures, then=None if page is None else f"open {quoted(page)} in a browser")


def _text_rows(summary: ReportSummary) -> dict[str, Any]:
    """Return the rows of the output about the text in the page."""
    if not summary.has_text:
        return {"text": "left out"}
    text = "decoded" if summary.decoded else "token ids, because there is no tokenizer; give --tokenizer"
    return {"text": text} | ({"tokens left out": summary.tokens_left_out} if summary.tokens_left_out else {})
