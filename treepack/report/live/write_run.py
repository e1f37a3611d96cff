"""Write the page of a run, or its curves as a picture, or show the page while the run continues."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from treepack.analysis.options import ReportOptions
from treepack.errors import TreepackError
from treepack.files.directory import finished_file, refuse_existing
from treepack.files.lock import lock
from treepack.files.remote.address import AnyPath, as_output
from treepack.report.charts import renderer
from treepack.report.live.curves import whole_charts
from treepack.report.live.run_page import whole_page
from treepack.report.live.run_state import RunFolder
from treepack.report.live.server import RunServer
from treepack.report.live.step_rollouts import read_steps
from treepack.report.live.watch import RunWatch
from treepack.report.pictures import write_chart
from treepack.report.write import ReportSummary, is_report


def write_run_report(
    run: Path,
    *,
    page: str | AnyPath | None = None,
    pictures: str | AnyPath | None = None,
    options: ReportOptions = ReportOptions(),  # noqa: B008 (immutable)
    overwrite: bool = False,
    note: Callable[[str], None] | None = None,
) -> ReportSummary:
    """Write a page about a training run, with the rollouts of its newest steps, or a picture of each curve, or both.

    Args:
        run: the directory of the run, which may still be running.
        page: HTML file to write.
        pictures: directory to write PNG files into.
        options: the text of the page.
        overwrite: replace files that an earlier report wrote.
        note: called with remarks for the user, such as the number of damaged lines.

    Raises:
        TreepackError: bad input, no step yet, an output that exists, or a package that is not installed.
    """
    page = None if page is None else as_output(page)
    pictures = None if pictures is None else as_output(pictures, option="--png")
    refuse = partial(refuse_existing, overwrite=overwrite, inputs=[run], is_own_file=is_report)
    if page is not None:
        refuse(page, option="--out")
    watch = _open(run, options)
    if not len(watch.series):
        raise TreepackError(f"{watch.folder.metrics}: contains no step yet; write the report after the first step")
    if note is not None and watch.facts is not None:
        for remark in watch.facts.notes:
            note(remark)
    charts = whole_charts(watch.series) if pictures is not None else []
    if pictures is not None:
        for chart in charts:
            refuse(pictures / _picture_name(chart.title), option="--png")
    renderer()
    with ExitStack() as stack:
        for output, option in ((page, "--out"), (pictures, "--png")):
            if output is not None:
                stack.enter_context(lock(output, option=option))
        size, rollouts = 0, None
        if page is not None:
            if watch.rows is not None and watch.texts is not None and watch.facts and watch.facts.last_step:
                rollouts = read_steps(watch.rows, watch.facts.last_step, watch.texts)
            html = whole_page(watch, rollouts)
            with finished_file(page, overwrite=overwrite) as temporary:
                size = temporary.write_bytes(html.encode("utf-8", "replace"))
        if pictures is not None:
            for chart in charts:
                write_chart(chart, pictures / _picture_name(chart.title), overwrite=overwrite)
    decoded = watch.texts is not None and watch.texts.tokenizer is not None
    return ReportSummary(page, pictures, decoded, rollouts is not None and not options.no_text, 0, size)


def watch_run(run: Path, options: ReportOptions, started: Callable[[str], None]) -> None:
    """Show the page of a run to browsers on this machine until Ctrl-C; `started` is called with its address.

    Raises:
        TreepackError: bad input, or a package that is not installed.
    """
    renderer()
    server = RunServer(_open(run, options))
    started(server.url)
    try:
        server.serve()
    except KeyboardInterrupt:
        server.stop()


def _open(run: Path, options: ReportOptions) -> RunWatch:
    tokenizer = options.build.tokenizer
    return RunWatch(RunFolder(run), tokenizer=tokenizer, text_limit=None if options.no_text else options.text_limit)


def _picture_name(title: str) -> str:
    """Return the name of a chart's picture: "Tokens per second" -> tokens-per-second.png."""
    words = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in title.lower()).split()
    return "-".join(words)[:80] + ".png" if words else "curve.png"
