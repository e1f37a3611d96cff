"""`treepack build-trie`: raw rollouts to a directory of prefix tries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from treepack.ingest.options import BuildOptions

from .config import common_options
from .option_groups import as_usage, field_options, option_group
from .output import quoted, say, show_end, show_figures, show_notes
from .paths import WRITE, refuse_missing
from .progress import progress_bars
from .ray_options import ray_cluster, ray_option
from .reading import reading_options
from .sections import SectionedCommand
from .sizes import memory_option
from .skipped import print_control_tokens, print_many_skipped, print_skipped

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.trie.directory import TrieSummary


_route_options = option_group("routes", field_options(BuildOptions, "keep_routes route_conflicts"), dict)


@click.command(cls=SectionedCommand)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option("--out", type=WRITE, required=True, help="Directory to write.")
@reading_options
@_route_options
@memory_option
@ray_option
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@common_options
def build_trie(
    inputs: tuple[str, ...],
    out: AnyPath,
    build: BuildOptions,
    routes: dict[str, Any],
    memory: int | None,
    ray: str | None,
    overwrite: bool,
) -> None:
    """Read rollouts and write their prefix tries.

    INPUT is a file, a directory, a glob, or - for standard input; .gz and .zst are read directly. A trie that this
    command wrote counts as the rollouts that it has, so a trie can grow without them. Prints how many
    conversations were read, how many trajectories they became and why, the rollouts that were skipped, N_flat (tokens
    of all trajectories), N_tree (tokens of the tries) and POR, the potential overlap ratio 1 - N_tree / N_flat.
    """
    build = as_usage(replace)(build, **routes)
    refuse_missing(inputs)
    if ray is None:
        from treepack.trie.directory import build_trie_directory

        with progress_bars() as progress:
            summary = build_trie_directory(inputs, out, build, overwrite=overwrite, memory=memory, progress=progress)
    else:
        if "-" in inputs:
            raise click.UsageError("--ray reads files on many machines, so standard input (-) cannot be its input")
        from treepack.cluster.build import build_trie_on

        with ray_cluster(ray, workers=build.workers, unsuitable=["memory"]) as scheduler, progress_bars() as progress:
            summary = build_trie_on(scheduler, inputs, out, build, overwrite=overwrite, progress=progress)
    show_build(summary)
    show_end(out, then=f"treepack pack {quoted(out)} --out PACKED")


def show_build(summary: TrieSummary) -> None:
    """Print the summary of a trie that was built."""
    from treepack.analysis.summary import summary_of_manifest, summary_of_routes

    manifest, totals = summary.manifest, summary.totals
    skipped = manifest.get("skipped")
    print_many_skipped(skipped)
    say(summary_of_manifest(manifest))
    if "routes" in manifest:
        say(summary_of_routes(manifest["routes"]))
    speed = {"num_files": summary.num_files, "tokens_per_second": totals["tokens_flat"] / summary.seconds}
    show_figures(totals | speed, verbose=False)
    show_notes(summary.counts)
    print_skipped(skipped)
    print_control_tokens(manifest.get("control_tokens"))
