"""`treepack select`: the queries to roll out next, chosen by pass rate; `select update` maintains the counts.

The state and the choice are `treepack.research.pros.selection`, the estimate is `treepack.research.pros.pass_rates`.
This file reads options and files, and prints a summary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from treepack.research.pros.options import GibbsLength, OddsPrior

from .config import common_options
from .option_groups import field_options, option_group
from .output import lock_until_end, next_rollouts, quoted, refuse_suffix, reserve_table, show, show_end
from .paths import READ, TRIE, WRITE
from .sections import SectionedCommand

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath
    from treepack.research.pros.selection import QueryCounts
    from treepack.trie.trie import Trie


class _Select(click.Group):
    """A group that runs `nearest` if the first argument is not a subcommand: `treepack select STATE --k K`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_subcommand = args[0] in self.commands
        return super().resolve_command(ctx, args if is_subcommand else ["nearest", *args])


# Options of nearest, such as --k, are unknown to the group: it must pass them on instead of failing.
@click.group(cls=_Select, context_settings={"ignore_unknown_options": True})
def select() -> None:
    """Choose the queries whose pass rate is nearest to 0.5, and maintain their counts.

    \b
    treepack select STATE --k K           short for treepack select nearest STATE --k K
    treepack select update STATE ...      add new queries and the rewards of rollouts
    """


