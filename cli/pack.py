"""`treepack pack`: a trie directory to training rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from .output import percent, show, text
from .planning import REPLACED_BY_PLAN, pack_options
from .progress import progress_bars, quiet_option

if TYPE_CHECKING:
    from treepack.pack.directory import PackSummary
    from treepack.pack.options import PackOptions

WAITING = "group_pairs_max_over_mean"


@click.command()
@click.argument("trie", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@pack_options
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    help="Take the rows from this file instead of planning; docs/format.md describes it.",
)
@click.option("--save-plan", type=click.Path(path_type=Path), help="Also write the plan, as --plan reads it.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@quiet_option
def pack(
    trie: Path, out: Path, options: PackOptions, plan: Path | None, save_plan: Path | None, overwrite: bool
) -> None:
    """Pack a trie directory into rows of at most CAPACITY tokens.

    A row contains one or more subtrees, and each trajectory is in exactly one row. Prints N_pack (tokens of the rows),
    ERR, the effective reuse ratio 1 - N_pack / N_flat, the gap to a lower bound that holds for every packing, the
    maximum number of score pairs of a row over the mean, and the partial tiles of 128 x 128 pairs in the attention.
    """
    from treepack.pack.directory import pack_trie

    if plan is not None:
        _refuse_replaced()
    with progress_bars() as progress:
        summary = pack_trie(trie, out, options, plan=plan, save_plan=save_plan, overwrite=overwrite, progress=progress)
    show_packing(summary)


def _refuse_replaced() -> None:
    """Refuse options whose values the plan file gives.

    Raises:
        UsageError: naming the option.
    """
    context = click.get_current_context()
    for name in REPLACED_BY_PLAN:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--plan gives the value of --{name.replace('_', '-')}; leave one of them out")


def show_packing(summary: PackSummary) -> None:
    """Print the summary of rows that were packed."""
    totals = summary.totals
    ranks = {"longest of each group": f"{text(totals[WAITING])} times the mean"} if WAITING in totals else {}
    show(
        {
            "trajectories": totals["num_trajectories"],
            **summary.counts,
            "rows": totals["num_rows"],
            "N_flat": totals["tokens_flat"],
            "N_tree": totals["tokens_tree"],
            "N_pack": totals["tokens_packed"],
            "POR": percent(totals["por"]),
            "ERR": percent(totals["err"]),
            "fill": percent(totals["fill"]),
            "gap to lower bound": f"at most {percent(totals['gap'])}",
            "pairs of a row": f"at most {text(totals['pairs_max_over_mean'])} times the mean",
            **ranks,
            "partial tiles": f"{text(totals['tiles_partial'])}, unordered {text(totals['tiles_partial_unordered'])}",
            "bytes per token": sum(entry["bytes"] for entry in summary.manifest["files"]) / totals["tokens_packed"],
        }
    )
