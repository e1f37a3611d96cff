"""`treepack stats`: statistics of rollouts, a trie or a packed directory, and a check that files are intact."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from treepack.analysis.options import StatsOptions

from .config import common_options
from .option_groups import field_options, is_given, option_group
from .paths import LOOK, READ, refuse_missing
from .planning import ranked_search_options
from .progress import progress_bars
from .reading import reading_options
from .sections import SectionedCommand
from .sizes import TokenCounts, memory_option
from .stats_table import print_report

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.ingest.options import BuildOptions
    from treepack.pack.options import PackOptions


@click.command(cls=SectionedCommand)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=LOOK)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@option_group(
    "forecast",
    field_options(
        StatsOptions,
        "check trie capacities model device",
        trie={"type": READ},
        capacities={"name": "capacity", "type": TokenCounts(), "show_default": False},
        model={"metavar": "NAME|PATH"},
        device={"metavar": "NAME|TFLOP/S"},
    ),
    dict,
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
@click.option("--verbose", is_flag=True, help="Also print totals, distributions, lost sharing and every baseline.")
@ranked_search_options
@reading_options
@memory_option
@common_options
def stats(
    paths: tuple[str, ...],
    as_json: bool,
    forecast: dict[str, Any],
    effective_ratio: bool,
    predictions: AnyPath | None,
    segment: str,
    verbose: bool,
    search: PackOptions,
    build: BuildOptions,
    memory: int | None,
) -> None:
    """Show what training on the tree gains, with which capacity, and whether it fits a GPU.

    PATH is a trie directory, a packed directory, or raw rollouts as for build-trie.

    The verdict compares floating-point operations on the tree with one append-only sequence per conversation, as most
    trainers make it, with each trajectory alone, and with one trajectory per turn, in rows of the capacity that pack
    takes by default. The table compares capacities, and the line after it is about memory.
    """
    import json

    refuse_missing(paths)
    from treepack.analysis.stats import stats as measure

    options = StatsOptions(build=build, pack=search, **forecast)
    contrast = None
    if effective_ratio or predictions:
        from treepack.research.contrast import contrast_entries

        contrast = partial(contrast_entries, predictions=predictions, segment=segment)
    with progress_bars() as progress:
        report = measure(paths, options, memory=memory, contrast=contrast, progress=progress)
    if as_json:
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        print_report(report, verbose=verbose, is_model_given=is_given("model"))