@select.command(cls=SectionedCommand, short_help="Write the K queries whose pass rate is nearest to 0.5.")
@click.argument("state", type=READ)
@click.option("--k", type=click.IntRange(min=1), required=True, help="Number of queries.")
@click.option("--out", type=WRITE, help="JSONL file to write; default: standard output.")
@option_group("prior", field_options(OddsPrior), OddsPrior)
@option_group("sampling", field_options(GibbsLength), GibbsLength)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@common_options
def nearest(
    state: AnyPath, k: int, out: AnyPath | None, prior: OddsPrior, sampling: GibbsLength, overwrite: bool
) -> None:
    """Estimate the pass rate of every query and write the K nearest to 0.5, nearest first.

    Each line has query_id, parent_id (null for an original query), pass_rate, log_odds, deviation (of the log-odds)
    and tried, the number of rollouts that the estimate uses; forgotten rollouts count as fractions.
    """
    import orjson

    from treepack.files.directory import finished_file
    from treepack.research.pros import pass_rates, selection

    if out is not None:
        refuse_suffix(out)
        reserve_table(out, [state], columns={"query_id", "pass_rate", "log_odds", "tried"}, overwrite=overwrite)
    read = selection.read_state(state)
    estimate = pass_rates.estimate(read.parent, read.passed, read.tried, prior=prior, sampling=sampling)
    chosen = selection.nearest(estimate.mean, k, seed=sampling.seed)
    rate = estimate.pass_rate
    columns = {
        "query_id": read.query_id.take(chosen).to_pylist(),
        "parent_id": read.parent_id.take(chosen).to_pylist(),
        "pass_rate": rate[chosen].tolist(),
        "log_odds": estimate.mean[chosen].tolist(),
        "deviation": estimate.deviation[chosen].tolist(),
        "tried": read.tried[chosen].tolist(),
    }
    # One JSON object per query, with keys in the order of `columns`.
    lines = [orjson.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    if out is None:
        click.echo(b"\n".join(lines))  # echo adds the last newline
        return
    with finished_file(out, overwrite=overwrite) as temporary:
        temporary.write_bytes(b"".join(line + b"\n" for line in lines))
    show(
        {
            "queries": read.num_queries,
            "queries tried": int((read.tried > 0).sum()),
            "selected": k,
            "selected, augmented": sum(parent is not None for parent in columns["parent_id"]),
            "pass rate, smallest": float(rate[chosen].min()),
            "pass rate, largest": float(rate[chosen].max()),
        }
    )
    show_end(out, then=next_rollouts(out, "--prompts PROMPTS"))


@select.command(cls=SectionedCommand)
@click.argument("state", type=READ)
@click.option(
    "--queries",
    type=READ,
    multiple=True,
    help="JSONL or Parquet of queries to add: an output of treepack augment, or a data set with ids. May be repeated.",
)
@click.option(
    "--rollouts",
    type=TRIE,
    help="Trie directory of new rollouts; the query of each is its group.",
)
@click.option(
    "--step",
    type=int,
    metavar="STEP",
    help="Training step of --rollouts; a step that STATE has counted already changes nothing.",
)
@click.option("--add-groups", is_flag=True, help="Add the groups of --rollouts that are not in the state.")
@click.option(
    "--forgetting",
    type=float,
    default=0.9,
    show_default=True,
    help="Factor on all counts before the rollouts of a training step are added; 1 forgets nothing.",
)
@click.option(
    "--success-above", type=float, default=0.0, show_default=True, help="Rollouts with a higher reward are successful."
)
@common_options
def update(
    state: AnyPath,
    queries: tuple[AnyPath, ...],
    rollouts: AnyPath | None,
    step: int | None,
    add_groups: bool,
    forgetting: float,
    success_above: float,
) -> None:
    """Add new queries and the rewards of new rollouts to STATE. A missing STATE is created.

    Queries that are already in the state do not change. With --step, a second call with the same training step changes
    nothing, so a command that was interrupted can be repeated; without it, give the rollouts of each training step only
    once. The leaves of a sampled tree count by their leaf weights, and together as their effective number of rollouts.
    """
    import math
    from dataclasses import replace

    from treepack.errors import TreepackError
    from treepack.files.directory import exists, refuse_inside
    from treepack.research.pros import selection
    from treepack.trie.store.trie_files import read_trie

    if not math.isfinite(success_above):
        raise TreepackError(f"success_above is {success_above}; expected a finite reward")
    if not queries and rollouts is None:
        raise click.UsageError("nothing to add; give --queries, --rollouts or both")
    if step is not None and rollouts is None:
        raise click.UsageError("--step is the training step of --rollouts; give both, or neither")
    refuse_inside(state, option="STATE")
    lock_until_end(state)  # of two updates at once, one would lose the counts of the other
    # Everything is read and checked before write_state, so a failed update leaves the state as it was.
    is_new = not exists(state)
    read = selection.empty_state() if is_new else selection.read_state(state)
    if step is not None and step in read.steps:
        click.echo(f"note: {state} has counted the training step {step} already, so it does not change", err=True)
        show(_figures(read, 0, {}))
        return
    added = [query for path in queries for query in _queries_of(path)]
    trie = None if rollouts is None else read_trie(rollouts)
    groups = [] if trie is None else _groups(trie)
    if add_groups:
        added = _with_groups(added, groups, known={*read.query_id.to_pylist(), *(name for name, _ in added)})
    read, num_added = selection.with_queries(read, [name for name, _ in added], [parent for _, parent in added])
    counts: dict[str, Any] = {}
    if trie is not None:
        if step is not None:
            _refuse_other_steps(trie, step, f"{rollouts}")
            read = replace(read, steps=tuple(sorted([*read.steps, step])))
        names = [name for name, _ in groups]
        read, counts = _count_rollouts(
            read, trie, f"{rollouts}", names, forgetting=forgetting, success_above=success_above
        )
    selection.write_state(read, state)
    if is_new:
        click.echo(f"note: {state} is new", err=True)
    show(_figures(read, num_added, counts))
    show_end(state, then=f"treepack select {quoted(state)} --k K --out QUERIES.jsonl")


def _figures(state: QueryCounts, num_added: int, counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "queries": state.num_queries,
        "queries added": num_added,
        **counts,
        "queries tried": int((state.tried > 0).sum()),
        "training steps": state.num_updates,
    }


def _refuse_other_steps(trie: Trie, step: int, path: str) -> None:
    """Refuse rollouts that record another training step than `step`.

    Raises:
        TreepackError: naming the steps that they record.
    """
    from treepack.errors import TreepackError

    known = sorted(trie.trajectories["step"].drop_null().unique().to_pylist())
    if known not in ([], [step]):
        listed = ", ".join(map(str, known[:5])) + (", ..." if len(known) > 5 else "")
        raise TreepackError(
            f"{path}: its rollouts belong to the training step {listed} and --step is {step}; give the trie of one "
            "step, and its number"
        )


def _queries_of(path: AnyPath) -> Iterator[tuple[str, str | None]]:
    """Yield id and parent of each query in a file: `query_id` or the name of a group, and `parent_group`.

    Raises:
        TreepackError: an unreadable file, or a record without an id.
    """
    from treepack.errors import TreepackError
    from treepack.files.input_files.record_files import read_records
    from treepack.ingest.readers.fields.rollout_facts import GROUPS

    for record in read_records(str(path)):
        # Data sets often number their tasks; the id of a query is a string.
        value = record.value
        name = next((value[key] for key in ("query_id", *GROUPS) if value.get(key) is not None), None)
        parent = value.get("parent_group")
        if type(name) not in (str, int) or type(parent) not in (str, int, type(None)):
            raise TreepackError(f"{record.source}: has no query_id; expected it, or a group's name, and parent_group")
        yield str(name), None if parent is None else str(parent)


def _groups(trie: Trie) -> list[tuple[str, str | None]]:
    """Return query and parent of each rollout: its group without a parent, unless it names an augmented query."""
    from treepack.research.pros.augmentation import marks_of

    queries: list[tuple[str, str | None]] = [(name, None) for name in trie.trajectories["group_id"].to_pylist()]
    # Rollouts of augmented queries have the id of the query and of its parent among their fields.
    for i, marks in marks_of(trie).items():
        queries[i] = marks.query_id, marks.parent_group
    return queries


def _with_groups(
    added: list[tuple[str, str | None]], groups: list[tuple[str, str | None]], *, known: set[str]
) -> list[tuple[str, str | None]]:
    """Return the queries `added`, those of `groups` that are not `known`, and their parents."""
    added = [*added, *((name, parent) for name, parent in groups if name not in known)]
    # A parent without rollouts in this trie is an original query that was not added yet.
    parents = {parent for _, parent in added if parent is not None} - known - {name for name, _ in added}
    return [*added, *((parent, None) for parent in sorted(parents))]


def _count_rollouts(
    read: QueryCounts, trie: Trie, path: str, names: list[str], *, forgetting: float, success_above: float
) -> tuple[QueryCounts, dict[str, Any]]:
    """Count the rewards of `trie`, whose rollouts belong to the queries `names`. Return the state and a summary.

    Raises:
        TreepackError: a query that is not in the state, or no rollout with a reward.
    """
    import numpy as np
    import pyarrow as pa

    from treepack.errors import TreepackError
    from treepack.research.pros import selection
    from treepack.rl.group_tree import group_codes
    from treepack.rl.leaf_weights import leaf_weights
    from treepack.rl.rollouts import refuse_split, rollouts_of

    query = selection.indices_of(read, pa.array(names, pa.string()))
    if (query < 0).any():
        missing = names[int((query < 0).argmax())]
        raise TreepackError(
            f"{path}: the group {missing} of its rollouts is not in the state; add it with --queries, or add all new "
            "groups with --add-groups"
        )
    reward = trie.trajectories["reward"].to_numpy()
    # Count the first trajectory of each rollout, because all of them have the same reward.
    rollouts = rollouts_of(trie)
    is_first = np.zeros(trie.num_trajectories, np.bool_)
    is_first[rollouts.first] = True
    usable = np.isfinite(reward) & is_first
    weights, group = leaf_weights(trie), group_codes(trie)
    if not usable.any():
        raise TreepackError(f"{path}: none of its rollouts has a reward; build the trie from rollouts that do")
    success = reward[usable] > success_above
    weight = None
    if weights is not None:
        refuse_split(trie, what="leaf weights need", remedy="build the trie from rollouts without leaf weights")
        owner = np.flatnonzero(usable)
        weight = selection.effective_counts(weights.of_pairs(owner, group[owner]), group[owner])
    read = selection.forget_and_add(
        read, query[usable], success, step=trie.step_rank[usable], weight=weight, forgetting=forgetting
    )
    # A rollout without a reward is not a failure: it has a count of its own and changes no pass rate.
    counts: dict[str, Any] = {"rollouts": int(usable.sum()), "rollouts successful": int(success.sum())}
    if weight is not None:
        counts["effective rollouts"] = float(weight.sum())
    return read, counts | {"rollouts without a reward": int((is_first & ~usable).sum())}
