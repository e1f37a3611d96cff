"""`treepack allocate`: which prompts to roll out how often, and which prefixes of rollouts to continue."""

from __future__ import annotations

from pathlib import Path

import click

from .output import percent, refuse_output, show

OUT = click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write, .jsonl or .parquet.")
OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace an existing output.")


@click.group()
def allocate() -> None:
    """Spend a budget of rollouts where outcomes will differ (TRACE), from predicted chances of success."""


@allocate.command()
@click.argument("predictions", type=click.Path(path_type=Path))
@click.option("--budget", type=int, required=True, help="Rollouts of all prompts together.")
@click.option("--max-rollouts", type=click.IntRange(min=2), help="Most rollouts of one prompt.")
@OUT
@OVERWRITE
def roots(predictions: Path, budget: int, max_rollouts: int | None, out: Path, overwrite: bool) -> None:
    """Write how many rollouts each prompt gets: none, or at least two.

    PREDICTIONS is JSON lines or Parquet: group_id and value, the chance that a rollout succeeds, of each prompt. The
    counts maximise the expected number of prompts whose rollouts both succeed and fail.
    """
    from treepack.rl.trace.expansion import refuse_name, root_table, write_table
    from treepack.rl.trace.predictions import read_predictions

    refuse_name(out)
    refuse_output(out, [predictions], columns={"group_id", "value", "num_rollouts", "utility"}, overwrite=overwrite)
    table = root_table(read_predictions(predictions), budget=budget, max_rollouts=max_rollouts)
    write_table(table, out)
    count = table["num_rollouts"].to_numpy()
    active = int((count > 0).sum())
    mixed = float(table["utility"].to_numpy().sum())
    show(
        {
            "prompts": len(count),
            "rollouts": int(count.sum()),
            "prompts rolled out": active,
            "most rollouts of one": int(count.max()),
            "expected prompts of mixed outcomes": mixed,
            "their share of those rolled out": percent(mixed / active),
        }
    )


@allocate.command()
@click.argument("trie", type=click.Path(path_type=Path))
@click.option(
    "--predictions", type=click.Path(path_type=Path), required=True, help="JSON lines or Parquet of prefix values."
)
@click.option(
    "--expand", type=click.IntRange(min=1), required=True, help="Continuations of a group for each of its rollouts."
)
@click.option(
    "--segment",
    metavar="turn|recorded|node|N",
    default="turn",
    show_default=True,
    help="After what a prefix ends, as for treepack advantages.",
)
@OUT
@OVERWRITE
def prefixes(trie: Path, predictions: Path, expand: int, segment: str, out: Path, overwrite: bool) -> None:
    """Write which prefixes of the rollouts in TRIE to continue, and how often.

    The predictions name group_id, trajectory_id, turn and value, the chance that a rollout from there on succeeds, for
    every turn but the last of every rollout. The counts maximise, in each group, the expected number of prefixes from
    where a continuation ends differently than the rollout did.
    """
    from treepack.files import schema
    from treepack.files.manifest import read_manifest
    from treepack.rl.trace.expansion import prefix_table, refuse_name, write_table
    from treepack.rl.trace.predictions import read_predictions
    from treepack.trie.files import read_trie

    refuse_name(out)
    refuse_output(
        out, [trie, predictions], columns={"group_id", "turn", "num_continuations", "utility"}, overwrite=overwrite
    )
    read_manifest(trie, schema.TRIE_FORMAT)
    read = read_trie(trie)
    table, num_prefixes = prefix_table(read, read_predictions(predictions), expand=expand, segment=segment)
    write_table(table, out)
    count = table["num_continuations"].to_numpy()
    again = table["trajectory_id"].is_null().to_numpy()
    show(
        {
            "rollouts": read.num_trajectories,
            "prefixes": num_prefixes,
            "prefixes continued": int((~again).sum()),
            "continuations": int(count[~again].sum()),
            "groups without prefixes": int(again.sum()),
            "further rollouts of their prompts": int(count[again].sum()),
            "expected prefixes that flip": float(table["utility"].drop_null().to_numpy().sum()),
        }
    )
