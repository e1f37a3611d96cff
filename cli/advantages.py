"""`treepack advantages`: rewards to advantages, from groups or from the tree, as a column of a trie.

The computation is `treepack.rl.advantages.estimate`. This file reads options, writes the new trie and prints a summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treepack.rl.advantages.advantage_options import ESTIMATORS, AdvantageOptions

from .choices import WordChoice
from .config import common_options
from .option_groups import field_options, option_group
from .output import percent, quoted, show, show_end
from .paths import TRIE, WRITE
from .sections import SectionedCommand
from .sizes import TokenCounts

if TYPE_CHECKING:
    from treepack.files.manifest import Manifest
    from treepack.files.remote.address import AnyPath
    from treepack.rl.advantages.advantage_options import AdvantageOptions
    from treepack.rl.advantages.directory import AdvantagesSummary
    from treepack.trajectory import Float64

_variant_options = option_group(
    "variants",
    field_options(
        AdvantageOptions,
        segment={"metavar": "auto|recorded|turn|node|N"},
        min_depth={"type": click.IntRange(min=0)},
        lam={"name": "lambda"},
        overlong={"type": TokenCounts(), "metavar": "LENGTH,BUFFER"},
        truncated={"metavar": "FIELD|none"},
        reject_equal={"name": "reject-equal/--keep-equal", "type": bool},
    ),
    dict,
)


def _distribution(values: Float64) -> dict[str, float | str]:
    """Summarise the advantages for the printed table."""
    import numpy as np

    if len(values) == 0:
        return {}
    # Quantiles 0, 1/2 and 1 are minimum, median and maximum.
    low, middle, high = np.quantile(values, [0, 0.5, 1]).tolist()
    return {
        "mean": round(float(values.mean()), 12) + 0.0,  # -7.6e-17 and -0.0 are 0
        "standard deviation": float(values.std()),
        "smallest": low,
        "median": middle,
        "largest": high,
        "zero": percent(float((values == 0).mean())),
    }


def _warn_of_skipped(manifest: Manifest, trie: AnyPath) -> None:
    """Print a note if groups lost rollouts when the trie was built: the baseline of such a group may be biased."""
    skipped = manifest.get("skipped")
    if not skipped:
        return
    num_reduced, num_unknown = skipped["num_groups"] - skipped["num_groups_lost"], skipped["num_without_group"]
    if num_reduced:
        click.echo(
            f"note: groups that lost a rollout when {trie} was built: {num_reduced:,}; their baselines are over fewer "
            "rollouts and may be biased (build-trie names skipped rollouts, build-trie --strict refuses them)",
            err=True,
        )
    if num_unknown:
        click.echo(
            f"note: rollouts of unknown groups that were skipped when {trie} was built: {num_unknown:,}; the baselines "
            "of their groups may be biased",
            err=True,
        )


@click.command(cls=SectionedCommand)
@click.argument("trie", type=TRIE)
@click.option(
    "--estimator",
    type=WordChoice(ESTIMATORS),
    required=True,
    help="treepo and the next three use the tree; gae uses the values of treepack critic.",
)
@click.option("--out", type=WRITE, required=True, help="Trie directory to write.")
@_variant_options
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@common_options
def advantages(
    trie: AnyPath,
    estimator: str,
    out: AnyPath,
    variants: dict[str, Any],
    overwrite: bool,
) -> None:
    """Compute advantages from the rewards of a trie's trajectories and write them into a copy of the trie.

    The first four estimators, treepo and tree-grpo give one advantage per trajectory. treerpo, treerl, --per-segment
    and gae give one per trained token. gae also writes the returns and old values that a critic is trained with. A
    group with a missing reward, or with a single rollout to compare, is rejected as a whole and counted. Pack the
    result, and train with --loss grpo or a similar loss.
    """
    from treepack.rl.advantages.advantage_options import AdvantageOptions
    from treepack.rl.advantages.directory import write_advantages

    options = AdvantageOptions(estimator, **variants)
    summary = write_advantages(trie, out, options, overwrite=overwrite)
    show_advantages(trie, summary, options)
    show_end(out, then=f"treepack pack {quoted(out)} --out PACKED")


def show_advantages(trie: AnyPath, summary: AdvantagesSummary, options: AdvantageOptions) -> None:
    """Print the notes on stderr and the summary on stdout."""
    _warn_of_skipped(summary.manifest, trie)
    if summary.replaced:
        click.echo(f"note: {trie} has advantages already; they are replaced", err=True)
    estimates = summary.estimates
    for note in estimates.notes:
        click.echo(f"note: {note}", err=True)
    values, tree = estimates.values, estimates.tree
    # Lines of a tree estimator or of a rejected group are printed only if there are any.
    owner = "trajectory" if estimates.per_token is None else "trained token"
    show(
        {
            "trajectories": summary.num_trajectories,
            **({"rollouts compared": estimates.num_rollouts} if estimates.num_rollouts < len(estimates.kept) else {}),
            "groups compared": estimates.num_groups,
            **{f"groups rejected: {reason}": count for reason, count in estimates.rejected.items()},
            f"trajectories {'left out' if options.rejected == 'drop' else 'given 0'}": summary.num_trajectories
            - len(estimates.kept),
            **({} if tree is None else {"segments": tree.segment, "subgroups": tree.num_subgroups}),
            **({} if options.overlong is None else {"rollouts punished for their length": estimates.num_overlong}),
            **({"rollouts cut off": estimates.num_truncated} if options.estimator == "gae" else {}),
            "advantages": f"{len(values):,}, one per {owner}",
            **{f"advantage, {name}": value for name, value in _distribution(values).items()},
        }
    )
