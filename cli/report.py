"""`treepack report`: one page, or pictures, of what rollouts, a trie or a packed directory share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .origin import manifest_of, origin_of, read_origin
from .output import progress, show, token_progress
from .planning import read_search, search_options
from .reading import read_options, reading_options
from .stats import Capacities

if TYPE_CHECKING:
    from treepack.analysis.report.figures import Subject
    from treepack.analysis.report.texts import Texts
    from treepack.pack.row import Row

TEXT_LIMIT = 8_000_000


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="HTML page to write.")
@click.option("--png", type=click.Path(path_type=Path, file_okay=False), help="Directory to write PNG pictures to.")
@click.option(
    "--trie",
    "trie_path",
    type=click.Path(path_type=Path),
    help="Trie of a packed directory; default: the one it was packed from, or else one built from its rows.",
)
@click.option(
    "--capacity",
    type=Capacities(),
    help="Capacities at which ERR is compared with POR; default: doubling from the least that holds every rollout.",
)
@click.option(
    "--model",
    metavar="NAME|PATH",
    default="qwen3-8b",
    show_default=True,
    help="Forecast for this model: a preset or a config.json; see docs/forecast.md.",
)
@click.option("--no-text", is_flag=True, help="Leave the text of the rollouts out of the page.")
@click.option(
    "--text-limit",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    default=TEXT_LIMIT,
    show_default=True,
    help="Most tokens whose text the page holds; of each node the first ones, as many for all alike.",
)
@search_options("low")
@reading_options
@click.option("--overwrite", is_flag=True, help="Replace existing outputs.")
def report(
    paths: tuple[str, ...],
    out: Path | None,
    png: Path | None,
    trie_path: Path | None,
    capacity: list[int] | None,
    no_text: bool,
    text_limit: int,
    overwrite: bool,
    **others: Any,
) -> None:
    """Write a page that shows what rollouts share: charts, and an explorer of their trees.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie. The page is one file that needs no
    network. Texts are decoded by the tokenizer that the trie was built with, or --tokenizer; without one, token ids are
    shown. They are in the page for whoever gets it: leave them out with --no-text.
    """
    from treepack.analysis.model_cost import read_shape
    from treepack.analysis.report.figures import measure
    from treepack.analysis.report.page import render, vega
    from treepack.analysis.report.pictures import PICTURES, figure_class, write_pictures
    from treepack.files.directory import finished_file

    if out is None and png is None:
        raise click.UsageError("give --out for a page, --png for pictures, or both")
    pictures = [] if png is None else [png / name for name in PICTURES]
    for path in [*([] if out is None else [out]), *pictures]:
        _refuse(path, paths, overwrite=overwrite)
    if out is not None:
        vega()  # what is not installed is missed now rather than after the planning
    if png is not None:
        figure_class()
    shape = read_shape(others["model"])
    subject, tokenizer = _subject(paths, trie_path, others)
    search = read_search(others)
    figures = measure(subject, shape, capacities=capacity, method=others["method"], search=search)
    if out is not None:
        texts = None if no_text else _texts(subject, tokenizer, text_limit)
        special = list(tokenizer.get_added_vocab()) if tokenizer and texts else []
        page = render(subject, figures, texts, decoded=tokenizer is not None, special=special)
        with finished_file(out) as temporary:
            temporary.write_text(page, encoding="utf-8")
        show({"page": str(out), "bytes": out.stat().st_size, **_told(texts, decoded=tokenizer is not None)})
    if png is not None:
        write_pictures(subject, figures, png)
        show({"pictures": str(png)})


def _told(texts: Texts | None, *, decoded: bool) -> dict[str, Any]:
    if texts is None:
        return {"text": "left out"}
    kind = {"text": "decoded" if decoded else "token ids, for no tokenizer is at hand; give --tokenizer"}
    return kind | ({"tokens left out": texts.tokens_left_out} if texts.tokens_left_out else {})


def _refuse(out: Path, paths: tuple[str, ...], *, overwrite: bool) -> None:
    """Raise a TreepackError if `out` is in the way: an existing file, unasked or not of this command, or an input."""
    from treepack.analysis.report.page import MARK
    from treepack.errors import TreepackError

    for given in paths:
        if out.resolve().is_relative_to(Path(given).resolve()):
            raise TreepackError(f"{out} is or lies inside the input {given}; choose another output")
    if not out.exists():
        return
    if not overwrite:
        raise TreepackError(f"{out} exists; choose another output or give --overwrite")
    with out.open("rb") as file:
        head = file.read(1024)
    if (out.suffix == ".png" and head.startswith(b"\x89PNG")) or MARK.encode() in head or not head:
        return
    raise TreepackError(f"{out} exists and was not written by treepack; remove it yourself or choose another output")


def _subject(paths: tuple[str, ...], trie_path: Path | None, others: dict[str, Any]) -> tuple[Subject, Any]:
    """What is reported on, and its tokenizer, None if none is known."""
    from treepack.analysis.report.figures import Subject
    from treepack.files import schema
    from treepack.ingest.tokenization import load_tokenizer
    from treepack.trie.files import read_trie

    directory, tokenizer = Path(paths[0]), others["tokenizer"]
    manifest = manifest_of(paths)
    if manifest is None:
        loaded = load_tokenizer(tokenizer) if tokenizer else None
        return _raw(paths, loaded, others), loaded
    tokenizer = _tokenizer_of(directory, manifest, tokenizer)
    name = directory.resolve().name
    if manifest["format"] == schema.TRIE_FORMAT:
        return Subject(name, read_trie(directory), counts=manifest["counts"]), tokenizer
    return _packed(name, directory, manifest, trie_path), tokenizer


def _tokenizer_of(directory: Path, manifest: dict[str, Any], given: str | None) -> Any:
    """The tokenizer given, or else the one that `directory` was made with; None if that is not there."""
    from treepack.errors import TreepackError
    from treepack.ingest.tokenization import fingerprint, load_tokenizer

    known: dict[str, Any] = manifest.get("tokenizer") or {}
    name = given or known.get("name")
    if not name:
        return None
    try:
        tokenizer = load_tokenizer(name)
    except TreepackError:
        if given:
            raise
        click.echo(f"the tokenizer {name} is not there, so token ids are shown; give --tokenizer", err=True)
        return None
    if known and known["sha256"] != fingerprint(tokenizer)["sha256"]:
        raise TreepackError(f"{name}: is another tokenizer than {known['name']}, which {directory} was made with")
    return tokenizer


def _packed(name: str, directory: Path, manifest: dict[str, Any], trie_path: Path | None) -> Subject:
    import numpy as np

    from treepack.analysis.forecast import RowCounter
    from treepack.analysis.report.figures import Packed, Subject
    from treepack.analysis.report.rebuilt import trie_of_rows
    from treepack.analysis.stats import describe_packed
    from treepack.pack.files import read_rows

    def rows(description: str) -> Iterator[Row]:
        return progress(read_rows(directory), description=description, total=manifest["totals"]["num_rows"])

    def measured() -> Iterator[Row]:
        for row in counter.over(rows("reading")):
            sizes.append(row.num_tokens)
            yield row

    sizes, counter = list[int](), RowCounter()
    err_by_depth = describe_packed(measured(), manifest)["err_by_depth"]
    packed = Packed(manifest["capacity"], np.array(sizes), manifest["totals"], err_by_depth, counter.line(manifest))
    path = origin_of(directory, manifest, trie_path)
    trie = trie_of_rows(rows("rebuilding")) if path is None else read_origin(path, manifest)
    return Subject(name, trie, packed, rebuilt=path is None, counts=manifest["counts"])


def _raw(paths: tuple[str, ...], tokenizer: Any, others: dict[str, Any]) -> Subject:
    from collections import Counter

    from treepack.analysis.report.figures import Subject
    from treepack.ingest import stream as ingest
    from treepack.trie.out_of_core import build_large_trie

    counts: Counter[str] = Counter()
    batches = ingest.read_columns(paths, read_options(others), counts, tokenizer=tokenizer)
    trie = build_large_trie(token_progress(batches, description="reading"), share=others["share"]).trie
    name = ", ".join("standard input" if path == "-" else Path(path).name for path in paths)
    return Subject(name, trie, counts=dict(sorted(counts.items())))


def _texts(subject: Subject, tokenizer: Any, limit: int) -> Texts:
    from treepack.analysis.report.texts import decoder_of, ids_as_text, node_texts

    return node_texts(subject.trie, decoder_of(tokenizer) if tokenizer else ids_as_text, limit=limit)
