"""`treepack pack`: a trie directory to training rows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from .config import common_options
from .option_groups import refuse_given
from .output import next_training, percent, reserve_directory, say, show_end, show_figures, show_notes
from .paths import RATED_TRIE, READ, WRITE
from .planning import REPLACED_BY_PLAN, pack_options
from .progress import progress_bars
from .ray_options import ray_cluster, ray_option
from .sections import SectionedCommand
from .sizes import memory_option
from .skipped import print_control_tokens, print_many_skipped

if TYPE_CHECKING:
    from treepack.cluster.scheduler import Scheduler
    from treepack.files.manifest import Manifest
    from treepack.files.remote.address import AnyPath
    from treepack.pack.directory import PackSummary
    from treepack.pack.options import PackOptions

_MANY_DROPPED = 0.1  # share of the trajectories


@click.command(cls=SectionedCommand)
@click.argument("trie", type=RATED_TRIE)
@click.option("--out", type=WRITE, required=True, help="Directory to write.")
@pack_options
@click.option(
    "--plan",
    type=READ,
    help="Take the rows from this file instead of planning; docs/format.md describes it.",
)
@click.option("--save-plan", type=WRITE, help="Also write the plan, as --plan reads it.")
@memory_option
@ray_option
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    metavar="N",
    help="Pack N parts of the trie alone, one after the other or with --ray side by side; the rows and their number "
    "may differ a little. With --ray by default 64M tokens each.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--verbose", is_flag=True, help="Also print figures about tiles, bytes and the lower bound.")
@common_options
def pack(
    trie: AnyPath,
    out: AnyPath,
    options: PackOptions,
    plan: AnyPath | None,
    save_plan: AnyPath | None,
    memory: int | None,
    ray: str | None,
    partitions: int | None,
    overwrite: bool,
    verbose: bool,
) -> None:
    """Pack a trie directory into rows of at most CAPACITY tokens.

    A row contains one or more subtrees, and each trajectory is in exactly one row. Prints N_pack (tokens of the rows),
    ERR, the effective reuse ratio 1 - N_pack / N_flat, the gap to a lower bound that holds for every packing, and the
    maximum number of score pairs of a row over the mean; with --verbose also the tiles of 128 x 128 pairs in attention.
    """
    if plan is not None:
        refuse_given(REPLACED_BY_PLAN, "--plan gives the value of {}")
    if ray is not None or partitions is not None:
        summary = _pack_parts(trie, out, options, ray=ray, partitions=partitions, overwrite=overwrite)
    else:
        from treepack.pack.directory import pack_trie

        reserve_directory(out, [trie], overwrite=overwrite)
        with progress_bars() as progress:
            summary = pack_trie(
                trie,
                out,
                options,
                plan=plan,
                save_plan=save_plan,
                overwrite=overwrite,
                memory=memory,
                progress=progress,
            )
    show_packing(summary, is_usual=options.capacity is None and plan is None, verbose=verbose)
    show_end(out, save_plan, then=next_training(out, trie))


def _pack_parts(
    trie: AnyPath, out: AnyPath, options: PackOptions, *, ray: str | None, partitions: int | None, overwrite: bool
) -> PackSummary:
    """Pack parts of the trie in this process or on a Ray cluster.

    Raises:
        UsageError: the user gave an option of packing the trie as a whole.
    """
    unsuitable = ["plan", "save_plan", "memory"]
    with ExitStack() as stack:
        if ray is None:
            refuse_given(unsuitable, "{} has no meaning with --partitions")
            from treepack.cluster.scheduler import LocalScheduler

            scheduler: Scheduler = LocalScheduler()
        else:
            scheduler = stack.enter_context(ray_cluster(ray, workers=options.workers, unsuitable=unsuitable))
        from treepack.cluster.pack import pack_trie_on

        progress = stack.enter_context(progress_bars())
        return pack_trie_on(
            scheduler,
            trie,
            out,
            options,
            num_slices=partitions,
            overwrite=overwrite,
            progress=progress,
        )


def show_packing(summary: PackSummary, *, is_usual: bool, verbose: bool = False, built: Manifest | None = None) -> None:
    """Print the summary of rows that were packed.

    `is_usual` means that the capacity is the default. If the command has printed the manifest of the trie, it is
    `built`, and its figures are left out.
    """
    from treepack.analysis.summary import summary_of_manifest
    from treepack.pack.capacity import NO_TOKEN_WITHIN, TOO_LONG_DROPPED

    manifest, totals = summary.manifest, summary.totals
    before = {} if built is None else built["totals"]
    if built is None:
        print_many_skipped(manifest.get("skipped"))
        say(summary_of_manifest(manifest))
    size = sum(entry["bytes"] for entry in manifest["files"]) / totals["tokens_packed"]
    figures = {name: value for name, value in totals.items() if before.get(name) != value}
    show_figures(figures | {"bytes_per_token": size}, verbose=verbose)
    dropped = sum(summary.counts.get(reason, 0) for reason in (TOO_LONG_DROPPED, NO_TOKEN_WITHIN))
    if dropped >= _MANY_DROPPED * (total := dropped + totals["num_trajectories"]):
        share = f"{dropped:,} of {total:,} trajectories ({percent(dropped / total)})"
        click.echo(f"note: {share} are longer than --capacity and were dropped; give a larger one", err=True)
    show_notes(summary.counts, _packing_notes(summary, is_usual=is_usual))
    if built is None:
        print_control_tokens(manifest.get("control_tokens"))


def _packing_notes(summary: PackSummary, *, is_usual: bool) -> list[str]:
    """Return notes on the capacity, the cost of partitions, and training steps, which `train --mix` refuses."""
    from treepack.pack.files import training_steps

    manifest = summary.manifest
    usual = "the usual capacity that every trajectory fits; treepack stats compares others"
    notes = [f"rows of {manifest['capacity']:,} tokens: {usual}"] if is_usual else []
    if partitions := manifest["options"].get("partitions"):
        repeated = manifest["totals"]["repeated_tokens"]
        notes.append(f"{partitions:,} partitions, which repeat {repeated:,} tokens of prefixes that they share")
    if steps := training_steps(summary.path, manifest):
        counted = "one training step" if len(steps) == 1 else f"{len(steps):,} training steps"
        notes.append(f"rows of {counted}, which train keeps in order, so it refuses --mix for them")
    return notes
