"""`treepack advantages`: rewards to advantages, from groups or from the tree, as a column of a trie.

The computation is `treepack.rl.advantages.estimate`. This file reads options, writes the new trie and prints a summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .output import percent, show
from .paths import READ, WRITE

if TYPE_CHECKING:
    from treepack.files.manifest import Manifest
    from treepack.files.remote.address import AnyPath
    from treepack.rl.advantages.directory import AdvantagesSummary
    from treepack.rl.advantages.estimate import AdvantageOptions
    from treepack.trajectory import Float64

# A copy of the library's tuple, because a help page must not import numpy; a test compares the two.
ESTIMATORS = ("grpo", "dr-grpo", "rloo", "reinforce++", "treepo", "treerpo", "tree-grpo", "treerl", "gae")


def _distribution(values: Float64) -> dict[str, float | str]:
    """Summarise the advantages for the printed table."""
    import numpy as np

    if len(values) == 0:
        return {}
    # Quantiles 0, 1/2 and 1 are minimum, median and maximum.
    low, middle, high = np.quantile(values, [0, 0.5, 1]).tolist()
    return {
        "mean": float(values.mean()),
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


@click.command()
@click.argument("trie", type=READ)
@click.option(
    "--estimator",
    type=click.Choice(ESTIMATORS),
    required=True,
    help="treepo and the next three use the tree; gae uses the values of treepack critic.",
)
@click.option("--out", type=WRITE, required=True, help="Trie directory to write.")
@click.option(
    "--segment",
    metavar="auto|recorded|turn|node|N",
    default="auto",
    show_default=True,
    help="Where the nodes of the tree start. recorded: token offsets in the metadata; turn: runs of trained tokens; "
    "node: branches of the trie; N: every N tokens; auto: recorded if there are offsets, else node. Within the prompt "
    "of a continuation, turn and N cut as in the rollout that it continues.",
)
@click.option(
    "--min-depth",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of tokens after the root in which no segment starts.",
)
@click.option(
    "--std",
    type=click.Choice(["group", "batch"]),
    default="group",
    show_default=True,
    help="grpo, treepo: standard deviation over the group, or over all groups of the training step.",
)
@click.option("--size-weighted", is_flag=True, help="treepo: weight subgroups by their size (equation 6).")
@click.option("--reject-subgroups", is_flag=True, help="treepo: omit subgroups of equal rewards (equation 7).")
@click.option("--without-root", is_flag=True, help="treepo: omit the group itself.")
@click.option("--per-segment", is_flag=True, help="tree-grpo: compare each segment with its siblings.")
@click.option(
    "--leaf-scaled", is_flag=True, help="treerl: divide by the square root of a segment's number of trajectories."
)
@click.option(
    "--edges",
    is_flag=True,
    help="treerpo, treerl, tree-grpo --per-segment: also write the factors that train --denominator edge needs.",
)
@click.option(
    "--values",
    type=click.Choice(["column", "zero"]),
    default="column",
    show_default=True,
    help="gae: values of treepack critic, or 0 everywhere, for the returns that a first critic is trained with.",
)
@click.option("--gamma", type=float, default=1.0, show_default=True, help="gae: discount per trained token.")
@click.option(
    "--lambda",
    "lam",
    type=float,
    default=0.95,
    show_default=True,
    help="gae: share of later differences; 1 gives the discounted reward minus the value.",
)
@click.option(
    "--whiten",
    type=click.Choice(["none", "group", "batch"]),
    default="none",
    show_default=True,
    help="gae: standardise the advantages, not the returns, over the group or the training step.",
)
@click.option(
    "--truncated",
    metavar="FIELD|none",
    default="finish",
    show_default=True,
    help="gae: field of a record or its metadata that is true, or the name of a limit such as length, if a limit cut "
    "off the rollout; the value after its last token is then added.",
)
@click.option(
    "--reject-equal/--keep-equal",
    default=None,
    help="Reject or keep groups whose rewards are all equal; default: treepo rejects them, the others give them 0.",
)
@click.option(
    "--rejected",
    type=click.Choice(["drop", "zero"]),
    default="drop",
    show_default=True,
    help="Drop the trajectories of rejected groups, or keep them with an advantage of 0.",
)
@click.option(
    "--leaf-weights",
    is_flag=True,
    help="Weigh means and deviations by the leaf weights of sampled trees, which removes their bias.",
)
@click.option(
    "--fallback-leaves", is_flag=True, help="With --leaf-weights: count the leaves that a fallback added, too."
)
@click.option("--epsilon", type=float, default=1e-6, show_default=True, help="Added to standard deviations.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def advantages(
    trie: AnyPath,
    estimator: str,
    out: AnyPath,
    segment: str,
    min_depth: int,
    std: str,
    size_weighted: bool,
    reject_subgroups: bool,
    without_root: bool,
    per_segment: bool,
    leaf_scaled: bool,
    edges: bool,
    values: str,
    gamma: float,
    lam: float,
    whiten: str,
    truncated: str,
    reject_equal: bool | None,
    rejected: str,
    leaf_weights: bool,
    fallback_leaves: bool,
    epsilon: float,
    overwrite: bool,
) -> None:
    """Compute advantages from the rewards of a trie's trajectories and write them into a copy of the trie.

    The first four estimators, treepo and tree-grpo give one advantage per trajectory. treerpo, treerl, --per-segment
    and gae give one per trained token. gae also writes the returns and old values that a critic is trained with. A
    group with a missing reward, or with a single rollout to compare, is rejected as a whole and counted. Pack the
    result, and train with --loss grpo or a similar loss.
    """
    from treepack.rl.advantages.directory import write_advantages
    from treepack.rl.advantages.estimate import AdvantageOptions

    options = AdvantageOptions(
        estimator,
        segment=segment,
        min_depth=min_depth,
        std=std,
        size_weighted=size_weighted,
        reject_subgroups=reject_subgroups,
        without_root=without_root,
        per_segment=per_segment,
        leaf_scaled=leaf_scaled,
        edges=edges,
        values=values,
        gamma=gamma,
        lam=lam,
        whiten=whiten,
        truncated=truncated,
        reject_equal=reject_equal,
        rejected=rejected,
        epsilon=epsilon,
        leaf_weights=leaf_weights,
        fallback_leaves=fallback_leaves,
    )
    summary = write_advantages(trie, out, options, overwrite=overwrite)
    show_advantages(trie, summary, options)


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
            **({"rollouts cut off": estimates.num_truncated} if options.estimator == "gae" else {}),
            "advantages": f"{len(values):,}, one per {owner}",
            **{f"advantage, {name}": value for name, value in _distribution(values).items()},
        }
    )
