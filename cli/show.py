"""`treepack show`: a tree, a rollout or a packed row as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treepack.errors import TreepackError

from .origin import manifest_of
from .output import token_progress
from .reading import read_options, reading_options

if TYPE_CHECKING:
    from rich.text import Text

    from treepack.analysis.show.decoding import Decoder
    from treepack.analysis.show.selection import SelectedGroup
    from treepack.analysis.show.views import View
    from treepack.files.manifest import Manifest
    from treepack.trie.trie import Trie

WIDTH = 100  # where there is no terminal to ask


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--trajectory", metavar="ID", help="Show this trajectory, turn by turn; FILE:LINE names it too.")
@click.option("--group", metavar="ID", help="Show the tree of this group.")
@click.option("--row", type=int, metavar="N", help="Show this row of a packed directory, 0 for the first.")
@click.option("--text", is_flag=True, help="Show decoded tokens, not ids; trained ones are marked +.")
@click.option("--full", is_flag=True, help="Leave out nothing, however long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, of which nothing is left out.")
@reading_options
def show(
    paths: tuple[str, ...],
    trajectory: str | None,
    group: str | None,
    row: int | None,
    text: bool,
    full: bool,
    as_json: bool,
    **reading: Any,
) -> None:
    """Show a tree, a rollout or a packed row, and what of it is trained.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie. By default the group with the
    highest overlap is shown and the others are listed, or row 0 of a packed directory.

    \b
    treepack show rollouts.jsonl --tokenizer MODEL --text --trajectory ID    # check a chat template
    """
    if sum(choice is not None for choice in (trajectory, group, row)) > 1:
        raise click.UsageError("--trajectory, --group and --row each select something; give one of them.")
    found = _find(paths, reading, _Wanted(trajectory, group, row), text=text)
    if as_json:
        _print_json(found)
    else:
        _print(_lines(found, full=full))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be shown; at most one of them."""

    trajectory: str | None
    group: str | None
    row: int | None


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is shown, with the groups to choose from where nothing was chosen, and what turns ids to text."""

    views: Iterator[View]
    groups: list[SelectedGroup]
    decoder: Decoder | None


def _find(paths: tuple[str, ...], reading: dict[str, Any], wanted: _Wanted, *, text: bool) -> _Chosen:
    from treepack.analysis.show import selection

    directory, manifest = Path(paths[0]), manifest_of(paths)
    if manifest and selection.is_packed(manifest):
        if wanted.group is not None:
            raise TreepackError(f"{directory}: is packed; give --row or --trajectory, or --group with its trie")
        return _Chosen(_of_packed(directory, manifest, wanted), [], _decoder(directory, manifest, reading, text=text))
    if wanted.row is not None:
        raise TreepackError(f"{directory}: is not packed; give --row with a packed directory")
    if manifest:
        from treepack.trie.files import read_trie

        decoder = _decoder(directory, manifest, reading, text=text)
        return _of_trie(read_trie(directory), wanted, decoder, where=str(directory))
    return _of_rollouts(paths, reading, wanted, text=text)


def _of_packed(directory: Path, manifest: Manifest, wanted: _Wanted) -> Iterator[View]:
    from treepack.analysis.show import selection, views

    if wanted.trajectory is not None:
        yield views.row_trajectory_view(*selection.row_with(directory, manifest, wanted.trajectory))
    else:
        yield views.row_view(selection.read_row(directory, manifest, wanted.row or 0), manifest)


def _of_trie(trie: Trie, wanted: _Wanted, decoder: Decoder | None, *, where: str) -> _Chosen:
    from treepack.analysis.show import selection, views

    if wanted.trajectory is not None:
        return _Chosen(views.trajectory_views(trie, wanted.trajectory, where=where), [], decoder)
    groups = [] if wanted.group is not None else selection.groups(trie)
    chosen = groups[0].group_id if wanted.group is None else wanted.group
    return _Chosen(iter([views.group_view(trie, chosen, where=where)]), groups, decoder)


def _of_rollouts(paths: tuple[str, ...], reading: dict[str, Any], wanted: _Wanted, *, text: bool) -> _Chosen:
    """Rollouts are read to the one that is wanted, or all of them into a trie."""
    from collections import Counter

    from treepack.analysis.show import selection, views
    from treepack.analysis.show.decoding import Decoder
    from treepack.ingest import stream as ingest
    from treepack.ingest.tokenization import load_tokenizer

    where = ", ".join(paths)
    options = read_options(reading)
    if text and not options.tokenizer:
        raise _no_tokenizer(where)
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    decoder = Decoder(tokenizer) if text else None
    counts: Counter[str] = Counter()
    stream = ingest.usable(ingest.read(paths, options, tokenizer=tokenizer), counts)
    stream = iter(token_progress(stream, description="reading"))
    if wanted.trajectory is not None:
        found = list(selection.first_named(stream, wanted.trajectory, where=where, skipped=counts))
        del stream  # ends the progress bar before anything is printed
        return _Chosen((views.rollout_view(rollout) for rollout in found), [], decoder)

    from treepack.columns import collect
    from treepack.trie.build import build_trie

    trie = build_trie(collect(stream), share=reading["share"])
    for reason, count in sorted(counts.items()):
        click.echo(f"note: {reason}: {count:,}", err=True)
    return _of_trie(trie, wanted, decoder, where=where)


def _decoder(directory: Path, manifest: Manifest, reading: dict[str, Any], *, text: bool) -> Decoder | None:
    """What decodes the tokens of a directory: the tokenizer given, or the one it was made with."""
    from treepack.analysis.show.decoding import Decoder
    from treepack.ingest.tokenization import fingerprint, load_tokenizer

    if not text:
        return None
    known = manifest.get("tokenizer")
    name = reading["tokenizer"] or (known and known["name"])
    if not name:
        raise _no_tokenizer(str(directory))
    try:
        tokenizer = load_tokenizer(name)
    except TreepackError as error:
        if reading["tokenizer"]:
            raise
        raise TreepackError(f"{directory}: its tokenizer {name} is not there; give it with --tokenizer") from error
    if known and known["sha256"] != fingerprint(tokenizer)["sha256"]:
        raise TreepackError(f"{name}: is another tokenizer than {known['name']}, which {directory} was made with")
    return Decoder(tokenizer)


def _no_tokenizer(where: str) -> TreepackError:
    return TreepackError(f"{where}: no tokenizer is known, and text needs one; give --tokenizer")


def _print_json(found: _Chosen) -> None:
    """One object; several samples of a conversation are its `samples`."""
    import json

    from treepack.analysis.show.views import as_json

    objects = [as_json(view, found.decoder) for view in found.views]
    # ASCII, because JSON escapes only part of what could drive a terminal.
    click.echo(json.dumps(objects[0] if len(objects) == 1 else {"kind": "samples", "samples": objects}))


def _lines(found: _Chosen, *, full: bool) -> Iterator[Text]:
    from shutil import get_terminal_size

    from rich.text import Text

    from treepack.analysis.show import views
    from treepack.analysis.show.bodies import Look

    look = Look(width=get_terminal_size((WIDTH, 0)).columns, full=full, decoder=found.decoder)
    for number, view in enumerate(found.views):
        if number:
            yield Text()
        yield from views.lines(view, look)
    if len(found.groups) > 1:
        yield Text()
        yield from views.group_lines(found.groups, look)


def _print(lines: Iterator[Text]) -> None:
    """Print `lines`, in colours on a terminal that has them; characters that the output cannot hold are escaped."""
    import os
    from io import TextIOWrapper

    from rich.console import Console

    wanted = (sys.stdout.isatty() and os.environ.get("TERM") != "dumb") or bool(os.environ.get("FORCE_COLOR"))
    colours: Any = "standard" if wanted and not os.environ.get("NO_COLOR") else None
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # A line may be wider than the terminal, such as one with a long id; rich must neither wrap nor crop it.
    console = Console(color_system=colours, force_terminal=colours is not None, soft_wrap=True)
    for line in lines:
        line.rstrip()
        console.print(line, highlight=False)
