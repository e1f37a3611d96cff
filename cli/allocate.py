"""`treepack allocate`: the number of rollouts of each prompt, and the prefixes of rollouts to continue.

The computation is `treepack.research.trace`. This file reads options, writes the tables and prints a summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .config import common_options
from .output import next_rollouts, percent, quoted, reserve_table, show, show_end
from .paths import READ, TRIE, WRITE
from .sections import SectionedCommand

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath

# Options of both subcommands.
OUT = click.option("--out", type=WRITE, required=True, help="File to write, .jsonl or .parquet.")
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace an existing output.")


@click.group()
def allocate() -> None:
    """Divide a budget of rollouts among the prompts or prefixes whose outcomes are likely to differ (TRACE).

    The input is a predicted chance of success for each prompt or prefix, as treepack values predict writes it.
    """


@allocate.command(cls=SectionedCommand, short_help="Write the number of rollouts of each prompt.")
@click.argument("predictions", type=READ)
@click.option("--budget", type=int, required=True, help="Total rollouts of all prompts.")
@click.option("--max-rollouts", type=click.IntRange(min=2), help="Maximum rollouts of one prompt.")
@OUT
@_OVERWRITE
@common_options
def roots(predictions: AnyPath, budget: int, max_rollouts: int | None, out: AnyPath, overwrite: bool) -> None:
    """Write the number of rollouts of each prompt: none, or at least two.

    PREDICTIONS is JSON lines or Parquet with the group_id of each prompt and its value, the chance that a rollout
    succeeds. The counts maximise the expected number of prompts with both successful and failed rollouts.
    """
    from treepack.research.trace.expansion import refuse_name, root_table, write_prefix_table
    from treepack.research.trace.predictions import read_predictions

    refuse_name(out)
    reserve_table(out, [predictions], columns={"group_id", "value", "num_rollouts", "utility"}, overwrite=overwrite)
    table = root_table(read_predictions(predictions), budget=budget, max_rollouts=max_rollouts)
    write_prefix_table(table, out, overwrite=overwrite)
    count = table["num_rollouts"].to_numpy()
    # A budget is 2 or more, so active is never 0.
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
    show_end(out, then=next_rollouts(out, "--prompts PROMPTS"))


@allocate.command(cls=SectionedCommand, short_help="Write the prefixes of rollouts to continue, and how often.")
@click.argument("trie", type=TRIE)
@click.option("--predictions", type=READ, required=True, help="JSON lines or Parquet of prefix values.")
@click.option("--expand", type=click.IntRange(min=1), required=True, help="Continuations for each rollout of a group.")
@click.option(
    "--segment",
    metavar="turn|recorded|node|N",
    default="turn",
    show_default=True,
    help="End of a prefix; the same values as in treepack advantages.",
)
@OUT
@_OVERWRITE
@common_options
def prefixes(trie: AnyPath, predictions: AnyPath, expand: int, segment: str, out: AnyPath, overwrite: bool) -> None:
    """Write the prefixes of the rollouts in TRIE to continue, and the number of continuations of each.

    The predictions contain group_id, trajectory_id, turn and value for every turn of every rollout except the last
    turn. The value is the chance of success of a rollout that continues after this turn. In each group, the counts
    maximise the expected number of prefixes with a continuation whose outcome differs from the outcome of the rollout.
    """
    from treepack.research.trace.expansion import prefix_table, refuse_name, write_prefix_table
    from treepack.research.trace.predictions import read_predictions
    from treepack.trie.store.trie_files import read_trie

    refuse_name(out)
    reserve_table(
        out, [trie, predictions], columns={"group_id", "turn", "num_continuations", "utility"}, overwrite=overwrite
    )
    predicted = read_predictions(predictions)  # a file that is missing is refused before the trie is read
    read = read_trie(trie)
    table, num_prefixes = prefix_table(read, predicted, expand=expand, segment=segment)
    write_prefix_table(table, out, overwrite=overwrite)
    count = table["num_continuations"].to_numpy()
    # Groups without prefixes have a row without a trajectory: further rollouts of the prompt instead.
    is_prompt = table["trajectory_id"].is_null().to_numpy()
    show(
        {
            "rollouts": read.num_trajectories,
            "prefixes": num_prefixes,
            "prefixes continued": int((~is_prompt).sum()),
            "continuations": int(count[~is_prompt].sum()),
            "groups without prefixes": int(is_prompt.sum()),
            "further rollouts of their prompts": int(count[is_prompt].sum()),
            "expected prefixes that flip": float(table["utility"].drop_null().to_numpy().sum()),
        }
    )
    show_end(out, then=next_rollouts(out, f"--trie {quoted(trie)}"))
