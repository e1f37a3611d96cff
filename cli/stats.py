"""`treepack stats`: statistics of rollouts, a trie or a packed directory, and a check that files are intact."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from treepack.analysis.options import StatsOptions

from .paths import LOOK, READ
from .planning import search_options
from .progress import progress_bars, quiet_option
from .reading import reading_options
from .sizes import TokenCount, TokenCounts, memory_option
from .stats_table import print_report

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.ingest.options import BuildOptions
    from treepack.pack.options import PackOptions

USUAL = StatsOptions()


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=LOOK)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Verify hashes, every invariant, and that rows contain all of the trie.")
@click.option(
    "--trie",
    "trie_path",
    type=READ,
    help="Trie to check a packed directory against; default: the one it was packed from.",
)
@click.option(
    "--capacity",
    type=TokenCounts(),
    help="Plan rows of these capacities, and forecast for them; longer trajectories are left out and counted.",
)
@click.option("--effective-ratio", is_flag=True, help="Show how many groups and prefixes have mixed outcomes (TRACE).")
@click.option(
    "--predictions",
    type=READ,
    help="File of predicted values, as for treepack allocate: show how well they rank groups and prefixes.",
)
@click.option(
    "--segment",
    metavar="turn|recorded|node|N",
    default="turn",
    show_default=True,
    help="For --effective-ratio and --predictions: end of a prefix; the same values as in treepack advantages.",
)
@click.option(
    "--model",
    metavar="NAME|PATH",
    default=USUAL.model,
    show_default=True,
    help="Forecast for this model: a preset or a config.json; see docs/forecast.md.",
)
@click.option(
    "--device",
    metavar="NAME|TFLOP/S",
    default=USUAL.device,
    show_default=True,
    help="GPU for which the forecast gives hours: a100, h100, h200, b200, or its rate in bfloat16.",
)
@click.option(
    "--carry",
    type=TokenCount(),
    metavar="N",
    help="Forecast for train --carry N; default: the largest power of two from 4096 to 65536 that fits the device.",
)
@click.option("--verbose", is_flag=True, help="Also print figures about tiles, weights and the lower bound.")
@search_options(USUAL.pack.effort)
@reading_options
@memory_option
@quiet_option
def stats(
    paths: tuple[str, ...],
    as_json: bool,
    check: bool,
    trie_path: AnyPath | None,
    capacity: tuple[int, ...] | None,
    effective_ratio: bool,
    predictions: AnyPath | None,
    segment: str,
    model: str,
    device: str,
    carry: int | None,
    verbose: bool,
    search: PackOptions,
    build: BuildOptions,
    memory: int | None,
) -> None:
    """Show how much rollouts share, how much of it a packing keeps, and the speed-up of training.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie.

    The first line has the numbers of conversations and samples, and the gain of training on the tree over one
    append-only sequence per conversation, as most trainers make it. The forecast compares floating-point operations on
    the tree with flat packing of such sequences, of each sample alone, and of one sample per turn. Without --capacity
    it plans quickly for 16384 and 65536 (each only if the longest trajectory fits), else for the next power of two.

    Another table has the memory and the hours of each capacity with and without train --carry, by which rows of any
    length fit; both are estimates.
    """
    import json

    from treepack.analysis.stats import stats as measure

    options = StatsOptions(
        build=build,
        capacities=capacity or (),
        pack=search,
        model=model,
        device=device,
        carry=carry,
        check=check,
        trie=trie_path,
    )
    contrast = None
    if effective_ratio or predictions:
        from treepack.research.contrast import contrast_entries

        contrast = partial(contrast_entries, predictions=predictions, segment=segment)
    with progress_bars() as progress:
        report = measure(paths, options, memory=memory, contrast=contrast, progress=progress)
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        print_report(report, verbose=verbose)
