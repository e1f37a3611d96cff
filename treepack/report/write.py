"""Write the page or the pictures of rollouts, a trie or a packed directory: `treepack report` as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.analysis.describe import describe_rows
from treepack.analysis.forecast import DEFAULT_MODEL, RowCounter
from treepack.analysis.options import ReportOptions
from treepack.analysis.origin import local_paths, manifest_of, origin_of, read_origin, refuse_reading
from treepack.costs.model_cost import read_shape
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import finished_file, refuse_existing
from treepack.files.lock import lock
from treepack.files.manifest import Manifest
from treepack.files.remote.address import AnyPath, Paths, as_output
from treepack.files.remote.cache import naming_addresses
from treepack.ingest.conversation_counts import conversations_of_log, conversations_of_manifest
from treepack.memory.model_memory import read_memory
from treepack.pack.files import read_rows
from treepack.pack.plan.problem import SearchOptions
from treepack.pack.row import Row
from treepack.processes import ReportProgress, with_progress
from treepack.report.charts import renderer
from treepack.report.contents import read_contents
from treepack.report.figures import PackedFigures, ReportSubject, measure
from treepack.report.page import MARK, render_page
from treepack.report.pictures import PICTURES, write_pictures
from treepack.report.rebuilt import trie_of_rows
from treepack.tokenise.saved_template import tokenizer_of
from treepack.tokenise.tokenization import read_tokenizer
from treepack.trie.directory import read_to_trie, skipped_record
from treepack.trie.store.trie_files import read_trie
from treepack.trie.totals import trie_totals


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """The outputs of a report.

    Attributes:
        page: the HTML page, or None.
        pictures: the directory of the pictures, or None.
        decoded: True if the page shows text; else it shows token ids, because the tokenizer is missing.
        has_text: True if the page has the text or the ids of the rollouts.
        tokens_left_out: tokens beyond the text limit.
        page_bytes: size of the page, 0 without one.
    """

    page: AnyPath | None
    pictures: AnyPath | None
    decoded: bool
    has_text: bool
    tokens_left_out: int
    page_bytes: int = 0


@naming_addresses()
def write_report(
    paths: Paths,
    *,
    page: str | AnyPath | None = None,
    pictures: str | AnyPath | None = None,
    options: ReportOptions = ReportOptions(),  # noqa: B008 (immutable)
    overwrite: bool = False,
    progress: ReportProgress | None = None,
    note: Callable[[str], None] | None = None,
) -> ReportSummary:
    """Write a page about the sharing of rollouts, or pictures of its charts, or both.

    Args:
        paths: a trie directory, a packed directory, an output of `treepack prepare`, or raw rollouts as for
            `build_trie_directory`.
        page: HTML file to write.
        pictures: directory to write PNG files into.
        options: plans, forecast and text of the report, and how raw rollouts are read.
        overwrite: replace files that an earlier report wrote.
        progress: called with the tokens or rows read so far.
        note: called with remarks for the user, before the long work.

    Raises:
        TreepackError: bad input, an output that exists, another tokenizer, or a package that is not installed.
    """
    page = None if page is None else as_output(page)
    pictures = None if pictures is None else as_output(pictures, option="--png")
    if page is None and pictures is None:
        raise TreepackError("there is neither a page nor a folder of pictures to write; give one of them")
    files: list[tuple[AnyPath, str]] = [] if page is None else [(page, "--out")]
    if pictures is not None:
        files += [(pictures / name, "--png") for name in PICTURES]
    paths = local_paths(paths)
    for file, option in files:
        refuse_existing(file, overwrite=overwrite, inputs=paths, is_own_file=is_report, option=option)
    renderer()  # refuses a missing package now, rather than after minutes of planning
    with ExitStack() as stack:
        for output, option in ((page, "--out"), (pictures, "--png")):
            if output is not None:  # before the long work: a second command for the same output is refused at once
                stack.enter_context(lock(output, option=option))
        shape = read_shape(options.model or DEFAULT_MODEL)
        # Memory of a model that the user did not name is no news.
        memory = read_memory(options.model) if options.model else None
        subject, tokenizer = _read(paths, options, progress, note or (lambda _: None))
        search = SearchOptions(options.pack.effort, options.pack.time_limit)
        capacities = list(options.capacities) or None
        method = options.pack.method
        figures = measure(
            subject,
            shape,
            capacities=capacities,
            method=method,
            search=search,
            memory=memory,
            progress=progress,
        )
        template, limit = options.build.template_file(), None if options.no_text else options.text_limit
        contents = read_contents(subject.trie, tokenizer, limit=limit, template=template.text if template else None)
        size = 0
        if page is not None:
            html = render_page(subject, figures, contents)
            with finished_file(page, overwrite=overwrite) as temporary:
                size = temporary.write_bytes(html.encode())
        if pictures is not None:
            write_pictures(figures, pictures, overwrite=overwrite)
        texts = contents.texts
        left_out = 0 if texts is None else texts.tokens_left_out
        return ReportSummary(page, pictures, contents.decoded, texts is not None, left_out, size)


def is_report(path: Path) -> bool:
    """Return whether an earlier report wrote the file; an empty one counts too."""
    with path.open("rb") as file:
        head = file.read(1024)  # the mark of a page is in its first lines
    return (path.suffix == ".png" and head.startswith(b"\x89PNG")) or MARK.encode() in head or not head


def _read(
    paths: Sequence[str], options: ReportOptions, progress: ReportProgress | None, note: Callable[[str], None]
) -> tuple[ReportSubject, Any]:
    """Return the subject, and its tokenizer or None."""
    directory, manifest, name = Path(paths[0]), manifest_of(paths), options.build.tokenizer
    if manifest is None:
        tokenizer = read_tokenizer(name) if name else None
        trie, log = read_to_trie(paths, options.build, tokenizer=tokenizer, progress=progress)
        title = ", ".join("standard input" if str(path) == "-" else Path(path).name for path in paths)
        known, skipped = conversations_of_log(log, trie_totals(trie)), skipped_record(log, trie)
        counts = dict(sorted(log.counts.items()))
        return ReportSubject(title, trie, counts=counts, conversations=known, skipped=skipped), tokenizer
    refuse_reading(directory, options.build, used=("tokenizer", "chat_template"))
    tokenizer = _tokenizer_of(directory, manifest, name, note)
    title = directory.resolve().name
    if manifest["format"] == schema.TRIE_FORMAT:
        known, counts = conversations_of_manifest(manifest), manifest["counts"]
        skipped = manifest.get("skipped")
        return ReportSubject(
            title, read_trie(directory), counts=counts, conversations=known, skipped=skipped
        ), tokenizer
    return _packed(title, directory, manifest, options.trie, progress), tokenizer


def _tokenizer_of(directory: Path, manifest: Manifest, name: str | None, note: Callable[[str], None]) -> Any:
    """Return the tokenizer `name`, or else the one of the manifest, or None if there is none or it cannot be loaded."""
    try:
        return tokenizer_of(manifest, name, where=directory)
    except TreepackError as error:
        if name:
            raise
        note(f"token ids are shown: {error}")
        return None


def _packed(
    title: str, directory: Path, manifest: Manifest, trie_path: AnyPath | None, progress: ReportProgress | None
) -> ReportSubject:
    def rows(stage: str) -> Iterator[Row]:
        total = manifest["totals"]["num_rows"]
        return with_progress(read_rows(directory), progress, stage, unit="rows", total=total)

    def measured_rows() -> Iterator[Row]:
        for row in counter.over(rows("reading")):
            sizes.append(row.num_tokens)
            yield row

    sizes, counter = list[int](), RowCounter()
    err_by_depth = describe_rows(measured_rows())["err_by_depth"]
    packed = PackedFigures(
        manifest["capacity"],
        np.array(sizes),
        manifest["totals"],
        err_by_depth,
        counter.lines(manifest),
        counter.rows(manifest["capacity"]),
    )
    path = origin_of(directory, manifest, trie_path)
    trie = trie_of_rows(rows("rebuilding")) if path is None else read_origin(path, manifest)
    known, skipped = conversations_of_manifest(manifest), manifest.get("skipped")
    return ReportSubject(title, trie, packed, path is None, manifest["counts"], known, skipped)
