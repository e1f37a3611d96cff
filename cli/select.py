"""`treepack select`: which queries to roll out next, from the pass rates of all so far; `select update` keeps these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import refuse_output, refuse_suffix, show

if TYPE_CHECKING:
    from treepack.rl.pros.selection import State
    from treepack.trie.trie import Trie


class _Select(click.Group):
    """Takes what is no subcommand's name for the arguments of `nearest`: `treepack select STATE --k K`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        named = args[0] in self.commands
        return super().resolve_command(ctx, args if named else ["nearest", *args])


@click.group(cls=_Select, context_settings={"ignore_unknown_options": True})
def select() -> None:
    """Choose the queries whose pass rate is nearest to 0.5; keep what is known of them.

    \b
    treepack select STATE --k K           short for treepack select nearest STATE --k K
    treepack select update STATE ...      take in new queries and the rewards of rollouts
    """


@select.command()
@click.argument("state", type=click.Path(path_type=Path))
@click.option("--k", type=click.IntRange(min=1), required=True, help="How many queries.")
@click.option("--out", type=click.Path(path_type=Path), help="JSONL file to write; default: standard output.")
@click.option("--mu", type=float, default=0.0, show_default=True, help="Mean of the log-odds of original queries.")
@click.option("--tau", type=float, default=1.6, show_default=True, help="Their standard deviation.")
@click.option(
    "--sigma",
    type=float,
    default=1.0,
    show_default=True,
    help="Standard deviation of the log-odds of augmented queries around their parent's.",
)
@click.option("--sweeps", type=click.IntRange(min=1), default=200, show_default=True, help="Of the Gibbs sampler.")
@click.option(
    "--burn-in", type=click.IntRange(min=0), default=50, show_default=True, help="Sweeps before the first that counts."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the sampler.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Threads; the result is the same."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def nearest(
    state: Path, k: int, out: Path | None, overwrite: bool, mu: float, tau: float, sigma: float, **sampling: Any
) -> None:
    """Estimate the pass rate of every query and write the K nearest to 0.5, nearest first.

    Each line has query_id, parent_id (null for an original query), pass_rate, log_odds, deviation (of the log-odds),
    and tried: the rollouts that the estimate rests on, those forgotten in part counted in part.
    """
    import orjson

    from treepack.files.directory import finished_file
    from treepack.rl.pros import pass_rates, selection

    prior, how = pass_rates.Prior(mu, tau, sigma), pass_rates.Sampling(**sampling)
    if out is not None:
        refuse_suffix(out)
        refuse_output(out, [state], columns={"query_id", "pass_rate", "log_odds", "tried"}, overwrite=overwrite)
    read = selection.read_state(state)
    found = pass_rates.estimate(read.parent, read.passed, read.tried, prior=prior, sampling=how)
    chosen = selection.nearest(found.mean, k, seed=how.seed)
    rate = found.pass_rate
    columns = {
        "query_id": read.query_id.take(chosen).to_pylist(),
        "parent_id": read.parent_id.take(chosen).to_pylist(),
        "pass_rate": rate[chosen].tolist(),
        "log_odds": found.mean[chosen].tolist(),
        "deviation": found.deviation[chosen].tolist(),
        "tried": read.tried[chosen].tolist(),
    }
    lines = [orjson.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    if out is None:
        click.echo(b"\n".join(lines))
        return
    with finished_file(out) as temporary:
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


@select.command()
@click.argument("state", type=click.Path(path_type=Path))
@click.option(
    "--queries",
    type=click.Path(path_type=Path),
    multiple=True,
    help="JSONL or Parquet of queries to add: what treepack augment wrote, or a data set with ids. May be repeated.",
)
@click.option(
    "--rollouts",
    type=click.Path(path_type=Path),
    help="Trie directory of new rollouts; the query of each is its group.",
)
@click.option("--add-groups", is_flag=True, help="Add the groups of --rollouts that the state does not know.")
@click.option(
    "--forgetting",
    type=float,
    default=0.9,
    show_default=True,
    help="Factor on all counts before the rollouts of a training step are added; 1 forgets nothing.",
)
@click.option(
    "--success-above", type=float, default=0.0, show_default=True, help="Rollouts with a greater reward succeeded."
)
def update(
    state: Path,
    queries: tuple[Path, ...],
    rollouts: Path | None,
    add_groups: bool,
    forgetting: float,
    success_above: float,
) -> None:
    """Take new queries and the rewards of new rollouts into STATE, which is made if there is none.

    Queries stay as they are if they are known. Give the rollouts of each training step once.
    """
    import math

    from treepack.errors import TreepackError
    from treepack.rl.pros import selection
    from treepack.trie.files import read_trie

    if not math.isfinite(success_above):
        raise TreepackError(f"success_above is {success_above}; expected a finite reward")
    if not queries and rollouts is None:
        raise click.UsageError("nothing to take in; give --queries, --rollouts or both")
    is_new = not state.exists()
    read = selection.empty_state() if is_new else selection.read_state(state)
    given = [query for path in queries for query in _queries_of(path)]
    trie = None if rollouts is None else read_trie(rollouts)
    groups = [] if trie is None else _groups(trie)
    if add_groups:
        known = {*read.query_id.to_pylist(), *(name for name, _ in given)}
        given += [(name, parent) for name, parent in groups if name not in known]
        parents = {parent for _, parent in given if parent is not None} - known - {name for name, _ in given}
        given += [(parent, None) for parent in sorted(parents)]
    read, added = selection.with_queries(read, [name for name, _ in given], [parent for _, parent in given])
    counts: dict[str, Any] = {}
    if trie is not None:
        names = [name for name, _ in groups]
        read, counts = _counted(read, trie, f"{rollouts}", names, forgetting=forgetting, success_above=success_above)
    selection.write_state(read, state)
    if is_new:
        click.echo(f"note: {state} is new", err=True)
    show(
        {
            "queries": read.num_queries,
            "queries added": added,
            **counts,
            "queries tried": int((read.tried > 0).sum()),
            "training steps": read.num_updates,
        }
    )


def _queries_of(path: Path) -> Iterator[tuple[str, str | None]]:
    """Id and parent of each query in a file: `query_id` or the name of a group, and `parent_group`."""
    from treepack.errors import TreepackError
    from treepack.ingest.readers.fields import GROUPS
    from treepack.ingest.readers.records import read_records

    for record in read_records(str(path)):
        value = record.value
        name = next((value[key] for key in ("query_id", *GROUPS) if value.get(key) is not None), None)
        parent = value.get("parent_group")
        if type(name) not in (str, int) or type(parent) not in (str, int, type(None)):
            raise TreepackError(f"{record.source}: has no query_id; expected it, or a group's name, and parent_group")
        yield str(name), None if parent is None else str(parent)


def _groups(trie: Trie) -> list[tuple[str, str | None]]:
    """The query of each rollout, the group unless marks name an augmented one, and the parent of that."""
    from treepack.rl.pros.augmentation import marks_of

    found: list[tuple[str, str | None]] = [(name, None) for name in trie.trajectories["group_id"].to_pylist()]
    for i, marks in marks_of(trie).items():
        found[i] = marks.query_id, marks.parent_group
    return found


def _counted(
    read: State, trie: Trie, path: str, names: list[str], *, forgetting: float, success_above: float
) -> tuple[State, dict[str, Any]]:
    """The state after the rewards of `trie`, whose rollouts are of the queries `names`, and what to print of it."""
    import numpy as np
    import pyarrow as pa

    from treepack.errors import TreepackError
    from treepack.rl.pros import selection

    query = selection.indices_of(read, pa.array(names, pa.string()))
    if (query < 0).any():
        lacking = names[int((query < 0).argmax())]
        raise TreepackError(
            f"{path}: the state does not know the group {lacking} of its rollouts; add it with --queries, or all that "
            "are new with --add-groups"
        )
    reward = trie.trajectories["reward"].to_numpy()
    usable = np.isfinite(reward)
    if not usable.any():
        raise TreepackError(f"{path}: none of its rollouts has a reward; build the trie from rollouts that do")
    success = reward[usable] > success_above
    read = selection.forget_and_add(read, query[usable], success, step=trie.step_rank[usable], forgetting=forgetting)
    counts = {"rollouts": int(usable.sum()), "rollouts successful": int(success.sum())}
    return read, counts | {"rollouts without a reward": int((~usable).sum())}
