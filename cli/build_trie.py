"""`treepack build-trie`: raw rollouts to a directory of prefix tries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .output import percent, show
from .progress import progress_bars, quiet_option
from .reading import reading_options
from .skipped import print_many_skipped, print_skipped

if TYPE_CHECKING:
    from treepack.ingest.options import BuildOptions
    from treepack.trie.directory import TrieSummary


@click.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@reading_options
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@quiet_option
def build_trie(inputs: tuple[str, ...], out: Path, build: BuildOptions, overwrite: bool) -> None:
    """Read rollouts and write their prefix tries.

    INPUT is a file, a directory, a glob, or - for standard input; .gz and .zst are read directly. Prints the counts of
    rollouts that were read and skipped, N_flat (tokens if every trajectory stands alone), N_tree (tokens of the tries)
    and POR, the potential overlap ratio 1 - N_tree / N_flat.
    """
    from treepack.trie.directory import build_trie_directory

    with progress_bars() as progress:
        summary = build_trie_directory(inputs, out, build, overwrite=overwrite, progress=progress)
    show_build(summary)


def show_build(summary: TrieSummary) -> None:
    """Print the summary of a trie that was built."""
    skipped = summary.manifest.get("skipped")
    print_many_skipped(skipped)
    totals = summary.totals
    show(
        {
            "files": summary.num_files,
            **{name.replace("num_", ""): value for name, value in totals.items() if name.startswith("num_")},
            "trained tokens": totals["tokens_trained"],
            **summary.counts,
            "N_flat": totals["tokens_flat"],
            "N_tree": totals["tokens_tree"],
            "POR": percent(totals["por"]),
            "tokens per second": totals["tokens_flat"] / summary.seconds,
        }
    )
    print_skipped(skipped)
