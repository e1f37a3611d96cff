"""`treepack show`: a tree, a rollout or a packed row as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treepack.errors import TreepackError

from .config import common_options
from .paths import LOOK, refuse_missing
from .progress import token_progress
from .reading import reading_options
from .sections import SectionedCommand

if TYPE_CHECKING:
    from rich.text import Text

    from treepack.analysis.show.decoding import TokenDecoder
    from treepack.analysis.show.selection import SelectedGroup
    from treepack.analysis.show.views import ForestView
    from treepack.files.manifest import Manifest
    from treepack.ingest.options import BuildOptions
    from treepack.trie.trie import Trie

WIDTH = 100  # if there is no terminal to ask for its width


@click.command(cls=SectionedCommand)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=LOOK)
@click.option("--trajectory", metavar="ID", help="Show this trajectory, turn by turn; FILE:LINE names it too.")
@click.option("--group", metavar="ID", help="Show the tree of this group.")
@click.option("--row", type=int, metavar="N", help="Show this row of a packed directory, 0 for the first.")
@click.option(
    "--text/--ids",
    default=None,
    show_default="text if there is a tokenizer on this machine, and ids with --json",
    help="Show decoded tokens, or ids; trained ones are marked +.",
)
@click.option("--full", is_flag=True, help="Show everything, however long.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@reading_options
@common_options
def show(
    paths: tuple[str, ...],
    trajectory: str | None,
    group: str | None,
    row: int | None,
    text: bool | None,
    full: bool,
    as_json: bool,
    build: BuildOptions,
) -> None:
    """Show a tree, a rollout or a packed row, with its trained tokens marked.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie. By default, a packed
    directory shows row 0; a trie or raw rollouts show the group with the highest overlap, and list the other groups.

    \b
    treepack show rollouts.jsonl --tokenizer MODEL --trajectory ID    # check a chat template
    """
    if sum(choice is not None for choice in (trajectory, group, row)) > 1:
        raise click.UsageError("--trajectory, --group and --row each select something; give one of them.")
    text = False if text is None and as_json else text
    chosen = _find(paths, build, _ShowRequest(trajectory, group, row), text=text)
    if as_json:
        _print_json(chosen)
    else:
        _print(_lines(chosen, full=full))


@dataclass(frozen=True, slots=True)
class _ShowRequest:
    """The selection of the user; at most one of them is set."""

    trajectory: str | None
    group: str | None
    row: int | None


@dataclass(frozen=True, slots=True)
class _ShownViews:
    """The views to print, the groups to choose from if the user chose none, and the decoder of ids to text."""

    views: Iterator[ForestView]
    groups: list[SelectedGroup]
    decoder: TokenDecoder | None


def _find(paths: tuple[str, ...], build: BuildOptions, wanted: _ShowRequest, *, text: bool | None) -> _ShownViews:
    """Find the trees, rollouts or rows to show; with `text` None they are texts if a tokenizer is on this machine."""
    refuse_missing(paths)
    from treepack.analysis.origin import local_paths, manifest_of, refuse_reading
    from treepack.analysis.show import selection

    local = local_paths(paths)
    directory, manifest = Path(local[0]), manifest_of(local)
    if manifest:
        refuse_reading(directory, build, used=("tokenizer",))
    if manifest and selection.is_packed(manifest):
        if wanted.group is not None:
            raise TreepackError(f"{directory}: is packed; give --row or --trajectory, or --group with its trie")
        return _ShownViews(
            _of_packed(directory, manifest, wanted), [], _decoder(directory, manifest, build.tokenizer, text=text)
        )
    if wanted.row is not None:
        raise TreepackError(f"{directory}: is not packed; give --row with a packed directory")
    if manifest:
        from treepack.trie.store.trie_files import read_trie

        decoder = _decoder(directory, manifest, build.tokenizer, text=text)
        return _of_trie(read_trie(directory), wanted, decoder, where=str(directory))
    return _of_rollouts(paths, build, wanted, text=text)


def _of_packed(directory: Path, manifest: Manifest, wanted: _ShowRequest) -> Iterator[ForestView]:
    from treepack.analysis.show import selection, views

    if wanted.trajectory is not None:
        yield views.row_trajectory_view(*selection.row_with(directory, manifest, wanted.trajectory))
    else:
        yield views.row_view(selection.read_row(directory, manifest, wanted.row or 0), manifest)


def _of_trie(trie: Trie, wanted: _ShowRequest, decoder: TokenDecoder | None, *, where: str) -> _ShownViews:
    from treepack.analysis.show import selection, views

    if wanted.trajectory is not None:
        return _ShownViews(views.trajectory_views(trie, wanted.trajectory, where=where), [], decoder)
    groups = [] if wanted.group is not None else selection.groups(trie)
    chosen = groups[0].group_id if wanted.group is None else wanted.group
    return _ShownViews(iter([views.group_view(trie, chosen, where=where)]), groups, decoder)


def _of_rollouts(
    paths: tuple[str, ...], build: BuildOptions, wanted: _ShowRequest, *, text: bool | None
) -> _ShownViews:
    """Read rollouts until the wanted one is there, or all of them into a trie."""
    from collections import Counter

    from treepack.analysis.show import selection, views
    from treepack.analysis.show.decoding import TokenDecoder
    from treepack.ingest import stream as ingest
    from treepack.ingest.read_log import refuse_nothing, without_unused
    from treepack.tokenise.tokenization import read_tokenizer

    where = ", ".join(paths)
    if text and not build.tokenizer:
        raise _no_tokenizer(where)
    tokenizer = read_tokenizer(build.tokenizer) if build.tokenizer else None
    decoder = TokenDecoder(tokenizer) if tokenizer and text is not False else None
    counts: Counter[str] = Counter()
    stream = ingest.usable(ingest.read(paths, build, tokenizer=tokenizer), counts)
    stream = iter(token_progress(stream, description="reading"))
    if wanted.trajectory is not None:
        rollouts = list(selection.first_named(stream, wanted.trajectory, where=where, skipped=counts))
        del stream  # ends the progress bar before anything is printed
        return _ShownViews((views.rollout_view(rollout) for rollout in rollouts), [], decoder)

    from treepack.sequences import collect
    from treepack.trie.builders.in_memory import build_trie

    trie = build_trie(collect(refuse_nothing(stream, counts)), share=build.share)
    others, unused = without_unused(dict(sorted(counts.items())))
    for note in [*(f"{reason}: {count:,}" for reason, count in others.items()), *filter(None, [unused])]:
        click.echo(f"note: {note}", err=True)
    return _of_trie(trie, wanted, decoder, where=where)


def _decoder(directory: Path, manifest: Manifest, tokenizer: str | None, *, text: bool | None) -> TokenDecoder | None:
    """Return the decoder of a directory's tokens: by `tokenizer`, or by the one that the directory was made with.

    None to show ids: `text` is False, or it is None and no tokenizer is given or found on this machine.
    """
    from treepack.analysis.show.decoding import TokenDecoder
    from treepack.tokenise.saved_template import recorded_tokenizer, tokenizer_of

    made_with = recorded_tokenizer(manifest, directory)
    is_here = tokenizer is not None or (made_with is not None and Path(made_with).is_dir())
    if text is False or (text is None and not is_here):
        return None
    try:
        loaded = tokenizer_of(manifest, tokenizer, where=directory)
    except TreepackError:
        if text is None and tokenizer is None:
            return None
        raise
    if loaded is None:
        raise _no_tokenizer(str(directory))
    return TokenDecoder(loaded)


def _no_tokenizer(where: str) -> TreepackError:
    return TreepackError(f"{where}: no tokenizer is known, and text needs one; give --tokenizer")


def _print_json(chosen: _ShownViews) -> None:
    """Print one object; it lists several samples of a conversation under `samples`."""
    import json

    from treepack.analysis.show.views import view_as_json

    objects = [view_as_json(view, chosen.decoder) for view in chosen.views]
    # ASCII, because JSON escapes only part of what could drive a terminal.
    click.echo(json.dumps(objects[0] if len(objects) == 1 else {"kind": "samples", "samples": objects}))


def _lines(chosen: _ShownViews, *, full: bool) -> Iterator[Text]:
    from shutil import get_terminal_size

    from rich.text import Text

    from treepack.analysis.show import views
    from treepack.analysis.show.bodies import DrawingOptions

    look = DrawingOptions(width=get_terminal_size((WIDTH, 0)).columns, full=full, decoder=chosen.decoder)
    for number, view in enumerate(chosen.views):
        if number:
            yield Text()
        yield from views.lines(view, look)
    if len(chosen.groups) > 1:
        yield Text()
        yield from views.group_lines(chosen.groups, look)


def _print(lines: Iterator[Text]) -> None:
    """Print `lines`, in colours on a terminal that has them and without them elsewhere."""
    import os

    from rich.console import Console

    wanted = (sys.stdout.isatty() and os.environ.get("TERM") != "dumb") or bool(os.environ.get("FORCE_COLOR"))
    colours: Any = "standard" if wanted and not os.environ.get("NO_COLOR") else None
    # A line may be wider than the terminal, such as one with a long id; rich must neither wrap nor crop it.
    console = Console(color_system=colours, force_terminal=colours is not None, soft_wrap=True)
    for line in lines:
        line.rstrip()
        console.print(line, highlight=False)
